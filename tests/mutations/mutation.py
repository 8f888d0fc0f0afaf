"""One small wrong change, and the tests that are to notice it."""

import ast
from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """A change that makes an equation wrong.

    Attributes:
      what: what is wrong then, as a fact.
      file: where, from the root of the repository.
      old: the text there; it must stand in the file exactly once.
      new: what is put in its place.
      tests: a file of tests, from the root of the repository.
      select: which of its tests, as pytest's ``-k`` takes it.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str
    select: str

    @property
    def alternatives(self) -> list[str]:
        """``select``, cut where it says ``or``: each part must choose a test."""
        chosen = ast.parse(self.select, mode="eval").body
        either = isinstance(chosen, ast.BoolOp) and isinstance(chosen.op, ast.Or)
        return [ast.unparse(part) for part in (chosen.values if either else [chosen])]

    def apply(self, root: Path) -> str:
        """The file's text after the change.

        Raises:
          ValueError: if ``old`` does not stand in the file exactly once, or nothing changes.
        """
        text = (root / self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"{self.file}: {self.what}: expected {self.old!r} exactly once, found it {found} "
                "times; name the line anew"
            )
        if self.old == self.new:
            raise ValueError(f"{self.file}: {self.what}: {self.old!r} is replaced by itself")
        return text.replace(self.old, self.new)


def changes(
    file: str, tests: str, select: str, wrong: list[tuple[str, str, str]]
) -> list[Mutation]:
    """Mutations ``(what, old, new)`` of one file that the same tests are to notice."""
    return [Mutation(what, file, old, new, tests, select) for what, old, new in wrong]
