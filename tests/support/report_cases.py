"""Folders of runs, complete or not, and their page as a browser reads it."""

import base64
import functools
import io
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

from rich.console import Console

from train.config import Config, Train
from train.report import render, report
from train.report.runs import read_runs
from train.run.run_folder import RunFolder

EVIL = "<script>alert(1)</script>&\"'é"
NOW = 2e9
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
VOID = {"img", "input", "link", "meta", "wbr"}


class Page(HTMLParser):
    """A page as a browser reads it; fails if it is not well-formed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self._open, self.raw = [], "", [], text
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        made = SimpleNamespace(tag=tag, inside="", attributes=dict(attrs), cells=[])
        self.elements.append(made)
        if tag not in VOID:
            self._open.append(made)

    def handle_endtag(self, tag):
        element = self._open.pop()
        assert element.tag == tag
        if tag in ("td", "th"):
            self._open[-1].cells.append(element.inside)

    def handle_data(self, data):
        for element in self._open:
            element.inside += data
        if self._open and self._open[-1].tag not in ("style", "title"):
            self.words += data

    def all(self, tag, **attributes):
        return [
            e
            for e in self.elements
            if e.tag == tag and all(e.attributes.get(k) == v for k, v in attributes.items())
        ]

    def section(self, name):
        return next(e.inside for e in self.all("section", id=name))

    @property
    def charts(self):
        """Of each chart: its title, its caption, and the descriptions of its lines."""
        charts = []
        for element in self.elements:
            if element.attributes.get("class") == "chart":
                charts.append(SimpleNamespace(title="", lines=[], caption=""))
            elif element.tag == "figcaption" and charts and not charts[-1].caption:
                charts[-1].caption = " ".join(element.inside.split())
            elif element.tag == "strong" and charts and not charts[-1].title:
                charts[-1].title = element.inside
            elif element.tag == "svg" and "viewbox" in element.attributes:
                charts[-1].svg = element
            elif element.tag == "title" and charts:
                charts[-1].lines.append(element.inside)
        return charts

    @property
    def facts(self):
        """Names and values that are listed, of one run."""
        names, values = self.all("dt"), self.all("dd")
        return {n.inside: v.inside for n, v in zip(names, values, strict=True)}

    @property
    def rows(self):
        """Rows of all tables, by their first cell; the last of a name."""
        rows = (list(e.cells) for e in self.all("tr"))
        return {cells[0]: cells[1:] for cells in rows if cells}


def make_run(place, name="run", *, config=None, lines=None, summary=True, memory=True, files=()):
    """The folder of a run, finished by default."""
    folder = RunFolder(place / name)
    folder.create()
    folder.write_config(config or Config(train=Train(steps=40, log_every=10)))
    lines = LINES if lines is None else lines
    if lines:
        text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        folder.metrics.write_text(text + "\n")
    if summary:
        folder.write(folder.summary, SUMMARY | (summary if summary is not True else {}))
    if memory:
        folder.write(folder.memory, MEMORY | (memory if memory is not True else {}))
    for path, content in dict(files).items():
        if isinstance(content, dict):
            folder.write(folder.path / path, content)
        else:
            (folder.path / path).write_bytes(content)
    return folder


def make(tmp_path):
    """Fixture: ``make(name, ...)`` is `make_run` in the test's own folder."""
    return functools.partial(make_run, tmp_path)


def line(step, **values):
    """A line of metrics.jsonl. ``train_loss=1`` sets train/loss."""
    named = {re.sub("^(train|test)_", r"\1/", k): v for k, v in values.items()}
    return {"step": step, "epoch": step / 8, "examples_per_second": 640.0} | named


LINES = [
    line(10, train_loss=2.0, train_accuracy=0.25, input_wait=0.5),
    line(20, train_loss=1.0, train_accuracy=0.5, test_loss=0.5, test_accuracy=0.75, input_wait=0.0),
    line(30, train_loss=0.5, train_accuracy=0.75, input_wait=0.0),
    line(
        40, train_loss=0.1, train_accuracy=0.9, test_loss=0.625, test_accuracy=0.7, input_wait=0.5
    ),
]


SUMMARY = {
    "metrics": {"test/loss": 0.625, "test/accuracy": 0.7},
    "steps": 40,
    "seconds": 9.0,
    "parameters": 1234,
    "peak_bytes_predicted": 3 * 2**20,
    "peak_bytes_seen": 5 * 2**20,
    "versions": {"fnet": "1.2.3", "jax": "9.8.7"},
}


MEMORY = {
    "parameters": 1234,
    "state_bytes": 4936,
    "peak": {
        "arguments": 2**20,
        "outputs": 2**20,
        "aliased": 2**20,
        "temporaries": 2**20,
        "total": 2**21,
    },
    "policy": "none",
    "microbatches": 1,
    "residuals": [
        {"layer": "stage0/conv", "bytes": 3 * 2**18, "arrays": 2},
        {"layer": "head", "bytes": 2**18, "arrays": 1},
    ],
    "largest_at_peak": [
        {
            "bytes": 2**18,
            "shape": [64, 1024],
            "dtype": "float32",
            "kind": "temporary",
            "layer": "stage0/conv",
            "phase": "backward",
            "instruction": "fusion.1",
        }
    ],
    "live_bytes": [2**20, 3 * 2**19, 2**21, 2**20],
}


def page_of(*folders, now=NOW):
    return Page(render(read_runs(folders), now))


def written(*folders, out=None):
    return report(folders, out, Console(file=io.StringIO()))
