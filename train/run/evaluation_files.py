"""Names of evaluations: the options name the files and the titles."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from train.run.run_folder import RunFolder


class EvaluationFiles(NamedTuple):
    """Files of an evaluation.

    The description names its options: ``"split test, flip"``. It is empty without options.
    """

    json: Path
    rows: Path
    confusion: Path
    examples: Path
    description: str

    def title(self, name: str, step: int) -> str:
        """Return the title of a picture."""
        return ", ".join(filter(None, [f"{name}, step {step}", self.description]))


def evaluation_files(folder: RunFolder, options: Mapping[str, Any]) -> EvaluationFiles:
    """Return the files of an evaluation with some options, which other options do not overwrite.

    Without options, these are the files that training writes, too.
    """
    if not options:
        return EvaluationFiles(
            folder.evaluation, folder.rows, folder.confusion, folder.examples, ""
        )
    at = folder.evaluations / ",".join(_file_name(*item) for item in options.items())
    return EvaluationFiles(
        at / folder.evaluation.name,
        at / folder.rows.name,
        at / folder.confusion.name,
        at / folder.examples.name,
        ", ".join(_describe(*item) for item in options.items()),
    )


def _describe(name: str, value: Any) -> str:
    name = name.replace("_", " ")
    return name if value is True else f"{name} {' '.join(_texts(value))}"


def _file_name(name: str, value: Any) -> str:
    if value is True:
        return name
    text = "+".join(_texts(value))
    safe = re.sub(r"[^\w.+-]", "_", Path(text).name or "root")[-60:]
    if safe != text:  # two folders can have the same name
        digest = hashlib.sha256(os.fsencode(os.path.abspath(text))).hexdigest()
        safe = f"{safe}-{digest[:6]}"
    return f"{name}={safe}"


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, tuple) else (value,)
    return [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
