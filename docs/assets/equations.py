"""Turn equations into MathML, which browsers draw without a script (mkdocs hooks)."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_EQUATION = re.compile(
    r'<(span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</\1>',
    re.DOTALL,
)


def on_page_content(content: str, **_: Any) -> str:
    """Replace what pymdownx.arithmatex makes of $ and $$."""
    return _EQUATION.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match["open"] == "[" else "inline"
    # The converter knows aligned only by the name that Markdown outside of the site does not.
    tex = html.unescape(match["tex"]).strip().replace("{aligned}", "{align*}")
    math = convert(tex, display=display)
    if "<mi>&</mi>" in math or "<mi>\\" in math:
        raise ValueError(f"equations: cannot convert {tex}")
    return f'<div class="equation">{math}</div>' if display == "block" else math
