"""Exceptions that end the program with one line, and the words that their messages share."""

import contextlib
import decimal
import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


class UserError(Exception):
    """Mistake of the user. The program prints the message in one line, with exit code 2.

    Any function that reads a user's input may raise it. Docstrings mention it if it is not obvious.
    """


class TrainingError(Exception):
    """Training cannot continue. The program prints the message in one line, with exit code 1."""


@contextlib.contextmanager
def writing(path: os.PathLike[str], fix: str = "choose another --out") -> Iterator[None]:
    """Report an error in writing a file or folder in one line, with what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {fix}") from error


def output_file(given: str | None, default: Path) -> Path:
    """Return the file to write: the default, or the one of ``--out``."""
    if given is None:
        return default
    path = Path(given)
    if path.is_file():
        raise UserError(f"--out: {path} exists and is not overwritten; give another name")
    return path


def printable(text: str) -> str:
    """Escape control characters, and replace each byte of a file name that is not UTF-8 by a mark.

    So a file name with a line break stays on its line, and none can control the terminal.
    """
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def at_most(epsilon: float) -> str:
    """Write an epsilon with four digits, rounded up: ``7.99832 -> "7.999"``."""
    upward = decimal.Context(4, decimal.ROUND_CEILING)
    return f"{float(upward.create_decimal(repr(float(epsilon)))):.4g}"


def warn(text: str) -> None:
    """Print a line of the program to the standard error."""
    print(printable(f"fnet: {text}"), file=sys.stderr, flush=True)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean X?)"`` for the known name that is closest to ``name``, or ``""``."""
    closest = closest_name(name, known)
    return f" (did you mean {closest}?)" if closest else ""


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name with the initials ``name``, or the closest one, or None."""
    known = list(known)
    # Such as --optim.lr for --optim.learning-rate.
    short = [k for k in known if re.sub(r"([a-z])[a-z]*-([a-z])[a-z]*$", r"\1\2", k) == name]
    return next(iter([*short, *difflib.get_close_matches(name, known, n=1)]), None)


def shorten(names: Sequence[str], most: int = 5) -> str:
    """Join the first names, and count the others."""
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others


def list_available(names: Sequence[str], what: str) -> str:
    """Return ``"; there are a, b"``, or ``"; there are no WHAT"``, to end a message."""
    return f"; there are {shorten(names, 12)}" if names else f"; there are no {what}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether the machine or a device ran out of memory.

    XLA raises one exception type for all its errors, so its message has to tell.
    """
    jax = sys.modules.get("jax")
    if not jax or not isinstance(error, jax.errors.JaxRuntimeError):
        return isinstance(error, MemoryError)
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))


_MACHINE_ERRORS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT),
}


def is_machine_error(error: Exception) -> bool:
    """Whether a file was unreadable for lack of memory, file handles, permission or a connection.

    TensorStore, which reads checkpoints, gives its error codes only in messages.
    """
    return any(
        is_out_of_memory(e)
        or (isinstance(e, OSError) and e.errno in _MACHINE_ERRORS)
        or "PERMISSION_DENIED" in str(e)
        for e in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[Exception]:
    while isinstance(error, Exception):
        yield error
        error = error.__cause__ or error.__context__
