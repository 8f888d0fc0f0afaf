"""Stacks of blocks: attention contexts, conditions and incremental decoding."""

import chex
import jax
import jax.numpy as jnp
import pytest
from layer_cases import initial

import fnet
from fnet import layers
from fnet.layer import Decode

WIDTH, HEADS = 16, 2


def causal_blocks(n=3):
    attention = layers.attention(WIDTH, HEADS, causal=True, rotary=100.0)
    return [layers.Block(attention, layers.feed_forward(WIDTH, 24))] * n


def compiled(layer):
    """The same layer with its functions jitted."""
    apply = jax.jit(layer.apply, static_argnames="train")
    return layer._replace(init=jax.jit(layer.init), apply=apply)


def made(context="lagged", strength=3.0, **options):
    """A stack, its parameters with that strength, and a state with random contexts."""
    stack = compiled(layers.stack(WIDTH, causal_blocks(), context=context, **options))
    params, state = stack.init(jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: a + strength if path[-1].key == "strength" else a, params
    )
    state = jax.tree.map(
        lambda a: 0.5 * jax.random.uniform(jax.random.key(a.size), a.shape, minval=-1), state
    )
    return stack, params, state


def tokens(t=12, seed=5):
    return jax.random.normal(jax.random.key(seed), (2, t, WIDTH))


@pytest.mark.parametrize(("context", "condition"), [("lagged", 5), ("current", None)])
def test_stack_matches_its_formula(context, condition):
    (block, *_), norm = causal_blocks(), layers.rms_norm(WIDTH)
    stack = compiled(
        layers.stack(
            WIDTH, causal_blocks(), context=context, context_rate=0.25, condition=condition
        )
    )
    params, state = initial(stack)
    vector = jax.random.normal(jax.random.key(1), (2, 5)) if condition else None

    def run(layer, p, x):
        return layer.apply(p, {}, x, train=True)[0]

    @jax.jit
    def by_hand(params, state, x):
        after, taken, mixed = {}, x, x
        for i, p in params.items():
            if i in state:
                old = state[i]["context"]
                new = fnet.update_context(old, taken, mixed, rate=0.25)
                after[i] = {"context": new}
                x = x + p["strength"] / WIDTH * (x @ (old if context == "lagged" else new))
            scales, shifts, gates = (0, 0), (0, 0), (1, 1)
            if condition:
                numbers = run(layers.dense(5, 6 * WIDTH), p["modulation"], jax.nn.silu(vector))
                numbers = jnp.split(numbers[:, None], 6, axis=-1)
                scales, shifts, gates = numbers[::3], numbers[1::3], numbers[2::3]
            h = run(norm, p["mixer_norm"], x) * (1 + scales[0]) + shifts[0]
            taken, mixed = x, run(block.mixer, p["mixer"], h)
            x = x + gates[0] * mixed
            h = run(norm, p["feed_forward_norm"], x) * (1 + scales[1]) + shifts[1]
            x = x + gates[1] * run(block.feed_forward, p["feed_forward"], h)
        return x, after

    got = stack.apply(params, state, tokens(), train=True, condition=vector)
    chex.assert_trees_all_close(got, by_hand(params, state, tokens()), rtol=1e-4, atol=1e-4)


def test_evaluation_does_not_update_contexts():
    stack, params, state = made()
    y, after = stack.apply(params, state, tokens(), train=False)
    chex.assert_trees_all_equal(after, state)
    other = jax.tree.map(jnp.zeros_like, state)
    assert jnp.abs(stack.apply(params, other, tokens(), train=False)[0] - y).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["one_norm", "two_norms"])
def test_parallel_blocks_read_their_input(parallel):
    mixer, mlp = layers.attention(8, 2, causal=True), layers.feed_forward(8, 12)
    net = layers.stack(8, [layers.Block(mixer, mlp)], parallel=parallel)
    params, _ = net.init(jax.random.key(0))
    p = params["0"]
    norms = {"feed_forward_norm"} if parallel == "two_norms" else set()
    assert p.keys() == {"mixer", "mixer_norm", "feed_forward"} | norms
    p["mixer_norm"]["scale"] = jnp.arange(1.0, 9.0)
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))

    def norm(name):
        return fnet.rms_norm(x, p[name]["scale"])

    m, _ = mixer.apply(p["mixer"], {}, norm("mixer_norm"), train=False)
    read = norm("feed_forward_norm" if norms else "mixer_norm")
    expected = x + m + mlp.apply(p["feed_forward"], {}, read, train=False)[0]
    y, _ = net.apply(params, {}, x, train=False)
    chex.assert_trees_all_close(y, expected, atol=1e-5)
    last, _ = net.decode.extend(params, {}, net.decode.init_cache(2, 5, x.dtype), x, 0)
    chex.assert_trees_all_close(last, expected, atol=1e-5)


@pytest.mark.slow
def test_padding_does_not_enter_a_context():
    stack, params, state = made()
    mask = jnp.broadcast_to(jnp.arange(12) < 7, (2, 12))
    _, short = stack.apply(params, state, tokens()[:, :7], train=True)
    _, padded = stack.apply(params, state, tokens(), train=True, mask=mask)
    chex.assert_trees_all_close(short, padded, atol=1e-6)


def test_rejects_invalid_arguments():
    for options, message in (
        ({"blocks": []}, "at least one block"),
        ({"norm": "batch"}, "dynamic_tanh.*batch"),
        ({"context": "late"}, "lagged.*late"),
        ({"condition": 0}, "condition must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            layers.stack(WIDTH, **{"blocks": causal_blocks()} | options)


def test_rejects_a_feed_forward_with_state():
    block = layers.Block(layers.attention(WIDTH, HEADS), layers.abn(WIDTH))
    with pytest.raises(ValueError, match=r"of block 0 has state .*running_mean.* rms_norm"):
        jax.eval_shape(layers.stack(WIDTH, [block]).init, jax.random.key(0))


def test_rejects_a_condition_that_does_not_match():
    stack = layers.stack(WIDTH, causal_blocks(1), condition=5)
    params, _ = stack.init(jax.random.key(0))
    with pytest.raises(ValueError, match="with a condition, got none"):
        stack.apply(params, {}, tokens(), train=True)
    for shape in ((5,), (1, 5), (2, 1, 5)):
        with pytest.raises(ValueError, match=r"one vector per example of x \(2, 12"):
            stack.apply(params, {}, tokens(), train=True, condition=jnp.ones(shape))
    plain, params, state = made()
    with pytest.raises(ValueError, match="without a condition"):
        plain.apply(params, state, tokens(), train=True, condition=jnp.ones((2, 5)))


def test_mixer_without_parameters_can_decode():
    same = fnet.Layer(
        lambda key: ({}, {}),
        lambda p, s, x, *, key=None, train: (x, s),
        Decode(lambda b, n, dtype: {}, lambda p, s, cache, x, at: (x, cache)),
    )
    stack = layers.stack(WIDTH, [layers.Block(same)])
    params, _ = stack.init(jax.random.key(0))
    cache = stack.decode.init_cache(2, 12, jnp.float32)
    y, _ = stack.decode.extend(params, {}, cache, tokens(), jnp.int32(0))
    chex.assert_trees_all_close(y, stack.apply(params, {}, tokens(), train=False)[0])
