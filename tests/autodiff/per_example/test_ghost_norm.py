"""Norms of gradients whose terms cancel: an example contributes at most the clip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet.autodiff.per_example import ghost_norm
from fnet.autodiff.per_example.clipped import clipped_grad, gradient_strategies
from fnet.cpu.tracing import traced_for


def dense(p, u, v):
    """A loss whose gradient of example b is sum_t u_bt v_bt^T."""
    return ((u @ p) * v).sum((1, 2))


def outer_products(u, v):
    return np.einsum("btr,btc->brc", np.float64(u), np.float64(v))


def float32(a):
    return np.asarray(a, np.float32)


def alternating(time, gap):
    return np.where(np.arange(time) % 2, -(1 + gap), 1)[:, None]


def equal_pair(rng, time, rows, cols, gap):
    u = 255 * rng.integers(0, 2, (1, rows))
    return np.repeat(u, time, 0), rng.normal(size=(1, cols)) * alternating(time, gap)


def almost_equal_steps(rng, time, rows, cols, gap):
    u = rng.normal(size=(1, rows)) + gap * rng.normal(size=(time, rows))
    return u, (rng.normal(size=(1, cols)) + gap * rng.normal(size=(time, cols))) * alternating(
        time, 0
    )


def constant_vectors(rng, time, rows, cols, gap):
    u = rng.uniform(1, 2) * np.ones((time, rows)) * (1 + gap * rng.normal(size=(time, 1)))
    return u, rng.uniform(1, 2) * np.ones((1, cols)) * alternating(time, gap)


def halves_of_the_sequence(rng, time, rows, cols, gap):
    sign = np.where(np.arange(time) < time // 2, 1, -(1 + gap))[:, None]
    return np.full((time, rows), 0.1), np.full((1, cols), 0.1) * sign


def large_and_tiny_elements(rng, time, rows, cols, gap):
    """Inner products of 1 and many numbers of half a unit in its last place: worst rounding."""
    u = np.full((time, rows), 2.0**-12 * (1 + 1e-3 * rng.normal(size=(time, 1))))
    u[:, 0] = 1
    v = np.full((time, cols), 2.0**-12) * alternating(time, gap)
    v[:, 0] = alternating(time, gap)[:, 0]
    return u, v


def perpendicular_pairs(rng, time, rows, cols, gap):
    u = np.repeat(rng.normal(size=(-(-time // 2), rows)), 2, 0)[:time]
    v = np.repeat(rng.normal(size=(-(-time // 2), cols)), 2, 0)[:time]
    return u, v * alternating(time, gap)


def wide_range_of_lengths(rng, time, rows, cols, gap):
    u, v = perpendicular_pairs(rng, time, rows, cols, gap)
    lengths = np.repeat(10.0 ** rng.uniform(-3, 3, (-(-time // 2), 1)), 2, 0)[:time]
    return u * lengths, v * lengths


SEQUENCES = (
    equal_pair, almost_equal_steps, constant_vectors, halves_of_the_sequence,
    large_and_tiny_elements, perpendicular_pairs, wide_range_of_lengths,
)  # fmt: skip


def contributions(loss, params, batch, clip, **how):
    """What the sum loses if one example is masked, for each example in float64."""
    gradient = jax.jit(clipped_grad(loss, clip, **how))
    size = len(batch[0])

    def total(mask):
        sums, _ = gradient(params, *batch, mask=mask)
        return np.concatenate([np.ravel(np.float64(a)) for a in jax.tree.leaves(sums)])

    everything = total(np.ones(size, bool))
    return np.stack([everything - total(np.arange(size) != b) for b in range(size)])


def check_clipped(loss, params, batch, grads):
    """Each example contributes its clipped gradient, and at most 1.001 times the clip."""
    grads = np.float64(grads).reshape(len(grads), -1)
    norms = np.linalg.norm(grads, axis=1)
    for clip in (norms.min() / 2, norms.min() / 1e4):
        parts = contributions(loss, params, batch, clip)
        assert np.linalg.norm(parts, axis=1).max() <= 1.001 * clip
        expected = grads * np.minimum(1, clip / norms)[:, None]
        # Where terms cancel, the norm may be overestimated by 0.2 %.
        assert np.linalg.norm(parts - expected, axis=1).max() <= 0.003 * clip


def sequences(time, rows, cols):
    rng = np.random.default_rng(0)
    pairs = [
        sequence(rng, time, rows, cols, gap)
        for sequence in SEQUENCES
        for gap in (1e-1, 1e-2, 1e-3, 1e-4)
    ]
    return tuple(float32(np.stack(a)) for a in zip(*pairs, strict=True))


@pytest.mark.sweep(9)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 784, 32),
        (3, 40, 40),
        (8, 300, 70),
        pytest.param((64, 256, 200), marks=pytest.mark.slow),
        (128, 96, 400),
        (64, 24, 24),
    ],
    ids=str,
)
def test_cancelling_sequences_are_clipped(shape):
    u, v = sequences(*shape)
    check_clipped(dense, jnp.zeros(shape[1:]), (u, v), outer_products(u, v))


def test_cancelling_sequences_of_heads_are_clipped():
    u, v = sequences(4, 32, 24)
    u, v = (np.stack([a, a[::-1]], 2) for a in (u, v))  # [batch, time, heads, n]

    def loss(p, u, v):
        return (jnp.einsum("bthr,hrc->bthc", u, p) * v).sum((1, 2, 3))

    grads = np.einsum("bthr,bthc->bhrc", np.float64(u), np.float64(v))
    check_clipped(loss, jnp.zeros((2, 32, 24)), (u, v), grads)


def two_uses(p, u, v):
    return ((u[:, 0] @ p) * v[:, 0] + (u[:, 1] @ p) * v[:, 1]).sum(1)


def steps_of_a_scan(p, u, v):
    def step(total, uv):
        return total + ((uv[0] @ p) * uv[1]).sum(1), None

    return lax.scan(step, jnp.zeros(len(u)), (u.swapaxes(0, 1), v.swapaxes(0, 1)))[0]


@pytest.mark.parametrize(("loss", "time"), [(two_uses, 2), (steps_of_a_scan, 8)])
def test_cancelling_uses_and_steps_are_clipped(loss, time):
    u, v = sequences(time, 64, 48)
    check_clipped(loss, jnp.zeros((64, 48)), (u, v), outer_products(u, v))


def test_cancelling_uses_in_different_equations_are_clipped():
    rng = np.random.default_rng(0)
    v = float32(rng.normal(size=(4, 1, 32)) * np.array([1, -1.001])[:, None])
    tokens = np.arange(4)

    def loss(p, tokens, u, v):
        return (p[tokens] * v[:, 0]).sum(1) + ((u @ p) * v[:, 1]).sum(1)

    u = float32(np.eye(24)[tokens])
    grads = np.einsum("br,btc->brc", np.float64(u), np.float64(v))
    check_clipped(loss, jnp.zeros((24, 32)), (tokens, u, v), grads)


def test_cancelling_sequences_in_checkpoints_are_clipped():
    u, v = sequences(2, 64, 48)

    def loss(p, u, v):
        return jax.checkpoint(dense)(p["w"], u, v) + p["bias"]

    p = {"w": jnp.zeros((64, 48)), "bias": jnp.zeros(())}
    assert gradient_strategies(loss, p, u, v)["w"] == "rematerialized"
    norms = np.linalg.norm(outer_products(u, v).reshape(len(u), -1), axis=1)
    for clip in (norms.min() / 2, norms.min() / 1e4):
        parts = contributions(loss, p, (u, v), clip)
        assert np.linalg.norm(parts, axis=1).max() <= 1.001 * clip


def test_cancelling_sequences_of_concatenated_kernels_are_clipped():
    u, v = sequences(2, 64, 48)

    def loss(p, u, v):
        return dense(jnp.concatenate([p["a"], p["b"]], 1), u, v)

    p = {"a": jnp.zeros((64, 16)), "b": jnp.zeros((64, 32))}
    grads = outer_products(u, v)
    grads = np.concatenate([g.reshape(len(u), -1) for g in np.split(grads, [16], 2)], 1)
    check_clipped(loss, p, (u, v), grads)


def test_repeated_tokens_are_clipped():
    _, v = sequences(6, 2, 64)
    tokens = np.tile([3, 3, 5, 5, 0, 0], (len(v), 1))
    grads = np.zeros((len(v), 200, 64))
    np.add.at(grads, (np.arange(len(v))[:, None], tokens), np.float64(v))
    check_clipped(lambda p, t, v: (p[t] * v).sum((1, 2)), jnp.zeros((200, 64)), (tokens, v), grads)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("window", "groups"), [(1, 1), (2, 1), (2, 2)])
def test_convolutions_of_flat_images_are_clipped(window, groups):
    rng = np.random.default_rng(0)
    x = float32(200 * np.ones((3, 4, 4, 64)) * rng.uniform(1, 2, size=(3, 1, 1, 1)))
    ct = float32(alternating(16, 1e-4).reshape(4, 4, 1) * rng.normal(size=(3, 1, 1, 128)))

    def loss(p, x, ct):
        names = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, p, (1, 1), "SAME", dimension_numbers=names, feature_group_count=groups
        )
        return (y * ct).sum((1, 2, 3))

    p = jnp.zeros((window, window, 64 // groups, 128))
    padding = (0, window - 1)
    padded = np.pad(np.float64(x), ((0, 0), padding, padding, (0, 0)))
    grads = [
        np.einsum(
            "bhwgi,bhwgo->bigo",
            padded[:, i : i + 4, j : j + 4].reshape(3, 4, 4, groups, -1),
            np.float64(ct).reshape(3, 4, 4, groups, -1),
        ).reshape(3, -1)
        for i, j in np.ndindex(window, window)
    ]
    assert gradient_strategies(loss, p, x, ct) == "ghost norm"
    check_clipped(loss, p, (x, ct), np.stack(grads, 1))


def test_bfloat16_contributes_at_most_1_12_times_the_clip():
    u, v = (jnp.asarray(a, jnp.bfloat16) for a in sequences(8, 64, 48))
    grads = outer_products(*(np.asarray(a, np.float32) for a in (u, v))).reshape(len(u), -1)
    norms = np.linalg.norm(grads, axis=1)
    for clip in (norms[norms > 0].min(), np.median(norms)):
        parts = contributions(dense, jnp.zeros((64, 48)), (u, v), clip)
        assert np.linalg.norm(parts, axis=1).max() <= 1.12 * clip


def test_products_of_bfloat16_factors_are_summed_in_float32():
    rng = np.random.default_rng(0)
    u, v = (jnp.asarray(rng.normal(size=(1, 3, 8, n)), jnp.bfloat16) for n in (30, 20))
    exact = np.square(outer_products(np.float64(u[0]), np.float64(v[0]))).sum((1, 2))
    np.testing.assert_allclose(ghost_norm.inner_products(u, v, u, v).values, exact, rtol=1e-5)


@pytest.mark.parametrize("time", [1, 2])
def test_rescaled_norm_is_at_most_1_if_squares_underflow(time):
    # The squares of all but one element are below the smallest normal number.
    v = np.full((1, 10_000), 1e-19, np.float32)
    v[0, 0] = 2e-19
    u = np.full((1, time, 3), 1e10, np.float32)

    def loss(p, u, v):
        return ((u @ p) * v[:, None]).sum((1, 2))

    parts = contributions(loss, jnp.zeros((3, 10_000)), (u, v), 0, rescale_to_unit_norm=True)
    assert np.linalg.norm(parts) <= 1.001


def test_ordinary_sequences_match_float64():
    rng = np.random.default_rng(0)
    u, v = (float32(rng.normal(size=(3, 100, n))) for n in (300, 250))
    grads = outer_products(u, v)
    norms = np.linalg.norm(grads.reshape(3, -1), axis=1)
    total, info = jax.jit(clipped_grad(dense, norms.mean()))(jnp.zeros((300, 250)), u, v)
    scales = np.minimum(1, norms.mean() / norms)
    np.testing.assert_allclose(info.norms, norms, rtol=1e-6)
    np.testing.assert_allclose(info.scales, scales, rtol=1e-6)
    expected = (grads * scales[:, None, None]).sum(0)
    np.testing.assert_allclose(total, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("device", [None, jax.sharding.AbstractDevice("", None, "gpu")])
def test_error_bounds_of_inner_products_hold(device):
    for shape in [(2, 784, 32), (8, 300, 70), (16, 5000, 8), (64, 100, 100), (2, 20, 4800)]:
        u, v = sequences(*shape)
        exact = np.square(outer_products(u, v)).sum((1, 2))
        with traced_for(device):
            values, errors = jax.jit(ghost_norm.inner_products)(u[None], v[None], u[None], v[None])
        assert (np.abs(np.float64(values) - exact) <= errors).all()


def test_accelerators_round_factors_of_float32_unless_full_precision_is_asked_for():
    for precision in (None, "bfloat16", "tensorfloat32", "float32", "highest"):
        with jax.default_matmul_precision(precision):
            is_rough = precision not in ("float32", "highest")
            assert ghost_norm._rounds_products(jnp.float32) == is_rough
            assert not ghost_norm._rounds_products(jnp.float64)
            assert ghost_norm._rounding_of_product(jnp.bfloat16) == 2.0**-8


def test_accelerators_multiply_gradients_where_gram_matrices_cost_more():
    for platform, dtype, width, is_gram in (
        ("cpu", "float32", 768, True),
        ("cuda", "float32", 768, False),  # full precision takes a GPU seven times as long
        ("cuda", "bfloat16", 768, False),  # sums of 256 x 256 over 24 blocks
        ("cuda", "bfloat16", 2560, True),
    ):
        factors = jnp.zeros((2, 1, 2, 256, width), dtype)
        with traced_for(jax.sharding.AbstractDevice("", None, platform)):
            norms = jax.eval_shape(ghost_norm.squared_norms, *factors)
        assert (norms.errors is not None) is is_gram  # gradients have no cancelling terms


def test_chunks_are_large_enough_for_an_accelerator():
    for platform, batch, chunks in (
        ("cpu", 64, 16),  # of a quarter of the factors' bytes
        ("cuda", 64, 4),  # of 256 MiB
        ("cuda", 2048, 16),  # or of a quarter of the factors' bytes
    ):
        factors = [np.broadcast_to(np.float32(0), (batch, 256, n)) for n in (768, 3072)]
        with traced_for(jax.sharding.AbstractDevice("", None, platform)):
            assert ghost_norm.number_of_chunks(batch, factors, 4 * 768 * 3072) == chunks


def test_norms_of_terms_add_up_groups_and_bound_squares_that_underflow():
    rng, tiny = np.random.default_rng(0), float(np.finfo(np.float32).tiny)
    a, b = rng.uniform(size=(2, 2, 3, 4))  # factors, groups, examples and positions
    a[:, 0] = 0

    def norms(a, b):
        return np.sqrt(np.square(np.sqrt(a * b).sum(2)).sum(0))

    got, upper = ghost_norm.sum_term_norms(jnp.float32(a), jnp.float32(b), (5, 7))
    np.testing.assert_allclose(got, norms(a, b), rtol=1e-5)
    np.testing.assert_allclose(upper, norms(a + 5 * tiny, b + 7 * tiny), rtol=1e-4)
    assert upper[0] > 0


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def indices(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_chunks_are_as_large_as_what_they_compute(monkeypatch):
    seen = []
    record = lambda f, arrays, size: (seen.append(size), f(*arrays))[1]  # noqa: E731
    monkeypatch.setattr(ghost_norm, "map_groups_in_chunks", record)
    for u, v, example_bytes in (
        (floats(2, 5, 3, 40), floats(2, 5, 3, 50), 2 * 2 * 4 * 3 * 3),  # two Gram matrices
        (floats(2, 5, 30, 4), floats(2, 5, 30, 3), 2 * 4 * 4 * 3),  # the gradient
        (indices(2, 5, 30), floats(2, 5, 30, 3), 2 * 4 * 2 * 30 * 3),  # rows, sorted and summed
        (floats(2, 5, 30, 3), indices(2, 5, 30), 2 * 4 * 2 * 30 * 3),
        (indices(2, 5, 30), indices(2, 5, 30), 2 * 4 * 30 * 30),
    ):
        assert jax.eval_shape(ghost_norm.squared_norms, u, v).values.shape == (5,)
        assert seen.pop() == example_bytes
    short = floats(2, 5, 1, 4), floats(2, 5, 1, 3)
    assert jax.eval_shape(ghost_norm.squared_norms, *short).errors is None


@pytest.mark.parametrize("groups", [1, 2])
def test_patches_of_a_convolution_exist_for_a_chunk_of_examples(groups, monkeypatch):
    """4 x 4 positions have patches of 3 x 3 pixels, and the gradient is the smaller intermediate."""
    seen, plain = [], ghost_norm.map_groups_in_chunks
    record = lambda f, arrays, size: (seen.append(size), plain(f, arrays, size))[1]  # noqa: E731
    monkeypatch.setattr(ghost_norm, "map_groups_in_chunks", record)

    def loss(p, x):
        names = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, p, (1, 1), "SAME", dimension_numbers=names, feature_group_count=groups
        )
        return (y**2).sum((1, 2, 3))

    kernel, x = floats(3, 3, 4 // groups, 6), floats(5, 4, 4, 4)
    jax.eval_shape(clipped_grad(loss, 1.0), kernel, x)
    rows, cols = 9 * 4 // groups, 6 // groups
    assert 4 * groups * (16 * rows + rows * cols) in seen
