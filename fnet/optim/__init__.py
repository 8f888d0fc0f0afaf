"""Optimizers and learning rate schedules by name, with weight decay and gradient clipping.

Any `optax.GradientTransformation` works with `fnet.make_step`; these are the ones that configs
can name::

    schedule = fnet.optim.make_schedule(
        "cosine", 1e-3, steps=10_000, warmup_steps=500
    )
    optimizer = fnet.optim.make_optimizer("adamw", schedule, weight_decay=0.05)
"""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import optax.contrib

from fnet import checks
from fnet.optim.compact import compact_adamw as compact_adamw
from fnet.optim.compact import compact_lion as compact_lion
from fnet.optim.compact import compact_sgd as compact_sgd


def make_schedule(
    name: str,
    learning_rate: float,
    steps: int,
    *,
    warmup_steps: int = 0,
    decay_steps: Sequence[float] = (),
    decay_rate: float = 0.1,
) -> optax.Schedule:
    """Build a learning rate schedule: linear warmup, then a decay.

    Args:
      name: ``constant``. ``cosine`` (Loshchilov & Hutter 2017) or ``linear``, which decay to 0 at
        ``steps``. ``step`` or ``exponential``, which multiply by ``decay_rate`` every
        ``decay_steps[0]`` steps, at once or gradually. ``multistep``, which multiplies by
        ``decay_rate`` at each of ``decay_steps``.
      learning_rate: peak value.
      steps: length of the run, including the warmup.
      warmup_steps: steps of linear warmup from 0 to ``learning_rate``.
      decay_steps: one interval for ``step`` and ``exponential``, or the boundaries for
        ``multistep``. They count from the start of the run (``exponential``: from the end
        of the warmup).
      decay_rate: factor of ``step``, ``multistep`` and ``exponential``, > 0.

    Returns:
      ``schedule(step) -> learning rate``, [].

    Raises:
      ValueError: for an unknown name, a warmup longer than the run, decay steps that are missing,
        too many or not above 0, or a decay rate that is not above 0.

    Example:
      >>> import fnet
      >>> schedule = fnet.optim.make_schedule("cosine", 0.1, 100, warmup_steps=20)
      >>> [round(float(schedule(step)), 3) for step in (0, 10, 20, 60, 100)]
      [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    if not 0 <= warmup_steps <= steps:
        raise ValueError(f"make_schedule: warmup_steps must be in [0, {steps}], got {warmup_steps}")
    steps_after_warmup = max(steps - warmup_steps, 1)
    if name in ("step", "multistep", "exponential"):
        needed = "some" if name == "multistep" else "one"
        if not decay_steps or min(decay_steps) <= 0 or (len(decay_steps) > 1 and needed == "one"):
            raise ValueError(
                f"make_schedule: {name} needs {needed} decay_steps > 0, got {tuple(decay_steps)}"
            )
        checks.numbers("make_schedule", "> 0", decay_rate=decay_rate)

    def piecewise_constant() -> optax.Schedule:
        interval = decay_steps[0]
        boundaries = np.arange(interval, steps, interval) if name == "step" else decay_steps
        scale_by_step: dict[int, float] = {}
        for step in (max(round(b) - warmup_steps, 0) for b in boundaries):
            scale_by_step[step] = scale_by_step.get(step, 1.0) * decay_rate
        return optax.piecewise_constant_schedule(learning_rate, scale_by_step)

    decays: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, steps_after_warmup),
        "linear": lambda: optax.linear_schedule(learning_rate, 0.0, steps_after_warmup),
        "step": piecewise_constant,
        "multistep": piecewise_constant,
        "exponential": lambda: optax.exponential_decay(learning_rate, decay_steps[0], decay_rate),
    }
    checks.choice("make_schedule", (*decays,), schedule=name)
    if not warmup_steps:
        return decays[name]()
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, decays[name]()], [warmup_steps])


class _Options(NamedTuple):
    learning_rate: optax.ScalarOrSchedule
    momentum: float
    nesterov: bool
    weight_decay: float
    galore_rank: int
    galore_every: int

    @property
    def decay(self) -> optax.GradientTransformation:
        return optax.add_decayed_weights(self.weight_decay, mask=self.decay_mask)

    def decay_mask(self, params: Any) -> Any:
        """Mask of the leaves that decay; there must be one, unless nothing is to decay."""
        mask = weight_decay_mask(params)
        if self.weight_decay and not any(jax.tree.leaves(mask)):
            paths = jax.tree_util.tree_leaves_with_path(params)
            names = ", ".join(jax.tree_util.keystr(path) for path, _ in paths[:3])
            raise ValueError(
                "make_optimizer: weight_decay needs parameters named kernel, w or weight, got "
                f"{names or 'a single array'}; give optax.add_decayed_weights a mask of your own"
            )
        return mask

    def coupled(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(self.decay, optimizer) if self.weight_decay else optimizer

    def decoupled(self, *direction: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(*direction, self.decay, optax.scale_by_learning_rate(self.learning_rate))

    def compact(self, build: Callable[..., Any], **options: Any) -> optax.GradientTransformation:
        optimizer: optax.GradientTransformation = build(
            self.learning_rate, weight_decay=self.weight_decay, mask=self.decay_mask, **options
        )
        return optimizer


def _muon(o: _Options) -> optax.GradientTransformation:
    # Decay after the direction: optax.contrib.muon has no mask for what Adam updates.
    direction = optax.contrib.muon(1.0, consistent_rms=0.2, muon_weight_dimension_numbers=_matrices)
    return o.decoupled(direction, optax.scale(-1.0))


def _schedule_free_adamw(o: _Options) -> optax.GradientTransformation:
    # AdamW without momentum.
    direction = optax.scale_by_rms(decay=0.999, eps_in_sqrt=False, bias_correction=True)
    return optax.contrib.schedule_free(o.decoupled(direction), o.learning_rate)


def _galore(o: _Options) -> optax.GradientTransformation:
    projected = optax.contrib.scale_by_galore(o.galore_rank, o.galore_every)
    parts = {"matrix": projected, "other": optax.scale_by_adam()}
    return o.decoupled(optax.partition(parts, _is_matrix))


def _adafactor(o: _Options) -> optax.GradientTransformation:
    # Scale by the learning rate last: optax.adafactor adds the decay after its own scaling.
    direction = optax.adafactor(
        weight_decay_rate=o.weight_decay or None, weight_decay_mask=o.decay_mask
    )
    return optax.chain(direction, optax.scale_by_learning_rate(o.learning_rate, flip_sign=False))


_BUILDERS: dict[str, Callable[[_Options], optax.GradientTransformation]] = {
    "sgd": lambda o: o.coupled(
        optax.sgd(o.learning_rate, momentum=o.momentum or None, nesterov=o.nesterov)
    ),
    "adam": lambda o: o.coupled(optax.adam(o.learning_rate)),
    "adamw": lambda o: o.decoupled(optax.scale_by_adam()),
    "lion": lambda o: o.decoupled(optax.scale_by_lion()),
    "adafactor": _adafactor,
    "compact_adamw": lambda o: o.compact(compact_adamw),
    "compact_sgd": lambda o: o.compact(compact_sgd, momentum=o.momentum, nesterov=o.nesterov),
    "compact_lion": lambda o: o.compact(compact_lion),
    "muon": _muon,
    "schedule_free_adamw": _schedule_free_adamw,
    "galore": _galore,
}

OPTIMIZERS = tuple(_BUILDERS)
"""Names of optimizers that `make_optimizer` knows."""


def make_optimizer(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    classifier_scale: float | None = None,
    layer_decay: float | None = None,
    galore_rank: int = 128,
    galore_every: int = 200,
) -> optax.GradientTransformation:
    """Build an optimizer, with weight decay on kernels only and optional gradient clipping.

    ``compact_adamw``, ``compact_sgd`` and ``compact_lion`` are for bfloat16 parameters and have
    8-bit states; see `compact_adamw`.

    ``muon`` orthogonalizes the momentum of kernels but the classifier's (Jordan 2024), in stacks
    per layer. All other parameters are updated by Adam with Nesterov momentum. Updates of kernels
    have the root mean square that AdamW's have, 0.2 (Liu et al. 2025), so AdamW's learning rates
    apply.

    ``schedule_free_adamw`` trains at an interpolation of its iterates and their average (Defazio
    et al. 2024). Use a constant learning rate with warmup, and evaluate `schedule_free_params`.

    ``galore`` is AdamW, but for two-dimensional arrays its moments belong to the gradient's
    projection on ``galore_rank`` directions (Zhao et al. 2024).

    ``adafactor`` has no momentum. For an array whose two longest axes have n and m >= 128 entries
    it saves the means of the squared gradients along these axes, n + m numbers instead of n m.
    For any other array it saves one number per parameter. Its state is 1/133 of Adam's for
    ResNet-50, and half of Adam's for small networks. The update of each array is clipped to a root
    mean square of 1 and then multiplied by the root mean square of the array (at least 1e-3), so
    learning rates are relative and small: Shazeer & Stern 2018 use 1e-2 and less. A stack of
    layers in one array counts as one array.

    Args:
      name: one of `OPTIMIZERS`.
      learning_rate: a number or a schedule, such as from `make_schedule`.
      momentum: momentum of ``sgd`` and ``compact_sgd``; for ``sgd``, 0 has no momentum buffer.
      nesterov: whether ``sgd`` or ``compact_sgd`` uses Nesterov momentum.
      weight_decay: weight decay, on kernels only (`weight_decay_mask`). It is added to the
        gradient for ``sgd``, ``compact_sgd`` and ``adam``, and decoupled and multiplied by the
        learning rate otherwise.
      clip_norm: largest global norm of the gradient, or None for no clipping.
      classifier_scale: factor on the learning rate of the last layer (`classifier_mask`), or None.
      layer_decay: factor on the learning rate per block, from the last to the first
        (`layer_scales`), or None.
      galore_rank: number of directions of ``galore``.
      galore_every: steps after which ``galore`` chooses its directions again.

    Returns:
      An optimizer for `fnet.make_step` and `fnet.TrainState.create`.

    Raises:
      ValueError: for an unknown name, a ``clip_norm`` that is not above 0, or a
        ``classifier_scale`` or ``layer_decay`` for an optimizer whose updates cannot be scaled.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> optimizer = fnet.optim.make_optimizer("adamw", 0.1, weight_decay=0.5)
      >>> params = {"kernel": jnp.ones(1), "bias": jnp.ones(1)}
      >>> grads = {"kernel": jnp.zeros(1), "bias": jnp.zeros(1)}
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> print(updates["kernel"], updates["bias"])  # the bias does not decay
      [-0.05] [-0.]

    References: Jordan 2024, "Muon: An optimizer for hidden layers in neural networks". Liu et al.
      2025, "Muon is Scalable for LLM Training", arXiv:2502.16982. Defazio et al. 2024, "The Road
      Less Scheduled", arXiv:2405.15682. Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by
      Gradient Low-Rank Projection", arXiv:2403.03507. Shazeer & Stern 2018, "Adafactor",
      arXiv:1804.04235.
    """
    checks.choice("make_optimizer", OPTIMIZERS, optimizer=name)
    checks.numbers("make_optimizer", "> 0", clip_norm=clip_norm)
    scales = {"classifier_scale": classifier_scale, "layer_decay": layer_decay}
    for what, factor in scales.items():
        if factor is not None and name.startswith(("compact_", "schedule_free_")):
            raise ValueError(
                f"make_optimizer: {what} must be None for {name}, which keeps a copy of what its "
                f"updates add up to, got {factor}"
            )
    optimizer = _BUILDERS[name](
        _Options(learning_rate, momentum, nesterov, weight_decay, galore_rank, galore_every)
    )
    if classifier_scale is not None:  # All other optimizers are linear in the learning rate.
        scale = optax.masked(optax.scale(classifier_scale), _classifiers)
        optimizer = optax.chain(optimizer, scale)
    if layer_decay is not None:
        scales_of = functools.partial(layer_scales, decay=layer_decay)
        by_layer = optax.stateless(lambda u, _: jax.tree.map(operator.mul, scales_of(u), u))
        optimizer = optax.chain(optimizer, by_layer)
    if clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def _classifiers(params: Any) -> Any:
    mask = classifier_mask(params)
    if not any(jax.tree.leaves(mask)):
        names = " or ".join(sorted(CLASSIFIERS))
        raise ValueError(f"make_optimizer: classifier_scale needs a layer named {names}, got none")
    return mask


def _is_matrix(params: Any) -> Any:
    labels = jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "other", params)
    if "matrix" not in jax.tree.leaves(labels):
        raise ValueError("make_optimizer: galore needs arrays with two axes, got none; use adamw")
    return labels


def _matrices(params: Any) -> Any:
    """Axes of each kernel that is a matrix, a stack of matrices or a convolution; else None."""

    def axes(path: Any, array: Any, is_kernel: bool, is_classifier: bool) -> Any:
        if not is_kernel or is_classifier or array.ndim < 2:
            return None
        if _name(path) == _OUTPUTS_FIRST:  # [O, I] or [O, I, H, W]
            return optax.contrib.MuonDimensionNumbers(tuple(range(1, array.ndim)), 0)
        first = 0 if array.ndim == 4 else array.ndim - 2  # HWIO
        return optax.contrib.MuonDimensionNumbers(tuple(range(first, array.ndim - 1)), -1)

    masks = weight_decay_mask(params), classifier_mask(params)
    dimensions = jax.tree_util.tree_map_with_path(axes, params, *masks)
    if not jax.tree.leaves(dimensions):
        raise ValueError(
            "make_optimizer: muon needs matrices named kernel, w or weight besides the classifier, "
            "got none; use adamw"
        )
    return dimensions


def schedule_free_params(opt_state: optax.OptState, params: Any) -> Any:
    """Return the parameters to evaluate after training with ``schedule_free_adamw``.

    Args:
      opt_state: State of the optimizer, also with transformations around it.
      params: Trained parameters.

    Returns:
      The average of the iterates, with the structure of ``params``.

    Raises:
      ValueError: If the state is of another optimizer.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> optimizer = fnet.optim.make_optimizer("schedule_free_adamw", 1e-3)
      >>> params = {"kernel": jnp.ones(2)}
      >>> average = fnet.optim.schedule_free_params(optimizer.init(params), params)
      >>> print(average["kernel"])
      [1. 1.]
    """

    def is_state(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    states = [s for s in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(s)]
    if len(states) != 1:
        raise ValueError(
            f"schedule_free_params: expected the state of one schedule-free optimizer, got "
            f"{len(states)}; use it with schedule_free_adamw only"
        )
    return optax.contrib.schedule_free_eval_params(states[0], params)


def weight_decay_mask(params: Any) -> Any:
    """Mask of the leaves that weight decay applies to: kernels, but not biases or norms.

    Kernels are named ``kernel`` in fnet and Flax, ``w`` in Haiku and ``weight`` in Equinox, where
    the ``weight`` of a norm has one axis. The factors of their adapters (`fnet.lora`) decay, too.

    Args:
      params: a tree of arrays: nested dicts, an ``nnx.State``, or an Equinox module.

    Returns:
      A pytree of bools with the structure of ``params``.

    Example:
      >>> import fnet
      >>> fnet.optim.weight_decay_mask({"fc": {"kernel": 1.0, "bias": 0.0}})
      {'fc': {'bias': False, 'kernel': True}}
    """

    def decays(path: Any, leaf: Any) -> bool:
        name = _name(path)
        if name in ("a", "b"):  # of an adapter
            return _name(path[:-1]) in _KERNELS
        return name == "kernel" or (name in _KERNELS and np.ndim(leaf) >= 2)

    return jax.tree_util.tree_map_with_path(decays, params)


_OUTPUTS_FIRST = "weight"
"""Name of kernels whose first axis are the outputs, as in torch."""
_KERNELS = ("kernel", "w", _OUTPUTS_FIRST)


def _name(path: Sequence[Any]) -> str:
    """Return the name of a leaf in its module, without the ``value`` of an nnx variable."""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    while names and names[-1] in ("value", "raw_value", ""):
        names.pop()
    return names[-1].rpartition("/")[2] if names else ""


CLASSIFIERS = frozenset({"fc", "classifier", "head", "cls"})
"""Names of the last layer in image networks; for a DeepLab also of the head before it."""


def classifier_mask(params: Any) -> Any:
    """Mask of the leaves of the last layer, whose name is one of `CLASSIFIERS`.

    Args:
      params: nested dicts of arrays.

    Returns:
      A pytree of bools with the structure of ``params``.

    Example:
      >>> import fnet
      >>> params = {"conv1": {"kernel": 1.0}, "fc": {"kernel": 1.0}}
      >>> fnet.optim.classifier_mask(params)
      {'conv1': {'kernel': False}, 'fc': {'kernel': True}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not CLASSIFIERS.isdisjoint(_names(path[:1])), params
    )


def layer_scales(params: Any, decay: float) -> Any:
    """Learning rate factors that decay from the last block of an image network to the first.

    The last layer and the norm before it have factor 1, the last block ``decay``, the block before
    it ``decay ** 2``, and so on. The stem or the patch embedding has the least (Clark et al. 2020;
    Bao et al. 2022). A block is a residual block, a transformer block, or a dense layer. Between
    stages, downsampling counts as one more.

    Args:
      params: parameters of an image network of `fnet.models`, or a pytree with their names.
      decay: factor per block, in (0, 1].

    Returns:
      A pytree of floats with the structure of ``params``.

    Raises:
      ValueError: if ``decay`` is not in (0, 1].

    Example:
      >>> import fnet
      >>> params = {"stem": 0, "blocks": {"0": 0, "1": 0}, "norm": 0, "head": 0}
      >>> scales = fnet.optim.layer_scales(params, 0.5)
      >>> scales["stem"], scales["blocks"], scales["norm"], scales["head"]
      (0.125, {'0': 0.25, '1': 0.5}, 1.0, 1.0)

    References: Clark et al. 2020, "ELECTRA", arXiv:2003.10555. Bao et al. 2022, "BEiT",
      arXiv:2106.08254.
    """
    checks.numbers("layer_scales", "in (0, 1]", decay=decay)
    positions = jax.tree_util.tree_map_with_path(
        lambda path, _: _position(_names(path) or [None]),  # a single array has no name
        params,
    )
    in_order = sorted(set(jax.tree.leaves(positions, is_leaf=lambda p: isinstance(p, tuple))))
    blocks = [position for position in in_order if position not in (_FIRST, _LAST)]
    if not blocks:
        raise ValueError(
            "layer_scales: expected blocks named as in fnet.models, such as layer1/0, got none"
        )
    depths = {_FIRST: 0} | {p: i + 1 for i, p in enumerate(blocks)} | {_LAST: len(blocks) + 1}
    return jax.tree.map(
        lambda position: float(decay ** (len(blocks) + 1 - depths[position])),
        positions,
        is_leaf=lambda p: isinstance(p, tuple),
    )


_FIRST = (-1.0,)
_LAST = (float("inf"),)
_AFTER_BLOCKS = CLASSIFIERS | {"norm", "abn", "bn_out", "pooling", "fc_norm", "last", "hidden"}
_NUMBER = re.compile(r"(?:stage|layer|mod|tra|down)(\d+)")


def _position(names: list[Any]) -> tuple[float, ...]:
    """Return where a block is in the order of a network's blocks, by the names of a path."""
    first, *rest = names[1:] if names[0] == "body" else names
    if names[0] in _AFTER_BLOCKS:
        return _LAST
    if first == "blocks" and rest:
        return (float(rest[0]),)
    match = _NUMBER.fullmatch(str(first))
    if match is None or first == "mod1":
        return _LAST if first in _AFTER_BLOCKS else _FIRST
    stage, block = float(match[1]), re.search(r"\d+$", str(rest[0])) if rest else None
    if str(first).startswith("tra"):
        return stage, float("inf")
    return stage, float(block[0]) if block and not str(first).startswith("down") else -1.0


def _names(path: Sequence[Any]) -> list[Any]:
    return [getattr(key, "key", None) for key in path]
