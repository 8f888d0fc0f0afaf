"""Training on text: resumed runs, rows of many lengths, and mistakes."""

import json

import chex
import jax
import numpy as np
import pytest
from program_cases import assert_one_line_error, exit_code, fnet_command

import fnet
from train.config import LanguageModel, recipes
from train.run import planning
from train.run.checkpoints import Checkpoints, checksums
from train.run.setup import setup
from train.tasks import language

TEXT = """
from train.config import Checkpoint, Config, LanguageModel, Optim, TextFile, Train

def config():
    return Config(
        name="text",
        data=TextFile(path="text.txt", context=32, batch_size=4),
        model=LanguageModel(mixers=("attention", "rg_lru"), blocks=2, width=16, hidden=16, heads=2,
                            attention_context="lagged"),
        optim=Optim(name="adamw", learning_rate=0.01, schedule="constant"),
        train=Train(steps=6, log_every=3, eval_every=3),
        checkpoint=Checkpoint(every=3),
    )
"""


@pytest.fixture
def text_folder(workplace):
    (workplace / "text.py").write_text(TEXT)
    words = [f"{w} says {n}. " * (n % 7 + 1) for n, w in enumerate(["a", "the one", "no"] * 30)]
    (workplace / "text.txt").write_text("|".join(words))
    return workplace


def network(folder):
    model = language.build_network(recipes.load(str(folder)))
    with Checkpoints(folder / "checkpoints", 2) as checkpoints:
        return jax.device_get(checkpoints.restore_network(model.init)[:2])


OPTIMIZERS = {
    "compact_adamw": ("--train.params-dtype", "bfloat16", "--train.precision", "bfloat16"),
    "schedule_free_adamw": (),
    "muon": (),
    "galore": ("--optim.galore-rank", 4, "--optim.galore-every", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumes_with_the_same_bits(text_folder, name):
    words = "train", "text.py", "--optim.name", name, *OPTIMIZERS[name]
    fnet_command(*words, "--out", "whole")
    fnet_command(*words, "--out", "parts", "--train.steps", 3)
    fnet_command(*words, "--out", "parts", "--resume")

    def state(folder):
        with Checkpoints(text_folder / folder / "checkpoints", 2) as checkpoints:
            return checkpoints.restore(setup(recipes.load(str(text_folder / folder))).state_shapes)

    whole, parts = state("whole"), state("parts")
    assert whole.step == parts.step == 6
    assert checksums(whole.state) == checksums(parts.state)
    evaluated = network(text_folder / "whole")[0]
    if name == "schedule_free_adamw":  # evaluation reads the average
        average = fnet.optim.schedule_free_params(whole.state.opt_state, whole.state.params)
        chex.assert_trees_all_close(evaluated, average, rtol=1e-6, atol=1e-7)
        kernel = evaluated["embedding"]["embedding"]
        assert not np.array_equal(kernel, whole.state.params["embedding"]["embedding"])
    else:
        jax.tree.map(np.testing.assert_array_equal, evaluated, whole.state.params)


@pytest.mark.slow
def test_rows_of_many_lengths_need_few_programs(text_folder, monkeypatch):
    steps = []

    class Watched(planning.StepCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            steps.append(self)

    monkeypatch.setattr(planning, "StepCache", Watched)
    words = "--data.separator", "|", "--data.context", 64
    steps_taken = "--train.steps", 12, "--train.eval-every", 12
    fnet_command("train", "text.py", "--out", "rows", *words, *steps_taken)
    _, *lines = [json.loads(line) for line in (text_folder / "rows" / "metrics.jsonl").open()]
    assert lines[-1]["test/loss"] < lines[0]["train/loss"] < np.log(256) + 1
    assert 2 <= len(steps[0].executables) <= 3  # 16, 32 and 64 tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data.source", "digits"), "data.source: digits has no text"),
        (
            ("--model.name", "mlp"),
            "data.source: text_file has no images, which the network mlp needs",
        ),
        (("--data.path", "none.txt"), "data.path: none.txt does not exist"),
        (("--data.path", "text.py", "--data.context", 9999), "data.path: text.py is too short: "),
        (("--model.heads", 3), "model: attention: heads must divide width"),
        (("--model.window", 0), "model.window"),
        (("--model.mixers", "attention", "mamba3"), "--model.mixers: expected"),
        (("--data.tokenizer", "none.json"), "data.tokenizer: no file none.json"),
    ],
)
def test_a_mistake_is_one_line(text_folder, capsys, words, message):
    if words[0] == "--data.tokenizer":
        pytest.importorskip("tokenizers")
    assert exit_code("train", "text.py", *words) == 2
    assert_one_line_error(capsys, message)


def test_the_loss_of_a_row_is_the_mean_over_its_tokens(text_folder):
    task = language.build(recipes.load("text.py"), None)
    params, state = task.model.init(jax.random.key(0))
    tokens, lengths = np.random.default_rng(0).integers(0, 256, (2, 9)), np.array([3, 8])
    metrics = task.measure(params, state, {"tokens": tokens, "length": lengths}).metrics
    logits, _ = task.model.apply(params, state, tokens[:, :-1], train=False)
    log_p = np.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
    expected = np.array([-row[:n].mean() for row, n in zip(log_p, lengths, strict=True)])
    chex.assert_trees_all_close(metrics["loss"], expected, rtol=1e-5)


def test_the_smallest_network_has_a_feed_forward():
    model = LanguageModel(width=1, heads=1, mixers=("mamba",), blocks=1).for_text(4, "float32")
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert "feed_forward" in params["blocks"]["0"]
