"""Mistakes in what the user gave: one clear line, exit code 2."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user gave; the message is the one line that is shown."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean X?)"`` for the known name closest to ``name``, else ``""``."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


class TrainingError(Exception):
    """Training cannot go on; the message is the one line that is shown."""
