"""What a program is traced for: a CPU, which needs other loops, or examples that stay apart."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

_DEVICE = jax.make_user_context(default_value=None)
"""The device that is not of this machine. JAX's caches of traced functions know it."""


@contextlib.contextmanager
def traced_for(device: Any) -> Iterator[None]:
    """Trace and lower for a device, also an abstract one, that this machine does not have."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if device in jax.local_devices() else device
    if device and mesh.empty:  # which kernels in Pallas ask for the device
        kind = jax.sharding.AbstractDevice(device.device_kind, None, device.platform)
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with _DEVICE(device), jax.sharding.use_abstract_mesh(mesh):
        yield


def tracing_device() -> Any:
    """Return the device for which programs are traced now."""
    return _DEVICE.value or jax.local_devices()[0]


_APART = jax.make_user_context(default_value=False)
"""Whether the examples of the batch must stay apart."""


@contextlib.contextmanager
def examples_apart() -> Iterator[None]:
    """Trace a loss whose gradients are wanted for each example, not summed over the batch."""
    with _APART(True):
        yield


def keeps_examples_apart() -> bool:
    """Whether what is traced now is to be differentiated example by example."""
    return bool(_APART.value)


def is_for_cpu() -> bool:
    """Whether what is traced now will run on a CPU."""
    return bool(tracing_device().platform == "cpu")
