"""Golden equations: Ba et al. 2016 and Zhang, Sennrich 2019, checked through autodiff."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from fnet.layers.norm import invertible_scale, layer_norm, layer_norm_layer, rms_norm

EPS = 1e-6
NORMS = ["layer", "layer without bias", "rms"]


def defining_formula(x, scale, bias, *, center=True, eps=EPS):
    """The equations under ordinary autodiff, in float32 or wider."""
    w = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if center:
        w = w - w.mean(-1, keepdims=True)
    y = w / jnp.sqrt(jnp.square(w).mean(-1, keepdims=True) + eps)
    for v, op in ((scale, jnp.multiply), (bias, jnp.add)):
        y = y if v is None else op(y, jnp.expand_dims(v, range(x.ndim - 1)))
    return y.astype(x.dtype)


@functools.cache
def pair(norm):
    """The norm of that name and its formula, both functions of (x, scale, bias)."""
    return {
        "layer": (layer_norm, defining_formula),
        "layer without bias": (
            lambda x, s, b: layer_norm(x, s, None),
            lambda x, s, b: defining_formula(x, s, None),
        ),
        "rms": (
            lambda x, s, b: rms_norm(x, s),
            lambda x, s, b: defining_formula(x, s, None, center=False),
        ),
    }[norm]


def inputs(shape, seed=0, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=shape) * 2 + rng.normal(), dtype)
    scale = jnp.asarray(rng.normal(size=shape[-1]), jnp.promote_types(dtype, jnp.float32))
    bias = jnp.asarray(rng.normal(size=shape[-1]), jnp.promote_types(dtype, jnp.float32))
    dy = jnp.asarray(rng.normal(size=shape), dtype)
    return x, scale, bias, dy


@functools.cache
def compiled_gradients(f):
    return jax.jit(lambda x, scale, bias, dy: jax.vjp(f, x, scale, bias)[1](dy))


def gradients(f, x, scale, bias, dy):
    return compiled_gradients(f)(x, scale, bias, dy)


def wide(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def relative_errors(got, exact):
    """The relative error of each array in the 2-norm, compared with float64."""
    return [
        float(np.linalg.norm(np.asarray(g, np.float64) - e) / np.linalg.norm(e))
        for g, e in zip(got, exact, strict=True)
    ]


@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    norm=st.sampled_from(NORMS),
    seed=st.integers(0, 99),
)
def test_output_and_gradients_match_the_formula_on_random_shapes(shape, norm, seed):
    with jax.enable_x64(True):
        x, scale, bias, dy = inputs(shape, seed)

        @jax.jit
        def both(*arrays):
            pulled = (jax.vjp(f, *arrays) for f in pair(norm))
            return list(zip(*((y, pullback(dy)) for y, pullback in pulled), strict=True))

        outputs, gradients = both(x, scale, bias)
        chex.assert_trees_all_close(*outputs, atol=1e-12)
        chex.assert_trees_all_close(*gradients, rtol=1e-9, atol=1e-9)


@functools.cache
def compiled_hessian(f):
    return jax.jit(jax.hessian(lambda x, s, b, dy: ((f(x, s, b) + 1) ** 3 * dy).sum(), (0, 1, 2)))


@pytest.mark.parametrize(("norm", "scale"), [("layer", 1e-3), ("rms", 0.0)])
@pytest.mark.usefixtures("float64")
def test_hessian_matches_the_formula_for_every_scale(norm, scale):
    x, _, _, dy = inputs((2, 3))
    ours, formula = (
        compiled_hessian(f)(x, jnp.full(3, scale), jnp.zeros(3), dy) for f in pair(norm)
    )
    chex.assert_trees_all_close(ours, formula, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_backward_pass_saves_only_the_output(norm):
    x, scale, bias, _ = inputs((64, 16), dtype=jnp.float32)
    y, vjp = jax.vjp(pair(norm)[0], x, scale, bias)
    saved = [leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "size", 0) >= x.size]
    assert len(saved) == 1
    assert saved[0].unsafe_buffer_pointer() == y.unsafe_buffer_pointer()


@pytest.mark.parametrize("scale", [1.0, -1e-6, 1e-25, -0.0])
@pytest.mark.parametrize(("norm", "dtype"), [("layer", jnp.float32), ("rms", jnp.bfloat16)])
@pytest.mark.usefixtures("float64")
def test_gradients_without_bias_are_accurate_for_every_scale(norm, dtype, scale):
    ours, formula = pair(norm)
    x, _, _, dy = inputs((32, 64), dtype=dtype)
    scale, bias = jnp.full(64, scale, jnp.float32), jnp.zeros(64, jnp.float32)
    dx, dscale, _ = gradients(ours, x, scale, bias, dy)
    exact_dx, exact_dscale, _ = gradients(formula, *wide((x, scale, bias, dy)))
    rounding = float(jnp.finfo(dtype).eps)
    assert relative_errors([dscale], [exact_dscale])[0] < 2 * rounding
    chex.assert_trees_all_close(
        dx.astype(jnp.float64), exact_dx, rtol=0.0, atol=2 * rounding * jnp.abs(exact_dx).max()
    )


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_scale_0_gives_a_negligible_output_and_can_be_trained(norm):
    x, _, _, dy = inputs((8, 16), dtype=jnp.float32)
    scale, bias = jnp.zeros(16), jnp.zeros(16)
    ours, formula = pair(norm)
    y = ours(x, scale, bias)
    assert 0 < float(jnp.abs(y).max()) < 1e-29
    chex.assert_trees_all_equal(dy + y, dy)
    dx, dscale, _ = gradients(ours, x, scale, bias, dy)
    chex.assert_trees_all_equal(dx, jnp.zeros_like(x))
    chex.assert_trees_all_close(dscale, gradients(formula, x, scale, bias, dy)[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("scale", "stated"),
    [(1e-1, 3e-7), (1e-2, 3e-6), (1e-3, 3e-5), (1e-4, 3e-4), (1e-5, 3e-3), (1e-6, 3e-2)],
)
@pytest.mark.usefixtures("float64")
def test_small_scale_with_bias_has_the_documented_error(scale, stated):
    x, _, _, dy = inputs((512, 256), dtype=jnp.float32)
    scale, bias = jnp.full(256, scale, jnp.float32), jnp.ones(256, jnp.float32)
    got = gradients(layer_norm, x, scale, bias, dy)
    dx, dscale, dbias = relative_errors(
        got, gradients(defining_formula, *wide((x, scale, bias, dy)))
    )
    assert stated / 2 < dscale < stated * 1.5
    assert dx < max(stated / 8, 1e-7)
    assert dbias < 1e-6


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-8, 1e-7])
@pytest.mark.usefixtures("float64")
def test_lost_feature_does_not_affect_the_gradients_of_others(scale):
    x, scales, biases, dy = inputs((32, 64), dtype=jnp.float32)
    scales, biases = scales.at[3].set(scale), biases.at[3].set(1.0)
    dx, dscale, dbias = gradients(layer_norm, x, scales, biases, dy)
    exact_dx, exact_dscale, exact_dbias = gradients(
        defining_formula, *wide((x, scales, biases, dy))
    )
    others = jnp.arange(64) != 3
    assert float(dscale[3]) == 0
    chex.assert_tree_all_finite(dx)
    chex.assert_trees_all_close(wide(dx)[:, others], exact_dx[:, others], atol=1e-4)
    chex.assert_trees_all_close(wide(dscale)[others], exact_dscale[others], atol=1e-3)
    chex.assert_trees_all_close(wide(dbias), exact_dbias, atol=1e-4)


@pytest.mark.usefixtures("float64")
def test_bias_in_the_next_dense_layer_is_accurate_for_small_scales():
    x, _, bias, dy = inputs((128, 64), dtype=jnp.float32)
    scale = jnp.full(64, 1e-6, jnp.float32)
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(64, 64)) / 8, jnp.float32)

    def behind(x, scale, bias):
        return layer_norm(x, scale, None) @ kernel + (bias @ kernel)[None]

    def added(x, scale, bias):
        return (layer_norm(x, scale, None) + bias[None]) @ kernel

    def formula(x, scale, bias):
        return defining_formula(x, scale, bias) @ kernel.astype(x.dtype)

    exact = gradients(formula, *wide((x, scale, bias, dy)))
    for exactly in (behind, added):
        assert max(relative_errors(gradients(exactly, x, scale, bias, dy), exact)) < 1e-5
    in_place = lambda *a: layer_norm(*a) @ kernel  # noqa: E731
    assert max(relative_errors(gradients(in_place, x, scale, bias, dy), exact)) > 1e-3


@pytest.mark.parametrize(("norm", "dtype"), [("layer", jnp.bfloat16), ("rms", jnp.float16)])
@pytest.mark.usefixtures("float64")
def test_16_bit_gradients_are_close_to_the_formula_that_saves_x(norm, dtype):
    # The formula computes in float32 from the x that was given: nothing is more accurate.
    ours, formula = pair(norm)
    x, _, bias, dy = inputs((256, 64), dtype=dtype)
    scale, bias = jnp.linspace(0.5, 2.0, 64, dtype=jnp.float32), bias / 4
    rounding = float(jnp.finfo(dtype).eps)
    y = ours(x, scale, bias)
    chex.assert_trees_all_close(y, formula(x, scale, bias), rtol=rounding, atol=8 * rounding)
    got = gradients(ours, x, scale, bias, dy)
    chex.assert_type([y, *got], [dtype, dtype, jnp.float32, jnp.float32])
    exact = gradients(formula, *wide((x, scale, bias, dy)))
    dx, dscale = relative_errors(got[:2], exact[:2])
    (plain_dx,) = relative_errors(gradients(formula, x, scale, bias, dy)[:1], exact[:1])
    assert dx < 1.25 * plain_dx
    assert dscale < 2 * rounding
    chex.assert_trees_all_close(wide(got[2]), exact[2], atol=1e-4)


@pytest.mark.usefixtures("float64")
def test_float64_inputs_are_computed_in_float64():
    x, scale, bias, dy = inputs((4, 5))
    chex.assert_type([layer_norm(x, scale, bias), rms_norm(x, scale)], jnp.float64)
    narrow = gradients(layer_norm, x, scale.astype(jnp.float32), bias.astype(jnp.float32), dy)
    chex.assert_type(narrow, [jnp.float64, jnp.float32, jnp.float32])


@pytest.mark.parametrize(("norm", "check_vma"), [("layer", True), ("rms", False)])
def test_parameter_gradients_are_summed_over_devices(norm, check_vma):
    ours, _ = pair(norm)
    x, scale, bias, _ = inputs((8, 6), dtype=jnp.float32)
    mesh = jax.make_mesh((4,), ("data",))
    sharded = jax.shard_map(
        ours, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=check_vma
    )

    def grad(f):
        return jax.jit(jax.grad(lambda *a: (f(*a) ** 3).sum(), (0, 1, 2)))

    with jax.set_mesh(mesh):
        rows = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        got = jax.device_get(grad(sharded)(rows, scale, bias))
    chex.assert_trees_all_close(got, jax.device_get(grad(ours)(x, scale, bias)), rtol=1e-4)


def test_output_without_parameters_is_normalized():
    x, _, _, _ = inputs((16, 32), dtype=jnp.float32)
    y = layer_norm(x, None, None)
    chex.assert_trees_all_close(y.mean(-1), jnp.zeros(16), atol=1e-6)
    chex.assert_trees_all_close(y.std(-1), jnp.ones(16), atol=1e-5)
    chex.assert_trees_all_close(jnp.square(rms_norm(x, None)).mean(-1), jnp.ones(16), atol=1e-5)


def test_constant_row_gives_the_bias_and_finite_gradients():
    x, _, bias, dy = inputs((4, 8), dtype=jnp.float32)
    x = jnp.full_like(x, 3.0)
    chex.assert_trees_all_close(layer_norm(x, jnp.ones(8), bias)[1], bias)
    chex.assert_tree_all_finite(gradients(layer_norm, x, jnp.ones(8), bias, dy))
    chex.assert_tree_all_finite(gradients(pair("rms")[0], x * 0, jnp.ones(8), bias, dy))


def test_empty_batch_gives_an_empty_output():
    assert layer_norm(jnp.ones((0, 3)), jnp.ones(3), jnp.zeros(3)).shape == (0, 3)


def test_scales_near_0_become_a_small_number_of_their_sign():
    floor = 2.0**-100
    scale = jnp.asarray([floor / 2, -floor / 2, 0.0, -1.0])
    expected = np.asarray([floor, -floor, floor, -1.0], np.float32)
    np.testing.assert_array_equal(invertible_scale(scale, scale), expected)
    derivative = jax.grad(lambda s: invertible_scale(s, scale).sum())(scale)
    np.testing.assert_array_equal(derivative, 1)


def temporaries_in_activations(norm, depth, width=128, rows=2048):
    """Temporaries of the compiled gradient of a stack, in units of one block's activation."""

    def loss(params, x):
        for p in params:
            z = norm(x, p["scale"], p["bias"]) @ p["kernel"] + p["offset"][None]
            x = x + jax.checkpoint(jax.nn.gelu)(z)
        return jnp.square(x).mean()

    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    block = {"scale": vector, "bias": vector, "offset": vector}
    block["kernel"] = jax.ShapeDtypeStruct((width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    options = {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting",
    }
    step = jax.jit(jax.grad(loss), compiler_options=options)
    report = step.lower([block] * depth, x).compile().memory_analysis()
    return report.temp_size_in_bytes / (4 * rows * width)


# Measured with jax 0.10.2: a block adds exactly 2 (y and the dense layer's output) where the
# formula adds 4 (layer norm) or 3 (RMS norm); six blocks need 18.0 instead of 28.1 or 22.1.
@pytest.mark.sweep(6)
@pytest.mark.parametrize(("norm", "ratio"), [("layer", 0.66), ("rms", 0.84)])
def test_stack_of_blocks_needs_fewer_temporaries_than_the_formula(norm, ratio):
    ours, formula = pair(norm)
    six_blocks = temporaries_in_activations(ours, 6)
    assert six_blocks < ratio * temporaries_in_activations(formula, 6)
    assert temporaries_in_activations(ours, 12) - six_blocks < 6 * 2.05


BAD = [
    ({"x": jnp.ones((4, 3), int)}, TypeError, "layer_norm: x must be floating, got int32"),
    ({"x": jnp.ones(())}, ValueError, r"x must have rank >= 1, got shape \(\)"),
    ({"scale": jnp.ones(4)}, ValueError, r"scale must have shape \(3,\) for x \(4, 3\), got \(4,\)"),
    ({"bias": jnp.ones((1, 3))}, ValueError, r"bias must have shape \(3,\) .* got \(1, 3\)"),
    ({"scale": jnp.ones(3, jnp.bfloat16)}, TypeError, "scale must be float32 or wider, got bfloat16"),
    ({"bias": jnp.ones(3, int)}, TypeError, "bias must be float32 or wider, got int32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_rejects_invalid_arguments(change, error, message):
    arguments = {"x": jnp.ones((4, 3)), "scale": jnp.ones(3), "bias": jnp.zeros(3)} | change
    with pytest.raises(error, match=message):
        layer_norm(**arguments)
    if "bias" not in change:
        with pytest.raises(error, match=message.replace("layer_norm", "rms_norm")):
            rms_norm(arguments["x"], arguments["scale"])


def test_layer_rejects_an_input_of_another_width():
    layer = layer_norm_layer(3)
    with pytest.raises(ValueError, match=r"scale must have shape \(4,\) .* got \(3,\)"):
        layer.apply(layer.init(jax.random.key(0))[0], {}, jnp.ones((2, 4)), train=True)
