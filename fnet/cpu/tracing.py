"""What a program is traced for: a CPU, which needs other loops, or examples that stay apart."""

import contextlib
from collections.abc import Iterator

import jax

_PLATFORM = jax.make_user_context(default_value=None)
"""The platform that is not JAX's default. JAX's caches of traced functions know it."""


@contextlib.contextmanager
def traced_for(platform: str | None) -> Iterator[None]:
    """Trace for a `jax.Device.platform` that is not JAX's default, such as a target's."""
    with _PLATFORM(None if platform == jax.default_backend() else platform):
        yield


def tracing_platform() -> str:
    """Return the platform for which programs are traced now."""
    platform: str = _PLATFORM.value or jax.default_backend()
    return platform


_APART = jax.make_user_context(default_value=False)
"""Whether the examples of the batch must stay apart."""


@contextlib.contextmanager
def examples_apart() -> Iterator[None]:
    """Trace a loss whose gradients are wanted for each example, not summed over the batch."""
    with _APART(True):
        yield


def keeps_examples_apart() -> bool:
    """Whether what is traced now is to be differentiated example by example."""
    apart: bool = _APART.value
    return apart


def is_for_cpu() -> bool:
    """Whether what is traced now will run on a CPU."""
    return tracing_platform() == "cpu"
