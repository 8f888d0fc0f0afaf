"""Rotary position embeddings of published models, from ``rope_parameters``."""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

from fnet.interop.huggingface.options import Options, Source
from fnet.layers import Rotary

_Frequencies = tuple[float, ...]
_Given = dict[str, Any]


def rotary_embedding(
    kind: str, head_dim: int, parameters: dict[str, Any], max_positions: int
) -> Rotary:
    """Frequencies of a rotary position embedding, from ``rope_parameters``.

    ``default``: base^(-2 i / D). ``linear`` divides all by a factor (Chen et al. 2023). ``llama3``
    divides low frequencies by a factor, and interpolates between low and high ones (Llama Team
    2024, "The Llama 3 Herd of Models"). ``yarn`` interpolates over the features, and scales them
    (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models").
    ``proportional`` leaves out the lowest frequencies: of D / 2 pairs, the first ones rotate.

    ``longrope`` divides each by a factor of its own (Ding et al. 2024, "LongRoPE"). There is one
    list of factors for sequences within the original context, and one for longer ones. The length
    is the row's, or the number of positions that a cache can hold. A text that outgrows the
    original context while it is generated is read again, as in transformers.

    Raises ValueError for another type, an unknown option or a missing one.
    """
    p = dict(parameters)
    rope = p.pop("rope_type", None) or p.pop("type", None) or "default"
    p.pop("type", None)
    if "short_factor" in p and rope in ("su", "yarn"):  # names in old configs of Phi-3
        rope = "longrope"
    rope = "dynamic with alpha" if rope == "dynamic" and "alpha" in p else rope
    if rope not in _SCALINGS:
        raise ValueError(
            f"{kind}: rope_type {rope!r} is not supported, only {', '.join(sorted(_SCALINGS))}"
        )
    base = p.pop("rope_theta", 10_000.0)
    partial = p.pop("partial_rotary_factor", 1.0)
    if rope == "proportional":
        angles = int(head_dim * partial) // 2
        p = {"factor": 1.0, "still": head_dim // 2 - angles} | p
    rotated = head_dim if rope == "proportional" else int(head_dim * partial)
    original = p.pop("original_max_position_embeddings", None) or max_positions
    if rope in ("llama3", "yarn", "longrope") and not original:
        raise ValueError(f"{kind}: config.json has no max_position_embeddings, which {rope} needs")
    frequencies = tuple(base ** (-i / rotated) for i in range(0, rotated, 2))
    try:
        rotary = _SCALINGS[rope](frequencies, p, base, original, max_positions)
    except KeyError as e:
        raise ValueError(f"{kind}: rope_type {rope!r} needs the option {e}") from None
    if p:
        raise ValueError(f"{kind}: unknown rope options {p}")
    return rotary


def _linear(frequencies: _Frequencies, p: _Given, *_: Any) -> Rotary:
    factor = p.pop("factor")
    return Rotary(tuple(f / factor for f in frequencies))


def _proportional(frequencies: _Frequencies, p: _Given, *_: Any) -> Rotary:
    factor, still = p.pop("factor"), p.pop("still")
    moving = len(frequencies) - still
    return Rotary((*(f / factor for f in frequencies[:moving]), *[0.0] * still))


def _alpha(frequencies: _Frequencies, p: _Given, base: float, *_: Any) -> Rotary:
    """A larger base, as in Hunyuan. Without alpha, the base would depend on the length."""
    alpha, rotated = p.pop("alpha"), 2 * len(frequencies)
    for name in ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"):
        p.pop(name, None)  # without effect
    base = base * alpha ** (rotated / (rotated - 2))
    return Rotary(tuple(base ** (-i / rotated) for i in range(0, rotated, 2)))


def _llama3(frequencies: _Frequencies, p: _Given, _: float, original: int, *__: Any) -> Rotary:
    factor, low, high = (p.pop(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))

    def scaled(f: float) -> float:
        # The number of turns within the original context.
        turns = original * f / (2 * math.pi)
        share = float(min(max((turns - low) / (high - low), 0.0), 1.0))
        return (1 - share) * f / float(factor) + share * f

    return Rotary(tuple(scaled(f) for f in frequencies))


def _yarn(frequencies: _Frequencies, p: _Given, base: float, original: int, most: int) -> Rotary:
    factor = p.pop("factor", None) or most / original
    mscale, mscale_all_dim = p.pop("mscale", None), p.pop("mscale_all_dim", None)
    scale = p.pop("attention_factor", None)
    if scale is None:
        scale = _yarn_scale(factor, 1.0)
        if mscale and mscale_all_dim:
            scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)

    def feature(turns: float) -> float:
        """Index of the feature pair that turns so often within the original context."""
        return len(frequencies) * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    first, last = feature(p.pop("beta_fast", None) or 32), feature(p.pop("beta_slow", None) or 1)
    if p.pop("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    last += 0.001 if first == last else 0

    def scaled(i: int, f: float) -> float:
        share = min(max((i - first) / (last - first), 0.0), 1.0)
        return share * f / factor + (1 - share) * f

    return Rotary(tuple(scaled(i, f) for i, f in enumerate(frequencies)), float(scale))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _longrope(frequencies: _Frequencies, p: _Given, _: float, original: int, most: int) -> Rotary:
    factor, scale = p.pop("factor", None), p.pop("attention_factor", None)
    if scale is None:
        factor = factor or most / original
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {name: p.pop(f"{name}_factor") for name in ("short", "long")}
    for name, values in factors.items():
        if len(values) != len(frequencies):
            raise ValueError(
                f"longrope: {name}_factor must have {len(frequencies)} numbers, got {len(values)}"
            )
    by_name = {
        name: tuple(f / by for f, by in zip(frequencies, values, strict=True))
        for name, values in factors.items()
    }
    return Rotary(
        lambda length: by_name["long" if length > original else "short"],
        float(scale),
        restart_lengths=(original,),
    )


_SCALINGS: dict[str, Callable[..., Rotary]] = {
    "dynamic with alpha": _alpha,
    "default": lambda frequencies, *_: Rotary(frequencies),
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}


class Rope(NamedTuple):
    """Rotary embeddings of a family: the defaults of their options.

    Attributes:
      theta: Base of the frequencies.
      partial: Share of a head that is rotated; None: all, and no option changes it.
      original: Original context.
      local_theta: Base in blocks with a window; None: as in others.
      interleaved: Whether neighboring features form pairs.
      backwards: Whether angles are negative.
      default: Parameters if ``config.json`` has none.
      ignored: Parameters that others read, or nobody.
    """

    theta: Source = 10_000.0
    partial: Source = None
    original: int | None = None
    local_theta: Source = None
    interleaved: bool = False
    backwards: bool = False
    default: Source = MappingProxyType({})
    ignored: tuple[str, ...] = ()

    def embedding(self, options: Options, head_dim: int, window: int | None) -> Rotary:
        """Return the embedding of a block, from options as any version of transformers has them.

        Raises:
          ValueError: as `rotary_embedding`.
        """
        given = options.get("rope_scaling", None) or options.get(
            "rope_parameters", dict(options.value(self.default))
        )
        options.ignore("rope_parameters")
        by_kind = given if "full_attention" in given else {"full_attention": given}
        p = {k: v for k, v in (by_kind["full_attention"] or {}).items() if k not in self.ignored}
        theta, partial = options.value(self.theta), options.value(self.partial)
        p.setdefault("rope_theta", options.get("rope_theta", theta))
        p.setdefault("partial_rotary_factor", options.get("partial_rotary_factor", partial or 1.0))
        if partial is None and p.get("rope_type") != "proportional":
            options.check("partial_rotary_factor", p["partial_rotary_factor"], (1.0,))
        # transformers prefers it to the one in the parameters.
        original = options.get("original_max_position_embeddings", self.original)
        if original is not None:
            p["original_max_position_embeddings"] = original
        local_theta = options.value(self.local_theta)
        if window is not None and local_theta is not None:
            p = {"rope_theta": local_theta} | (by_kind.get("sliding_attention") or {})
        positions = options.get("max_position_embeddings", 0)
        rotary = rotary_embedding(options.kind, head_dim, p, positions)
        # Frequencies depend on the length, but a window's cache does not show it.
        base = rotary.base
        if window and callable(base) and base(window) != base(2**31):
            raise ValueError(
                f"{options.kind}: longrope with sliding_window {window}, within the original "
                "context, is not supported"
            )
        if self.backwards:
            if not isinstance(base, tuple):
                raise ValueError(f"{options.kind}: longrope is not supported")
            rotary = rotary._replace(base=tuple(-f for f in base))
        return rotary._replace(interleaved=self.interleaved)
