"""`jacobian` and `hvps` equal JAX at any width, forward and reverse."""

import chex
import jax
import jax.numpy as jnp
import pytest
from batched_cases import double, normal, square
from jax.sharding import PartitionSpec

import fnet
from fnet.autodiff.batched.derivatives import hvps, jacobian
from fnet.mesh import equally_varying


@pytest.mark.parametrize(
    ("mode", "n_in", "n_out", "width"),
    [("forward", 5, 3, 2), ("reverse", 1, 4, 3), ("auto", 4, 2, "auto")],
)
def test_jacobian_equals_jax(mode, n_in, n_out, width):
    w, x, y = normal(0, n_out, n_in), normal(1, n_in), normal(2, 2, n_out)

    def f(x, y):
        z = jnp.sin(w @ x["a"]) * x["s"]
        return {"z": z, "product": y @ z}

    @jax.jit
    def both(x, y):
        ours = jacobian(f, mode=mode, width=width), jacobian(f, (1, 0), mode=mode, width=width)
        return [g(x, y) for g in ours], [g(x, y) for g in (jax.jacfwd(f), jax.jacrev(f, (1, 0)))]

    chex.assert_trees_all_close(*both({"a": x, "s": jnp.asarray(1.5)}, y), atol=1e-5)


def test_jacobian_chooses_the_cheaper_mode():
    def program(n_in, n_out):
        f = jacobian(lambda x: normal(0, n_out, n_in) @ jnp.sin(x), width=3)
        return str(jax.make_jaxpr(f)(jnp.ones(n_in)))

    # 6 tangents or cotangents are two chunks of 3. The other mode would take 90 / 3.
    assert "length=2" in program(6, 90)
    assert "length=2" in program(90, 6)


def test_jacobian_uses_reverse_mode_for_custom_vjp():
    norm = lambda x: fnet.layer_norm(x, None, None)  # noqa: E731
    x = normal(0, 4)
    chex.assert_trees_all_close(jacobian(norm)(x), jax.jacrev(norm)(x), atol=1e-6)


def test_hvps_gives_float0_for_integers():
    p, t = {"w": normal(0, 3), "n": 7}, {"w": normal(1, 3), "n": 0}
    (grad,), (products,) = hvps(lambda p: p["n"] * (p["w"] ** 3).sum(), (p,), ((t, t),))
    chex.assert_trees_all_close(grad["w"], 21 * p["w"] ** 2)
    assert grad["n"].dtype == jax.dtypes.float0
    assert [a["n"].dtype for a in products] == [jax.dtypes.float0] * 2


@pytest.mark.parametrize(("n", "width"), [(5, 2), (1, 6), (4, "auto")])
def test_hvps_equal_products_with_the_hessian(n, width):
    f = lambda x, y: (jnp.sin(x) ** 2 @ y) + (x**3).sum()  # noqa: E731

    @jax.jit
    def both(x, y, t):
        (grad, left_out), (products, none) = hvps(f, (x, y), (t, None), width=width)
        assert left_out is None
        assert none is None
        (packed, _) = hvps(f, (x, y), (t.reshape(-1), None), width=width, primal=False)
        expected = t @ jax.hessian(f)(x, y)
        return (grad, jax.grad(f)(x, y)), (products, expected), (packed.reshape(n, 4), expected)

    gradients, products, packed = both(normal(0, 4), normal(1, 4), normal(2, n, 4))
    chex.assert_trees_all_close(*gradients, atol=1e-5)
    chex.assert_trees_all_close(*products, atol=1e-4)
    chex.assert_trees_all_close(*packed, atol=1e-4)


@pytest.mark.parametrize("primal", [True, False])
def test_hvps_of_separate_tangents_are_separate_per_argument(primal):
    f = lambda p, q, y: (jnp.sin(p["a"]) ** 2 @ y) + (p["b"] * q**3).sum()  # noqa: E731
    p, q, y = {"a": normal(0, 4), "b": normal(1, 3)}, normal(2, 3), normal(3, 4)
    ts = [{"a": normal(4 + i, 4), "b": normal(7 + i, 3)} for i in range(3)]
    us = [normal(10 + i, 3) for i in range(3)]

    @jax.jit
    def both(p, q, y, ts, us):
        grad = jax.grad(f, (0, 1))
        one = lambda t, u: jax.jvp(lambda p, q: grad(p, q, y), (p, q), (t, u))[1]  # noqa: E731
        products = [one(t, u) for t, u in zip(ts, us, strict=True)]
        expected = ([t for t, _ in products], [u for _, u in products], None)
        expected = ((*grad(p, q, y), None), expected) if primal else expected
        found = hvps(f, (p, q, y), (ts, us, None), width=2, primal=primal)
        return jax.tree.map(jnp.asarray, found), expected

    found, expected = both(p, q, y, ts, us)
    of_first, of_second, of_none = found[1] if primal else found
    assert (len(of_first), len(of_second), of_none) == (3, 3, None)
    chex.assert_trees_all_close(jax.tree.leaves(found), jax.tree.leaves(expected), atol=1e-4)


X = jnp.ones((2, 3))


def test_rejects_wrong_arguments():
    for error, call, message in (
        (ValueError, lambda: jacobian(double, width=0), "width must be at least 1, got 0"),
        (ValueError, lambda: jacobian(double, mode="sideways"), "'auto', 'forward' or 'reverse', got 'sideways'"),
        (ValueError, lambda: hvps(double, (X,), (X[None],)), r"function to a scalar, got shape \(2,\)"),
        (ValueError, lambda: hvps(jnp.sum, (X,), (X[None],) * 2), "expected 1 tangents, one per argument, got 2"),
        (TypeError, lambda: hvps(jnp.sum, X, (X[None],)), "hvps: primals must be a tuple with one entry per argument, got Array"),
        (TypeError, lambda: hvps(jnp.sum, (X,), {"x": X[None]}), "hvps: tangents must be a tuple with one entry per argument, got dict"),
        (TypeError, lambda: jacobian(square)(3), "expected a real floating argument, got int32"),
        (ValueError, lambda: jacobian(jnp.sin, argnums=1)(X), "argnums 1 of a function of 1 arguments"),
        (TypeError, lambda: jacobian(lambda x: x.astype(jnp.complex64))(X), "output"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_argnums_may_be_negative():
    f = lambda x, y: jnp.sin(x) * y.sum()  # noqa: E731
    x, y = normal(0, 3), normal(1, 2)
    chex.assert_trees_all_close(jacobian(f, -1)(x, y), jax.jacrev(f, 1)(x, y), atol=1e-6)


def test_jacobian_of_an_empty_array_is_empty():
    found = jacobian(lambda x: x.sum() * jnp.ones(2))(jnp.ones((0, 3)))
    chex.assert_shape(found, (2, 0, 3))


@pytest.mark.parametrize("is_summed", [False, True])
@pytest.mark.parametrize(("mode", "argnums"), [("reverse", 0), ("auto", 0), ("auto", 1)])
def test_devices_of_a_shard_map_have_jacobians_of_their_own(mode, argnums, is_summed):
    x, w = normal(0, 4, 3), normal(1, 3, 3)
    f = lambda x, w: jnp.tanh(x @ w).sum(0)  # noqa: E731
    g = (lambda x, w: jax.lax.psum(f(x, w), "d")) if is_summed else f
    of_g = jacobian(g, argnums, mode=mode, width=2)
    local = lambda x, w: equally_varying((of_g(x, w)[None], x))[0]  # noqa: E731
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec("d"), PartitionSpec()), "out_specs": PartitionSpec("d")}
    got = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(x, w)
    want = jnp.stack([jax.jacrev(f, argnums)(part, w) for part in (x[:2], x[2:])])
    if is_summed and argnums == 1:
        want = jnp.broadcast_to(want.sum(0), want.shape)
    chex.assert_trees_all_close(got, want, atol=1e-5)
