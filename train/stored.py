"""Files that fnet wrote and reads back, as values of known types.

People copy, cut and edit such files. One that does not fit its type is refused in one line.
"""

import functools
import io
import os
import zipfile
import zlib
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from train import limits
from train.errors import UserError

T = TypeVar("T")

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Stored(BaseModel):
    """A JSON object. Fields that nobody reads are ignored."""

    model_config = ConfigDict(frozen=True)


class StoredError(UserError):
    """A file that cannot be read back, and the reason."""

    def __init__(self, path: Path, reason: object):
        super().__init__(f"cannot read {path}: {reason}")
        self.path, self.reason = path, reason


def read_bytes(path: Path, limit: limits.Limit = limits.JSON_FILE) -> bytes:
    """Return the contents of a file.

    Raises:
      StoredError: if it is missing or no regular file.
      UserError: if it is above the limit.
    """
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise StoredError(path, "it is not a regular file")
        limit.check(status.st_size, path)
        return path.read_bytes()
    except OSError as error:
        raise StoredError(path, error.strerror or error) from error


def read(kind: type[T], path: Path) -> T | None:
    """Return the JSON in a file as a type; None if there is no file."""
    return parse(kind, read_bytes(path), path) if os.path.lexists(path) else None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npy or .npz file by name; {} if it is missing or damaged."""
    try:
        loaded = np.load(io.BytesIO(read_bytes(path, limits.LOG)), allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (UserError, OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}


def parse(kind: type[T], content: bytes | Any, path: Path) -> T:
    """Return JSON, or a value that was read from it, as a type."""
    key: Any = kind  # mypy takes no type variable for a key
    adapter: TypeAdapter[T] = adapter_of(key)
    try:
        is_text = isinstance(content, bytes)
        return adapter.validate_json(content) if is_text else adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise StoredError(path, f"{place}{first['msg']}") from None


@functools.lru_cache(maxsize=32)
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return what validates a type."""
    return TypeAdapter(kind)
