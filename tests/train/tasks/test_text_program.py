"""Training on text: saved states, and losses of rows."""

import chex
import jax
import numpy as np
import pytest

import fnet
from train.config import Config, LanguageModel, Optim, TextFile, Train
from train.run.checkpoints import Checkpoints, checksums
from train.run.setup import setup
from train.tasks import language

MODEL = LanguageModel(blocks=1, width=16, hidden=16, heads=2, attention_context="lagged")


@pytest.fixture
def config(tmp_path):
    words = [f"{w} says {n}. " * (n % 7 + 1) for n, w in enumerate(["a", "the one", "no"] * 30)]
    (tmp_path / "text.txt").write_text("|".join(words))
    data = TextFile(path=str(tmp_path / "text.txt"), context=32, batch_size=4)
    return Config(data=data, model=MODEL, train=Train(steps=6))


@pytest.mark.slow
def test_a_state_is_restored_with_the_same_bits_and_its_average_evaluated(config, tmp_path):
    optim = Optim(name="schedule_free_adamw", learning_rate=0.01, schedule="constant")
    run = setup(config.replace(optim=optim))
    state, batches = run.compile_init()(jax.random.key(0)), run.training_batches(0)
    for _ in range(2):
        state, _ = run.step(state, next(batches))
    with Checkpoints(tmp_path / "c", 1) as checkpoints:
        checkpoints.save(2, state, {})
        checkpoints.wait()
        assert checksums(checkpoints.restore(run.state_shapes).state) == checksums(state)
        evaluated = checkpoints.restore_network().evaluation_params
    expected = fnet.optim.schedule_free_params(state.opt_state, state.params)
    chex.assert_trees_all_close(evaluated, expected, rtol=1e-6, atol=1e-7)
    kernels = (tree["embedding"]["embedding"] for tree in (expected, state.params))
    assert not np.array_equal(*kernels)


def test_the_loss_of_a_row_is_the_mean_over_its_tokens(config):
    task = language.build(config, None)
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
