"""Progress of a run: what fits into a terminal, and what a log says."""

import io

import pytest
from rich.console import Console

from train.errors import printable
from train.output.formats import clock
from train.output.progress import Progress, line_printer
from train.run.results import describe_metrics, print_facts

LINE = {
    "step": 500,
    "seconds": 75.4,
    "train/loss": 0.01901,
    "train/accuracy": 0.9947,
    "test/loss": 0.1153,
    "test/accuracy": 0.9639,
    "train/learning_rate": 0.07119,
    "examples_per_second": 7845.2,
    "input_wait": 0.03,
}
MEMORY = 33 * 2**20


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def progress_at(step, seconds, line, console, total=1348, start=0):
    """Return progress whose last step ended after some seconds."""
    now = Clock()
    progress = Progress(console, total, start, now)
    now.seconds = seconds
    progress.advance(step)
    progress.log(line, MEMORY)
    return progress, now


def in_terminal(width):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def render(progress, width):
    console = in_terminal(width)
    console.print(progress)
    return console.file.getvalue().rstrip("\n")


def test_each_width_shows_step_and_eta_in_one_line_and_drops_the_least_important_first():
    progress, _ = progress_at(500, 50.0, LINE, in_terminal(80))
    names = (" 500/1,348", "eta 1:25", "train loss 0.01901", "━", "test accuracy 0.9639",
             "7,845 examples/s", "memory 33.00 MiB", "test loss 0.1153", "train accuracy 0.9947",
             "learning rate 0.07119", "input wait 3%")  # fmt: skip
    shown = {}
    for width in (24, 44, 60, 80, 100, 120, 140, 200, 240):
        text = render(progress, width)
        assert "\n" not in text
        assert len(text.rstrip()) <= width
        shown[width] = [name in text for name in names]
        assert shown[width] == sorted(shown[width], reverse=True)  # none is skipped
    assert [sum(s) for s in shown.values()] == [2, 3, 4, 5, 6, 7, 8, 11, 11]


@pytest.mark.parametrize("width", [60, 80, 100, 240])
def test_a_line_begins_with_a_bar_of_the_share_of_steps(width):
    text = render(progress_at(500, 50.0, LINE, in_terminal(80))[0], width)
    fields = "  500/" + text.partition("500/")[2]
    size = min(width - len(fields) - 2, 24)
    halves = int(2 * size * 500 / 1348)
    bar = "━" * (halves // 2) + "╸" * (halves % 2)
    assert text == f"{bar:{size}}  {fields}"


def test_test_metrics_stay_until_the_next_evaluation():
    progress, _ = progress_at(500, 50.0, LINE, in_terminal(200))
    progress.log({"train/loss": 0.5}, None)
    text = render(progress, 200)
    assert "train loss 0.5  test accuracy 0.9639  test loss 0.1153" in text
    assert "memory" not in text
    assert "train accuracy" not in text


def test_a_log_has_a_line_per_interval_with_elapsed_time_and_eta():
    console = Console(file=io.StringIO(), width=80)
    progress_at(500, 50.0, LINE, console)
    assert console.file.getvalue().splitlines()[-1] == (
        "step 500/1,348  elapsed 1:15  eta 1:25  train loss 0.01901  train accuracy 0.9947  "
        "test accuracy 0.9639  test loss 0.1153  learning rate 0.07119  7,845 examples/s  "
        "memory 33.00 MiB  input wait 3%"
    )


def test_a_log_is_limited_by_time_but_has_all_evaluations_and_the_last_step():
    console, now = Console(file=io.StringIO(), width=80), Clock()
    progress, loss = Progress(console, 50, 0, now), {"train/loss": 0.5, "seconds": 1.0}
    for step in range(1, 51):
        now.seconds = step
        progress.advance(step)
        progress.log(loss | ({"test/loss": 0.5} if step == 15 else {}), None)
    lines = [line.split()[1] for line in console.file.getvalue().splitlines() if "step" in line[:4]]
    assert lines == ["1/50", "11/50", "15/50", "25/50", "35/50", "45/50", "50/50"]


def test_the_remaining_time_counts_only_steps_of_this_process_and_falls_during_a_step():
    progress, now = progress_at(500, 50.0, LINE, in_terminal(80), start=400)
    assert "eta 7:04" in render(progress, 80)  # 848 steps of half a second
    now.seconds += 4.0
    assert "eta 7:00" in render(progress, 80)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (1000, "16 min 40 s for 1,000 more steps, from the first 3; 1.0 s a step"),
        (100, "1 min 40 s for 100 more steps, from the first 3"),
    ],
)
def test_estimates_the_time_of_a_long_run_once_from_its_first_steps(steps, text):
    console, now = Console(file=io.StringIO(), width=80), Clock()
    progress = Progress(console, steps + 3, 0, now, lambda seconds: f"; {seconds} s a step")
    for step in range(1, 6):
        now.seconds = step
        progress.advance(step)
    assert console.file.getvalue() == f"estimated time: {text}\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (75, "1:15"), (3675, "1:01:15"), (3_600_000, "1,000:00:00"), (float("nan"), "-:--")],
)  # fmt: skip
def test_writes_a_time_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


def test_metrics_are_named_by_what_they_measure():
    metrics = {"test/mean_iou": 0.25, "test/top5": 1.0, "test/loss": 0.0123456}
    assert (
        describe_metrics(metrics) == "test mean IoU 0.25, test top-5 accuracy 1, test loss 0.01235"
    )


def test_a_terminal_breaks_facts_between_words_and_a_log_does_not_break_them():
    facts = {"data": "one two three four five six seven"}
    narrow = in_terminal(30)
    print_facts(narrow, facts)
    lines = [line.rstrip() for line in narrow.file.getvalue().splitlines()]
    assert lines == ["  data      one two three four", "            five six seven"]
    log = Console(file=io.StringIO(), width=30)
    print_facts(log, facts)
    assert log.file.getvalue() == "  data      one two three four five six seven\n"


def test_names_with_control_characters_stay_on_their_line():
    name = "a\nb\x1b[31m\udce9.png"
    assert printable(name) == "a\\nb\\x1b[31m\ufffd.png"
    text = io.StringIO()
    line_printer(Console(file=text, width=10))(f"cannot read {name}")
    assert text.getvalue() == "cannot read a\\nb\\x1b[31m\ufffd.png\n"
