"""Diffusion: training loss, sampling, and text sampling options."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from train.arguments import ImageArguments, TextArguments
from train.config import Config, Denoiser, LanguageModel, Synthetic, TextFile
from train.errors import UserError
from train.run import checkpoints
from train.run import generation as sample
from train.run.checkpoints import RestoredNetwork
from train.run.open_run import OpenRun
from train.run.run_folder import RunFolder
from train.tasks import build, images, language

SMALL = Synthetic(examples=10, batch_size=4, image_size=4, channels=1, classes=5)


class Restored:
    """Fake `Checkpoints` with a network without arrays."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def restore_network(self, init, place=None):
        return RestoredNetwork({}, {}, 0)


def test_samples_are_the_networks_prediction_for_their_labels():
    def apply(params, state, x, *, timestep, label, train):
        """Predict the constant k / 4 for label k."""
        level = jnp.expand_dims(label / 2 - 1, (1, 2, 3))
        return jnp.broadcast_to(level, x.shape), state

    config = Config(data=SMALL, model=Denoiser(predicts="x0", steps=20))
    network = types.SimpleNamespace(apply=apply), (4, 4, 1), 5
    labels = jnp.array([3, 0, 4])
    options = ImageArguments(steps=3, guidance=1.0)
    got = sample.sample_images(config.model, network, {}, {}, labels, options)
    expected = np.broadcast_to(np.array([0.75, 0, 1]).reshape(3, 1, 1, 1), (3, 4, 4, 1))
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw images of a denoiser that predicts labels; return what is plotted."""
    monkeypatch.setattr(checkpoints, "Checkpoints", Restored)
    monkeypatch.setattr(
        sample, "sample_images",
        lambda config, network, params, state, labels, a: jnp.expand_dims(labels, (1, 2, 3)),
    )  # fmt: skip

    def draw(model, options):
        plotted = []
        monkeypatch.setattr(sample.plots, "image_grid", lambda *given: plotted.extend(given))
        sample.draw_images(OpenRun(RunFolder(tmp_path), Config(data=SMALL, model=model)), options)
        return plotted

    return draw


def test_each_row_of_the_picture_has_one_label(drawn):
    rows, names, *_ = drawn(Denoiser(steps=20), ImageArguments(labels=("3", "1"), count=2))
    assert names == ("3", "1")
    assert rows[..., 0, 0, 0].tolist() == [[3, 3], [1, 1]]


@pytest.mark.parametrize(
    ("model", "options", "title"),
    [
        ({"steps": 20}, {}, "20 steps, guidance 1.5"),
        ({"steps": 200, "label_dropout": 0.0}, {}, "50 steps, guidance 1"),
        ({"steps": 20}, {"steps": 20, "guidance": 3.0}, "20 steps, guidance 3"),
        ({"steps": 20, "label_dropout": 0.0}, {"guidance": 1.0}, "20 steps, guidance 1"),
        ({"steps": 20}, {"steps": 21}, "--steps: expected at most model.steps 20, got 21"),
        ({"label_dropout": 0.0}, {"guidance": 2.0}, "--guidance: expected 1, got 2; the run was"),
        ({}, {"labels": ("7",)}, "--labels: expected some of 0, 1, 2, 3, 4, got 7"),
    ],
)
def test_steps_and_guidance_of_samples(model, options, title, drawn):
    if title.startswith("--"):
        with pytest.raises(UserError, match=title):
            drawn(Denoiser(**model), ImageArguments(**options))
    else:
        assert title in drawn(Denoiser(**model), ImageArguments(**options))[2]


@pytest.fixture
def predicting_labels(monkeypatch):
    """Build tasks whose network predicts each label, and has timesteps for its next state."""

    def apply(params, state, x, *, timestep, label, key, train):
        level = jnp.expand_dims(label.astype(jnp.float32), (1, 2, 3))
        return jnp.broadcast_to(level, x.shape), timestep

    network = types.SimpleNamespace(init=lambda key: ({}, {}), apply=apply)
    monkeypatch.setattr(images, "build_network", lambda *_: network)
    return lambda **fields: build(Config(data=SMALL, model=Denoiser(weighting="uniform", **fields)))


def test_the_loss_is_that_of_images_from_minus_1_to_1_and_dropped_labels(predicting_labels):
    task = predicting_labels(predicts="x0", steps=30, label_dropout=0.3)
    label, index = jnp.arange(3000) % 5, jnp.arange(3)
    batch = {"image": jnp.full((3000, 1, 1, 1), 51, jnp.uint8), "label": label}
    losses, aux = task.loss({}, {}, batch, jax.random.key(0))
    given = jnp.sqrt(losses) - 0.6
    is_dropped = given > 4.5
    np.testing.assert_allclose(given, jnp.where(is_dropped, 5, label), atol=1e-5)
    assert abs(is_dropped.mean() - 0.3) < 0.04
    assert set(aux.model_state.tolist()) == set(range(30))
    image = jnp.asarray([0, 51, 255], jnp.uint8).reshape(3, 1, 1, 1)
    got = task.measure({}, {}, {"image": image, "label": index, "index": index})
    np.testing.assert_allclose(got.metrics["loss"], [1, 1.6**2, 1], atol=1e-5)


def test_each_test_example_has_its_own_noise_in_every_evaluation(predicting_labels):
    task, zeros = predicting_labels(predicts="eps"), jnp.zeros(4, jnp.int32)
    batch = {"image": jnp.zeros((4, 4, 4, 1), jnp.uint8), "label": zeros, "index": jnp.arange(4)}
    losses = task.measure({}, {}, batch).metrics["loss"]
    assert len(set(losses.tolist())) == 4
    backwards = task.measure({}, {}, batch | {"index": jnp.arange(4)[::-1]}).metrics["loss"]
    np.testing.assert_allclose(backwards[::-1], losses)


@pytest.mark.parametrize(("window", "seen"), [(None, 16), (40, 16), (8, 8)])
def test_generates_text_with_the_options_and_the_window_of_training(
    window, seen, tmp_path, monkeypatch
):
    calls, build_network = {}, language.build_network

    def recorded(config):
        calls["window"] = config.model.window
        return build_network(config)

    def stream(network, params, state, prompt, key, length, **how):
        calls.update(how, prompt=prompt.tolist(), length=length)
        return iter(())

    monkeypatch.setattr(checkpoints, "Checkpoints", Restored)
    monkeypatch.setattr(language, "build_network", recorded)
    monkeypatch.setattr(fnet, "stream", stream)
    network = LanguageModel(blocks=1, width=16, heads=2, window=window)
    config = Config(data=TextFile(context=16), model=network)
    run = OpenRun(RunFolder(tmp_path), config)
    options = TextArguments(prompt=("ab",), length=3, temperature=0.5, top_k=4, top_p=0.9)
    generator = sample.TextGenerator(run, options)
    assert [*generator.stream([generator.encode("ab")], [0])] == [[""]]
    generator.options = dataclasses.replace(options, batch_size=2, seed=7)
    generator.stream = lambda prompts, seeds: iter([[str(seed) for seed in seeds]])
    assert generator.answers(["abc", "d", "ab"]) == ["7", "8", "9"]  # whatever the batches are
    assert calls == {
        "window": seen, "prompt": [[97, 98]], "length": 3, "temperature": 0.5, "top_k": 4,
        "top_p": 0.9, "min_p": None, "repetition_penalty": None, "prompt_lengths": [2],
    }  # fmt: skip
