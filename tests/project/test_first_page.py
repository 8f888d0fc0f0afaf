"""The README's table and picture; no benchmark is run."""

from pathlib import Path

import pytest
from benchmark_cases import MACHINE

from benchmarks import first_page
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
    assert "](docs/benchmarks/index.md#all-claims)" in page
    assert "<= 0.1" not in page
    assert first_page.update_page(page, MACHINE, results()) == page
