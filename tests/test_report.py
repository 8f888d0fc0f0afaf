"""`fnet report`: what the page tells of runs, whole or broken off."""

import base64
import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import report_cases
from program_cases import fnet_command
from report_cases import (
    LINES,
    NOW,
    Page,
    line,
    page_of,
    written,
)

from train.config import (
    Clipped,
    Config,
    Digits,
    HuggingFace,
    ImageFolder,
    LanguageModel,
    Mlp,
    Optim,
    TextFile,
    Train,
)
from train.errors import UserError
from train.output.report import as_html
from train.output.report.config import ABSENT, differences
from train.output.report.runs import read_runs
from train.run.run_folder import RunFolder

make = pytest.fixture(report_cases.make)


@pytest.mark.slow
def test_a_run_as_it_is_trained_is_told_whole(workplace):
    fnet_command("train", "tiny.py", "--out", "r")
    folder = RunFolder(Path("r"))
    assert written(folder) == Path("r/report.html")
    (run,) = read_runs([folder])
    assert not run.notes
    assert run.ended
    page = Page(Path("r/report.html").read_text())
    summary = json.loads(folder.summary.read_text())
    assert f"{summary['metrics']['test/accuracy']:.2%}" in page.words
    assert "ended after 8 steps" in page.words
    for kept in json.loads(folder.memory.read_text())["kept"]:
        assert kept["layer"] in page.section("memory")
    assert summary["versions"]["jaxlib"] in page.section("environment")
    pictures = [
        base64.b64decode(image.attributes["src"].removeprefix("data:image/png;base64,"))
        for image in page.all("img")
    ]
    assert pictures == [folder.examples.read_bytes(), folder.confusion.read_bytes()]
    titles = {chart.figure.inside.split("log scale")[0].split("train")[0] for chart in page.charts}
    assert {title.strip() for title in titles} >= {"loss", "accuracy"}


def test_figures_are_those_of_the_files(make):
    page = page_of(make())
    assert [e.inside for e in page.all("dd")][:2] == [
        "0.625best 0.5 at step 20",
        "70.00%best 75.00% at step 20",
    ]
    # 40 steps of 64 examples at 640 a second; half of the first and the last 10 steps waited.
    throughput = page.section("throughput")
    assert "time in steps4.0 s" in throughput
    assert "a step100 ms" in throughput
    assert "input wait25.00%" in throughput
    memory = page.section("memory")
    assert "predicted3.00 MiB" in memory
    assert "seen5.00 MiB" in memory
    assert "stage0/conv2768.00 KiB" in memory
    assert "2.00 MiB at most" in memory


def test_a_run_that_has_not_ended_says_how_far_it_came(make):
    lines = [*LINES[:2], '{"step": 30, "train/lo']
    folder = make(lines=lines, summary=False, files={".lock": b"host, process 7\n"})
    (folder.checkpoints / "15").mkdir(parents=True)
    page = page_of(folder, now=folder.metrics.stat().st_mtime + 90)
    for words in (
        "not ended: at step 20 of 40 (50%)",
        "the last line was written 1 min 30 s before",
        "about 2.0 s of training steps are left",
        "host, process 7 writes into its folder, unless it was killed",
        "the newest checkpoint is of step 15",
        "metrics.jsonl: 1 line is cut off or without a step, left out",
        "no examples.png and no confusion.png to show",
        "summary.json has them",
    ):
        assert words in page.words, words
    assert len(page.charts[0].words[0]) == 2


def test_the_length_of_a_run_of_epochs_follows_from_its_lines(make):
    # 22.453125 steps an epoch, as `digits` has: 135 steps, where rounding errors would make 136.
    of = Config(train=Train(epochs=6))
    lines = [{"step": n, "epoch": n / 22.453125, "train/loss": 1.0} for n in (50, 75)]
    (run,) = read_runs([make(config=of, lines=lines, summary=False)])
    assert run.planned == 135
    lines = [{"step": n, "epoch": n / 7, "train/loss": 1.0} for n in range(1, 43)]
    for i in range(1, 43):
        (run,) = read_runs([make(f"r{i}", config=of, lines=lines[:i], summary=False)])
        assert run.planned == 42


def test_a_run_that_was_continued_is_not_ended_by_its_old_summary(make):
    config = Config(train=Train(steps=80))
    page = page_of(make(config=config, lines=[*LINES, line(50, train_loss=0.1)]))
    assert "not ended: at step 50 of 80" in page.words
    assert "its summary is of step 40, before it was continued" in page.words


def test_a_run_that_has_just_begun_says_what_is_missing(make):
    page = page_of(make(lines=[], summary=False, memory=False))
    assert "not ended: there is no line of metrics yet" in page.words
    assert "no line of metrics has been written" in page.section("curves")
    assert "No memory.json was read" in page.section("memory")
    assert "No rate has been written" in page.section("throughput")
    assert not page.charts


def test_lines_that_only_tell_the_time_make_a_page_without_curves(make):
    line = {"step": 10, "epoch": 1.25, "seconds": 2.0}
    page = page_of(make(lines=[line], summary=False, memory=False))
    assert "not ended: at step 10 of 40" in page.words
    assert not page.charts


def test_scores_without_lines_are_the_summary_s(make):
    page = page_of(make(lines=[]))
    assert [e.inside for e in page.all("dd")][:2] == ["0.625", "70.00%"]


def test_damaged_files_are_named_and_the_rest_is_shown(make):
    lines = [LINES[0], "12", "null", "{}", '{"step": "x"}', "[" * 10**5, LINES[1]]
    files = {
        "summary.json": b"{",
        "memory.json": b'{"parameters": "many"}',
        "examples.png": b"GIF89a",
        "evaluation.json": b"\xff\xfe",
        "bad_steps.jsonl": b'{"step": 3}\n',
    }
    page = page_of(make(lines=lines, files=files))
    notes = [e.inside for e in page.all("li")]
    for name in (*files, "metrics.jsonl"):
        assert any(note.startswith(name) for note in notes), (name, notes)
    page = page_of(make("b", files={"metrics.jsonl": b"\xff\xfe\x00"}))
    assert "metrics.jsonl: 1 line is cut off or without a step" in page.words
    assert "stage0/conv" in page.section("memory")


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_damaged_there_is_a_page_or_one_line(make, seed):
    generator = np.random.default_rng(seed)
    folder = make()
    names = ("config", "metrics", "summary", "memory")
    path = getattr(folder, names[seed % len(names)])
    content = bytearray(path.read_bytes())
    if seed % 3 == 0:
        del content[generator.integers(len(content)) :]
    elif seed % 3 == 1:
        for at in generator.integers(len(content), size=5):
            content[at] = generator.integers(256)
    else:
        text = content.decode()
        places = list(re.finditer(r"(?<=: )[^,\[\]{}\s]+", text))
        for at in sorted(generator.integers(len(places), size=3).tolist(), reverse=True):
            wrong = ("NaN", "1e400", "-1e308", "null", "[]", '"x"', "0", "-1", "1e-320", "9" * 30)
            value = wrong[generator.integers(len(wrong))]
            text = text[: places[at].start()] + value + text[places[at].end() :]
        content = text.encode()
    path.write_bytes(content)
    try:
        page = page_of(folder)
    except UserError:
        assert path == folder.config
        return
    assert page.all("section", id="config")


def test_values_that_are_not_finite_are_left_out_and_counted(make):
    lines = [*LINES, line(50, train_loss=math.nan), line(60, train_loss=math.inf, note="x", t=True)]
    page = page_of(make(lines=lines))
    assert "not finite are left out: 2 of train/loss" in page.section("curves")
    assert len(page.charts[0].words[0]) == 4


def test_metrics_that_never_change_are_said_not_drawn(make):
    lines = [x | {"train/nonfinite": 2.0, "train/learning_rate": 0.001} for x in LINES]
    page = page_of(make(lines=lines))
    said = "The same wherever it was logged: learning rate 0.001; gradients not finite, a step 2."
    assert said in page.section("curves")
    assert [len(chart.words) for chart in page.charts][:2] == [2, 2]
    assert not any("learning rate" in chart.figure.inside[:20] for chart in page.charts)


def test_steps_that_were_left_out_are_listed(make):
    names = [f"{i}.png" for i in range(20)]
    bad = {"step": 7, "loss": "nan", "grad_norm": "inf", "origin": "conv: log of 0"}
    file = json.dumps(bad | {"examples": names}).encode() + b"\n"
    page = page_of(make(files={"bad_steps.jsonl": file}))
    assert "7naninfconv: log of 00.png, 1.png" in page.section("examples")
    assert "and 12 more" in page.section("examples")
    assert "steps left out" in page.words


def test_a_language_model_is_told_in_nats_and_perplexity(make):
    config = Config(data=TextFile(path="x.txt"), model=LanguageModel(), train=Train(steps=40))
    lines = [line(10, train_loss=3.0), line(40, train_loss=2.0, test_loss=math.log(9))]
    page = page_of(make(config=config, lines=lines))
    assert "perplexity 9" in page.words
    assert "loss, nats a token" in page.section("curves")
    assert "classifies nothing" in page.section("examples")


def test_a_private_run_says_what_it_spent(make):
    config = Config(grad=Clipped(epsilon=3.0, delta=1e-5), train=Train(steps=40))
    lines = [x | {"privacy/epsilon": x["step"] / 20} for x in LINES]
    page = page_of(make(config=config, lines=lines))
    assert "privacy, epsilon2at delta 1e-05" in page.words
    assert "epsilon spent" in page.section("curves")


def test_the_noise_scale_is_drawn_averaged_as_well(make):
    measured = {"train/grad_sq": 0.5, "train/grad_var": 100.0, "train/noise_scale": 200.0}
    lines = [x | measured | {"train/noise_scale": x["step"]} for x in LINES]
    (scale,) = [
        chart for chart in page_of(make(lines=lines)).charts if "noise scale" in chart.figure.inside
    ]
    assert scale.words == [["10", "20", "30", "40"], ["200", "200", "200", "200"]]


def test_classes_are_listed_from_the_lowest(make):
    classes = [
        {"name": "road", "pixels": 100, "iou": 0.9},
        {"name": "tram", "pixels": 0, "iou": None},
        {"name": "sky", "pixels": 50, "iou": 0.25},
    ]
    content = {"step": 40, "options": {}, "metrics": {"test/mean_iou": 0.5}, "classes": classes}
    page = page_of(make(files={"evaluation.json": json.dumps(content).encode()}))
    assert "fnet eval after step 40: mean IoU 50.00%." in page.section("examples")
    assert "sky5025.00%road10090.00%" in page.section("examples")


def test_amounts_of_a_class_are_told_where_they_are_those_of_all_runs(make):
    def run(name, pixels):
        classes = [{"name": "sky", "pixels": pixels, "iou": 0.25}]
        content = {"step": 40, "options": {}, "metrics": {}, "classes": classes}
        return make(name, files={"evaluation.json": json.dumps(content).encode()})

    assert "sky5025.00%25.00%" in page_of(run("a", 50), run("b", 50)).section("examples")
    differing = page_of(run("c", 50), run("d", 70)).section("examples")
    assert "sky25.00%25.00%" in differing
    assert "amount" not in differing


def test_only_fields_that_differ_are_compared():
    a = Config(optim=Optim(learning_rate=0.1), model=Mlp(hidden=(8,)))
    b = dataclasses.replace(a, optim=Optim(learning_rate=0.2))
    c = dataclasses.replace(a, data=ImageFolder(path="photos"))
    different, same = differences([a, b])
    assert different == {"optim.learning_rate": [0.1, 0.2]}
    assert same["model.hidden"] == (8,)
    different, _ = differences([a, c])
    assert different["data.path"] == [ABSENT, "photos"]
    assert different["data.source"] == ["digits", "image_folder"]
    assert differences([a, a])[0] == {}


def test_runs_stand_side_by_side_and_over_each_other(make):
    better = [x | {"test/accuracy": 0.95} if "test/accuracy" in x else x for x in LINES]
    config = Config(optim=Optim(learning_rate=0.25), train=Train(steps=40, log_every=10))
    page = page_of(make("a"), make("b", config=config, lines=better))
    assert len(page.charts[0].words) == 4  # training and test of both
    assert [e.attributes["id"] for e in page.all("input")] == ["show0", "show1"]
    assert "body:has(#show1:not(:checked)) .run1" in page.all("style")[0].inside
    best = [e.inside for e in page.all("span", **{"class": "best"})]
    assert best == ["0.625", "0.625", "95.00%"]
    assert "optim.learning_rate0.10.25" in page.section("config")
    # One step, compiled alike, is shown once.
    assert page.section("memory").count("stage0/conv2") == 1


def test_losses_of_other_tasks_are_not_ranked(make):
    text = Config(data=TextFile(path="x"), model=LanguageModel(), train=Train(steps=40))
    page = page_of(make("a"), make("b", config=text))
    assert not page.all("span", **{"class": "best"})


@pytest.mark.parametrize(
    ("first", "other", "ranked"),
    [
        (ImageFolder(path="a"), ImageFolder(path="a", batch_size=8), True),
        (ImageFolder(path="a"), ImageFolder(path="b"), False),
        (HuggingFace(path="a", subset="x"), HuggingFace(path="a", subset="y"), False),
    ],
)
def test_losses_on_other_data_are_not_ranked(first, other, ranked, make):
    folders = [
        make(name, config=Config(data=data, train=Train(steps=40)))
        for name, data in (("a", first), ("b", other))
    ]
    page = page_of(*folders)
    assert bool(page.all("span", **{"class": "best"})) == ranked
    assert ("the best is bold" in page.words) == ranked


def test_runs_with_batches_of_other_sizes_are_compared_by_epoch(make):
    config = Config(data=Digits(batch_size=32), train=Train(steps=40))
    page = page_of(make("a"), make("b", config=config))
    assert "Along epochs" in page.section("curves")
    assert page.charts[0].where[0] == ["1.25", "2.5", "3.75", "5"]


def test_labels_are_folders_names_unless_two_have_the_same(make):
    a, b = make("x/run"), make("y/run")
    assert [run.label for run in read_runs([a, make("z")])] == ["run", "z"]
    assert [run.label for run in read_runs([a, b])] == [str(a.path), str(b.path)]


def test_many_runs_stay_apart_and_below_a_few_megabytes(make):
    lines = [line(i, **{f"train_m{j}": math.sin(i + j) for j in range(12)}) for i in range(1, 400)]
    folders = [make(f"r{i}", lines=lines) for i in range(20)]
    text = as_html(read_runs(folders), NOW)
    assert len(text) < 4e6
    curves = [e.attributes.get("data-points", "") for e in Page(text).all("path")]
    styles = {words.rsplit(" ", 1)[0] for words in curves if "run" in words}
    assert len(styles) == 20
