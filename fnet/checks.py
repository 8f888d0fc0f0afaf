"""Checks of arguments, one per kind, in one style: ``function: x must be ..., got ...``."""

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jax import Array

_BOUNDS: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda n: n >= 1,
    ">= 1": lambda n: n >= 1,
    ">= 0": lambda n: n >= 0,
    "> 0": lambda n: n > 0,
    ">= 0 and finite": lambda n: 0 <= n < float("inf"),
    "> 0 and finite": lambda n: 0 < n < float("inf"),
    "in [0, 1)": lambda n: 0 <= n < 1,
    "in [0, 1]": lambda n: 0 <= n <= 1,
    "in (0, 1]": lambda n: 0 < n <= 1,
    "in (0, 1)": lambda n: 0 < n < 1,
}


def sizes(where: str, **values: int | None) -> None:
    """Raise ValueError if a size is below 1; None is skipped."""
    numbers(where, "at least 1", **values)


def numbers(where: str, bound: str, **values: float | None) -> None:
    """Raise ValueError if a number, or NaN, is out of a bound such as ``> 0``; None is skipped.

    TypeError if it is an array.
    """
    for name, value in values.items():
        if shape := getattr(value, "shape", ()):
            raise TypeError(f"{where}: {name} must be a number, got an array of shape {shape}")
        if value is not None and not _BOUNDS[bound](value):
            raise ValueError(f"{where}: {name} must be {bound}, got {value}")


def choice(where: str, known: Collection[Any], **values: Any) -> None:
    """Raise ValueError if a value is not one of the known ones."""
    for name, value in values.items():
        if value not in known:
            raise ValueError(f"{where}: {name} must be one of {known}, got {value!r}")


def _is(array: "Array", kind: Literal["floating", "integer"]) -> bool:
    import jax.numpy as jnp  # here, so that what only checks numbers does not import JAX

    return jnp.issubdtype(array.dtype, getattr(jnp, kind))


def floating(where: str, **arrays: "Array | None") -> None:
    """Raise TypeError unless all arrays are floating; small parameters cast to integers are 0."""
    for name, array in arrays.items():
        if array is not None and not _is(array, "floating"):
            raise TypeError(f"{where}: {name} must be floating, got {array.dtype}")


def wide(where: str, **arrays: "Array | None") -> None:
    """Raise TypeError unless all arrays are float32 or wider."""
    for name, array in arrays.items():
        if array is not None and (not _is(array, "floating") or array.dtype.itemsize < 4):
            raise TypeError(f"{where}: {name} must be float32 or wider, got {array.dtype}")


def integers(where: str, **arrays: "Array | None") -> None:
    """Raise TypeError unless all arrays are integers."""
    for name, array in arrays.items():
        if array is not None and not _is(array, "integer"):
            raise TypeError(f"{where}: {name} must be integers, got {array.dtype}")


def shapes(where: str, given: str, **arrays: "tuple[Array | None, tuple[int, ...]]") -> None:
    """Raise ValueError if an array does not have its expected shape, given other arguments."""
    for name, (array, shape) in arrays.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{where}: {name} must have shape {shape} for {given}, got {array.shape}"
            )


def dims(where: str, **arrays: "tuple[Array | None, str]") -> dict[str, int]:
    """Return the sizes of axes by name, as in ``x=(x, "b t d")``; ValueError if two differ."""
    sizes: dict[str, int] = {}
    for name, (array, spec) in arrays.items():
        if array is None:
            continue
        axes = spec.split()
        expected = tuple(sizes.get(axis, axis) for axis in axes)
        if array.ndim != len(axes) or any(
            sizes.setdefault(axis, n) != n for axis, n in zip(axes, array.shape, strict=True)
        ):
            given = ", ".join(f"{n} {a.shape}" for n, (a, _) in arrays.items() if a is not None)
            raise ValueError(
                f"{where}: {name} must have shape [{', '.join(map(str, expected))}], got {given}"
            )
    return sizes


def last_axis(where: str, x: "Array", size: int) -> None:
    """Raise unless an array is floating [..., size]."""
    if x.shape[-1:] != (size,):
        raise ValueError(f"{where}: expected [..., {size}], got {x.shape}")
    floating(where, x=x)


def image(where: str, x: "Array", channels: int | None = None) -> None:
    """Raise ValueError unless an array is [N, H, W, channels]; None is any number of channels."""
    # Without the batch axis, width and channels would be taken for height and width.
    if x.ndim != 4 or (channels is not None and x.shape[-1] != channels):
        raise ValueError(
            f"{where}: expected [N, H, W, {'C' if channels is None else channels}], got {x.shape}"
        )


def mask(where: str, given: "Array | None", *allowed: tuple[int, ...]) -> None:
    """Raise ValueError unless a mask is bool and has one of the allowed shapes."""
    if given is not None and (given.dtype != bool or given.shape not in allowed):
        shapes = " or ".join(map(str, allowed))
        raise ValueError(
            f"{where}: mask must be bool of shape {shapes}, got {given.dtype} {given.shape}"
        )


def optimizer(where: str, given: Any) -> None:
    """Raise TypeError unless an optimizer is a gradient transformation of optax."""
    if not (hasattr(given, "init") and hasattr(given, "update")) or isinstance(given, type):
        got = getattr(given, "__name__", None) or type(given).__name__
        raise TypeError(
            f"{where}: optimizer must be an optax.GradientTransformation (of an nnx.Optimizer, its "
            f"tx), got {got}"
        )


def signature(where: str, function: Any, *names: str) -> None:
    """Raise TypeError for a function that cannot be called with these positional arguments."""
    wanted = f"({', '.join(names)})"
    if not callable(function):
        raise TypeError(f"{where}: expected a function of {wanted}, got {function!r}")
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        found.bind(*names)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{where}: expected a function of {wanted}, got {name}{found}") from None
