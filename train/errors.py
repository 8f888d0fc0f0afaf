"""Mistakes in what the user gave: one clear line, exit code 2."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """A mistake in what the user gave; the message is the one line that is shown."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean X?)"`` for the known name closest to ``name``, else ``""``."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


class TrainingError(Exception):
    """Training cannot go on; the message is the one line that is shown."""


def is_of_memory(error: Exception) -> bool:
    """Whether there was too little, of this machine or of a device, which XLA says in words."""
    jax = sys.modules.get("jax")
    if not jax or not isinstance(error, jax.errors.JaxRuntimeError):
        return isinstance(error, MemoryError)
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))


_OF_THE_MACHINE = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT),
}


def is_of_the_machine(error: Exception) -> bool:
    """Whether a file could not be read for want of memory, handles, rights or a connection."""
    return any(
        is_of_memory(e)
        or (isinstance(e, OSError) and e.errno in _OF_THE_MACHINE)
        or "PERMISSION_DENIED" in str(e)
        for e in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[Exception]:
    while isinstance(error, Exception):
        yield error
        error = error.__cause__ or error.__context__
