"""The folder of a run: what lies where, and who may write into it."""

import contextlib
import fcntl
import glob
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train import config as configs
from train.config import Config
from train.errors import UserError

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "name",
        "train.epochs",
        "train.steps",
        "train.log_every",
        "train.eval_every",
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.best",
        "data.cache",
        "data.max_bad_fraction",
        "data.workers",
        "nonfinite.max_skipped",
        "tracking.tensorboard",
        "tracking.wandb",
        "mesh.data",
        "mesh.fsdp",
    }
)
"""Fields that say how long a run goes, how it reads and what it writes, not what it computes."""


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"
        self.classes = path / "classes.json"
        self.metrics = path / "metrics.jsonl"
        self.bad_steps = path / "bad_steps.jsonl"
        self.summary = path / "summary.json"
        self.memory = path / "memory.json"
        self.memory_picture = path / "memory.png"
        self.curves = path / "curves.png"
        self.confusion = path / "confusion.png"
        self.examples = path / "examples.png"
        self.checkpoints = path / "checkpoints"
        self.evaluation = path / "evaluation.json"
        self.profile = path / "profile"
        self.report = path / "report.html"
        self.lock = path / ".lock"

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """While entered, no other process may write here; a killed one owns nothing.

        Raises:
          UserError: if one does already, or the folder cannot be written.
        """
        check_no_pattern(self.path)
        try:
            new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a+")
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise UserError(
                    f"{self.path} is in use by another process ({file.read().strip()}): "
                    "choose another folder with --out, or wait until it has ended"
                ) from error
            except OSError as error:  # a file system without locks
                raise _cannot_write(self.path, error) from error
            if not os.fstat(file.fileno()).st_nlink:  # its last owner has ended in between
                raise UserError(f"{self.path} was in use until now: try again")
            file.truncate(0)
            file.write(f"{os.uname().nodename}, process {os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                self.lock.unlink(missing_ok=True)
                if new:
                    with contextlib.suppress(OSError):  # there is something in it now
                        self.path.rmdir()

    def read_config(self) -> Config:
        """The resolved config of the run.

        Raises:
          UserError: if there is no run here.
        """
        if not self.config.is_file():
            raise UserError(f"no run in {self.path}: it has no config.json")
        return configs.from_json(self.config.read_bytes(), str(self.config))

    def begin(self, config: Config) -> None:
        """Makes the folder for a new run.

        Raises:
          UserError: if it cannot be written, or is not empty: nothing is overwritten.
        """
        self.claim()
        self.write_config(config)

    def claim(self) -> None:
        """Makes the folder, which is no run's as long as it has no config.

        Raises:
          UserError: as `begin`.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = {p.name for p in self.path.iterdir()}
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        if self.config.name in names and names & {self.metrics.name, self.checkpoints.name}:
            raise UserError(
                f"{self.path} already holds a run: continue it with --resume, "
                "or choose another folder with --out"
            )
        # What a run leaves that ended before its first step.
        begun = {
            self.lock,
            self.report,
            self.config,
            self.classes,
            self.memory,
            self.memory_picture,
        }
        if names - {name for path in begun for name in (path.name, _part(path).name)}:
            raise UserError(
                f"{self.path} is not empty and holds no run: choose another folder with --out"
            )
        try:
            self.classes.unlink(missing_ok=True)
            self.config.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def resume(self, config: Config) -> None:
        """Checks that the run here is the config's, and takes over what may change.

        Raises:
          UserError: if there is no run here, or one of another config.
        """
        if not self.config.is_file():
            raise UserError(
                f"no run to resume in {self.path}: leave out --resume to start one there"
            )
        different = changed(self.read_config(), config)
        if different:
            words = ", ".join(f"{n} is {a} there and {b} here" for n, (a, b) in different.items())
            raise UserError(
                f"{self.path} holds another config's run ({words}): give it as it was, "
                f"with `fnet train {quote(self.config)} --resume`, or choose another folder with "
                "--out"
            )
        self.write_config(config)

    def write_config(self, config: Config) -> None:
        """Makes the folder a run's.

        Raises:
          UserError: if it cannot be written.
        """
        try:
            write_whole(self.config, configs.to_json(config))
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def forget_metrics_after(self, step: int) -> None:
        """Drops lines of steps that a killed run logged but did not save: they come again."""
        for path in (self.metrics, self.bad_steps):
            if path.exists():
                lines = [line for line in read_metrics(path) if line["step"] <= step]
                write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))

    def seconds_spent(self) -> float:
        """The time until the last line of the metrics, of all processes that trained here."""
        lines = read_metrics(self.metrics)
        return float(lines[-1].get("seconds", 0.0)) if lines else 0.0


def changed(there: Config, here: Config) -> dict[str, tuple[Any, Any]]:
    """``{field: (there, here)}`` of the fields that differ and may not on resume."""
    a, b = configs.flatten(there), configs.flatten(here)
    names = sorted((a.keys() | b.keys()) - MAY_CHANGE_ON_RESUME)
    return {n: (a.get(n, "absent"), b.get(n, "absent")) for n in names if a.get(n) != b.get(n)}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; what has no step, as one that a kill cut off, is left out.

    A file that is not there has none.
    """
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def check_no_pattern(path: Path) -> None:
    """Refuses a folder where orbax would look for checkpoints in others, or in none.

    Raises:
      UserError: if its absolute path is a pattern, or has a backslash, which is taken for a slash.
    """
    whole = str(path.absolute())
    if glob.escape(whole) != whole or "\\" in whole:
        raise UserError(
            f"{whole}: checkpoints cannot be kept where a path has *, ?, [ or \\: rename the "
            "folder that has it, or choose another with --out"
        )


def quote(path: Path) -> str:
    """A path as it is written in a command that can be pasted."""
    return shlex.quote(str(path))


def as_json(data: dict[str, Any]) -> str:
    """Indented JSON, ending in a newline."""
    return json.dumps(data, indent=2) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that no reader and no kill ever finds half of it."""
    part = _part(path)
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _part(path: Path) -> Path:
    """A file on its way; a kill leaves it."""
    return path.with_name(f".{path.name}.part")


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write to {path}: {error.strerror or error}; choose another folder with --out"
    )
