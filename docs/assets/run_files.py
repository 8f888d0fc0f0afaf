"""The tables of what a private run leaves, made from the code.

``python docs/assets/run_files.py`` writes them into docs/private_files.md. A test compares
them with the code.
"""

import re
from pathlib import Path

from train.output.progress import SHOWN
from train.run.metrics import FROM_NOISY_GRADIENT
from train.run.run_folder import FILES

PAGE = Path(__file__).parents[1] / "private_files.md"
_TABLES = re.compile(r"(?<=<!-- run files -->\n).*?(?=<!-- end -->)", re.DOTALL)

LINES = [
    ("`data:` notes", "private", "files, counts and copies of examples", ""),
    ("`cannot read`", "private", "names of files that cannot be read", ""),
    ("`fnet:` errors", "private", "may name a training example", "the same"),
    ("`data`", "public", "number of examples, names of classes", "the same"),
    (
        "`network`, `state`, `memory`, `policy`, `steps`, `time`",
        "public",
        "sizes and times",
        "the same",
    ),
    ("`privacy:`", "public", "epsilon, noise multiplier, sampling", "the same"),
]
"""Lines on the screen besides those with metrics."""


def with_tables(markdown: str) -> str:
    """Put the tables into the page."""
    files = [
        (
            f"`{'private/' * (f.kind == 'private')}{f.name}`",
            f.kind,
            f.content,
            _released(f),
        )
        for f in FILES
    ]
    metrics = [
        (f"`{label}`", *_kind(name))
        for name, (label, _) in SHOWN.items()
        if not name.startswith("train/") or _is_in_private_runs(name)
    ]
    tables = (
        _table("File", files),
        _table("Line on the screen", LINES + metrics),
    )
    return _TABLES.sub(lambda _: "\n" + "\n".join(tables) + "\n", markdown)


def _released(file) -> str:
    """What a file has with `grad.release_only`."""
    return file.released if file.kind == "private" else "the same"


def _is_in_private_runs(name: str) -> bool:
    """Whether a private run has a metric under this name, not as ``not_private/``."""
    metric = name.partition("/")[2]
    return metric in {*FROM_NOISY_GRADIENT, "learning_rate"}


def _kind(name: str) -> tuple[str, str, str]:
    part, _, metric = name.partition("/")
    if part == "not_private":
        return "private", "training examples", ""
    if part == "test":
        return "public", "test examples, which no guarantee covers", "the same"
    if metric in FROM_NOISY_GRADIENT:
        return "covered", "the sum with noise", "the same"
    return "public", "settings and the number of steps", "the same"


def _table(title: str, rows) -> str:
    lines = [
        f"| {title} | Kind | What it has | With `--grad.release-only` |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {kind} | {content} | {released or 'not written'} |"
        for name, kind, content, released in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
