"""Gradient accumulation: the gradient of a batch from one microbatch after the other."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend.core import JaxprEqn

from fnet.autodiff.examples import check_params
from fnet.autodiff.mean import (
    Gradient,
    Loss,
    Objective,
    gradient_of,
    ignore_padding,
    mean,
    mean_loss,
    shares,
)
from fnet.autodiff.update import GradientFunction, Mode, Update, gradient_then_optimizer
from fnet.cpu.convolutions import for_loops
from fnet.jaxpr import rewrite, transformed
from fnet.jaxpr.primitives import Slice
from fnet.mesh import equally_varying


@dataclasses.dataclass(frozen=True)
class Mean(Mode):
    """The gradient of the mean loss, accumulated over microbatches.

    Attributes:
      microbatches: Number of microbatches, >= 1.
    """

    microbatches: int = 1
    splittable: ClassVar[bool] = True
    differentiates_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject a number of microbatches below 1."""
        _check_microbatches(self.microbatches)

    def __call__(self, loss: Loss) -> Gradient:
        """Return the gradient function of a loss."""
        return accumulate_grad(loss, self.microbatches)

    def update_with(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> Update:
        """Return the update function, with a remat policy on the mean loss of a microbatch."""
        objective = remat(mean_loss(loss))
        gradient = _gradient(objective, self.microbatches)
        return gradient_then_optimizer(gradient, optimizer)


def microbatches(n: int) -> Mean:
    """Return a mode that accumulates the gradient over ``n`` microbatches.

    ``make_step(loss, optimizer, microbatches(8))`` equals ``make_step(loss, optimizer,
    microbatches=8)``. It trains like ``make_step(loss, optimizer)``, with the activations of an
    eighth of the batch. See `accumulate_grad` for the guarantees.

    Args:
      n: Number of microbatches, >= 1, a divisor of the batch size.

    Returns:
      A mode for `fnet.make_step`.

    Raises:
      ValueError: If ``n < 1``; when called, as `accumulate_grad`.

    Example:
      >>> from fnet.autodiff import microbatches
      >>> microbatches(8)
      Mean(microbatches=8)
    """
    return Mean(n)


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
            f"loss -> gradient, got {type(mode).__name__}"
        )
    return GradientFunction(mode)


def accumulate_grad(loss: Loss, microbatches: int) -> Gradient:
    """Return a function that computes the gradient of the mean loss, one microbatch at a time.

    With n microbatches B_i of the batch B, and w_i the weights of their examples,

        g = sum_i s_i grad mean(loss(B_i)),    s_i = sum(w_i) / sum(w).

    That is the gradient of the mean over B, if the loss of an example does not depend on other
    examples. Metrics are means over the whole batch too. Only the activations of one microbatch
    exist at a time. The backward pass adds to one accumulator (``jax.vjp(...).with_refs``), and
    does so layer by layer inside a scan over layers. No other array of the parameters' size
    exists besides the accumulator.

    Guarantees:
      - ``batch["weight"]`` counts over the whole batch. A microbatch of padding adds nothing.
        If all weights are 0, the gradient is 0, as in `mean`.
      - Microbatch i is every n-th example, starting with example i. If the batch is sharded
        over its leading axis and n divides each device's examples, every device takes its
        share of a microbatch from its own examples and no example moves.
      - Gradients are summed over devices once per microbatch. Inside `jax.shard_map`, mark
        the parameters as varying (``jax.lax.pcast``) and sum once per batch yourself.
      - Microbatch i gets the key ``fold_in(key, i)``.
      - ``model_state`` passes from each microbatch to the next. A batch norm (`fnet.abn`) uses
        the statistics of a microbatch and updates its running statistics n times, so such a
        network does not have the gradient of the whole batch.
      - The accumulator has the dtype of the parameters, since JAX requires it. Keep
        parameters in float32 and compute in bfloat16, as fnet's layers do. A sum in bfloat16
        rounds after every microbatch.
      - With one microbatch, the result is the same as `mean`.

    Args:
      loss: per-example losses; see `fnet.autodiff.Loss`.
      microbatches: number n of microbatches, a divisor of the batch size.

    Returns:
      ``gradient(params, model_state, batch, key) -> (grads, model_state, metrics)``, as `mean`.

    Raises:
      ValueError: if ``microbatches < 1``. When called: if it does not divide the batch
        size, if the arrays of the batch differ in their leading axis, or if ``loss`` does
        not return one loss per example.
      TypeError: when called, if parameters or losses are not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> import fnet
      >>> def loss(params, model_state, batch, key):
      ...     return (params["w"] * batch["x"]) ** 2
      >>> params, batch = {"w": jnp.float32(1.0)}, {"x": jnp.arange(6.0)}
      >>> whole, _, _ = fnet.autodiff.mean(loss)(params, {}, batch, None)
      >>> grads, _, metrics = fnet.accumulate_grad(loss, 3)(params, {}, batch, None)
      >>> bool(jnp.allclose(grads["w"], whole["w"])), float(metrics["loss"])
      (True, 9.166...)
    """
    _check_microbatches(microbatches)
    return _gradient(mean_loss(loss), microbatches)


def _gradient(objective: Objective, microbatches: int) -> Gradient:
    """Return the gradient function of an objective, as `accumulate_grad`."""
    if microbatches == 1:
        return ignore_padding(gradient_of(objective))

    def gradient(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        check_params("accumulate_grad", params, jnp.inexact)
        parts = split_batch("accumulate_grad", batch, microbatches)
        accumulate = for_loops(functools.partial(_accumulate, objective, microbatches))
        return accumulate(params, model_state, parts, key)

    # Before the split, because a microbatch may be padding only.
    return ignore_padding(gradient)


def _check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise ValueError(f"accumulate_grad: microbatches must be at least 1, got {microbatches}")


def split_batch(name: str, batch: dict[str, Array], n: int) -> dict[str, Array]:
    """Reshape every array [batch, ...] to [batch / n, n, ...]: microbatch i is ``[:, i]``.

    In a sharded batch every device then has its share of every microbatch. Contiguous
    microbatches would lie on few devices each. ValueError if leading axes differ, or n does not
    divide them; ``name`` is the caller.
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
        private = f", as PoissonSampling(..., multiple={n}) does" * (name != "accumulate_grad")
        raise ValueError(
            f"{name}: {n} microbatches do not divide a batch of {size} examples; "
            f"pad it to {size + -size % n} examples, with weight 0{private}"
        )
    parts: dict[str, Array] = jax.tree.map(lambda x: x.reshape(size // n, n, *x.shape[1:]), batch)
    return parts


def _part(parts: dict[str, Array], i: Array | int) -> dict[str, Array]:
    part: dict[str, Array] = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), parts
    )
    return part


def _shares(weight: Array | None, n: int) -> Array:
    """Return each microbatch's share [n] of the sum of the weights [batch / n, n]."""
    return jnp.full(n, 1 / n) if weight is None else shares(weight).sum(0)


def _accumulate(
    objective: Objective, n: int, params: Any, model_state: Any, parts: dict[str, Array], key: Array
) -> tuple[Any, Any, dict[str, Array]]:
    shares = _shares(parts.get("weight"), n)
    sums = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

    def add_gradient(model_state: Any, i: Array) -> tuple[Any, dict[str, Array]]:
        part = _part(parts, i)
        part_key = None if key is None else jax.random.fold_in(key, i)
        f = transformed(objective, lambda closed, _: rewrite(closed, _with_strides))
        value, vjp, (model_state, means) = jax.vjp(
            lambda params: f(params, model_state, part, part_key), params, has_aux=True
        )
        backward: Any = vjp  # a jax.VJP, which JAX types as a plain function
        share, _ = equally_varying((shares[i].astype(value.dtype), value))
        backward.with_refs(sums)(share)
        return model_state, means

    model_state, means = jax.lax.scan(add_gradient, model_state, jnp.arange(n))
    metrics = {name: (shares * m).sum().astype(m.dtype) for name, m in means.items()}
    return jax.tree.map(jax.freeze, sums), model_state, metrics


def _with_strides(eqn: JaxprEqn) -> JaxprEqn:
    """A slice with strides: JAX 0.10 fails to add the cotangent of one without to a reference."""
    part = Slice.read(eqn)
    if part is None or part.strides is not None:
        return eqn
    return part.replace(strides=(1,) * len(part.start_indices))
