"""Tolerances for programs that may round in other places: one rounding of a dtype."""

import jax
import jax.numpy as jnp
import numpy as np


def one_rounding(dtype):
    """Largest relative distance of neighboring numbers, by which two ways to round may differ."""
    return float(jnp.finfo(dtype).eps)


def assert_equal_but_for_rounding(found, expected):
    """Compare the results of two programs with the same operations in bfloat16.

    CPUs with instructions for bfloat16 round operands that others round later or not at all. So a
    value is off by one rounding, and by one of the largest values if it is a difference of these.
    """
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        eps, a, b = one_rounding(a.dtype), np.float32(a), np.float32(b)
        np.testing.assert_allclose(a, b, eps, eps * np.abs(b).max())
