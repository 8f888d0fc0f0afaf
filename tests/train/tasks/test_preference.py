"""Direct preference optimization: pairs of answers, the loss, and runs."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_cases import error_message
from program_cases import assert_one_line_error, exit_code, fnet_command, initial_run
from safetensors.numpy import load_file

from tests.pretrained_folder import write_folder, write_tokenizer
from train.config import Config, Optim, PreferenceFile, Pretrained, TextFile, Train
from train.data.buckets import bucketed_batches
from train.run.setup import setup
from train.tasks import preference

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PAIRS = [
    {"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "no" * (a % 9)} for a in range(1, 41)
]
PAIRS = [p | {"rejected": p["rejected"] or "none"} for p in PAIRS]


def texts_of(batch):
    """(text, learned text) of both answers of each pair."""
    found = []
    for tokens, length, mask in zip(
        batch["tokens"], batch["length"], batch["loss_mask"], strict=True
    ):
        rows = zip(tokens, length, mask, strict=True)
        found.append(
            [
                (bytes(t[: n + 1].tolist()).decode(), bytes(t[1:][m].tolist()).decode())
                for t, n, m in rows
            ]
        )
    return found


def test_pairs_that_do_not_differ_are_counted_and_left_out(write):
    same = [{"prompt": "Say ", "chosen": "x" * 9 + f"{i}", "rejected": "x" * 9} for i in range(8)]
    path = write([*PAIRS[:8], *same])
    data = PreferenceFile(path=path, test_path=write(PAIRS, "test.jsonl"), context=12).load()
    said = "8 of 16 training pairs do not differ in the first 13 tokens, and are left out"
    assert said in data.notes
    assert len(data.train["length"]) == 8
    message = error_message(PreferenceFile(path=write(same), context=12).load)
    assert "pairs do not differ in the first 13 tokens, so that nothing can be learned" in message


USER = {"role": "user", "content": "Hi"}


def test_a_pair_is_held_out_by_both_of_its_answers(write):
    for changed, same in (("chosen", "rejected"), ("rejected", "chosen")):
        pairs = [{"prompt": "Say ", changed: f"{i:03}", same: "x"} for i in range(40)]
        data = PreferenceFile(path=write(pairs), context=16, test_fraction=0.25).load()
        assert len(data.test["length"]) == 10


YES, NO = ({"role": "assistant", "content": c} for c in ("yes", "no"))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": "Hi", "chosen": [YES], "rejected": [NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "Hi", "chosen": [USER, YES], "rejected": [USER, NO]},
    ],
)
def test_pairs_of_chats_in_every_form(write, workplace, record):
    (workplace / "t.jinja").write_text(TEMPLATE)
    config = PreferenceFile(
        path=write([record] * 2), context=40, test_fraction=0.5, chat_template="t.jinja"
    )
    data = config.load()
    (pair,) = texts_of(data.augment(data.train, np.random.default_rng(0)))
    assert pair == [(f"<user>Hi</><assistant>{a}</>", f"{a}</>") for a in ("yes", "no")]
    assert data.is_chat


def test_pairs_tell_that_the_end_of_an_answer_is_not_learned(write, workplace):
    write_tokenizer(workplace / "tokenizer.json")
    (workplace / "t.jinja").write_text(TEMPLATE)
    record = {"prompt": "Hi", "chosen": [YES], "rejected": [NO]}
    config = PreferenceFile(
        path=write([record] * 2), tokenizer=".", chat_template="t.jinja", test_fraction=0.5
    )
    assert "the end of an answer is not learned" in config.load().notes[-1]


def test_pairs_of_texts_are_batched_by_length(write):
    data = PreferenceFile(path=write(PAIRS), context=32, test_fraction=0.25).load()
    expected = [[(p["prompt"] + p[a], p[a]) for a in ("chosen", "rejected")] for p in PAIRS]
    assert texts_of(data.augment(data.train, np.random.default_rng(0))) == expected[:30]
    assert texts_of(data.prepare(data.test)) == expected[30:]
    batch = next(bucketed_batches(data, 8, 0, 32))
    assert batch["tokens"].shape in ((8, 2, 17), (8, 2, 33))
    assert batch["loss_mask"].shape == (8, 2, batch["tokens"].shape[2] - 1)
    assert batch["weight"].tolist() == [1] * 8
    twice = [p | {a: p["prompt"] + p[a] for a in ("chosen", "rejected")} for p in PAIRS]
    assert "of 40 pairs repeat" in PreferenceFile(path=write(twice), context=32).load().notes[-1]
    dropped = PreferenceFile(path=write(PAIRS), context=12, long="drop", test_fraction=0.25).load()
    assert any("pairs were dropped" in note for note in dropped.notes)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 1: no field rejected"),
        ({"chosen": "b", "rejected": "c"}, "line 1: chosen and rejected must be texts after a prompt, or both messages"),
        ({"prompt": "a", "chosen": "b", "rejected": [NO]}, "must be texts after a prompt, or both messages"),
        ({"prompt": "a", "chosen": [], "rejected": [NO]}, "must be texts after a prompt, or both messages"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "line 1: answer is empty; remove the record"),
        ({"prompt": [USER], "chosen": [USER, YES], "rejected": [NO]}, "must differ in their last message only"),
        ({"prompt": "Ho", "chosen": [USER, YES], "rejected": [USER, NO]}, "line 1: prompt is not how chosen begins"),
        ({"prompt": "a" * 40, "chosen": "b", "rejected": "c"}, "the answer begins after the first 33 tokens"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_pair_names_its_line(write, record, message):
    config = PreferenceFile(path=write([record] * 2), context=32, test_fraction=0.5)
    assert message in error_message(config.load)


def config_of(workplace, write, **options):
    if not (workplace / "llama").exists():
        write_folder(workplace / "llama")
    data = PreferenceFile(
        path=write(PAIRS), vocabulary=256, context=32, batch_size=8, test_fraction=0.25
    )
    return Config(
        data=data,
        model=Pretrained(path=str(workplace / "llama"), **options),
        optim=Optim(name="adamw", learning_rate=1e-3, schedule="constant", clip_norm=None),
        train=Train(steps=3),
    )


@pytest.mark.parametrize(("options", "smoothing"), [({}, 0.25), ({"lora_rank": 2}, 0.0)])
def test_the_loss_is_that_of_the_formula(workplace, write, options, smoothing):
    """As conservative DPO, eq. 3 of https://ericmitchell.ai/cdpo.pdf; equals are not accurate."""
    config = config_of(workplace, write, **options)
    optim = dataclasses.replace(config.optim, label_smoothing=smoothing)
    run = setup(dataclasses.replace(config, optim=optim))
    state = run.compile_init()(jax.random.key(0))
    run.task.before_batches(None)
    batch, loss = next(run.training_batches(0)), jax.jit(run.task.loss)
    losses, aux = loss(state.params, state.model_state, batch, jax.random.key(0))
    chex.assert_trees_all_close(losses, jnp.full(8, jnp.log(2)), atol=1e-6)
    equal = aux.metrics["margin"] == 0
    assert equal.any()
    assert not aux.metrics["accuracy"][equal].any()
    chex.assert_trees_all_close(aux.metrics["margin"], jnp.zeros(8), atol=1e-6)

    moved = jax.tree.map(
        lambda p: p + 0.05 * jnp.sin(jnp.arange(p.size)).reshape(p.shape), state.params
    )
    losses, aux = loss(moved, state.model_state, batch, jax.random.key(0))

    @jax.jit
    def log_likelihoods(params):
        tokens = batch["tokens"].reshape(16, -1).astype(jnp.int32)
        logits, _ = run.task.model.apply(params, state.model_state, tokens[:, :-1], train=False)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        return (log_p * batch["loss_mask"].reshape(16, -1)).sum(1).reshape(8, 2)

    policy, reference = log_likelihoods(moved), log_likelihoods(state.params)
    chex.assert_trees_all_close(batch["reference"], reference, atol=2e-4)
    margin = 0.1 * ((policy - reference) @ jnp.array([1.0, -1.0]))
    right, wrong = -np.log(1 / (1 + np.exp(-margin))), -np.log(1 / (1 + np.exp(margin)))
    expected = (1 - smoothing) * right + smoothing * wrong
    chex.assert_trees_all_close(losses, expected, atol=1e-4)
    chex.assert_trees_all_close(aux.metrics["accuracy"], (margin > 0).astype(jnp.float32))


def test_the_odds_ratio_loss_is_that_of_trl(workplace, write):
    """ORPOTrainer of TRL: nll over prompt and answer, odds of mean log-likelihoods of answers."""
    config = config_of(workplace, write)
    data = dataclasses.replace(config.data, objective="orpo", beta=0.3)
    run = setup(dataclasses.replace(config, data=data))
    state = run.compile_init()(jax.random.key(0))
    run.task.before_batches(None)
    assert not run.task.dataset.train["reference"].any()
    batch = next(run.training_batches(0))
    params = jax.tree.map(
        lambda p: p + 0.05 * jnp.sin(jnp.arange(p.size)).reshape(p.shape), state.params
    )
    losses, aux = jax.jit(run.task.loss)(params, state.model_state, batch, jax.random.key(0))
    apply = jax.jit(functools.partial(run.task.model.apply, train=False))

    for i in range(8):
        averages = []
        for side in range(2):
            tokens = batch["tokens"][i, side].astype(np.int32)[None]
            logits, _ = apply(params, state.model_state, tokens[:, :-1])
            length = int(batch["length"][i, side])
            log_p = np.asarray(jax.nn.log_softmax(logits))[
                0, np.arange(length), tokens[0, 1:][:length]
            ]
            averages.append(float(log_p[batch["loss_mask"][i, side][:length]].mean()))
            if side == 0:
                policy_nll_loss = -float(log_p.mean())
        chosen, rejected = averages
        log_odds = (chosen - rejected) - (np.log1p(-np.exp(chosen)) - np.log1p(-np.exp(rejected)))
        expected = policy_nll_loss - 0.3 * -np.log1p(np.exp(-log_odds))
        assert float(losses[i]) == pytest.approx(expected, abs=1e-4)
        assert float(aux.metrics["margin"][i]) == pytest.approx(log_odds, abs=1e-4)


def test_the_reference_is_computed_once_for_a_run(workplace, write, monkeypatch):
    config = config_of(workplace, write)
    run = setup(config)
    run.task.before_batches(workplace / "reference.npz")
    rows = run.task.dataset.train["reference"]
    assert (rows < 0).all()
    alone = setup(config)
    alone.task.before_batches(None)
    chex.assert_trees_all_equal(alone.task.dataset.train["reference"], rows)

    again = setup(config)
    data = dataclasses.replace(config.data, test_fraction=0.5)
    other = setup(dataclasses.replace(config, data=data))
    monkeypatch.setattr(preference, "_losses", None)  # so that nothing can be computed
    again.task.before_batches(workplace / "reference.npz")
    for split in ("train", "test"):
        own, known = (getattr(r.task.dataset, split)["reference"] for r in (again, run))
        chex.assert_trees_all_equal(own, known)
    with pytest.raises(TypeError):  # other data are computed
        other.task.before_batches(workplace / "reference.npz")


TRL = 0.69314718, 0.64030033, 0.59180206
"""Losses of TRL 1.16.0's DPOTrainer with transformers 5.24.0: AdamW, 1e-3, no clipping, beta 0.1."""


@pytest.mark.slow
def test_three_steps_have_the_losses_of_trl(workplace, write):
    write_folder(workplace / "llama")
    write_tokenizer(workplace / "llama" / "tokenizer.json")
    tokenizer = json.loads((workplace / "llama" / "tokenizer.json").read_text())
    end = min(tokenizer["model"]["vocab"], key=lambda t: abs(tokenizer["model"]["vocab"][t] - 1))
    (workplace / "llama" / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    pairs = [p | {"rejected": "no" * (i % 9) or "none"} for i, p in enumerate(PAIRS[:12], 1)]
    config = Config(
        data=PreferenceFile(path=write(pairs), test_path=write(pairs[:2], "test.jsonl"), context=32, batch_size=12),
        model=Pretrained(path="llama"),
        optim=Optim(name="adamw", learning_rate=1e-3, schedule="constant", clip_norm=None, weight_decay=0.0),
        train=Train(steps=3),
    )  # fmt: skip
    run = setup(config)
    run.task.before_batches(None)
    state, batches = run.compile_init()(jax.random.key(0)), run.training_batches(0)
    for expected in TRL:
        state, metrics = run.step(state, next(batches))
        assert float(metrics["loss"]) == pytest.approx(expected, abs=5e-6)


def test_a_network_that_is_not_pretrained_is_refused(workplace, write, capsys):
    words = "--data.source", "preference_file", "--data.path", write(PAIRS)
    assert exit_code("train", "text_transformer", *words) == 2
    assert_one_line_error(capsys, "data.source: preference_file has no text, which the network")
    assert TextFile.content != PreferenceFile.content


def test_a_reward_is_read_from_the_last_token_of_an_answer(workplace, write):
    config = config_of(workplace, write)
    data = dataclasses.replace(config.data, objective="reward")
    run = setup(dataclasses.replace(config, data=data))
    state = run.compile_init()(jax.random.key(0))
    batch = next(run.training_batches(0))
    losses, aux = jax.jit(run.task.loss)(state.params, state.model_state, batch, jax.random.key(0))
    network = run.task.model
    features = jax.jit(functools.partial(network.features, train=False))
    own = {name: p for name, p in state.params.items() if name != "classifier"}
    rewards = np.zeros((3, 2))
    for i, side in np.ndindex(3, 2):  # a program for each length
        count = int(batch["length"][i, side]) + 1  # the last token of a row is its end
        tokens = batch["tokens"][i, side, :count].astype(np.int32)[None]
        x, _ = features(own, state.model_state, tokens)
        rewards[i, side] = (np.asarray(x)[0, -1] @ state.params["classifier"]["kernel"])[0]
    margin = rewards[:, 0] - rewards[:, 1]
    np.testing.assert_allclose(aux.metrics["margin"][:3], margin, atol=1e-5)
    np.testing.assert_allclose(losses[:3], np.log1p(np.exp(-margin)), atol=1e-5)
    logits, _ = network.base.apply(own, {}, tokens, train=False)
    head = state.params["embedding"]["embedding"].T if "head" not in own else own["head"]["kernel"]
    np.testing.assert_allclose(logits, x @ head, atol=1e-4)


@pytest.mark.slow
def test_a_reward_model_is_exported_for_transformers(workplace, write, capsys):
    config = config_of(workplace, write, lora_rank=2)
    data = dataclasses.replace(config.data, objective="reward")
    initial_run("r", dataclasses.replace(config, data=data))
    assert exit_code("sample", "r", "--prompt", "2+1=") == 2
    assert_one_line_error(capsys, "which generates nothing")
    assert exit_code("export", "r", "--adapters", "--out", "a") == 2
    assert_one_line_error(capsys, "--adapters: a model with a new head is written whole")
    fnet_command("export", "r")
    folder = workplace / "r" / "exported"
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["id2label"]) == (
        ["LlamaForSequenceClassification"],
        {"0": "reward"},
    )
    tensors = load_file(folder / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 32)
    assert "lm_head.weight" not in tensors
