"""Put the README's first sections on the site's first page (mkdocs hooks)."""

import re
from pathlib import Path
from typing import Any

MARK = "<!-- the README up to its section The program -->\n"
_ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark by the README's sections, with links from docs/."""
    if MARK not in markdown:
        return markdown
    text = (_ROOT / "README.md").read_text().partition("## The program\n")[0]
    return markdown.replace(MARK, for_site(text))


def for_site(text: str) -> str:
    """Rewrite links and pictures of a page in the root for a page in docs/."""
    text = re.sub(
        r"<!-- picture -->.*?<!-- end of picture -->",
        _picture,
        text,
        flags=re.DOTALL,
    )
    return text.replace("](docs/", "](")


def _picture(match: re.Match[str]) -> str:
    """Both versions of a picture; the theme shows the one for its colors."""
    dark, alt, light = re.findall(
        r'(?:srcset|alt|src)="(?:docs/)?([^"]*)"', match[0]
    )
    return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"
