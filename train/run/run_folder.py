"""The folder of a run: its files, and which process may write them."""

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import hmac
import json
import os
import secrets
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from train import config as configs
from train import stored
from train.config import Config
from train.data.model_folder import is_model_folder
from train.errors import UserError, closest_name, writing
from train.output.logged import BadStep, Log, MetricsLine, read_log, read_metrics
from train.stored import Stored, StoredError, T

_MAY_CHANGE = {
    "train": ("epochs", "steps", "log_every", "eval_every", "patience"),
    "checkpoint": ("every", "keep", "best"),
    "data": ("path", "cache", "max_bad_fraction", "workers"),
    "nonfinite": ("max_skipped",),
    "tracking": ("tensorboard", "wandb"),
    "mesh": ("data", "fsdp"),
}
MAY_CHANGE_ON_RESUME = {f"{section}.{n}" for section, names in _MAY_CHANGE.items() for n in names}
MAY_CHANGE_ON_RESUME |= {"name"}
"""Fields that change a run's length, input and output, but not what it computes."""
_OF_MASKS = {f"data.{name}" for name in ("classes", "class_table", "format", "ignore", "images")}
_OF_MASKS |= {"data.masks", "data.mask_reading", "data.mask_values"}
"""Fields that say what masks mean, which `open_run.check_classes` compares."""
_OTHER_FOLDER, _PRIVATE = "choose another folder with --out", "private"


class _Owner(Stored):
    run: str | None = None


@dataclasses.dataclass(frozen=True)
class RunFile:
    """A file or folder of a run, and who may see it.

    Attributes:
      name: Its name.
      kind: In a private run: public follows from config, sizes and test scores, and covered from
        parameters with noise. Private is in `RunFolder.private`. A secret is published by nobody.
      content: What it has.
      released: What a private one has with `grad.release_only`; "" if it is not written.
    """

    name: str
    kind: Literal["public", "covered", "private", "secret"]
    content: str
    released: str = ""

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return (folder.private if self.kind == "private" else folder.path) / self.name


class RunFolder:
    """Paths of a run's files, and operations on them.

    A run has an id, which is drawn once and is in each of its files. A file of another run is
    refused, wherever it lies.
    """

    config = RunFile("config.json", "public", "config, and the run's id")
    classes = RunFile("classes.json", "public", "names of classes, or given scaling of numbers")
    imported = RunFile("import.json", "public", "pretrained weights that were read")
    model = RunFile("model", "public", "tokenizer and config of a published model")
    memory = RunFile("memory.json", "public", "memory of a step")
    memory_picture = RunFile("memory.png", "public", "memory of a step")
    profile = RunFile("profile", "public", "times of operations")
    lock_file = RunFile(".lock", "public", "process that writes here")
    summary = RunFile("summary.json", "public", "epsilon, test scores, memory, speed, versions")
    confusion = RunFile("confusion.png", "public", "counts of test examples")
    choices = RunFile("choices.json", "public", "answers to multiple-choice questions")
    checkpoints = RunFile("checkpoints", "covered", "parameters and state of the optimizer")
    weights = RunFile("weights.safetensors", "covered", "exported parameters")
    exported = RunFile("exported", "covered", "exported parameters of a published model")
    samples = RunFile("samples.png", "covered", "generated images")
    predictions = RunFile("predictions", "covered", "predictions for files that you give")
    secret_seed = RunFile("secret_seed", "secret", "key of noise and sampling")
    reference = RunFile("reference.npz", "private", "log-likelihoods of examples")
    data = RunFile("data.json", "private", "checksums, hashes of names", "a keyed checksum")
    metrics = RunFile("metrics.jsonl", "private", "training losses", "epsilon, test scores, norms")
    tensorboard = RunFile("tensorboard", "private", "the same, pictures", "the same")
    curves = RunFile("curves.png", "private", "training losses", "test scores")
    augmented = RunFile("augmented.png", "private", "training images")
    bad_steps = RunFile("bad_steps.jsonl", "private", "training examples of skipped steps")
    unreadable = RunFile("unreadable.csv", "private", "names of files that cannot be read")
    evaluation = RunFile("evaluation.json", "private", "changes of the data", "test scores")
    rows = RunFile("evaluation.csv", "private", "a row per test example")
    examples = RunFile("examples.png", "private", "test images")
    evaluations = RunFile("evaluations", "private", "other test examples", "test scores")
    attributions = RunFile("attribution.csv", "private", "a row per training example")
    suspects = RunFile("attribution.png", "private", "training images")
    attribution = RunFile("attribution", "private", "a row per training example and query")
    report = RunFile("report.html", "private", "what the other files have", "the same")

    def __init__(self, path: Path):
        self.path = path
        self._id: str | None = None
        self._is_private: bool | None = None

    @property
    def private(self) -> Path:
        """Folder of private files: `private` of a private run, else the run's own.

        With `grad.release_only` there is none, and nothing private is written.
        """
        if self._is_private is None and self.config.is_file():
            config = self.read_config()
            self._is_private = config.is_private and not config.is_release_only
        return self.path / _PRIVATE if self._is_private else self.path

    @classmethod
    def of(cls, given: str) -> Self:
        """Return the run folder that a user gives, by itself or by its config.json."""
        path = Path(given)
        return cls(path.parent if path.name == "config.json" and path.is_file() else path)

    @property
    def as_config(self) -> str:
        """The folder as CONFIG of a command, in which a bare name may be a recipe's."""
        return quote(self.path) + "/" * (len(self.path.parts) == 1)

    @property
    def id(self) -> str | None:
        """Id of the run; None before its config.json is written."""
        if self._id is None and (owner := stored.read(_Owner, self.config)):
            self._id = owner.run
        return self._id

    def write(self, path: Path, content: dict[str, Any]) -> None:
        """Write a JSON file of the run."""
        atomic_write(path, as_json(seal({"run": self.id} | content)))

    def read(self, kind: type[T], path: Path) -> T | None:
        """Return a JSON file of the run as a type; None if there is no file."""
        if (owner := stored.read(_Owner, path)) is None:
            return None
        self.check_owner(owner.run, path)
        return stored.parse(kind, read_sealed(path), path)

    def read_log(self, path: Path, kind: type[Stored] = MetricsLine) -> Log:
        """Read a .jsonl file of the run."""
        log = read_log(path, kind)
        if log.first:
            self.check_owner(log.first["run"], path)
        return log

    def origin(self, step: int) -> dict[str, str]:
        """Return metadata of exported weights: the run and the step that they are of."""
        return {"run": str(self.id), "step": str(step)}

    def check_owner(self, run: str | None, path: Path) -> None:
        """Raise `StoredError` for a file of another run."""
        if run != self.id:
            raise StoredError(path, f"it is of {run_name(run)}, and this is {run_name(self.id)}")

    @property
    def has_started(self) -> bool:
        """Whether a run here has logged or saved anything, unlike `fnet import` of a model."""
        has_logged = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return self.config.is_file() and (has_logged or self.has_saved)

    @property
    def has_saved(self) -> bool:
        """Whether a run here has saved a checkpoint, even if it is gone."""
        with contextlib.suppress(UserError):  # no data.json, or a damaged one
            if read_sealed(self.data).get("has_saved"):
                return True
        return any(self.checkpoints.glob("[0-9]*"))

    @property
    def has_trained(self) -> bool:
        """Whether a run here has taken a step, as far as its metrics and checkpoints say."""
        return any(self.saved_steps) or bool(read_metrics(self.metrics))

    @property
    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints; `fnet import` writes step 0."""
        names = [p.name for p in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing here while entered; a kill releases the lock."""
        check_no_pattern(self.path)
        with writing(self.path, _OTHER_FOLDER):
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock_file.open("a+")
        with file:
            with writing(self.path, _OTHER_FOLDER):  # some file systems have no locks
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    file.seek(0)
                    raise UserError(
                        f"{self.path} is in use by another process ({file.read().strip()}): "
                        "choose another folder with --out, or wait until it has ended"
                    ) from error
            if not os.fstat(file.fileno()).st_nlink:  # the last holder removed the file meanwhile
                raise UserError(f"{self.path} was in use until now: try again")
            file.truncate(0)
            file.write(f"{os.uname().nodename}, process {os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                self.lock_file.unlink(missing_ok=True)
                if is_new:
                    with contextlib.suppress(OSError):  # it is not empty
                        self.path.rmdir()

    def read_config(self) -> Config:
        """Return the run's config, with every field."""
        if (self.path / "adapter_config.json").is_file() and not self.config.is_file():
            raise UserError(
                f"{self.path} has adapters of PEFT, not a model; merge them into their base model "
                "with peft's merge_and_unload, and give the merged folder"
            )
        if not self.config.is_file():
            raise UserError(f"no run in {self.path}: it has no config.json{self.similar_run()}")
        if is_model_folder(self.path):
            raise UserError(
                f"{self.path} is a published model; make a run of it with fnet import "
                f"{quote(self.path)} --out runs/base"
            )
        return configs.from_json(stored.read_bytes(self.config), str(self.config))

    def has_config(self, code: str) -> bool:
        """Whether config.json says what one with this code (`code_of`) says."""
        return not self.config.is_file() or code_of(fixed_fields(self.read_config())) == code

    def similar_run(self) -> str:
        """Return ``" (did you mean runs/shapes?)"`` for a run of a similar name, or ``""``."""
        with contextlib.suppress(OSError):
            folders = [p for p in self.path.parent.iterdir() if (p / self.config.name).is_file()]
            if closest := closest_name(self.path.name, (p.name for p in folders)):
                return f" (did you mean {self.path.with_name(closest)}?)"
        return ""

    def create(self, config: Config | None = None, run_id: str | None = None) -> None:
        """Create an empty folder, which becomes a run's with `write_config`.

        The id is drawn, or given. Files of a run that ended before its first step are removed. The
        config says whether there are private files.
        """
        inner = self.path / _PRIVATE
        with writing(self.path, _OTHER_FOLDER):
            self.path.mkdir(parents=True, exist_ok=True)
            there = {*self.path.iterdir()} - {inner}
            there |= {*inner.iterdir()} if inner.is_dir() else set()
        if self.has_started:
            raise UserError(
                f"{self.path} already holds a run: continue it with --resume, "
                "or choose another folder with --out"
            )
        names = _BEFORE_FIRST_STEP
        if self.config in there:  # of a run, which was refused before it logged anything
            names = {file.name for file in FILES}
        paths = {folder / name for folder in (self.path, inner) for name in names}
        if there - paths - {*map(part_of, paths)}:
            raise UserError(
                f"{self.path} is not empty and holds no run: choose another folder with --out"
            )
        with writing(self.path, _OTHER_FOLDER):
            for path in (self.classes, self.unreadable, self.config):
                path.unlink(missing_ok=True)
            if config:
                self._begin(config)
        self._id = run_id or secrets.token_hex(8)

    def _begin(self, config: Config) -> None:
        """Create the folder of private files, with those of an imported run that becomes one."""
        before, self._is_private = self.private, config.is_private and not config.is_release_only
        if self.private == before:
            return
        self.private.mkdir(exist_ok=True)
        for file in FILES:
            if file.kind == "private" and (before / file.name).exists():
                (before / file.name).rename(self.private / file.name)

    def resume(self, config: Config, steps: int) -> None:
        """Check that the run here has this config, and update the fields that may change.

        Before the first step of an imported run, these are all fields but the network's. A run
        cannot have fewer ``steps`` than were saved.
        """
        different = changed_fields(self.read_config(), config)
        if self.saved_steps == [0]:
            different = {n: v for n, v in different.items() if n.startswith("model.")}
        if different:
            fields = ", ".join(f"{n} is {a} there and {b} here" for n, (a, b) in different.items())
            raise UserError(
                f"{self.path} holds a run with another config ({fields}): resume it with "
                f"`fnet train {self.as_config} --resume`, or choose another folder with --out"
            )
        if (saved := max(self.saved_steps, default=0)) > steps:
            raise UserError(
                f"train.steps: {steps:,}, but {self.path} was saved after step {saved:,}; raise "
                "train.steps or train.epochs, or choose another folder with --out"
            )
        self.write_config(config)

    def write_config(self, config: Config) -> None:
        """Write config.json, which makes the folder a run's."""
        if self.id is None:
            self._id = secrets.token_hex(8)
        with writing(self.path, _OTHER_FOLDER):
            self._begin(config)
            atomic_write(self.config, configs.to_json(config, self._id))

    @property
    def logged(self) -> dict[str, list[int]]:
        """Number of lines and checksum of what was logged, by file; 0 for a file without lines."""
        paths = self.metrics, self.bad_steps
        contents = {p.name: p.read_bytes() if p.exists() else b"" for p in paths}
        return {n: [k := c.count(b'{"step"'), k and self._checksum(c)] for n, c in contents.items()}

    def _checksum(self, content: bytes) -> int:
        """Return a checksum for a file that may be published, which tells nothing private."""
        if self.private == self.path or not self.secret_seed.is_file():
            return zlib.crc32(content)
        key = stored.read_bytes(self.secret_seed)
        return int.from_bytes(hmac.digest(key, content, "sha256")[:4])

    def drop_metrics_after(self, step: int, logged: dict[str, list[int]] | None) -> list[str]:
        """Drop lines that a killed run logged after its last checkpoint.

        Returns:
          What is not as it was at that checkpoint, and what that means, in lines for the user.
        """
        for path, kind in ((self.metrics, MetricsLine), (self.bad_steps, BadStep)):
            if path.exists():
                first, lines, _ = self.read_log(path, kind)
                kept = [first] * bool(first) + [line for line in lines if line["step"] <= step]
                atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        now = self.logged
        return [
            f"{self.path / name}: damaged, lost or changed: {now[name][0]:,} of {then[0]:,} lines "
            f"up to step {step} can be read; curves, summary.json and train.patience go by them"
            for name, then in (logged or {}).items()
            if now.get(name) != then
        ]

    def seconds_spent(self) -> float:
        """Return the training time until the last line of metrics, over all processes."""
        lines = read_metrics(self.metrics)
        return float(lines[-1].get("seconds", 0.0)) if lines else 0.0


_BEFORE_FIRST_STEP = {
    *(".lock", "report.html", "config.json", "classes.json", "data.json", "secret_seed", "model"),
    *("import.json", "evaluation.json", "choices.json", "memory.json", "memory.png"),
}
"""Files of a run that was refused before its first step."""
FILES = [file for file in vars(RunFolder).values() if isinstance(file, RunFile)]
"""Files of a run."""


def run_name(run: str | None) -> str:
    """Return ``"run 1f..."``."""
    return f"run {run}" if run else "a run without an id"


def changed_fields(there: Config, here: Config) -> dict[str, tuple[Any, Any]]:
    """Return ``{field: (there, here)}`` for fields that differ and may not on resume."""
    a, b = configs.flatten(there), configs.flatten(here)
    may_change = MAY_CHANGE_ON_RESUME | (_OF_MASKS if there.data.content == "masks" else set())
    names = sorted((a.keys() | b.keys()) - may_change)
    return {n: (a.get(n, "absent"), b.get(n, "absent")) for n in names if a.get(n) != b.get(n)}


def fixed_fields(config: Config) -> dict[str, str]:
    """Return the fields that say what a run computes. Its data may move."""
    values = configs.flatten(config).items()
    return {n: json.dumps(v, default=str) for n, v in values if n not in MAY_CHANGE_ON_RESUME}


def code_of(content: dict[str, Any]) -> str:
    """Return a short code of JSON data."""
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def describe_changes(then: dict[str, str], now: dict[str, str]) -> str:
    """Return ``"a was 1, is 2"`` for the values that differ, by name."""
    names = sorted(n for n in then | now if then.get(n) != now.get(n))
    return ", ".join(f"{n} was {then.get(n, 'absent')}, is {now.get(n, 'absent')}" for n in names)


def check_no_pattern(path: Path) -> None:
    """Refuse names in which orbax finds no checkpoints: patterns, backslashes, not UTF-8."""
    absolute = str(path.absolute())
    if absolute != os.fsencode(absolute).decode("utf-8", "replace"):
        fault = "that is not UTF-8"
    elif glob.escape(absolute) != absolute or "\\" in absolute:
        fault = "with *, ?, [ or \\"
    else:
        return
    raise UserError(
        f"{absolute}: checkpoints cannot be saved in a path {fault}: rename the folder, or choose "
        "another with --out"
    )


def quote(path: Path) -> str:
    """Quote a path for the shell."""
    return shlex.quote(str(path))


def as_json(data: dict[str, Any]) -> str:
    """Return indented JSON with a final newline."""
    return json.dumps(data, indent=2) + "\n"


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Return JSON data with a checksum, by which `unseal` notices damage."""
    return content | {"checksum": _checksum(content)}


def unseal(sealed: Any) -> dict[str, Any]:
    """Return the data that `seal` was given.

    Raises:
      ValueError: if they are not what was sealed.
    """
    if not isinstance(sealed, dict) or "checksum" not in sealed:
        raise ValueError("it is damaged: it has no checksum")
    content = {name: value for name, value in sealed.items() if name != "checksum"}
    if sealed["checksum"] != _checksum(content):
        raise ValueError("it is damaged: its checksum differs from its contents'")
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a JSON file with a checksum."""
    try:
        return unseal(stored.parse(dict[str, Any], stored.read_bytes(path), path))
    except ValueError as error:
        raise StoredError(path, error) from error


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file atomically: neither a reader nor a kill finds half of it."""
    part = part_of(path)
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if isinstance(error, IsADirectoryError):
            raise UserError(f"cannot write {path}: it is a folder; remove it") from error
        raise


def part_of(path: Path) -> Path:
    """Return the temporary path of what is written atomically, which a kill may leave behind."""
    return path.with_name(f".{path.name}.part")
