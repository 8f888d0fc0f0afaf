"""Whether a program is traced for a CPU, whose compiler needs other loops than a GPU's."""

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


def is_for_cpu() -> bool:
    """Whether what is traced now will run on a CPU."""
    return tracing_platform() == "cpu"
