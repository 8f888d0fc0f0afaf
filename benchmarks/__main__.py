"""Runs the benchmarks, each in a process of its own, and tells all their claims in one table.

    python -m benchmarks                        # all; hours
    python -m benchmarks --quick                # fewer rounds, fewer cases
    python -m benchmarks --only abn clipped     # those whose names have one of these in them
    python -m benchmarks --only attention       # a whole name is that one alone
    python -m benchmarks --list

What is written to ``--out``: benchmarks.md, benchmarks.json, benchmarks.png, and what each
benchmark printed, in logs/. Results of an earlier run into the same folder, which must be
of the same hardware, stay where a benchmark is not run again: peers that live in environments of
their own are measured one environment after the other. One that was interrupted while it
trained goes on from runs/, which is emptied when it ends.
"""

import argparse
import datetime
import fnmatch
import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import machine, report
from benchmarks.suite import PATHS, SUITE, Benchmark

FAILED, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None, suite: Sequence[Benchmark] = SUITE) -> int:
    """Runs what is asked for; 0 if all of it ended well, whatever it measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="a folder")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="a name, or a part; * and ?")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer cases")
    parser.add_argument("--list", action="store_true", help="tell what there is, run nothing")
    for name, what in PATHS.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=what)
    args = parser.parse_args(argv)
    for name in PATHS:
        if getattr(args, name) and not Path(getattr(args, name)).exists():
            parser.error(f"--{name}: nothing is at {getattr(args, name)}")
    chosen = matching(suite, args.only)
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: no benchmark of {[b.name for b in suite]}")
    console = Console()
    if args.list:
        console.print(_listed(chosen))
        return 0
    try:
        on = machine.describe()
    except RuntimeError as error:
        parser.error(str(error))
    try:
        before = report.read(args.out, on)
    except ValueError as error:
        parser.error(f"--out: {error}")
    return _run_all(chosen, suite, args, console, on, before)


def matching(suite: Sequence[Benchmark], patterns: Sequence[str] | None) -> list[Benchmark]:
    """Those that are named, or have one of the patterns in their names; all without patterns."""
    if patterns is None:
        return list(suite)
    names = {b.name for b in suite}
    wanted = [p if p in names else f"*{p}*" for p in patterns]
    return [b for b in suite if any(fnmatch.fnmatch(b.name, p) for p in wanted)]


def _run_all(
    chosen: Sequence[Benchmark],
    suite: Sequence[Benchmark],
    args: argparse.Namespace,
    console: Console,
    on: Mapping[str, Any],
    before: Mapping[str, Any],
) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    code = 0
    paths = {name: getattr(args, name) for name in PATHS}
    results = {b.name: before[b.name] for b in suite if b.name in before}
    width = max(len(b.name) for b in chosen)
    say = functools.partial(console.print, highlight=False, soft_wrap=True)

    say(machine.in_words(on))
    try:
        for b in chosen:
            why = b.lacks(paths, args.quick)
            if why:
                if "seconds" not in results.get(b.name, {}):  # else it ran before, well or not
                    results[b.name] = {"why": why}
                say(f"{b.name:{width}}  {why}", style="dim")
                continue
            with console.status(f"{b.name}: {escape(b.summary)}"):
                runs = args.out / "runs" / b.name
                command = b.command(paths, args.quick, runs)
                results[b.name] = run(b.name, command, b.environment, args.out / "logs")
            if "why" in results[b.name]:
                code = FAILED
            else:
                shutil.rmtree(runs, ignore_errors=True)
            say(f"{b.name:{width}}  {_told(results[b.name])}")
            report.write(on, results, args.out)  # so that an end of the machine costs no hours
    except KeyboardInterrupt:
        say("interrupted", style="red")
        code = INTERRUPTED
    results = {b.name: results[b.name] for b in suite if b.name in results}
    written = report.write(on, results, args.out)
    say(report.sums(results))
    say(f"See {', '.join(map(str, written))}.")
    return code


def run(
    name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path
) -> dict[str, Any]:
    """Runs one benchmark in a process of its own.

    Args:
      name: of the files that it leaves.
      command: what starts it; ``--json PATH`` is added.
      environment: variables besides those of this process.
      logs: a folder, made if need be: NAME.log is what it printed, NAME.json what it claims.

    Returns:
      What `claims.publish` wrote, ``command``, ``seconds``, ``load`` (the mean number of
      processes at work in the minute before) and when it ``ended``. ``why``, if it failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    printed, written = logs / f"{name}.log", logs / f"{name}.json"
    written.unlink(missing_ok=True)
    load, began = os.getloadavg()[0], time.monotonic()
    with printed.open("w") as log:
        ended = subprocess.run(
            [*command, "--json", str(written)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
        )
    result: dict[str, Any] = {
        # Of the interpreter's path, which differs from machine to machine, the name is enough.
        "command": [Path(command[0]).name, *command[1:]],
        "seconds": time.monotonic() - began,
        "load": load,
        "ended": datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes"),
    }
    if ended.returncode == 0 and written.is_file():
        return result | json.loads(written.read_text())
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].strip() if lines else "nothing was printed"
    if ended.returncode == 0:
        said = "it wrote no claims"
    return result | {"why": f"failed with exit code {ended.returncode}: {said}"}


def _told(result: Mapping[str, Any]) -> str:
    """One line of progress: the time it took, and how many claims are met."""
    minutes, seconds = divmod(round(result["seconds"]), 60)
    if "why" in result:
        return f"{minutes:3}:{seconds:02}  [red]{escape(result['why'])}[/]"
    verdicts = [c.met for c in report.claims_of(result)]
    missed = verdicts.count(False)
    told = f"{minutes:3}:{seconds:02}  {verdicts.count(True)} met"
    return told + (f", [yellow]{missed} not met[/]" if missed else "")


def _listed(benchmarks: Sequence[Benchmark]) -> Table:
    table = Table("name", "what it measures", "with --quick", box=None)
    for b in benchmarks:
        quick = "left out" if b.quick is None else " ".join(b.quick)
        table.add_row(b.name, escape(b.summary), escape(quick))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
