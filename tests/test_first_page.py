"""The README's table of claims; no benchmark is run."""

from pathlib import Path

import pytest
from benchmark_cases import MACHINE

from benchmarks import chart, first_page
from benchmarks.claims import Claim
from benchmarks.suite import SUITE

README = Path(first_page.ROOT / "README.md").read_text()


def results(ratio=0.25):
    """Results with the claims of each headline, and one other claim."""
    by_benchmark = {}
    for headline in first_page.HEADLINES:
        result = by_benchmark.setdefault(
            headline.benchmark, {"claims": [], "versions": {"jax": "0.10.2"}}
        )
        for pattern in filter(None, (headline.memory, headline.time)):
            claim, peer = (text.replace("*", "x") for text in (pattern, headline.baseline))
            result["claims"].append(Claim(claim, peer, ratio, "<= 0.3").as_json())
    next(iter(by_benchmark.values()))["claims"].append(Claim("another", "x", 2.0).as_json())
    return by_benchmark


def test_every_headline_has_a_benchmark_in_the_suite():
    assert {h.benchmark for h in first_page.HEADLINES} <= {b.name for b in SUITE}


def test_only_the_text_between_the_marks_changes():
    page = first_page.update_page(README, MACHINE, results())
    before, _, rest = README.partition(first_page.BEGIN)
    _, _, after = rest.partition(first_page.END)
    assert page.startswith(before)
    assert page.endswith(first_page.END + after)
    for headline in first_page.HEADLINES:
        cells = ("0.25" if pattern else "" for pattern in (headline.memory, headline.time))
        peer = headline.baseline.replace("*", "x")
        assert f"| {headline.text} | {peer} | {' | '.join(cells)} | [`" in page
    assert "Measured on A CPU, 2 cores, 8 GiB" in page
    assert "2 x cpu; jax 0.10.2. " in page
    assert "](docs/benchmarks/benchmarks.md)" in page
    assert "![" not in page
    assert first_page.update_page(page, MACHINE, results()) == page


def test_table_has_ratios_without_targets():
    page = first_page.update_page(README, MACHINE, results(0.35))
    assert "| 0.35 | 0.35 | [`" in page
    assert "target" not in page.partition(first_page.BEGIN)[2].partition(first_page.END)[0]


def test_chart_is_shown_if_it_has_data():
    with_chart = results()
    with_chart[chart.SOURCE]["data"] = {"depths": [8]}
    assert "](docs/benchmarks/benchmarks.png)" in first_page.update_page(
        README, MACHINE, with_chart
    )


def test_rejects_headline_without_exactly_one_claim():
    missing = results()
    missing["attention"]["claims"] = []
    with pytest.raises(ValueError, match=r"expected one claim .* of attention, got"):
        first_page.lines(missing)
    twice = results()
    twice["attention"]["claims"] *= 2
    with pytest.raises(ValueError, match="expected one claim"):
        first_page.lines(twice)


def test_rejects_page_without_marks():
    with pytest.raises(ValueError, match="end of claims"):
        first_page.update_page("# A page\n", MACHINE, results())
