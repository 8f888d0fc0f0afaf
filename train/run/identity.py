"""What a part of a run was made with: a checkpoint or a log says it, and it is compared."""

from typing import Any, NamedTuple, Self

from train.errors import UserError
from train.run.run_folder import RunFolder, read_sealed, run_name


class Stamp(NamedTuple):
    """What a part of a run was trained with.

    Attributes:
      seed: Seed of the run; a code that follows from a secret seed.
      config: Checksum of the fields that say what a run computes.
      data: Checksum of the description of the data.
    """

    seed: str
    config: str
    data: str


class ForeignError(Exception):
    """A checkpoint belongs to another run or another step."""


class Owner(NamedTuple):
    """The run that checkpoints must be of.

    Attributes:
      run: Its id; None of a run that an earlier version wrote.
      stamps: All that it was trained with; None if nothing says it.
    """

    run: str | None
    stamps: tuple[Stamp, ...] | None = None

    @classmethod
    def of(cls, folder: RunFolder) -> Self:
        """Return the owner of the checkpoints in a folder, as config.json and data.json say."""
        try:
            stamps = read_sealed(folder.data).get("stamps")
            return cls(folder.id, stamps and tuple(Stamp(*stamp) for stamp in stamps))
        except (UserError, TypeError):  # `train.run.same_data` reports damage
            return cls(folder.id)

    def check(self, content: dict[str, Any], step: int) -> None:
        """Check what a checkpoint says of itself.

        Raises:
          ForeignError: if it is of another run, or of another step.
        """
        run, saved, given = (content.get(name) for name in ("run", "step", "stamp"))
        if run != self.run:
            raise ForeignError(f"of another run: of {run_name(run)}, not of {run_name(self.run)}")
        if saved not in (None, step) or (run and saved is None):
            raise ForeignError(f"of another step: it was saved after step {saved}")
        if step and run and self.stamps and (stamp := tuple(given or "???")) not in self.stamps:
            pairs = zip(Stamp._fields, stamp, self.stamps[-1], strict=True)
            other = next(name for name, its, ours in pairs if its != ours)
            raise ForeignError(f"of another run: it was trained with another {other}")
