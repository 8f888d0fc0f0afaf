"""Whole Jacobians, and products with Hessians: what is made of many tangents or cotangents."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fnet import jaxprs
from fnet.autodiff import shadows
from fnet.autodiff.batched import as_entries, check_width, jvps, of_leaves
from fnet.autodiff.lanes import Linear, Width
from fnet.autodiff.shadows import differentiable


def jacobian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    mode: Literal["auto", "forward", "reverse"] = "auto",
    width: Width = "auto",
) -> Callable[..., Any]:
    """A function that gives the Jacobian of ``f``, ``width`` columns or rows at a time.

    The unit tangents or cotangents are made as they are needed: the identity never
    exists whole. Source: Enzyme's batch mode (rust-lang/rust pull request 137880).

    Args:
      f: a function of real arrays, or trees of them.
      argnums: the arguments to differentiate with respect to.
      mode: "forward" takes one lane for each number of those arguments, "reverse"
        for each number of the output; "auto" the fewer, forward if equal, and reverse
        through a `jax.custom_vjp`, such as fnet's norms, which has no forward mode.
      width: how many lanes exist at a time, as for `fnet.jvps`.

    Returns:
      A function of f's arguments; its result is that of `jax.jacfwd` and
      `jax.jacrev`: f's output, each leaf a tree as the argument (a tuple of such
      for several argnums) with leaves [*shape of the output, *shape of the argument].

    Raises:
      ValueError: for an unknown mode, a width below 1, or argnums that f does not have.
      TypeError: for a width that is no int; when called, if an argument or output is
        not real floating, and in mode "forward" from JAX through a `jax.custom_vjp`.
    """
    if mode not in ("auto", "forward", "reverse"):
        raise ValueError(f"jacobian: expected mode 'auto', 'forward' or 'reverse', got {mode!r}")
    check_width("jacobian", width)

    def jacobian_of(*args: Any) -> Any:
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if not all(-len(args) <= i < len(args) for i in chosen):
            raise ValueError(f"jacobian: argnums {argnums} of a function of {len(args)} arguments")
        varied = [i % len(args) for i in chosen]
        wanted = tuple(args[i] for i in varied)
        _check_real("argument", wanted)
        point, call = of_leaves(f, args, varied)
        forward = mode == "forward" or (mode == "auto" and _is_forward_cheaper(call, point))
        if forward:
            outs, push, out = jax.linearize(call, point, has_aux=True)
            linear, like = Linear.of(lambda *lane: push(list(lane)), point), point
        else:
            outs, pull, out = jax.vjp(call, point, has_aux=True)
            linear, like = Linear.of(lambda *c: pull(list(c))[0], outs), outs
        _check_real("output", out)
        lanes = sum(_sizes(like))
        made = linear.in_chunks(_units(like), lanes, width) if lanes else None
        blocks = [
            [_block(forward, o, p, i, j, made, outs, point) for j, p in enumerate(point)]
            for i, o in enumerate(outs)
        ]
        structure = jax.tree.structure(wanted[0] if isinstance(argnums, int) else wanted)
        return jax.tree.unflatten(
            jax.tree.structure(out), [jax.tree.unflatten(structure, row) for row in blocks]
        )

    return jacobian_of


def hvps(
    f: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    width: Width = "auto",
    primal: bool = True,
) -> Any:
    """N products of the Hessian of a scalar function with tangents, at one point.

    With H the Hessian of f at ``primals`` in the arguments that have tangents,

        grads = grad f(primals),    products_i = H t_i,    i = 0 .. N - 1,

    forward over reverse: the gradient is computed and linearised once, lanes then
    go ``width`` at a time. Source: Pearlmutter, "Fast Exact Multiplication by the
    Hessian", 1994; batches as in `fnet.jvps`.

    Args:
      f: a function of arrays, or trees of them, to a real scalar.
      primals: its arguments.
      tangents: as for `fnet.jvps`; None for an argument that is not varied.
      width: as for `fnet.jvps`.
      primal: whether the gradient is returned too.

    Returns:
      ``(grads, products)``, or ``products`` alone: tuples of one entry an argument,
      None where the tangent was None; products in the form of the tangents. Of leaves
      without a derivative, such as integers, both are ``float0``.

    Raises:
      ValueError: if f's result is not a scalar; as `fnet.jvps`.
      TypeError: likewise.
    """
    primals = as_entries("hvps", "primals", primals)
    tangents = as_entries("hvps", "tangents", tangents)
    out = jax.eval_shape(f, *primals)
    shape = getattr(out, "shape", None)
    if shape != ():
        got = f"shape {shape}" if shape is not None else f"the structure {jax.tree.structure(out)}"
        raise ValueError(
            f"hvps: expected a function to a scalar, got {got}; sum it, or use jvps of a gradient"
        )
    varied = [i for i, t in enumerate(tangents[: len(primals)]) if t is not None]

    def gradient(*args: Any) -> tuple[Any, ...]:
        point, call = of_leaves(f, args, varied)
        grads = iter(jax.grad(lambda p: call(p)[1])(point))
        return tuple(
            jax.tree.map(lambda a: next(grads) if differentiable(a) else a, arg)
            if i in varied
            else None
            for i, arg in enumerate(args)
        )

    found = jvps(gradient, primals, tangents, width=width, primal=primal)
    if primal:
        given, products = found
        leaves = (list(filter(differentiable, jax.tree.leaves(g))) for g in given)
        found = tuple(map(shadows.filled, given, leaves)), products
    read = [shadows.read(f"hvps: argument {i}", primals[i], tangents[i]) for i in varied]
    if shadows.common_form([r.form for r in read]) != "separate":
        return found
    # Of every lane, what it is of each argument; wanted is the other way round.
    *grads, lanes = found if primal else (found,)
    products = tuple(
        tuple(lane[i] for lane in lanes) if i in varied else None for i in range(len(primals))
    )
    return (*grads, products) if primal else products


def _check_real(what: str, tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        dtype = jax.typeof(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"jacobian: expected a real floating {what}, got {dtype}; leave it out, or cast it"
            )


def _is_forward_cheaper(call: Callable[..., Any], point: list[Array]) -> bool:
    """Whether columns are fewer than rows, or as many, of what has a forward mode."""
    jaxpr, (outs, _) = jax.make_jaxpr(call, return_shape=True)(point)
    backward_alone = any(jaxprs.every(jaxpr, "custom_vjp_call"))
    return not backward_alone and sum(_sizes(point)) <= sum(_sizes(outs))


def _sizes(arrays: Sequence[Any]) -> list[int]:
    return [math.prod(a.shape) for a in arrays]


def _units(like: Sequence[Array]) -> Callable[[Array | int, int], list[Array]]:
    """Rows of the identity over all numbers of some arrays, shaped like these."""

    def rows(start: Array | int, size: int) -> list[Array]:
        number = start + jnp.arange(size)
        ends = list(itertools.accumulate(_sizes(like)))
        return [
            jax.nn.one_hot(number - (end - a.size), a.size, dtype=a.dtype).reshape(size, *a.shape)
            for a, end in zip(like, ends, strict=True)
        ]

    return rows


def _block(
    forward: bool, o: Array, p: Array, i: int, j: int, made: Any, outs: Any, point: Any
) -> Array:
    """The derivative of output i with respect to argument leaf j, [*o.shape, *p.shape]."""
    if made is None:
        return jnp.zeros((*o.shape, *p.shape), p.dtype)
    lanes, number = (point, j) if forward else (outs, i)
    start = sum(_sizes(lanes[:number]))
    rows: Array = made[i if forward else j][start : start + lanes[number].size]
    if forward:
        return jnp.moveaxis(rows, 0, -1).reshape(*o.shape, *p.shape)
    return rows.reshape(*o.shape, *p.shape)
