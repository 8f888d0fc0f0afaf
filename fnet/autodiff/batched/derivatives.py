"""N tangents or cotangents at one point, Jacobians and Hessian-vector products.

The function is evaluated once. The tangents or cotangents then pass through its linearization,
some of them at a time. This is Enzyme's batch mode: one primal and N shadows in one pass
(rust-lang/rust pull request 137880).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.batched.linear import Linear, Width
from fnet.autodiff.batched.tangents import (
    BatchedTangents,
    common_layout,
    common_n,
    fill,
    fits,
    is_differentiable,
    read_tangents,
)
from fnet.jaxpr import has_forward_derivative
from fnet.mesh import equally_varying, varying_axes


def jvps(
    f: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    width: Width = "auto",
    primal: bool = True,
) -> Any:
    """Compute N directional derivatives of ``f`` at one point.

    With J the Jacobian of f at ``primals`` and t_i the i-th tangent,

        out = f(primals),    tangents_out_i = J t_i,    i = 0 .. N - 1.

    ``f`` is evaluated once and linearized. Call this under `jax.jit`: outside of it JAX
    compiles a loop at every call.

    The tangents of an argument have one of three layouts. fnet tells them apart by their
    shapes and returns the results in the same layout, or stacked if the arguments' layouts
    differ.

    ========  ==================================== ================================
    layout    for a leaf [len, *rest]              tangent i
    ========  ==================================== ================================
    stacked   [N, len, *rest]                      leaf[i]
    packed    [N * len, *rest] (Enzyme's Dualv)    leaf[i * len : (i + 1) * len]
    separate  a list or tuple of N trees           the i-th tree
    ========  ==================================== ================================

    Scalars are [N], stacked and packed. Separate tangents are evaluated one by one unless
    you set ``width``: no array holds all results, but compile time grows with N.

    Args:
      f: a function of pytrees of arrays.
      primals: its arguments, as for `jax.jvp`.
      tangents: one entry per argument in one of the layouts, or None (Enzyme's Const) for
        an argument that is constant. An argument that is an integer, a bool or a key must
        have None. Inside of a pytree the entry for such a leaf is ignored.
      width: how many tangents are evaluated at a time; it need not divide N. Only
        as many intermediates exist at once, except in the backward pass of convolutions on
        CPUs. "auto" chooses the fastest.
      primal: whether to also return ``f(*primals)``; False is Enzyme's DualOnly.

    Returns:
      ``(out, tangents_out)``, or ``tangents_out`` alone. Tangents of outputs without a
      derivative, such as integers, are ``float0``.

    Raises:
      ValueError: if there is not one tangent entry per argument, if their
        shapes do not fit, if N differs between arguments or is 0, or if ``width < 1``.
      TypeError: if a dtype differs, if an argument with tangents has no derivative, if
        ``primals`` is not a tuple or ``width`` not an int. From JAX if ``f`` contains a
        `jax.custom_vjp`, which has no forward mode.

    Example:
      >>> import jax.numpy as jnp
      >>> import fnet
      >>> x = jnp.asarray([1.0, 2.0])
      >>> out, tangents_out = fnet.jvps(jnp.square, (x,), (jnp.eye(2),))
      >>> print(tangents_out)
      [[2. 0.]
       [0. 4.]]
    """
    _check_width("jvps", width)
    primals = _as_tuple("jvps", "primals", primals)
    tangents = _check_tangents(primals, tangents, f)
    given = {i: _read_tangents(f, primals, i, t) for i, t in enumerate(tangents) if t is not None}
    counts = {f"argument {i}": t.n for i, t in given.items() if t.n is not None}
    n = common_n("jvps: tangents", counts)
    if n is None:
        raise ValueError("jvps: expected tangents for at least one argument, got None for all")

    point, call = _of_differentiable_leaves(f, primals, list(given))
    _, pushforward, out = jax.linearize(call, point, has_aux=True)
    linear = Linear.of(lambda *tangent: pushforward(list(tangent)), point)
    layout = common_layout([t.layout for t in given.values()])
    empty = BatchedTangents.empty(out, layout, n)
    (result,) = _evaluate(linear, [t.with_n(n) for t in given.values()], [empty], width)
    tangents_out = result.as_tree(out)
    return (out, tangents_out) if primal else tangents_out


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
    """Compute N vector-Jacobian products of ``f`` at one point, optionally into accumulators.

    With J the Jacobian of f at ``primals`` and c_i the i-th cotangent,

        out = f(primals),    grads_i = into_i + J^T c_i,    i = 0 .. N - 1.

    ``f`` is evaluated once. Call this under `jax.jit`, as `jvps`.

    Guarantees:
      - ``into`` is donated. Outside of any transformation the results take its
        buffers, and the old arrays are deleted. Under an outer `jax.jit` that donates it,
        it is updated in place. Besides ``into``, only ``width`` gradients exist at a time.
      - Without ``into``, a new array of N gradients is allocated. On CPUs, for hundreds of
        megabytes, the allocation takes longer than the gradients. ``into`` and the separate
        layout avoid it.

    Args:
      f: a function of pytrees of arrays.
      primals: its arguments, as for `jax.vjp`.
      cotangents: cotangents of the output in a layout of `jvps`. With ``into`` also one
        cotangent with the shapes of the output, which all N share. Without ``into`` such a
        cotangent is read as packed with N = 1, and a scalar is an error.
      argnums: arguments to differentiate. None: all that have a derivative, or with
        ``into`` all that have an accumulator.
      width: how many cotangents are evaluated at a time, as for `jvps`.
      into: accumulators, one entry per argument in a layout of `jvps`, None for
        arguments that are not differentiated.
      primal: whether to also return ``f(*primals)``; False is Enzyme's DuplicatedOnly.

    Returns:
      ``(out, grads)``, or ``grads`` alone: a tuple with one entry per argument, None for
      those not differentiated. An entry has the layout of its accumulator, or else of
      the cotangents. Leaves without a derivative are ``float0``.

    Raises:
      ValueError: if the shapes of cotangents or accumulators do not fit, if N differs
        between them or is 0, or if ``width < 1``.
      TypeError: if a dtype differs, if an argument in ``argnums`` has no derivative, if
        ``primals`` is not a tuple or ``width`` not an int.

    Example:
      >>> import jax.numpy as jnp
      >>> import fnet
      >>> x = jnp.asarray([1.0, 2.0])
      >>> out, (grads,) = fnet.vjps(jnp.square, (x,), jnp.eye(2))
      >>> print(grads)
      [[2. 0.]
       [0. 4.]]
      >>> (grads,) = fnet.vjps(
      ...     jnp.square, (x,), jnp.eye(2), into=(grads,), primal=False
      ... )
      >>> print(grads)
      [[4. 0.]
       [0. 8.]]
    """
    _check_width("vjps", width)
    primals = _as_tuple("vjps", "primals", primals)
    varied = _differentiated_arguments(primals, argnums, into)
    point, call = _of_differentiable_leaves(f, primals, varied)
    outputs, pullback, out = jax.vjp(call, point, has_aux=True)
    linear = Linear.of(lambda *cotangent: pullback(list(cotangent))[0], outputs)

    accumulators = None
    counts: dict[str, int | None] = {}
    if into is not None:
        accumulators = [
            read_tangents(f"vjps: into, argument {i}", primals[i], into[i]) for i in varied
        ]
        counts = {f"into, argument {i}": a.n for i, a in zip(varied, accumulators, strict=True)}
    if accumulators is not None and _has_shapes_of(out, cotangents):
        seeds, layout = read_tangents("vjps: cotangents", out, [cotangents]), None
    else:
        seeds = _read_cotangents(primals, out, cotangents)
        counts["the cotangents"], layout = seeds.n, common_layout([seeds.layout])
    n = common_n("vjps", {name: count for name, count in counts.items() if count is not None})
    if n is None or not outputs:
        raise ValueError(
            "vjps: expected a differentiable output and N cotangents, got an output with "
            f"{[str(jax.typeof(a)) for a in jax.tree.leaves(out)]}"
        )
    if layout is not None:
        seeds = seeds.with_n(n)
    if accumulators is None:
        empty = [BatchedTangents.empty(primals[i], layout, n) for i in varied]
        results = _evaluate(linear, [seeds], empty, width)
    else:
        results = _accumulate(linear, seeds, [a.with_n(n) for a in accumulators], width)
    grads: list[Any] = [None] * len(primals)
    for i, result in zip(varied, results, strict=True):
        grads[i] = result.as_tree(primals[i])
    return (out, tuple(grads)) if primal else tuple(grads)


def jacobian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    mode: Literal["auto", "forward", "reverse"] = "auto",
    width: Width = "auto",
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of ``f``, some rows or columns at a time.

    It is `jax.jacfwd` or `jax.jacrev` in bounded memory: the unit tangents or cotangents are
    computed when they are needed, so that no identity matrix exists.

    Args:
      f: a function of pytrees of real arrays.
      argnums: the arguments to differentiate with respect to.
      mode: "forward" takes one tangent per element of those arguments, "reverse" one
        cotangent per element of the output. "auto" takes the fewer, "forward" if equal, and
        "reverse" if ``f`` contains a `jax.custom_vjp`, such as fnet's norms, which has no
        forward mode.
      width: how many tangents or cotangents are evaluated at a time, as for `fnet.jvps`.

    Returns:
      A function of f's arguments. It returns what `jax.jacfwd` and `jax.jacrev` return: the
      output of f with each leaf replaced by a tree like the argument (a tuple of trees for
      several argnums), whose leaves are [*shape of the output, *shape of the argument].

    Raises:
      ValueError: for an unknown mode, ``width < 1``, or argnums that f does not have.
      TypeError: if ``width`` is not an int. When called: if an argument or output is not
        real and floating; from JAX in mode "forward" if ``f`` contains a `jax.custom_vjp`.

    Example:
      >>> import jax.numpy as jnp
      >>> import fnet
      >>> f = lambda x: jnp.stack([x[0] * x[1], x[0] + x[1]])
      >>> print(fnet.jacobian(f)(jnp.asarray([2.0, 3.0])))
      [[3. 2.]
       [1. 1.]]
    """
    if mode not in ("auto", "forward", "reverse"):
        raise ValueError(f"jacobian: expected mode 'auto', 'forward' or 'reverse', got {mode!r}")
    _check_width("jacobian", width)

    def jacobian_of(*args: Any) -> Any:
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if not all(-len(args) <= i < len(args) for i in chosen):
            raise ValueError(f"jacobian: argnums {argnums} of a function of {len(args)} arguments")
        varied = [i % len(args) for i in chosen]
        inputs = tuple(args[i] for i in varied)
        _check_real("argument", inputs)
        point, call = _of_differentiable_leaves(f, args, varied)
        forward = mode == "forward" or (mode == "auto" and _is_forward_cheaper(call, point))
        if forward:
            outputs, pushforward, out = jax.linearize(call, point, has_aux=True)
            seeded, linear = point, Linear.of(lambda *t: pushforward(list(t)), point)
        else:
            outputs, pullback, out = jax.vjp(call, point, has_aux=True)
            seeded, linear = outputs, Linear.of(lambda *c: pullback(list(c))[0], outputs)
        _check_real("output", out)
        n = sum(_sizes(seeded))
        products = linear.evaluate_in_chunks(_unit_vectors(seeded), n, width) if n else None

        def block(i: int, j: int) -> Array:
            """The derivative of output leaf i in argument leaf j: [*o.shape, *p.shape]."""
            o, p = outputs[i], point[j]
            if products is None:
                return jnp.zeros((*o.shape, *p.shape), p.dtype)
            number = j if forward else i
            start = sum(_sizes(seeded[:number]))
            rows = products[i if forward else j][start : start + seeded[number].size]
            return (jnp.moveaxis(rows, 0, -1) if forward else rows).reshape(*o.shape, *p.shape)

        structure = jax.tree.structure(inputs[0] if isinstance(argnums, int) else inputs)
        per_output = [
            jax.tree.unflatten(structure, [block(i, j) for j in range(len(point))])
            for i in range(len(outputs))
        ]
        return jax.tree.unflatten(jax.tree.structure(out), per_output)

    return jacobian_of


def hvps(
    f: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    width: Width = "auto",
    primal: bool = True,
) -> Any:
    """Compute N Hessian-vector products of a scalar function at one point.

    With H the Hessian of f at ``primals`` in the arguments that have tangents,

        grads = grad f(primals),    products_i = H t_i,    i = 0 .. N - 1.

    This is forward over reverse (Pearlmutter, "Fast Exact Multiplication by the Hessian",
    1994): the gradient is computed and linearized once, then `fnet.jvps` applies.

    Args:
      f: a function of pytrees of arrays that returns a real scalar.
      primals: its arguments.
      tangents: one entry per argument as for `fnet.jvps`, None for constant arguments.
      width: how many tangents are evaluated at a time, as for `fnet.jvps`.
      primal: whether to also return the gradient.

    Returns:
      ``(grads, products)``, or ``products`` alone: tuples with one entry per argument, None
      where the tangent is None. Products have the layout of the tangents. Leaves without a
      derivative, such as integers, are ``float0`` in both.

    Raises:
      ValueError: if the result of f is not a scalar; otherwise as `fnet.jvps`.
      TypeError: if ``primals`` or ``tangents`` is not a tuple; otherwise as `fnet.jvps`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet.autodiff import hvps
      >>> x = jnp.asarray([1.0, 2.0])
      >>> (grads,), (products,) = hvps(lambda x: (x**3).sum(), (x,), (jnp.eye(2),))
      >>> print(products)
      [[ 6.  0.]
       [ 0. 12.]]
    """
    primals = _as_tuple("hvps", "primals", primals)
    tangents = _as_tuple("hvps", "tangents", tangents)
    out = jax.eval_shape(f, *primals)
    shape = getattr(out, "shape", None)
    if shape != ():
        got = f"shape {shape}" if shape is not None else f"the structure {jax.tree.structure(out)}"
        raise ValueError(
            f"hvps: expected a function to a scalar, got {got}; sum it, or use jvps of a gradient"
        )
    varied = [i for i, t in enumerate(tangents[: len(primals)]) if t is not None]

    def gradient(*args: Any) -> tuple[Any, ...]:
        point, call = _of_differentiable_leaves(f, args, varied)
        leaves = iter(jax.grad(lambda p: call(p)[1])(point))
        return tuple(
            jax.tree.map(lambda a: next(leaves) if is_differentiable(a) else a, arg)
            if i in varied
            else None
            for i, arg in enumerate(args)
        )

    grads, products = jvps(gradient, primals, tangents, width=width)
    grads = tuple(fill(g, list(filter(is_differentiable, jax.tree.leaves(g)))) for g in grads)
    layouts = [read_tangents("hvps", primals[i], tangents[i]).layout for i in varied]
    if common_layout(layouts) == "separate":
        # From one tuple of arguments per tangent to one tuple of tangents per argument.
        products = tuple(
            tuple(product[i] for product in products) if i in varied else None
            for i in range(len(primals))
        )
    return (grads, products) if primal else products


def _evaluate(
    linear: Linear,
    inputs: list[BatchedTangents],
    outputs: list[BatchedTangents],
    width: Width,
    *,
    accumulate: bool = False,
) -> list[BatchedTangents]:
    """Evaluate a linear function of N inputs, or of one that is used N times.

    ``outputs`` are the layouts of the results by argument, or accumulators to add them to.
    """
    n = outputs[0].n or 0
    is_shared = inputs[0].n == 1 < n
    sizes = [len(o.shapes) for o in outputs]
    layouts = {o.layout for o in outputs if o.shapes or not any(sizes)}
    if layouts == {"separate"} and width in ("auto", 1):
        each = [
            itertools.chain(*leaves) for leaves in zip(*(t.separate() for t in inputs), strict=True)
        ]
        results = [linear(list(leaves)) for leaves in each] * (n if is_shared else 1)
        if accumulate:
            sums = zip(*(o.separate() for o in outputs if o.shapes), strict=True)
            results = [
                list(map(jnp.add, itertools.chain(*s), r))
                for s, r in zip(sums, results, strict=True)
            ]
        split = [_split(r, sizes) for r in results]
        return [
            dataclasses.replace(o, arrays=[parts[i] for parts in split])
            for i, o in enumerate(outputs)
        ]
    stacked = [a for t in inputs for a in t.stacked()]
    accumulators = [a for o in outputs for a in o.stacked()] if accumulate else None
    if is_shared and accumulators is not None:
        gradient = linear([a[0] for a in stacked])
        values = [s + r[None] for s, r in zip(accumulators, gradient, strict=True)]
    else:
        values = linear.evaluate(stacked, n, width, accumulators)
    return [o.replace(part) for o, part in zip(outputs, _split(values, sizes), strict=True)]


def _accumulate(
    linear: Linear, seeds: BatchedTangents, accumulators: list[BatchedTangents], width: Width
) -> list[BatchedTangents]:
    def add(
        accumulators: list[BatchedTangents], seeds: BatchedTangents, linear: Linear
    ) -> list[BatchedTangents]:
        return _evaluate(linear, [seeds], accumulators, width, accumulate=True)

    args = accumulators, seeds, linear
    # A traced array cannot be donated. The outermost jit donates it.
    if not any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(args)):
        add = jax.jit(add, donate_argnums=0)
    return add(*args)


def _split(leaves: list[Array], sizes: list[int]) -> list[list[Array]]:
    remaining = iter(leaves)
    return [list(itertools.islice(remaining, size)) for size in sizes]


def _of_differentiable_leaves(
    f: Callable[..., Any], primals: Sequence[Any], varied: Sequence[int]
) -> tuple[list[Array], Callable[[list[Array]], tuple[list[Array], Any]]]:
    """Return the differentiable leaves of the varied arguments, and ``f`` as a function of them.

    That function returns the differentiable leaves of the output, and the output itself.
    """
    leaves = itertools.chain(*(jax.tree.leaves(primals[i]) for i in varied))
    point = [jnp.asarray(a) for a in leaves if is_differentiable(a)]

    def call(point: list[Array]) -> tuple[list[Array], Any]:
        remaining, args = iter(point), list(primals)
        for i in varied:
            args[i] = jax.tree.map(
                lambda a: next(remaining) if is_differentiable(a) else a, args[i]
            )
        out = f(*args)
        return [jnp.asarray(a) for a in jax.tree.leaves(out) if is_differentiable(a)], out

    return point, call


def _is_forward_cheaper(call: Callable[..., Any], point: list[Array]) -> bool:
    """Whether columns are at most as many as rows, and the function has a forward mode.

    In `jax.shard_map`, one mode would add up what devices have of an argument or result they share.
    """
    closed, (outputs, _) = jax.make_jaxpr(call, return_shape=True)(point)
    results, given = (set(map(varying_axes, a)) for a in (closed.out_avals[: len(outputs)], point))
    pairs = [*itertools.product(results, given)]
    is_shared, is_sum = any(r - g for r, g in pairs), any(g - r for r, g in pairs)
    is_cheaper = is_shared or (not is_sum and sum(_sizes(point)) <= sum(_sizes(outputs)))
    return has_forward_derivative(closed) and is_cheaper


def _sizes(arrays: Sequence[Any]) -> list[int]:
    return [math.prod(a.shape) for a in arrays]


def _unit_vectors(like: Sequence[Array]) -> Callable[[Array | int, int], list[Array]]:
    """Return a function that computes rows of the identity matrix, shaped like these arrays."""

    def rows(start: Array | int, size: int) -> list[Array]:
        numbers = start + jnp.arange(size)
        units, end = [], 0
        for a in like:
            own = jax.nn.one_hot(numbers - end, a.size, dtype=a.dtype).reshape(size, *a.shape)
            units.append(equally_varying((own, a))[0])
            end += a.size
        return units

    return rows


# Checks of what the caller gives.

_FITS_OUTPUT = "; these have the shapes of the output, not of the arguments: use vjps"
_FITS_ARGUMENTS = "; these have the shapes of the arguments, not of the output: use jvps"


def _check_width(where: str, width: Any) -> None:
    if width == "auto":
        return
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"{where}: width must be an int or 'auto', got {width!r}")
    if width < 1:
        raise ValueError(f"{where}: width must be at least 1, got {width}")


def _as_tuple(where: str, what: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"{where}: {what} must be a tuple with one entry per argument, got "
            f"{type(given).__name__}; write (x,) for one argument"
        )
    return tuple(given)


def _check_tangents(
    primals: tuple[Any, ...], tangents: Any, f: Callable[..., Any]
) -> tuple[Any, ...]:
    if isinstance(tangents, list | tuple) and len(tangents) == len(primals):
        return tuple(tangents)
    got = str(len(tangents)) if isinstance(tangents, list | tuple) else type(tangents).__name__
    hint = _FITS_OUTPUT if fits(jax.eval_shape(f, *primals), tangents) else ""
    raise ValueError(f"jvps: expected {len(primals)} tangents, one per argument, got {got}{hint}")


def _read_tangents(
    f: Callable[..., Any], primals: tuple[Any, ...], i: int, tangent: Any
) -> BatchedTangents:
    _check_differentiable("jvps", i, primals[i], "give None as its tangent")
    try:
        return read_tangents(f"jvps: tangents of argument {i}", primals[i], tangent)
    except (TypeError, ValueError) as error:
        if fits(jax.eval_shape(f, *primals), tangent):
            raise type(error)(f"{error}{_FITS_OUTPUT}") from error
        raise


def _read_cotangents(primals: tuple[Any, ...], out: Any, cotangents: Any) -> BatchedTangents:
    try:
        return read_tangents("vjps: cotangents", out, cotangents)
    except (TypeError, ValueError) as error:
        if _has_shapes_of(out, cotangents):
            raise ValueError(
                "vjps: got one cotangent with the shapes of the output; a cotangent that all N "
                "share needs into=, which determines N; or stack N cotangents on a leading axis"
            ) from error
        if any(fits(like, cotangents) for like in (primals, *primals)):
            raise type(error)(f"{error}{_FITS_ARGUMENTS}") from error
        raise


def _has_shapes_of(out: Any, cotangents: Any) -> bool:
    return fits(out, [cotangents], "separate")


def _check_differentiable(where: str, i: int, primal: Any, fix: str) -> None:
    leaves = jax.tree.leaves(primal)
    if leaves and not any(map(is_differentiable, leaves)):
        dtypes = sorted({str(jax.typeof(a).dtype) for a in leaves})
        raise TypeError(
            f"{where}: argument {i} is {', '.join(dtypes)}, which has no derivative; {fix}, or "
            "cast it to a floating dtype"
        )


def _differentiated_arguments(
    primals: tuple[Any, ...], argnums: int | Sequence[int] | None, into: Any
) -> list[int]:
    accumulated = None
    if into is not None:
        into = _as_tuple("vjps", "into", into)
        if len(into) != len(primals):
            raise ValueError(
                f"vjps: expected {len(primals)} accumulators, one per argument (None for those "
                f"not differentiated), got {len(into)}"
            )
        accumulated = [i for i, a in enumerate(into) if a is not None]
    if argnums is not None:
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        for i in chosen:
            if not -len(primals) <= i < len(primals):
                raise ValueError(f"vjps: argnums {i} of a function of {len(primals)} arguments")
        varied = sorted({i % len(primals) for i in chosen})
    elif accumulated is not None:
        varied = accumulated
    else:
        varied = [
            i for i, p in enumerate(primals) if any(map(is_differentiable, jax.tree.leaves(p)))
        ]
    for i in varied:
        _check_differentiable("vjps", i, primals[i], "leave it out of argnums and into")
    if accumulated not in (None, varied):
        raise ValueError(f"vjps: argnums are {varied}, but into has accumulators for {accumulated}")
    if not varied:
        raise TypeError("vjps: expected an argument to differentiate, got none that is floating")
    return varied


def _check_real(what: str, tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        dtype = jax.typeof(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"jacobian: expected a real floating {what}, got {dtype}; leave it out, or cast it"
            )
