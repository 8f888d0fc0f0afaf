"""Signatures and first lines in the API pages, for readers on a code host.

An entry of docs/api is a line that begins with **`name. ``python docs/assets/api_pages.py``
completes the line. The site shows the whole docstring there. A test compares the lines with the
code.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

_LONG = 200  # characters of a signature that is shortened
PAGES = Path(__file__).parents[1] / "api"
ENTRY = re.compile(r"^\*\*`([\w.]+)[^\n]*$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the lines of a page of the site by the docstrings."""
    is_reference = page.file.src_uri.startswith("api/")
    return ENTRY.sub(r"::: \1", markdown) if is_reference else markdown


def with_lines(markdown: str) -> str:
    """Complete each entry: signature, and the first line of its docstring."""
    return ENTRY.sub(lambda m: _line(m[1]), markdown)


def _line(name: str) -> str:
    value = _find(name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"**`{name}`**"
    signature = _signature(value)
    first = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    return f"**`{name}{signature}`** {first}".rstrip()


def _signature(value: Any) -> str:
    """Arguments and defaults, without annotations; of many, those that you must give."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # an exception
        return ""
    plain = []
    for p in parameters:
        is_short = p.default is p.empty or "<" not in repr(p.default)
        default = p.default if is_short else ...
        plain.append(p.replace(annotation=p.empty, default=default))
    text = str(inspect.Signature(plain)).replace("Ellipsis", "...")
    if len(text) > _LONG:
        required = [p for p in plain if p.default is p.empty]
        text = f"{str(inspect.Signature(required))[:-1]}, ...)".replace(
            "(, ", "("
        )
    is_protocol = inspect.isclass(value) and text in ("()", "(*args, **kwargs)")
    return "" if is_protocol else text


def _find(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


if __name__ == "__main__":
    for page in PAGES.glob("*.md"):
        page.write_text(with_lines(page.read_text()))
