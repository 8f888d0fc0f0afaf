"""The page of a report: well-formed, self-contained, safe and readable."""

import base64
import hashlib
import io
import json
import os
import re
from pathlib import Path

import pytest
import report_cases
from image_cases import write_image
from PIL import Image
from program_cases import exit_code, output_of
from report_cases import EVIL, LINES, MEMORY, NOW, PNG, Page, line, page_of, written

from train.config import Config, ImageFolder
from train.errors import UserError
from train.output.curves import MOST_POINTS
from train.report import render
from train.report.runs import _thumbnail, read_runs
from train.run.run_folder import RunFolder

make = pytest.fixture(report_cases.make)


def test_the_page_fetches_nothing_and_runs_no_script(make):
    page = page_of(make("a"), make("b", files={"examples.png": PNG}))
    for element in page.elements:
        for name in ("src", "href", "xlink:href"):
            assert element.attributes.get(name, "#").startswith(("#", "data:")), element
        assert not any(name.startswith("on") or name == "style" for name in element.attributes)
    assert not page.all("script")
    (style,) = page.all("style")
    assert "url(" not in style.inside
    assert "@import" not in style.inside
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    digest = base64.b64encode(hashlib.sha256(style.inside.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy.attributes["content"]
    assert "default-src 'none'" in policy.attributes["content"]
    assert "script-src" not in policy.attributes["content"]
    assert page.raw.isascii()
    assert page.raw.startswith("<!doctype html>")


def test_no_text_of_a_file_becomes_part_of_the_page(make):
    lines = [{**x, EVIL: x["step"], f"train/{EVIL}": 1 / x["step"]} for x in LINES]
    memory = {
        "policy": EVIL,
        "residuals": [{"layer": EVIL, "bytes": 1, "arrays": 1}],
        "largest_at_peak": [MEMORY["largest_at_peak"][0] | {"layer": EVIL, "dtype": EVIL}],
    }
    evaluated = {
        "step": 3,
        "metrics": {f"test/{EVIL}": 1.0},
        "classes": [{"name": EVIL, "examples": 1, "accuracy": 0}],
    }
    bad = {"step": 3, "loss": EVIL, "grad_norm": EVIL, "origin": EVIL, "examples": [EVIL]}
    files = {"evaluation.json": evaluated, "bad_steps.jsonl": json.dumps(bad).encode()}
    folder = make(
        EVIL.replace("/", ""),
        lines=lines,
        memory=memory,
        summary={"versions": {EVIL: EVIL}},
        config=Config(data=ImageFolder(path=EVIL)),
        files=files | {".lock": EVIL.encode()},
    )
    for folders in ([folder], [folder, make("b")]):
        page = page_of(*folders)
        assert not page.all("script")
        assert EVIL.replace("/", "") in page.all("title")[0].inside
        for name in ("curves", "memory", "examples", "config", "environment"):
            assert EVIL in page.section(name), name


def test_headings_are_in_order_and_links_lead_somewhere(make):
    page = page_of(make("a"), make("b"))
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    links = [*page.all("a"), *page.all("use")]
    targets = {a.attributes.get("href") or a.attributes["xlink:href"] for a in links}
    assert {target.removeprefix("#") for target in targets} <= set(ids)
    assert [e.tag for e in page.elements if re.fullmatch(r"h\d", e.tag)] == ["h1"] + 6 * ["h2"]
    assert page.all("html", lang="en")
    for image in page.all("svg"):
        hidden = image.attributes.get("aria-hidden") == "true"
        assert hidden or image.attributes["aria-label"]
    for head in page.all("th"):
        assert head.attributes["scope"] in ("row", "col")


def test_ten_thousand_lines_make_a_small_page_that_says_it_is_averaged(make):
    lines = [f'{{"step": {i}, "epoch": {i / 8}, "train/loss": {1 / i}}}' for i in range(1, 10_001)]
    text = render(read_runs([make(lines=lines, summary=False)]), NOW)
    assert len(text) < 2e5
    page = Page(text)
    assert f"Curves are averaged to at most {MOST_POINTS} points." in page.section("curves")
    assert "about 33 values" in page.section("curves")


def test_hard_values_are_drawn_inside_their_charts(make):
    hard = [0.0, -1.0, 1e-320, 1e30, 1e99, -1e99, 5.0, 5.0 + 1e-12]
    lines = [
        line(i + 1, train_loss=value, test_x=1e-8 * i, train_y=1e15 + i, train_z=abs(value))
        for i, value in enumerate(hard)
    ]
    page = page_of(make(lines=lines), make("b", lines=lines[:1]))
    assert len(page.charts) >= 4
    for path in page.all("path", id=None):
        for x, y in re.findall(r"[ML] ([-\d.einfa]+) ([-\d.einfa]+)", path.attributes["d"]):
            assert -5 <= float(x) <= 405
            assert -5 <= float(y) <= 195


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no run in .*nothing: it has no config.json"):
        written(RunFolder(tmp_path / "nothing"))


def test_a_run_given_twice_is_refused(make, tmp_path):
    folder = make("a")
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(UserError, match="the same run is given twice; give it once"):
        written(folder, folder)
    with pytest.raises(UserError, match=r"given twice, as .*a and .*link; give it once"):
        written(folder, RunFolder(tmp_path / "link"))


def test_a_page_that_cannot_be_written_is_one_line(make, tmp_path):
    folder = make("a")
    with pytest.raises(UserError, match=r"it is a directory; name a file; choose another"):
        written(folder, out=tmp_path)
    with pytest.raises(
        UserError, match=r"cannot write .*metrics.jsonl: the file there is not a report"
    ):
        written(folder, out=folder.metrics)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is not a regular file; choose"):
        written(folder, out=tmp_path / "pipe")
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory; choose"):
        written(folder, out=folder.metrics / "x" / "report.html")
    with pytest.raises(UserError, match=r"cannot write .*: File name too long; choose"):
        written(folder, out=tmp_path / ("x" * 300))
    assert json.loads(folder.metrics.read_text().splitlines()[0]) == LINES[0]


def test_reports_are_overwritten_and_folders_created(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = make("a"), make("b")
    assert written(a) == written(a) == a.path / "report.html"
    assert written(a, b) == Path("report.html")
    assert written(a, out=Path("new/folder/page.html")).is_file()


def test_a_run_can_be_reported_and_resumed(make):
    folder = make("a")
    written(folder)
    folder.resume(folder.read_config(), 1)


def test_the_command_reports_runs_and_refuses_folders_without_one(workplace, make, capsys):
    folders = [make("a").path, make("b").path]
    assert output_of(capsys, "report", *folders, "--out", "both.html") == "report: both.html\n"
    assert (workplace / "both.html").read_text().startswith("<!doctype html>")
    assert exit_code("report", "nowhere") == 2
    assert "no run in nowhere" in capsys.readouterr().err
    for flag in ("-h", "--help"):
        assert exit_code("report", folders[0], flag) == 0
        assert "--out" in capsys.readouterr().out


def test_pictures_of_examples_have_96_pixels_along_their_longer_side(tmp_path):
    write_image(tmp_path / "a.png", 0, (40, 20))
    content = _thumbnail(str(tmp_path / "a.png")).removeprefix("data:image/jpeg;base64,")
    assert sorted(Image.open(io.BytesIO(base64.b64decode(content))).size) == [48, 96]
