"""Random programs: clipped sums equal a loop over batches of one example, or the loss is refused.

A program in which no step may mix examples must not be refused.
"""

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from random_programs import ANY_PROGRAMS, BATCH, PARAMS, ROWWISE_PROGRAMS, B, run

import fnet


def flat(tree):
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(tree)])


def check(program):
    """Compare clipped sums with a loop over batches of one. Returns whether the loss is refused."""
    loss = functools.partial(run, program)

    @jax.jit
    def clipped_sum(params, clip, mask):
        return fnet.clipped_grad(loss, 1.0)(params, *BATCH, clip=clip, mask=mask)[0]

    @jax.jit
    def gradient_of_one(params, example):
        return jax.grad(lambda p: loss(p, *example)[0])(params)

    everyone = np.ones(B, bool)
    message = ""
    try:
        plain = flat(clipped_sum(PARAMS, np.inf, everyone))
    except (ValueError, TypeError) as error:
        message = str(error)
    if message:
        assert message.startswith("clipped_grad: ")
        return True
    grads = [flat(gradient_of_one(PARAMS, [a[b : b + 1] for a in BATCH])) for b in range(B)]
    grads = [g if np.isfinite(g).all() else np.zeros_like(g) for g in grads]
    norms = np.array([np.linalg.norm(g) for g in grads])
    np.testing.assert_allclose(plain, sum(grads), rtol=0, atol=1e-3 * norms.sum() + 1e-6)
    clip = float(np.float32(np.median(norms) / 2 or 1))
    total = flat(clipped_sum(PARAMS, clip, everyone))
    expected = sum(
        min(1, clip / max(norm, 1e-30)) * g for norm, g in zip(norms, grads, strict=True)
    )
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-3 * clip * B)
    for b in range(B):
        without = flat(clipped_sum(PARAMS, clip, np.arange(B) != b))
        assert np.linalg.norm(total - without) <= 1.001 * clip
    return False


QUICK = settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
THOROUGH = settings(max_examples=1500, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("effort", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("programs", "may_mix"), [(ROWWISE_PROGRAMS, False), (ANY_PROGRAMS, True)])
def test_programs_equal_a_loop_over_examples_or_may_mix_and_are_refused(effort, programs, may_mix):
    @effort
    @given(programs)
    def check_all(program):
        assert not check(program) or may_mix

    check_all()
