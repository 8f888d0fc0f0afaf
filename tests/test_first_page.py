"""The README's table of claims, renewed from results; no benchmark is run."""

from pathlib import Path

import pytest
from benchmark_cases import MACHINE

from benchmarks import first_page
from benchmarks.claims import Claim
from benchmarks.suite import SUITE

README = Path(first_page.ROOT / "README.md").read_text()


def results(ratio=0.25):
    """One claim of each headline, and one that is told nowhere."""
    found = {}
    for headline in first_page.HEADLINES:
        claim, peer = (words.replace("*", "x") for words in (headline.claim, headline.peer))
        of = found.setdefault(headline.benchmark, {"claims": []})
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
        assert f"| {headline.words} | " in page
    assert page.count(f"| {Claim('', '', 0.25).shown} | <= 0.3 | yes |") == len(
        first_page.HEADLINES
    )
    assert "Measured on A CPU, 2 cores, 8 GiB" in page
    assert first_page.renewed(page, MACHINE, results()) == page


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
