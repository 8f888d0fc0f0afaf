"""Make the page of all benchmark claims from benchmarks.json (mkdocs hooks)."""

import json
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
NAME = "benchmarks/benchmarks.md"


def on_files(files: Files, config: Any) -> None:
    """Add the page, so that mkdocs checks its links too."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import report

    data = json.loads((ROOT / "docs/benchmarks/benchmarks.json").read_text())
    page = report.as_markdown(
        data["machine"], data["results"], "benchmarks.png"
    )
    if old := files.get_file_from_path(NAME):  # that a benchmark run left here
        files.remove(old)
    files.append(File.generated(config, NAME, content=page))
