"""The platform that a program is traced for."""

import jax
import jax.numpy as jnp

from fnet.cpu.tracing import traced_for, tracing_platform


def test_a_function_is_traced_again_for_another_platform():
    # It would have the loops of a CPU, and a target's memory would be that of another program.
    traced = []
    function = jax.jit(lambda x: (traced.append(tracing_platform()), x + 1)[1])
    for platform in (None, "cuda", "cpu", "cuda", None):
        with traced_for(platform):
            function.trace(jnp.zeros(3))
    assert traced == ["cpu", "cuda"]
