"""The README's table of claims, renewed from results; no benchmark is run."""

from pathlib import Path

import pytest
from benchmark_cases import MACHINE

from benchmarks import chart, first_page
from benchmarks.claims import Claim
from benchmarks.suite import SUITE

README = Path(first_page.ROOT / "README.md").read_text()


def results(ratio=0.25):
    """The claims of each headline, and one that is told nowhere."""
    found = {}
    for headline in first_page.HEADLINES:
        of = found.setdefault(headline.benchmark, {"claims": [], "versions": {"jax": "0.10.2"}})
        for pattern in filter(None, (headline.memory, headline.time)):
            claim, peer = (words.replace("*", "x") for words in (pattern, headline.peer))
            of["claims"].append(Claim(claim, peer, ratio, "<= 0.3").as_json())
    next(iter(found.values()))["claims"].append(Claim("another", "x", 2.0).as_json())
    return found


def test_every_headline_is_of_a_benchmark_that_is_run():
    assert {h.benchmark for h in first_page.HEADLINES} <= {b.name for b in SUITE}


def test_the_table_stands_between_its_marks_and_nothing_else_changes():
    page = first_page.renewed(README, MACHINE, results())
    before, _, rest = README.partition(first_page.BEGIN)
    _, _, after = rest.partition(first_page.END)
    assert page.startswith(before)
    assert page.endswith(first_page.END + after)
    for headline in first_page.HEADLINES:
        cells = ("0.25" if pattern else "" for pattern in (headline.memory, headline.time))
        peer = headline.peer.replace("*", "x")
        assert f"| {headline.words} | {peer} | {' | '.join(cells)} | [`" in page
    assert "Measured on A CPU, 2 cores, 8 GiB" in page
    assert "2 x cpu; jax 0.10.2. " in page
    assert "](docs/benchmarks/benchmarks.md)" in page
    assert "![" not in page
    assert first_page.renewed(page, MACHINE, results()) == page


def test_a_claim_that_misses_its_target_says_so():
    page = first_page.renewed(README, MACHINE, results(0.35))
    assert "| 0.35 (target <= 0.3) | 0.35 (target <= 0.3) | [`" in page


def test_the_chart_is_on_the_page_where_it_was_drawn():
    drawn = results()
    drawn[chart.SOURCE]["data"] = {"depths": [8]}
    assert "](docs/benchmarks/benchmarks.png)" in first_page.renewed(README, MACHINE, drawn)


def test_a_headline_that_no_claim_or_several_match_is_refused():
    lost = results()
    lost["attention"]["claims"] = []
    with pytest.raises(ValueError, match=r"expected one claim .* of attention, got"):
        first_page.lines(lost)
    twice = results()
    twice["attention"]["claims"] *= 2
    with pytest.raises(ValueError, match="expected one claim"):
        first_page.lines(twice)


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="end of claims"):
        first_page.renewed("# A page\n", MACHINE, results())
