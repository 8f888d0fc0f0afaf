"""The page of a report: well-formed, by itself, trusting no text, readable."""

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import report_cases
from program_cases import exit_code, fnet_command
from report_cases import (
    EVIL,
    LINES,
    MEMORY,
    NOW,
    PNG,
    Page,
    line,
    page_of,
    written,
)

from train.config import Config, ImageFolder
from train.errors import UserError
from train.output.report import as_html
from train.output.report.curves import MOST_POINTS, thinned
from train.output.report.runs import read_runs
from train.output.report.scales import BYTES, NUMBER, SCORE, SHARE, axis, number
from train.output.report.style import STYLE
from train.run.run_folder import RunFolder

make = pytest.fixture(report_cases.make)


def test_the_page_asks_for_nothing_and_lets_no_other_script_run(make):
    page = page_of(make("a"), make("b", files={"examples.png": PNG}))
    for element in page.elements:
        for name in ("src", "href"):
            address = element.attributes.get(name, "#")
            assert address.startswith(("#", "data:")), element
        assert not any(name.startswith("on") or name == "style" for name in element.attributes)
    (style,) = page.all("style")
    assert "url(" not in style.inside
    assert "@import" not in style.inside
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    (script,) = [e for e in page.all("script") if "type" not in e.attributes]
    for kind, content in (("script", script.inside), ("style", style.inside)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy.attributes["content"]
    assert "default-src 'none'" in policy.attributes["content"]
    assert page.raw.isascii()


def test_no_text_of_a_file_becomes_part_of_the_page(make):
    lines = [{**x, EVIL: x["step"], f"train/{EVIL}": 1 / x["step"]} for x in LINES]
    memory = {
        "policy": EVIL,
        "kept": [{"layer": EVIL, "bytes": 1, "arrays": 1}],
        "largest_at_peak": [MEMORY["largest_at_peak"][0] | {"layer": EVIL, "dtype": EVIL}],
    }
    evaluated = {
        "step": 3,
        "metrics": {},
        "classes": [{"name": EVIL, "examples": 1, "accuracy": 0}],
    }
    bad = {"step": 3, "loss": EVIL, "grad_norm": EVIL, "origin": EVIL, "examples": [EVIL]}
    files = {"evaluation.json": evaluated, "bad_steps.jsonl": bad}
    folder = make(
        EVIL.replace("/", ""),
        lines=lines,
        memory=memory,
        summary={"versions": {EVIL: EVIL}},
        config=Config(data=ImageFolder(path=EVIL)),
        files={name: json.dumps(content).encode() for name, content in files.items()}
        | {".lock": EVIL.encode()},
    )
    for folders in ([folder], [folder, make("b")]):
        page = page_of(*folders)
        scripts = [e for e in page.all("script") if "type" not in e.attributes]
        assert len(scripts) == 1
        assert "alert" not in scripts[0].inside
        assert EVIL.replace("/", "") in page.all("title")[0].inside
        for name in ("curves", "memory", "examples", "environment"):
            assert EVIL in page.section(name), name
        assert EVIL in page.section("config")


def test_headings_are_numbered_in_order_and_links_lead_somewhere(make):
    page = page_of(make("a"), make("b"))
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    assert {a.attributes["href"].removeprefix("#") for a in page.all("a")} <= set(ids)
    assert [e.tag for e in page.elements if re.fullmatch(r"h\d", e.tag)] == ["h1"] + 6 * ["h2"]
    assert page.all("html", lang="en")
    for image in page.all("svg"):
        hidden = image.attributes.get("aria-hidden") == "true"
        assert hidden or image.attributes["aria-label"]
    for heads in page.all("th"):
        assert heads.attributes["scope"] in ("row", "col")


def test_every_point_of_a_curve_is_read_out_and_lies_in_its_chart(make):
    hard = [0.0, -1.0, 1e-320, 1e30, 1e99, -1e99, 5.0, 5.0 + 1e-12]
    lines = [
        line(i + 1, train_loss=value, test_x=1e-8 * i, train_y=1e15 + i, train_z=abs(value))
        for i, value in enumerate(hard)
    ]
    page = page_of(make(lines=lines), make("b", lines=lines[:1]))
    assert len(page.charts) >= 4
    paths = [e for e in page.all("path") if "data-points" in e.attributes]
    counts = [len(words) for chart in page.charts for words in chart.words]
    assert counts == [len(words) for chart in page.charts for words in chart.where]
    for path, count in zip(paths, counts, strict=True):
        points = re.findall(r"([-\d.einfa]+),([-\d.einfa]+)", path.attributes["d"])
        assert len(points) == count
        for x, y in points:
            assert 0 <= float(x) <= 400
            assert 0 <= float(y) <= 190


def test_a_bar_is_as_long_as_its_number(make):
    widths = [e.attributes["width"] for e in page_of(make()).all("rect")]
    assert widths == ["60.00%", "100.00%", "100.00%", "33.33%", "100.00%"]


@pytest.mark.parametrize("count", [1, 5, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_thinned_curves_keep_the_mean_and_the_extremes(count):
    x = np.cumsum(np.random.default_rng(0).integers(1, 9, count)).astype(float)
    y = np.random.default_rng(1).normal(size=count)
    some = thinned(x, y, MOST_POINTS)
    assert len(some.x) <= MOST_POINTS
    assert len(some.x) == count or count > MOST_POINTS
    counts = some.last - some.first + 1
    assert counts.sum() == count
    np.testing.assert_allclose((some.y * counts).sum(), y.sum(), atol=1e-9)
    assert (some.low.min(), some.high.max()) == (y.min(), y.max())
    assert ((some.low <= some.y) & (some.y <= some.high)).all()
    assert (np.diff(some.x) > 0).all()


def test_a_hundred_thousand_lines_make_a_page_below_two_megabytes_that_says_it_is_thinned(make):
    steps = np.arange(1, 100_001)
    noise = np.random.default_rng(0).normal(1, 0.1, (100_000, 3)).round(6).tolist()
    lines = (
        f'{{"step": {step}, "epoch": {step / 8}, "examples_per_second": 64.0, "train/loss": {a}, '
        f'"train/accuracy": {b}, "train/grad_norm": {c}}}'
        for step, (a, b, c) in zip(steps.tolist(), noise, strict=True)
    )
    text = as_html(read_runs([make(lines=list(lines), summary=False)]), NOW)
    assert len(text) < 2e6
    page = Page(text)
    assert "thinned to at most 300 points" in page.section("curves")
    loss = page.charts[0]
    assert len(loss.words[0]) == MOST_POINTS
    assert loss.where[0][0] == "1 to 334"
    first = [row[0] for row in noise[:334]]
    expected = f"{number(np.mean(first))} ({number(min(first))} to {number(max(first))})"
    assert loss.words[0][0] == expected


@pytest.mark.parametrize("kind", [NUMBER, SCORE, SHARE, BYTES])
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (0.5, 0.5),
        (0, 0),
        (-3, 5),
        (-10, -2.4),
        (1e-9, 1e9),
        (1, 1 + 1e-12),
        (-1e300, 1e300),
        (7e8, 9e9),
    ],
)
def test_an_axis_holds_its_numbers_and_has_a_few_ticks_that_differ(kind, low, high):
    found = axis(kind, low, high)
    ends = found.place(np.array([low, high], float))
    assert (ends >= -1e-9).all()
    assert (ends <= 1 + 1e-9).all()
    values = [value for value, _ in found.ticks]
    assert 1 <= len(values) <= 10
    assert all(found.low - 1e-9 <= v <= found.high * (1 + 1e-9) for v in values)
    assert found.logarithmic == (kind is SCORE and low > 0 and high > 10 * low)
    if high - low > 1e-6 * abs(high):
        assert len({words for _, words in found.ticks}) == len(values)


def test_ticks_of_bytes_are_round_in_their_unit():
    assert [words for _, words in axis(BYTES, 0, 35 * 2**20).ticks] == [
        "0", "10 MiB", "20 MiB", "30 MiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.10123, "0.1012"), (12345.6, "12,346"), (1.8656e-6, "1.866e-6"), (0, "0"), (-5, "-5")],
)
def test_numbers_have_four_digits(value, words):
    assert number(value) == words


def luminance(colour):
    """WCAG 2.2, relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_can_be_told_from_the_page(mode):
    light, dark = STYLE.split("prefers-color-scheme: dark")
    found = dict(re.findall(r"--(\w+): (#\w{6});", light if mode == "light" else dark))
    page = luminance(found["page"])

    def contrast(name):
        other = luminance(found[name])
        return (max(page, other) + 0.05) / (min(page, other) + 0.05)

    # WCAG 2.2: 4.5 for text (1.4.3), 3 for what graphics are made of (1.4.11).
    assert contrast("text") > 7
    assert contrast("muted") > 4.5
    assert all(contrast(f"c{i}") > 4.5 for i in range(8))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no run in .*nothing: it has no config.json"):
        written(RunFolder(tmp_path / "nothing"))


def test_a_run_that_is_named_twice_is_refused(make, tmp_path):
    folder = make("a")
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(UserError, match="the same run is named twice; name it once"):
        written(folder, folder)
    with pytest.raises(UserError, match=r"named twice, as .*a and as .*link"):
        written(folder, RunFolder(tmp_path / "link"))


def test_a_page_that_cannot_be_written_is_one_line(make, tmp_path):
    folder = make("a")
    with pytest.raises(UserError, match=r"it is a folder; name a file; choose another"):
        written(folder, out=tmp_path)
    with pytest.raises(
        UserError, match=r"cannot write .*metrics.jsonl: there is a file that is no"
    ):
        written(folder, out=folder.metrics)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is no file; choose"):
        written(folder, out=tmp_path / "pipe")
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory; choose"):
        written(folder, out=folder.metrics / "x" / "report.html")
    with pytest.raises(UserError, match=r"cannot write .*: File name too long; choose"):
        written(folder, out=tmp_path / ("x" * 300))
    assert json.loads(folder.metrics.read_text().splitlines()[0]) == LINES[0]


def test_reports_are_written_over_and_folders_made(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = make("a"), make("b")
    assert written(a) == written(a) == a.path / "report.html"
    assert written(a, b) == Path("report.html")
    assert written(a, out=Path("new/folder/page.html")).is_file()


def test_a_run_can_be_reported_and_continued(make):
    folder = make("a")
    written(folder)
    folder.resume(folder.read_config())


def test_the_command_reports_runs_and_refuses_what_is_none(workplace, make, capsys):
    folders = [make("a").path, make("b").path]
    fnet_command("report", *folders, "--out", "both.html")
    assert capsys.readouterr().out == "report: both.html\n"
    assert (workplace / "both.html").read_text().startswith("<!doctype html>")
    assert exit_code("report", "nowhere") == 2
    assert "no run in nowhere" in capsys.readouterr().err
    for flag in ("-h", "--help"):
        assert exit_code("report", folders[0], flag) == 0
        assert "--out" in capsys.readouterr().out
