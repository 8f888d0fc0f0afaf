"""HTML that is escaped by construction, and the page around it: one file that asks for nothing."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from typing import Any

from train.output.report.script import SCRIPT
from train.output.report.style import STYLE

_VOID = frozenset({"img", "input", "link", "meta"})


class Html(str):
    """Text that is HTML already; any other text is escaped where it is put in."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """``element("td", "a < b", class_="name")`` -> ``<td class="name">a &lt; b</td>``.

    Args:
      name: of the element, of HTML or of SVG.
      children: elements, texts, numbers; iterables of them; None is left out.
      attributes: a trailing underscore is dropped, others become hyphens; None and
        False are left out, True is the name alone.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{html.escape(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if name in _VOID else f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Html:
    """Children one after the other, each escaped unless it is HTML."""
    return Html("".join(_child(child) for child in children))


def _child(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, Iterable) and not isinstance(child, str):
        return joined(child)
    return html.escape(str(child))


def data(value: Any) -> Html:
    """A JSON block for the page's script, which no text in it can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(f'<script type="application/json">{text.replace("<", chr(92) + "u003c")}</script>')


def page(title: str, body: Html, style: str = "") -> str:
    """The whole document, in ASCII: right in whatever encoding it is written or sent.

    Its policy lets a browser fetch nothing and run the page's own script alone, so that
    a text from a run's files could do no harm even where it was not escaped.

    Args:
      title: of the window.
      body: of the page.
      style: CSS beside the page's own.
    """
    style = STYLE + style
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src '{_hash(style)}'; script-src '{_hash(SCRIPT)}'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),  # or a server is asked for one
        element("title", title),
        Html(f"<style>{style}</style>"),
    )
    whole = element(
        "html", head, element("body", body, Html(f"<script>{SCRIPT}</script>")), lang="en"
    )
    text = f"<!doctype html>\n{whole}\n"
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
