"""Claims, their table and the runner; no benchmark is run."""

import argparse
import ast
import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
from benchmark_cases import MACHINE

from benchmarks import chart, claims, first_page, machine, report
from benchmarks import runner as program
from benchmarks.claims import Claim
from benchmarks.suite import GPU, PATHS, SUITE, Benchmark

FOLDER = Path(claims.__file__).parent
SHARED = {"--rounds", "--target", "--json"}

RESULTS = {
    "stack": {
        "command": ["python", "-m", "benchmarks.stack"],
        "seconds": 61.2,
        "load": 0.25,
        "ended": "2026-01-02 03:04+00:00",
        "claims": [
            Claim("temporaries", "flax | linen", 0.39001, "<= 0.39").as_json(),
            Claim("time", "flax", 0.5, "<= 1.0", "time").as_json(),
            Claim("errors", "flax", 2.0, kind="quality").as_json(),
        ],
        "versions": {"jax": "0.10.2", "flax": "0.12.8"},
        "missing": ["torch (no module)"],
    },
    "peers": {"why": "not installed: torch"},
}

FAKE = """
from benchmarks.claims import Claim, argument_parser, publish

args = argument_parser("A fake.", rounds=3).parse_args()
print("rounds", args.rounds)
publish([Claim("something", "a peer", 0.25, "<= 0.5")], args, "numpy", data={"n": [1, 2]})
"""

TRAINING = """
from pathlib import Path

from benchmarks.claims import Claim, argument_parser, publish

parser = argument_parser("A fake that trains.")
parser.add_argument("--out", type=Path)
args = parser.parse_args()
half = args.out / "half"
if not half.exists():
    args.out.mkdir(parents=True)
    half.write_text("0.5")
    raise SystemExit("interrupted")
publish([Claim("something", "a peer", float(half.read_text()))], args, "numpy")
"""


class Script(Benchmark):
    """One that is not in the folder: its name is a path."""

    name = "fake"
    summary = "A fake."

    def command(self, paths, quick, runs):
        of_runs = ["--out", str(runs)] if self.trains else []
        return [sys.executable, self.script, *of_runs, *(self.quick if quick else ())]


def publishing():
    """Names of the scripts that publish claims."""
    names = set()
    for path in FOLDER.glob("*.py"):
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        if any(isinstance(f, ast.Name) and f.id == "publish" for f in calls):
            names.add(path.stem)
    return names


# Claims


def test_target_is_compared_with_the_unrounded_figure():
    for target, ratio, met in (
        ("<= 0.39", 0.39, True),
        ("<= 0.39", 0.3900001, False),
        ("< 0.02", 0.02, False),
        ("< 0.02", 0.0199, True),
        (">= 10", 10.0, True),
        (">= 10", 9.9999, False),
        ("> 0", 0.0, False),
        ("<= 1e-5", 2e-5, False),
        ("<= 1.0", math.nan, False),
        (">= 1.0", math.nan, False),
        ("", 0.39, None),
    ):
        assert Claim("memory", "flax", ratio, target).met is met


def test_figures_are_rounded_to_the_worse_side_but_not_past_the_target():
    for target, ratio, shown in (
        ("<= 0.39", 0.39001, "0.391"),
        ("<= 0.39", 0.39, "0.39"),
        ("", 0.1, "0.1"),
        ("<= 1.0", 1.00069, "1.001"),
        ("<= 1.005", 1.0004, "1.001"),
        ("<= 0.3905", 0.39001, "0.3901"),
        (">= 10", 72.19, "72.1"),
        (">= 0.9", 0.9799, "0.979"),
        ("<= 1.0", 1783.2, "1790"),
        ("<= 1e-5", 1.2301e-6, "1.24e-6"),
        ("< 0.02", -0.0121, "-0.0121"),
        ("<= 0", 0, "0.0"),
        ("<= 1.0", math.inf, "not finite"),
    ):
        assert Claim("memory", "flax", ratio, target).shown == shown


@pytest.mark.parametrize("target", ["0.39", "<=0.39", "<= a lot", "== 1", "<= 1 or so", "<= nan"])
def test_rejects_target_that_is_not_a_comparison(target):
    with pytest.raises(ValueError, match=re.escape(f"such as '<= 0.39'; got {target!r}")):
        Claim("memory", "flax", 0.3, target)


def test_figure_that_is_not_finite_is_null_in_json_and_not_met():
    written = Claim("memory", "flax", math.inf, "<= 0.39").as_json()
    assert (written["ratio"], written["met"]) == (None, False)
    assert math.isnan(Claim.from_json(written).ratio)


def test_publish_writes_claims_with_installed_versions(tmp_path, capsys):
    args = argparse.Namespace(json=str(tmp_path / "x.json"))
    claims.publish([Claim("memory", "flax", 0.5, "<= 0.39")], args, "jax", "no-such-package")
    saved = json.loads((tmp_path / "x.json").read_text())
    assert set(saved["versions"]) == {"fnet-jax", "jax", "python"}
    assert saved["claims"][0]["met"] is False
    printed = capsys.readouterr().out
    assert "- 0.5 (<= 0.39: not met) memory; baseline: flax\n" in printed
    assert "Versions: jax " in printed


# The suite


def test_suite_has_every_script_that_publishes_claims():
    assert {b.script for b in SUITE + GPU} == publishing()


def test_quick_runs_what_the_first_page_shows():
    quick = {b.name for b in SUITE if b.quick is not None}
    shown = {headline.benchmark for headline in first_page.HEADLINES}
    assert quick == shown | {chart.SOURCE, "readme"}


def test_names_in_the_suite_are_unique():
    assert len({b.name for b in SUITE}) == len(SUITE)


def test_scripts_have_the_options_that_the_suite_passes():
    for b in SUITE + GPU:
        source = (FOLDER / f"{b.script}.py").read_text()
        given = {w for w in (*b.arguments, *(b.quick or ())) if w.startswith("--")}
        own = set(re.findall(r'"(--[\w-]+)"', source))
        assert given - SHARED <= own, b
        assert "--rounds" not in given or "rounds=" in source, b
        assert "--target" not in given or "target=True" in source or "--target" in own, b
        assert bool(b.path) == ("--path" in own), b
        assert b.path in ("", *PATHS), b
        assert b.trains == ('add_argument("--out"' in source), b
        assert b.summary.endswith("."), b


def test_scripts_can_be_imported():
    lacking = {
        b.script
        for b in SUITE
        if not b.arguments and b._replace(path="").reason_to_skip({}, quick=False)
    }
    for script in {b.script for b in SUITE} - lacking:
        importlib.import_module(f"benchmarks.{script}")


def test_reason_to_skip():
    b = Benchmark("x", packages=("jax", "no-such-package"), path="text", quick=None)
    assert b.reason_to_skip({}, quick=False) == "not installed: no-such-package"
    b = b._replace(packages=())
    assert b.reason_to_skip({"text": None}, quick=False).startswith("needs --text: ")
    assert b.reason_to_skip({"text": "a.txt"}, quick=True) == "not on the first page"
    assert b.reason_to_skip({"text": "a.txt"}, quick=False) == ""


# The report


def test_results_are_read_only_on_the_same_hardware(tmp_path):
    report.write(MACHINE, RESULTS, tmp_path)
    assert report.read(tmp_path, MACHINE | {"python": "3.13.0"}) == RESULTS
    with pytest.raises(ValueError, match="has results of another machine"):
        report.read(tmp_path, MACHINE | {"cores": 4})
    assert report.read(tmp_path / "elsewhere", MACHINE) == {}


# The runner


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A suite of scripts that work, fail, print nothing, lack a package, or train."""
    monkeypatch.setattr(machine, "describe", lambda: MACHINE)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))

    def script(name, text, **options):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return type(name, (Script,), {"name": name})(str(path), **options)

    return [
        script("fake", FAKE, quick=("--rounds", "1")),
        script("broken", "raise SystemExit('out of luck')"),
        script("silent", ""),
        script("absent", "", packages=("no-such-package",)),
        script("training", TRAINING, trains=True),
    ]


def run(tmp_path, suite, *arguments):
    code = program.main(["--out", str(tmp_path / "out"), *arguments], suite)
    return code, json.loads((tmp_path / "out" / "benchmarks.json").read_text())["results"]


def test_failures_and_missing_packages_are_reported_and_the_others_run(tmp_path, fake, capsys):
    code, results = run(tmp_path, fake[:1], "--quick")
    assert code == 0
    assert results["fake"]["command"][-2:] == ["--rounds", "1"]
    code, results = run(tmp_path, fake)
    assert code == program.FAILED
    assert list(results) == ["fake", "broken", "silent", "absent", "training"]
    assert [c["ratio"] for c in results["fake"]["claims"]] == [0.25]
    assert results["fake"]["data"] == {"n": [1, 2]}
    assert results["broken"]["why"] == "failed with exit code 1: out of luck"
    assert results["silent"]["why"] == "failed with exit code 0: it wrote no claims"
    assert results["absent"] == {"why": "not installed: no-such-package"}
    assert (tmp_path / "out/logs/fake.log").read_text().startswith("rounds 3\n")
    printed = capsys.readouterr().out
    assert re.search(r"fake +0:0\d  1 met", printed)
    assert "See " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "--only nothing: matches no benchmark of"),
        (["--text", "/nowhere/at.txt"], "--text: /nowhere/at.txt does not exist"),
        (["--gpu"], "--gpu: JAX finds no GPU here"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_jax_failure_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(SystemExit, match="2"):
        program.main([])
    assert "error: JAX failed with exit code 1 while listing its devices" in capsys.readouterr().err
