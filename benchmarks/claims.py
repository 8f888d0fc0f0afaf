"""Claims of a benchmark: a figure relative to a baseline, a target, and whether it is met."""

import argparse
import dataclasses
import decimal
import json
import math
import operator
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """Kind of figure.

    Attributes:
      deterministic: whether it is the same in every run with the same versions.
      meaning: how it is measured.
    """

    deterministic: bool
    meaning: str


KINDS = {
    "memory": Kind(True, "bytes of compiled programs or of their residuals"),
    "count": Kind(True, "number of operations in traced programs"),
    "estimate": Kind(True, "time of compiled programs by a roofline model, without running them"),
    "error": Kind(True, "difference from exact numbers, with fixed seeds"),
    "time": Kind(False, "median of interleaved calls"),
    "measured memory": Kind(False, "peak memory of a process while it runs"),
    "quality": Kind(False, "accuracy, loss or survival of a trained network"),
}

COMPARISONS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}


@dataclasses.dataclass(frozen=True)
class Claim:
    """One figure of a benchmark.

    Attributes:
      claim: what was measured, with the relevant sizes.
      baseline: what it is compared with, at its best settings.
      ratio: measured ratio to the baseline, or a figure in the unit that the claim names.
      target: a comparison, such as ``<= 0.39``, or "".
      kind: one of `KINDS`.
      limit: if the target is a limit that no program can pass, how the limit was found.

    Raises:
      ValueError: for an unknown kind, or a target that is not a comparison.
    """

    claim: str
    baseline: str
    ratio: float
    target: str = ""
    kind: str = "memory"
    limit: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Claim: kind must be one of {list(KINDS)}, got {self.kind!r}")
        if self.target:
            comparison(self.target)

    @property
    def met(self) -> bool | None:
        """Whether the unrounded figure meets the target; None without a target."""
        return self.meets_target(self.ratio)

    def meets_target(self, figure: float) -> bool | None:
        """Whether a figure meets the target; None without a target."""
        if not self.target:
            return None
        holds, bound = comparison(self.target)
        return bool(holds(figure, bound))  # NaN meets no target

    @property
    def shown(self) -> str:
        """The figure in three digits, or thousandths, rounded to its worse side.

        It is rounded up, unless more is better. It has more digits if rounding would change the
        verdict.
        """
        if not math.isfinite(self.ratio):
            return "not finite"
        worse = decimal.ROUND_FLOOR if self.target.startswith(">") else decimal.ROUND_CEILING
        figure, digits = decimal.Decimal(repr(float(self.ratio))), 4 if 1 <= self.ratio < 10 else 3
        while True:
            rounded = decimal.Context(digits, worse).plus(figure)
            if rounded == figure or self.meets_target(float(rounded)) is self.met:
                break
            digits += 1
        return f"{rounded:.{digits - 1}e}" if 0 < abs(rounded) < 1e-3 else f"{rounded:f}"

    def as_json(self) -> dict[str, Any]:
        """Fields and derived values as JSON; a figure that is not finite is null."""
        ratio = self.ratio if math.isfinite(self.ratio) else None
        derived = {"met": self.met, "deterministic": KINDS[self.kind].deterministic}
        return dataclasses.asdict(self) | {"ratio": ratio} | derived

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Claim":
        """Read the result of `as_json`."""
        fields = {f.name: saved[f.name] for f in dataclasses.fields(cls) if f.name in saved}
        return cls(**fields | {"ratio": math.nan if saved["ratio"] is None else saved["ratio"]})


def comparison(target: str) -> tuple[Callable[[float, float], bool], float]:
    """Parse a target to ``(holds, bound)``: x meets it if ``holds(x, bound)``.

    Raises:
      ValueError: if it is not a comparison with a number.
    """
    match = re.fullmatch(r"(<=|<|>=|>) (-?\d+(?:\.\d+)?(?:e-?\d+)?)", target)
    if match is None:
        raise ValueError(
            f"Claim: target must be one of {list(COMPARISONS)}, a space and a number, "
            f"such as '<= 0.39'; got {target!r}"
        )
    return COMPARISONS[match[1]], float(match[2])


def argument_parser(
    doc: str | None, *, rounds: int | None = None, target: bool = False
) -> argparse.ArgumentParser:
    """Build a parser with the options that benchmarks share.

    Args:
      doc: docstring of the script; its first line is the description.
      rounds: default of ``--rounds``; None if nothing is timed.
      target: whether the script can compile for a device that is not present (``--target``).
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    if rounds is not None:
        parser.add_argument(
            "--rounds",
            type=_positive,
            default=rounds,
            help="Number of timed calls; the median counts.",
        )
    if target:
        parser.add_argument(
            "--target",
            metavar="DEVICE",
            help="Compile for this device, such as h100, and run nothing.",
        )
    parser.add_argument("--json", metavar="PATH", help="Write claims and versions to this file.")
    return parser


def add_sizes(parser: argparse.ArgumentParser, sizes: Mapping[str, int]) -> None:
    """Add an option for each size, with its default."""
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{name.capitalize()}.")


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {word!r}")
    return int(word)


def publish(
    claims: Iterable[Claim],
    args: argparse.Namespace,
    *packages: str,
    missing: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
) -> None:
    """Print the claims of a benchmark, and write them to the file of ``--json``.

    Args:
      claims: claims in the order of the script's tables.
      args: parsed arguments of `argument_parser`.
      *packages: distributions whose versions are reported, if they are installed.
      missing: baselines that are not installed, with the reason.
      data: measurements for a chart.
    """
    claims, versions = list(claims), installed(*packages)
    print()
    for c in claims:
        verdict = {True: f"{c.target}: met", False: f"{c.target}: not met", None: "no target"}
        print(f"- {c.shown} ({verdict[c.met]}) {c.claim}; baseline: {c.baseline}")
    for baseline in missing:
        print(f"- skipped, not installed: {baseline}")
    print(f"\nVersions: {', '.join(f'{name} {version}' for name, version in versions.items())}.")
    if args.json:
        write(args.json, claims, *packages, missing=missing, data=data)


def write(
    path: str | Path,
    claims: Iterable[Claim],
    *packages: str,
    missing: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write what `publish` writes, without printing it."""
    report = {
        "claims": [c.as_json() for c in claims],
        "versions": installed("fnet-jax", *packages) | {"python": platform.python_version()},
        "missing": list(missing),
        "data": dict(data or {}),
    }
    Path(path).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def installed(*packages: str) -> dict[str, str]:
    """Versions of the distributions that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
