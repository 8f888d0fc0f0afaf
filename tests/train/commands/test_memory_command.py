"""``fnet memory`` and ``memory.budget``: predictions, plans and budgets."""

import json
import re
from unittest.mock import Mock

import jax
import pytest
from program_cases import exit_code, fnet_command, output_of
from rich.console import Console

from fnet import memory
from fnet.memory.target import Peaks, Target
from train.config import Config, Digits, Memory, Mlp, recipes
from train.errors import UserError
from train.output.memory_tables import plan_summary, plan_table
from train.output.tables import to_rich
from train.run import planning
from train.run.process_memory import Overhead, overhead
from train.run.results import describe_results
from train.run.setup import setup


@pytest.fixture(autouse=True)
def little_is_reserved(monkeypatch):
    """Reserve little, because the networks here are smaller than the usual reserve."""

    def little(run, target=None):
        return Overhead() if target else Overhead(runtime=1000)

    for module in ("planning", "loop"):
        monkeypatch.setattr(f"train.run.{module}.overhead", little)


KEEP_REMAT = {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}

DEEP = """
from train.config import Config, Digits, Mlp, Optim, Train

def config():
    return Config(
        name="deep",
        data=Digits(batch_size=512),
        model=Mlp(hidden=(32,) * 4, activation="gelu"),
        optim=Optim(learning_rate=0.05),
        train=Train(steps=2, log_every=1, eval_every=2),
    )
"""


@pytest.fixture(autouse=True)
def deep(workplace):
    (workplace / "deep.py").write_text(DEEP)


def test_reports_memory_without_training(workplace, capsys):
    printed = output_of(capsys, "memory", "tiny.py", "--out", "out")
    for word in ("parameters", "arguments", "aliased", "peak", "Residuals", "none"):
        assert word in printed
    assert "stage0/block0" in printed
    recorded = json.loads((workplace / "out" / "memory.json").read_text())
    names = {"residuals", "plan", "peak", "donation", "largest_at_peak", "live_bytes"}
    assert names <= recorded.keys()
    assert max(recorded["live_bytes"]) <= recorded["peak"]["total"]
    assert (workplace / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in workplace.iterdir()} == {"tiny.py", "deep.py", "out"}


def test_a_budget_that_the_plain_step_meets_is_said(capsys):
    printed = output_of(capsys, "memory", "deep.py", "--budget", "1GB")
    assert "fits 953.67 MiB without a plan, so no other way was compiled" in printed
    assert "Ways to train" not in printed


@pytest.mark.slow
def test_plans_within_a_budget(workplace, capsys):
    plain = planning.compile_step(setup(recipes.load("deep.py"))).executable.report.peak.total
    budget = int(0.7 * plain)
    printed = output_of(capsys, "memory", "deep.py", "--budget", f"{budget}B", "--out", "tight")
    assert "too large" in printed
    assert "\\n" not in printed
    recorded = json.loads((workplace / "tight" / "memory.json").read_text())
    assert recorded["plan"]["budget"] == budget
    assert (workplace / "tight" / "plan.png").is_file()
    assert recorded["peak"]["total"] + 1000 <= budget
    assert recorded["peak"]["total"] == recorded["plan"]["chosen"]["peak"]["total"]


def test_a_finished_run_warns_of_a_measured_peak_above_its_budget():
    run = setup(Config(data=Digits(), model=Mlp(hidden=(8,)), memory=Memory(budget="20MiB")))
    summary = {"metrics": {}, "steps": 1, "seconds": 1.0, "examples_per_second": 1.0}
    summary |= {"quantization_errors": {}, "peak_bytes_predicted": 19 * 2**20}

    def warnings(measured):
        lines = describe_results(run, summary | {"peak_bytes_seen": measured})
        return [line for line in lines if "warning" in line]

    assert warnings(None) == warnings(20 * 2**20) == []
    (warning,) = warnings(23 * 2**20)
    assert "3.00 MiB above the budget; to stay within 20MiB, lower --memory.budget by" in warning


def test_the_reserve_includes_prefetched_batches():
    small, large = (setup(Config(data=Digits(batch_size=size))) for size in (64, 192))
    row = 8 * 8 * 4 + 4 + 4  # image, label, row
    sizes = [overhead(run.state_shapes, run.batch_shapes, 5).batches for run in (small, large)]
    assert sizes[1] - sizes[0] == 5 * 128 * row


@pytest.mark.slow
def test_the_plan_for_the_largest_batch_fits_the_target(workplace, monkeypatch):
    here = Target("here", jax.local_devices()[0], 1_000_000, KEEP_REMAT)
    monkeypatch.setattr("train.commands.memory.target_of", lambda given, count: here)
    fnet_command("memory", "deep.py", "--target", "here", "--batch-size", "auto", "--out", "auto")
    result = json.loads((workplace / "auto" / "memory.json").read_text())
    assert 0.97 * 1_000_000 <= result["peak"]["total"] <= 1_000_000
    assert result["predictions"][0]["seconds_per_step"] is None  # of a device of unknown rates


@pytest.mark.slow
def test_compares_several_targets_with_a_mesh(workplace, monkeypatch, capsys):
    def describe(name, count):
        bytes_, rate = {"small": (100_000, 1e9), "large": (10_000_000, 1e12)}[name]
        devices = tuple(jax.local_devices()[:count])
        peaks = Peaks({"float32": rate}, rate / 2, rate / 10, rate / 100, rate / 100, 0.0)
        return Target(name, devices[0], bytes_, dict(KEEP_REMAT), devices, peaks)

    monkeypatch.setattr("train.run.planning.describe", describe)
    words = "--target", "small,large", "--mesh.fsdp", 2, "--memory.policy", "none", "--out", "both"
    assert "Estimate on 2 devices" in output_of(capsys, "memory", "deep.py", *words)
    small, large = json.loads((workplace / "both" / "memory.json").read_text())["predictions"]
    assert (small["fits"], large["fits"]) == (False, True)
    assert small["peak"] == large["peak"]
    assert small["seconds_per_step"] == pytest.approx(1000 * large["seconds_per_step"])
    assert large["images_per_second"] == pytest.approx(512 / large["seconds_per_step"])
    assert small["link_bytes"] > 0


def test_utilization_counts_no_rematerialized_flops():
    device = jax.local_devices()[0]
    target = Target(
        "here",
        device,
        10**8,
        KEEP_REMAT,
        (device,),
        Peaks({"float32": 1e9}, 1e9, 1e9, 1e9, 1e9, 0.0),
    )

    def predicted(policy):
        memory = Memory(policy=policy)
        run = Config(data=Digits(batch_size=512), model=Mlp(hidden=(32,) * 4), memory=memory)
        return planning.predict_on(setup(run), target)

    plain, slower = predicted("none"), predicted("segments")
    assert slower.estimate.total_flops > 1.1 * plain.estimate.total_flops
    useful = [p.utilization * p.estimate.seconds for p in (plain, slower)]
    assert useful[1] == pytest.approx(useful[0], rel=0.03)
    assert useful[0] == pytest.approx(plain.estimate.total_flops / 1e9, rel=0.03)
    assert planning.predict_on(plain.run, target._replace(peaks=None)).utilization is None


def test_plans_a_language_model_without_text_and_tokenizer(workplace):
    model = "--model.name", "language_model", "--model.blocks", 1, "--model.width", 8
    data = "--data.source", "text_file", "--data.tokenizer", "none.json", "--data.context", 8
    words = *data, *model, "--data.vocabulary", 1000, "--out", "text"
    fnet_command("memory", "deep.py", *words)
    result = json.loads((workplace / "text" / "memory.json").read_text())
    assert 1000 * 8 < result["parameters"] < 1000 * 8 * 2 + 3000


def test_plans_images_without_their_folder(capsys):
    words = "--data.source", "image_folder", "--data.path", "absent", "--data.image-size", 8
    fnet_command("memory", "deep.py", *words, "--data.batch-size", 4, "--out", "images")
    assert "data: no folder absent: 1,000 classes are assumed" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 60])
def test_plan_tables_show_all_digits(width):
    work = memory.Cost(12_345_600_000_000, 1_234_500_000_000)
    segments = memory.REMAT_POLICIES["segments"]
    way = memory.Candidate(segments, 16, work, memory.Peak(987 * 2**20, 0, 0, 0, 0), {})
    console = Console(width=width)
    with console.capture() as capture:
        console.print(to_rich(plan_table(memory.Plan(2**30, way, None, (way,)), 0)))
    printed = capture.get()
    assert "…" not in printed
    if width == 80:  # wide enough for each number on one line
        assert all(n in printed for n in ("segments", "987.00", "12,345.6", "1,234.5", "1.00"))


def candidate(policy, microbatches, mebibytes, flops, options):
    peak = memory.Peak(mebibytes * 2**20, 0, 0, 0, 0)
    return memory.Candidate(policy, microbatches, memory.Cost(flops, 0), peak, options)


def test_each_program_of_a_plan_is_shown_with_its_number_and_the_budget():
    config = Config(data=Digits(batch_size=8), model=Mlp(hidden=(4,)), memory=Memory(budget="1GiB"))
    run = setup(config)
    lines = []
    planning.plan(run, progress=lines.append)
    left = memory.format_bytes(planning.limit(run))
    way = "no rematerialization(, min memory schedule)?"
    expected = rf"compiled {{}} of about 8 programs: {way}, peak .*iB, budget {left} for the step"
    assert len(lines) >= 2
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(expected.format(number), line)


def test_a_plan_says_how_the_next_smaller_program_differs():
    default, small = memory.CANDIDATE_OPTIONS["cpu"]
    none, segments = (memory.REMAT_POLICIES[name] for name in ("none", "segments"))
    chosen = candidate(none, 1, 50, 100, default)
    smaller = candidate(none, 1, 40, 100, small)
    slower = candidate(segments, 4, 30, 125, small)
    plan = memory.Plan(2**30, chosen, smaller, (chosen, smaller, slower))
    assert plan_summary(plan, 2**20).splitlines() == [
        "no rematerialization, the fastest that fits of 3 compiled programs.",
        "1.00 MiB of the budget is reserved for the process itself.",
        "Next smaller: the same with XLA's min memory schedule, 41.00 MiB.",
    ]
    assert plan_summary(plan._replace(chosen=smaller, smaller=slower), 0).splitlines() == [
        "no rematerialization, min memory schedule, the fastest that fits of 3 compiled programs.",
        "Next smaller: remat policy segments, 4 microbatches, min memory schedule, 30.00 MiB, "
        "about 25% slower.",
    ]


def test_a_prediction_traces_the_step_once():
    run = setup(Config(name="x", data=Digits(), model=Mlp(hidden=(8,))))
    loss = Mock(wraps=run.step.loss)
    run = run._replace(step=run.step.replace(loss=loss))
    planned = planning.predict(run)
    assert loss.call_count == 1
    programs = [
        run.step.lower(run.state_shapes, run.batch_shapes).compile(compiler_options=dict(options))
        for options in memory.CANDIDATE_OPTIONS["cpu"]
    ]
    smallest = min(memory.peak(program).total for program in programs)
    assert planned.executable.report.peak.total == smallest


def test_a_target_has_the_devices_of_the_mesh(workplace, monkeypatch):
    target = Mock(side_effect=UserError("no"))
    monkeypatch.setattr("train.commands.memory.target_of", target)
    words = "--target", "x", "--mesh.data", 2, "--mesh.fsdp", 3
    assert exit_code("memory", "deep.py", *words) == 2
    target.assert_called_once_with("x", 6)
