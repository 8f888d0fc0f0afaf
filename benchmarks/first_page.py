"""Update the README's table and picture from the results in docs/benchmarks.

    python -m benchmarks --out docs/benchmarks       # hours
    python -m benchmarks.first_page

The README has its own text for each claim (`HEADLINES`).
"""

import fnmatch
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import chart, machine, readme, report
from benchmarks.claims import Claim
from benchmarks.measure import markdown_table

ROOT = Path(__file__).parent.parent
FOLDER = "docs/benchmarks"
BEGIN, END = "<!-- claims: python -m benchmarks.first_page -->\n", "<!-- end of claims -->"
PICTURES = {"docs/assets/memory-light.svg": chart.LIGHT, "docs/assets/memory-dark.svg": chart.DARK}


class Match(NamedTuple):
    """A claim of a benchmark.

    Attributes:
      claim: pattern of the claim.
      baseline: pattern of the baseline. Both patterns match exactly one claim.
    """

    claim: str
    baseline: str = "*"


class Figure(NamedTuple):
    """Memory or time of a program, relative to the plain program.

    Attributes:
      name: name of the program.
      ratio: claim whose ratio it is. If the claim compares figures that are each relative to the
        library's own plain program, it is the baseline's for a baseline, and fnet's otherwise.
      divisor: claim to divide by: fnet compared with this program, where ``ratio`` compares fnet
        with the plain program.
    """

    name: str
    ratio: Match
    divisor: Match | None = None


class Headline(NamedTuple):
    """A row of the README's table.

    Attributes:
      text: text of the row.
      benchmark: name in `benchmarks.suite`.
      page: page of ``docs/benchmarks`` with details.
      ours: figures of fnet.
      others: figures of other libraries.
    """

    text: str
    benchmark: str
    page: str
    ours: tuple[Figure, ...]
    others: tuple[Figure, ...]


_CLIPPED = "clipped_grad, MLP *: {} relative to a plain gradient, *"
_LANGUAGE_MODEL = "language model train step, segments, *: {} of the * program"


def _clipping(kind: str) -> Headline:
    claim = _CLIPPED.format(kind)
    rivals = {"Opacus, ghost clipping": "Opacus*", "jax-privacy": "jax-privacy*", "optax": "optax*"}
    return Headline(
        f"clipped per-example gradients of an MLP, {kind}",
        "clipped_grad_peers",
        "per_example.md",
        (Figure("", Match(claim, "Opacus*")),),
        tuple(Figure(name, Match(claim, baseline)) for name, baseline in rivals.items()),
    )


def _language_model(kind: str, text: str) -> Headline:
    claim = _LANGUAGE_MODEL.format(kind)
    plain, remat = Match(claim, "flax linen, optax"), Match(claim, "*nn.remat*")
    return Headline(
        text,
        "transformer_step",
        "sequence_models.md",
        (Figure("", plain),),
        (Figure("`nn.remat` per block", plain, remat),),
    )


HEADLINES = (
    _clipping("time"),
    _clipping("memory"),
    _language_model("peak", "train step of a language model, 33.8 M parameters, memory"),
    _language_model("time", "the same, time"),
    Headline(
        "train step of a ResNet-50, 16 images of 128 x 128, memory",
        "resnet50_step",
        "in_place.md",
        (
            Figure("in place", Match("*fnet.abn, relu*: peak", "flax linen, relu")),
            Figure("reversible", Match("*fnet.reversible*: peak", "flax linen, leaky_relu")),
        ),
        (
            Figure(
                "`nn.remat` per block",
                Match("*fnet.abn, relu*: peak", "flax linen, relu"),
                Match("*fnet.abn, relu*: peak", "*nn.remat*"),
            ),
        ),
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
    """Replace the text between the page's two marks with the table and the machine."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"first_page: the page must contain {BEGIN.strip()} and {END}")
    versions = {r["versions"]["jax"] for r in results.values() if "jax" in r.get("versions", {})}
    notes = (
        "Each figure is relative to the plain program: a plain gradient of the same library, or "
        "flax's train step. "
        f"Measured on {machine.format_machine(described)}; jax {', '.join(sorted(versions))}. "
        f"[All claims]({FOLDER}/index.md#all-claims)."
    )
    table = markdown_table(lines(results), left=3)
    return f"{before}{BEGIN}\n{table}\n\n{notes}\n\n{END}{after}"


def compare(page: str, results: report.Results) -> str:
    """Tabulate the page's figures next to new results; "" if one was not measured."""
    saved = json.loads((ROOT / FOLDER / report.FILES[0]).read_text())["results"]
    rows = []
    for headline in HEADLINES:
        sides = [(True, f, f"fnet {f.name}".strip()) for f in headline.ours]
        sides += [(False, f, f.name) for f in headline.others]
        for ours, wanted, name in sides:
            shown, new = (_figure_or_none(wanted, ours, headline, r) for r in (saved, results))
            rows.append(_compared(headline.text, name, shown, new))
    printed = results.get("readme", {}).get("data", {}).get("measured", {})
    for sign, figures in readme.published(page).items():
        here = printed.get(sign, (None, None))
        for unit, before, now in zip(("MB", "s per step"), figures, here, strict=True):
            rows.append(_compared(f"the program, {unit}", readme.NAMES[sign], before, now))
    return markdown_table(rows, left=2)


def _figure_or_none(
    wanted: Figure, ours: bool, headline: Headline, results: report.Results
) -> float | None:
    claims = report.claims_of(results.get(headline.benchmark, {}))
    try:
        return figure(wanted, ours, headline, claims)
    except ValueError:  # the baseline is not installed
        return None


def _compared(text: str, program: str, shown: float | None, new: float | None) -> dict[str, str]:
    return {
        "": text,
        "program": program,
        "first page": f"{shown:.2f}" if shown is not None else "",
        "here": f"{new:.2f}" if new is not None else "",
        "here / first page": f"{new / shown:.2f}" if shown and new is not None else "",
    }


def figure(wanted: Figure, ours: bool, headline: Headline, claims: list[Claim]) -> float:
    """Read a figure from the claims of its benchmark."""
    claim = _match(headline, wanted.ratio, claims)
    if wanted.divisor:
        return claim.ratio / _match(headline, wanted.divisor, claims).ratio
    own = re.search(
        r"relative to a plain gradient, ([\d.]+)$" if ours else r": ([\d.]+) relative to its own",
        claim.claim if ours else claim.baseline,
    )
    return float(own[1]) if own else claim.ratio


def _line(headline: Headline, claims: list[Claim]) -> dict[str, str]:
    def cell(figures: tuple[Figure, ...], ours: bool) -> str:
        shown = ((f.name, figure(f, ours, headline, claims)) for f in figures)
        return ", ".join(f"{name} {x:{'.2f' if x < 10 else ',.0f'}}".strip() for name, x in shown)

    return {
        "": f"[{headline.text}]({FOLDER}/{headline.page})",
        "fnet": f"**{cell(headline.ours, True)}**",
        "others": cell(headline.others, False),
    }


def _match(headline: Headline, wanted: Match, claims: list[Claim]) -> Claim:
    matches = [
        c
        for c in claims
        if fnmatch.fnmatchcase(c.claim, wanted.claim)
        and fnmatch.fnmatchcase(c.baseline, wanted.baseline)
    ]
    if len(matches) != 1:
        raise ValueError(
            f"first_page: expected one claim {wanted.claim!r} of {headline.benchmark}, "
            f"got {[c.claim for c in matches or claims]}"
        )
    return matches[0]


def main() -> None:
    saved = json.loads((ROOT / FOLDER / report.FILES[0]).read_text())
    page = ROOT / "README.md"
    page.write_text(update_page(page.read_text(), saved["machine"], saved["results"]))
    for path, theme in PICTURES.items():
        chart.memory_by_depth(saved["results"], ROOT / path, theme)


if __name__ == "__main__":
    main()
