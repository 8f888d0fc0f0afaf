"""Renews the table of claims on the README from results that lie in docs/benchmarks.

    python -m benchmarks --out docs/benchmarks       # hours
    python -m benchmarks.first_page

What is told there has words of its own. The page of all claims, docs/benchmarks/benchmarks.md,
goes into the navigation of mkdocs.yml.
"""

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import chart, machine, report
from benchmarks.claims import Claim
from benchmarks.measure import markdown

ROOT = Path(__file__).parent.parent
FOLDER = "docs/benchmarks"
BEGIN, END = "<!-- claims: python -m benchmarks.first_page -->\n", "<!-- end of claims -->"


class Headline(NamedTuple):
    """A line of the first page.

    Attributes:
      words: what it says there.
      benchmark: the name in `benchmarks.suite`.
      page: of ``docs/``, with more of it.
      memory: a pattern of the benchmark's claim about it; "" for none.
      time: likewise.
      peer: a pattern of what both are beside; with it each matches one claim.
    """

    words: str
    benchmark: str
    page: str
    memory: str = ""
    time: str = ""
    peer: str = "*"


HEADLINES = (
    Headline(
        "in-place batch norm + leaky_relu, 16 blocks: a gradient",
        "abn_stack_on_cpu",
        "in_place.md",
        "fnet.abn, leaky_relu, * blocks: temporaries*",
        "fnet.abn, leaky_relu, * blocks: time",
        "flax*",
    ),
    Headline(
        "the same, compiled for an H100",
        "abn_stack_ahead_of_time_h100",
        "in_place.md",
        "fnet.abn, leaky_relu, *: temporaries",
        peer="flax linen*",
    ),
    Headline(
        "reversible stack, 16 blocks: a gradient",
        "abn_stack_on_cpu",
        "in_place.md",
        "fnet.reversible*temporaries of the gradient",
        "fnet.reversible*: time",
    ),
    Headline(
        "ResNet-50 in place: a train step",
        "resnet50_step",
        "in_place.md",
        "*fnet.abn, relu*: peak",
        peer="flax linen, relu",
    ),
    Headline(
        "reversible ResNet of its size: a train step",
        "resnet50_step",
        "in_place.md",
        "*fnet.reversible*: peak",
        peer="flax linen, leaky_relu",
    ),
    Headline(
        "cross-entropy of 32,768 words from 256 features: a gradient",
        "linear_cross_entropy",
        "memory.md",
        "*, value and gradients, *: temporaries",
        "*, value and gradients, *: time",
    ),
    Headline(
        "attention, 2,048 tokens: a gradient",
        "attention",
        "memory.md",
        "*tokens, gradient: temporaries",
        "*tokens, gradient: time",
    ),
    Headline(
        "8 microbatches (gradient accumulation), Adam: a train step",
        "accumulation",
        "memory.md",
        "*unrolled layers, *: peak of the step",
        peer="optax*",
    ),
    Headline(
        "a language model, 33.8 M parameters: a train step",
        "transformer_step",
        "sequence_models.md",
        "*step, keep, ?pu: peak*",
        "*step, keep, ?pu: time*",
    ),
    Headline(
        "per-example gradients, clipped and summed, MLP",
        "clipped_grad",
        "per_example.md",
        "clipped_grad, MLP *: memory",
        "clipped_grad, MLP *: time",
    ),
    Headline(
        "the same, transformer",
        "clipped_grad",
        "per_example.md",
        "clipped_grad, transformer, width 384*: memory",
        "clipped_grad, transformer, width 384*: time",
    ),
    Headline(
        "the same, small CNN",
        "clipped_grad",
        "per_example.md",
        "clipped_grad, small CNN *: memory",
        "clipped_grad, small CNN *: time",
    ),
    Headline(
        "16 gradients at one point, MLP",
        "batched",
        "batched.md",
        time="vjps, *N = 16: time",
        peer="jax, 16 calls",
    ),
)


def lines(results: report.Results) -> list[dict[str, str]]:
    """A line of the table for each headline.

    Raises:
      ValueError: if not one claim matches a pattern.
    """
    claims = {name: report.claims_of(result) for name, result in results.items()}
    return [_line(headline, claims.get(headline.benchmark, [])) for headline in HEADLINES]


def renewed(page: str, on: Mapping[str, Any], results: report.Results) -> str:
    """The page with the table, where it was measured, and the chart, between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"first_page: expected {BEGIN.strip()} and {END} on the page")
    versions = {r["versions"]["jax"] for r in results.values() if "jax" in r.get("versions", {})}
    table, picture = (f"{FOLDER}/{name}" for name in report.FILES[1:])
    told = (
        "Ratios to the peer in the second column, rounded up; lower is better. A missed target "
        f"is shown in brackets. Measured on {machine.in_words(on)}; jax "
        f"{', '.join(sorted(versions))}. {report.sums(results)} [All of them]({table})."
    )
    parts = [markdown(lines(results), left=2), told]
    if results.get(chart.SOURCE, {}).get("data"):
        parts.append(f"![Memory of a gradient by depth]({picture})")
    return f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def _line(headline: Headline, claims: list[Claim]) -> dict[str, str]:
    patterns = {"memory": headline.memory, "time": headline.time}
    found = {what: _found(headline, p, claims) for what, p in patterns.items() if p}
    cells = {what: _cell(found[what]) if what in found else "" for what in patterns}
    more = f"[`{headline.benchmark}`](docs/{headline.page}#measurements)"
    peers = {claim.peer: None for claim in found.values()}
    return {"": headline.words, "beside": ", ".join(peers)} | cells | {"more": more}


def _found(headline: Headline, pattern: str, claims: list[Claim]) -> Claim:
    found = [
        c
        for c in claims
        if fnmatch.fnmatchcase(c.claim, pattern) and fnmatch.fnmatchcase(c.peer, headline.peer)
    ]
    if len(found) != 1:
        raise ValueError(
            f"first_page: expected one claim {pattern!r} of {headline.benchmark}, "
            f"got {[c.claim for c in found or claims]}"
        )
    return found[0]


def _cell(claim: Claim) -> str:
    return f"{claim.shown} (target {claim.target})" if claim.met is False else claim.shown


def main() -> None:
    found = json.loads((ROOT / FOLDER / report.FILES[0]).read_text())
    page = ROOT / "README.md"
    page.write_text(renewed(page.read_text(), found["machine"], found["results"]))


if __name__ == "__main__":
    main()
