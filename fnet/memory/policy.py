"""Policies: what the backward pass keeps, and what it computes again."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fnet.backward_pass import recompute
from fnet.memory.segments import remat_in_segments


class Policy(NamedTuple):
    """A way to spend arithmetic for memory.

    Attributes:
      saves: residuals that the backward pass reads, as a phrase.
      apply: a function of arrays -> one with the same values and gradients.
      platforms: where it works; empty means everywhere.
    """

    saves: str
    apply: Callable[[Any], Any]
    platforms: tuple[str, ...] = ()


_keep_products = functools.partial(remat_in_segments, policy=jax.checkpoint_policies.dots_saveable)
_offload = functools.partial(remat_in_segments, loops_on_host=True)

REMAT_POLICIES: dict[str, Policy] = {
    "none": Policy("all residuals", lambda f: f),
    "norms": Policy("the arrays that fnet's norms name", recompute),
    "dots": Policy("results of matrix products and convolutions", _keep_products),
    "segments": Policy("arrays that pass between segments", remat_in_segments),
    "offload": Policy("as segments, loop carries in host memory", _offload, ("gpu", "tpu")),
}
"""By name, from the least arithmetic to the most."""


def policies_on(platform: str) -> list[str]:
    """Names of the policies that work there; ``platform`` is that of a `jax.Device`."""
    family = "gpu" if platform in ("cuda", "rocm") else platform
    return [name for name, p in REMAT_POLICIES.items() if not p.platforms or family in p.platforms]
