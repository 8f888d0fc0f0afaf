"""Quantized weights: codes and scales against numpy, bytes, layouts, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fnet import represented
from fnet.quantization import (
    BLOCK,
    NF4_LEVELS,
    Quantized,
    dequantize,
    is_quantized,
    leaves_with_paths,
    map_with_paths,
    quantize,
    report,
)


def weights(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def nf4_oracle(matrix, scales):
    """The nearest level of each element [in, out], by a search over all of them."""
    levels = np.array(NF4_LEVELS, np.float32)
    restored = np.empty_like(matrix)
    for start in range(0, len(matrix), BLOCK):
        block = matrix[start : start + BLOCK]
        scale = scales[start // BLOCK]
        relative = block / np.where(scale == 0, 1, scale)
        nearest = np.abs(relative[..., None] - levels).argmin(-1)
        restored[start : start + BLOCK] = levels[nearest] * scale
    return restored


def test_nf4_levels_are_those_of_the_paper():
    # Quantiles of a normal distribution, 8 below zero and 9 from zero on, scaled to [-1, 1].
    offset = 0.9677083
    above = stats.norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    below = -stats.norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, [0], below]))
    np.testing.assert_allclose(NF4_LEVELS, levels / levels.max(), atol=1e-6)


def test_nf4_takes_the_nearest_level_of_each_block():
    rows = 70
    matrix = weights(rows, 5)
    matrix[:, 1] = 0
    leaf = quantize({"kernel": matrix}, "nf4", scale_dtype=jnp.float32)["kernel"]
    padded = np.pad(matrix, ((0, -rows % BLOCK), (0, 0)))
    scales = np.abs(padded.reshape(-1, BLOCK, 5)).max(1)
    np.testing.assert_array_equal(leaf.scales, scales)
    restored = leaf.dequantize()
    assert restored.shape == matrix.shape
    np.testing.assert_allclose(restored, nf4_oracle(matrix, scales), atol=1e-6)
    bound = 0.152 * np.repeat(scales, BLOCK, 0)[:rows]
    assert (np.abs(restored - matrix) <= bound).all()


def test_int8_rounds_to_the_scale_of_the_output():
    matrix = weights(40, 5)
    matrix[:, 1] = 0
    leaf = quantize({"kernel": matrix}, "int8", scale_dtype=jnp.float32)["kernel"]
    scales = np.abs(matrix).max(0) / np.float32(127)
    np.testing.assert_allclose(leaf.scales, scales, rtol=1e-6)
    assert leaf.codes.dtype == jnp.int8
    error = np.abs(leaf.dequantize() - matrix)
    assert (error <= scales * 0.5001).all()
    assert (error[:, 0] > 0).any()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_codes_make_up_for_the_rounding_of_scales(kind):
    matrix = weights(256, 64)
    errors = {
        dtype: np.linalg.norm(
            dequantize(quantize({"kernel": matrix}, kind, scale_dtype=dtype))["kernel"] - matrix
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    }
    assert errors[jnp.bfloat16] < 1.05 * errors[jnp.float32]


@pytest.mark.parametrize(
    ("kind", "layout", "shape", "order"),
    [
        ("nf4", "oi", (6, 64), (1, 0)),
        ("int8", "ioo", (64, 2, 3), (0, 1, 2)),
        ("int8", "oii", (6, 8, 16), (1, 2, 0)),
        ("nf4", "iiio", (3, 3, 8, 6), (0, 1, 2, 3)),
    ],
)
def test_a_layout_quantizes_the_matrix_of_inputs_and_outputs(kind, layout, shape, order):
    weight = weights(*shape)
    leaf = quantize({"w": weight}, kind, {"w": layout})["w"]
    n_out = np.prod([n for n, role in zip(shape, layout, strict=True) if role == "o"])
    matrix = weight.transpose(order).reshape(-1, n_out)
    plain = quantize({"w": matrix}, kind, {"w": "io"})["w"]
    np.testing.assert_array_equal(leaf.codes, plain.codes)
    assert leaf.shape == shape
    restored = np.asarray(leaf.dequantize()).transpose(order).reshape(-1, n_out)
    np.testing.assert_array_equal(restored, plain.dequantize())


@dataclasses.dataclass
class Holder:
    value: object


jax.tree_util.register_dataclass(Holder, ["value"], [])


def test_a_path_joins_keys_and_a_variable_has_the_path_of_its_array():
    for tree, paths in (
        ({"a": {"b": 1, "c": (2, 3)}}, ["a/b", "a/c/0", "a/c/1"]),
        ({"a": Holder(1)}, ["a"]),  # as a variable of nnx
        (Holder(1), ["value"]),
        (Holder({"value": 1}), ["value/value"]),
        (1, [""]),
    ):
        assert [path for path, _ in leaves_with_paths(tree)] == paths
        assert jax.tree.leaves(map_with_paths(lambda path, leaf: path, tree)) == paths


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_stacked_layers_are_quantized_one_by_one(kind):
    weight = weights(3, 64, 4)
    leaf = quantize({"kernel": weight}, kind)["kernel"]
    one = jax.tree.map(lambda a: a[1], leaf)
    assert isinstance(one, Quantized)
    assert one.shape == (64, 4)
    alone = quantize({"kernel": weight[1]}, kind)["kernel"]
    np.testing.assert_array_equal(one.dequantize(), alone.dequantize())


def test_bfloat16_weights_come_back_in_bfloat16():
    params = {"kernel": jnp.asarray(weights(64, 4), jnp.bfloat16)}
    assert dequantize(quantize(params, "nf4"))["kernel"].dtype == jnp.bfloat16


def test_only_targets_are_quantized():
    params = {"a": {"kernel": weights(64, 2), "bias": weights(2)}, "b": {"kernel": weights(64, 2)}}
    quantized = quantize(params, "nf4", ["a/*kernel"])
    found = {path: is_quantized(leaf) for path, leaf in leaves_with_paths(quantized)}
    assert found == {"a/kernel": True, "a/bias": False, "b/kernel": False}
    without = quantize(params, "nf4", ["*/kernel", "!b/*", "!none"])
    assert {p: is_quantized(leaf) for p, leaf in leaves_with_paths(without)} == found
    assert quantized["b"]["kernel"] is params["b"]["kernel"]


def test_quantize_works_on_shapes():
    params = {"kernel": jax.ShapeDtypeStruct((128, 32), jnp.float32)}
    leaf = jax.eval_shape(lambda p: quantize(p, "nf4"), params)["kernel"]
    assert (leaf.codes.shape, leaf.scales.shape) == ((64, 32), (2, 32))


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8 + 16 / 256), ("nf4", 4.25)])
def test_report_counts_bytes_and_errors(kind, bits):
    params = {"kernel": weights(256, 64), "bias": weights(64)}
    quantized = quantize(params, kind)
    result = report(params, quantized)
    (weight,) = result.weights.values()
    assert weight.bytes_before == 4 * 256 * 64
    assert weight.bytes_after == bits / 8 * 256 * 64
    assert result.total.bytes_after == weight.bytes_after + 4 * 64
    difference = dequantize(quantized)["kernel"] - params["kernel"]
    relative = np.linalg.norm(difference) / np.linalg.norm(params["kernel"])
    np.testing.assert_allclose([weight.error, result.total.error], relative, rtol=1e-4)


def test_report_rejects_other_trees():
    with pytest.raises(ValueError, match=r"same paths, differ in \['b'\]"):
        report({"a": weights(2, 2)}, {"a": weights(2, 2), "b": weights(2, 2)})


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_function_computes_with_quantized_weights(kind):
    params = {"kernel": weights(64, 6), "embedding": weights(64, 6, seed=1)}
    quantized = quantize(params, kind, ["*"])

    def apply(params, x, rows, *, double):
        table = params["embedding"]
        y = x @ params["kernel"] + table[rows] + (x @ params["kernel"]) @ table.T @ table
        return 2 * y if double else y

    x, rows = jnp.asarray(weights(3, 64)), jnp.array([0, 5, 63])
    wrapped = jax.jit(represented.wrap(apply), static_argnames="double")
    expected = apply(dequantize(quantized), x, rows, double=True)
    np.testing.assert_allclose(wrapped(quantized, x, rows, double=True), expected, rtol=2e-5)


def test_the_backward_pass_saves_codes_only():
    quantized = quantize({"w": weights(64, 64), "v": weights(64, 64)}, "nf4", ["*"])

    def loss(x, params):
        return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["v"]).sum()

    x = jnp.ones((2, 64))
    _, vjp = jax.vjp(lambda x: represented.wrap(loss)(x, quantized), x)
    saved = [leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.float32]
    assert (64, 64) not in saved
    assert (2, 64) in saved


def test_rejects():
    for arguments, error, message in (
        (("int4",), ValueError, r"kind must be one of \['int8', 'nf4'\], got 'int4'"),
        (("nf4", "*kernel"), TypeError, "targets must be a sequence of patterns, got '"),
        (("nf4", ["*kernels"]), ValueError, r"no parameter matches \['\*kernels'\]; the paths are"),
        (("nf4", ["bias"]), ValueError, "'bias' has 1 axes, got the layout ''; give its pattern"),
        (("nf4", {"kernel": "ioo"}), ValueError, "'kernel' has 2 axes, got the layout 'ioo'"),
        (("nf4", {"kernel": "ii"}), ValueError, "'kernel' has 2 axes, got the layout 'ii'"),
        (("nf4", ["steps"]), TypeError, "'steps' must be a floating weight, got int32"),
    ):
        params = {
            "kernel": weights(64, 2),
            "bias": weights(2),
            "steps": jnp.zeros((2, 2), jnp.int32),
        }
        with pytest.raises(error, match=message):
            quantize(params, *arguments)


def test_rejects_weights_that_are_quantized():
    quantized = quantize({"kernel": weights(64, 2)}, "nf4")
    with pytest.raises(TypeError, match="'kernel' is already quantized"):
        quantize(quantized, "nf4")
