"""Recipes: Python files with a ``config()``, and the JSON that runs leave behind."""

import ast
import runpy
from pathlib import Path

from train import config as configs
from train.config import Config
from train.errors import UserError, did_you_mean

_PROGRAM = Path(__file__).parent.parent
# Inside the package when installed, next to it in a clone.
FOLDER = next(
    (p for p in (_PROGRAM / "configs", _PROGRAM.parent / "configs") if p.is_dir()), _PROGRAM
)


def recipes() -> dict[str, str]:
    """{name: first line of its docstring} of the recipes that come with fnet."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_bytes())) or ""
        found[path.stem] = doc.split("\n", 1)[0]
    return found


def load(given: str) -> Config:
    """The config that a user names.

    Args:
      given: a recipe's name, its file, a run's folder, or a config.json.

    Raises:
      UserError: if there is no such thing, or it is not a valid config.
    """
    path, known = Path(given), recipes()
    if given in known:  # whatever lies here: recipes are built on recipes
        return _run(FOLDER / f"{given}.py")
    try:
        if path.is_dir():
            path = path / "config.json"
        if path.suffix == ".json" and path.is_file():
            return configs.from_json(path.read_bytes(), str(path))
        if path.suffix == ".py" and path.is_file():
            return _run(path)
    except OSError as error:
        raise UserError(f"cannot read {given}: {error.strerror or error}") from error
    raise UserError(
        f"no recipe {given}{did_you_mean(path.stem, known)}; there are {', '.join(known)}; or give "
        "a recipe's file, or a run's folder or config.json"
    )


def _run(path: Path) -> Config:
    # Run, not imported: nothing is left beside the user's file.
    try:
        names = runpy.run_path(str(path))
        made = names["config"]() if "config" in names else None
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    if made is None:
        raise UserError(f"{path}: a recipe has a function config() that returns a Config")
    if not isinstance(made, Config):
        raise UserError(f"{path}: config() must return a Config, got {type(made).__name__}")
    return configs.check(made, str(path))
