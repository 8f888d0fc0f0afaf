"""Many tangents or cotangents at one point: the primal once, then the lanes a few at a time.

Source: Enzyme's batch mode as Rust has it (rust-lang/rust pull request 137880):
one primal and N shadows in one pass.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff import shadows
from fnet.autodiff.lanes import Linear, Width
from fnet.autodiff.shadows import Shadows, differentiable


def jvps(
    f: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    width: Width = "auto",
    primal: bool = True,
) -> Any:
    """N directional derivatives of ``f`` at one point.

    With J the Jacobian of f at ``primals`` and t_i the i-th tangent,

        out = f(primals),    tangents_out_i = J t_i,    i = 0 .. N - 1.

    ``f`` is evaluated once and linearised; lanes pass through the linear function
    ``width`` at a time. Jit it: outside of `jax.jit` a loop is compiled every call.

    Tangents of an argument come in one of three forms, told by their shapes, and
    results come back in the form given:

    ========  ==================================== ================================
    form      for a leaf [len, *rest]              lane i
    ========  ==================================== ================================
    stacked   [N, len, *rest]                      leaf[i]
    packed    [N * len, *rest] (Enzyme's Dualv)    leaf[i * len : (i + 1) * len]
    separate  a list or tuple of N trees           the i-th tree
    ========  ==================================== ================================

    Scalars are [N] stacked and packed alike. Where arguments have different forms,
    results are stacked. Separate lanes are written out one after the other unless
    ``width`` is given: results then need no common array, but compile time grows
    with N.

    Args:
      f: a function of arrays, or trees of them.
      primals: its arguments, as for `jax.jvp`.
      tangents: one entry an argument, each in a form above; None (Enzyme's Const)
        for an argument that is not varied. Integers, booleans and keys are never
        varied: where they are whole arguments they need None, inside a tree
        anything may stand for them.
      width: how many lanes exist at a time, beside results; need not divide N.
        "auto": the fastest found, see `fnet.autodiff.lanes.Linear.best_width`. It
        bounds memory except on CPUs in the backward pass of convolutions.
      primal: whether ``f``'s result is returned; False is Enzyme's DualOnly.

    Returns:
      ``(out, tangents_out)``, or ``tangents_out`` alone; of results without a
      derivative the tangents are ``float0``.

    Raises:
      ValueError: for another number of tangents than arguments, tangents that do
        not fit (or fit the output: those are for `vjps`), unequal numbers of
        lanes, none, or a width below 1.
      TypeError: for another dtype, a tangent of an argument that has none, primals that are
        no tuple, or a width that is no int; from JAX for a function with a
        `jax.custom_vjp`, which has no forward mode.
    """
    check_width("jvps", width)
    primals = as_entries("jvps", "primals", primals)
    tangents = _given(primals, tangents, f)
    read: dict[int, Shadows] = {}
    for i, t in enumerate(tangents):
        if t is not None:
            read[i] = _read_tangents(f, primals, i, t)
    n = shadows.same_number(
        "jvps: tangents", {f"argument {i}": s.n for i, s in read.items() if s.n is not None}
    )
    if n is None:
        raise ValueError("jvps: expected tangents of at least one argument, got None for all")

    point, call = of_leaves(f, primals, list(read))
    _, push, out = jax.linearize(call, point, has_aux=True)
    linear = Linear.of(lambda *lane: push(list(lane)), point)
    form = shadows.common_form([s.form for s in read.values()])
    results = shadows.empty(form, out, n)
    given = [s._replace(n=n) for s in read.values()]
    if form == "separate":
        by_argument = zip(*(s.separate() for s in given), strict=True)
        lanes = [list(itertools.chain(*lane)) for lane in by_argument]
        results = results._replace(lanes=_one_by_one(linear, lanes, width))
    else:
        results = results.filled(linear.over([a for s in given for a in s.stacked()], n, width))
    return (out, results.tree(out)) if primal else results.tree(out)


def vjps(
    f: Callable[..., Any],
    primals: Sequence[Any],
    cotangents: Any,
    *,
    argnums: int | Sequence[int] | None = None,
    width: Width = "auto",
    into: Sequence[Any] | None = None,
    primal: bool = True,
) -> Any:
    """N pullbacks through ``f`` at one point, added to accumulators if there are any.

    With J the Jacobian of f at ``primals`` and c_i the i-th cotangent,

        out = f(primals),    grads_i = into_i + J^T c_i,    i = 0 .. N - 1.

    ``f`` is evaluated once; lanes go back ``width`` at a time. Jit it, as `jvps`.

    Guarantees:
      - ``into`` is given away. Called outside of any transformation, its buffers
        are the results', and the old arrays are deleted. Under an outer `jax.jit`
        it is updated in place where that donates it. Beside it only the gradients
        of the lanes at a time exist.
      - A new array of N gradients costs the time in which the system finds it
        memory: on CPUs, with hundreds of megabytes, more than the gradients
        themselves. ``into`` and the separate form do not pay it.

    Args:
      f: a function of arrays, or trees of them.
      primals: its arguments, as for `jax.vjp`.
      cotangents: of the output, in a form of `jvps`; or, with ``into``, one of the
        output's own shape, the same seed for all lanes. Without ``into``, the
        output's own shape is packed, N = 1; a scalar is refused.
      argnums: the arguments to differentiate; None: all that are differentiable
        (with ``into``, all it has an entry for).
      width: as for `jvps`.
      into: accumulators, one entry an argument, each in a form of `jvps`; None
        where ``argnums`` does not name the argument.
      primal: whether ``f``'s result is returned; False is Enzyme's DuplicatedOnly.

    Returns:
      ``(out, grads)``, or ``grads`` alone: a tuple, one entry an argument, None for
      those left out. Each is in the form of its accumulator, else in that of the
      cotangents; of leaves without a derivative it is ``float0``.

    Raises:
      ValueError: for cotangents that do not fit (or fit the arguments: those are
        for `jvps`), accumulators of another number, shape or N, no lanes, or a
        width below 1.
      TypeError: for another dtype, an argument that cannot be differentiated, primals that
        are no tuple, or a width that is no int.
    """
    check_width("vjps", width)
    primals = as_entries("vjps", "primals", primals)
    wanted = _wanted(primals, argnums, into)
    point, call = of_leaves(f, primals, wanted)
    outs, pull, out = jax.vjp(call, point, has_aux=True)
    linear = Linear.of(lambda *c: pull(list(c))[0], outs)

    sums = (
        []
        if into is None
        else [shadows.read(f"vjps: into, argument {i}", primals[i], into[i]) for i in wanted]
    )
    counts = {f"into, argument {i}": s.n for i, s in zip(wanted, sums, strict=False)}
    one_seed = into is not None and _has_shapes_of(out, cotangents)
    if one_seed:
        given = shadows.read("vjps: the seed", out, [cotangents])
    else:
        given = _read_cotangents(primals, out, cotangents)
        counts["the cotangents"] = given.n
    n = shadows.same_number("vjps", {k: c for k, c in counts.items() if c is not None})
    if n is None or not outs:
        raise ValueError(
            "vjps: expected a differentiable output, and cotangents for each of N lanes, got an "
            f"output of {[str(jax.typeof(a)) for a in jax.tree.leaves(out)]}"
        )
    form = shadows.common_form([given.form]) if not one_seed else None
    if into is None:
        results = [shadows.empty(form, primals[i], n) for i in wanted]
        results = _pulled(linear, given, results, n, width, one_seed, added=False)
    else:
        results = _added(linear, given, [s._replace(n=n) for s in sums], n, width, one_seed)
    grads: list[Any] = [None] * len(primals)
    for i, r in zip(wanted, results, strict=True):
        grads[i] = r.tree(primals[i])
    return (out, tuple(grads)) if primal else tuple(grads)


def _pulled(
    linear: Linear,
    given: Shadows,
    results: list[Shadows],
    n: int,
    width: Width,
    one_seed: bool,
    added: bool,
) -> list[Shadows]:
    """``results`` with the gradients in them, added to what is there if there is."""
    sizes = [len(r.shapes) for r in results]
    if all(r.form == "separate" for r in results if r.shapes):
        lanes = given.separate()
        grads = _one_by_one(linear, lanes, width) * (n if one_seed else 1)
        split = [_parts(lane, sizes) for lane in grads]
        per_argument = [[lane[i] for lane in split] for i in range(len(results))]
        if added:
            per_argument = [
                [list(map(jnp.add, s, g)) for s, g in zip(r.separate(), lanes, strict=True)]
                for r, lanes in zip(results, per_argument, strict=True)
            ]
        return [r._replace(lanes=p) for r, p in zip(results, per_argument, strict=True)]
    sums = [a for r in results for a in r.stacked()] if added else None
    if one_seed:
        assert sums is not None
        stacked = [s + g[None] for s, g in zip(sums, linear.one(given.lanes[0]), strict=True)]
    else:
        stacked = linear.over(given._replace(n=n).stacked(), n, width, sums)
    return [r.filled(p) for r, p in zip(results, _parts(stacked, sizes), strict=True)]


def _added(
    linear: Linear, given: Shadows, sums: list[Shadows], n: int, width: Width, one_seed: bool
) -> list[Shadows]:
    """Accumulators with the gradients added, in their own buffers."""

    def add(sums_lanes: list[Any], given_lanes: list[Any], residuals: list[Array]) -> list[Any]:
        results = _pulled(
            dataclasses.replace(linear, residuals=residuals),
            given._replace(lanes=given_lanes),
            [s._replace(lanes=lanes) for s, lanes in zip(sums, sums_lanes, strict=True)],
            n,
            width,
            one_seed,
            added=True,
        )
        return [r.lanes for r in results]

    args = [s.lanes for s in sums], given.lanes, linear.residuals
    # Inside of a transformation the arrays are not there to be given away.
    if not any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(args)):
        add = jax.jit(add, donate_argnums=0)
    return [s._replace(lanes=lanes) for s, lanes in zip(sums, add(*args), strict=True)]


def _one_by_one(linear: Linear, lanes: list[list[Array]], width: Width) -> list[list[Array]]:
    """Results lane by lane, written out; with a width, so many lanes as one."""
    if width == "auto" or width == 1:
        return [linear.one(lane) for lane in lanes]
    results = []
    for i in range(0, len(lanes), width):
        chunk = lanes[i : i + width]
        out = linear.at_once([jnp.stack(leaves) for leaves in zip(*chunk, strict=True)])
        results += [[a[j] for a in out] for j in range(len(chunk))]
    return results


def _parts(leaves: list[Array], sizes: list[int]) -> list[list[Array]]:
    given = iter(leaves)
    return [list(itertools.islice(given, size)) for size in sizes]


def of_leaves(
    f: Callable[..., Any], primals: Sequence[Any], varied: Sequence[int]
) -> tuple[list[Array], Callable[[list[Array]], tuple[list[Array], Any]]]:
    """The varied arguments' differentiable leaves, and ``f`` as a function of them.

    The function's results are those that are differentiable, and all of them.
    """
    leaves = [jax.tree.leaves(primals[i]) for i in varied]
    point = [jnp.asarray(a) for a in itertools.chain(*leaves) if differentiable(a)]

    def call(point: list[Array]) -> tuple[list[Array], Any]:
        given, args = iter(point), list(primals)
        for i in varied:
            args[i] = jax.tree.map(lambda a: next(given) if differentiable(a) else a, args[i])
        out = f(*args)
        return [jnp.asarray(a) for a in jax.tree.leaves(out) if differentiable(a)], out

    return point, call


def check_width(where: str, width: Any) -> None:
    """Refuses what is not a width."""
    if width == "auto":
        return
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"{where}: width must be an int or 'auto', got {width!r}")
    if width < 1:
        raise ValueError(
            f"{where}: width must be at least 1, got {width}; it is how many lanes exist at a time"
        )


def as_entries(where: str, what: str, given: Any) -> tuple[Any, ...]:
    """What is given as one entry an argument.

    Raises:
      TypeError: for anything but a tuple or a list.
    """
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"{where}: {what} must be a tuple of arguments, got {type(given).__name__}; "
            "write (x,) for one"
        )
    return tuple(given)


def _given(primals: tuple[Any, ...], tangents: Any, f: Callable[..., Any]) -> tuple[Any, ...]:
    if isinstance(tangents, list | tuple) and len(tangents) == len(primals):
        return tuple(tangents)
    got = str(len(tangents)) if isinstance(tangents, list | tuple) else type(tangents).__name__
    hint = _FOLLOWS_OUTPUT if shadows.fits(jax.eval_shape(f, *primals), tangents) else ""
    raise ValueError(f"jvps: expected {len(primals)} tangents, one an argument, got {got}{hint}")


_FOLLOWS_OUTPUT = (
    "; what was given follows the output: a reverse activity in forward mode, which is for vjps"
)
_FOLLOWS_ARGUMENTS = (
    "; what was given follows the arguments: a forward activity in reverse mode, which is for jvps"
)


def _read_tangents(
    f: Callable[..., Any], primals: tuple[Any, ...], i: int, tangent: Any
) -> Shadows:
    _check_differentiable("jvps", i, primals[i], "give None as its tangent")
    try:
        return shadows.read(f"jvps: tangents of argument {i}", primals[i], tangent)
    except (TypeError, ValueError) as error:
        if shadows.fits(jax.eval_shape(f, *primals), tangent):
            raise type(error)(f"{error}{_FOLLOWS_OUTPUT}") from error
        raise


def _read_cotangents(primals: tuple[Any, ...], out: Any, cotangents: Any) -> Shadows:
    try:
        return shadows.read("vjps: cotangents", out, cotangents)
    except (TypeError, ValueError) as error:
        if _has_shapes_of(out, cotangents):
            raise ValueError(
                "vjps: got one cotangent of the output's own shape; the same seed for all lanes "
                "needs into=, which says how many there are; or stack seeds on a leading axis N"
            ) from error
        if any(shadows.fits(like, cotangents) for like in (primals, *primals)):
            raise type(error)(f"{error}{_FOLLOWS_ARGUMENTS}") from error
        raise


def _has_shapes_of(out: Any, cotangents: Any) -> bool:
    return shadows.fits(out, [cotangents], "separate")


def _check_differentiable(where: str, i: int, primal: Any, fix: str) -> None:
    leaves = jax.tree.leaves(primal)
    if leaves and not any(map(differentiable, leaves)):
        kinds = sorted({str(jax.typeof(a).dtype) for a in leaves})
        raise TypeError(
            f"{where}: argument {i} is {', '.join(kinds)}, which has no derivative; {fix}, or "
            "make it floating"
        )


def _wanted(primals: tuple[Any, ...], argnums: int | Sequence[int] | None, into: Any) -> list[int]:
    """The arguments to differentiate, in order."""
    entries: tuple[Any, ...] = (None,) * len(primals)
    if into is not None:
        entries = as_entries("vjps", "into", into)
        if len(entries) != len(primals):
            raise ValueError(
                f"vjps: expected {len(primals)} accumulators, one an argument (None for those "
                f"left out), got {len(entries)}"
            )
    if argnums is None:
        if into is not None:
            wanted = [i for i, s in enumerate(entries) if s is not None]
        else:
            wanted = [
                i for i, p in enumerate(primals) if any(map(differentiable, jax.tree.leaves(p)))
            ]
    else:
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        for i in chosen:
            if not -len(primals) <= i < len(primals):
                raise ValueError(f"vjps: argnums {i} of a function of {len(primals)} arguments")
        wanted = sorted({i % len(primals) for i in chosen})
    for i in wanted:
        _check_differentiable("vjps", i, primals[i], "leave it out of argnums and into")
    if into is not None and argnums is not None:
        given = [i for i, s in enumerate(entries) if s is not None]
        if given != wanted:
            raise ValueError(f"vjps: argnums are {wanted}, but into has accumulators for {given}")
    if not wanted:
        raise TypeError("vjps: expected an argument to differentiate, got none that is floating")
    return wanted
