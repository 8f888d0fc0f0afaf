"""Per-example gradients, and statistics of them that do not materialize them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import jaxpr_as_fun

from fnet import checks
from fnet.autodiff.examples import Examples, PerExampleLoss, check_width, examples
from fnet.autodiff.per_example.backward import per_example_gradients, trace_loss
from fnet.autodiff.per_example.batching import Rows, rows_of, run_for_batch
from fnet.jaxpr import has_forward_derivative


def per_example_grad(
    loss: PerExampleLoss, *, width: int | None = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Compute the gradient of every example's loss.

    The result equals a loop over batches of one example, up to rounding. It takes one backward
    pass over the batch. If you only need a clipped sum or norms, use `fnet.clipped_grad` or
    `fnet.autodiff.per_example_norms`, which do not materialize the gradients.

    ================================  ===========================================================
    edge case                         result
    ================================  ===========================================================
    batch of 0 examples               gradients [0, *parameter]
    parameter without effect          gradients of 0
    random key in the batch           one key per example: ``jax.random.fold_in(key, b)``
    layer that mixes examples         ValueError with the layer's name
    ================================  ===========================================================

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``, or ``(losses, aux)``; see
        `PerExampleLoss`.
      width: Number of examples at a time, which limits the memory of activations. By default
        all at once, which is fastest.
      has_aux: Whether ``loss`` returns ``(losses, aux)``.

    Returns:
      ``gradient(params, *batch) -> grads``, each leaf [batch, *parameter]. With ``has_aux``
      ``(grads, aux)``, each leaf of ``aux`` [batch, ...].

    Raises:
      ValueError: ``width`` is below 1. When called: the losses are not [batch], arrays differ in
        their leading axis, or a layer mixes examples.
      TypeError: ``width`` is not an int, or parameters or losses are not floating-point.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x, y):
      ...     return 0.5 * (x @ params - y) ** 2
      >>> x, y = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([1.0, 2.0])
      >>> print(fnet.per_example_grad(loss)(jnp.zeros(2), x, y))
      [[-1. -2.]
       [-6. -0.]]
    """
    check_width("per_example_grad", width)

    def gradient(params: Any, *batch: Any) -> Any:
        def gradient_of(e: Examples) -> Any:
            gradients = per_example_gradients("per_example_grad", loss, params, e, has_aux=has_aux)
            grads = jax.tree.map(
                lambda g, p: g.astype(jnp.result_type(p)), gradients.materialize(), params
            )
            leaves, treedef = jax.tree.flatten(gradients.aux)
            rows = [
                a if is_batched else jnp.broadcast_to(a, (e.size, *jnp.shape(a)))
                for a, is_batched in zip(leaves, gradients.aux_is_batched, strict=True)
            ]
            return grads, jax.tree.unflatten(treedef, rows)

        e = examples("per_example_grad", batch)
        grads, aux = map_in_chunks(gradient_of, e, width or max(e.size, 1))
        return (grads, aux) if has_aux else grads

    return gradient


def map_in_chunks(f: Callable[[Examples], Any], e: Examples, width: int) -> Any:
    """Compute ``f`` for ``width`` examples at a time, and for the remainder in the end."""
    if width >= e.size:
        return f(e)
    divisible = e.size // width * width

    def compute_chunk(leaves: list[Array]) -> Any:
        return f(e._replace(size=len(leaves[0]), leaves=leaves))

    chunks = [a[:divisible].reshape(-1, width, *a.shape[1:]) for a in e.leaves]
    results = jax.tree.map(
        lambda a: a.reshape(divisible, *a.shape[2:]), jax.lax.map(compute_chunk, chunks)
    )
    if divisible == e.size:
        return results
    remainder = compute_chunk([a[divisible:] for a in e.leaves])
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, remainder)


def per_example_norms(
    loss: PerExampleLoss, *, per_layer: bool = False, has_aux: bool = False
) -> Callable[..., Any]:
    """Compute the gradient norm of every example, at less than the cost of a gradient.

    Quantiles for the choice of a clip are ``jnp.quantile(norms, q)``.

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``; see `per_example_grad`.
      per_layer: Whether to return the norms of each parameter array, in place of those over all.
      has_aux: Whether ``loss`` returns ``(losses, aux)``.

    Returns:
      ``norms(params, *batch) -> [batch]``, or with ``per_layer`` a tree of them like params. With
      ``has_aux`` ``(norms, aux)``; leaves of ``aux`` that do not depend on the batch have no batch
      axis.

    Raises:
      ValueError, TypeError: As `per_example_grad`.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x):
      ...     return x @ params
      >>> norms = fnet.autodiff.per_example_norms(loss)
      >>> print(norms(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 2.0]])))
      [5. 2.]
    """

    def norms(params: Any, *batch: Any) -> Any:
        e = examples("per_example_norms", batch)
        gradients = per_example_gradients(
            "per_example_norms", loss, params, e, has_aux=has_aux, remat=not per_layer
        )
        by_param = gradients.squared_norms(whole=not per_layer)
        squares = [by_param[i].values for i in range(len(by_param))]
        values: Any = jnp.sqrt(sum(squares, jnp.zeros(e.size)))
        if per_layer:
            values = jax.tree.unflatten(gradients.treedef, map(jnp.sqrt, squares))
        return (values, gradients.aux) if has_aux else values

    return norms


def influence(loss: PerExampleLoss) -> Callable[..., Array]:
    """Compute the dot product of every example's gradient with one direction.

        <g_b, v> = d/dt loss_b(params + t v) at t = 0

    As for `per_example_grad`, the loss is that of a batch that holds example b alone. It takes one
    forward pass (`jax.jvp`) and no memory for residuals. Functions with a `jax.custom_vjp`, such
    as fnet's norms, have no forward derivative. A loss that has one is differentiated backward.

    Take the gradient of a validation loss as the direction: the result estimates how much a step
    on each example lowers the validation loss (TracIn: Pruthi et al. 2020). With the mean gradient
    and `per_example_norms`, it gives the cosine to the mean gradient.

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``.

    Returns:
      ``influence(direction, params, *batch) -> [batch]`` in the dtype of the losses.
      ``direction`` has the shapes and dtypes of params.

    Raises:
      ValueError: When called, as `per_example_grad`.
      TypeError: When called, as `per_example_grad`, or JAX finds another dtype in ``direction``.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x):
      ...     return x @ params
      >>> direction = jnp.array([1.0, -1.0])
      >>> x = jnp.array([[3.0, 1.0], [0.0, 2.0]])
      >>> print(fnet.autodiff.influence(loss)(direction, jnp.zeros(2), x))
      [ 2. -2.]

    References:
      Pruthi et al. 2020, "Estimating training data influence by tracing gradient descent",
      arXiv:2002.08484.
    """

    def influence_of(direction: Any, params: Any, *batch: Any) -> Array:
        jax.jvp(lambda p: p, (params,), (direction,))  # checks the direction
        traced = trace_loss("influence", loss, params, examples("influence", batch))
        closed, rows, size = traced.closed, traced.examples, traced.examples.size
        if not size or not has_forward_derivative(closed):
            gradients = traced.gradients(rows)
            return gradients.inner_products(direction).astype(closed.out_avals[0].dtype)

        def of_one(primals: Any, tangents: Any, *example: Any) -> Any:
            f = jaxpr_as_fun(closed)
            return jax.jvp(lambda *params: f(*params, *example)[0], primals, tangents)[1]

        pair = tuple(traced.leaves), tuple(jax.tree.leaves(direction))
        program = jax.make_jaxpr(of_one)(*pair, *rows.of_size(1))
        args = [*jax.tree.leaves(pair), *(Rows(a, 0) for a in rows.leaves)]
        return rows_of(run_for_batch(program, args, size)[0], (1,), size)[:, 0]

    return influence_of


class NoiseScale(NamedTuple):
    """The two parts of the gradient noise scale ``grad_var / grad_sq``, in examples.

    Batches much larger than the noise scale waste compute. Both parts are noisy: average each
    over steps before you divide. Parts of several parameters add up to the parts of all.

    Attributes:
      grad_sq: Unbiased estimate of the squared norm of the true gradient, [].
      grad_var: Unbiased estimate of the trace of the covariance of per-example gradients, [].

    Example:
      >>> from fnet.autodiff import NoiseScale
      >>> scale = NoiseScale(grad_sq=0.5, grad_var=64.0)  # Means over many steps.
      >>> scale.grad_var / scale.grad_sq
      128.0
    """

    grad_sq: Array
    grad_var: Array


def noise_scale(norms: Array, mean_norm: Array, mask: Array | None = None) -> NoiseScale:
    """Estimate the gradient noise scale from one batch (McCandlish et al. 2018, appendix A.1).

    It compares the gradients g_b of B examples with their mean, as batches of size 1 and B:

        |G|^2     = (B |mean g|^2 - mean |g|^2) / (B - 1)
        tr(Sigma) = (mean |g|^2 - |mean g|^2) B / (B - 1)

    With the norms of one parameter (`per_example_norms` with ``per_layer=True``) and of its mean,
    it is the layer's.

    Args:
      norms: Norms of the per-example gradients, [batch], floating.
      mean_norm: Norm of their mean, [].
      mask: [batch], True (or nonzero) for real examples. By default all examples count.

    Returns:
      Both estimates, [] in the dtype of ``norms``. They are not finite for a single example.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> scale = fnet.autodiff.noise_scale(
      ...     jnp.array([1.0, 2.0, 3.0]), jnp.float32(1.5)
      ... )
      >>> print(round(float(scale.grad_sq), 4), round(float(scale.grad_var), 4))
      1.0417 3.625

    References:
      McCandlish et al. 2018, "An empirical model of large-batch training", arXiv:1812.06162.
    """
    is_real = jnp.ones(norms.shape, bool) if mask is None else mask != 0
    count = is_real.sum().astype(norms.dtype)
    mean_square = jnp.where(is_real, jnp.square(norms), 0).sum() / count
    square_of_mean = jnp.square(mean_norm)
    return NoiseScale(
        grad_sq=(count * square_of_mean - mean_square) / (count - 1),
        grad_var=(mean_square - square_of_mean) * count / (count - 1),
    )


def importance_sampling(key: Array, norms: Array, size: int) -> tuple[Array, Array]:
    """Draw examples in proportion to the norms of their gradients, with unbiased weights.

    From B examples, each draw takes b with the probability p_b. The weighted mean of the gradients
    of the drawn examples has the mean gradient as its expectation:

        p_b = |g_b| / sum_c |g_c|,      E[w_b g_b] = mean g,      w_b = 1 / (B p_b)

    No other probabilities give it a smaller variance. Take the norms from a forward pass over many
    examples, such as ``1 - p`` of the label, or from `per_example_norms`; any scores above 0 are
    unbiased. Then train on few.

    Args:
      key: Random key.
      norms: Gradient norms, or scores like them, [batch], floating. An example with a norm of 0 is
        not drawn, nor one with a norm that is not finite. If all are 0, each is as probable.
      size: Number of examples to draw, with replacement.

    Returns:
      Indices of the drawn examples, int32 [size], and their weights w, [size] in the dtype of
      ``norms``. Multiply losses by them: `fnet.autodiff.mean` would divide by the sum of a
      ``weight``.

    Raises:
      ValueError: ``size`` is below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.autodiff import importance_sampling
      >>> norms = jnp.array([3.0, 0.0, 3.0])
      >>> indices, weights = importance_sampling(jax.random.key(0), norms, 4)
      >>> print(indices, weights)
      [0 0 2 2] [0.6666667 0.6666667 0.6666667 0.6666667]

    References:
      Katharopoulos and Fleuret 2018, "Not all samples are created equal: deep learning with
      importance sampling", arXiv:1803.00942.
    """
    checks.sizes("importance_sampling", size=size)
    scores = jnp.where(jnp.isfinite(norms), norms, 0)
    scores = jnp.where(scores.max() > 0, scores, 1)
    p = scores / scores.sum()
    indices = jax.random.choice(key, len(p), (size,), p=p).astype(jnp.int32)
    return indices, 1 / (len(p) * p[indices])
