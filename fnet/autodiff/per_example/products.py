"""Gradients through sums and matrix products of parameters, such as low-rank updates.

LoRA multiplies data by ``w + a @ b``, a value that is `derived` from parameters. Its per-example
gradient is a sum of outer products, ``G = sum_t u_t v_t^T``. The gradients of the factors are
sums of outer products too, of shorter vectors:

    G b^T = sum_t u_t (b v_t)^T             with respect to a
    a^T G = sum_t (a^T u_t) v_t^T           with respect to b

So each parameter gets inputs and cotangents of its own, as if it met data directly. Norms and sums
follow from them (`ghost_norm`), and ``G`` is never materialized.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from fnet.autodiff.per_example.derived import Group
from fnet.autodiff.per_example.ghost_norm import Dot
from fnet.autodiff.per_example.parameter_gradients import UseInputs
from fnet.autodiff.per_example.taps import Use, View
from fnet.jaxpr import (
    Layout,
    called_jaxpr,
    evaluate,
    interpret,
    is_linear_in,
    slope,
    stops_gradients,
)
from fnet.jaxpr.primitives import DotGeneral
from fnet.precision import sum_dtype


class Product(NamedTuple):
    """A product ``a @ b`` of values that are computed from parameters.

    Attributes:
      shape: Its shape: batch dimensions, then free ones of a and b.
      factors: The values a [batch, rows, rank] and b [batch, rank, cols].
      sums: What a and b are sums of, in the same arrangement.
    """

    shape: tuple[int, ...]
    factors: tuple[Array, Array]
    sums: tuple["Sum", "Sum"]


class Term(NamedTuple):
    """One term of a sum.

    Attributes:
      source: The number of a parameter, or a product.
      view: The elements of the source, in the arrangement of the sum.
    """

    source: int | Product
    view: View


Sum = tuple[Term, ...]
"""A value that is a sum of terms and constants; () for a constant."""


class _Value(NamedTuple):
    array: Any
    sum: Sum


class _NotASumError(Exception):
    """A value is not a sum of products of parameters."""


def uses_of_factors(
    group: Group, params: Sequence[Any], inputs: Sequence[Sequence[UseInputs]]
) -> list[UseInputs] | None:
    """Give every parameter of a group inputs and cotangents of its own.

    ``inputs`` has the inputs of each derived value. None if derived values are no sums of matrix
    products, if they are used in other ways than in matrix products, or if this takes more
    operations.
    """
    if group.is_placement or not all(
        isinstance(i.use.equation, Dot) for own in inputs for i in own
    ):
        return None
    views = [View.whole(i, p.shape) for i, p in zip(group.params, params, strict=True)]
    values = [_Value(p, (Term(v.param, v),)) for p, v in zip(params, views, strict=True)]
    try:
        derived = interpret(group.function, values, _follow, lambda a: _Value(a, ()))
        pairs = zip(derived, inputs, strict=True)
        return [use for value, own in pairs for i in own for use in _uses(value.sum, i)]
    except _NotASumError:
        return None


def _follow(eqn: JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
    if (inner := called_jaxpr(eqn)) is not None:
        return interpret(inner, values, _follow, lambda a: _Value(a, ()))
    arrays = evaluate(eqn, [v.array for v in values])
    operands = [k for k, v in enumerate(values) if v.sum]
    floating = all(jnp.issubdtype(a.dtype, jnp.floating) for a in arrays)
    if not operands or stops_gradients(eqn):
        return [_Value(a, ()) for a in arrays]
    if not floating:
        raise _NotASumError
    if (dot := DotGeneral.read(eqn)) is not None:
        return [_Value(arrays[0], (_product(dot, values, arrays[0].shape),))]
    if len(operands) == 1:
        (k,) = operands
        terms = [(t.source, t.view.after(eqn, k)) for t in values[k].sum]
    else:
        slopes = [slope(eqn, k) for k in operands]
        if None in slopes or not is_linear_in(eqn, operands):
            raise _NotASumError
        terms = [
            (t.source, [t.view._replace(scale=(c or 0.0) * t.view.scale)])
            for k, c in zip(operands, slopes, strict=True)
            for t in values[k].sum
        ]
    sums: list[list[Term]] = [[] for _ in arrays]
    for source, views in terms:
        if views is None or len(views) != len(arrays):
            raise _NotASumError
        for own, view in zip(sums, views, strict=True):
            own.append(Term(source, view))
    return [_Value(a, tuple(own)) for a, own in zip(arrays, sums, strict=True)]


def _product(dot: DotGeneral, values: Sequence[_Value], shape: tuple[int, ...]) -> Term:
    factors, sums = [], []
    for k, value in enumerate(values):
        arrange = _as_matrices(dot, k)
        factors.append(arrange(value.array))
        sums.append(tuple(Term(t.source, _arranged(t.view, arrange)) for t in value.sum))
    product = Product(shape, (factors[0], factors[1]), (sums[0], sums[1]))
    return Term(product, View.whole(-1, shape))


def _as_matrices(dot: DotGeneral, k: int) -> Callable[[Any], Any]:
    """Arrange an operand of ``dot_general`` as [batch, rows, rank] or [batch, rank, cols]."""
    batch, rank, own = dot.axes(k)
    order = (batch, own, rank) if k == 0 else (batch, rank, own)
    sizes = [dot.size(k, axes) for axes in order]
    axes = [i for part in order for i in part]
    return lambda a: a.transpose(axes).reshape(sizes)


def _arranged(view: View, arrange: Callable[[Any], Any]) -> View:
    arranged = view.arranged(arrange)
    if arranged is None or arranged.layout.has_repeats:
        raise _NotASumError
    return arranged


def _uses(terms: Sum, i: UseInputs) -> Iterator[UseInputs]:
    view = i.use.view
    for source, own in terms:
        of_source = _arranged(own, view.from_param)._replace(scans=view.scans)
        cotangents = i._replace(ct=own.unscale(i.ct))
        if isinstance(source, int):
            yield cotangents._replace(use=i.use._replace(view=of_source))
        else:
            equation = i.use.equation
            u, v = equation.factors(*cotangents.arranged())
            yield from _uses_of_product(source, equation.as_matrix(of_source.layout), u, v)


def _uses_of_product(product: Product, matrices: Layout, u: Array, v: Array) -> Iterator[UseInputs]:
    """Yield the uses of the factors of a product whose gradient is ``sum_t u_t v_t^T``.

    ``matrices`` [groups, rows, cols] says which element of the product is where in the gradient.
    """
    a, b = product.factors
    groups, rows, rank, cols = *a.shape, b.shape[-1]
    own = Layout.of(product.shape).reshape((groups, rows, cols))
    if matrices.transpose((0, 2, 1)) == own:
        u, v = v, u
    elif matrices != own:
        raise _NotASumError
    time = u.shape[2]
    if time * rank * (rows + cols) > rows * cols * (time + 2 * rank):
        raise _NotASumError  # Materializing the gradient takes fewer operations.
    dtype = sum_dtype(u, v)
    for number, terms in enumerate(product.sums):
        if not terms:
            continue
        if number == 0:
            x, ct = u, jnp.einsum("gbtc,gkc->gbtk", v, b, preferred_element_type=dtype)
        else:
            x, ct = jnp.einsum("gbtr,grk->gbtk", u, a, preferred_element_type=dtype), v
        for source, view in terms:
            scaled = view.unscale(ct)
            if isinstance(source, int):
                yield _use(view, x, scaled)
            else:
                yield from _uses_of_product(source, view.layout, x, scaled)


def _use(view: View, u: Array, v: Array) -> UseInputs:
    """A use of a view [groups, rows, cols] with these factors of its gradient."""
    shape = view.layout.shape
    equation = Dot(0, ((0,), (2,), (1,)), ((0,), (1,), (2,)), shape)
    x, ct = (jnp.swapaxes(a, 0, 1) for a in (u, v))
    out = jax.ShapeDtypeStruct(ct.shape[1:], ct.dtype)
    return UseInputs(Use((), view, equation, (), out), x, ct)
