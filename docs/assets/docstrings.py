"""Read fnet's docstrings for the site: public names first, literal blocks and tables as Markdown.

Used by mkdocstrings (`mkdocs.yml`), which reads the source and imports nothing.
"""

import re
from typing import Any

import griffe

_PROSE = {"Returns", "Yields"}
"""Sections that are sentences here, where Google's style has a list of types."""

_BORDER = re.compile(r"^( *)=+(  ?=+)+ *$")


class PublicNames(griffe.Extension):
    """Resolve a name of a package to the function it imports, even if a module has that name."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Bind the imported names after all of fnet is read."""
        collection = pkg.modules_collection
        targets = {}
        for package in [
            pkg,
            *(m for m in pkg.modules.values() if not m.is_alias),
        ]:
            for name, target in package.imports.items():
                if (
                    target.startswith("fnet.")
                    and target != f"{package.path}.{name}"
                ):
                    targets[package, name] = collection[target]
        for (package, name), target in targets.items():
            # Bind all names together: a bound function hides the module of the same name.
            package.members[name] = griffe.Alias(
                name, _whole(target), parent=package
            )

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of every object."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def _whole(target: Any) -> Any:
    return target.final_target if target.is_alias else target


def as_markdown(text: str) -> str:
    """A docstring in Markdown: sections of prose, tables, literal blocks and links."""
    text = re.sub(
        r"^Example:$", "Examples:", text, flags=re.MULTILINE
    )  # rendered as code
    text = _prose_sections(text)
    text = _tables(text)
    text = re.sub(r"^( *)::$\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return re.sub(r"(?<![`\w])`(fnet\.[\w.]+)`(?!`)", _link, text)


def _link(match: re.Match[str]) -> str:
    # Optional: some names are of modules, which no page is about.
    name = match[1]
    return (
        f'<autoref identifier="{name}" optional><code>{name}</code></autoref>'
    )


def _prose_sections(text: str) -> str:
    """``Returns:`` and the indented lines below it as a paragraph that begins in bold."""
    lines, out, inside = text.split("\n"), [], False
    for line in lines:
        title = line.removesuffix(":")
        if title in _PROSE and line.endswith(":"):
            inside = True
            out += [f"**{title}**", ""]
            continue
        inside = inside and (not line or line.startswith(" "))
        out.append(line[2:] if inside else line)
    return "\n".join(out)


def _tables(text: str) -> str:
    """Simple tables of reStructuredText as Markdown's; rows may go on below their first line."""
    out: list[str] = []
    table: list[str] = []
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if table or _BORDER.match(line):
            table.append(line)
            ends = i + 1 == len(lines) or not lines[i + 1].strip()
            if ends:
                out += _markdown_table(table)
                table = []
        else:
            out.append(line)
    return "\n".join(out + table)


def _markdown_table(lines: list[str]) -> list[str]:
    starts = [m.start() for m in re.finditer("=+", lines[0])]
    ends = [*starts[1:], None]
    parts: list[list[list[str]]] = [[]]
    for line in lines[1:]:
        if _BORDER.match(line):
            parts.append([])
            continue
        cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        if cells[0] or not parts[-1]:
            parts[-1].append(cells)
        else:
            parts[-1][-1] = [
                f"{a} {b}".strip()
                for a, b in zip(parts[-1][-1], cells, strict=True)
            ]
    groups = [rows for rows in parts if rows]
    head = groups.pop(0)[0] if len(groups) > 1 else [""] * len(starts)
    rows = [
        head,
        ["---"] * len(starts),
        *(row for group in groups for row in group),
    ]
    return ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]


def _escaped(cell: str) -> str:
    """Bars that are no borders; in code they are none, and a backslash would be seen."""
    return re.sub(r"(`+)(.*?)\1|\|", lambda m: m[0] if m[1] else "\\|", cell)
