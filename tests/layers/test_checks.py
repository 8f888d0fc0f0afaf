"""Checks of arguments: each kind names the function, the argument and the value."""

import contextlib
import math

import jax.numpy as jnp
import pytest

from fnet import checks

X = jnp.ones((2, 3))


def test_an_error_has_the_argument_and_its_value():
    for check, error, message in (
        (lambda: checks.sizes("f", n=0), ValueError, "f: n must be at least 1, got 0"),
        (lambda: checks.numbers("f", "> 0", a=float("nan")), ValueError, "f: a must be > 0, got nan"),
        (lambda: checks.numbers("f", "in [0, 1)", a=1), ValueError, r"f: a must be in \[0, 1\), got 1"),
        (lambda: checks.choice("f", ("a", "b"), kind="c"), ValueError, r"f: kind must be one of .* got 'c'"),
        (lambda: checks.floating("f", x=X.astype(int)), TypeError, "f: x must be floating, got int32"),
        (lambda: checks.wide("f", x=X.astype(jnp.bfloat16)), TypeError, "f: x must be float32 or wider"),
        (lambda: checks.integers("f", x=X), TypeError, "f: x must be integers, got float32"),
        (lambda: checks.shapes("f", "n 2", x=(X, (2,))), ValueError, r"x must have shape \(2,\) for n 2, got"),
        (lambda: checks.dims("f", x=(X, "b t"), y=(X.T, "b t")), ValueError, r"y must have shape \[2, 3\], got x"),
        (lambda: checks.dims("f", x=(X, "b t c")), ValueError, r"x must have shape \[b, t, c\], got x \(2, 3\)"),
        (lambda: checks.last_axis("f", X, 4), ValueError, r"f: expected \[..., 4\], got \(2, 3\)"),
        (lambda: checks.image("f", X, 4), ValueError, r"f: expected \[N, H, W, 4\], got \(2, 3\)"),
        (lambda: checks.mask("f", X, (2, 3)), ValueError, r"mask must be bool of shape \(2, 3\), got float32"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            check()


def test_a_bound_has_the_ends_that_its_words_say():
    for bound in checks._BOUNDS:
        numbers = (-math.inf, -1e-9, 0, 1e-9, 0.5, 1 - 1e-9, 1, 1 + 1e-9, math.inf)
        words = bound.replace("at least", ">=").replace(" and ", ", n < ")
        if words.startswith("in "):
            low, high = words[4:-1].split(", ")
            words = f">{'=' * (words[3] == '[')} {low}, n <{'=' * (words[-1] == ']')} {high}"
        said = words.replace("finite", "math.inf").replace(",", " and")
        for n in numbers:
            with (
                contextlib.nullcontext()
                if eval(f"n {said}")
                else pytest.raises(ValueError, match="must be")
            ):
                checks.numbers("f", bound, a=n)


def test_what_is_not_given_passes():
    checks.sizes("f", n=None, m=1)
    checks.floating("f", x=None, y=X)
    checks.mask("f", None, (2,))
    assert checks.dims("f", x=(X, "b t"), y=(None, "t"), z=(X[0], "t")) == {"b": 2, "t": 3}
