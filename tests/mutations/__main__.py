"""Makes one small wrong change after the other in a copy of the repository, and runs its tests.

    python -m tests.mutations
    python -m tests.mutations --only "eps|variance" --jobs 2
    python -m tests.mutations --list

First the same tests run on the copy as it is: they must be there and pass. Then each change must
make one of them fail. The exit code is 1 if a change survives, or if its place is not found
exactly once.
"""

import argparse
import queue
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutations import ROOMS
from tests.mutations.mutation import Mutation
from tests.mutations.workplace import Outcome, Workplace, prepare


def main() -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--only", metavar="PATTERN", default="", help="room, file or change")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    pattern = re.compile(given.only, re.IGNORECASE)
    chosen = [
        (room, mutation)
        for room, mutations in ROOMS.items()
        for mutation in mutations
        if any(pattern.search(text) for text in (room, mutation.file, mutation.what))
    ]
    if given.list:
        console.print(_table(chosen, [f"{m.tests} -k '{m.select}'" for _, m in chosen], "tests"))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        outcomes = _run(console, Path(folder), [mutation for _, mutation in chosen], given.jobs)
    if outcomes is None:
        return 1
    console.print(_table(chosen, [outcome.text for outcome in outcomes], "caught by"))
    caught = sum(outcome.caught for outcome in outcomes)
    console.print(f"{caught} of {len(outcomes)} mutations are caught")
    return 0 if caught == len(outcomes) else 1


def _run(
    console: Console, folder: Path, mutations: list[Mutation], jobs: int
) -> list[Outcome] | None:
    """The outcome of each mutation, or None if tests fail without any."""
    prepare(folder / "compiled")
    workplaces: queue.Queue[Workplace] = queue.Queue()
    for i in range(jobs):
        workplaces.put(Workplace.create(folder / str(i)))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def each(what, work, items):
            task = progress.add_task(what, total=len(items))

            def one(item):
                workplace = workplaces.get()
                try:
                    return work(workplace, item)
                finally:
                    workplaces.put(workplace)
                    progress.advance(task)

            with ThreadPoolExecutor(jobs) as pool:
                return list(pool.map(one, items))

        def unchanged(workplace, selection):
            tests, select = selection
            code, said = workplace.run(tests, select)
            if code != 0:
                words = f"{tests} -k '{select}' does not pass without a change:\n{said}"
                console.print(escape(words))
            return code == 0

        def changed(workplace, mutation):
            outcome = workplace.outcome(mutation)
            if not (outcome.caught and console.is_terminal):
                said = "caught by " * outcome.caught + outcome.text
                console.print(escape(f"{mutation.file}: {mutation.what}: {said}"))
            return outcome

        selections = sorted({(m.tests, part) for m in mutations for part in m.alternatives})
        if not all(each("unchanged", unchanged, selections)):
            return None
        return each("changed", changed, mutations)


def _table(chosen: list[tuple[str, Mutation]], texts: list[str], column: str) -> Table:
    table = Table("room", "file", "what is wrong")
    table.add_column(column, overflow="fold")
    room = None
    for (name, mutation), text in zip(chosen, texts, strict=True):
        if name != room:
            table.add_section()
        row = "" if name == room else name, Path(mutation.file).name, mutation.what, text
        table.add_row(*map(escape, row))
        room = name
    return table


if __name__ == "__main__":
    sys.exit(main())
