"""Recipes: Python files with a function ``config()``, and the config.json of runs."""

import ast
import runpy
from pathlib import Path

from train import config as configs
from train.config import Config
from train.config.registry import import_plugins
from train.errors import UserError, did_you_mean

_PROGRAM = Path(__file__).parent.parent
# Inside the package when installed, next to it in a clone.
FOLDER = next(
    (p for p in (_PROGRAM / "configs", _PROGRAM.parent / "configs") if p.is_dir()), _PROGRAM
)


def recipes() -> dict[str, str]:
    """List the recipes that come with fnet: {name: first line of its docstring}."""
    trees = {path.stem: ast.parse(path.read_bytes()) for path in sorted(FOLDER.glob("*.py"))}
    docs = {name: ast.get_docstring(tree) or "" for name, tree in trees.items()}
    return {name: doc.partition("\n")[0] for name, doc in docs.items()}


def load(given: str) -> Config:
    """Load a config: the name of a recipe, a recipe file, a run folder or a config.json."""
    import_plugins()
    path, known = Path(given), recipes()
    if given in known:  # before files of that name: recipes load other recipes by name
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
    others = "a recipe file, a run folder or a config.json"
    if len(path.parts) > 1:
        parts = (*reversed(path.parents), path, path / "config.json")
        missing = next(part for part in parts if not part.exists())
        siblings = missing.parent.iterdir() if missing.parent.is_dir() else ()
        near = did_you_mean(missing.name, [p.name for p in siblings])
        raise UserError(
            f"{given}: no {missing.name} in {missing.parent}{near}; give the name of a recipe, "
            f"{others}"
        )
    raise UserError(
        f"no recipe {given}{did_you_mean(path.stem, known)}; there are {', '.join(known)}; or give "
        f"{others}"
    )


def _run(path: Path) -> Config:
    # Run instead of imported, which would leave a __pycache__ in the user's folder.
    try:
        names = runpy.run_path(str(path))
        config = names["config"]() if "config" in names else None
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    if config is None:
        raise UserError(f"{path}: a recipe needs a function config() that returns a Config")
    if not isinstance(config, Config):
        raise UserError(f"{path}: config() must return a Config, got {type(config).__name__}")
    return configs.check(config, str(path))
