"""Log of all claims as Markdown and JSON, with the machine that they were measured on."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import chart, machine
from benchmarks.claims import KINDS, Claim
from benchmarks.measure import markdown_table

Results = Mapping[str, Mapping[str, Any]]
"""By benchmark: the output of `claims.publish` and how it ran, or ``why`` it did not run."""

FILES = "benchmarks.json", "benchmarks.md", "benchmarks.png"

VERDICTS = {True: "yes", False: "no", None: ""}


def write(described: Mapping[str, Any], results: Results, folder: Path) -> list[Path]:
    """Write the data, the table and the chart, if there are data for it; return their paths.

    The data are written atomically.
    """
    data, table, picture = (folder / name for name in FILES)
    incomplete = data.with_suffix(".tmp")
    incomplete.write_text(json.dumps({"machine": described, "results": results}, indent=1) + "\n")
    incomplete.replace(data)
    has_chart = chart.memory_by_depth(results, picture)
    table.write_text(as_markdown(described, results, picture.name if has_chart else ""))
    return [data, table, *[picture] * has_chart]


def read(folder: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Read earlier results from a folder; {} if there are none.

    Raises:
      ValueError: if they were measured on other hardware.
    """
    path = folder / FILES[0]
    if not path.is_file():
        return {}
    saved = json.loads(path.read_text())
    if not machine.same_hardware(saved["machine"], described):
        raise ValueError(
            f"{path} has results of another machine ({machine.format_machine(saved['machine'])}), "
            f"this one is {machine.format_machine(described)}; choose another folder"
        )
    return saved["results"]


def as_markdown(described: Mapping[str, Any], results: Results, picture: str = "") -> str:
    """Format the log: machine, dates, summary, and a section for each benchmark."""
    parts = [
        "# Benchmark log",
        "`python -m benchmarks --out docs/benchmarks` measures these claims.",
        f"{machine.format_machine(described)}.{_dates(results)}",
        summarize(results),
        _legend(),
    ]
    if picture:
        parts.append(f"![Memory by depth]({picture})")
    parts += [_section(name, result) for name, result in results.items()]
    return "\n\n".join(parts) + "\n"


def summarize(results: Results) -> str:
    """Count claims that are met and not met, and benchmarks without a result."""
    verdicts = [c.met for name in results for c in claims_of(results[name])]
    ran = sum("claims" in result for result in results.values())
    return (
        f"{len(verdicts)} claims of {ran} benchmarks: {verdicts.count(True)} met, "
        f"{verdicts.count(False)} not met, {verdicts.count(None)} without a target; "
        f"{len(results) - ran} benchmarks without a result."
    )


def claims_of(result: Mapping[str, Any]) -> list[Claim]:
    """Claims of one benchmark; none if it did not run."""
    return [Claim.from_json(c) for c in result.get("claims", ())]


def with_earlier(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Add ``earlier`` to a result: the claims of the same benchmark with another version of JAX."""
    versions = [result.get("versions", {}).get("jax") for result in (old, new)]
    earlier: Mapping[str, Any] | None
    if all(versions) and versions[0] != versions[1]:
        earlier = {"jax": versions[0], "claims": old["claims"]}
    else:
        earlier = old.get("earlier")
    return dict(new) | ({"earlier": earlier} if earlier else {})


def _section(name: str, result: Mapping[str, Any]) -> str:
    """Format one benchmark: how it ran, its claims, and what it lacked."""
    parts = [f"## {name}"]
    if "seconds" in result:
        parts.append(_run(result))
    claims, others = claims_of(result), _others(result)
    if rows := [
        _row(c) | {k: cells[i] for k, cells in others.items()} for i, c in enumerate(claims)
    ]:
        parts.append(markdown_table(rows, left=2))
    parts += [
        f'The target for "{c.claim}" is a limit. {c.limit}' for c in claims_of(result) if c.limit
    ]
    if missing := result.get("missing"):
        parts.append(f"Not installed: {', '.join(missing)}.")
    if "why" in result:
        parts.append(f"No result: {result['why']}.")
    return "\n\n".join(parts)


def _run(result: Mapping[str, Any]) -> str:
    """Describe how a benchmark ran."""
    installed = dict(result.get("versions", {}))
    if installed.get("jaxlib") == installed.get("jax"):
        installed.pop("jaxlib", None)
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    return (
        f"`python {' '.join(result['command'][1:])}` took {result['seconds']:.0f} s and ended "
        f"{result['ended']}, with load average {result['load']:.1f} at the start. "
        f"Versions: {versions or 'not known'}."
    )


def _others(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """A column of the figures with an earlier JAX, where compiled programs differ by over 1 %."""
    earlier = result.get("earlier", {})
    before = {_name(c): c for c in claims_of(earlier)}
    cells = []
    for c in claims_of(result):
        old = before.get(_name(c), c)
        differs = KINDS[c.kind].deterministic and not math.isclose(old.ratio, c.ratio, rel_tol=0.01)
        cells.append(old.shown if differs else "")
    return {f"jax {earlier['jax']}": cells} if any(cells) else {}


def _name(c: Claim) -> tuple[str, ...]:
    """What a claim is about, without the figures that end its texts."""
    return tuple(re.sub(r"[\d.]+$", "", text) for text in (c.claim, c.baseline))


def _row(c: Claim) -> dict[str, str]:
    cells = {
        "claim": c.claim,
        "baseline": c.baseline,
        "ratio": c.shown,
        "target": c.target,
        "met": VERDICTS[c.met],
        "kind": c.kind,
    }
    return {name: cell.replace("|", "\\|") for name, cell in cells.items()}


def _dates(results: Results) -> str:
    """First and last day of the measurements."""
    days = sorted(result["ended"][:10] for result in results.values() if "ended" in result)
    return f" Measured from {days[0]} to {days[-1]}." if days else ""


def _legend() -> str:
    lines = [
        "Ratios are relative to the baseline, in three digits or more, rounded to the worse side. "
        "Targets are internal, and compared with the unrounded figure. A further column has "
        "figures of an earlier JAX: those that are the same in every run, and differ by over 1 %. "
        "Kinds:",
        "",
    ]
    for name, kind in KINDS.items():
        varies = "is the same in every run" if kind.deterministic else "differs from run to run"
        lines.append(f"- {name}: {kind.meaning}. It {varies}.")
    return "\n".join(lines)
