"""Documents in one row: recurrent layers give what they give for each document alone."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
from example_losses import Case, assert_clipped_like_a_loop
from pretrained_cases import MIXERS

from fnet import layers
from fnet.layers.causal_conv import causal_conv
from fnet.layers.gated_delta import gated_delta_rule
from fnet.layers.mamba import selective_scan
from fnet.layers.mamba2 import state_space_dual
from fnet.layers.recurrence import linear_recurrence

B, T, E, N = 2, 11, 4, 3
# With chunks of 4, documents begin at an edge, one step before and after it; some have one step.
SEGMENTS = np.array([[3] * 4 + [1] * 3 + [3] * 2 + [0] * 2, [7] + [8] * 6 + [9] + [2] * 3])


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape))


def positive(*shape):
    return jnp.asarray(np.random.default_rng(shape).uniform(0.05, 0.95, size=shape))


SELECTIVE = {
    "x": normal(B, T, E), "dt": positive(B, T, E), "A": -4 * positive(E, N),
    "B": normal(B, T, N), "C": normal(B, T, N, seed=1), "D": normal(E),
    "initial": normal(B, N, E),
}  # fmt: skip
DUAL = {
    "x": normal(B, T, 4, 2), "dt": positive(B, T, 4), "A": -4 * positive(4),
    "B": normal(B, T, 2, N), "C": normal(B, T, 2, N, seed=1), "D": normal(4),
    "initial": normal(B, 4, N, 2),
}  # fmt: skip
DELTA = {
    "q": normal(B, T, 2, N), "k": 0.5 * normal(B, T, 2, N, seed=1), "v": normal(B, T, 4, 2),
    "log_decay": -positive(B, T, 4), "beta": positive(B, T, 4),
    "initial": normal(B, 4, N, 2),
}  # fmt: skip
LINEAR = {"a": positive(B, T, E, 2), "b": normal(B, T, E, 2), "initial": normal(B, E, 2)}
CONV = {"x": normal(B, T, E), "kernel": normal(4, E), "bias": normal(E), "past": normal(B, 3, E)}
STATE = {"conv": "past"}


def linear(**given):
    h = linear_recurrence(**given)
    return h, h[:, -1]


SCANS = {
    "linear": (linear, LINEAR),
    "selective": (selective_scan, SELECTIVE),
    "dual": (state_space_dual, DUAL),
    "delta": (gated_delta_rule, DELTA),
    "conv": (causal_conv, CONV),
}
CASES = [("linear", None), ("conv", None)]
CHUNKED = ("selective", "dual", "delta")
CASES += [(name, chunk) for name in CHUNKED for chunk in (4, None)]


def documents(row):
    """The (first, last + 1) of each document of a row of numbers."""
    edges = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
    return list(itertools.pairwise(edges))


def one_document_at_a_time(name, given):
    """Outputs and last states, from a call for each document."""
    scan, state = SCANS[name][0], STATE.get(name, "initial")
    over_time = {k for k, v in given.items() if v.shape[:2] == (B, T)}

    def run(i, first, last):
        part = {k: v[i : i + 1, first:last] if k in over_time else v for k, v in given.items()}
        part[state] = given[state][i : i + 1] if first == 0 else 0 * given[state][i : i + 1]
        return scan(**part)

    rows = [[run(i, *d) for d in documents(SEGMENTS[i])] for i in range(B)]
    y = jnp.concatenate([jnp.concatenate([y for y, _ in row], axis=1) for row in rows])
    return y, jnp.concatenate([row[-1][1] for row in rows])


@pytest.mark.sweep(9)
@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_values_and_gradients_match_a_call_for_each_document(name, chunk, float64):
    scan, given = SCANS[name]
    given = jax.tree.map(jnp.float64, given)
    options = {} if chunk is None else {"chunk": chunk}

    @jax.jit
    def both(given):
        packed, back = jax.vjp(
            lambda given: scan(**given, segments=jnp.asarray(SEGMENTS), **options), given
        )
        alone, back_alone = jax.vjp(functools.partial(one_document_at_a_time, name), given)
        cotangents = jax.tree.map(jnp.cos, alone)
        if name == "conv":  # inputs of the last document only, but the next call takes all
            packed, alone = packed[:1], alone[:1]
            cotangents = cotangents[0], 0 * cotangents[1]
        return (packed, back(cotangents)), (alone, back_alone(cotangents))

    got, expected = both(given)
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", SCANS)
def test_one_segment_is_no_segments(name):
    scan, given = SCANS[name]
    given = jax.tree.map(jnp.float32, given)
    segments = jnp.full((B, T), 5)
    got, expected = (jax.jit(scan)(**given, segments=s) for s in (segments, None))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)


def test_rejects_segments_that_do_not_fit():
    for name in SCANS:
        scan, given = SCANS[name]
        with pytest.raises(TypeError, match="segments must be integers, got float32"):
            scan(**given, segments=jnp.zeros((B, T)))
        with pytest.raises(ValueError, match=r"segments must have shape \(2, 11\).* got \(2, 10\)"):
            scan(**given, segments=jnp.zeros((B, T - 1), int))


WIDTH = 8
LAYERS = MIXERS | {"causal_conv": layers.causal_conv(WIDTH, bias=False)}


def loss(layer, params, x, segments=None):
    y, _ = layer.apply(params, {}, x, train=True, segments=segments)
    return jnp.sin(3 * y).sum()


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_a_call_for_each_document(name, float64):
    layer = LAYERS[name]
    params = jax.tree.map(np.float64, layer_cases.initial(layer)[0])
    x = normal(1, T, WIDTH).astype(np.float64)

    def alone(params, x):
        return sum(loss(layer, params, x[:, i:j]) for i, j in documents(SEGMENTS[0]))

    packed = functools.partial(loss, layer, segments=jnp.asarray(SEGMENTS[:1]))
    got, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(params, x) for f in (packed, alone))
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-11)


def test_per_example_gradients_of_packed_rows_match_a_loop():
    layer = MIXERS["short_conv"]
    params, _ = layer_cases.initial(layer)

    def losses(params, x, segments):
        y, _ = layer.apply(params, {}, x, train=True, segments=segments)
        return jnp.square(y).mean((1, 2))

    batch = jnp.asarray(normal(B, T, WIDTH), np.float32), jnp.asarray(SEGMENTS)
    with jax.numpy_rank_promotion("allow"):
        assert_clipped_like_a_loop(Case(losses, params, batch))
