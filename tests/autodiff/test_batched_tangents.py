"""Tangents may be stacked, packed or separate; results have the same layout."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batched_cases import WIDTHS, double, square

from fnet.autodiff.batched.derivatives import jvps, vjps

# As in Rust's tests of Enzyme's batch mode (rust-lang/rust pull request 137880).
M = np.asarray(
    [
        [4.3, 1.2, 3.4, 2.1],
        [2.3, 4.5, 1.7, 6.4],
        [1.1, 3.3, 2.5, 4.7],
        [5.2, 1.4, 2.6, 3.8],
        [1, 2, 3, 4],
    ],
    np.float32,
)


def times_m(x):
    return jnp.asarray(M) @ x


def test_unit_tangents_give_columns_stacked_or_packed():
    x = jnp.ones(4)
    for width in WIDTHS:
        stacked = jvps(times_m, (x,), (jnp.eye(4),), width=width, primal=False)
        packed = jvps(times_m, (x,), (jnp.eye(4).reshape(16),), width=width, primal=False)
        np.testing.assert_allclose(stacked, M.T, rtol=1e-6)
        np.testing.assert_allclose(packed, M.T.ravel(), rtol=1e-6)


def test_separate_accumulators_give_separate_results():
    for seed in (1.0, [1.0, 1.0]):
        zeros = [jnp.zeros(()), jnp.ones(())]
        (grads,) = vjps(square, (3.0,), seed, into=(zeros,), primal=False)
        assert [float(g) for g in grads] == [6.0, 7.0]
        assert all(z.is_deleted() for z in zeros)


def test_integers_and_keys_inside_a_tree_are_constant():
    def f(p):
        return {"y": p["x"] * p["n"] + jax.random.normal(p["key"]), "n": p["n"]}

    p = {"x": jnp.ones(2), "n": jnp.asarray(3), "key": jax.random.key(1)}
    t = {"x": jnp.eye(2), "n": None, "key": None}
    got = jvps(f, (p,), (t,), primal=False)
    chex.assert_trees_all_close(got["y"], 3.0 * jnp.eye(2))
    assert got["n"].dtype == jax.dtypes.float0
    p["key"] = jax.random.key(2)
    (grads,) = vjps(f, (p,), {"y": jnp.eye(2), "n": None}, primal=False)
    chex.assert_trees_all_close(grads["x"], 3.0 * jnp.eye(2))
    assert grads["n"].shape == (2,)
    assert grads["n"].dtype == jax.dtypes.float0


def test_mixed_layouts_give_stacked_results():
    f = lambda x, y: x * y  # noqa: E731
    x, y = jnp.ones(2), jnp.full(2, 2.0)
    got = jvps(f, (x, y), (jnp.eye(2).reshape(4), jnp.eye(2)), primal=False)
    chex.assert_trees_all_close(got, 3.0 * jnp.eye(2))
    got = jvps(f, (x, y), (list(jnp.eye(2)), jnp.eye(2)), primal=False)
    chex.assert_trees_all_close(got, 3.0 * jnp.eye(2))


def test_a_list_of_one_array_can_have_separate_tangents():
    got = jvps(lambda x: [2.0 * x[0]], ([jnp.ones(3)],), ([[jnp.ones(3)]],), primal=False)
    chex.assert_trees_all_close(got, ([jnp.full(3, 2.0)],))


def test_packed_tangents_of_an_empty_array():
    got = jvps(jnp.sin, (jnp.ones((4, 0)),), (jnp.ones((12, 0)),), primal=False)
    assert got.shape == (12, 0)


X = jnp.ones((2, 3))


def test_rejects_other_shapes_and_dtypes():
    for error, call, message in (
        (ValueError, lambda: jvps(jnp.add, (1.0, 2.0), (jnp.ones(2), jnp.ones(3))), "argument 0 has 2, argument 1 has 3"),
        (ValueError, lambda: jvps(double, (X,), (jnp.ones((0, 2, 3)),)), "N must be at least 1, got 0"),
        (ValueError, lambda: jvps(double, (X,), ([],)), "at least one tree, got an empty list"),
        (ValueError, lambda: jvps(double, (X,), (None,)), "at least one argument, got None for all"),
        (ValueError, lambda: jvps(double, (X,), (jnp.ones((4, 3, 2)),)), r"\(N, 2, 3\) stacked or \(N \* 2, 3"),
        (ValueError, lambda: jvps(double, (X,), (jnp.ones((5, 3)),)), r"got \(5, 3\)"),
        (ValueError, lambda: jvps(double, (X,), ([X, X[:1]],)), r"tree 1: expected shape \(2, 3\), got \(1, 3"),
        (ValueError, lambda: vjps(double, (X,), jnp.ones((4, 2)), into=(jnp.ones((3, 2, 3)),)), "into, argument 0 has 3, the cotangents has 4"),
        (ValueError, lambda: vjps(double, (X,), jnp.ones((4, 2)), into=(jnp.ones((4, 3, 3)),)), r"into, argument 0: expected shape \(N, 2, 3\)"),
        (ValueError, lambda: vjps(lambda x: [x], (X,), jnp.ones((4, 2, 3)), into=(jnp.ones((4, 2, 3)),)), "cotangents: expected the structure"),
        (TypeError, lambda: jvps(double, (X,), (jnp.ones((4, 2, 3), jnp.float16),)), r"expected dtype float32, got float16; cast it with .astype\(float32\)"),
        (TypeError, lambda: vjps(double, (X,), jnp.ones((4, 2), int)), "expected dtype float32, got int32"),
        (TypeError, lambda: vjps(double, (X,), jnp.ones((4, 2)), into=(jnp.ones((4, 2, 3), jnp.float16),)), "into, argument 0: expected dtype float32, got float16"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
