"""LoRA and DoRA: train low-rank updates of frozen weights, for any model and loss.

A train step needs three lines: `init` makes the adapters, `loss` makes a loss of adapters, and the
frozen parameters go into the model state::

    adapters = lora.init(config, params, key)
    state = TrainState.create(
        params=adapters,
        optimizer=optimizer,
        key=key,
        model_state={"frozen": params, "model": model_state},
    )
    step = make_step(lora.loss(loss, config), optimizer)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fnet import represented
from fnet.autodiff.mean import Aux, Loss, losses_and_aux
from fnet.quantization import Layout, Targets, find_targets, leaves_with_paths, map_with_paths

Adapters = Mapping[str, Mapping[str, Any]]
"""Path of a weight -> ``{"a", "b"}``, with DoRA also ``"magnitude"``."""


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which weights get a low-rank update, and of which form.

    A weight W [in, out] becomes, with A [in, rank] and B [rank, out],

        LoRA:  W' = W + s A B,    s = alpha / rank, or alpha / sqrt(rank) with ``rslora``
        DoRA:  W'_o = m_o (W + s A B)_o / |(W + s A B)_o|    for each output o

    The norm of DoRA has no gradient, as in its paper and in PEFT.

    Attributes:
      rank: Rank of the updates.
      alpha: Numerator of the scale s. By default the rank, so that s = 1.
      targets: Patterns of paths. The path of a leaf joins its keys by "/", as in
        ``"blocks/0/attention/query/kernel"``; `*` also matches "/", and a pattern behind ``!``
        leaves out what it matches. A mapping from patterns to layouts names the axes of the
        weights: ``"oi"`` for Equinox and torch, ``"ioo"`` for the query of flax, ``"iio"`` for its
        output, and ``"n"`` in front for stacked layers. By default [in, out], [layers, in, out], or
        a convolution [..., in, out].
      dora: Whether outputs get a trained magnitude m.
      rslora: Whether the scale is ``alpha / sqrt(rank)``.

    Raises:
      ValueError: If the rank is below 1.

    Example:
      >>> from fnet import lora
      >>> lora.LoRA(8, alpha=16, targets=("*query/kernel", "*value/kernel")).scale
      2.0

    References:
      - Hu et al. 2021, "LoRA: low-rank adaptation of large language models", arXiv:2106.09685.
      - Liu et al. 2024, "DoRA: weight-decomposed low-rank adaptation", arXiv:2402.09353.
      - Kalajdzievski 2023, "A rank stabilization scaling factor for fine-tuning with LoRA",
        arXiv:2312.03732.
    """

    rank: int
    alpha: float | None = None
    targets: Targets = ("*kernel",)
    _: dataclasses.KW_ONLY
    dora: bool = False
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA: rank must be at least 1, got {self.rank}")

    @property
    def scale(self) -> float:
        """Factor s of the update."""
        alpha = self.rank if self.alpha is None else self.alpha
        return float(alpha / (self.rank**0.5 if self.rslora else self.rank))


def init(config: LoRA, params: Any, key: Array) -> dict[str, dict[str, Array]]:
    """Return adapters that do not change the model yet.

    A is uniform in ``+-1 / sqrt(in)`` and B is 0, as in PEFT. The magnitude of DoRA is the norm
    of the weight.

    Args:
      config: Which weights get an update.
      params: Frozen parameters, which may be quantized. Without DoRA, shapes are enough.
      key: Typed random key [].

    Returns:
      Path -> ``{"a": [*stack, in, rank], "b": [*stack, rank, out]}``, with DoRA also
      ``"magnitude"`` [*stack, out], all float32.

    Raises:
      ValueError: If a pattern matches nothing, or a layout does not fit.
      TypeError: If a matching leaf is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> params = {"head": {"kernel": jnp.ones((6, 3)), "bias": jnp.zeros(3)}}
      >>> adapters = fnet.lora.init(fnet.lora.LoRA(rank=2), params, jax.random.key(0))
      >>> jax.tree.map(jnp.shape, adapters)
      {'head/kernel': {'a': (6, 2), 'b': (2, 3)}}
    """
    layouts = find_targets("lora.init", params, config.targets)
    leaves = dict(leaves_with_paths(params))
    adapters: dict[str, dict[str, Array]] = {}
    keys = jax.random.split(key, len(layouts))
    for (path, layout), own_key in zip(layouts.items(), keys, strict=True):
        leaf = leaves[path]
        stack = layout.stack(leaf.shape)
        n_in, n_out = layout.size(leaf.shape, "i"), layout.size(leaf.shape, "o")
        bound = n_in**-0.5
        a = jax.random.uniform(own_key, (*stack, n_in, config.rank), jnp.float32, -bound, bound)
        adapters[path] = {"a": a, "b": jnp.zeros((*stack, config.rank, n_out), jnp.float32)}
        if config.dora:
            magnitude = represented.norms(leaf, adapters[path], layout, config.scale)
            adapters[path]["magnitude"] = magnitude.astype(jnp.float32)
    return adapters


def wrap(f: Callable[..., Any], config: LoRA) -> Callable[..., Any]:
    """Turn a function of parameters into a function of adapters and frozen parameters.

    The function is traced, and products with adapted weights become ``x W + s (x A) B``. They
    are found inside of `jax.jit`, `jax.checkpoint`, `jax.lax.scan` and other loops, after
    casts and transposes, and under `jax.vmap`. Neither ``A B`` nor ``W + s A B`` is materialized,
    in the forward or the backward pass. Other operations, such as a convolution or a lookup in
    an embedding, get a materialized weight, which they materialize again in the backward pass.

    Args:
      f: A function of pytrees whose first argument are parameters, such as ``model.apply`` or a
        loss. Arguments that are no arrays, such as ``train=True``, are static.
      config: The configuration of the adapters.

    Returns:
      ``wrapped(adapters, params, *args, **kwargs)``, with the result of ``f(params, *args,
      **kwargs)`` for the updated weights. ``params`` may have quantized leaves, see
      `fnet.quantization`. Differentiate it in ``adapters``.

    Raises:
      ValueError: When called, if the adapters do not belong to the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> params, x = {"kernel": jnp.eye(3, 2)}, jnp.ones((1, 3))
      >>> config = fnet.lora.LoRA(rank=1)
      >>> apply = fnet.lora.wrap(lambda params, x: x @ params["kernel"], config)
      >>> adapters = {"kernel": {"a": jnp.ones((3, 1)), "b": jnp.ones((1, 2))}}
      >>> print(apply(adapters, params, x))
      [[4. 4.]]
    """

    @functools.wraps(f)
    def wrapped(adapters: Adapters, params: Any, *args: Any, **kwargs: Any) -> Any:
        layouts = _layouts("lora.wrap", config, params, adapters)

        def weight(path: str, leaf: Any) -> Any:
            if path not in layouts:
                return leaf
            adapter = dict(adapters[path])
            return represented.Weight.of(leaf, adapter, layouts[path], config.scale)

        return represented.run(f, (map_with_paths(weight, params), *args), kwargs)

    return wrapped


def loss(f: Loss, config: LoRA) -> Loss:
    """Turn a loss of parameters into a loss of adapters, for `fnet.make_step`.

    The frozen parameters are a part of the model state, so that a step passes them on unchanged,
    in the same buffers. They have no gradient and no optimizer state.

    Args:
      f: ``loss(params, model_state, batch, key) -> losses [batch]``, or ``(losses, Aux)``.
      config: The configuration of the adapters.

    Returns:
      ``loss(adapters, state, batch, key)``, with ``state = {"frozen": params, "model":
      model_state}``. Use {} for a model without state.

    Raises:
      ValueError: When called, as `wrap`.
      TypeError: When called, if the loss returns neither losses nor ``(losses, Aux)``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return jnp.square(batch["x"] @ params["kernel"]).sum(-1)
      >>> config, optimizer = fnet.lora.LoRA(rank=1), optax.sgd(0.1)
      >>> key, params = jax.random.key(0), {"kernel": jnp.ones((3, 2))}
      >>> given = {"params": fnet.lora.init(config, params, key)}
      >>> given |= {"model_state": {"frozen": params, "model": {}}}
      >>> key = jax.random.key(1)
      >>> state = fnet.TrainState.create(optimizer=optimizer, key=key, **given)
      >>> step = fnet.make_step(fnet.lora.loss(loss, config), optimizer)
      >>> state, metrics = step(state, {"x": jnp.ones((4, 3))})
      >>> float(metrics["loss"])
      18.0
    """
    of_adapters = wrap(f, config)

    def adapted(adapters: Any, state: Any, batch: dict[str, Array], key: Array) -> Any:
        frozen, model_state = state["frozen"], state["model"]
        result = of_adapters(adapters, frozen, model_state, batch, key)
        losses, aux = losses_and_aux(result, model_state)
        return losses, Aux({"frozen": frozen, "model": aux.model_state}, aux.metrics)

    return adapted


def merge(config: LoRA, params: Any, adapters: Adapters) -> Any:
    """Return parameters with the updates added: ``W + s A B``, with DoRA scaled.

    Args:
      config: The configuration of the adapters.
      params: Frozen parameters. A quantized weight becomes an array if it has an update.
      adapters: As `init` returns.

    Returns:
      Parameters for the model without adapters, each in its own dtype. Sums are computed in
      float32.

    Raises:
      ValueError: If the adapters do not belong to the parameters.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> params = {"kernel": jnp.eye(2)}
      >>> adapters = {"kernel": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
      >>> print(fnet.lora.merge(fnet.lora.LoRA(rank=1), params, adapters)["kernel"])
      [[2. 1.]
       [1. 2.]]
    """
    layouts = _layouts("lora.merge", config, params, adapters)

    def merged(path: str, leaf: Any) -> Any:
        if path not in layouts:
            return leaf
        weight = represented.updated(leaf, adapters[path], layouts[path], config.scale)
        return weight.astype(leaf.dtype)

    return map_with_paths(merged, params)


def _layouts(where: str, config: LoRA, params: Any, adapters: Adapters) -> dict[str, Layout]:
    layouts = find_targets(where, params, config.targets)
    if layouts.keys() != adapters.keys():
        raise ValueError(
            f"{where}: the adapters must be of {sorted(layouts)}, got {sorted(adapters)}; use the "
            "configuration that made the adapters"
        )
    leaves = dict(leaves_with_paths(params))
    for path, layout in layouts.items():
        shape = leaves[path].shape
        stack, n_in, n_out = layout.stack(shape), layout.size(shape, "i"), layout.size(shape, "o")
        expected = {"a": (*stack, n_in, config.rank), "b": (*stack, config.rank, n_out)}
        if config.dora:
            expected["magnitude"] = (*stack, n_out)
        shapes = {name: jnp.shape(array) for name, array in adapters[path].items()}
        if shapes != expected:
            raise ValueError(
                f"{where}: the adapter of {path!r} must have the shapes {expected}, got {shapes}"
            )
    return layouts
