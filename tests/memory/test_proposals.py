"""Tests of the integer program that chooses what the backward pass saves."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import fnet
from fnet.memory import compile_min_memory, estimate_cost, peak, residuals
from fnet.memory.graph import analyze
from fnet.memory.proposals import Planner
from fnet.memory.remat import planned
from fnet.memory.windows import trace_inlined

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
def planner(f, offloads="nothing"):
    closed, _, structure = trace_inlined(f, inputs(), {})
    assert structure.num_leaves == 1
    return Planner(analyze(closed, [True, True, False], [True]), offloads)


def policy(f, proposal):
    return planned(proposal.windows, planner(f).graph.equations)


def temporaries(f):
    compiled, _ = compile_min_memory(jax.jit(jax.grad(f)).lower(*inputs()))
    return peak(compiled).temporaries


def flops(f):
    return estimate_cost(jax.make_jaxpr(jax.grad(f))(*inputs())).flops


@pytest.mark.sweep(6)
@pytest.mark.parametrize("f", [unrolled, scanned, chain])
def test_a_planned_policy_changes_neither_value_nor_gradients(f):
    p = planner(f)
    proposal = p.solve((p.plain_bytes + p.smallest) // 2)
    ours = jax.jit(jax.value_and_grad(policy(f, proposal).apply(f)))(*inputs())
    theirs = jax.jit(jax.value_and_grad(f))(*inputs())
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("f", [unrolled, scanned])
def test_the_compiled_program_is_smaller_by_the_predicted_bytes(f):
    p = planner(f)
    proposal = p.solve(int(0.4 * p.plain_bytes))
    assert proposal.bytes <= 0.4 * p.plain_bytes
    planned, plain = temporaries(policy(f, proposal).apply(f)), temporaries(f)
    assert planned <= 1.05 * proposal.bytes
    # XLA may save less of the plain program than it could: on JAX 0.12 a fifth less of gelu.
    assert plain - planned >= 0.7 * (p.plain_bytes - proposal.bytes)


def test_half_of_the_bytes_cost_few_flops():
    p = planner(unrolled)
    proposal = p.solve(int(0.5 * p.plain_bytes))
    ratio = flops(policy(unrolled, proposal).apply(unrolled)) / flops(unrolled)
    assert 1 < ratio < 1.05


def test_fewer_bytes_cost_more_time():
    p = planner(unrolled)
    limits = np.linspace(1.02 * p.plain_bytes, 1.02 * p.smallest, 5)
    proposals = [p.solve(int(limit)) for limit in limits]
    assert all(q.bytes <= limit for q, limit in zip(proposals, limits, strict=True))
    times = [q.time for q in proposals]
    assert times[0] < 0.01 * times[-1]
    assert all(b >= 0.98 * a for a, b in itertools.pairwise(times))


def test_a_solver_that_runs_out_of_nodes_is_given_more(monkeypatch):
    limits = []

    def with_few(*args, options, **kwargs):
        limits.append(options["node_limit"])
        if len(limits) % 2:
            return scipy.optimize.OptimizeResult(x=None, status=1)
        return milp(*args, options=options, **kwargs)

    milp = scipy.optimize.milp
    p = planner(unrolled)
    limit = int(0.5 * p.plain_bytes)
    expected = p.solve(limit)
    monkeypatch.setattr(scipy.optimize, "milp", with_few)
    assert p.solve(limit) == expected
    assert limits[1] == 10 * limits[0]


def test_no_choice_needs_less_than_the_smallest():
    p = planner(unrolled)
    assert p.solve(int(0.9 * p.smallest)) is None
    assert p.solve(int(1.1 * p.smallest)) is not None


def test_arrays_are_moved_to_host_memory_where_nothing_else_fits():
    on_device, with_host = planner(chain), planner(chain, offloads="all")
    limit = int(0.9 * on_device.smallest)
    assert on_device.solve(limit) is None
    proposal = with_host.solve(limit)
    found = residuals(policy(chain, proposal).apply(chain), *inputs())
    assert sum(r.bytes for r in found if r.alias_of == "host memory") >= ACTIVATION
    moved = sum(len(w.offloaded) for w in proposal.windows)
    assert f"{moved} in host memory" in policy(chain, proposal).saves


def test_a_planned_policy_works_at_another_batch_size_and_on_another_program():
    p = planner(unrolled)
    proposal = p.solve(int(0.5 * p.plain_bytes))
    params, x = inputs()
    for f, y in ((unrolled, x[:16]), (chain, x[:16])):
        applied = policy(unrolled, proposal).apply(f)
        chex.assert_trees_all_close(
            jax.grad(applied)(params, y), jax.grad(f)(params, y), rtol=1e-4, atol=1e-6
        )


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
