"""The device that a program is traced for."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas

from fnet.cpu.tracing import traced_for, tracing_device

GPU = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")


def test_a_function_is_traced_again_for_another_device():
    # It would have the loops of a CPU, and a target's memory would be that of another program.
    traced = []
    function = jax.jit(lambda x: (traced.append(tracing_device().platform), x + 1)[1])
    for device in (None, GPU, jax.local_devices()[0], GPU, None):
        with traced_for(device):
            function.trace(jnp.zeros(3))
    assert traced == ["cpu", "gpu"]


def test_kernels_in_pallas_are_lowered_for_that_device():
    def double(x, out):
        out[...] = 2 * x[...]

    shape = jax.ShapeDtypeStruct((256,), jnp.float32)
    with traced_for(GPU):
        traced = jax.jit(pallas.pallas_call(double, shape)).trace(shape)
        assert "custom_call" in traced.lower(lowering_platforms=("cuda",)).as_text()
