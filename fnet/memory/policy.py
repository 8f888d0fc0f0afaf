"""Policies: what the backward pass keeps, and what it computes again."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fnet.backward_pass import recompute
from fnet.memory.segments import recompute_in_segments


class Policy(NamedTuple):
    """A way to spend arithmetic for memory.

    Attributes:
      keeps: what the backward pass keeps, in words.
      apply: a function of arrays -> one with the same values and gradients.
      platforms: where it works; empty means everywhere.
    """

    keeps: str
    apply: Callable[[Any], Any]
    platforms: tuple[str, ...] = ()


_keep_products = functools.partial(
    recompute_in_segments, policy=jax.checkpoint_policies.dots_saveable
)
_offload = functools.partial(recompute_in_segments, loops_on_host=True)

POLICIES: dict[str, Policy] = {
    "keep": Policy("what each layer asks for", lambda f: f),
    "named": Policy("what fnet's norms name: one array a block", recompute),
    "products": Policy("results of matrix products and convolutions", _keep_products),
    "segments": Policy("what passes between segments", recompute_in_segments),
    "offload": Policy("as segments, of loops in the host's memory", _offload, ("gpu", "tpu")),
}
"""By name, from the least arithmetic to the most."""


def policies_on(platform: str) -> list[str]:
    """Names of the policies that work there; ``platform`` is that of a `jax.Device`."""
    family = "gpu" if platform in ("cuda", "rocm") else platform
    return [name for name, p in POLICIES.items() if not p.platforms or family in p.platforms]
