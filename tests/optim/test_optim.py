"""Learning-rate schedules and optimizers by name."""

import functools
import math

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fnet
from fnet import layers, lora, models
from fnet.memory import tree_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.5, 0.0]),
        ("cosine", [0.0, 0.5, 1.0, 0.5, 0.0]),
    ],
)
def test_warmup_and_decay_have_expected_values(name, expected):
    schedule = fnet.optim.make_schedule(name, 1.0, steps=8, warmup_steps=4)
    got = [float(schedule(step)) for step in (0, 2, 4, 6, 8)]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_step_decays_have_expected_values():
    for name, decay_steps, expected in (
        # Every three steps, counted from the start of the run.
        ("step", (3,), [0.0, 0.5, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
        ("multistep", (4, 7), [0.0, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        # Two boundaries in the same step both count.
        ("multistep", (4.2, 4.4), [0.0, 0.5, 1.0, 1.0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]),
        ("exponential", (2,), [0.0, 0.5, *[0.5 ** (i / 2) for i in range(8)]]),
    ):
        schedule = fnet.optim.make_schedule(
            name, 1.0, steps=10, warmup_steps=2, decay_steps=decay_steps, decay_rate=0.5
        )
        np.testing.assert_allclose([float(schedule(i)) for i in range(10)], expected, atol=1e-6)


DECAYING = "step", "multistep", "exponential"


def test_rejects_invalid_schedules_and_optimizers():
    for name, options, message in (
        ("step", {"decay_steps": ()}, r"step needs one decay_steps > 0, got \(\)"),
        ("step", {"decay_steps": (2, 3)}, r"step needs one decay_steps > 0, got \(2, 3\)"),
        ("exponential", {"decay_steps": (0,)}, r"exponential needs one decay_steps > 0, got \(0,\)"),
        ("multistep", {"decay_steps": (2, -1)}, r"multistep needs some decay_steps > 0, got \(2, -1"),
        *(
            (name, {"decay_steps": (2,), "decay_rate": rate}, f"decay_rate must be > 0, got {rate}")
            for name in DECAYING for rate in (0.0, -0.5)
        ),
        ("stepp", {}, r"schedule must be one of .*cosine.*, got 'stepp'"),
        ("cosine", {"warmup_steps": 11}, r"warmup_steps must be in \[0, 10\], got 11"),
        ("cosine", {"warmup_steps": -1}, r"warmup_steps must be in \[0, 10\], got -1"),
        ("sdg", {"clip_norm": None}, r"optimizer must be one of .*adamw.*, got 'sdg'"),
        *(("sgd", {"clip_norm": n}, f"clip_norm must be > 0, got {n}") for n in (0.0, -1.0, math.nan)),
    ):  # fmt: skip
        is_optimizer = "clip_norm" in options
        make = fnet.optim.make_optimizer if is_optimizer else fnet.optim.make_schedule
        with pytest.raises(ValueError, match=message):
            make(name, 0.1, **options if is_optimizer else options | {"steps": 10})


def test_weight_decay_applies_to_kernels_only():
    model = fnet.serial(conv=layers.conv(1, 4), abn=layers.abn(4), head=layers.dense(4, 3))
    params, _ = jax.jit(model.init)(jax.random.key(0))
    rule = fnet.optim.make_optimizer("sgd", 1.0, momentum=0.0, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda g, p: rule.update(g, rule.init(p), p))(zeros, params)
    chex.assert_trees_all_close(updates["head"]["kernel"], -0.5 * params["head"]["kernel"])
    chex.assert_trees_all_equal(updates["abn"], zeros["abn"])
    chex.assert_trees_all_equal(updates["head"]["bias"], zeros["head"]["bias"])


KERNELS = {"kernel": True, "bias": False}
RULES = {
    "sgd": optax.chain(
        optax.add_decayed_weights(0.2, mask=KERNELS), optax.sgd(0.1, momentum=0.7, nesterov=True)
    ),
    "adam": optax.chain(optax.add_decayed_weights(0.2, mask=KERNELS), optax.adam(0.1)),
    "adamw": optax.adamw(0.1, weight_decay=0.2, mask=KERNELS),
    "lion": optax.lion(0.1, weight_decay=0.2, mask=KERNELS),
}


@pytest.mark.parametrize("name", RULES)
def test_optimizers_match_optax(name):
    params = {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([3.0, 0.5])}
    rule = fnet.optim.make_optimizer(name, 0.1, momentum=0.7, nesterov=True, weight_decay=0.2)
    ours, theirs = rule.init(params), RULES[name].init(params)
    for size in (0.3, -0.1):
        gradient = jax.tree.map(lambda a, size=size: size * a, params)
        got, ours = rule.update(gradient, ours, params)
        expected, theirs = RULES[name].update(gradient, theirs, params)
        chex.assert_trees_all_close(got, expected, rtol=1e-6)


@pytest.mark.parametrize(("clip_norm", "factor"), [(6.5, 0.5), (26.0, 1.0)])
def test_clip_norm_clips_the_global_norm(clip_norm, factor):
    gradient = {"kernel": jnp.array([[3.0, 4.0]]), "bias": jnp.array([12.0])}  # of norm 13
    rule = fnet.optim.make_optimizer("sgd", 0.1, clip_norm=clip_norm)
    updates, _ = rule.update(gradient, rule.init(gradient), gradient)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.1 * factor * g, gradient))


SCALABLE = [n for n in fnet.optim.OPTIMIZERS if not n.startswith(("compact_", "schedule_free_"))]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_classifier_scale_multiplies_the_classifiers_learning_rate(name):
    params = {"layer1": {"kernel": jnp.ones((2, 2))}, "fc": {"kernel": jnp.ones((2, 2))}}
    gradient = jax.tree.map(lambda a: 0.3 * a, params)

    def update(learning_rate, scale):
        rule = fnet.optim.make_optimizer(
            name, learning_rate, weight_decay=0.1, classifier_scale=scale
        )
        changes, _ = rule.update(gradient, rule.init(params), params)
        return optax.apply_updates(params, changes)

    scaled = update(0.1, 5.0)
    chex.assert_trees_all_close(scaled["layer1"], update(0.1, None)["layer1"], rtol=1e-6)
    chex.assert_trees_all_close(scaled["fc"], update(0.5, None)["fc"], rtol=1e-6)


ADAFACTOR = functools.partial(fnet.optim.make_optimizer, "adafactor")


def rms(a):
    return np.sqrt(np.mean(np.square(a)))


def test_adafactor_matches_the_paper():
    """Shazeer & Stern 2018, algorithms 4 and 5, with the decay of section 7.2; two steps."""
    rng = np.random.default_rng(0)
    # Axes before and after the two factored ones, as of a stack and of a convolution window.
    p, *gradients = (rng.normal(0, 0.5, (2, 128, 130, 3)) for _ in range(3))
    rule = ADAFACTOR(0.01, weight_decay=0.1)
    params = {"kernel": jnp.asarray(p, jnp.float32)}
    state = rule.init(params)
    row, column = np.zeros((2, 130, 3)), np.zeros((2, 128, 3))
    for t, g in enumerate(gradients, 1):
        updates, state = jax.jit(rule.update)(
            {"kernel": jnp.asarray(g, jnp.float32)}, state, params
        )
        params = optax.apply_updates(params, updates)
        beta = 1 - t**-0.8
        row = beta * row + (1 - beta) * np.mean(g**2 + 1e-30, axis=1)
        column = beta * column + (1 - beta) * np.mean(g**2 + 1e-30, axis=2)
        second = row[:, None] * column[:, :, None] / row.mean(1, keepdims=True)[:, None]
        u = g / np.sqrt(second)
        u = u / max(1.0, rms(u))
        p = p - 0.01 * (max(1e-3, rms(p)) * u + 0.1 * p)
        chex.assert_trees_all_close(params["kernel"], p.astype(np.float32), rtol=1e-4, atol=1e-6)


def test_adafactor_decays_kernels_only():
    params = {"dense": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.ones(2)}, "gamma": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    rule = ADAFACTOR(0.1, weight_decay=0.5)
    updates, _ = rule.update(zeros, rule.init(params), params)
    chex.assert_trees_all_close(updates["dense"].pop("kernel"), jnp.full((2, 2), -0.15))
    del zeros["dense"]["kernel"]
    chex.assert_trees_all_equal(updates, zeros)


def saved_numbers(shape):
    """Numbers in adafactor's state of one array: two means or all squares, and placeholders."""
    shorter, longer = (0, 0, *sorted(shape))[-2:]
    size = math.prod(shape)
    return size // longer + size // shorter + 1 if shorter >= 128 else size + 2


@pytest.mark.parametrize(
    ("name", "less_than_adam"), [("resnet50", 133.2), ("wider_resnet38", 508.3)]
)
def test_adafactor_state_bytes_follow_from_shapes(name, less_than_adam):
    params, _ = jax.eval_shape(models.get(name, num_classes=1000).init, jax.random.key(0))
    adafactor_bytes = tree_bytes(jax.eval_shape(ADAFACTOR(1e-3, weight_decay=1e-4).init, params))
    steps_taken = 1
    numbers = steps_taken + sum(saved_numbers(leaf.shape) for leaf in jax.tree.leaves(params))
    assert adafactor_bytes == 4 * numbers
    adam_bytes = tree_bytes(jax.eval_shape(fnet.optim.make_optimizer("adam", 1e-3).init, params))
    assert adam_bytes / adafactor_bytes == pytest.approx(less_than_adam, abs=0.05)


def make_loss(model):
    def loss(params, state, batch, key):
        y, state = model.apply(params, state, batch["x"], key=key, train=True)
        return (y**2).mean(tuple(range(1, y.ndim))), fnet.Aux(state, {})

    return loss


@pytest.mark.parametrize("width", [5, 128])
def test_optimizer_in_backward_rejects_adafactor_in_one_line(width):
    model = fnet.repeat(fnet.serial(dense=layers.dense(width, width)), 3)
    rule = ADAFACTOR(0.1, weight_decay=1e-4)
    create = functools.partial(fnet.TrainState.create, model, rule)
    state = jax.eval_shape(create, jax.random.key(0))
    step = fnet.make_step(make_loss(model), rule, fnet.autodiff.optimizer_in_backward(""))
    with pytest.raises(ValueError, match=r"applies reduce_sum to a stack.*use mode=mean") as raised:
        step.lower(state, {"x": jax.ShapeDtypeStruct((2, width), jnp.float32)})
    assert "\n" not in str(raised.value)


def test_warmup_may_last_the_whole_run():
    schedule = fnet.optim.make_schedule("cosine", 1.0, 4, warmup_steps=4)
    np.testing.assert_allclose([float(schedule(i)) for i in range(5)], [0, 0.25, 0.5, 0.75, 1])


def test_classifier_mask_ignores_nested_layers_of_that_name():
    params = {"block": {"fc": {"kernel": 1.0}}, "fc": {"kernel": 1.0}}
    expected = {"block": {"fc": {"kernel": False}}, "fc": {"kernel": True}}
    assert fnet.optim.classifier_mask(params) == expected


@pytest.mark.parametrize("name", ["preact_resnet", "resnet18", "wider_resnet16"])
def test_classifier_mask_selects_the_layer_with_num_classes_outputs(name):
    params, _ = jax.eval_shape(models.get(name, num_classes=7).init, jax.random.key(0))
    leaves = jax.tree.leaves(fnet.optim.classifier_mask(params)), jax.tree.leaves(params)
    assert 0 < sum(leaves[0]) < len(leaves[0])
    assert all(mask == (a.shape[-1:] == (7,)) for mask, a in zip(*leaves, strict=True))


def test_rejects_a_classifier_scale_for_optimizers_that_copy_parameters():
    for name in sorted(set(fnet.optim.OPTIMIZERS) - set(SCALABLE)):
        with pytest.raises(ValueError, match=f"classifier_scale must be None for {name}, .* got 2"):
            fnet.optim.make_optimizer(name, 0.1, classifier_scale=2.0)


def test_muon_makes_updates_of_kernels_orthogonal():
    """Also of each layer of a stack, and of convolutions as matrices of all inputs and outputs."""
    params = {
        "dense": {"kernel": jnp.ones((12, 8)), "bias": jnp.ones(8)},
        "stack": {"kernel": jnp.ones((3, 12, 8))},
        "conv": {"kernel": jnp.ones((3, 3, 4, 8))},
        "torch": {"weight": jnp.ones((8, 4, 3, 3))},
        "fc": {"kernel": jnp.ones((12, 8))},
    }
    keys = jax.random.split(jax.random.key(0), 6)
    grads = jax.tree.unflatten(
        jax.tree.structure(params),
        [jax.random.normal(k, p.shape) for k, p in zip(keys, jax.tree.leaves(params), strict=True)],
    )
    rule = fnet.optim.make_optimizer("muon", 0.1, weight_decay=0.5)
    updates, _ = rule.update(grads, rule.init(params), params)

    def direction(update):
        return (-update / 0.1 - 0.5).reshape(-1, *(update.shape[-2:]))

    for name in ("dense", "stack"):
        for matrix in direction(updates[name]["kernel"]):
            # consistent_rms: 0.2 sqrt(max(12, 8)), and 5 Newton-Schulz steps are not exact
            values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * math.sqrt(12))
            assert 0.6 < values.min() <= values.max() < 1.3
        assert jnp.vdot(updates[name]["kernel"] + 0.05, grads[name]["kernel"]) < 0
    for name, shape in (("conv", (36, 8)), ("torch", (8, 36))):
        (update,) = updates[name].values()
        matrix = (-update / 0.1 - 0.5).reshape(shape)
        values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * 6)
        assert 0.6 < values.min() <= values.max() < 1.3
    # Adam with Nesterov momentum: in the first step, all magnitudes are equal and near 1. A bias
    # has no decay.
    bias, fc = abs(updates["dense"]["bias"]) / 0.1, abs(direction(updates["fc"]["kernel"]))
    np.testing.assert_allclose(bias, bias[0], rtol=1e-3)
    np.testing.assert_allclose(fc, bias[0], rtol=1e-3)
    assert 1 <= bias[0] < 1.5


def test_schedule_free_params_are_the_average_of_the_iterates():
    """Of Adam without momentum, z - lr g / sqrt(v), v without the bias of its first steps."""
    rule = fnet.optim.make_optimizer("schedule_free_adamw", 0.1, clip_norm=1e6)
    params = {"kernel": jnp.asarray([1.0, -2.0])}
    state, iterates = rule.init(params), []
    z, v = np.array([1.0, -2.0]), 0.0
    for i in range(4):
        grad = np.array([0.3 + i, -1.0 / (1 + i)])
        updates, state = rule.update({"kernel": jnp.asarray(grad)}, state, params)
        params = optax.apply_updates(params, updates)
        v = 0.999 * v + 0.001 * grad**2
        z = z - 0.1 * grad / np.sqrt(v / (1 - 0.999 ** (i + 1)))
        iterates.append(z)
    average = fnet.optim.schedule_free_params(state, params)["kernel"]
    np.testing.assert_allclose(average, np.mean(iterates, 0), rtol=1e-5)
    assert not np.allclose(average, params["kernel"], rtol=1e-3)


def test_schedule_free_params_reject_another_state():
    params = {"kernel": jnp.ones(2)}
    with pytest.raises(ValueError, match="state of one schedule-free optimizer, got 0"):
        fnet.optim.schedule_free_params(optax.sgd(0.1).init(params), params)


def test_galore_needs_a_matrix():
    with pytest.raises(ValueError, match="arrays with two axes, got none; use adamw"):
        fnet.optim.make_optimizer("galore", 0.1).init({"kernel": jnp.ones((2, 2, 2))})


def test_galore_has_moments_of_the_projection():
    params = {"kernel": jnp.ones((64, 48)), "bias": jnp.ones(48)}
    rule = fnet.optim.make_optimizer("galore", 0.1, galore_rank=4, galore_every=5)
    floats = tree_bytes(jax.eval_shape(rule.init, params)) // 4
    assert floats < 64 * 4 + 2 * 64 * 4 + 2 * 48 + 16  # a projector and two moments
    grads = jax.tree.map(
        lambda p: jnp.outer(jnp.arange(64.0), jnp.arange(48.0)) if p.ndim > 1 else p, params
    )
    updates, _ = rule.update(grads, rule.init(params), params)
    assert np.linalg.matrix_rank(updates["kernel"], tol=1e-5) <= 4


def test_layer_scales_decay_from_the_last_block_to_the_first():
    for paths, expected in (
        # Depths from the last to the first, of the networks in fnet.models.
        (("head", "norm", "blocks/10", "blocks/9", "patches"), (0, 0, 1, 2, 3)),
        (("fc", "layer2/1", "layer2/0", "layer1/0", "bn1", "conv1"), (0, 1, 2, 3, 4, 4)),
        (("head", "stage1/block0", "stage1/downsample", "stage0/block1", "stem"), (0, 1, 2, 3, 4)),
        (("classifier", "bn_out", "mod3/0", "tra2", "mod2/1", "mod1"), (0, 0, 1, 2, 3, 4)),
        (("abn", "stage1/0", "down1", "stage0/0", "stem"), (0, 1, 2, 3, 4)),
        (("cls", "head", "body/layer1/0", "body/conv1"), (0, 0, 1, 2)),
    ):
        params = {}
        for path in paths:
            tree = params
            for name in path.split("/"):
                tree = tree.setdefault(name, {})
            tree["kernel"] = 0.0
        scales = fnet.optim.layer_scales(params, 0.5)
        actual = {
            "/".join(key.key for key in path[:-1]): leaf
            for path, leaf in jax.tree.leaves_with_path(scales)
        }
        assert actual == {p: 0.5**depth for p, depth in zip(paths, expected, strict=True)}


def test_layer_decay_scales_updates():
    params = {"stem": jnp.ones(2), "blocks": {"0": jnp.ones(2)}, "head": jnp.ones(2)}
    optimizer = fnet.optim.make_optimizer("sgd", 0.1, momentum=0.0, layer_decay=0.5)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    expected = {"stem": 0.025, "blocks": {"0": 0.05}, "head": 0.1}
    chex.assert_trees_all_close(updates, jax.tree.map(lambda v: jnp.full(2, -v), expected))
    with pytest.raises(ValueError, match=r"layer_decay must be None for .* got 0\.5"):
        fnet.optim.make_optimizer("compact_adamw", 0.1, layer_decay=0.5)
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 2"):
        fnet.optim.layer_scales(params, 2)


def foreign_params():
    """Parameters as nnx, Haiku, Equinox and adapters of fnet name them, with zeros as biases."""
    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    norm = eqx.nn.LayerNorm(3)
    kernel = {"l": {"kernel": jnp.ones((4, 3))}}
    adapters = jax.tree.map(jnp.ones_like, lora.init(lora.LoRA(2), kernel, jax.random.key(0)))
    return {
        "nnx": nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param, ...)[1],
        "haiku": {"linear": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, "n": {"scale": jnp.ones(3)}},
        "equinox": eqx.filter((linear, norm), eqx.is_inexact_array),
        "adapters": adapters,
    }


@pytest.mark.parametrize("library", ["nnx", "haiku", "equinox", "adapters"])
def test_matrices_of_other_libraries_decay(library):
    params = foreign_params()[library]
    rule = fnet.optim.make_optimizer("adamw", 0.1, weight_decay=0.5)
    updates, _ = rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)
    for update, p in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        chex.assert_trees_all_close(update, -0.05 * p if p.ndim == 2 else 0 * p)


def test_options_that_no_parameter_has_a_name_for_are_refused():
    for params in (jnp.ones((4, 3)), {"U1": jnp.ones((4, 3))}):
        for name, option, message in (
            ("adamw", {"weight_decay": 0.1}, r"weight_decay needs parameters named kernel, w or"),
            ("sgd", {"weight_decay": 0.1}, r"weight_decay needs parameters named kernel, w or"),
            ("muon", {}, r"muon needs matrices named kernel, w or weight"),
            (
                "adamw",
                {"classifier_scale": 2.0},
                r"classifier_scale needs a layer named classifier or",
            ),
            (
                "adamw",
                {"layer_decay": 0.5},
                r"layer_scales: expected blocks named as in fnet.models",
            ),
        ):
            rule = fnet.optim.make_optimizer(name, 0.1, **option)
            with pytest.raises(ValueError, match=message):
                rule.update(params, rule.init(params), params)
