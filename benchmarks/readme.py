"""Both programs of the README's first page, without and with fnet: memory and time of a step.

    python -m benchmarks.readme

Each program is the README's diff with the lines of one sign, and runs in a fresh process.
"""

import argparse
import contextlib
import io
import json
import re
from pathlib import Path

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import in_fresh_process, markdown_table

README = Path(__file__).parent.parent / "README.md"
NAMES = {"-": "flax and optax", "+": "fnet"}


def programs(page: str) -> dict[str, str]:
    """Read the programs of the diff, by sign."""
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    lines = diff.splitlines()
    return {s: "\n".join(x[1:] for x in lines if x[:1] in (s, " ", "")) for s in NAMES}


def published(page: str) -> dict[str, tuple[float, float]]:
    """Read the MB and the seconds that the page shows, by sign."""
    shown = re.findall(r"^([-+]) (\d+) MB, (\S+) s per step$", page, re.M)
    return {sign: (float(size), float(seconds)) for sign, size, seconds in shown}


def run(program: str) -> tuple[float, float]:
    """Run a program, and return the MB and the seconds that it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, README.name, "exec"), {"__name__": "readme"})
    match = re.fullmatch(r"(\d+) MB, (\S+) s per step\n", printed.getvalue())
    assert match is not None, printed.getvalue()
    return float(match[1]), float(match[2])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    page = README.read_text()
    if args.worker:
        print(json.dumps(run(programs(page)[args.worker])))
        return
    measured = {sign: in_fresh_process("readme", sign) for sign in NAMES}
    (size, seconds), (plain_size, plain_seconds) = measured["+"], measured["-"]
    rows = [
        {"": NAMES[sign], "MB": f"{size:.0f}", "s per step": f"{seconds:.2f}"}
        for sign, (size, seconds) in measured.items()
    ]
    print(markdown_table(rows))
    baseline = NAMES["-"]
    claims = [
        Claim("the README's program: peak of the step", baseline, size / plain_size),
        Claim("the README's program: time", baseline, seconds / plain_seconds, kind="time"),
    ]
    publish(claims, args, "jax", "jaxlib", "flax", "optax", data={"measured": measured})


if __name__ == "__main__":
    main()
