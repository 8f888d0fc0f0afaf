"""Metrics of the training loop: averages, input wait, score."""

import contextlib

import numpy as np
import pytest
from program_cases import metrics_of

from train.errors import TrainingError
from train.output.logged import input_wait, throughput
from train.run.metrics import Meter, score_of
from train.run.run_folder import RunFolder
from train.run.setup import setup


class Late(np.ndarray):
    """A metric of a step that runs until somebody waits for it."""

    done = False

    def is_ready(self):
        return self.done

    def block_until_ready(self):
        self.done = True
        return self


def steps(meter, count):
    made = [np.ones(()).view(Late) for _ in range(count)]
    for loss in made:
        meter.add({}, {"loss": loss})
    return made


def take(meter, metrics, batch=()):
    meter.next_batch(iter([{}]))
    values = {name: np.array(value).view(Late) for name, value in metrics.items()}
    for value in values.values():
        value.done = True
    meter.add(dict(batch), values)


@pytest.fixture(autouse=True)
def steps_end_at(monkeypatch):
    """``steps_end_at(time)``: what is noted as the end of a step that runs while a batch comes."""

    def set_end(time):
        monkeypatch.setattr("train.run.metrics.idle_since", lambda metrics: time)

    set_end(0.0)
    return set_end


def test_the_loop_is_one_step_ahead_of_the_device():
    meter = Meter(batch_size=8)
    seen = []

    def batches():
        made = []
        while True:
            seen.append([loss.done for loss in made])
            made += steps(meter, 1)
            yield {"step": len(made)}

    source = batches()
    assert [meter.next_batch(source)["step"] for _ in range(4)] == [1, 2, 3, 4]
    assert seen == [[], [False], [True, False], [True, True, False]]


def test_a_slow_step_is_not_a_wait_for_a_batch():
    meter = Meter(batch_size=8)
    losses = steps(meter, 2)
    done = []

    @contextlib.contextmanager
    def waiting():
        done.append(losses[0].done)
        yield

    meter.next_batch(iter([{}]), waiting())
    assert done == [True]


@pytest.mark.parametrize("at_work", [True, False])
def test_input_wait_counts_only_while_the_device_is_idle(at_work):
    meter = Meter(batch_size=8)
    (last,) = steps(meter, 1)
    last.done = not at_work
    meter.next_batch(iter([{}]))
    assert (meter.means(1)["input_wait"] == 0) == at_work


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"loss": 2.0}, -2.0),
        ({"loss": 2.0, "accuracy": 0.25}, 0.25),
        ({"loss": 2.0, "accuracy": 0.25, "mean_iou": 0.5}, 0.5),
        ({"loss": float("nan")}, None),
        ({"loss": float("inf")}, None),
    ],
)
def test_the_score_is_mean_iou_else_accuracy_else_minus_loss(metrics, expected):
    assert score_of(metrics) == expected


def test_a_private_run_ends_for_its_noisy_gradient_alone():
    meter = Meter(batch_size=8, private=True)
    meter.add({}, {"loss": np.float32("nan"), "grad_norm": np.float32(1)})
    meter.check(2)
    meter.add({}, {"loss": np.float32(1), "grad_norm": np.float32("nan")})
    with pytest.raises(TrainingError, match="the gradient norm is nan at step 3"):
        meter.check(3)


STEP = {name: np.float32(value) for name, value in {"loss": 1, "grad_norm": 2, "clip": 3}.items()}


def test_metrics_of_private_training_examples_are_marked():
    meter = Meter(batch_size=8, private=True)
    take(meter, STEP)
    means = meter.means(1)
    values = means["not_private/loss"], means["train/grad_norm"], means["train/clip"]
    assert values == (1, 2, 3)
    assert "train/loss" not in means


def test_release_only_ignores_metrics_of_training_examples():
    meter = Meter(batch_size=8, private=True, release_only=True)
    take(meter, STEP | {"loss": np.float32("nan")})  # an error would depend on the examples
    times = {"examples_per_second", "input_wait"}
    assert meter.means(1).keys() == {"train/grad_norm", "train/clip"} | times


def test_a_pause_does_not_count_as_time(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("train.run.metrics.time.perf_counter", lambda: float(next(clock)))
    meter = Meter(batch_size=8)  # starts at 0
    with meter.paused():  # from 1 to 2
        pass
    take(meter, {"loss": np.float32(1)})  # from 3 to 4
    assert meter.means(1)["examples_per_second"] == 8 / (5 - 1)


def test_averages_over_a_window(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("train.run.metrics.time.perf_counter", lambda: float(next(clock)))
    meter = Meter(batch_size=8)  # starts at 0
    for loss in (1.0, 3.0):
        noise = {"grad_sq": 2 * loss, "grad_var": 6.0, "grad_sq/a": 0.0, "grad_var/a": 1.0}
        take(meter, {name: np.float32(x) for name, x in (noise | {"loss": loss}).items()})  # 1 to 4
    means = meter.means(2)  # ends at 5
    assert (means["train/loss"], means["examples_per_second"]) == (2, 16 / 5)
    assert means["train/noise_scale"] == 6 / 4  # of the means
    assert "train/noise_scale/a" not in means


def test_throughput_counts_neither_padding_nor_skipped_steps(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("train.run.metrics.time.perf_counter", lambda: float(next(clock)))
    weight = {"weight": np.array([0.5, 0.0, 1.0])}  # a part of a row, padding, a row
    for private, trained in ((False, 2), (True, 3)):  # a private batch has a secret size
        clock = iter(range(100))
        meter = Meter(batch_size=3, private=private)
        take(meter, {"loss": np.float32(1), "skipped": np.False_}, weight)
        take(meter, {"loss": np.float32(1), "skipped": np.True_}, weight)
        assert meter.means(2)["examples_per_second"] == trained / 5


def test_throughput_of_a_run_is_a_mean_over_its_steps_however_often_it_was_resumed():
    lines = [
        {"step": 10, "examples_per_second": 10.0, "input_wait": 0.5},  # 1 s with one example a step
        {"step": 40, "examples_per_second": 60.0, "input_wait": 0.2},  # 0.5 s
        {"step": 50, "examples_per_second": 0.0, "input_wait": 1.0},  # all steps were skipped
        {"step": 60, "examples_per_second": 20.0, "input_wait": 0.0},  # 0.5 s
    ]
    assert throughput(lines) == 50 / 2
    assert input_wait(lines) == (0.5 * 1 + 0.2 * 0.5) / 2
    assert throughput([]) is input_wait([]) is None


def test_input_wait_is_a_fraction_of_the_time(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("train.run.metrics.time.perf_counter", lambda: float(next(clock)))
    meter = Meter(batch_size=8)  # starts at 0
    (last,) = steps(meter, 1)
    last.done = True
    meter.next_batch(iter([{}]))  # from 1 to 2
    assert meter.means(1)["input_wait"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("end", "waited"), [(0.5, 1.0), (1.75, 0.25)])
def test_input_wait_begins_when_the_device_has_ended_its_step(
    end, waited, steps_end_at, monkeypatch
):
    clock = iter(range(100))
    monkeypatch.setattr("train.run.metrics.time.perf_counter", lambda: float(next(clock)))
    meter = Meter(batch_size=8)  # starts at 0
    (last,) = steps(meter, 1)
    steps_end_at(end)

    def slow():
        last.done = True  # while the batch is being made
        yield {}

    meter.next_batch(slow())  # from 1 to 2
    assert meter.means(1)["input_wait"] == pytest.approx(waited / 3)


def test_reports_which_step_of_a_window_is_nonfinite():
    meter = Meter(batch_size=8)
    for loss in (1.0, np.nan, 1.0):
        meter.add({}, {"loss": np.float32(loss)})
    with pytest.raises(TrainingError, match="the loss is nan at step 6"):
        meter.means(7)


def test_a_line_has_the_epoch_and_learning_rate_of_its_last_step(finished_run):
    run = setup(RunFolder(finished_run).read_config())
    for line in metrics_of(finished_run):
        assert line["epoch"] == pytest.approx(line["step"] * 16 / 1437)
        rate = float(run.schedule(line["step"] - 1))  # the first step has the rate at 0
        assert line["train/learning_rate"] == pytest.approx(rate, rel=1e-5)
