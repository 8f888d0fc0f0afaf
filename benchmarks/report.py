"""All benchmarks' claims in one table, as Markdown and JSON, with the machine they ran on."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import chart, machine
from benchmarks.claims import KINDS, Claim
from benchmarks.measure import markdown
from train.run.run_folder import atomic_write

Results = Mapping[str, Mapping[str, Any]]
"""By a benchmark's name, what `claims.publish` wrote and how it ran; or ``why`` it did not."""

FILES = "benchmarks.json", "benchmarks.md", "benchmarks.png"

VERDICTS = {True: "yes", False: "no", None: ""}


def write(on: Mapping[str, Any], results: Results, folder: Path) -> list[Path]:
    """Writes table, data and, where there is something to draw, the chart; returns their paths.

    An end of the machine meanwhile leaves the data as they were.

    Args:
      on: `machine.describe()`.
      results: of every benchmark that was to run, in the table's order.
      folder: where; it exists.
    """
    data, table, picture = (folder / name for name in FILES)
    atomic_write(data, json.dumps({"machine": on, "results": results}, indent=1) + "\n")
    drawn = chart.memory_by_depth(results, picture)
    table.write_text(as_markdown(on, results, picture.name if drawn else ""))
    return [data, table, *[picture] * drawn]


def read(folder: Path, on: Mapping[str, Any]) -> dict[str, Any]:
    """Results that were written to the folder before; none if there are none.

    Raises:
      ValueError: if they were measured on other hardware.
    """
    path = folder / FILES[0]
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    if not machine.same_hardware(found["machine"], on):
        raise ValueError(
            f"{path} holds results of another machine ({machine.in_words(found['machine'])}), "
            f"this one is {machine.in_words(on)}; choose another folder"
        )
    return found["results"]


def as_markdown(on: Mapping[str, Any], results: Results, picture: str = "") -> str:
    """The page: machine, sums, table, chart."""
    rows = list(_rows(results))
    parts = ["# Benchmarks", f"{machine.in_words(on)}.", sums(results)]
    if rows:
        parts += [markdown(rows, left=4), _legend(results)]
    if picture:
        parts.append(f"![Memory by depth]({picture})")
    return "\n\n".join(parts) + "\n"


def sums(results: Results) -> str:
    """How many claims there are, how many of them are met, and what did not run."""
    verdicts = [c.met for name in results for c in claims_of(results[name])]
    ran = sum("claims" in result for result in results.values())
    return (
        f"{len(verdicts)} claims of {ran} benchmarks: {verdicts.count(True)} met, "
        f"{verdicts.count(False)} not met, {verdicts.count(None)} without a target; "
        f"{len(results) - ran} benchmarks without a result."
    )


def claims_of(result: Mapping[str, Any]) -> list[Claim]:
    """Of one benchmark; none where it did not run."""
    return [Claim.from_json(c) for c in result.get("claims", ())]


def _rows(results: Results) -> Iterator[dict[str, str]]:
    for name, result in results.items():
        installed = dict(result.get("versions", {}))
        if installed.get("jaxlib") == installed.get("jax"):
            installed.pop("jaxlib", None)
        versions = ", ".join(f"{name} {version}" for name, version in installed.items())
        for c in claims_of(result):
            yield _row(name, c.claim, c.peer, versions, c.shown, c.target, VERDICTS[c.met], c.kind)
        for peer in result.get("missing", ()):
            yield _row(name, "not installed", peer)
        if result.get("why"):
            yield _row(name, result["why"])


def _row(name: str, claim: str, *cells: str) -> dict[str, str]:
    header = "benchmark", "claim", "peer", "versions", "ratio", "target", "met", "kind"
    filled = [f"`{name}`", claim, *cells, *[""] * (len(header) - 2 - len(cells))]
    return dict(zip(header, (cell.replace("|", "\\|") for cell in filled), strict=True))


def _legend(results: Results) -> str:
    lines = [
        "Ratios are to the peer, in three digits or more, rounded to the worse side; a target is "
        "compared with the figure as it was measured. Kinds:",
        "",
    ]
    for name, kind in KINDS.items():
        varies = "the same in every run" if kind.deterministic else "differs from run to run"
        lines.append(f"- {name}: {kind.meaning}; {varies}")
    lines += ["", "How each ran:", ""]
    for name, result in results.items():
        if "seconds" in result:
            lines.append(
                f"- `{' '.join(result['command'][1:])}`: {result['seconds']:.0f} s, ended "
                f"{result['ended']}, load average {result['load']:.1f} when it began ({name})"
            )
    return "\n".join(lines)
