"""Positional arguments of a command, which come before its flags."""

import contextlib
import itertools
from collections.abc import Sequence

from train import arguments
from train.errors import UserError


def positional(argv: Sequence[str], usage: str, *options: type) -> tuple[list[str], list[str]]:
    """Split the words after a command's name into positional arguments and flags.

    Dots in a usage, ``"fnet predict RUN FILE..."``, allow one or more. Without positional
    arguments, ``--help`` shows the ``options``.

    Raises:
      UserError: for too few or too many positional arguments.
      SystemExit: with code 0, after ``--help``.
    """
    names = usage.split()[2:]
    values = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    if len(values) < len(names):
        if {"-h", "--help"} & set(argv):
            for kind in options[:-1]:
                with contextlib.suppress(SystemExit):
                    arguments.read(kind, ["--help"], usage)
            arguments.read(options[-1], ["--help"], usage)
        name = names[len(values)].removesuffix("...")
        where = " before the flags" if len(argv) > len(values) else ""
        raise UserError(f"missing {name}{where}; usage: {usage}")
    if len(values) > len(names) and not usage.endswith("..."):
        raise UserError(f"unexpected {values[len(names)]}; usage: {usage}")
    return values, list(argv[len(values) :])
