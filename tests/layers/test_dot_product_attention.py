"""Chunked attention matches a plain softmax, with memory linear in the sequence."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet.cpu.tracing import traced_for
from fnet.layers.dot_product_attention import dot_product_attention
from fnet.memory import peak
from fnet.memory.peak import compile_min_memory
from fnet.memory.plan import estimate_cost

B, T, S, H, D = 2, 11, 7, 4, 8

CASES = {
    "shorter keys, causal": {"keys": 5, "causal": True},
    "mask of heads, grouped": {"mask": (1, H, T, T), "heads": 2, "causal": True},
    "mask of keys, grouped": {"mask": (B, 1, 1, 6), "heads": 2, "keys": 6},
    "scale": {"scale": 0.3},
    "window, longer keys": {"window": 3, "keys": 17, "causal": True, "heads": 1},
    "window, mask of all": {"window": 4, "mask": (B, H, T, T), "causal": True},
}


def inputs(dtype=np.float64, *, t=T, keys=None, heads=H, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(B, t, H, D), (B, keys or t, heads, D), (B, keys or t, heads, D), (B, t, H, D)]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def mask_of(shape):
    """A random mask without empty rows, where jax.nn and fnet agree."""
    mask = np.random.default_rng(1).random(shape) < 0.6
    mask[..., 0] = True
    mask |= np.eye(*shape[-2:], dtype=bool)
    return jnp.asarray(mask)


def case(name, dtype):
    kwargs = dict(CASES[name])
    arrays = inputs(dtype, keys=kwargs.pop("keys", None), heads=kwargs.pop("heads", H))
    if "mask" in kwargs:
        kwargs["mask"] = mask_of(kwargs["mask"])
    return arrays, kwargs


def plain(q, k, v, *, causal=False, window=None, mask=None, scale=None):
    """The formula in the dtype of its arguments."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = jnp.ones(scores.shape, bool) if mask is None else jnp.broadcast_to(mask, scores.shape)
    if causal:
        seen &= jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    if window is not None:
        ago = np.arange(scores.shape[-2])[:, None] - np.arange(scores.shape[-1])[None]
        seen &= jnp.asarray(abs(ago) < window)[None, None]
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def jax_nn(q, k, v, *, causal=False, **kwargs):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, **kwargs)


def value_and_gradients(f, arrays):
    """Value and gradients of ``f(q, k, v)``, with the last array as cotangent."""
    y, back = jax.vjp(f, *arrays[:3])
    return y, *back(arrays[3])


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(fs, arrays):
    return [value_and_gradients(f, arrays) for f in fs]


def assert_equal(ours, theirs, arrays, tolerance):
    got, expected = values_and_gradients((ours, theirs), arrays)
    chex.assert_trees_all_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_a_plain_softmax_in_float64(name, float64):
    arrays, kwargs = case(name, np.float64)
    ours = functools.partial(dot_product_attention, chunk=3, **kwargs)
    assert_equal(ours, functools.partial(plain, **kwargs), arrays, 1e-10)


def test_fully_masked_query_gives_0_and_no_gradient():
    arrays = inputs(np.float32)
    mask = mask_of((B, 1, T, T)).at[0, 0, 4].set(False)
    with jax.debug_nans(True), jax.debug_infs(True):
        ours = functools.partial(dot_product_attention, mask=mask, chunk=3)
        ((y, dq, dk, dv),) = values_and_gradients((ours,), arrays)
    assert not y[0, 4].any()
    assert not dq[0, 4].any()
    q, k, v, dy = arrays
    (rest,) = values_and_gradients(
        (functools.partial(jax_nn, mask=mask),), [q, k, v, dy.at[0, 4].set(0)]
    )
    chex.assert_trees_all_close((dq, dk, dv), rest[1:], rtol=1e-5, atol=1e-5)
    # jax.nn gives the mean over all values for such a row.
    chex.assert_trees_all_close(rest[0][0, 4], v[0].mean(0), rtol=1e-5, atol=1e-5)


def test_query_whose_window_has_no_keys_gives_0_and_no_gradient():
    arrays = inputs(np.float32, keys=4)
    with jax.debug_nans(True), jax.debug_infs(True):
        ours = functools.partial(dot_product_attention, window=2, causal=True, chunk=3)
        ((y, dq, _, _),) = values_and_gradients((ours,), arrays)
    assert bool(y[:, 4].any())
    assert not y[:, 5:].any()
    assert not dq[:, 5:].any()


@pytest.mark.parametrize(("t", "keys"), [(0, 3), (3, 0)])
def test_no_queries_or_no_keys_give_0(t, keys):
    q, k = jnp.ones((B, t, H, D)), jnp.ones((B, keys, H, D))
    chex.assert_trees_all_equal(dot_product_attention(q, k, k), jnp.zeros_like(q))


def test_scale_may_be_traced_and_has_a_gradient(float64):
    q, k, v, _ = inputs()
    loss = lambda f, s: jnp.sin(f(q, k, v, scale=s)).sum()  # noqa: E731
    both = lambda s: [jax.grad(loss, argnums=1)(f, s) for f in (dot_product_attention, plain)]  # noqa: E731
    chex.assert_trees_all_close(*jax.jit(both)(0.3), rtol=1e-10)


def test_causal_bands_do_not_read_later_keys():
    q, k, v, _ = inputs(np.float32, t=16)
    v = v.at[:, 12:].set(jnp.nan)
    y = jax.jit(functools.partial(dot_product_attention, causal=True, chunk=2))(q, k, v)
    assert bool(jnp.isfinite(y[:, :12]).all())
    assert bool(jnp.isnan(y[:, 12:]).all())


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_respect_the_window(causal):
    q, k, v, _ = inputs(np.float32, t=32)

    @jax.jit
    def reaches(i):
        f = functools.partial(dot_product_attention, causal=causal, window=5, chunk=4)
        grads = jax.grad(lambda *a: f(*a)[:, i].sum(), argnums=(1, 2))(q, k, v)
        return [a.any((0, 2, 3)) for a in grads]

    for i in (1, 3, 17, 31):  # a softmax of one logit has the gradient 0
        inside = np.arange(max(0, i - 4), i + 1 if causal else min(32, i + 5))
        for reached in reaches(i):
            np.testing.assert_array_equal(np.flatnonzero(reached), inside)


def test_keys_outside_the_window_are_not_read():
    q, k, v, _ = inputs(np.float32, t=32)
    k, v = k.at[:, :8].set(jnp.nan), v.at[:, :8].set(jnp.nan)
    y = jax.jit(functools.partial(dot_product_attention, causal=True, window=3, chunk=4))(q, k, v)
    assert bool(jnp.isnan(y[:, :8]).all())
    assert bool(jnp.isfinite(y[:, 12:]).all())


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 1, 3)])
def test_vmap_matches_a_loop(mapped, float64):
    q, k, v, _ = inputs()
    stacked = [
        a if axis is None else jnp.stack([a, 2 * a, a - 1], axis)
        for a, axis in zip((q, k, v), mapped, strict=True)
    ]
    f = functools.partial(dot_product_attention, chunk=4)
    got = jax.jit(jax.vmap(f, in_axes=mapped))(*stacked)
    part = lambda a, axis, i: a if axis is None else jnp.take(a, i, axis)  # noqa: E731
    each = [jax.jit(f)(*map(part, stacked, mapped, [i] * 3)) for i in range(3)]
    chex.assert_trees_all_close(got, jnp.stack(each), rtol=1e-10, atol=1e-12)


def test_forward_mode_and_second_derivatives_match_a_plain_softmax(float64):
    q, k, v, _ = inputs()
    tangents = inputs(seed=1)[:3]
    mask = mask_of((B, 1, T, T))

    def derivatives(f):
        f = functools.partial(f, causal=True, mask=mask)
        gradient = jax.grad(lambda *a: jnp.sin(f(*a)).sum(), argnums=(0, 1, 2))
        both = jax.jit(lambda *a: (jax.jvp(f, *a), jax.jvp(gradient, *a)))
        return both((q, k, v), tuple(tangents))

    ours = functools.partial(dot_product_attention, chunk=3)
    chex.assert_trees_all_close(derivatives(ours), derivatives(plain), rtol=1e-9, atol=1e-11)


def test_bfloat16_is_at_least_as_accurate_as_jax_nn(float64):
    narrow = [a.astype(jnp.bfloat16) for a in inputs(t=96)]
    fs = [functools.partial(dot_product_attention, chunk=4), jax_nn]  # sums over 24 chunks ...
    (exact,) = values_and_gradients((plain,), [a.astype(np.float64) for a in narrow])
    ours, theirs = (
        [float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in pairs]
        for pairs in (
            zip(got, exact, strict=True) for got in values_and_gradients(tuple(fs), narrow)
        )
    )
    for our, their in zip(ours, theirs, strict=True):
        assert our <= 1.05 * their
        assert our < 2e-3  # ... are not in bfloat16, whose rounding error is up to 2^-9


def test_accepts_float16():
    narrow = inputs(np.float16)
    ((y, *grads),) = values_and_gradients((dot_product_attention,), narrow)
    (expected,) = values_and_gradients((plain,), [a.astype(np.float32) for a in narrow])
    assert all(a.dtype == np.float16 for a in (y, *grads))
    chex.assert_trees_all_close(
        [a.astype(np.float32) for a in (y, *grads)], list(expected), rtol=2e-3, atol=2e-3
    )


def temporaries(f, *args):
    return peak(compile_min_memory(jax.jit(f).lower(*args))[0]).temporaries


def gradient_temporaries(f, t):
    x = jax.ShapeDtypeStruct((1, t, 8, 64), jnp.float32)
    return temporaries(jax.grad(lambda *a: jnp.sin(f(*a)).sum(), argnums=(0, 1, 2)), x, x, x)


def test_memory_grows_linearly_and_is_an_eighth_of_jax_nn_at_2048_tokens():
    at_2048 = gradient_temporaries(dot_product_attention, 2048)
    causal = gradient_temporaries(functools.partial(dot_product_attention, causal=True), 2048)
    assert max(at_2048, causal) <= 0.12 * gradient_temporaries(jax_nn, 2048)
    chunks = functools.partial(dot_product_attention, chunk=64)
    assert gradient_temporaries(chunks, 2048) <= 2.1 * gradient_temporaries(chunks, 1024)


def test_flops_and_memory_of_a_window_grow_linearly():
    windowed = functools.partial(dot_product_attention, causal=True, window=256)
    at_4096, one = gradient_temporaries(windowed, 4096), 4096 * 8 * 64 * 4
    # q, k, v, their gradients, and transposed copies.
    assert at_4096 <= 5 * one
    assert at_4096 <= 2.1 * gradient_temporaries(windowed, 2048)
    every_score = 8 * 4096 * 4096 * 4
    assert at_4096 < every_score / 10
    xs = [jax.ShapeDtypeStruct((1, t, 8, 64), jnp.float32) for t in (2048, 4096)]
    short, long = (
        estimate_cost(jax.make_jaxpr(lambda *a: jax.vjp(windowed, *a)[1](a[0]))(x, x, x)).flops
        for x in xs
    )
    assert long <= 2.05 * short


def test_default_chunk_is_all_queries_or_a_million_scores():
    for platform, batch, t, chunks in (
        *(("cpu", 1, 512, 1), ("cpu", 1, 513, 3), ("cpu", 1, 2048, 32), ("cpu", 64, 100, 2)),
        *(("cpu", 64, 60, 1), ("gpu", 1, 2048, 1), ("gpu", 1, 4096, 4), ("gpu", 64, 512, 4)),
    ):
        x = jax.ShapeDtypeStruct((batch, t, 8, 64), jnp.float32)
        with traced_for(jax.sharding.AbstractDevice("", None, platform)):
            program = jax.make_jaxpr(dot_product_attention)(x, x, x)
        assert f"length={chunks}\n" in str(program)


@pytest.mark.parametrize(("t", "window", "chunks"), [(4096, 256, 32), (4096, 64, 64), (60, 8, 1)])
def test_default_chunk_of_a_window_is_half_of_it_but_at_least_64(t, window, chunks):
    x = jax.ShapeDtypeStruct((1, t, 8, 64), jnp.float32)
    f = functools.partial(dot_product_attention, causal=True, window=window)
    assert f"length={chunks}\n" in str(jax.make_jaxpr(f)(x, x, x))


def test_second_derivatives_and_forward_mode_do_not_materialize_all_scores():
    x = jax.ShapeDtypeStruct((1, 2048, 1, 16), jnp.float32)
    f = functools.partial(dot_product_attention, chunk=32)
    loss = lambda *a: jnp.sin(f(*a)).sum()  # noqa: E731
    forward = lambda *a: jax.jvp(f, a, a)  # noqa: E731
    twice = jax.grad(lambda *a: jnp.sin(jax.grad(loss)(*a)).sum(), argnums=(0, 1, 2))
    for program in (forward, twice):
        assert temporaries(program, x, x, x) < 2048 * 2048 * 4


def test_shard_map_over_the_batch_matches_one_device():
    arrays = [a.repeat(2, axis=0) for a in inputs(np.float32)]  # a batch of 4
    arrays = [a * jnp.arange(1.0, 5)[:, None, None, None] for a in arrays]
    mask = mask_of((1, 1, T, T))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")

    attend = functools.partial(dot_product_attention, mask=mask, chunk=3)
    f = lambda *a: value_and_gradients(attend, a)  # noqa: E731
    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split))(*arrays)
    chex.assert_trees_all_close(jax.device_get(got), jax.jit(f)(*arrays), rtol=1e-5, atol=1e-5)


def test_sharding_over_batch_and_heads_is_preserved():
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "heads"))
    x = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32, sharding=sharding)
    mask = mask_of((1, 1, T, T))
    f = lambda *a: dot_product_attention(*a, mask=mask, causal=True, chunk=3).sum()  # noqa: E731
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(f, argnums=(0, 1, 2))).lower(x, x, x).compile()
    text = compiled.as_text()
    assert not any(move in text for move in ("all-gather", "all-to-all", "collective-permute"))
    assert all(s.is_equivalent_to(sharding, 4) for s in compiled.output_shardings)


Q, K, V, _ = inputs(np.float32)
ONE_SEGMENT = jnp.ones((B, T), int)


def test_rejects_invalid_arguments():
    for change, error, message in (
        ({"k": K.astype(jnp.float16)}, TypeError, "got float32, float16 and float32"),
        ({n: a.astype(int) for n, a in (("q", Q), ("k", K), ("v", V))}, TypeError, "one floating dtype, got int32, int32 and int32"),
        ({"k": K[..., :7], "v": V[..., :7]}, ValueError, r"got q \(2, 11, 4, 8\), k \(2, 11, 4, 7\) and v"),
        ({"v": V[:, :10]}, ValueError, r"k \(2, 11, 4, 8\) and v \(2, 10, 4, 8\)"),
        ({"k": K[:, :, :3], "v": V[:, :, :3]}, ValueError, r"multiple of k's, got q \(2, 11, 4, 8\) and k \(2, 11, 3, 8\)"),
        ({"mask": jnp.ones((1, 1, T, T))}, TypeError, "mask must be bool, True where attended, got float32"),
        ({"mask": jnp.ones((T, T), bool)}, ValueError, r"mask must have shape \(2, 4, 11, 11\) .* got \(11, 11\)"),
        ({"segments": ONE_SEGMENT[:, :10]}, ValueError, r"segments must have shape \(2, 11\), \[B, T\]"),
        ({"segments": ONE_SEGMENT, "k": K[:, :10], "v": V[:, :10]}, ValueError, r"segments must have shape \(2, 11\), \[B, T\]"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"sinks": jnp.ones(3)}, ValueError, r"sinks must have shape \(4,\)"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            dot_product_attention(**{"q": Q, "k": K, "v": V} | change)


@pytest.mark.parametrize("options", [{"chunk": 2, "causal": True}, {"window": 3}])
def test_sinks_take_part_in_the_softmax(options):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (2, 6, n, 4)) for key, n in zip(keys[:3], (4, 2, 2), strict=True)
    )
    sinks = 2 * jax.random.normal(keys[3], (4,))

    def formula(q, k, v, sinks):
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 2
        distance = jnp.arange(6)[:, None] - jnp.arange(6)[None]
        allowed = (distance >= 0) | (not options.get("causal"))
        allowed &= abs(distance) < options.get("window", 7)
        scores = jnp.where(allowed[None, None], scores, -jnp.inf)
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], -1))[..., :-1]
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    def ours(q, k, v, sinks):
        return dot_product_attention(q, k, v, sinks=sinks, **options)

    def both(f):
        return jax.value_and_grad(lambda *a: jnp.square(f(*a)).sum(), range(4))(q, k, v, sinks)

    chex.assert_trees_all_close(both(ours), both(formula), atol=1e-4)
