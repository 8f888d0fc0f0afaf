"""Run the benchmarks, each in a process of its own, and write all their claims to one table.

    python -m benchmarks                        # all; hours
    python -m benchmarks --quick                # each number of the first page, in 15 minutes
    python -m benchmarks --only abn clipped     # names that contain one of these
    python -m benchmarks --only attention       # a full name selects one benchmark
    python -m benchmarks --gpu                  # the main claims on a GPU, in ten minutes
    python -m benchmarks --list

``--out`` gets benchmarks.md, benchmarks.json, benchmarks.png, and the output of each benchmark in
logs/. Earlier results in the folder stay for benchmarks that are not run again; they must be of
the same hardware. So baselines that need another environment can be measured one environment
after the other. A benchmark that was interrupted while training resumes from runs/, which is
emptied when it ends.
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

from benchmarks import first_page, machine, report
from benchmarks.suite import GPU, PATHS, SUITE, Benchmark

FAILED, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None, suite: Sequence[Benchmark] = SUITE) -> int:
    """Run the selected benchmarks; 0 if all of them ran, whatever they measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="Output folder.")
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="Names or parts of names; * and ? match."
    )
    parser.add_argument("--quick", action="store_true", help="Only what the first page shows.")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="The main claims, on a GPU; first installs what is missing from dist/wheels.",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="With --gpu: small sizes, to try it on a CPU."
    )
    parser.add_argument("--list", action="store_true", help="List the benchmarks and run nothing.")
    for name, meaning in PATHS.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=f"{meaning.capitalize()}.")
    args = parser.parse_args(argv)
    for name in PATHS:
        if getattr(args, name) and not Path(getattr(args, name)).exists():
            parser.error(f"--{name}: {getattr(args, name)} does not exist")
    if args.gpu:
        suite = [b._replace(arguments=("--tiny",)) for b in GPU] if args.tiny else GPU
    chosen = matching(suite, args.only)
    if not chosen:
        parser.error(
            f"--only {' '.join(args.only)}: matches no benchmark of {[b.name for b in suite]}"
        )
    console = Console()
    if args.list:
        console.print(_list_table(chosen))
        return 0
    try:
        described = machine.describe()
    except RuntimeError as error:
        parser.error(str(error))
    if (
        args.gpu
        and not args.tiny
        and all(device.endswith(" x cpu") for device in described["devices"])
    ):
        parser.error("--gpu: JAX finds no GPU here")
    try:
        previous = report.read(args.out, described)
    except ValueError as error:
        parser.error(f"--out: {error}")
    return _run_all(chosen, suite, args, console, described, previous)


def matching(suite: Sequence[Benchmark], patterns: Sequence[str] | None) -> list[Benchmark]:
    """Benchmarks whose name is or contains one of the patterns; all without patterns."""
    if patterns is None:
        return list(suite)
    names = {b.name for b in suite}
    patterns = [p if p in names else f"*{p}*" for p in patterns]
    return [b for b in suite if any(fnmatch.fnmatch(b.name, p) for p in patterns)]


def _run_all(
    chosen: Sequence[Benchmark],
    suite: Sequence[Benchmark],
    args: argparse.Namespace,
    console: Console,
    described: Mapping[str, Any],
    previous: Mapping[str, Any],
) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    code = 0
    paths = {name: getattr(args, name) for name in PATHS}
    results = {b.name: previous[b.name] for b in suite if b.name in previous}
    width = max(len(b.name) for b in chosen)
    log = functools.partial(console.print, highlight=False, soft_wrap=True)

    log(machine.format_machine(described))
    try:
        for b in chosen:
            reason = b.reason_to_skip(paths, args.quick)
            if reason:
                if "seconds" not in results.get(b.name, {}):  # keep an earlier result
                    results[b.name] = {"why": reason}
                log(f"{b.name:{width}}  {reason}", style="dim")
                continue
            with console.status(f"{b.name}: {escape(b.summary)}"):
                runs = args.out / "runs" / b.name
                command = b.command(paths, args.quick, runs)
                new = run(b.name, command, b.environment, args.out / "logs")
                results[b.name] = report.with_earlier(new, results.get(b.name, {}))
            if "why" in results[b.name]:
                code = FAILED
            else:
                shutil.rmtree(runs, ignore_errors=True)
            log(f"{b.name:{width}}  {_progress(results[b.name])}")
            report.write(described, results, args.out)  # in case the machine goes down
    except KeyboardInterrupt:
        log("interrupted", style="red")
        code = INTERRUPTED
    results = {b.name: results[b.name] for b in suite if b.name in results}
    written = report.write(described, results, args.out)
    log(report.summarize(results))
    if args.quick and code != INTERRUPTED:
        page = first_page.ROOT / "README.md"
        log(first_page.compare(page.read_text(), results), markup=False)
    log(f"See {', '.join(map(str, written))}.")
    return code


def run(
    name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path
) -> dict[str, Any]:
    """Run one benchmark in a process of its own.

    Args:
      name: name of its files in ``logs``.
      command: command line; ``--json PATH`` is appended.
      environment: additional environment variables.
      logs: folder for NAME.log, its output, and NAME.json, its claims. It is created if needed.

    Returns:
      The output of `claims.publish`, ``command``, ``seconds``, ``load`` (load average of the minute
      before) and the time it ``ended``. ``why``, if it failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    output, claims_file = logs / f"{name}.log", logs / f"{name}.json"
    claims_file.unlink(missing_ok=True)
    load, start = os.getloadavg()[0], time.monotonic()
    with output.open("w") as log:
        process = subprocess.run(
            [*command, "--json", str(claims_file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
        )
    result: dict[str, Any] = {
        # Without the interpreter's folder, which differs between machines.
        "command": [Path(command[0]).name, *command[1:]],
        "seconds": time.monotonic() - start,
        "load": load,
        "ended": datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes"),
    }
    if process.returncode == 0 and claims_file.is_file():
        return result | json.loads(claims_file.read_text())
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    message = lines[-1].strip() if lines else "no output"
    if process.returncode == 0:
        message = "it wrote no claims"
    return result | {"why": f"failed with exit code {process.returncode}: {message}"}


def _progress(result: Mapping[str, Any]) -> str:
    """One line of progress: duration and number of claims that are met."""
    minutes, seconds = divmod(round(result["seconds"]), 60)
    if "why" in result:
        return f"{minutes:3}:{seconds:02}  [red]{escape(result['why'])}[/]"
    verdicts = [c.met for c in report.claims_of(result)]
    missed = verdicts.count(False)
    line = f"{minutes:3}:{seconds:02}  {verdicts.count(True)} met"
    return line + (f", [yellow]{missed} not met[/]" if missed else "")


def _list_table(benchmarks: Sequence[Benchmark]) -> Table:
    table = Table("name", "what it measures", "on the first page", box=None)
    for b in benchmarks:
        table.add_row(b.name, escape(b.summary), "" if b.quick is None else "yes")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
