"""`fnet report`: the facts that the page shows, of runs complete or not."""

import base64
import dataclasses
import json
import math
import re

import pytest
import report_cases
from program_cases import fnet_command
from report_cases import LINES, MEMORY, Page, line, page_of, written

from train.config import (
    Clipped,
    Config,
    Denoiser,
    Digits,
    HuggingFace,
    ImageFolder,
    LanguageModel,
    Mlp,
    Optim,
    Pretrained,
    TextFile,
    Train,
)
from train.report.runs import read_runs
from train.report.sections import differences
from train.run.run_folder import RunFolder

make = pytest.fixture(report_cases.make)


def test_a_trained_run_is_shown_whole(finished_run):
    folder = RunFolder(finished_run)
    assert written(folder) == finished_run / "report.html"
    (run,) = read_runs([folder])
    assert not run.notes
    assert run.finished
    page = Page((finished_run / "report.html").read_text())
    summary = json.loads(folder.summary.read_text())
    assert page.facts["test accuracy"].startswith(f"{summary['metrics']['test/accuracy']:.2%}")
    assert "Finished after 8 steps." in page.words
    assert run.memory.residuals
    for residual in run.memory.residuals:
        assert residual.layer in page.section("memory")
    assert page.facts["jaxlib"] == summary["versions"]["jaxlib"]
    pictures = [
        base64.b64decode(image.attributes["src"].removeprefix("data:image/png;base64,"))
        for image in page.all("img")
    ]
    assert pictures == [folder.examples.read_bytes(), folder.confusion.read_bytes()]
    assert {chart.title for chart in page.charts} >= {"loss", "accuracy", "live bytes"}


def test_figures_are_those_of_the_files(make):
    page = page_of(make())
    assert page.facts["test loss"] == "0.625best 0.5 at step 20"
    assert page.facts["test accuracy"] == "70.00%best 75.00% at step 20"
    assert page.facts["train loss"] == "0.1"
    # 40 steps of 64 examples at 640 a second. Half of the first and the last 10 steps waited.
    assert page.facts["training time"] == "4.0 s"
    assert page.facts["time per step"] == "100 ms"
    assert page.facts["input wait"] == "25.00%"
    assert page.facts["predicted peak"] == "3.00 MiB"
    assert page.facts["measured peak"] == "5.00 MiB"
    assert page.facts["temporaries"] == "1.00 MiB"
    assert page.rows["stage0/conv"][:3] == ["backward", "float32[64,1024]", "256.00 KiB"]
    assert page.rows["head"][:2] == ["1", "256.00 KiB"]


def test_says_why_the_device_waits_and_how_much_quantization_changes(make):
    errors = {"blocks/0/kernel": 0.01, "blocks/1/kernel": 0.03, "head": 0.02}
    summary = {"input_wait_reason": "too few workers", "quantization_errors": errors}
    page = page_of(make(summary=summary))
    assert page.facts["why it waits"] == "too few workers"
    assert page.facts["quantized weights"] == (
        "relative error 2.00% (median), 3.00% at most, in blocks/1/kernel"
    )


def test_curves_are_described_by_their_ends_and_last_values(make):
    page = page_of(make())
    loss, accuracy, *_ = page.charts
    assert loss.lines == [
        "train loss: from 2 at step 10 to 0.1 at step 40.",
        "test loss: from 0.5 at step 20 to 0.625 at step 40.",
    ]
    assert loss.caption == "loss at step 40, log scale train 0.1 test 0.625"
    assert accuracy.caption == "accuracy at step 40 train 90.00% test 70.00%"
    live = page.charts[-1]
    assert live.caption == (
        "live bytes over the schedule, peak at instruction 2 of 4 peak 2.00 MiB "
        "assigned by XLA 2.00 MiB"
    )


def test_an_unfinished_run_says_how_far_it_came(make):
    lines = [*LINES[:2], '{"step": 30, "train/lo']
    folder = make(lines=lines, summary=False, files={".lock": b"host, process 7\n"})
    (folder.checkpoints / "15").mkdir(parents=True)
    page = page_of(folder, now=folder.metrics.stat().st_mtime + 90)
    for words in (
        "Not finished: step 20 of 40 (50%).",
        "Last logged 1 min 30 s before this page was written.",
        "About 2.0 s of training left.",
        "In use by host, process 7, unless that process was killed.",
        "Newest checkpoint: step 15.",
        "metrics.jsonl: ignored 1 incomplete line.",
        "There are no examples yet.",
        "Versions are not known yet.",
    ):
        assert words in page.words, words
    assert page.charts[0].lines[0] == "train loss: from 2 at step 10 to 1 at step 20."


def test_the_length_of_a_run_of_epochs_follows_from_its_lines(make):
    # `digits` has 22.453125 steps per epoch: 135 steps, which rounding errors would make 136.
    config = Config(train=Train(epochs=6))
    lines = [{"step": n, "epoch": n / 22.453125, "train/loss": 1.0} for n in (50, 75)]
    (run,) = read_runs([make(config=config, lines=lines, summary=False)])
    assert run.total_steps == 135
    lines = [{"step": n, "epoch": n / 7, "train/loss": 1.0} for n in range(1, 43)]
    for i in range(1, 43):
        (run,) = read_runs([make(f"r{i}", config=config, lines=lines[:i], summary=False)])
        assert run.total_steps == 42


def test_a_resumed_run_is_not_finished_by_its_old_summary(make):
    config = Config(train=Train(steps=80))
    page = page_of(make(config=config, lines=[*LINES, line(50, train_loss=0.1)]))
    assert "Not finished: step 50 of 80" in page.words
    assert "Its summary is of step 40, before it was resumed." in page.words


def test_a_run_that_has_just_begun_says_what_is_missing(make):
    page = page_of(make(lines=[], summary=False, memory=False))
    assert "Not finished: no metrics are logged yet." in page.words
    assert "No metrics are logged yet." in page.section("curves")
    assert "There is no memory.json." in page.section("memory")
    assert "No throughput is logged yet." in page.section("throughput")
    assert not page.charts


def test_a_step_without_residuals_and_timeline_has_a_memory_section(make):
    page = page_of(make(memory={"residuals": [], "largest_at_peak": [], "live_bytes": None}))
    assert "saved for the backward pass, in forward order: 0 bytes" in page.section("memory")
    assert "does not report when buffers are live" in page.section("memory")


def test_memory_of_an_older_version_is_named_and_the_rest_is_shown(make):
    older = {name: value for name, value in MEMORY.items() if name != "residuals"}
    page = page_of(make(files={"memory.json": older | {"kept": []}}))
    assert "memory.json cannot be read: residuals: Field required." in page.words
    assert page.facts["predicted peak"] == "3.00 MiB"


def test_lines_without_metrics_make_a_page_without_curves(make):
    line = {"step": 10, "epoch": 1.25, "seconds": 2.0}
    page = page_of(make(lines=[line], summary=False, memory=False))
    assert "Not finished: step 10 of 40" in page.words
    assert not page.charts


def test_without_lines_scores_come_from_the_summary(make):
    facts = page_of(make(lines=[])).facts
    assert (facts["test loss"], facts["test accuracy"]) == ("0.625", "70.00%")


def test_a_steps_run_without_a_summary_is_done_but_not_finished(make):
    page = page_of(make(summary=False))
    assert "All 40 steps are done, but there is no summary.json." in page.words


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
    notes = [e.inside for e in page.all("p", **{"class": "unfinished"})]
    for name in (*files, "metrics.jsonl"):
        assert any(note.startswith(name) for note in notes), (name, notes)
    page = page_of(make("b", files={"metrics.jsonl": b"\xff\xfe\x00"}))
    assert "metrics.jsonl: ignored 1 incomplete line." in page.words
    assert "stage0/conv" in page.section("memory")


def test_values_that_are_not_finite_are_left_out_and_counted(make):
    lines = [*LINES, line(50, train_loss=math.nan), line(60, train_loss=math.inf, note="x", t=True)]
    page = page_of(make(lines=lines))
    assert "train/loss has 2 values that are not finite." in page.section("curves")
    assert page.charts[0].lines[0] == "train loss: from 2 at step 10 to 0.1 at step 40."


def test_constant_metrics_are_listed_not_drawn(make):
    lines = [x | {"train/nonfinite": 2.0, "train/learning_rate": 0.001} for x in LINES]
    page = page_of(make(lines=lines))
    assert "Constant: learning rate 0.001." in page.section("curves")
    assert "Constant: non-finite gradients per step 2." in page.section("curves")
    assert "learning rate" not in {chart.title for chart in page.charts}


def test_skipped_steps_are_listed(make):
    names = [f"{i}.png" for i in range(20)]
    bad = {"step": 7, "loss": "nan", "grad_norm": "inf", "origin": "conv: log of 0"}
    file = json.dumps(bad | {"examples": names}).encode() + b"\n"
    page = page_of(make(files={"bad_steps.jsonl": file}))
    assert page.facts["skipped steps"] == "1"
    _, loss, norm, origin, examples = page.all("tr")[-1].cells
    assert (loss, norm, origin) == ("nan", "inf", "conv: log of 0")
    assert examples.startswith("0.png, 1.png")
    assert examples.endswith("7.png and 12 more")
    assert "step 7" in page.section("examples")


@pytest.mark.parametrize("model", [LanguageModel(), Pretrained(path="llama")])
def test_a_language_model_has_perplexity_and_no_examples(make, model):
    config = Config(data=TextFile(path="x.txt"), model=model, train=Train(steps=40))
    lines = [line(10, train_loss=3.0), line(40, train_loss=2.0, test_loss=math.log(9))]
    page = page_of(make(config=config, lines=lines))
    assert "perplexity 9" in page.words
    assert page.charts[0].title == "loss (nats per token)"
    assert "examples" not in [e.attributes.get("id") for e in page.all("section")]
    assert "Examples" not in page.all("nav")[0].inside
    evaluation = {"step": 40, "metrics": {"test/loss": 2.5}, "options": {}}
    folder = make("evaluated", config=config, files={"evaluation.json": evaluation})
    assert "fnet eval at step 40: loss 2.5" in page_of(folder).section("evaluation")


def test_a_diffusion_run_without_samples_says_how_to_draw_them(make):
    page = page_of(make(config=Config(model=Denoiser(), train=Train(steps=40))))
    assert "There is no samples.png. Use fnet sample to draw it." in page.section("examples")


def test_a_private_page_elsewhere_is_announced(make, capsys, tmp_path):
    config = Config(grad=Clipped(epsilon=3.0, delta=1e-5), train=Train(steps=40))
    path = make("private", config=config).path
    for words, is_elsewhere in (((), False), (("--out", tmp_path / "o.html"), True)):
        fnet_command("report", path, *words)
        assert ("do not publish it" in capsys.readouterr().out) == is_elsewhere


def test_a_private_run_shows_its_epsilon(make):
    config = Config(grad=Clipped(epsilon=3.0, delta=1e-5), train=Train(steps=40))
    lines = [x | {"privacy/epsilon": x["step"] / 20} for x in LINES]
    page = page_of(make(config=config, lines=lines))
    assert page.facts["epsilon"] == "2at delta 1e-05"
    assert "epsilon: from 0.5 at step 10 to 2 at step 40." in page.raw


def test_curves_of_training_examples_of_a_private_run_are_marked(make):
    config = Config(grad=Clipped(epsilon=3.0, delta=1e-5), train=Train(steps=40))
    lines = [
        {name.replace("train/loss", "not_private/loss"): v for name, v in x.items()}
        | {"not_private/norm_max": 2.0 * x["step"]}
        for x in LINES
    ]
    page = page_of(make(config=config, lines=lines))
    assert "not private" in page.facts["train loss"]
    by_title = {c.title: c.lines for c in page.charts}
    assert any(text.startswith("train, not private loss: from") for text in by_title["loss"])
    (norm,) = by_title["largest per-example norm"]
    assert norm.startswith("train, not private largest per-example norm: from 20 at step 10")


def test_the_noise_scale_is_drawn_averaged_as_well(make):
    measured = {"train/grad_sq": 0.5, "train/grad_var": 100.0, "train/noise_scale": 200.0}
    lines = [x | measured | {"train/noise_scale": x["step"]} for x in LINES]
    (scale,) = [c for c in page_of(make(lines=lines)).charts if c.title == "gradient noise scale"]
    assert scale.lines == [
        "train gradient noise scale: from 10 at step 10 to 40 at step 40.",
        "averaged gradient noise scale: from 200 at step 10 to 200 at step 40.",
    ]


def test_classes_are_listed_from_the_lowest(make):
    classes = [
        {"name": "road", "pixels": 100, "iou": 0.9},
        {"name": "tram", "pixels": 0, "iou": None},
        {"name": "sky", "pixels": 50, "iou": 0.25},
    ]
    content = {"step": 40, "options": {}, "metrics": {"test/mean_iou": 0.5}, "classes": classes}
    page = page_of(make(files={"evaluation.json": content}))
    assert "fnet eval at step 40: mean IoU 50.00%." in page.section("examples")
    assert [row.cells for row in page.all("tr")[-2:]] == [
        ["sky", "25.00%50 pixels"],
        ["road", "90.00%100 pixels"],
    ]


def test_fields_that_differ_are_compared(make):
    a = Config(optim=Optim(learning_rate=0.1), model=Mlp(hidden=(8,)))
    b = dataclasses.replace(a, optim=Optim(learning_rate=0.2))
    c = dataclasses.replace(a, data=ImageFolder(path="photos"))
    runs = read_runs([make(name, config=x) for name, x in {"a": a, "b": b, "c": c, "d": a}.items()])
    different, equal = differences(runs[:2])
    assert different == [{"optim.learning_rate": "0.1"}, {"optim.learning_rate": "0.2"}]
    assert equal["model.hidden"] == "8"
    different, _ = differences([runs[0], runs[2]])
    assert [fields["data.path"] for fields in different] == ["-", "photos"]
    assert [fields["data.source"] for fields in different] == ["digits", "image_folder"]
    assert differences([runs[0], runs[3]])[0] == [{}, {}]


def test_one_config_is_compared_with_its_defaults(make):
    config = Config(optim=Optim(learning_rate=0.5), model=Mlp(hidden=(8,)))
    ((different,), equal) = differences(read_runs([make(config=config)]))
    assert different["optim.learning_rate"] == "0.5"
    assert equal["data.source"] == "digits"
    assert "optim.learning_rate" not in equal


def test_several_runs_share_charts_and_tables(make):
    better = [x | {"test/accuracy": 0.95} if "test/accuracy" in x else x for x in LINES]
    config = Config(optim=Optim(learning_rate=0.25), train=Train(steps=40, log_every=10))
    page = page_of(make("a"), make("b", config=config, lines=better))
    loss, accuracy, *_ = page.charts
    assert [text.split(":")[0] for text in loss.lines] == [
        "a train loss", "a test loss", "b train loss", "b test loss",
    ]  # fmt: skip
    assert accuracy.caption.endswith("a 90.00% / 70.00% b 90.00% / 95.00%")
    assert [e.attributes["id"] for e in page.all("input")] == ["show0", "show1"]
    assert "body:has(#show1:not(:checked)) .chart .run1" in page.all("style")[0].inside
    assert page.all("g", **{"class": "run1"})
    assert best_scores(page) == ["0.625", "0.625", "95.00%"]
    assert page.rows["optim.learning_rate"] == ["0.1", "0.25"]
    # The runs have the same compiled step, which is shown once.
    assert page.section("memory").count("stage0/conv2") == 1
    assert "Compiled train step of a, b" in page.section("memory")


def best_scores(page):
    return [e.inside for e in page.all("strong") if re.fullmatch(r"[\d.]+%?", e.inside)]


def test_losses_of_different_tasks_are_not_ranked(make):
    text = Config(data=TextFile(path="x"), model=LanguageModel(), train=Train(steps=40))
    assert not best_scores(page_of(make("a"), make("b", config=text)))


@pytest.mark.parametrize(
    ("first", "other", "ranked"),
    [
        (ImageFolder(path="a"), ImageFolder(path="a", batch_size=8), True),
        (ImageFolder(path="a"), ImageFolder(path="b"), False),
        (HuggingFace(path="a", subset="x"), HuggingFace(path="a", subset="y"), False),
    ],
)
def test_losses_on_different_data_are_not_ranked(first, other, ranked, make):
    folders = [
        make(name, config=Config(data=data, train=Train(steps=40)))
        for name, data in (("a", first), ("b", other))
    ]
    page = page_of(*folders)
    assert bool(best_scores(page)) == ranked
    assert ("the best test scores in bold" in page.words) == ranked


def test_runs_with_different_batch_sizes_are_compared_by_epoch(make):
    config = Config(data=Digits(batch_size=32), train=Train(steps=40))
    page = page_of(make("a"), make("b", config=config))
    assert "Charts show epochs" in page.section("curves")
    assert page.charts[0].lines[0] == "a train loss: from 2 at epoch 1.25 to 0.1 at epoch 5."


def test_labels_are_folder_names_unless_two_are_the_same(make):
    a, b = make("x/run"), make("y/run")
    assert [run.label for run in read_runs([a, make("z")])] == ["run", "z"]
    assert [run.label for run in read_runs([a, b])] == [str(a.path), str(b.path)]


def test_many_runs_have_different_lines(make):
    page = page_of(*(make(f"r{i}", lines=LINES[:2]) for i in range(20)))
    keys = {e.attributes["class"].split(maxsplit=1)[1] for e in page.all("i")}
    styles = {key.split(maxsplit=1)[1] for key in keys if key.startswith("run")}
    assert len(styles) == 20


def test_lists_the_surest_mistakes_first(make):
    rows = ["file,split,label,prediction,probability,loss"]
    rows += [
        "right.png,test,a,a,0.9,0.1",
        "sure.png,test,007,a,0.98765432,4.6",
        "unsure.png,test,a,b,0.6,0.9",
    ]
    page = page_of(make(files={"evaluation.csv": "\n".join(rows).encode()}))
    text = page.section("examples")
    places = [text.index(name) for name in ("sure.png", "unsure.png", "right.png")]
    assert places == sorted(places)
    assert "label 007" in text
    assert "probability 0.9877" in text
