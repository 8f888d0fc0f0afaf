"""Update the table of claims in the README from the results in docs/benchmarks.

    python -m benchmarks --out docs/benchmarks       # hours
    python -m benchmarks.first_page

The README has its own text for each claim (`HEADLINES`). The page of all claims,
docs/benchmarks/benchmarks.md, is in the navigation of mkdocs.yml.
"""

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import chart, machine, report
from benchmarks.claims import Claim
from benchmarks.measure import markdown_table

ROOT = Path(__file__).parent.parent
FOLDER = "docs/benchmarks"
BEGIN, END = "<!-- claims: python -m benchmarks.first_page -->\n", "<!-- end of claims -->"


class Headline(NamedTuple):
    """A row of the README's table.

    Attributes:
      text: text of the row.
      benchmark: name in `benchmarks.suite`.
      page: page of ``docs/benchmarks/`` with details.
      memory: pattern of the claim about memory, or "".
      time: pattern of the claim about time, or "".
      baseline: pattern of the baseline. With it each pattern matches exactly one claim.
    """

    text: str
    benchmark: str
    page: str
    memory: str = ""
    time: str = ""
    baseline: str = "*"


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
        baseline="flax linen*",
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
        baseline="flax linen, relu",
    ),
    Headline(
        "reversible ResNet of the same size: a train step",
        "resnet50_step",
        "in_place.md",
        "*fnet.reversible*: peak",
        baseline="flax linen, leaky_relu",
    ),
    Headline(
        "cross-entropy over a vocabulary of 32,768, 256 features: a gradient",
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
        baseline="optax*",
    ),
    Headline(
        "a language model, 33.8 M parameters: a train step",
        "transformer_step",
        "sequence_models.md",
        "*step, none, ?pu: peak*",
        "*step, none, ?pu: time*",
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
        baseline="jax, 16 calls",
    ),
)


def lines(results: report.Results) -> list[dict[str, str]]:
    """Build a row of the table for each headline.

    Raises:
      ValueError: if a pattern does not match exactly one claim.
    """
    claims = {name: report.claims_of(result) for name, result in results.items()}
    return [_line(headline, claims.get(headline.benchmark, [])) for headline in HEADLINES]


def update_page(page: str, described: Mapping[str, Any], results: report.Results) -> str:
    """Replace the text between the page's two marks with the table, the machine and the chart."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"first_page: the page must contain {BEGIN.strip()} and {END}")
    versions = {r["versions"]["jax"] for r in results.values() if "jax" in r.get("versions", {})}
    table, picture = (f"{FOLDER}/{name}" for name in report.FILES[1:])
    notes = (
        "Ratios to the baseline in the second column, rounded up; lower is better. "
        f"Measured on {machine.format_machine(described)}; jax {', '.join(sorted(versions))}. "
        f"[All claims]({table})."
    )
    parts = [markdown_table(lines(results), left=2), notes]
    if results.get(chart.SOURCE, {}).get("data"):
        parts.append(f"![Memory of a gradient by depth]({picture})")
    return f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def _line(headline: Headline, claims: list[Claim]) -> dict[str, str]:
    patterns = {"memory": headline.memory, "time": headline.time}
    matched = {kind: _match(headline, p, claims) for kind, p in patterns.items() if p}
    cells = {kind: matched[kind].shown if kind in matched else "" for kind in patterns}
    more = f"[`{headline.benchmark}`]({FOLDER}/{headline.page})"
    baselines = {claim.baseline: None for claim in matched.values()}
    return {"": headline.text, "baseline": ", ".join(baselines)} | cells | {"more": more}


def _match(headline: Headline, pattern: str, claims: list[Claim]) -> Claim:
    matches = [
        c
        for c in claims
        if fnmatch.fnmatchcase(c.claim, pattern)
        and fnmatch.fnmatchcase(c.baseline, headline.baseline)
    ]
    if len(matches) != 1:
        raise ValueError(
            f"first_page: expected one claim {pattern!r} of {headline.benchmark}, "
            f"got {[c.claim for c in matches or claims]}"
        )
    return matches[0]


def main() -> None:
    saved = json.loads((ROOT / FOLDER / report.FILES[0]).read_text())
    page = ROOT / "README.md"
    page.write_text(update_page(page.read_text(), saved["machine"], saved["results"]))


if __name__ == "__main__":
    main()
