"""Clipped sums equal a loop over examples, with the promised memory."""

import warnings

import chex
import example_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import CASES, B, Case, assert_clipped_like_a_loop, row_losses
from jax.sharding import Mesh, PartitionSpec

from fnet import layers, losses
from fnet.autodiff.per_example import ghost_norm
from fnet.autodiff.per_example.clipped import clipped_grad, gradient_strategies
from fnet.autodiff.per_example.gradients import per_example_norms
from fnet.jaxpr import find_equations
from fnet.memory import peak

LARGE = {"fnet_transformer", "flax_transformer", "flax_cnn", "convolutions"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in CASES]
)
def test_matches_a_loop_over_examples(name):
    assert_clipped_like_a_loop(CASES[name](), tolerance=0.03 if name == "views" else 2e-5)


def halves(p, x):
    """Half the squared distance. Its gradient is p - x."""
    return (p - x) ** 2 / 2


INFINITY = float("inf")
X = np.array([1.0, 4.0, 7.0], np.float32)


@pytest.mark.parametrize(
    ("clip", "how", "expected"),
    [
        *((2.5, {}, -3.5), (2.5, {"rescale_to_unit_norm": True}, -1.4), (10, {}, -6.0)),
        (1.0, {"automatic": 0.01}, 1 / 1.01 - 2 / 2.01 - 5 / 5.01),  # divides by the norm
    ],
)
def test_matches_golden_sums_of_jax_privacy(clip, how, expected):
    total, info = clipped_grad(halves, clip, **how)(jnp.float32(2), X)
    chex.assert_trees_all_close(total, jnp.float32(expected), rtol=1e-6)
    chex.assert_trees_all_close(info.norms, jnp.array([1.0, 2.0, 5.0]))


def test_scalars_and_the_batch_size_in_a_loss():
    """The batch size is 1 for each example, and a parameter may be the loss itself."""
    for loss, params, sum_of_grads, norms in (
        (lambda p, x: p * x / len(x), 2.0, 12, X),
        (lambda p, x: p[0] * x, jnp.ones(1), [12], X),
        (lambda p, x: jnp.full(len(x), p), jnp.float32(2), 3, [1, 1, 1]),
    ):
        for width in (None, 1):
            total, info = clipped_grad(loss, INFINITY, width=width)(params, X)
            np.testing.assert_allclose(total, sum_of_grads, rtol=1e-6)
            np.testing.assert_allclose(info.norms, norms, rtol=1e-6)


def test_class_tokens_may_be_tiled_over_the_batch():
    length = 2

    def loss(token, x):
        tiled = jnp.tile(token, (len(x), 1)).reshape(len(x), length, 2)
        return row_losses(jnp.concatenate([tiled, x], 1))

    batch = (example_losses.normal(1, B, 3, 2),)
    assert_clipped_like_a_loop(Case(loss, jnp.ones((length, 2)), batch), INFINITY)


def test_masked_examples_contribute_zero():
    gradient = clipped_grad(halves, 2.5, rescale_to_unit_norm=True)
    total, info = gradient(jnp.float32(2), X, mask=np.array([True, False, False]))
    chex.assert_trees_all_close(total, jnp.float32(0.4))
    chex.assert_trees_all_close(info.norms, jnp.array([1.0, 0.0, 0.0]))
    total, _ = gradient(jnp.float32(2), X, mask=np.zeros(3, bool))
    assert total == 0


def linear(p, gradients):
    """A loss whose per-example gradients are the second argument."""
    return sum((p[name] * gradients[name]).sum(-1) for name in p)


def test_clip_of_zero_normalizes_if_rescaled():
    p = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    g = {"a": np.array([[3.0, 0.0]]), "b": np.array([[0.0, 4.0]])}
    total, _ = clipped_grad(linear, 0, rescale_to_unit_norm=True)(p, g)
    expected = {"a": jnp.array([0.6, 0.0]), "b": jnp.array([0.0, 0.8])}
    chex.assert_trees_all_close(total, expected)
    zero = jax.tree.map(np.zeros_like, g)
    total, _ = clipped_grad(linear, 0, rescale_to_unit_norm=True)(p, zero)
    chex.assert_trees_all_equal(total, p)


@pytest.mark.parametrize(("rescale", "none", "infinite"), [(False, 0, 1 - 2 - 5), (True, -1, 0)])
def test_extreme_clips_as_in_jax_privacy(rescale, none, infinite):
    clipped = jax.jit(clipped_grad(halves, 1.0, rescale_to_unit_norm=rescale))
    for clip, expected in ((0.0, none), (-1.0, none), (jnp.nan, none), (INFINITY, infinite)):
        assert clipped(jnp.float32(2), X, clip=clip)[0] == pytest.approx(expected, rel=1e-6)


def test_per_layer_clips_each_group_to_its_bound():
    p = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    g = {"a": np.array([[3.0, 4.0]]), "b": np.array([[0.0, 10.0]])}
    total, info = clipped_grad(linear, {"a": 1, "b": 15}, per_layer=True)(p, g)
    expected = {"a": jnp.array([0.6, 0.8]), "b": jnp.array([0.0, 10.0])}
    chex.assert_trees_all_close(total, expected)
    norms = {"a": jnp.array([5.0]), "b": jnp.array([10.0])}
    chex.assert_trees_all_close(info.norms_per_layer, norms)
    scales = {"a": jnp.array([0.2]), "b": jnp.array([1.0])}
    chex.assert_trees_all_close(info.scales, scales)
    total, info = clipped_grad(linear, 2**0.5, per_layer=True)(p, g, mask=np.zeros(1))
    chex.assert_trees_all_equal(
        (total, info.norms_per_layer), (p, jax.tree.map(jnp.zeros_like, norms))
    )
    total, _ = clipped_grad(linear, 2**0.5, per_layer=True)(p, g)
    expected = {"a": jnp.array([0.6, 0.8]), "b": jnp.array([0.0, 1.0])}
    chex.assert_trees_all_close(total, expected)


def test_per_layer_groups_may_hold_several_arrays():
    p = {"layer": {"w": jnp.zeros(2), "b": jnp.zeros(2)}, "head": jnp.zeros(1)}
    g = {
        "layer": {"w": np.array([[3.0, 0.0]]), "b": np.array([[0.0, 4.0]])},
        "head": np.ones((1, 1)),
    }

    def loss(p, g):
        return linear(p["layer"], g["layer"]) + (p["head"] * g["head"]).sum(-1)

    total, info = clipped_grad(loss, {"layer": 2.5, "head": 2.0}, per_layer=True)(p, g)
    expected = {
        "layer": {"w": jnp.array([1.5, 0.0]), "b": jnp.array([0.0, 2.0])},
        "head": jnp.ones(1),
    }
    chex.assert_trees_all_close(total, expected)
    norms = {"layer": jnp.array([5.0]), "head": jnp.array([1.0])}
    chex.assert_trees_all_close(info.norms_per_layer, norms)


SENSITIVITIES = {
    "global": (3.0, {}, 3.0),
    "global, rescaled": (3.0, {"rescale_to_unit_norm": True}, 1.0),
    "automatic": (3.0, {"automatic": 0.01}, 3.0),
    "number per layer": (3.0, {"per_layer": True}, 3.0),
    "number per layer, rescaled": (3.0, {"per_layer": True, "rescale_to_unit_norm": True}, 1.0),
    "tree": ({"a": 3.0, "b": 4.0}, {"per_layer": True}, 5.0),
    "tree, rescaled": ({"a": 3.0, "b": 4.0}, {"per_layer": True, "rescale_to_unit_norm": True}, 2**0.5),
    "tree, automatic": (
        {"a": 3.0, "b": 4.0}, {"per_layer": True, "rescale_to_unit_norm": True, "automatic": 0.01}, 2**0.5
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SENSITIVITIES)
def test_sensitivity_is_the_norm_of_a_large_example(name):
    clip, how, expected = SENSITIVITIES[name]
    p = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    g = {"a": np.full((1, 3), 1e4, np.float32), "b": np.full((1, 2), -1e5, np.float32)}
    gradient = clipped_grad(linear, clip, **how)
    total, _ = gradient(p, g)
    np.testing.assert_allclose(gradient.sensitivity(), expected, rtol=1e-12)
    np.testing.assert_allclose(optax.tree.norm(total), expected, rtol=1e-5)


def test_sensitivity_knows_the_relations_of_dp_accounting():
    relations = pytest.importorskip("dp_accounting").NeighboringRelation
    sensitivity = clipped_grad(halves, 0.5).sensitivity
    assert sensitivity(relations.ADD_OR_REMOVE_ONE) == sensitivity(relations.REPLACE_SPECIAL) == 0.5
    assert sensitivity(relations.REPLACE_ONE) == sensitivity("REPLACE_ONE") == 1.0


def test_norm_is_zero_if_rounding_makes_its_square_negative():
    # In float32, a^2 + b^2 - 2ab is -2^-23 if each product is rounded.
    a, b = 1 + 3547 / 2**23, 1 + 3548 / 2**23
    x = jnp.zeros((2, 2, 8)).at[:, :, 0].set(1)
    cotangent = jnp.zeros((2, 2, 8)).at[:, 0, 0].set(a).at[:, 1, 0].set(-b)

    def loss(w, x, cotangent):
        return ((x @ w) * cotangent).sum((1, 2))

    assert gradient_strategies(loss, jnp.zeros((8, 8)), x, cotangent) == "ghost norm"
    gradient = jax.jit(clipped_grad(loss, 1.0, automatic=0.01))
    total, info = gradient(jnp.zeros((8, 8)), x, cotangent)
    chex.assert_trees_all_close(info.norms, jnp.zeros(2), atol=1e-3)
    chex.assert_tree_all_finite((total, info.scales))


def test_terms_that_are_too_large_to_square_may_cancel():
    """Two terms of norm 2^63: the square of their sum is infinite in float32, that of 2^57 is not."""
    x = 2.0**30 * jnp.ones((2, 2, 8))
    cotangent = 2.0**30 * jnp.ones((2, 2, 8)).at[:, 1].set(-(1 + 2.0**-6))

    def loss(w, x, cotangent):
        return ((x @ w) * cotangent).sum((1, 2))

    assert gradient_strategies(loss, jnp.zeros((8, 8)), x, cotangent) == "ghost norm"
    total, info = jax.jit(clipped_grad(loss, 1.0))(jnp.zeros((8, 8)), x, cotangent)
    chex.assert_trees_all_close(info.norms, jnp.full(2, 2.0**57), rtol=1e-3)
    chex.assert_trees_all_close(total, jnp.full((8, 8), -2 / 8), rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "bad"), [("dense_over_sequence", jnp.inf), ("causal_convolution", jnp.nan)]
)
def test_nonfinite_examples_contribute_zero_and_are_counted(name, bad):
    case = CASES[name]()
    gradient = jax.jit(clipped_grad(case.loss, 1.0))
    (x,), mask = case.batch, np.arange(B)
    total, info = gradient(case.params, x.at[2].set(bad), mask=mask >= 0)
    expected, _ = gradient(case.params, x, mask=mask != 2)
    chex.assert_tree_all_finite(total)
    chex.assert_trees_all_close(total, expected, rtol=1e-5, atol=1e-6)
    assert info.nonfinite == 1


def test_examples_whose_loss_alone_is_not_finite_contribute_zero_and_are_counted():
    def loss(w, x, label):  # its gradient is finite for a label out of range
        return losses.cross_entropy(x @ w, label)

    x, label = jax.random.normal(jax.random.key(0), (4, 5)), jnp.array([0, 7, 2, 1])
    gradient = jax.jit(clipped_grad(loss, 1.0))
    total, info = gradient(jnp.ones((5, 3)), x, label)
    expected, _ = gradient(jnp.ones((5, 3)), x, label % 3, mask=label < 3)
    chex.assert_trees_all_close(total, expected, rtol=1e-6)
    assert jnp.isnan(info.losses[1])
    assert (info.nonfinite, info.scales[1]) == (1, 0)
    assert jnp.isnan(info.norms[1])


@pytest.mark.usefixtures("allow_key_reuse")
@pytest.mark.parametrize(("name", "size"), [("tied_embedding", 0), ("dense", 1), ("dropout", 0)])
def test_batches_of_zero_and_one_examples(name, size):
    case = CASES[name]()
    batch = [a[:size] if a.ndim else a for a in case.batch]
    total, info = jax.jit(clipped_grad(case.loss, INFINITY))(case.params, *batch)
    expected = jax.jit(jax.grad(lambda p: case.loss(p, *batch).sum()))(case.params)
    chex.assert_shape(info.norms, (size,))
    chex.assert_trees_all_close(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("times", "width"), [(0, 2), (3, 0)], ids=["no time steps", "empty parameter"]
)
def test_empty_arrays_do_not_contribute_to_norms(times, width):
    def loss(p, x):
        h = x[..., :width] @ p["w"] + p["b"]
        return (p["c"] * x[:, :1, 0].sum(1)) + row_losses(h)

    p = {"w": jnp.ones((width, 2)), "b": jnp.ones(2), "c": jnp.float32(1)}
    x = jax.random.normal(jax.random.key(0), (B, times, 4))
    total, info = jax.jit(clipped_grad(loss, INFINITY))(p, x)
    chex.assert_trees_all_close(total, jax.grad(lambda p: loss(p, x).sum())(p), rtol=1e-5)
    chex.assert_shape(info.norms, (B,))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int16])
def test_narrow_indices_into_a_longer_table(dtype):
    table, indices = jnp.ones((65_600, 1)), jnp.array([[3, 120], [7, 7]], dtype)
    total, info = jax.jit(clipped_grad(lambda p, t: row_losses(jnp.take(p, t, 0)), INFINITY))(
        table, indices
    )
    wide = indices.astype(jnp.int32)
    expected = jax.grad(lambda p: row_losses(jnp.take(p, wide, 0)).sum())(table)
    chex.assert_trees_all_close(total, expected, rtol=1e-6)
    once = float(expected[3, 0])  # An index that occurs twice in an example counts twice.
    chex.assert_trees_all_close(info.norms, once * jnp.array([2**0.5, 2.0]), rtol=1e-6)


def test_gram_matrices_use_the_highest_precision():
    def loss(w, x):
        return row_losses(jnp.tanh(x @ w))

    norms = per_example_norms(loss)
    traced = jax.make_jaxpr(norms)(jnp.ones((64, 64)), jnp.ones((B, 2, 64)))
    assert str(traced).count("HIGHEST") == 4  # Both operands of two products.


def test_mlp_takes_at_most_the_memory_of_a_plain_gradient():
    model = layers.mlp([784, 512, 512, 10])
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((256, 784), jnp.float32)
    y = jax.ShapeDtypeStruct((256,), jnp.int32)

    def loss(p, x, y):
        logits = model.apply(p, {}, x, train=True)[0]
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)

    def temporaries(f):
        return peak(jax.jit(f).lower(params, x, y).compile()).temporaries

    plain = temporaries(jax.grad(lambda *args: loss(*args).mean()))
    assert temporaries(lambda *args: clipped_grad(loss, 1.0)(*args)) <= 1.1 * plain


@pytest.mark.usefixtures("float64")
def test_float64_is_accurate_to_all_digits():
    case = CASES["dense_over_sequence"]()
    params, batch = jax.tree.map(jnp.float64, (case.params, case.batch))
    assert_clipped_like_a_loop(Case(case.loss, params, batch), tolerance=1e-11)


@pytest.mark.parametrize(
    ("dtype", "size", "value"), [(jnp.bfloat16, 257, 1.0), (jnp.float16, 64, 2048.0)]
)
def test_convolution_sums_are_accumulated_in_float32(dtype, size, value):
    def loss(w, x):
        y = jax.lax.conv_general_dilated(
            x, w.astype(x.dtype), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y.astype(jnp.float32).sum((1, 2, 3))

    x = jnp.full((size, 1, 1, 1), value, dtype)
    total, info = jax.jit(clipped_grad(loss, value))(jnp.ones((1, 1, 1, 1)), x)
    assert info.nonfinite == 0
    assert float(total[0, 0, 0, 0]) == size * value  # In bfloat16, 256 + 1 = 256.


def test_scales_beyond_the_range_of_float16():
    def loss(w, x):
        return ((x @ w.astype(x.dtype)) * x[:, :1]).sum(1)

    x = jnp.tile(jnp.array([[0.005], [0.004]], jnp.float16), (1, 64))
    w = jnp.zeros((64, 64))
    clipped, _ = jax.jit(clipped_grad(loss, 1e-8))(w, x)
    unit, _ = jax.jit(clipped_grad(loss, 0.0, rescale_to_unit_norm=True))(w, x * 1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(clipped), 2e-8, rtol=1e-3)
    np.testing.assert_allclose(jnp.linalg.norm(unit), 2, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "check_vma"), [("dense_over_sequence", True), ("nonlinear_uses", False)]
)
def test_inside_shard_map_examples_of_all_devices_stay_apart(name, check_vma, monkeypatch):
    monkeypatch.setattr(ghost_norm, "_MIN_BYTES", 1)  # A few examples at a time.
    case = CASES[name]()
    mesh = Mesh(jax.devices()[:2], ("data",))

    def sharded(params, *batch):
        return jax.lax.psum(clipped_grad(case.loss, 0.5, width=1)(params, *batch)[0], "data")

    data = PartitionSpec("data")
    gradient = jax.shard_map(
        sharded, mesh=mesh, in_specs=(PartitionSpec(), *[data for _ in case.batch]),
        out_specs=PartitionSpec(), check_vma=check_vma,
    )  # fmt: skip
    expected, _ = jax.jit(clipped_grad(case.loss, 0.5))(case.params, *case.batch)
    chex.assert_trees_all_close(
        jax.jit(gradient)(case.params, *case.batch), expected, rtol=1e-5, atol=1e-6
    )


def tensor_parallel(body, check_vma):
    """A loss whose hidden features are split over two devices; they have all examples."""
    mesh, features = Mesh(jax.devices()[:2], ("model",)), PartitionSpec(None, "model")
    specs = features, PartitionSpec("model"), PartitionSpec()
    layer = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
    )
    return lambda p, x: jnp.square(layer(p["w"], p["v"], x)).sum(-1)


def test_devices_inside_the_loss_may_have_all_examples():
    def body(w, v, x):
        scale = 1.0 + jax.lax.axis_index("model")
        return jax.lax.psum(scale * jnp.tanh(x @ w) @ v, "model") - jax.lax.pmax(x, "model")

    batch = (example_losses.normal(9, B, 4),)
    case = Case(tensor_parallel(body, True), example_losses.tree(w=(4, 6), v=(6, 4)), batch)
    with warnings.catch_warnings(action="error"):  # It is proven that examples stay apart.
        assert_clipped_like_a_loop(case)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (lambda h: h - h.mean(0), "mixes the examples .*reduce_sum"),
        (lambda h: h - jax.lax.psum(h, "model")[::-1], "mixes the examples .*rev"),
        (lambda h: h * jnp.arange(1.0, B + 1)[:, None], "depends on its position"),
        (
            lambda h: h + jax.lax.psum(jnp.arange(B), "model").astype(h.dtype)[:, None],
            "depends on its position",
        ),
    ],
)
def test_devices_inside_the_loss_must_keep_examples_apart(body, match):
    loss = tensor_parallel(lambda w, v, x: jax.lax.psum(body(x @ w) @ v, "model"), False)
    p, x = example_losses.tree(w=(4, 6), v=(6, 4)), example_losses.normal(9, B, 4)
    with pytest.raises(ValueError, match=match):
        jax.jit(clipped_grad(loss, 1.0))(p, x)


def test_custom_rules_inside_shard_map_with_check_vma_are_unknown():
    def body(w, v, x):
        return jax.lax.psum(jax.nn.relu(x @ w) @ v, "model")

    p, x = example_losses.tree(w=(4, 6), v=(6, 4)), example_losses.normal(9, B, 4)
    with pytest.raises(ValueError, match=r"not known whether custom_jvp_call .* check_vma=False"):
        jax.jit(clipped_grad(tensor_parallel(body, True), 1.0))(p, x)
    jax.jit(clipped_grad(tensor_parallel(body, False), 1.0))(p, x)


def test_a_loss_that_splits_the_batch_over_devices_names_the_fix():
    mesh = Mesh(jax.devices()[:2], ("data",))
    spec = PartitionSpec("data")

    def loss(w, x):
        return jax.shard_map(lambda x: x**2, mesh=mesh, in_specs=spec, out_specs=spec)(x) * w

    with pytest.raises(ValueError, match=r"test_clipped.*splits the batch over devices"):
        clipped_grad(loss, 1.0)(jnp.float32(1), jnp.ones(4))


def test_a_loss_that_communicates_with_other_devices_is_refused():
    mesh = Mesh(jax.devices()[:2], ("data",))

    def loss(w, x):
        return (x * w - jax.lax.pmean(x * w, "data")) ** 2

    gradient = jax.shard_map(
        lambda w, x: jax.lax.psum(clipped_grad(loss, 1.0)(w, x)[0], "data"),
        mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="communicates over the mesh axis 'data'"):
        jax.jit(gradient)(jnp.float32(1), jnp.ones(4))


def test_a_loss_that_closes_over_a_mutable_array_is_refused():
    ref = jax.new_ref(jnp.float32(1))
    with pytest.raises(ValueError, match=r"side effects .*Read mutable arrays \(jax.new_ref\)"):
        clipped_grad(lambda w, x: x * w * ref[...], 1.0)(jnp.float32(1), jnp.ones(4))


def test_complex_parameters_have_the_gradients_of_jax_grad():
    w = example_losses.normal(0, 4, 3) + 1j * example_losses.normal(1, 4, 3)

    def loss(p, x):
        return (jnp.abs(x @ p["w"]) ** 2 @ p["v"]).real

    case = Case(loss, {"w": w, "v": jnp.arange(3.0)}, (example_losses.normal(2, B, 4),))
    assert_clipped_like_a_loop(case)
    # A number bounds each array by an equal share, real and imaginary part together.
    assert_clipped_like_a_loop(case, per_layer=True)


def test_cloned_keys_are_batched():
    def losses(w, x, key):
        mask = jax.random.bernoulli(jax.random.clone(key), 0.5, x.shape)
        return jnp.square((x * mask) @ w)

    gradient = jax.make_jaxpr(clipped_grad(losses, 1.0))
    jaxpr = gradient(jnp.ones(3), jnp.ones((8, 3)), jax.random.key(0))
    assert not list(find_equations(jaxpr, "scan"))
