"""Texts with a class each, classified by a published language model."""

import csv
import json
import types

import numpy as np
import pytest
from data_cases import error_message
from program_cases import assert_one_line_error, exit_code, fnet_command, metrics_of

from tests.pretrained_folder import write_folder
from train.config import ChatFile, recipes
from train.data.chat_file import load
from train.run.predictions import outputs_of_texts
from train.run.setup import setup

TEXTS = [{"text": f"{n} and {n}" if n % 2 else f"no {n}", "label": n % 2} for n in range(80)]


def test_rows_are_whole_texts_with_the_number_of_their_class(write):
    spaced = [{"text": r["text"], "kind": ["ten", "two"][r["label"]]} for r in TEXTS]
    names = [row | {"kind": f" {row['kind']}"} if i % 3 else row for i, row in enumerate(spaced)]
    data = load(ChatFile(path=write(names), label="kind", context=16))
    assert data.classes == ("ten", "two")
    batch = data.prepare({name: a[:3] for name, a in data.test.items()})
    assert set(batch) == {"tokens", "length", "label", "weight"}
    np.testing.assert_array_equal(batch["weight"], 1)
    for tokens, length, label in zip(batch["tokens"], batch["length"], batch["label"], strict=True):
        text = bytes(tokens[: length + 1].tolist()).decode()  # without an end token
        assert {"text": text, "label": label} in TEXTS
    numbers = [{"text": "a", "label": n} for n in (2, 10)] * 20
    assert load(ChatFile(path=write(numbers), label="label")).classes == ("2", "10")
    alike = [{"text": "a", "label": n} for n in ("two", "Two")] * 20
    notes = load(ChatFile(path=write(alike), label="label")).notes
    assert "Two and two are two classes, which differ in case, space or zeros" in notes


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"text": "a"}, "line 81: no field label"),
        ({"text": "a", "label": 0.5}, "line 81: label must be a text or an integer, got 0.5"),
        ({"text": "a", "label": "NA"}, "line 81: label is 'NA', which stands for none"),
        ({"text": "a", "label": " "}, "line 81: label is ' ', which stands for none"),
        ({"text": "a", "label": True}, "line 81: label must be a text or an integer, got True"),
        ({"text": "a", "label": "x"}, "line 81: no training example has the class x"),
    ],
)
def test_a_bad_label_is_named(write, last, message):
    path = write([*TEXTS, last])
    assert message in error_message(load, ChatFile(path=path, label="label", context=16))


def test_a_single_class_is_refused(write):
    path = write([{"text": str(n), "label": "a"} for n in range(20)])
    assert "all training examples have the class a" in error_message(
        load, ChatFile(path=path, label="label")
    )


def command(path, *words):
    options = "--model.path", "llama", "--data.path", path, "--data.label", "label"
    options += "--data.vocabulary", 256, "--data.context", 32, "--train.precision", "float32"
    return "train", "finetune_full", *options, *words


def test_options_that_a_classified_text_has_not_are_refused(workplace, write, capsys):
    write_folder(workplace / "llama")
    words = command(write(TEXTS))
    for options, message in (
        (["--data.packing"], "data.packing: True, but with data.label a row is an example"),
        (["--data.no-packing", "--data.long", "cut"], "data.long: cut, but with data.label a row"),
        (["--data.no-packing", "--data.loss-on", "all"], "data.loss_on: all, but with data.label"),
    ):
        assert exit_code(*words, *options) == 2
        assert_one_line_error(capsys, message)
    options = "--data.source", "chat_file", "--data.path", write(TEXTS), "--data.label", "label"
    assert exit_code("train", "text_transformer", *options) == 2
    assert_one_line_error(capsys, "data.label: label, but texts are classified by published")


def check_predictions(run, write):
    """A text without a label gets the prediction that it has in evaluation.csv."""
    with (run / "evaluation.csv").open(newline="") as file:
        expected = {row["file"]: row for row in csv.DictReader(file)}
    path = write([{"text": r["text"]} for r in TEXTS], "new.jsonl")
    fnet_command("predict", str(run), path, "--csv", "--top-k", 1)
    predictions = json.loads((run / "predictions" / "predictions.json").read_text())["predictions"]
    assert len(predictions) == len(TEXTS)
    found = {p["text"].rpartition(", ")[2]: p["labels"][0] for p in predictions}
    for place, row in expected.items():
        label = found[place.rpartition(", ")[2]]
        assert label["label"] == row["prediction"]
        assert label["probability"] == pytest.approx(float(row["probability"]), abs=1e-5)
    table = (run / "predictions" / "predictions.csv").read_text().splitlines()
    assert table[0].startswith("text,index,prediction,probability")
    assert len(table) == 1 + len(TEXTS)


def test_a_classifier_trains_and_transformers_reads_its_logits(workplace, write, capsys):
    write_folder(workplace / "llama")
    words = "--optim.schedule", "constant", "--optim.learning-rate", 0.01, "--optim.warmup-steps", 0
    words += "--data.batch-size", 16, "--grad.microbatches", 1, "--train.steps", 12, "--out", "r"
    fnet_command(*command(write(TEXTS)), "--data.no-packing", *words)
    last = metrics_of(workplace / "r")[-1]
    assert last["test/accuracy"] > 0.9
    assert exit_code("sample", "r", "--prompt", "no") == 2
    assert_one_line_error(capsys, "which generates nothing")
    fnet_command("eval", "r")
    evaluation = json.loads((workplace / "r" / "evaluation.json").read_text())
    assert "perplexity" not in evaluation["metrics"]  # its loss is not of tokens
    check_predictions(workplace / "r", write)
    fnet_command("export", "r", "--out", "out")
    config = json.loads((workplace / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "0", "1": "1"}
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    peer = transformers.AutoModelForSequenceClassification.from_pretrained(
        workplace / "out", pad_token_id=0
    )
    run = setup(recipes.load(str(workplace / "r" / "config.json")))
    batch = run.task.dataset.prepare(run.task.dataset.test)
    tokens = [t[: n + 1].tolist() for t, n in zip(batch["tokens"], batch["length"], strict=True)]
    padded = [[*t, *[0] * (33 - len(t))] for t in tokens]  # no text has a byte 0
    with torch.no_grad():
        logits = peer(torch.tensor(padded), attention_mask=torch.tensor(padded) != 0).logits.numpy()
    assert (logits.argmax(1) == batch["label"]).mean() == pytest.approx(last["test/accuracy"])
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), batch["label"]]
    assert losses.mean() == pytest.approx(last["test/loss"], rel=1e-4)


def test_each_text_has_its_own_output(write):
    data = ChatFile(label="label", context=16, batch_size=3)
    opened = types.SimpleNamespace(
        config=types.SimpleNamespace(data=data, model=types.SimpleNamespace(complete=lambda d: d)),
        network=lambda best: (None, ({}, {}, 7)),
        kind=types.SimpleNamespace(outputs=lambda *_: lambda params, state, b: b["tokens"]),
    )
    step, outputs = outputs_of_texts(opened, [write(TEXTS[:8])], best=False)
    read = [bytes(row.tolist()).decode().rstrip("\0") for _, row in outputs]
    assert (step, read) == (7, [r["text"] for r in TEXTS[:8]])
