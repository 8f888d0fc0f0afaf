"""Private training: guarantee, epsilon spent, and noise of the run."""

import contextlib
import dataclasses
import io
import json
import logging
import re
import sys

import chex
import jax
import numpy as np
import optax
import program_cases
import pytest
from dp_accounting import TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant
from program_cases import assert_one_line_error, exit_code, final_state, fnet_command, metrics_of
from scipy.stats import norm

from fnet.privacy import PoissonSampling, banded_square_root, calibrate_noise_multiplier, epsilon
from train.config import Clipped, Memory, Mesh, recipes
from train.errors import UserError, at_most
from train.output.logged import noise_scale, noise_scale_course
from train.privacy import Privacy
from train.run.planning import compile_step, largest_batch
from train.run.setup import setup

SEEDED = program_cases.PRIVATE.replace("1e-5", "1e-5, insecure_noise_seed=0")
SEEDED = SEEDED.replace("steps=4", "steps=8").replace("eval_every=2", "eval_every=4")

OTHER = """
from train.config import *

def config():
    return Config(
        name="other",
        data=Digits(batch_size=64),
        model={model},
        optim=Optim(learning_rate=0.05),
        grad={grad},
        train=Train(steps=4, log_every=2, eval_every=4),
    )
"""


@pytest.fixture
def private(workplace):
    (workplace / "private.py").write_text(SEEDED)
    return workplace


@pytest.fixture(scope="module")
def finished_private_run(tmp_path_factory):
    """Folder of a private run of 8 steps, and its output."""
    folder = tmp_path_factory.mktemp("finished_private_run")
    (folder / "private.py").write_text(SEEDED)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        fnet_command("train", folder / "private.py", "--out", folder / "run")
    return folder / "run", printed.getvalue()


def guarantee_of(folder):
    return json.loads((folder / "summary.json").read_text())["privacy"]


def write_other(workplace, grad, model="Mlp(hidden=())", name="other.py"):
    (workplace / name).write_text(OTHER.format(grad=grad, model=model))


# Computed by dp_accounting 0.6 and jax_privacy.
SPENT = [
    (1.5, PoissonSampling(100, 4), 2250, "rdp", 7.3293),
    (1.5, PoissonSampling(100, 4), 2250, "pld", 6.7688),
    (1.0, PoissonSampling(100, 1), 1000, "rdp", 2.10137),
    (1.0, PoissonSampling(100, 1), 1000, "pld", 1.82824),
    (1.1, PoissonSampling(60000, 256), 3515, "rdp", 1.281144),
    (1.1, PoissonSampling(60000, 256), 3515, "pld", 1.13374),
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("noise", "sampling", "steps", "accountant", "expected"), SPENT)
def test_epsilon_equals_that_of_published_accountants(noise, sampling, steps, accountant, expected):
    digits = len(str(expected).split(".")[1])
    assert round(epsilon(noise, 1e-5, sampling, steps, accountant=accountant), digits) == expected
    assert Privacy(noise, sampling, 1e-5, accountant).epsilon(steps) == pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.parametrize("delta", [1e-5, 1e-15, 2.0**-80])
def test_epsilon_of_the_gaussian_mechanism_is_exact_at_any_delta(delta):
    found = epsilon(100.0, delta, PoissonSampling(1000, 1000), steps=100)
    # Balle & Wang 2018, "Improving the Gaussian mechanism", theorem 8, for mu = 0.1.
    first, second = norm.logcdf([0.05 - found / 0.1, -0.05 - found / 0.1])
    spent = first + np.log(-np.expm1(found + second - first))
    np.testing.assert_allclose(spent, np.log(delta), rtol=1e-9)


def test_epsilon_is_finite_and_grows_as_delta_vanishes():
    sampling, deltas = PoissonSampling(650_000, 250), (1e-9, 1e-12, 1e-14, 2.0**-80, 1e-200)
    found = [epsilon(4.0, delta, sampling, steps=10_000) for delta in deltas]
    assert 0 == epsilon(4.0, 1e-9, sampling, steps=0) < found[0]
    assert found == sorted(found)
    assert found[-1] < 10


def test_noise_of_a_small_and_of_a_large_epsilon_is_not_larger_than_necessary():
    for target, delta, sampling, steps in (
        (0.1, 1e-5, PoissonSampling(50_000, 64), 1000), (1e6, 1e-7, PoissonSampling(1000, 32), 100),
    ):  # fmt: skip
        noise = calibrate_noise_multiplier(target, delta, sampling, steps)
        spent, more = (epsilon(n, delta, sampling, steps) for n in (noise, noise / 1.005))
        assert spent <= target < more


@pytest.mark.sweep(6)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("target", "size", "steps"), [(3, 356, 300), (0.5, 10, 1000)])
def test_calibrated_noise_spends_the_target(target, size, steps, accountant):
    sampling = PoissonSampling(1000, size)
    noise = calibrate_noise_multiplier(target, 1e-5, sampling, steps, accountant=accountant)
    spent = epsilon(noise, 1e-5, sampling, steps, accountant=accountant)
    assert 0.99 * target < spent <= target


@pytest.mark.parametrize("function", [epsilon, calibrate_noise_multiplier])
def test_rejects_invalid_arguments(function):
    for delta, steps, message in (
        (0.01, 10, r"delta must be > 0 and less than 1 / examples = 0.01, got 0.01"),
        (0.0, 10, "delta must be > 0"),
        (1e-5, 2.5, "steps must be an integer >= 0, got 2.5"),
        (1e-5, -1, "steps must be an integer >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
            function(1.0, delta, PoissonSampling(100, 8), steps)
    with pytest.raises(TypeError, match=r"expected a Sampling, such as .*, got float"):
        function(1.0, 1e-5, 0.1, 60)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("noise", "size"), [(2.7, 256), (1.0, 4), (24.0, 1024)])
def test_epsilon_of_progress_lines_is_a_close_upper_bound(noise, size):
    privacy = Privacy(noise, PoissonSampling(1437, size), 1e-5)
    steps = [1, 10, 100, 199, 200]
    spent = [privacy.spent(step, 200) for step in steps]
    exact = [privacy.epsilon(step) for step in steps]
    assert all(a <= b <= 1.005 * a + 0.002 for a, b in zip(exact, spent, strict=True))
    assert spent == sorted(spent)
    assert spent[-1] == exact[-1]


@pytest.mark.slow
def test_a_run_with_correlated_noise_resumes(private):
    words = "--grad.noise-bands", 4, "--train.steps"
    fnet_command("train", "private.py", "--out", "whole", *words, 6)
    fnet_command("train", "private.py", "--out", "parts", *words, 3)
    fnet_command("train", "parts", "--resume", "--train.steps", 6)
    chex.assert_trees_all_equal(final_state(private / "whole"), final_state(private / "parts"))


def test_noise_of_a_run_is_correlated_and_sampling_is_cyclic(private):
    config = recipes.load("private.py")
    config = dataclasses.replace(config, grad=dataclasses.replace(config.grad, noise_bands=4))
    run = setup(config)
    assert run.step.mode.strategy == banded_square_root(4)
    assert run.privacy.sampling.separation == 4
    assert setup(recipes.load("private.py")).step.mode.strategy == banded_square_root(1)


def test_batches_have_the_mean_size_of_the_config_with_every_sampling(private):
    config = recipes.load("private.py")
    for options in (
        {},
        {"truncated_batch_size": 80, "noise_bands": 4},
        {"sampling": "balls_in_bins"},
        {"sampling": "b_min_sep", "separation": 3},
    ):
        grad = dataclasses.replace(config.grad, **options)
        sampling = grad._sampling(dataclasses.replace(config, grad=grad), 1437)
        assert sampling.batch_size == pytest.approx(config.data.batch_size, rel=0.03)  # whole bins


def test_truncating_an_overflowing_batch_does_not_change_epsilon():
    """The exact accounting of a step that keeps a uniform choice of an overflowing batch."""
    examples, size, noise, steps = 1437, 512, 8.0, 300
    sampling = PoissonSampling(examples, size)
    truncated = TruncatedSubsampledGaussianDpEvent(examples, size / examples, sampling.rows, noise)
    exactly = PLDAccountant().compose(truncated, steps).get_epsilon(1e-5)
    assert epsilon(noise, 1e-5, sampling, steps) == pytest.approx(exactly, rel=1e-7)


def test_a_private_run_reports_epsilon_before_and_after(finished_private_run):
    folder, printed = finished_private_run
    guarantee = guarantee_of(folder)
    privacy = Privacy(1.0, PoissonSampling(1437, 64), 1e-5)
    assert guarantee == {
        "epsilon": privacy.epsilon(8),
        "noise_multiplier": 1.0,
        "sampling_probability": 64 / 1437,
        "noise_bands": 1,
        "separation": 1,
        "neighbors": "missing",
        "delta": 1e-5,
        "accountant": "pld",
        "unit": "example",
        "secret_noise": False,
    }
    before, after = printed.split("step 2/8")
    for part in (before, after):
        assert (
            f"privacy: epsilon {at_most(guarantee['epsilon'])} at delta 1e-05 after 8 steps" in part
        )
    assert f"epsilon {at_most(privacy.spent(2, 8))}  " in after
    lines = metrics_of(folder)
    assert [r["privacy/epsilon"] for r in lines] == [privacy.spent(n, 8) for n in (2, 4, 6, 8)]
    # Of the metrics of a step only the norm of the noisy gradient is covered by the guarantee.
    covered = {name for name in lines[0] if name.startswith("train/")}
    assert covered == {"train/grad_norm", "train/learning_rate"}
    names = "loss", "accuracy", "clipped", "norm_median", "norm_max"
    assert {f"not_private/{name}" for name in names} <= lines[0].keys()
    assert "loss (not private)" in after
    assert "dp-accounting" in json.loads((folder / "summary.json").read_text())["versions"]


RELEASED_FILES = {
    "checkpoints", "classes.json", "config.json", "confusion.png", "curves.png", "data.json",
    "memory.json", "memory.png", "metrics.jsonl", "summary.json",
}  # fmt: skip
RELEASED_METRICS = {
    "step", "epoch", "train/clip", "train/grad_norm", "train/learning_rate", "privacy/epsilon", "test/loss",
    "test/accuracy", "test/top5", "test/macro_precision", "test/macro_recall", "test/macro_f1", "test/calibration_error", "test/auc",
}  # fmt: skip


def test_release_only_writes_what_the_guarantee_covers(private, capsys):
    words = "--grad.release-only", "--grad.quantile", 0.5
    fnet_command("train", "private.py", "--out", "run", *words)
    assert {path.name for path in (private / "run").iterdir()} == RELEASED_FILES
    for line in metrics_of(private / "run"):
        assert line.keys() <= RELEASED_METRICS
    printed = capsys.readouterr().out
    assert re.search(r"step 2/8  elapsed \S+  eta \S+  epsilon ", printed)  # and no loss
    assert "not private" not in printed
    summary = json.loads((private / "run" / "summary.json").read_text())
    on_test_examples = {name for name in RELEASED_METRICS if name.startswith("test/")}
    assert summary["metrics"].keys() == on_test_examples
    assert summary["unreadable_files"] is None
    fnet_command("eval", "run")
    assert not (private / "run" / "examples.png").exists()


def test_a_private_run_can_have_more_microbatches_than_examples(private):
    config = recipes.load("private.py")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=4))
    whole, parts = (
        one_step(dataclasses.replace(config, grad=dataclasses.replace(config.grad, microbatches=n)))
        for n in (1, 8)
    )
    chex.assert_trees_all_close(whole, parts, rtol=1e-5, atol=1e-6)


def test_private_batches_are_sharded_evenly(private):
    config = recipes.load("private.py")
    data = dataclasses.replace(config.data, batch_size=66)
    for mesh in (Mesh(data=11), Mesh(data=3, fsdp=5)):
        run = setup(dataclasses.replace(config, data=data, mesh=mesh))
        rows = run.batch_shapes["weight"].shape[0]
        assert rows % (mesh.data * mesh.fsdp) == rows % 8 == 0


@pytest.mark.slow
def test_evaluates_batches_smaller_than_the_number_of_devices(private):
    parts = "--data.batch-size", 8, "--grad.microbatches", 4, "--mesh.data", 4
    fnet_command("train", "private.py", *parts, "--train.steps", 2, "--out", "four")
    fnet_command("eval", "four")
    result = json.loads((private / "four/private/evaluation.json").read_text())["metrics"]
    there = json.loads((private / "four" / "summary.json").read_text())["metrics"]
    assert result == pytest.approx(there, rel=1e-5)


def test_a_target_epsilon_is_kept_and_refuses_more_steps(private):
    config = recipes.load("private.py")
    grad = dataclasses.replace(config.grad, noise_multiplier=None, epsilon=2.0)
    assert 1.98 < setup(dataclasses.replace(config, grad=grad)).privacy.epsilon(8) <= 2
    message = "train.steps: the noise was calibrated to spend epsilon 2 over 2 steps, not 4"
    with pytest.raises(UserError, match=message):
        grad.check_length(2, 4)


def one_step(config, batch=None):
    run = setup(config)
    state = run.init(jax.random.key(0))
    before = jax.tree.map(np.array, state.params)
    batch = next(run.training_batches(0)) if batch is None else batch(run.batch_shapes)
    after = run.step(state, batch)[0].params
    return before, jax.tree.map(np.array, after)


def test_noise_has_the_scale_of_the_accounting(private):
    """An update from padding only is learning rate x noise multiplier x clip / batch_size."""
    config = recipes.load("private.py")
    grad = dataclasses.replace(config.grad, noise_multiplier=20.0, clip=0.5)

    def padding(shapes):
        return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)

    before, after = one_step(dataclasses.replace(config, grad=grad), padding)
    moved = np.concatenate(
        [np.ravel(b - a) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
    )
    expected = 0.5 * 20 * 0.5 / 64
    assert moved.size == 64 * 10 + 10
    assert moved.std() == pytest.approx(expected, rel=4 / np.sqrt(2 * moved.size))
    assert abs(moved.mean()) < 4 * expected / np.sqrt(moved.size)


def test_modes_with_the_same_gradient_take_the_same_step(workplace):
    moved = {}
    for grad in ("Mean()", "PerExample()", "Clipped(clip=1e6)"):
        write_other(workplace, grad)
        _, moved[grad] = one_step(recipes.load("other.py"))
    chex.assert_trees_all_close(moved["PerExample()"], moved["Mean()"], rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(moved["Clipped(clip=1e6)"], moved["Mean()"], rtol=1e-5, atol=1e-7)


def test_a_small_clip_bounds_the_step(workplace):
    write_other(workplace, "Clipped(clip=1e-3)")
    before, after = one_step(recipes.load("other.py"))
    moved = optax.tree.norm(jax.tree.map(np.subtract, after, before))
    assert 0 < moved <= 0.05 * 1e-3 * (1 + 1e-3)


@pytest.mark.parametrize(
    ("grad", "guarded"),
    [
        ("Clipped(clip=0.1)", True),
        ("Clipped(clip=0.1, quantile=0.5)", True),
        ("Clipped(clip=0.1, noise_multiplier=1.0, delta=1e-5)", False),
        ("Clipped(clip=0.1, quantile=0.5, noise_multiplier=1.0, delta=1e-5)", False),
    ],
)
def test_private_steps_are_never_skipped(grad, guarded, workplace):
    write_other(workplace, grad)
    run = setup(recipes.load("other.py"))
    _, metrics = jax.eval_shape(run.step, run.state_shapes, run.batch_shapes)
    assert ("skipped" in metrics) == guarded


def test_plans_choose_microbatches_unless_the_config_does(workplace):
    choices = {}
    fixed = "Microbatch(microbatches=4)", "PerExample()", "Clipped(microbatches=2)"
    for grad in ("Mean()", "Clipped()", *fixed):
        write_other(workplace, grad)
        choices[grad] = setup(recipes.load("other.py")).microbatch_choices
    assert list(choices.values()) == [None, None, (4,), (1,), (2,)]


@pytest.mark.slow
@pytest.mark.parametrize("quantile", ["None", "0.5"])
def test_a_private_step_is_planned_within_a_budget(quantile, workplace, monkeypatch):
    grad = f"Clipped(noise_multiplier=8.0, delta=1e-5, quantile={quantile})"
    write_other(workplace, grad, model="Mlp(hidden=(256,))")
    config = recipes.load("other.py")
    run = setup(dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=512)))
    monkeypatch.setattr("train.run.planning.reserve", lambda run, target=None: 0)
    peak = compile_step(run).executable.report.peak.total
    memory = Memory(budget=f"{int(0.6 * peak)}B", policy="none")
    tight = run._replace(config=dataclasses.replace(run.config, memory=memory))
    planned = compile_step(tight)
    assert planned.microbatches > 1
    assert planned.executable.report.peak.total <= 0.6 * peak
    batch = next(run.training_batches(0))
    whole, parts = (
        step(run.init(jax.random.key(0)), batch)[0].params
        for step in (run.step, planned.executable)
    )
    chex.assert_trees_all_close(whole, parts, atol=1e-6)  # the same noise, too
    largest = largest_batch(run, 2 * peak)
    assert largest.run.config.data.batch_size > 512
    assert largest.executable.report.peak.total <= 2 * peak


def test_the_noise_scale_is_a_ratio_of_exponential_averages():
    def line(step, var, sq):
        return {"step": step, "train/grad_var": var, "train/grad_sq": sq}

    # By hand: one line is its own average; of two lines 20 steps apart, at the half-life
    # of a tenth of 40 steps, the first counts 2^-5 as much as the second.
    assert noise_scale_course([line(20, 6.0, 2.0)]) == [(20, 3.0)]
    first, second = noise_scale_course([line(20, 6.0, 2.0), line(40, 8.0, 1.0)])
    share = 2.0**-5
    assert first[1] == pytest.approx(3)
    assert second[1] == pytest.approx((share * 6 + 8) / (share * 2 + 1))
    # The estimate of |G|^2 can be negative if noise dominates.
    assert noise_scale_course([line(1, 6.0, -1.0)]) == []
    assert noise_scale([line(1, 6.0, 1.0), line(100, 6.0, -1.0)]) is None
    assert noise_scale([line(20, 6.0, 2.0)]) == 3.0
    assert noise_scale([{"step": 1, "train/loss": 1.0}]) is None


def test_private_training_reports_a_missing_dependency(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jax_privacy")]:
        monkeypatch.setitem(sys.modules, name, None)
    config = recipes.load("digits_dp")
    with pytest.raises(UserError, match=r"pip install 'fnet-jax\[privacy\]'"):
        config.grad.privacy(config, units=1437, steps=10)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fnet-jax\[privacy\]'"):
        calibrate_noise_multiplier(1.0, 1e-5, PoissonSampling(100, 8), 10)
    # Clipping without noise needs no accounting.
    config = dataclasses.replace(config, grad=Clipped())
    assert config.grad.privacy(config, units=1437, steps=10) is None


NONE = ("--grad.noise-multiplier", "None")
MISTAKES = [
    (("--grad.epsilon", "2", *NONE, "--grad.delta", "None"), "grad.delta: grad.epsilon needs it, too; give less than 1 / 1437"),
    (("--grad.delta", "None"), "grad.delta: grad.noise_multiplier needs it, too"),
    (NONE, "grad.delta: needs grad.epsilon or grad.noise_multiplier, too"),
    (("--grad.epsilon", "2"), "grad: epsilon 2.0 and noise_multiplier 1.0 each set the noise"),
    (("--grad.delta", "0.001"), "grad.delta: 0.001 would allow publishing one of 1437 training examples"),
    (("--grad.delta", "1.5"), "grad.delta: expected less than 1, got 1.5"),
    (("--grad.epsilon", "-1"), "grad.epsilon: expected greater than 0, got -1.0"),
    (("--grad.clip", "0"), "grad.clip: expected greater than 0, got 0.0"),
    (("--grad.accountant", "moments"), "--grad.accountant: expected one of pld, rdp, got moments"),
    (("--data.batch-size", "2000"), "data.batch_size: 2000 is more than the 1437 training examples"),
    (("--grad.delta", "None", *NONE, "--grad.insecure-noise-seed", "None", "--grad.release-only"), "grad.release_only: True, but there is no noise; give grad.epsilon"),
    (("--grad.epsilon", "1e-5", *NONE), "grad.epsilon: calibrate_noise_multiplier: epsilon 1e-05 is impossible in 8 steps at delta 1e-05: even a noise multiplier of 1024 spends"),
    (("--grad.noise-bands", "23"), "grad.noise_bands: 23 groups of 1437 training examples are smaller than the 64 of data.batch_size; give at most 22"),
    (("--grad.noise-bands", "2", *NONE, "--grad.delta", "None"), "grad.noise_bands: 2, but there is no noise; give grad.epsilon or grad.noise_multiplier, too"),
    (("--grad.noise-bands", "2", "--grad.quantile", "0.5"), "grad.noise_bands: 2, but grad.quantile needs independent noise and sets the clip; give one of them"),
    (("--grad.noise-multiplier", "0.001"), "grad.noise_multiplier: 0.001 gives no privacy: 8 steps spend epsilon"),
]  # fmt: skip


def test_a_mistake_in_a_guarantee_is_one_line_and_writes_nothing(private, capsys):
    for words, message in MISTAKES:
        assert exit_code("train", "private.py", "--out", "run", *words) == 2
        assert_one_line_error(capsys, message)
        assert not (private / "run").exists()


def test_refuses_batch_norm_by_name(workplace, capsys):
    grad = "Clipped(epsilon=1.0, delta=1e-5)"
    write_other(workplace, grad, model="PreactResNet(widths=(4,), blocks_per_stage=1)")
    assert exit_code("train", "other.py", "--out", "run") == 2
    error = capsys.readouterr().err
    assert error.startswith("fnet: grad: ")
    assert "abn" in error
    assert error.count("\n") == 1
    assert not (workplace / "run").exists()


@pytest.mark.parametrize("before", [logging.NOTSET, logging.CRITICAL])
def test_accounting_is_quiet_about_renyi_orders_and_keeps_the_log_level(
    before, monkeypatch, caplog
):
    logger = logging.getLogger("absl")
    monkeypatch.setattr(logger, "level", before)
    sampling = PoissonSampling(1000, 100)
    assert epsilon(0.3, 1e-5, sampling, steps=500, accountant="rdp") > 100
    assert not caplog.records
    assert logger.level == before
