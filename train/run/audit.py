"""Audit of a run: what its parameters tell about canaries, as a lower bound on epsilon."""

from typing import Any

import jax
import numpy as np

from fnet.privacy.audit import Audit, audit_epsilon
from fnet.privacy.canaries import GradientCanaries
from train.data.canaries import draw_included
from train.gradients.privacy import Privacy, at_most
from train.run.setup import Setup


def audit(
    run: Setup, canaries: GradientCanaries, params: Any, seed: int, *, initial_known: bool = True
) -> Audit:
    """Compute a lower bound on epsilon from canaries.

    If the initial parameters do not follow from the config, scores are less precise, but the bound
    holds.
    """
    replicated = run.layout.replicated if run.layout else None
    values = jax.device_get(jax.jit(canaries.values, out_shardings=replicated)(params))
    initial = np.zeros_like(values)
    if initial_known:
        key = jax.random.key(run.config.train.seed)
        initial = jax.device_get(jax.jit(lambda key: canaries.values(run.init(key).params))(key))
    scores = np.nan_to_num(initial - values, nan=-np.inf)
    return audit_epsilon(scores, draw_included(len(scores), seed), run.config.grad.delta or 0.0)


def describe(result: Audit, privacy: Privacy | None, steps: int) -> str:
    """Describe both bounds on epsilon in one line."""
    upper = f"at most {at_most(privacy.epsilon(steps))}" if privacy else "unbounded without noise"
    text = (
        f"audit: epsilon is at least {result.epsilon:.3g} with {result.confidence:.0%} confidence, "
        f"and {upper} ({result.correct} of {result.guesses} guesses about {result.canaries} "
        "canaries right)"
    )
    if privacy and result.epsilon > privacy.epsilon(steps):
        text += "; THE GUARANTEE IS BROKEN, unless this is one of the rare wrong bounds"
    return text
