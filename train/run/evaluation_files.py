"""Names of evaluations: the options name the files and the titles."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.run.run_folder import RunFolder


def evaluation_files(folder: RunFolder, options: Mapping[str, Any]) -> tuple[RunFolder, str]:
    """Return where an evaluation with some options is written, and ``"split test, flip"``.

    Without options, it is the folder that training writes to, too. Other options do not overwrite.
    """
    if not options:
        return folder, ""
    at = folder.evaluations / ",".join(_file_name(*item) for item in options.items())
    return RunFolder(at), ", ".join(_describe(*item) for item in options.items())


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
