"""matplotlib charts as SVG inside the page, in the colors of its style sheet."""

import io
import re
from collections.abc import Callable, Mapping
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.output.curves import COLORS, GRID_COLOR

_SVG = "{http://www.w3.org/2000/svg}"
_THEME = {color: f"var(--c{i})" for i, color in enumerate(COLORS)} | {GRID_COLOR: "var(--rule)"}


def to_svg(
    draw: Callable[[Axes], None], x_name: str, name: str, titles: Mapping[str, str]
) -> Markup:
    """Draw a small chart and return it as an SVG element.

    Styles become attributes, because the page's policy forbids inline styles. Colors become
    variables of the style sheet, which differ between light and dark mode. ``titles`` describe
    lines by gid. A line of gid ``run0-test`` gets the class ``run0``.
    """
    figure = Figure(figsize=(400 / 72, 190 / 72))
    figure.text(0.002, 0.075, x_name)
    draw(figure.add_axes((0.125, 0.14, 0.855, 0.8)))  # all charts have the same margins
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    root = ElementTree.fromstring(file.getvalue())
    for element in list(root.iter()):
        for style in element.findall(f"{_SVG}style"):
            element.remove(style)
        attributes = element.attrib
        for declaration in filter(str.strip, attributes.pop("style", "").split(";")):
            key, _, value = (text.strip() for text in declaration.partition(":"))
            if not key.startswith("font"):
                attributes[key] = _THEME.get(value, value)
        for key in {"d", "x", "y"} & attributes.keys():
            attributes[key] = re.sub(r"(\.\d)\d+", r"\1", attributes[key])
        if element.tag == f"{_SVG}g" and (gid := attributes.pop("id", "")).startswith("run"):
            attributes["class"] = gid.partition("-")[0]
            if gid in titles:
                element.insert(0, ElementTree.Element(f"{_SVG}title"))
                element[0].text = titles[gid]
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": " ".join(titles.values())}
    ElementTree.register_namespace("", _SVG.strip("{}"))
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return Markup(ElementTree.tostring(root, encoding="unicode"))
