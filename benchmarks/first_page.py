"""Renews the table of claims on the README from results that lie in docs/benchmarks.

    python -m benchmarks --out docs/benchmarks       # hours
    python -m benchmarks.first_page

Each claim that is told there has words of its own.
"""

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, report
from benchmarks.claims import Claim
from benchmarks.measure import markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "benchmarks" / report.FILES[0]
BEGIN, END = "<!-- claims: python -m benchmarks.first_page -->\n", "<!-- end of claims -->"


class Headline(NamedTuple):
    """A claim for the first page.

    Attributes:
      words: what it says there.
      benchmark: the name in `benchmarks.suite`.
      claim: a pattern of what it says in the benchmark.
      peer: a pattern of what it is beside; both together match one claim.
      page: of ``docs/``, with more of it.
    """

    words: str
    benchmark: str
    claim: str
    page: str
    peer: str = "*"


HEADLINES = (
    Headline(
        "in-place batch norm + leaky_relu, 16 blocks: memory of a gradient",
        "abn_stack_on_cpu",
        "fnet.abn, leaky_relu, * blocks: temporaries*",
        "in_place.md",
    ),
    Headline(
        "the same: time", "abn_stack_on_cpu", "fnet.abn, leaky_relu, * blocks: time", "in_place.md"
    ),
    Headline(
        "the same, compiled for an H100: memory",
        "abn_stack_ahead_of_time_h100",
        "fnet.abn, leaky_relu, *: temporaries",
        "in_place.md",
        "flax linen*",
    ),
    Headline(
        "reversible stack, 16 blocks: memory of a gradient",
        "abn_stack_on_cpu",
        "fnet.reversible*temporaries of the gradient",
        "in_place.md",
    ),
    Headline("the same: time", "abn_stack_on_cpu", "fnet.reversible*: time", "in_place.md"),
    Headline(
        "ResNet-50 in place: peak of a train step",
        "resnet50_step",
        "*fnet.abn, relu*: peak",
        "in_place.md",
    ),
    Headline(
        "the same size, reversible: peak",
        "resnet50_step",
        "*fnet.reversible*: peak",
        "in_place.md",
    ),
    Headline(
        "cross-entropy of 32,768 words from hidden states: memory",
        "linear_cross_entropy",
        "*, value and gradients, *: temporaries",
        "memory.md",
    ),
    Headline(
        "the same: time", "linear_cross_entropy", "*, value and gradients, *: time", "memory.md"
    ),
    Headline(
        "attention, 2,048 tokens: memory of a gradient",
        "attention",
        "*tokens, gradient: temporaries",
        "memory.md",
    ),
    Headline("the same: time", "attention", "*tokens, gradient: time", "memory.md"),
    Headline(
        "8 microbatches, Adam: peak of a train step",
        "accumulation",
        "*unrolled layers, *: peak of the step",
        "memory.md",
    ),
    Headline(
        "sum of clipped single-example gradients, MLP: memory",
        "clipped_grad",
        "clipped_grad, MLP *: memory",
        "per_example.md",
    ),
    Headline("the same: time", "clipped_grad", "clipped_grad, MLP *: time", "per_example.md"),
    Headline(
        "the same, transformer of width 384: memory",
        "clipped_grad",
        "clipped_grad, transformer, width 384*: memory",
        "per_example.md",
    ),
    Headline(
        "the same: time",
        "clipped_grad",
        "clipped_grad, transformer, width 384*: time",
        "per_example.md",
    ),
    Headline(
        "16 gradients at one point, MLP: time", "batched", "vjps, *N = 16: time", "batched.md"
    ),
)


def lines(results: report.Results) -> list[dict[str, str]]:
    """A line of the table for each headline.

    Raises:
      ValueError: if not one claim matches a headline.
    """
    return [_line(headline, _found(headline, results)) for headline in HEADLINES]


def renewed(page: str, on: Mapping[str, Any], results: report.Results) -> str:
    """The page with the table, and where it was measured, between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"first_page: expected {BEGIN.strip()} and {END} on the page")
    told = f"Measured on {machine.in_words(on)}. {report.sums(results)}"
    return f"{before}{BEGIN}\n{markdown(lines(results), left=2)}\n\n{told}\n\n{END}{after}"


def _found(headline: Headline, results: report.Results) -> Claim:
    claims = report.claims_of(results.get(headline.benchmark, {}))
    found = [
        c
        for c in claims
        if fnmatch.fnmatchcase(c.claim, headline.claim)
        and fnmatch.fnmatchcase(c.peer, headline.peer)
    ]
    if len(found) != 1:
        raise ValueError(
            f"first_page: expected one claim {headline.claim!r} of {headline.benchmark}, "
            f"got {[c.claim for c in found or claims]}"
        )
    return found[0]


def _line(headline: Headline, claim: Claim) -> dict[str, str]:
    page = f"docs/{headline.page}#measured"
    return {
        "": headline.words,
        "beside": claim.peer,
        "ratio": claim.shown,
        "target": claim.target,
        "met": report.VERDICTS[claim.met],
        "measured by `python -m benchmarks.`": f"[`{headline.benchmark}`]({page})",
    }


def main() -> None:
    found = json.loads(RESULTS.read_text())
    page = ROOT / "README.md"
    page.write_text(renewed(page.read_text(), found["machine"], found["results"]))


if __name__ == "__main__":
    main()
