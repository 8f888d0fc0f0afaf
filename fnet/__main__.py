"""The ``fnet`` command, also ``python -m fnet``.

This is the only module of the library that knows the program, and ``import fnet`` does not load
it. It loads the package ``train`` next to ``fnet``, even if your folder has a ``train.py``.
"""

import importlib.util
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the program."""
    folder = Path(__file__).parents[1] / "train"
    spec = importlib.util.spec_from_file_location(
        "train", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["train"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    # As __main__, which worker processes import again.
    runpy.run_module("train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
