"""What a benchmark claims: a figure beside its peer's, the target, and whether it was met."""

import argparse
import dataclasses
import decimal
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What sort of figure a claim is about.

    Attributes:
      deterministic: whether it is the same in every run with the same versions.
      meaning: how it is found.
    """

    deterministic: bool
    meaning: str


KINDS = {
    "memory": Kind(True, "bytes of compiled programs, or of what they keep"),
    "count": Kind(True, "operations of traced programs"),
    "error": Kind(True, "differences from exact numbers, of fixed seeds"),
    "time": Kind(False, "medians of interleaved calls"),
    "seen memory": Kind(False, "the most that a process took while it ran"),
    "quality": Kind(False, "accuracy, loss or survival of what was trained"),
}

COMPARISONS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}


@dataclasses.dataclass(frozen=True)
class Claim:
    """One figure of a benchmark.

    Attributes:
      claim: what was measured of what, with the sizes that decide.
      peer: what it was measured against, at its best settings.
      ratio: to the peer, as it was measured. Where the claim says another unit, in that.
      target: a comparison, such as ``<= 0.39``; "" where nobody has set one.
      kind: one of `KINDS`.

    Raises:
      ValueError: for an unknown kind, or a target that is no comparison.
    """

    claim: str
    peer: str
    ratio: float
    target: str = ""
    kind: str = "memory"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Claim: kind must be one of {list(KINDS)}, got {self.kind!r}")
        if self.target:
            comparison(self.target)

    @property
    def met(self) -> bool | None:
        """Whether the figure, unrounded, keeps to the target; None without one."""
        return self.keeps_to_target(self.ratio)

    def keeps_to_target(self, figure: float) -> bool | None:
        """Whether a figure does; None without a target."""
        if not self.target:
            return None
        holds, bound = comparison(self.target)
        return bool(holds(figure, bound))  # NaN keeps to none

    @property
    def shown(self) -> str:
        """The figure in three digits, or thousandths, rounded to its worse side.

        That is up, unless more is better. There are more digits where that would turn the verdict.
        """
        if not math.isfinite(self.ratio):
            return "not finite"
        worse = decimal.ROUND_FLOOR if self.target.startswith(">") else decimal.ROUND_CEILING
        figure, digits = decimal.Decimal(repr(float(self.ratio))), 4 if 1 <= self.ratio < 10 else 3
        while True:
            rounded = decimal.Context(digits, worse).plus(figure)
            if rounded == figure or self.keeps_to_target(float(rounded)) is self.met:
                break
            digits += 1
        return f"{rounded:.{digits - 1}e}" if 0 < abs(rounded) < 1e-3 else f"{rounded:f}"

    def as_json(self) -> dict[str, Any]:
        """Fields, and what follows from them; a figure that is not finite is null."""
        ratio = self.ratio if math.isfinite(self.ratio) else None
        followed = {"met": self.met, "deterministic": KINDS[self.kind].deterministic}
        return dataclasses.asdict(self) | {"ratio": ratio} | followed

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Claim":
        """What `as_json` wrote."""
        fields = {f.name: found[f.name] for f in dataclasses.fields(cls)}
        return cls(**fields | {"ratio": math.nan if found["ratio"] is None else found["ratio"]})


def comparison(target: str) -> tuple[Callable[[float, float], bool], float]:
    """``(holds, bound)`` of a target: it is met by x where ``holds(x, bound)``.

    Raises:
      ValueError: if it does not read as a comparison with a number.
    """
    found = re.fullmatch(r"(<=|<|>=|>) (-?\d+(?:\.\d+)?(?:e-?\d+)?)", target)
    if found is None:
        raise ValueError(
            f"Claim: a target is one of {list(COMPARISONS)}, a space and a number, "
            f"such as '<= 0.39'; got {target!r}"
        )
    return COMPARISONS[found[1]], float(found[2])


def argument_parser(
    doc: str | None, *, rounds: int | None = None, target: bool = False
) -> argparse.ArgumentParser:
    """The options that benchmarks share; a script adds its own.

    Args:
      doc: its docstring, whose first line says what it is.
      rounds: how often it times each side unless ``--rounds`` says otherwise; None where
        nothing is timed.
      target: whether it can compile for a device that is not there.
    """
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    if rounds is not None:
        made.add_argument(
            "--rounds", type=_count, default=rounds, help="of timing; medians are taken"
        )
    if target:
        made.add_argument(
            "--target", metavar="DEVICE", help="compile for this device, such as h100; run nothing"
        )
    made.add_argument("--json", metavar="PATH", help="where claims are written, with versions")
    return made


def _count(word: str) -> int:
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
    """Says what a benchmark claims, and writes it where ``--json`` asks for it.

    Args:
      claims: in the order of the script's tables.
      args: what `argument_parser` read.
      *packages: distributions whose versions decide, of both sides; those that are not
        installed are left out.
      missing: peers that were left out because they are not installed, with the reason.
      data: measurements for a chart.
    """
    claims, found = list(claims), installed(*packages)
    print()
    for c in claims:
        verdict = {True: f"{c.target}: met", False: f"{c.target}: not met", None: "no target"}
        print(f"- {c.shown} ({verdict[c.met]}) {c.claim}; peer: {c.peer}")
    for peer in missing:
        print(f"- left out, not installed: {peer}")
    print(f"\nVersions: {', '.join(f'{name} {version}' for name, version in found.items())}.")
    if args.json:
        written = {
            "claims": [c.as_json() for c in claims],
            "versions": installed("fnet-jax") | found,
            "missing": list(missing),
            "data": dict(data or {}),
        }
        Path(args.json).write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")


def installed(*packages: str) -> dict[str, str]:
    """The version of each distribution that is installed."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
