"""Setup of a run from a config: effects of settings, and refused combinations."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_cases import write_class_folders

import fnet
from fnet import autodiff
from train.config import (
    Clipped,
    Config,
    Denoiser,
    Digits,
    ImageFolder,
    LanguageModel,
    Mlp,
    Optim,
    PerExample,
    PreactResNet,
    SegmentationFolder,
    Synthetic,
    Train,
    flatten,
)
from train.data import Outputs, Scaling
from train.data.label_map import LabelMap
from train.errors import UserError
from train.run.open_run import check_classes, write_classes
from train.run.run_folder import MAY_CHANGE_ON_RESUME, RunFolder, changed_fields
from train.run.setup import check_resumed_length, setup

NETWORK = PreactResNet(widths=(4,), blocks_per_stage=1)


def test_the_classifier_can_have_its_own_learning_rate():
    def update(rate):
        optim = Optim(
            learning_rate=0.1, schedule="constant", momentum=0.0, classifier_learning_rate=rate
        )
        run = setup(Config(data=Digits(batch_size=8), model=NETWORK, optim=optim))
        state = jax.jit(run.init)(jax.random.key(0))
        before = jax.tree.map(np.array, state.params)  # copied, because the step donates the state
        state, _ = run.step(state, next(run.training_batches(0)))
        return jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)

    plain, own = update(None), update(1.0)
    chex.assert_trees_all_close(own["stem"], plain["stem"], rtol=1e-4, atol=1e-6)
    tenfold = jax.tree.map(lambda a: 10 * a, plain["head"])
    chex.assert_trees_all_close(own["head"], tenfold, rtol=1e-4, atol=1e-6)


def test_warmup_shrinks_to_fit_a_short_run():
    run = setup(Config(optim=Optim(warmup_steps=100, decay_rate=0.5), train=Train(steps=30)))
    assert run.notes[0] == "optim.decay_rate: 0.5 has no effect with optim.schedule cosine"
    assert run.notes[1:] == ("optim.warmup_steps: 3 instead of 100, because the run has 30 steps",)
    assert run.schedule(3) == pytest.approx(0.1)
    assert not setup(Config(optim=Optim(warmup_steps=30), train=Train(steps=30))).notes


def test_an_average_that_is_mostly_the_initial_network_is_reported():
    (note,) = setup(Config(optim=Optim(ema_decay=0.9999), train=Train(steps=300))).notes
    assert note == (
        "optim.ema_decay: 0.9999, so that the average that is evaluated is 97% the initial network "
        "after 300 steps; give 0.99 or less, or more steps"
    )
    assert not setup(Config(optim=Optim(ema_decay=0.99), train=Train(steps=300))).notes


def test_a_run_of_few_steps_is_reported():
    (note,) = setup(Config(data=Digits(batch_size=128), train=Train(epochs=1))).notes
    assert note == (
        "train.epochs: 1 is only 12 steps of 128 examples, because there are 1,437 of them; give "
        "more epochs, or a smaller data.batch_size"
    )


@pytest.mark.parametrize(
    ("epochs", "examples", "steps"),
    [(0.01, 10, 1), (0.4, 10, 1), (1, 10, 3), (2, 10, 5), (15, 12, 45), (25, 11, 69)],
)
def test_a_run_has_at_least_one_step_and_the_last_epoch_is_whole(epochs, examples, steps):
    data = Synthetic(examples=examples, batch_size=4, image_size=4, channels=1, classes=2)
    run = setup(Config(data=data, model=Mlp(hidden=(2,)), train=Train(epochs=epochs)))
    assert run.steps == steps


def test_more_steps_than_32_bits_count_are_refused():
    data = Synthetic(examples=4, batch_size=4, image_size=4, channels=1, classes=2)

    def steps(epochs):
        return setup(Config(data=data, model=Mlp(hidden=(2,)), train=Train(epochs=epochs))).steps

    assert steps(2**31 - 1) == 2**31 - 1
    with pytest.raises(UserError, match=r"2.14748e\+09 gives 2\^31 steps or more"):
        steps(2**31)


def test_decay_epochs_are_converted_to_steps():
    data = Synthetic(examples=10, batch_size=4, image_size=4, channels=1, classes=2)  # 2.5 steps
    optim = Optim(learning_rate=1.0, schedule="multistep", decay_epochs=(2, 4), decay_rate=0.5)
    config = Config(data=data, model=Mlp(hidden=(2,)), optim=optim)
    rate = setup(config).schedule
    assert [float(rate(step)) for step in (4, 5, 9, 10)] == [1.0, 0.5, 0.5, 0.25]
    (note,) = setup(config.replace(train=Train(steps=10))).notes
    assert note == "optim.decay_epochs: the run has 4 epochs, so that no decay comes at 4"


@pytest.mark.parametrize("grad", [PerExample(), Clipped()], ids=lambda grad: grad.mode)
def test_refuses_mixup_with_per_example_gradients(grad, tmp_path):
    write_class_folders(tmp_path, train=2, test=2)
    data = ImageFolder(path=str(tmp_path), image_size=8, batch_size=2, mixup=0.2)
    with pytest.raises(
        UserError, match=f"data.mixup: .* grad.mode {grad.mode} needs their gradients apart"
    ):
        setup(Config(data=data, model=NETWORK, grad=grad))


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (Clipped(quantile=0.5, per_layer=True), "adapts one clip .* grad.per_layer cannot be used"),
        (Clipped(quantile=0.5, automatic=0.1), "adapts one clip .* grad.automatic cannot be used"),
        (
            Clipped(quantile=0.5, noise_multiplier=1.0, delta=1e-5),
            r"grad.quantile: AdaptiveClipping: count_noise must be more than half of",
        ),
    ],
)
def test_refuses_adaptive_clipping_with_other_clipping_or_too_little_noise(grad, message):
    with pytest.raises(UserError, match=message):
        setup(Config(data=Digits(batch_size=8), model=Mlp(hidden=()), grad=grad))


def test_fields_that_can_change_on_resume_exist():
    assert set(MAY_CHANGE_ON_RESUME) <= set(flatten(Config(data=ImageFolder())))


def test_resuming_can_change_how_files_are_read_but_not_the_images(tmp_path):
    config, folder = Config(data=ImageFolder(crop="center")), RunFolder(tmp_path)
    folder.write_config(config)
    data = dataclasses.replace(config.data, workers=2, cache=True, max_bad_fraction=0.1)
    other = dataclasses.replace(config, data=data)
    folder.resume(other, 1)
    assert folder.read_config() == other
    cropped = dataclasses.replace(config, data=dataclasses.replace(data, crop="padded"))
    with pytest.raises(
        UserError, match=r"another config \(data.crop is center there and padded here\)"
    ):
        folder.resume(cropped, 1)
    assert folder.read_config() == other


def test_resuming_keeps_the_number_of_private_steps(tmp_path):
    write_class_folders(tmp_path, train=2, test=2)
    data = ImageFolder(path=str(tmp_path), image_size=8, batch_size=2)
    config = Config(data=data, model=Mlp(hidden=()), train=Train(steps=4))
    run = setup(config)  # without noise, whose calibration is slow
    grad = Clipped(epsilon=2.0, delta=1e-5)
    here = dataclasses.replace(config, grad=grad, data=dataclasses.replace(data, workers=2))
    run = run._replace(config=here)
    there = dataclasses.replace(config, grad=grad)
    check_resumed_length(run, there)
    with pytest.raises(UserError, match="spend epsilon 2 over 2 steps, not 4"):
        check_resumed_length(run, dataclasses.replace(there, train=Train(steps=2)))


def test_noise_is_not_repeated_in_a_run_of_another_length():
    """The difference of two sums with the same noise has none."""
    grad = Clipped(noise_multiplier=1.0, delta=1e-5)
    config = Config(data=SMALL, model=Mlp(hidden=()), train=Train(steps=4))
    run = setup(config)._replace(config=dataclasses.replace(config, grad=grad))
    before = dataclasses.replace(run.config, train=Train(steps=3))
    check_resumed_length(run, before)
    check_resumed_length(run, run.config, repeated=1)
    with pytest.raises(
        UserError, match=r"1 steps after the last checkpoint .* in a run of 3 steps"
    ):
        check_resumed_length(run, before, repeated=1)


SMALL = Synthetic(examples=10, batch_size=4, image_size=4, channels=1, classes=5)


def test_every_setting_of_the_optimizer_reaches_it(monkeypatch):
    seen, make = {}, fnet.optim.make_optimizer

    def recorded(name, schedule, **settings):
        seen.update(settings, name=name)
        return make(name, schedule, **settings)

    monkeypatch.setattr(fnet.optim, "make_optimizer", recorded)
    optim = Optim(
        name="sgd", learning_rate=0.1, classifier_learning_rate=0.2,
        momentum=0.7, nesterov=True, weight_decay=0.3, clip_norm=4.0,
        galore_rank=5, galore_every=7, layer_decay=0.5,
    )  # fmt: skip
    setup(Config(data=SMALL, model=PreactResNet(widths=(4,), blocks_per_stage=1), optim=optim))
    assert seen == {
        "name": "sgd", "momentum": 0.7, "nesterov": True, "weight_decay": 0.3, "clip_norm": 4.0,
        "classifier_scale": 2.0, "galore_rank": 5, "galore_every": 7, "layer_decay": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("how", [{"per_layer": True}, {"automatic": 0.1}])
def test_every_setting_of_clipping_reaches_its_mode(how, monkeypatch):
    seen, clipped = {}, autodiff.clipped

    def recorded(clip, **settings):
        seen.update(settings, clip=clip)
        return clipped(clip, **settings)

    monkeypatch.setattr(autodiff, "clipped", recorded)
    grad = Clipped(clip=0.3, microbatches=2, **how)
    setup(Config(data=SMALL, model=Mlp(hidden=()), grad=grad))
    whole = {"per_layer": False, "automatic": None, "noise_schedule": (), "clip_schedule": ()} | how
    expected = {"clip": 0.3, "noise_multiplier": 0.0, "expected_batch_size": 4, "microbatches": 2}
    assert seen == expected | whole


OTHER_VALUES = {
    LanguageModel(
        width=16, heads=4, blocks=2, mixers=("attention", "rg_lru"), attention_context="lagged"
    ): {
        "mixers": ("attention", "mamba2"), "blocks": 3, "width": 32, "hidden": 8, "heads": 2,
        "groups": 2, "window": 3, "expand": 1.0, "norm": "layer", "attention_context": "current",
        "context_rate": 0.5, "dropout": 0.5,
    },
    Denoiser(patch=2, width=16, heads=2, blocks=2, attention_context="lagged"): {
        "patch": 1, "blocks": 3, "width": 32, "hidden": 8, "heads": 4, "norm": "layer",
        "attention_context": "current", "context_rate": 0.5, "dropout": 0.5,
    },
}  # fmt: skip


def training_jaxpr(section):
    key = jax.random.key(0)
    if isinstance(section, LanguageModel):
        network, given = section.for_text(11, "float32"), (jnp.zeros((2, 6), jnp.int32), {})
    else:
        conditions = {"timestep": jnp.zeros(2, jnp.int32), "label": jnp.zeros(2, jnp.int32)}
        network, given = section.build((4, 4, 1), 3), (jnp.zeros((2, 4, 4, 1)), conditions)
    params, state = jax.eval_shape(network.init, key)
    x, more = given
    apply = lambda p, s, key: network.apply(p, s, x, key=key, train=True, **more)  # noqa: E731
    return str(jax.make_jaxpr(apply)(params, state, key))


@pytest.mark.parametrize("section", OTHER_VALUES, ids=lambda section: section.name)
def test_every_field_of_a_network_changes_what_it_computes(section):
    plain = training_jaxpr(section)
    for field, value in OTHER_VALUES[section].items():
        assert training_jaxpr(dataclasses.replace(section, **{field: value})) != plain, field


@pytest.mark.parametrize(
    ("optim", "more", "message"),
    [
        ({"name": "compact_adamw"}, {}, "give train.params_dtype bfloat16"),
        ({"name": "adamw"}, {"train": Train(params_dtype="bfloat16")}, "give optim.name compact_"),
        (
            {"name": "compact_lion"},
            {"train": Train(params_dtype="bfloat16"), "grad": Clipped()},
            "grad.mode clipped needs gradients in float32",
        ),
        (
            {"name": "compact_sgd", "classifier_learning_rate": 0.1},
            {"train": Train(params_dtype="bfloat16")},
            "compact_sgd has one learning rate",
        ),
        ({"name": "schedule_free_adamw"}, {}, "give optim.schedule constant"),
        (
            {"name": "schedule_free_adamw", "schedule": "constant", "ema_decay": 0.9},
            {},
            "evaluates its own average",
        ),
    ],
)
def test_rejects_optimizers_that_do_not_fit(optim, more, message):
    model = PreactResNet(widths=(4,), blocks_per_stage=1)
    with pytest.raises(UserError, match=message):
        setup(Config(data=SMALL, model=model, optim=Optim(**optim), **more))


def test_kernels_are_bfloat16_and_their_average_is_float32():
    run = setup(
        Config(
            data=SMALL,
            model=PreactResNet(widths=(4,), blocks_per_stage=1),
            optim=Optim(name="compact_adamw", ema_decay=0.9),
            train=Train(params_dtype="bfloat16"),
        )
    )
    state = run.init(jax.random.key(0))
    kernels = jax.tree.leaves(fnet.optim.weight_decay_mask(state.params))
    dtypes = [p.dtype for p in jax.tree.leaves(state.params)]
    assert dtypes == [jnp.bfloat16 if is_kernel else jnp.float32 for is_kernel in kernels]
    assert {a.dtype for a in jax.tree.leaves(state.ema)} == {jnp.dtype(jnp.float32)}
    chex.assert_trees_all_equal_shapes_and_dtypes(state, run.state_shapes)
    new, _ = run.step(state, {n: jnp.zeros(a.shape, a.dtype) for n, a in run.batch_shapes.items()})
    chex.assert_trees_all_equal_shapes_and_dtypes(new, run.state_shapes)


def test_masks_of_a_resumed_run_mean_the_same(tmp_path):
    codes, values = ((0, 0), (0xFF0000, 1)), ((0, 0), (1, 1), (255, 255))
    now = LabelMap(("a", "b"), values[:2], codes, "color", palette=((0, 5),))
    write_classes(RunFolder(tmp_path), Outputs(now.names, now, None))
    check_classes(RunFolder(tmp_path), Outputs(now.names, now, None))
    options = r"give --data.classes 2 --data.mask-reading color, or the class table of the run"
    for changes in (
        {"codes": ((0, 1), (0xFF0000, 0))},
        {"values": values},
        {"reading": "index"},
        {"palette": ((0, 6),)},
    ):
        other = dataclasses.replace(now, **changes)
        with pytest.raises(UserError, match=f"the values or colors of masks differ.*{options}"):
            check_classes(RunFolder(tmp_path), Outputs(other.names, other, None))
    there, here = (Config(data=SegmentationFolder(ignore=i)) for i in (None, (255,)))
    assert not changed_fields(there, here)


def test_numbers_of_a_resumed_run_keep_their_scale(tmp_path):
    folder, began = RunFolder(tmp_path), Outputs(("age",), None, Scaling((1.0,), (2.0,)))
    write_classes(folder, began)
    check_classes(folder, began)
    with pytest.raises(UserError, match="the classes differ from those that"):
        check_classes(folder, began._replace(names=("size",)))
    with pytest.raises(UserError, match="mean and deviation of the numbers differ"):
        check_classes(folder, began._replace(scaling=Scaling((1.0,), (3.0,))))
