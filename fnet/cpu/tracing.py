"""Whether a program is traced for a CPU, whose compiler needs other loops than a GPU's."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_PLATFORM: ContextVar[str | None] = ContextVar("_PLATFORM", default=None)


@contextlib.contextmanager
def traced_for(platform: str | None) -> Iterator[None]:
    """Trace for a platform that is not JAX's default, such as that of a target.

    Args:
      platform: A `jax.Device.platform`; None for the default.
    """
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def tracing_platform() -> str:
    """Return the platform for which programs are traced now."""
    return _PLATFORM.get() or jax.default_backend()


def is_for_cpu() -> bool:
    """Whether what is traced now will run on a CPU."""
    return tracing_platform() == "cpu"
