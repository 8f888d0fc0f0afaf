"""The attention layer matches a plain softmax, and decoding matches the whole sequence."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import initial

import fnet
from fnet import layers
from fnet.layers.attention import AttentionVariant, attention
from fnet.layers.rotary import rotary as turned
from fnet.memory import peak

B, T, WIDTH, HEADS = 2, 11, 16, 4

CASES = {
    "plain": {},
    "without a bias": {"bias": False, "causal": True},
    "window, rotary": {"window": 3, "rotary": 100.0},
    "all together": {"causal": True, "groups": 2, "window": 4, "rotary": 50.0, "chunk": 3},
    "output gate": {"groups": 2, "variant": AttentionVariant(output_gate=True)},
}
CAUSAL = {
    "plain": {},
    "window, grouped, rotary": {"window": 5, "groups": 1, "rotary": 100.0},
    "variant": {
        "groups": 2,
        "variant": AttentionVariant(output_gate=True, sinks=True, soft_cap=2.0, scale=0.7),
        "fused": False,
    },
}


def inputs(dtype=np.float32, t=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, t, WIDTH)), dtype)


def plain(
    p, x, *, groups=HEADS, causal=False, window=None, rotary=None, mask=None, variant=None, **_
):
    """The formula with all scores, in the dtype of ``x``."""
    dense = lambda p, x: x @ p["kernel"] + jnp.asarray(p.get("bias", 0.0)).reshape(1, 1, -1)  # noqa: E731
    head, output_gate = WIDTH // HEADS, variant is not None and variant.output_gate
    own = 2 * HEADS if output_gate else HEADS
    z = dense(p["query_key_value"], x).reshape(*x.shape[:2], own + 2 * groups, head)
    q, k, v = z[:, :, :own], z[:, :, own : own + groups], z[:, :, own + groups :]
    if output_gate:
        q, gate = q[:, :, ::2], q[:, :, 1::2]
    at = np.arange(x.shape[1])
    if rotary:
        q, k = (turned(a, jnp.asarray(at), rotary) for a in (q, k))
    k, v = (jnp.repeat(a, HEADS // groups, axis=2) for a in (k, v))
    ago = at[:, None] - at[None]
    seen = np.where(causal, ago >= 0, True) & (abs(ago) < (window or np.inf))
    seen = jnp.asarray(seen)[None, None] & (True if mask is None else mask[:, None, None])
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / head**0.5
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    y = jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    if output_gate:
        y = y * jax.nn.sigmoid(gate)
    return dense(p["output"], y.reshape(x.shape))


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(fs, params, x, dy):
    outputs = []
    for f in fs:
        y, back = jax.vjp(f, params, x)
        outputs.append((y, back(dy)))
    return outputs


@pytest.mark.parametrize("name", CASES)
def test_layer_matches_a_plain_softmax_in_float64(name, float64):
    layer = attention(WIDTH, HEADS, **CASES[name])
    params = jax.tree.map(np.float64, initial(layer)[0])
    ours = lambda p, x: layer.apply(p, {}, x, train=True)[0]  # noqa: E731
    theirs = functools.partial(plain, **CASES[name])
    got, expected = values_and_gradients(
        (ours, theirs), params, inputs(np.float64), inputs(np.float64, seed=1)
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-11)


def test_kernel_width_follows_heads_and_groups():
    for groups, columns in ((None, 48), (4, 48), (2, 32), (1, 24)):
        params, state = jax.eval_shape(
            attention(WIDTH, HEADS, groups=groups).init, jax.random.key(0)
        )
        assert params["query_key_value"]["kernel"].shape == (WIDTH, columns)
        assert params["output"]["kernel"].shape == (WIDTH, WIDTH)
        assert state == {}


def test_masked_tokens_are_not_attended_to(float64):
    layer = attention(WIDTH, HEADS, rotary=100.0)
    params = jax.tree.map(np.float64, initial(layer)[0])
    x = inputs(np.float64)
    mask = jnp.arange(T)[None] < jnp.asarray([[T], [6]])
    apply = jax.jit(lambda x, mask: layer.apply(params, {}, x, train=False, mask=mask)[0])
    y = apply(x, mask)
    chex.assert_trees_all_close(y, plain(params, x, rotary=100.0, mask=mask), rtol=1e-9, atol=1e-11)
    chex.assert_trees_all_close(y[:, :6], apply(x.at[1, 6:].set(7.0), mask)[:, :6], rtol=1e-12)


def extended(layer, params, x, splits, length, dtype=np.float32):
    """Outputs of ``decode.extend`` and the cache, for several ways to split a sequence."""
    extend = jax.jit(layer.decode.extend)
    results = []
    for parts in splits:
        cache, position, outputs = layer.decode.init_cache(B, length, dtype), 0, []
        for t in parts:
            y, cache = extend(params, {}, cache, x[:, position : position + t], jnp.int32(position))
            outputs.append(y)
            position += t
        results.append((jnp.concatenate(outputs, axis=1), cache))
    return results


def whole(layer, params, x):
    return jax.jit(lambda p, x: layer.apply(p, {}, x, train=False)[0])(params, x)


@pytest.mark.parametrize("name", CAUSAL)
def test_decoding_in_parts_matches_the_whole_sequence(name):
    layer = attention(WIDTH, HEADS, causal=True, **CAUSAL[name])
    params, _ = initial(layer)
    if "sinks" in params:
        params |= {"sinks": jnp.linspace(-1.0, 2.0, HEADS)}
    x, length = inputs(), T if name == "plain" else T + 6
    empty = layer.decode.init_cache(B, length, np.float32)
    at_once = whole(layer, params, x)
    splits = [1] * 11, [6, 1, 1, 3]
    for y, cache in extended(layer, params, x, splits, length):
        chex.assert_trees_all_close(y, at_once, rtol=1e-5, atol=1e-5)
        chex.assert_trees_all_equal_shapes_and_dtypes(cache, empty)


def test_long_cache_is_read_in_chunks():
    layer = attention(WIDTH, HEADS, groups=2, causal=True, window=150, rotary=100.0)
    params, _ = initial(layer)
    x = inputs(t=333)
    ((y, _),) = extended(layer, params, x, [[200, 130, 1, 1, 1]], 340)
    chex.assert_trees_all_close(y, whole(layer, params, x), rtol=1e-5, atol=1e-5)


def test_bfloat16_cache_keeps_its_dtype():
    layer = attention(WIDTH, HEADS, causal=True, window=4, rotary=100.0)
    params, _ = initial(layer)
    x = inputs(jnp.bfloat16)
    ((y, cache),) = extended(layer, params, x, [[5, 1, 1, 4]], T, jnp.bfloat16)
    assert y.dtype == cache["key"].dtype == cache["value"].dtype == jnp.bfloat16
    at_once = whole(layer, params, x)
    chex.assert_trees_all_close(y.astype(np.float32), at_once.astype(np.float32), atol=3e-2)


def generation(layer, length, steps):
    """Compile a scan over ``steps`` tokens with a donated cache."""
    params, _ = jax.eval_shape(layer.init, jax.random.key(0))
    cache = jax.eval_shape(functools.partial(layer.decode.init_cache, 1, length, jnp.float32))
    x = jax.ShapeDtypeStruct((1, 1, WIDTH), jnp.float32)

    def run(params, cache, x):
        def step(carry, position):
            y, cache = layer.decode.extend(params, {}, *carry, position)
            return (cache, y), y

        (cache, _), y = jax.lax.scan(step, (cache, x), jnp.arange(steps))
        return cache, y

    compiled = jax.jit(run, donate_argnums=1).lower(params, cache, x).compile()
    return peak(compiled), sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))


def test_decoding_updates_the_cache_in_place():
    layer = attention(WIDTH, HEADS, groups=2, causal=True, rotary=100.0)
    memory, cache = generation(layer, 4096, 16)
    assert memory.aliased == cache
    assert memory.temporaries <= cache / 16
    assert memory.temporaries <= 1.1 * generation(layer, 2048, 16)[0].temporaries


def test_cache_of_a_window_does_not_grow_with_the_length():
    layer = attention(WIDTH, HEADS, causal=True, window=512)
    (short, slots), (long, same) = (generation(layer, length, 16) for length in (2048, 65536))
    assert slots == same == 2 * 512 * WIDTH * 4
    assert short.aliased == slots
    assert short.temporaries == long.temporaries <= slots / 2


def test_bidirectional_attention_has_no_decode():
    assert attention(WIDTH, HEADS).decode is None


def test_rejects_more_positions_than_the_cache_holds():
    layer = attention(WIDTH, HEADS, causal=True)
    with pytest.raises(ValueError, match="11 positions do not fit into a cache for 5"):
        extended(layer, initial(layer)[0], inputs(), [[11]], 5)
    with pytest.raises(ValueError, match="length of at least 1, got 0"):
        layer.decode.init_cache(1, 0, np.float32)


def scans(jaxpr):
    return str(jaxpr).count("= scan[")


def test_recompute_does_not_rematerialize_attention():
    layer = layers.attention(8, 2, causal=True)
    params, _ = layer.init(jax.random.key(0))
    x = jnp.ones((1, 300, 8))
    apply = lambda p, x: layer.apply(p, {}, x, train=True)[0]  # noqa: E731

    def gradient(apply):
        return jax.make_jaxpr(jax.grad(lambda p: jnp.sin(apply(p, x)).sum()))(params)

    assert scans(gradient(fnet.recompute(apply))) == scans(gradient(apply))
    assert scans(gradient(jax.checkpoint(apply))) > scans(gradient(apply))


def test_rejects_invalid_options():
    for arguments, message in (
        ({"heads": 3}, "heads must divide width, got heads=3, width=16"),
        ({"heads": 0}, "heads must divide width, got heads=0, width=16"),
        ({"groups": 3}, "groups must divide heads, got groups=3, heads=4"),
        ({"groups": 0}, "groups must divide heads, got groups=0, heads=4"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"rotary": 0.0}, r"rotary is a base and must be > 0, got 0\.0"),
        ({"heads": 16, "rotary": 10.0}, "pairs of features, got 1 per head"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(WIDTH, **({"heads": HEADS} | arguments))


def test_rejects_invalid_inputs():
    layer = attention(WIDTH, HEADS)
    params, _ = initial(layer)
    with pytest.raises(ValueError, match=r"expected \[B, T, 16\], got \(11, 16\)"):
        layer.apply(params, {}, inputs()[0], train=True)
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 16\], got \(2, 11, 8\)"):
        layer.apply(params, {}, inputs()[..., :8], train=True)
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(2, 11\), got float32"):
        layer.apply(params, {}, inputs(), train=True, mask=jnp.ones((B, T)))
    with pytest.raises(
        ValueError, match=r"mask must be bool of shape \(2, 11\), got bool \(2, 10\)"
    ):
        layer.apply(params, {}, inputs(), train=True, mask=jnp.ones((B, T - 1), bool))


def test_decoding_inside_shard_map_matches_one_device():
    layer = attention(WIDTH, HEADS, causal=True, window=4, rotary=100.0)
    params, _ = initial(layer)
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=types, devices=jax.devices()[:2])
    every, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def read(params, x):
        cache = layer.decode.init_cache(len(x), T, x.dtype)
        return layer.decode.extend(params, {}, cache, x, jnp.int32(0))[0]

    f = jax.jit(jax.shard_map(read, mesh=mesh, in_specs=(every, rows), out_specs=rows))
    chex.assert_trees_all_close(f(params, inputs()), whole(layer, params, inputs()), atol=1e-5)


def test_blocks_read_only_earlier_blocks_and_fused_layers_have_all_three():
    with pytest.raises(ValueError, match="with values='keys', keys='own' give fused=False"):
        layers.attention(8, 2, causal=True, variant=AttentionVariant(values="keys"))
    own, given = (
        layers.attention(8, 2, causal=True, variant=AttentionVariant(keys=keys), fused=False)
        for keys in ("passed_on", "given")
    )
    assert sorted(jax.eval_shape(given.init, jax.random.key(0))[0]) == ["output", "query"]
    with pytest.raises(ValueError, match="keys='given', got keys of no earlier block"):
        jax.eval_shape(
            lambda key: given.apply(*given.init(key), jnp.ones((1, 2, 8)), train=True),
            jax.random.key(0),
        )
    with pytest.raises(ValueError, match="block 1 must read an earlier block, not 1"):
        layers.stack(8, [layers.Block(own), layers.Block(given, reads=1)])
