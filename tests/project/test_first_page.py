"""The README's table and picture; no benchmark is run."""

import json
from pathlib import Path

import pytest
from benchmark_cases import MACHINE

from benchmarks import chart, first_page, report
from benchmarks.claims import Claim
from benchmarks.suite import SUITE

README = Path(first_page.ROOT / "README.md").read_text()
TABLE = """\
|  | fnet | others |
| --- | --- | --- |
| [time of a step](docs/benchmarks/page.md) | **0.30** | theirs 0.60 |
| [clipping](docs/benchmarks/page.md) | **1.00** | theirs 12 |
"""


@pytest.fixture
def headlines(monkeypatch):
    """Two headlines: fnet and a baseline compared with the plain program, and with their own."""
    plain, theirs = (first_page.Match("step: time", b) for b in ("plain", "theirs"))
    own = first_page.Match("clipping, *")
    lines = (
        first_page.Headline(
            "time of a step",
            "bench",
            "page.md",
            (first_page.Figure("", plain),),
            (first_page.Figure("theirs", plain, theirs),),
        ),
        first_page.Headline(
            "clipping",
            "bench",
            "page.md",
            (first_page.Figure("", own),),
            (first_page.Figure("theirs", own),),
        ),
    )
    monkeypatch.setattr(first_page, "HEADLINES", lines)


def results(**more):
    claims = [
        Claim("step: time", "plain", 0.3, "<= 0.1"),
        Claim("step: time", "theirs", 0.5),
        Claim(
            "clipping, MLP: time relative to a plain gradient, 1.00",
            "library: 12.04 relative to its own time",
            0.1,
        ),
        Claim("another", "plain", 2.0),
    ]
    result = {"claims": [c.as_json() for c in claims], "versions": {"jax": "0.10.2"}}
    return {"bench": result | more}


def test_every_headline_has_a_benchmark_in_the_suite_and_a_page():
    assert {h.benchmark for h in first_page.HEADLINES} <= {b.name for b in SUITE}
    for headline in first_page.HEADLINES:
        assert (first_page.ROOT / first_page.FOLDER / headline.page).is_file()


def test_first_page_has_at_most_five_rows():
    assert len(first_page.HEADLINES) <= 5


def test_only_the_text_between_the_marks_changes(headlines):
    page = first_page.update_page(README, MACHINE, results())
    before, _, rest = README.partition(first_page.BEGIN)
    _, _, after = rest.partition(first_page.END)
    assert page.startswith(before + first_page.BEGIN)
    assert page.endswith(first_page.END + after)
    assert f"\n{TABLE}\n" in page
    assert "Measured on A CPU, 2 cores, 8 GiB" in page
    assert "2 x cpu; jax 0.10.2. " in page
    assert "](docs/benchmarks/benchmarks.md)" in page
    assert "<= 0.1" not in page
    assert first_page.update_page(page, MACHINE, results()) == page


def test_rejects_headline_without_exactly_one_claim(headlines):
    with pytest.raises(ValueError, match="expected one claim 'step: time' of bench, got"):
        first_page.lines(results(claims=[]))
    with pytest.raises(ValueError, match="expected one claim"):
        first_page.lines(results(claims=2 * results()["bench"]["claims"]))


def test_quick_results_are_compared_with_the_page(headlines, tmp_path, monkeypatch):
    monkeypatch.setattr(first_page, "ROOT", tmp_path)
    (tmp_path / first_page.FOLDER).mkdir(parents=True)
    saved = {"machine": MACHINE, "results": results()}
    (tmp_path / first_page.FOLDER / "benchmarks.json").write_text(json.dumps(saved))
    page = "- 640 MB, 0.97 s per step\n+ 166 MB, 0.46 s per step\n"
    new = results(claims=[Claim("step: time", "plain", 0.6).as_json()])
    new["readme"] = {"data": {"measured": {"-": [640, 0.5], "+": [83, 0.25]}}}
    lines = first_page.compare(page, new).splitlines()
    assert "| time of a step | fnet | 0.30 | 0.60 | 2.00 |" in lines
    assert "| time of a step | theirs | 0.60 |  |  |" in lines  # not measured
    assert "| the program, MB | fnet | 166.00 | 83.00 | 0.50 |" in lines
    assert "| the program, s per step | flax and optax | 0.97 | 0.50 | 0.52 |" in lines


def test_rejects_page_without_marks(headlines):
    with pytest.raises(ValueError, match="end of claims"):
        first_page.update_page("# A page\n", MACHINE, results())


def test_picture_is_the_same_for_the_same_data_and_has_the_colors_of_its_theme(tmp_path):
    sizes = {kind.source: [1e6, 2e6] for kind in chart.KINDS}
    data = {"network": "blocks", "depths": [8, 16], "temporaries": sizes}
    pictures = []
    for i, theme in enumerate((chart.LIGHT, chart.LIGHT, chart.DARK)):
        path = tmp_path / f"{i}.svg"
        assert chart.memory_by_depth({chart.SOURCE: {"data": data}}, path, theme)
        pictures.append(path.read_text())
    assert pictures[0] == pictures[1]
    for kind in chart.KINDS:
        assert kind.light.lower() in pictures[0]
        assert kind.dark.lower() in pictures[2]
    assert chart.DARK.page.lower() in pictures[2]


def test_published_results_have_every_line_of_the_picture():
    saved = json.loads((first_page.ROOT / first_page.FOLDER / report.FILES[0]).read_text())
    data = saved["results"][chart.SOURCE]["data"]
    assert {kind.source for kind in chart.KINDS} <= set(data["temporaries"])
