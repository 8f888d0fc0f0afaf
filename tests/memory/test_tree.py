"""Trees: the same values and gradients, and estimates of a step that was traced once."""

import functools
import pickle
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from fnet.layers.dot_product_attention import dot_product_attention
from fnet.memory import compile_min_memory, estimate_cost, peak, residuals
from fnet.memory.cost import Cost
from fnet.memory.search import Option, Planner, Traced
from fnet.memory.tree import NOTHING, Blocks, Loops, Rows, Window

DEPTH, WIDTH, BATCH = 8, 32, 1024
ACTIVATION = 4 * BATCH * WIDTH


def block(x, kernels):
    first, second = kernels
    return x + jax.nn.gelu(x @ first) @ second


def unrolled(params, x):
    for kernels in zip(*params, strict=True):
        x = block(x, kernels)
    return (x**2).mean()


def scanned(params, x):
    return (jax.lax.scan(lambda x, k: (block(x, k), None), x, params)[0] ** 2).mean()


def chain(params, x):
    for kernel in params[0][:, :, :WIDTH]:
        x = jnp.tanh(x @ kernel)
    return (x**2).mean()


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(DEPTH, WIDTH, 4 * WIDTH)).astype(np.float32) / 8
    second = rng.normal(size=(DEPTH, 4 * WIDTH, WIDTH)).astype(np.float32) / 8
    return (first, second), rng.normal(size=(BATCH, WIDTH)).astype(np.float32)


@functools.cache
def planner(f, *more):
    def build(policy, microbatches):
        def step(params, x):
            value, grads = jax.value_and_grad(policy.apply(f))(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return jax.jit(step, donate_argnums=0).trace(*inputs())

    return Planner(build, [1], None, *more or (True, 0))


def fits(limit):
    return lambda option: option.bytes <= limit


def flops(f):
    return estimate_cost(jax.make_jaxpr(jax.grad(f))(*inputs())).flops


@functools.cache
def plain_gradient(f):
    return jax.jit(jax.value_and_grad(f))(*inputs())


TREES = [
    Blocks(0.2, (NOTHING,)),
    Blocks(0.05, (2.0,)),
    Blocks(0.2, (NOTHING,), on_host=True),
    Loops(1),
    Loops(1, 0.5),
    Rows(4),
    Rows(3, keep=5, inside=Blocks(0.2, (NOTHING,))),
    Blocks(0.2, (NOTHING,), of=Rows(4, inside=Loops(1))),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_tree_is_a_value_and_changes_neither_value_nor_gradients(tree):
    f = scanned
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert "\n" not in f"{tree.name} {tree}"
    ours = jax.jit(jax.value_and_grad(tree.apply(f)))(*inputs())
    chex.assert_trees_all_close(ours, plain_gradient(f), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("f", [unrolled, scanned, chain])
def test_windows_are_assembled_from_the_trace_of_the_plain_step(f):
    p = planner(f)
    plain = p.plain.option
    for share in (0.75, 0.5):
        found = p.best(fits(int(share * plain.bytes)))
        assert found.bytes <= share * plain.bytes
        if not isinstance(found.tree, Blocks):
            continue
        traced = p.trace(found.tree).option
        assert traced.bytes == pytest.approx(found.bytes, rel=0.12)
        assert traced.cost.flops == pytest.approx(found.cost.flops, rel=0.02)


@pytest.mark.parametrize("f", [unrolled, chain])
def test_what_runs_last_is_saved_since_the_backward_pass_begins_with_it(f):
    p = planner(f)
    for share in (0.8, 0.6, 0.0):
        tree = p.windows(int(share * p.plain.option.bytes)).tree
        assert len(tree.least) == 1 or tree.least[-1] is None
    assert len(tree.least) > 1
    assert tree.least[0] is not None


def test_attention_runs_again_in_the_backward_pass_only_if_nothing_is_saved():
    q = jnp.ones((1, 64, 2, 8))

    def f(q):
        y = jnp.tanh(q)
        return jnp.sin(dot_product_attention(y, y, y, chunk=16)).sum()

    def count(f):
        return str(jax.make_jaxpr(jax.grad(f))(q)).count(" exp ")

    again = [jax.checkpoint(f, policy=Window(0, 1, least=x).policy) for x in (1e3, NOTHING)]
    assert [*map(count, (f, *again))] == [2, 2, 3]


def test_the_smallest_trees_do_not_depend_on_a_budget():
    p = planner(chain)
    assert p.best(fits(1)) is None
    smallest = p.smallest()
    assert [o.bytes for o in smallest] == sorted(o.bytes for o in smallest)
    assert smallest[0].bytes < 0.5 * p.plain.option.bytes


def test_inputs_of_windows_are_moved_to_host_memory():
    found = residuals(Blocks(0.2, (NOTHING,), on_host=True).apply(chain), *inputs())
    assert sum(r.bytes for r in found if r.alias_of == "host memory") >= ACTIVATION
    limit = planner(chain, False, 0).smallest()[0].bytes - 1
    assert planner(chain, False, 0).best(fits(limit)) is None
    assert planner(chain, False, 0, True).best(fits(limit)).tree.on_host


@pytest.mark.slow
def test_a_plan_is_never_slower_than_a_checkpoint_around_each_block():
    def by_hand(params, x):
        for kernels in zip(*params, strict=True):
            x = jax.checkpoint(block)(x, kernels)
        return (x**2).mean()

    (first, second), x = inputs()
    args = (list(first), list(second)), x

    def build(policy, microbatches):
        del microbatches
        return jax.jit(jax.grad(policy.apply(unrolled))).trace(*args)

    compiled, _ = compile_min_memory(jax.jit(jax.grad(by_hand)).lower(*args))
    budget = peak(compiled).total + 1024  # scalars
    plan = fnet.memory.plan(build, budget)
    assert plan.chosen.peak.total <= budget
    assert plan.chosen.cost.flops <= flops(by_hand)


def test_as_many_rows_are_kept_as_fit_by_what_was_traced():
    exp = jax.make_jaxpr(jnp.exp)(jnp.zeros(25)).jaxpr.eqns[0]  # three arrays of 100 bytes
    division = types.SimpleNamespace(dearest=[(0, exp.outvars[0], exp)] * 3)
    fewest, tried = Option(Rows(2), 1, 1000, Cost(0, 0)), []

    def trace(tree):
        tried.append(tree.keep)  # and 50 bytes more than their sizes
        return Traced(fewest._replace(tree=tree, bytes=1050 + 100 * tree.keep), None, None)

    search = functools.partial(Planner._keeping, types.SimpleNamespace(trace=trace), Rows, [2])
    for limit, keeps in ((1240, [2, 1]), (1250, [2]), (1340, [3, 2]), (1099, [])):
        tried.clear()
        fits = functools.partial(lambda limit, option: option.bytes <= limit, limit)
        found = [option.tree.keep for option in search(fewest, {}, division, fits)]
        assert (tried, found) == (keeps, keeps[-1:])
