"""Optimizers and learning rate schedules by name, all of them optax's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

SCHEDULES = ("constant", "cosine", "linear", "step", "multistep", "exponential")


def make_schedule(
    name: str,
    learning_rate: float,
    steps: int,
    *,
    warmup_steps: int = 0,
    decay_steps: Sequence[float] = (),
    decay_rate: float = 0.1,
) -> optax.Schedule:
    """The learning rate at each step.

    Args:
      name: ``constant``; ``cosine`` (Loshchilov & Hutter 2017) or ``linear``,
        both down to 0 at ``steps``; ``step`` and ``exponential``, times ``decay_rate``
        every ``decay_steps[0]`` steps, at once or gradually; ``multistep``, times
        ``decay_rate`` at each of ``decay_steps``.
      learning_rate: the highest value.
      steps: the length of the run, warmup included.
      warmup_steps: linear from 0 to ``learning_rate`` over that many steps first.
      decay_steps: of ``step``, ``multistep`` and ``exponential``, counted from the
        beginning of the run (of ``exponential``, from the end of the warmup).
      decay_rate: likewise.

    Returns:
      ``schedule(step) -> learning rate``, [].

    Raises:
      ValueError: for an unknown name, a warmup that is longer than the run, decay steps
        that are missing, too many or not above 0, or a decay rate that is not above 0.
    """
    if not 0 <= warmup_steps <= steps:
        raise ValueError(f"schedule: warmup_steps must be in [0, {steps}], got {warmup_steps}")
    rest = max(steps - warmup_steps, 1)
    if name in ("step", "multistep", "exponential"):
        wanted = "some" if name == "multistep" else "one"
        if not decay_steps or min(decay_steps) <= 0 or (len(decay_steps) > 1 and wanted == "one"):
            raise ValueError(
                f"schedule: {name} needs {wanted} decay_steps above 0, got {tuple(decay_steps)}"
            )
        if not decay_rate > 0:
            raise ValueError(f"schedule: decay_rate must be above 0, got {decay_rate}")

    def falls() -> optax.Schedule:
        every = decay_steps[0]
        at = np.arange(every, steps, every) if name == "step" else decay_steps
        scales: dict[int, float] = {}
        for place in (max(round(s) - warmup_steps, 0) for s in at):
            scales[place] = scales.get(place, 1.0) * decay_rate
        return optax.piecewise_constant_schedule(learning_rate, scales)

    after: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, rest),
        "linear": lambda: optax.linear_schedule(learning_rate, 0.0, rest),
        "step": falls,
        "multistep": falls,
        "exponential": lambda: optax.exponential_decay(learning_rate, decay_steps[0], decay_rate),
    }
    if name not in after:
        raise ValueError(f"schedule: expected one of {SCHEDULES}, got {name!r}")
    if not warmup_steps:
        return after[name]()
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, after[name]()], [warmup_steps])


OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "adafactor")


def make_optimizer(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    classifier_scale: float | None = None,
) -> optax.GradientTransformation:
    """A gradient transformation from optax.

    ``adafactor`` keeps no momentum, and of an array's squared gradients only the means along
    its two longest axes: of n x m parameters n + m numbers. That holds where both axes have 128
    entries or more; of any other array it keeps a number a parameter. Of ResNet-50 that is
    1/133 of the bytes that ``adam`` keeps, of a small network, whose axes are shorter, half.
    Each array's step is clipped to a root mean square of 1, then multiplied by that of the array
    itself (at least 1e-3), so learning rates are relative and small: Shazeer & Stern 2018 take
    1e-2 and less. An array that holds a stack of layers counts as one.

    Args:
      name: ``sgd``, ``adam``, ``adamw``, ``lion`` or ``adafactor``.
      learning_rate: a number or a schedule.
      momentum: ``sgd``'s; 0 keeps no momentum buffer.
      nesterov: ``sgd``'s.
      weight_decay: times the parameter, on kernels only (`decayed`): decoupled,
        times the learning rate, for ``adamw``, ``lion`` and ``adafactor``; added to the
        gradient otherwise.
      clip_norm: largest global norm of the gradient, or None.
      classifier_scale: learning rate of the last layer (`in_classifier`), in learning
        rates of the others; None: the same. Without effect where no layer is one.

    Returns:
      What `fnet.make_step` and `fnet.TrainState.create` take.

    Raises:
      ValueError: for an unknown name, and a clip_norm that is not above 0.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"optimizer: clip_norm must be above 0, got {clip_norm}")
    if name == "adamw":
        rule = optax.adamw(learning_rate, weight_decay=weight_decay, mask=decayed)
    elif name == "lion":
        rule = optax.lion(learning_rate, weight_decay=weight_decay, mask=decayed)
    elif name == "adafactor":
        # optax's own learning rate would leave out the decay, which it adds behind it.
        direction = optax.adafactor(
            weight_decay_rate=weight_decay or None, weight_decay_mask=decayed
        )
        rule = optax.chain(direction, optax.scale_by_learning_rate(learning_rate, flip_sign=False))
    elif name in ("sgd", "adam"):
        rule = (
            optax.sgd(learning_rate, momentum=momentum or None, nesterov=nesterov)
            if name == "sgd"
            else optax.adam(learning_rate)
        )
        if weight_decay:
            rule = optax.chain(optax.add_decayed_weights(weight_decay, mask=decayed), rule)
    else:
        raise ValueError(f"optimizer: expected one of {OPTIMIZERS}, got {name!r}")
    if classifier_scale is not None:  # every rule here is linear in its learning rate
        rule = optax.chain(rule, optax.masked(optax.scale(classifier_scale), in_classifier))
    return rule if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), rule)


def decayed(params: Any) -> Any:
    """Which leaves weight decay applies to: those named ``kernel``, not biases or norms.

    Args:
      params: nested dicts of arrays.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in _names(path[-1:]), params)


CLASSIFIERS = frozenset({"fc", "classifier", "head", "cls"})
"""What networks for images call their last layer; of a DeepLab also the head before it."""


def in_classifier(params: Any) -> Any:
    """Which leaves are of the layer that makes logits: those under one of `CLASSIFIERS`.

    Args:
      params: nested dicts of arrays.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not CLASSIFIERS.isdisjoint(_names(path[:1])), params
    )


def _names(path: Sequence[Any]) -> list[Any]:
    return [getattr(key, "key", None) for key in path]
