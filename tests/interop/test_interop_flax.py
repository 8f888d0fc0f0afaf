"""Flax models with `InPlaceABN` against BatchNorm and leaky_relu: values and memory."""

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

import chex
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fnet
from fnet.interop import linen as fnet_linen
from fnet.interop import nnx as fnet_nnx
from fnet.memory.peak import CANDIDATE_OPTIONS

CLASSES, EPS = 3, 1e-5


@pytest.mark.parametrize("name", ["linen", "nnx", "jax_privacy", "torch"])
def test_adapters_are_imported_on_first_use(name, monkeypatch):
    module = importlib.import_module(f"fnet.interop.{name}")
    monkeypatch.delattr(fnet.interop, name)
    assert getattr(fnet.interop, name) is module


class LinenNet(nn.Module):
    """Blocks of convolution, norm and leaky_relu, average pooling and a dense head."""

    in_place: bool
    widths: tuple[int, ...] = (6, 6)

    @nn.compact
    def __call__(self, x, *, train):
        for i, width in enumerate(self.widths):
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            options = {"use_running_average": not train, "momentum": 0.9, "name": f"norm_{i}"}
            if self.in_place:
                x = fnet_linen.InPlaceABN(**options)(x)
            else:
                x = nn.leaky_relu(nn.BatchNorm(**options)(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class NnxBlock(nnx.Module):
    def __init__(self, n_in, n_out, *, in_place, rngs):
        norm = fnet_nnx.InPlaceABN if in_place else nnx.BatchNorm
        self.conv = nnx.Conv(n_in, n_out, (3, 3), use_bias=False, rngs=rngs)
        self.norm = norm(n_out, momentum=0.9, rngs=rngs)
        self.in_place = in_place

    def __call__(self, x):
        x = self.norm(self.conv(x))
        return x if self.in_place else nnx.leaky_relu(x)


class NnxNet(nnx.Module):
    """The same network."""

    def __init__(self, in_place, widths=(6, 6), *, rngs):
        sizes = itertools.pairwise((3, *widths))
        self.blocks = nnx.List([NnxBlock(*n, in_place=in_place, rngs=rngs) for n in sizes])
        self.head = nnx.Linear(widths[-1], CLASSES, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Functional(NamedTuple):
    """A model of either API as ``apply(params, stats, x, train) -> (logits, stats)``."""

    apply: Callable
    params: chex.ArrayTree  # shapes and dtypes alone, and so the statistics
    stats: chex.ArrayTree


def linen_model(x, **options):
    net = LinenNet(**options)
    variables = jax.eval_shape(functools.partial(net.init, train=True), jax.random.key(0), x)

    def apply(params, stats, x, train):
        variables = {"params": params, "batch_stats": stats}
        logits, changed = net.apply(variables, x, train=train, mutable=["batch_stats"])
        return logits, changed["batch_stats"]

    return Functional(apply, variables["params"], variables["batch_stats"])


def nnx_model(x, **options):
    del x
    net = nnx.eval_shape(lambda: NnxNet(**options, rngs=nnx.Rngs(0)))
    graph, params, stats = nnx.split(net, nnx.Param, nnx.BatchStat)

    def apply(params, stats, x, train):
        net = nnx.merge(graph, params, stats, copy=True)
        net.train() if train else net.eval()
        return net(x), nnx.state(net, nnx.BatchStat)

    return Functional(apply, params, stats)


APIS = pytest.mark.parametrize("model", [linen_model, nnx_model], ids=["linen", "nnx"])


def images(seed=0, n=6, size=5):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, size, size, 3)), jnp.float32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def map_named(f, name, tree, *more):
    """Apply ``f`` to the leaves called ``name`` of ``tree`` and ``more``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: f(*leaves) if f"'{name}'" in jax.tree_util.keystr(path) else leaves[0],
        tree,
        *more,
    )  # fmt: skip


def random_like(tree, seed=1):
    """A tree like ``tree`` with values between 0.5 and 1.5."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.uniform(0.5, 1.5, a.shape), a.dtype), tree)


@APIS
def test_matches_batch_norm_and_leaky_relu(model):
    x, labels = images(), jnp.arange(6) % CLASSES
    ours, theirs = model(x, in_place=True), model(x, in_place=False)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours[1:], theirs[1:])
    params, stats = random_like(ours.params), random_like(ours.stats)

    def run(net, params):
        def loss(params, x):
            logits, new = net.apply(params, stats, x, True)
            return cross_entropy(logits, labels), (logits, new)

        grads, (logits, new) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
        return logits, grads, new

    logits, grads, new = run(ours, params)
    expected, expected_grads, expected_new = run(
        theirs, map_named(lambda g: g + EPS, "scale", params)
    )
    chex.assert_trees_all_close(logits, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-3, atol=1e-5)
    n = x.size // 3
    unbiased = lambda new, old: 0.9 * old + (new - 0.9 * old) * n / (n - 1)  # noqa: E731
    expected_new = map_named(unbiased, "var", expected_new, stats)
    chex.assert_trees_all_close(new, expected_new, rtol=1e-4, atol=1e-5)


def test_linen_training_needs_mutable_statistics():
    norm = fnet_linen.InPlaceABN(use_running_average=False)
    variables = norm.init(jax.random.key(0), images())
    initial = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    chex.assert_trees_all_equal(variables["batch_stats"], initial)
    with pytest.raises(flax.errors.ModifyScopeVariableError, match="batch_stats"):
        norm.apply(variables, images())


def test_nnx_views_and_modes_select_the_statistics():
    norm = fnet_nnx.InPlaceABN(3, rngs=nnx.Rngs(0))
    x = images()
    in_training = norm(x)
    assert "use_running_average" in nnx.view_info(norm)
    frozen = nnx.view(norm, use_running_average=True)
    before = jnp.copy(norm.mean[...])
    evaluated = frozen(x)
    assert float(jnp.abs(in_training - evaluated).max()) > 1e-3
    norm.eval()
    chex.assert_trees_all_equal(norm(x), evaluated)
    chex.assert_trees_all_equal(norm.mean[...], before)
    chex.assert_trees_all_close(norm(x, use_running_average=False), in_training)


@APIS
def test_temporaries_of_four_blocks_are_below_batch_norms(model):
    x = images(n=4, size=16)

    def temporaries(in_place):
        net = model(x, in_place=in_place, widths=(16,) * 4)

        def loss(params, stats):
            logits, stats = net.apply(params, stats, x, True)
            return jnp.square(logits).mean(), stats

        lowered = jax.jit(jax.grad(loss, has_aux=True)).lower(net.params, net.stats)
        return fnet.memory.peak(lowered.compile(CANDIDATE_OPTIONS["cpu"][-1])).temporaries

    # A block saves 1 array instead of 3. With 2 or 3 live ones that is 6 or 7 arrays instead of 12.
    assert temporaries(in_place=True) < 0.65 * temporaries(in_place=False)
