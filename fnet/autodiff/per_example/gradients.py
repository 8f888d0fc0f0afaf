"""One gradient per example, and statistics of all of them that need none of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet import jaxprs
from fnet.autodiff.examples import (
    Examples,
    PerExampleLoss,
    check_losses,
    check_width,
    examples,
    is_key,
)
from fnet.autodiff.per_example.backward import contributions


def per_example_grad(
    loss: PerExampleLoss, *, width: int | None = None, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of every example's loss: what a loop over batches of one gives.

    One backward pass over the batch, and a product of activations and cotangents for
    each example and layer; see `fnet.clipped_grad`, which needs no memory for the result.

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``, or ``(losses, aux)``; see
        `PerExampleLoss`.
      width: how many examples at a time: activations are then those of as many. By
        default all at once, which is the fastest.
      has_aux: whether ``loss`` returns ``(losses, aux)``.

    Returns:
      ``gradient(params, *batch) -> grads``, each leaf [batch, *parameter]; with
      ``has_aux``, ``(grads, aux)``, each leaf of ``aux`` [batch, ...].

    Raises:
      ValueError: for a width below 1; when called, for losses that are not one per
        example, arrays of unequal leading axes, and layers that mix examples, by name.
      TypeError: for a width that is no int, and parameters or losses that are not
        floating-point.
    """
    check_width("per_example_grad", width)

    def gradient(params: Any, *batch: Any) -> Any:
        e = examples("per_example_grad", batch)

        def some(e: Examples) -> Any:
            found = contributions("per_example_grad", loss, params, e, has_aux=has_aux)
            grads = jax.tree.map(lambda g, p: g.astype(jnp.result_type(p)), found.each(), params)
            aux, structure = jax.tree.flatten(found.aux)
            rows = [
                a if is_row else jnp.broadcast_to(a, (e.size, *jnp.shape(a)))
                for a, is_row in zip(aux, found.aux_rows, strict=True)
            ]
            return grads, jax.tree.unflatten(structure, rows)

        grads, aux = _in_chunks(some, e, width or max(e.size, 1))
        return (grads, aux) if has_aux else grads

    return gradient


def _in_chunks(f: Callable[[Examples], Any], e: Examples, width: int) -> Any:
    """``f`` of ``width`` examples at a time; what is left over comes last."""
    if width >= e.size:
        return f(e)
    whole = e.size // width * width

    def chunk(leaves: list[Array]) -> Any:
        return f(e._replace(size=len(leaves[0]), leaves=leaves))

    parts = [a[:whole].reshape(-1, width, *a.shape[1:]) for a in e.leaves]
    found = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), jax.lax.map(chunk, parts))
    if whole == e.size:
        return found
    rest = chunk([a[whole:] for a in e.leaves])
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), found, rest)


def per_example_norms(loss: PerExampleLoss, *, has_aux: bool = False) -> Callable[..., Any]:
    """The norm of every example's gradient, for less than the price of a gradient.

    Args:
      loss: as `per_example_grad` takes it.
      has_aux: likewise.

    Returns:
      ``norms(params, *batch) -> [batch]``, or with ``has_aux`` ``([batch], aux)``, what does not
      depend on the batch as it is. Quantiles are ``jnp.quantile(norms, q)``.

    Raises:
      ValueError, TypeError: as `per_example_grad`.
    """

    def norms(params: Any, *batch: Any) -> Any:
        e = examples("per_example_norms", batch)
        found = contributions("per_example_norms", loss, params, e, has_aux=has_aux)
        squares = sum(jax.tree.leaves(found.squared_norms()), jnp.zeros(e.size))
        return (jnp.sqrt(squares), found.aux) if has_aux else jnp.sqrt(squares)

    return norms


def influence(loss: PerExampleLoss) -> Callable[..., Array]:
    """Dot products of every example's gradient with one direction: one forward pass.

    Through a `jax.custom_vjp`, such as fnet's norms, it goes by the transposed backward pass,
    which keeps what a gradient keeps.

    With the gradient of a validation loss as the direction it is how much a step on
    that example lowers the validation loss, to first order (TracIn: Pruthi et al. 2020).
    With the mean gradient and `per_example_norms` it gives the cosine to the mean.

        <g_b, v> = d/dt loss_b(params + t v) at t = 0

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``.

    Returns:
      ``influence(direction, params, *batch) -> [batch]``, ``direction`` like params in shapes
      and dtypes; in the dtype of the losses.

    Raises:
      ValueError: when called, for losses that are not one per example, and arrays of
        unequal leading axes.
      TypeError: for losses that are not floating; from JAX for another dtype.
    """

    def along(direction: Any, params: Any, batch: Sequence[Any], size: int) -> Array:
        def of_params(params: Any) -> Any:
            losses = loss(params, *batch)
            check_losses("influence", losses, size)
            return losses

        products: Array
        if any(jaxprs.every(jax.make_jaxpr(of_params)(params), "custom_vjp_call")):
            # What has a backward rule alone: that is linear, and transposed it goes forward.
            losses, back = jax.vjp(of_params, params)
            _, along_it = jax.vjp(lambda ct: back(ct)[0], jnp.zeros_like(losses))
            (products,) = along_it(direction)
        else:
            _, products = jax.jvp(of_params, (params,), (direction,))
        return products

    def of(direction: Any, params: Any, *batch: Any) -> Array:
        e = examples("influence", batch)
        if not any(is_key(a) and not a.ndim for a in map(jnp.asarray, jax.tree.leaves(batch))):
            return along(direction, params, batch, e.size)
        # Each has a key of its own, as for its gradient.
        return jax.vmap(lambda one: along(direction, params, e.rebuild(one), 1)[0])(e.leaves)

    return of


class NoiseScale(NamedTuple):
    """What the simple noise scale is made of: ``grad_var / grad_sq``, in examples.

    Batches much larger than that waste work. It is a ratio of noisy estimates: average each
    over steps first.

    Attributes:
      grad_sq: an unbiased estimate of the squared norm of the true gradient, [].
      grad_var: an unbiased estimate of the trace of the covariance of examples' gradients, [].
    """

    grad_sq: Array
    grad_var: Array


def noise_scale(norms: Array, mean_norm: Array, weight: Array | None = None) -> NoiseScale:
    """The gradient noise scale of a batch (McCandlish et al. 2018, appendix A.1).

    From the gradients g_b of B examples and their mean, as batches of sizes 1 and B,

        |G|^2     = (B |mean g|^2 - mean |g|^2) / (B - 1)
        tr(Sigma) = (mean |g|^2 - |mean g|^2) B / (B - 1)

    Args:
      norms: of each example's gradient, [batch], floating.
      mean_norm: of their mean, [].
      weight: [batch], 0 for padding; by default all count.

    Returns:
      Both estimates, [] in the dtype of ``norms``; of a single example they are not finite.
    """
    real = jnp.ones(norms.shape, bool) if weight is None else weight != 0
    count = real.sum().astype(norms.dtype)
    squares = jnp.where(real, jnp.square(norms), 0).sum() / count
    whole = jnp.square(mean_norm)
    return NoiseScale(
        grad_sq=(count * whole - squares) / (count - 1),
        grad_var=(squares - whole) * count / (count - 1),
    )
