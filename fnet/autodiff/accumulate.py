"""Gradient accumulation: a batch in equal parts, one after the other, into one accumulator."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from fnet.autodiff.examples import check_params
from fnet.autodiff.mean import Gradient, Loss, Objective, mean, mean_loss
from fnet.autodiff.update import GradientFunction, Mode
from fnet.jaxpr import find_equations, rewrite
from fnet.mesh import equally_varying
from fnet.precision import wide


@dataclasses.dataclass(frozen=True)
class Mean(Mode):
    """The gradient of the mean loss, accumulated over microbatches.

    Attributes:
      microbatches: Number of parts, >= 1.
      unroll: As for `accumulate_grad`.
    """

    microbatches: int = 1
    unroll: bool | None = None
    splittable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject a number of microbatches below 1."""
        _check_microbatches(self.microbatches)

    def __call__(self, loss: Loss) -> Gradient:
        """Return the gradient function of a loss."""
        return accumulate_grad(loss, self.microbatches, unroll=self.unroll)


def microbatches(n: int, *, unroll: bool | None = None) -> Mean:
    """Gradient mode that accumulates over ``n`` microbatches; see `accumulate_grad`.

    ``make_step(loss, optimizer, mode=microbatches(8))`` equals ``make_step(loss, optimizer,
    microbatches=8)``.

    Args:
      n: Number of microbatches, >= 1, a divisor of the batch size.
      unroll: As for `accumulate_grad`.

    Returns:
      A mode for `fnet.make_step`.

    Raises:
      ValueError: If ``n < 1``; when called, as `accumulate_grad`.
    """
    return Mean(n, unroll)


def as_mode(mode: Mode | Callable[[Loss], Gradient]) -> Mode:
    """Return a `Mode` for a mode, for `mean`, or for a function ``loss -> gradient``.

    Raises:
      TypeError: If ``mode`` is neither.
    """
    if isinstance(mode, Mode):
        return mode
    if mode is mean:
        return Mean()
    if not callable(mode):
        raise TypeError(
            "make_step: mode must be fnet.autodiff.mean, a mode of fnet.autodiff or a function "
            f"loss -> gradient, got {type(mode).__name__}."
        )
    return GradientFunction(mode)


def accumulate_grad(loss: Loss, microbatches: int, *, unroll: bool | None = None) -> Gradient:
    """The gradient of the mean loss over the batch, from one part of the batch after the other.

    With n microbatches B_i of the batch B, and w_i the weights of their examples,

        g = sum_i s_i grad mean(loss(B_i)),    s_i = sum(w_i) / sum(w),

    which is the gradient of the mean over B wherever one example's loss does not
    depend on the others; so are the metrics. Only the activations of one part
    exist at a time. Each part's gradient is added to one accumulator while the
    backward pass goes (``jax.vjp(...).with_refs``), layer by layer inside a scan
    over layers too, so that beside the accumulator no array of the parameters'
    size exists.

    Guarantees:
      - Weights are those of the whole batch: a part that is all padding adds
        nothing, and all weights 0 give 0, as in `mean`.
      - Part i is every n-th example from the i-th on. Where the batch is sharded
        over its leading axis, each device then takes its share of every part from
        its own examples, if n divides their number: none is moved. (Contiguous
        parts would lie on few devices each.) Gradients are summed over devices
        once a part; inside `jax.shard_map`, with the parameters marked as varying
        (``jax.lax.pcast``), that sum is left to the caller, once a batch.
      - Part i gets the key ``fold_in(key, i)``.
      - ``model_state`` goes from each part to the next. Statistics of the batch
        (`fnet.abn`) are therefore those of a part, and running ones are renewed n
        times: such a network does not have the gradient of the whole batch.
      - The accumulator has the parameters' dtype: JAX adds a cotangent to a
        reference of its own dtype only. Keep parameters in float32 and compute in
        bfloat16, as fnet's layers do; sums over many parts round in bfloat16.
      - One microbatch is `mean` itself.

    Args:
      loss: per-example losses; see `fnet.autodiff.Loss`.
      microbatches: n, a divisor of the batch size.
      unroll: whether the parts are written out one after the other rather than
        looped over. A loop is compiled once; written out, compile time
        grows with n. By default a loop, except on CPUs where the gradient has
        convolutions in layouts that XLA only mends outside of loops: in one,
        such a convolution takes 10 to 90 times as long.

    Returns:
      ``gradient(params, model_state, batch, key) -> (grads, model_state, metrics)``,
      as `mean` returns it.

    Raises:
      ValueError: if ``microbatches < 1``; when called, if it does not divide the
        batch, if the arrays of the batch differ in their leading axis, or if
        ``loss`` does not give one loss per example.
      TypeError: when called, for parameters or losses that have no gradient.
    """
    _check_microbatches(microbatches)
    if microbatches == 1:
        return mean(loss)
    objective = mean_loss(loss)

    def gradient(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        check_params("accumulate_grad", params, jnp.inexact)
        parts = equal_parts("accumulate_grad", batch, microbatches)
        loop = functools.partial(_accumulate, objective, microbatches, False)
        in_line = functools.partial(_accumulate, objective, microbatches, True)
        args = params, model_state, parts, key
        if unroll is None and _is_slow_in_loops_on_cpu(objective, *args):
            found: tuple[Any, Any, dict[str, Array]] = jax.lax.platform_dependent(
                *args, cpu=in_line, default=loop
            )
            return found
        return in_line(*args) if unroll else loop(*args)

    return gradient


def _check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise ValueError(f"accumulate_grad: microbatches must be at least 1, got {microbatches}")


def equal_parts(name: str, batch: dict[str, Array], n: int) -> dict[str, Array]:
    """Every array [batch, ...] as [batch / n, n, ...]: part i is every n-th example.

    Of a sharded batch each device then has its share of every part.

    Raises:
      ValueError: in the name of the caller, for arrays of unequal leading axes and
        a batch that has no n equal parts.
    """
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="."): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
    }
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(f"{name}: the batch's arrays must share their leading axis, got {shapes}")
    ((size,),) = sizes
    if size % n:
        raise ValueError(
            f"{name}: a batch of {size} examples has no {n} equal microbatches; "
            f"pad it to {size + -size % n} examples, with weight 0"
        )
    parts: dict[str, Array] = jax.tree.map(lambda x: x.reshape(size // n, n, *x.shape[1:]), batch)
    return parts


def _part(parts: dict[str, Array], i: Array | int) -> dict[str, Array]:
    part: dict[str, Array] = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), parts
    )
    return part


def _shares(weight: Array | None, n: int) -> Array:
    """Of the sum of all weights [batch / n, n], each part's share [n]."""
    if weight is None:
        return jnp.full(n, 1 / n)
    sums = weight.sum(0, dtype=wide(weight))
    return sums / jnp.maximum(sums.sum(), 1e-12)


def _accumulate(
    objective: Objective,
    n: int,
    unroll: bool,
    params: Any,
    model_state: Any,
    parts: dict[str, Array],
    key: Array,
) -> tuple[Any, Any, dict[str, Array]]:
    """The gradient of all parts, by loop or in line."""
    shares = _shares(parts.get("weight"), n)
    sums = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

    def one_part(model_state: Any, i: Array) -> tuple[Any, dict[str, Array]]:
        part, current = _part(parts, i), _after(sums, params) if unroll else params
        part_key = None if key is None else jax.random.fold_in(key, i)
        f = _with_explicit_strides(objective, current, model_state, part, part_key)
        value, vjp, (model_state, means) = jax.vjp(
            lambda params: f(params, model_state, part, part_key), current, has_aux=True
        )
        backward: Any = vjp  # typed as a plain function, but a jax.VJP
        share, _ = equally_varying((shares[i].astype(value.dtype), value))
        backward.with_refs(sums)(share)
        return model_state, means

    model_state, means = jax.lax.scan(
        one_part, model_state, jnp.arange(n), unroll=n if unroll else 1
    )
    metrics = {name: (shares * m).sum().astype(m.dtype) for name, m in means.items()}
    return jax.tree.map(jax.freeze, sums), model_state, metrics


def _after(sums: Any, params: Any) -> Any:
    """``params`` as they are, not to be used before ``sums`` are up to date.

    In line, a compiler is free to start a part before the one before it has ended,
    and then holds the activations of both; and to keep what it makes of the
    parameters (transposed kernels) from the first part to the last.
    """
    values = jax.tree.map(lambda ref: ref[...], sums)
    # The sums must come back out of the barrier: a compiler drops what is unused.
    params, values = jax.lax.optimization_barrier((params, values))
    jax.tree.map(lambda ref, value: jax.ref.set(ref, ..., value), sums, values)
    return params


def _with_explicit_strides(f: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return ``f`` for arguments of these shapes, with strides in every slice.

    JAX 0.10 fails to add the cotangent of a slice without strides to a reference.
    """

    def with_strides(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name != "slice" or eqn.params["strides"] is not None:
            return eqn
        strides = (1,) * len(eqn.params["start_indices"])
        new: JaxprEqn = eqn.replace(params=eqn.params | {"strides": strides})
        return new

    closed, out = jax.make_jaxpr(f, return_shape=True)(*args)
    call = jaxpr_as_fun(rewrite(closed, with_strides))
    return lambda *args: jax.tree.unflatten(jax.tree.structure(out), call(*jax.tree.leaves(args)))


def _is_slow_in_loops_on_cpu(
    objective: Objective, params: Any, model_state: Any, parts: dict[str, Array], key: Array
) -> bool:
    """Whether the gradient has a convolution that XLA's CPU compiler would rather transpose.

    It has a fast implementation of convolutions in the layout [batch, space,
    features] x [space, in, out], and transposes others to it: but in the program's
    outermost computation only. Derivatives are among the others.
    """
    args = params, model_state, _part(parts, 0), key
    if not any(convolutions(jax.make_jaxpr(objective)(*args))):
        return False
    gradient = jax.make_jaxpr(jax.grad(objective, has_aux=True))(*args)
    return any(not is_in_fast_layout(eqn) for eqn in convolutions(gradient))


def convolutions(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yield all convolutions of a jaxpr, inner jaxprs included."""
    return find_equations(jaxpr, "conv_general_dilated")


def is_in_fast_layout(eqn: JaxprEqn) -> bool:
    """Whether it is [batch, space, features] x [space, in, out], fast in loops on CPU."""
    layout = eqn.params["dimension_numbers"]
    space = tuple(range(1, len(layout.lhs_spec) - 1))
    last = len(space) + 1
    images, kernel = (0, last, *space), (last, last - 1, *(i - 1 for i in space))
    fast: bool = layout.lhs_spec == layout.out_spec == images and layout.rhs_spec == kernel
    return fast
