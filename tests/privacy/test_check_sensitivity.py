"""`check_sensitivity` finds a sum without a bound, and random programs keep theirs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from private_programs import ACTIVATION, BF16, TABLES, D, random_program, run

from fnet import privacy
from fnet.privacy import sensitivity

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")

X = np.random.default_rng(0).normal(size=(6, D)).astype(np.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(D, D)), jnp.float32)


def linear(w, x):
    return (x @ w).sum(-1)


def test_finds_a_sum_that_is_not_clipped(monkeypatch):
    clipped_grad = sensitivity.clipped_grad
    monkeypatch.setattr(sensitivity, "clipped_grad", lambda loss, clip: clipped_grad(loss, np.inf))
    moved = privacy.check_sensitivity(linear, W, X)
    assert moved.worst > 1e6
    assert moved.worst == max(moved.by_change.values())


def test_finds_sums_that_are_rounded_to_bfloat16(monkeypatch):
    clipped_grad = sensitivity.clipped_grad

    def rounded(loss, clip):
        def gradient(*args, **options):
            total, info = clipped_grad(loss, clip)(*args, **options)
            return total.astype(BF16), info

        return gradient

    rows = X[:1] + 0.05 * np.random.default_rng(2).normal(size=(1024, D)).astype(np.float32)
    assert privacy.check_sensitivity(linear, W, rows, trials=8).worst <= 1.001
    monkeypatch.setattr(sensitivity, "clipped_grad", rounded)
    assert privacy.check_sensitivity(linear, W, rows, trials=8).worst > 1.1


def test_distances_are_those_of_the_parameters_of_each_strategy():
    def loss(p, x):
        return (x @ (p["masked"] * jnp.tri(D)) + x @ p["plain"]).sum(-1)

    moved = privacy.check_sensitivity(loss, {"masked": W, "plain": W}, X, clip=0.3)
    assert set(moved.by_strategy) == {"derived", "ghost norm"}
    assert max(moved.by_strategy.values()) < moved.worst <= 1.001
    # The other example is at the opposite end, so that the sum moves by two clips.
    assert moved.by_change["replaced"] > 0.9


def test_a_single_key_becomes_a_key_of_each_example():
    def loss(w, x, key):
        return ((x * jax.random.bernoulli(key, 0.5, x.shape)) @ w).sum(-1)

    assert privacy.check_sensitivity(loss, W, X, jax.random.key(0)).worst <= 1.001


def test_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="check_sensitivity: clip must be > 0 and finite"):
        privacy.check_sensitivity(linear, W, X, clip=0.0)
    with pytest.raises(ValueError, match="check_sensitivity: trials must be"):
        privacy.check_sensitivity(linear, W, X, trials=0)
    with pytest.raises(ValueError, match="expected at least 2 examples, got 1"):
        privacy.check_sensitivity(linear, W, X[:1])


CANCELLED = {
    "standardized": lambda w, x: (x @ ((w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-4))).sum(-1),
    "standardized bfloat16": lambda w, x: (x.astype(BF16) @ (w - w.mean(0)).astype(BF16)).sum(-1).astype(jnp.float32),
    "difference of equal functions": lambda w, x: (x @ jnp.tanh(w)).sum(-1) - (x @ jnp.tanh(1.0 * w)).sum(-1),
    "sum of squares of sine and cosine": lambda w, x: (jnp.sin(x @ w + w[0]) ** 2 + jnp.cos(x @ w + w[0]) ** 2).sum(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", CANCELLED)
def test_gradients_that_are_rounding_errors_are_clipped(name):
    rows = X[:, :1] * np.ones(D, np.float32)
    assert privacy.check_sensitivity(CANCELLED[name], W, rows).worst <= 1.001


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [("equal functions", (6, 3, 1), 1), ("sum of a softmax", (64, 3, 32), 1), ("sum of a softmax", (64, 3, 32), 2)],
)  # fmt: skip
def test_rounding_errors_inside_of_a_checkpoint_are_clipped(name, shape, layers):
    """Both backward passes round differently: their gradients may be 0 and 1e13 clips."""

    @jax.checkpoint
    def layer(h, w):
        return ACTIVATION[name](h @ w), None

    def loss(w, x):
        h = layer(x, w)[0] if layers == 1 else jax.lax.scan(layer, x, w)[0]
        return (1e6 * h * jnp.arange(1.0, 4.0)[:, None]).sum((1, 2))

    rng, width = np.random.default_rng(0), shape[-1]
    w = rng.normal(size=(*(layers,) * (layers > 1), width, width)).astype(np.float32)
    moved = privacy.check_sensitivity(loss, w, rng.normal(size=shape).astype(np.float32))
    assert list(moved.by_strategy) == ["rematerialized"]
    assert moved.worst <= 1.001


def check(seed):
    check_program(random_program(seed), seed)


def check_program(program, seed):
    moved = privacy.check_sensitivity(
        functools.partial(run, program), program.params, program.x, trials=8, seed=seed
    )
    assert moved.worst <= 1.001, (seed, program.layers, moved)


@pytest.mark.parametrize("seed", range(3))
def test_random_private_programs(seed):
    check(seed)


def test_a_program_whose_sums_of_squares_overflow():
    layers = [
        ("difference", "one-sided", "convolution", "checkpoint", 1),
        ("plus a sign", "normalized", "scale", "none", 1),
        ("low rank", "bfloat16", "product", "jit", 0),
    ]
    check_program(random_program(204)._replace(layers=layers), 204)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(200))
def test_many_random_private_programs(block):
    jax.clear_caches()
    for seed in range(100 * block, 100 * (block + 1)):
        check(seed)


def test_random_programs_use_every_operation():
    layers = [layer for seed in range(200) for layer in random_program(seed).layers]
    for i, table in enumerate(TABLES):
        assert {layer[i] for layer in layers} == set(table)
