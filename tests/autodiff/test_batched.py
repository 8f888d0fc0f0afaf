"""`jvps` and `vjps` equal N calls of `jax.jvp` and `jax.vjp`."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batched_cases import (
    WIDTHS,
    double,
    network,
    normal,
    one_of,
    pack,
    params_of,
    square,
    stack,
    tangents_of,
)
from jax.sharding import PartitionSpec

from fnet.autodiff.batched.derivatives import jvps, vjps


# Golden values from Rust's tests of Enzyme's batch mode (rust-lang/rust pull request 137880).
def test_four_tangents_of_a_square():
    for width in WIDTHS:
        out, tangents = jvps(square, (3.0,), (jnp.asarray([1.0, 2, 3, 0]),), width=width)
        assert float(out) == 9.0
        np.testing.assert_array_equal(tangents, [6.0, 12.0, 18.0, 0.0])
        _, separate = jvps(square, (3.0,), ([1.0, 2.0, 3.0, 0.0],), width=width)
        assert [float(t) for t in separate] == [6.0, 12.0, 18.0, 0.0]


def test_vjps_adds_to_accumulators_and_donates_them():
    for seed, width in itertools.product((1.0, np.ones(4, np.float32)), WIDTHS):
        zeros = jnp.zeros(4)
        out, (once,) = vjps(square, (3.0,), seed, into=(zeros,), width=width)
        assert float(out) == 9.0
        assert zeros.is_deleted()
        np.testing.assert_array_equal(once, [6.0] * 4)
        (twice,) = vjps(square, (3.0,), seed, into=(once,), width=width, primal=False)
        assert once.is_deleted()
        np.testing.assert_array_equal(twice, [12.0] * 4)


@pytest.mark.parametrize(
    ("layout", "sizes", "batch", "n", "width"),
    [
        ("stacked", (3, 4, 2), 2, 5, 2),
        ("packed", (4, 1), 3, 6, 3),
        ("separate", (2, 5, 3), 4, 4, "auto"),
    ],
)
def test_jvps_and_vjps_equal_single_calls(layout, sizes, batch, n, width):
    params, x = params_of(sizes), normal(30, batch, sizes[0])
    f = lambda params: network(params, x)  # noqa: E731
    shapes = jax.eval_shape(f, params)
    tangents, cotangents = tangents_of(params, n), tangents_of(shapes, n, 80)
    into = tangents_of(params, n, 110)

    @jax.jit
    def single(tangent, cotangent, into):
        out, pull = jax.vjp(f, params)
        (gradient,) = pull(cotangent)
        return out, jax.jvp(f, (params,), (tangent,))[1], gradient, jax.tree.map(
            jnp.add, into, gradient
        )  # fmt: skip

    (out, *_), *_ = singles = [
        single(*(one_of(tree, i) for tree in (tangents, cotangents, into))) for i in range(n)
    ]
    expected_out, expected, added = (
        stack(results) for results in list(zip(*singles, strict=True))[1:]
    )

    def to_layout(tree, like):
        if layout == "separate":
            return [one_of(tree, i) for i in range(n)]
        return pack(tree, like) if layout == "packed" else tree

    def from_layout(tree, like):
        if layout == "separate":
            return stack(tree)
        return jax.tree.map(lambda a, p: np.asarray(a).reshape(n, *p.shape), tree, like)

    @jax.jit
    def batched(tangents, cotangents, into):
        return (
            jvps(f, (params,), (tangents,), width=width),
            vjps(f, (params,), cotangents, width=width),
            vjps(f, (params,), cotangents, width=width, into=(into,)),
        )

    (got_out, got), (again, (grads,)), (_, (sums,)) = batched(
        to_layout(tangents, params), to_layout(cotangents, shapes), to_layout(into, params)
    )
    chex.assert_trees_all_close((got_out, again), (out, out), atol=1e-5)
    chex.assert_trees_all_close(from_layout(got, shapes), expected_out, atol=1e-5)
    chex.assert_trees_all_close(from_layout(grads, params), expected, atol=1e-5)
    chex.assert_trees_all_close(from_layout(sums, params), added, atol=1e-5)


def test_function_is_evaluated_once():
    calls = []

    def f(x):
        calls.append(1)
        return jnp.sin(x)

    jax.make_jaxpr(lambda x, t: jvps(f, (x,), (t,), width=2))(jnp.ones(3), jnp.ones((5, 3)))
    assert len(calls) == 1
    jaxpr = jax.make_jaxpr(lambda x, c: vjps(f, (x,), c, width=2))(jnp.ones(3), jnp.ones((5, 3)))
    assert str(jaxpr).count(" sin ") == str(jaxpr).count(" cos ") == 1


def test_arguments_without_tangents_are_constants():
    f = lambda x, n, y: x * n * y  # noqa: E731
    out, got = jvps(f, (2.0, 3, jnp.asarray([1.0, 2.0])), (jnp.asarray([1.0, 2.0]), None, None))
    chex.assert_trees_all_close(out, jnp.asarray([6.0, 12.0]))
    chex.assert_trees_all_close(got, jnp.asarray([[3.0, 6.0], [6.0, 12.0]]))
    grads = vjps(f, (2.0, 3, jnp.asarray([1.0, 2.0])), jnp.eye(2), primal=False)
    assert grads[1] is None
    chex.assert_trees_all_close(grads[0], jnp.asarray([3.0, 6.0]))
    grads = vjps(f, (2.0, 3, jnp.ones(2)), jnp.eye(2), argnums=-1, primal=False)
    assert grads[:2] == (None, None)
    chex.assert_trees_all_close(grads[2], 6.0 * jnp.eye(2))


def output(params, x):
    return network(params, x)["y"]


@functools.cache
def evaluated_eagerly():
    """Parameters, x, tangents of the parameters, and what they give without ``jit``."""
    params, x = params_of([3, 4, 2]), normal(30, 5, 3)
    tangents = tangents_of(params, 3)
    return params, x, tangents, jvps(output, (params, x), (tangents, None), primal=False)


def test_results_are_the_same_under_jit_and_vmap():
    params, x, tangents, expected = evaluated_eagerly()

    def plain(params, x):
        return jvps(output, (params, x), (tangents, None), width=2, primal=False)

    def mapped(params, x):
        return jax.vmap(lambda x: plain(params, x[None])[:, 0], out_axes=1)(x)

    got = jax.jit(lambda params, x: (plain(params, x), mapped(params, x)))(params, x)
    chex.assert_trees_all_close(got, (expected, expected), atol=1e-5)


def test_jvps_and_vjps_can_be_differentiated():
    width = 2
    params, x, tangents, _ = evaluated_eagerly()

    def energy(x, width):
        return (jvps(output, (params, x), (tangents, None), width=width, primal=False) ** 2).sum()

    def penalty(p):
        c = jnp.ones((3, 5, 2))
        return sum((g**2).sum() for g in jax.tree.leaves(vjps(output, (p, x), c, width=width)[1]))

    def single(p):
        grads = jax.vjp(output, p, x)[1](jnp.ones((5, 2)))
        return 3 * sum((g**2).sum() for g in jax.tree.leaves(grads))

    energies, penalties = jax.jit(
        lambda params, x: (
            [jax.grad(energy)(x, width), jax.grad(energy)(x, 3)],
            [jax.grad(penalty)(params), jax.grad(single)(params)],
        ),
    )(params, x)
    chex.assert_trees_all_close(*energies, atol=1e-4)
    chex.assert_trees_all_close(*penalties, atol=1e-3)


def test_bfloat16_gradients_stay_bfloat16():
    half = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), evaluated_eagerly()[:2])
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    gradients = jax.jit(lambda p, c: vjps(output, p, c, width=2, primal=False))
    grads = gradients(half, jnp.ones((3, 5, 2), jnp.bfloat16))
    chex.assert_type(jax.tree.leaves(grads), jnp.bfloat16)
    expected = gradients(wide, jnp.ones((3, 5, 2)))
    grads = jax.tree.map(lambda a: a.astype(jnp.float32), grads)
    chex.assert_trees_all_close(grads, expected, rtol=0.05, atol=0.05)


def test_checkpoint_scan_and_convolutions_equal_single_calls():
    @jax.checkpoint
    def block(h, w):
        return jax.nn.relu(h @ w)

    def f(p):
        h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), p["x"], p["w"])
        h = block(h, p["w"][0])
        image = h.reshape(1, 4, 4, 2)
        y = jax.lax.conv_general_dilated(
            image, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y.sum((1, 2))

    p = {"x": normal(0, 4, 8), "w": normal(1, 3, 8, 8), "k": normal(2, 3, 3, 2, 5)}
    t, c = tangents_of(p, 5), normal(90, 5, 1, 5)

    @jax.jit
    def single(p, t, c):
        return (
            jax.vmap(lambda t: jax.jvp(f, (p,), (t,))[1])(t),
            (jax.vmap(lambda c: jax.vjp(f, p)[1](c)[0])(c),),
        )

    @functools.partial(jax.jit, static_argnums=3)
    def batched(p, t, c, width):
        return (
            jvps(f, (p,), (t,), width=width, primal=False),
            vjps(f, (p,), c, width=width, primal=False),
        )

    for width in (2, "auto"):
        got = batched(p, t, c, width)
        chex.assert_trees_all_close(got, single(p, t, c), rtol=1e-4, atol=1e-3)


def test_custom_derivatives_apply_and_jvps_rejects_custom_vjp():
    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (x**2, x), lambda x, c: (10.0 * x * c,))
    (grads,) = vjps(f, (3.0,), jnp.asarray([1.0, 2.0]), primal=False)
    np.testing.assert_array_equal(grads, [30.0, 60.0])
    with pytest.raises(TypeError, match="custom_vjp"):
        jvps(f, (3.0,), (jnp.asarray([1.0, 2.0]),))

    @jax.custom_jvp
    def g(x):
        return x**2

    g.defjvp(lambda x, t: (x[0] ** 2, 7.0 * t[0]))
    np.testing.assert_array_equal(
        jvps(g, (3.0,), (jnp.asarray([1.0, 2.0]),), primal=False), [7.0, 14.0]
    )


def test_jvps_inside_shard_map_equals_the_whole_batch():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x, t = normal(0, 3, 2), normal(1, 8, 3), normal(2, 5, 8, 3)
    spec, batched = PartitionSpec("d"), PartitionSpec(None, "d")
    local = lambda x, t: jvps(lambda x: jnp.sin(x @ w), (x,), (t,), width=2, primal=False)  # noqa: E731
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, batched), out_specs=batched)
    got = jax.device_get(jax.jit(mapped)(x, t))
    chex.assert_trees_all_close(got, jnp.cos(x @ w)[None] * (t @ w), atol=1e-5)


X, C, T = jnp.ones((2, 3)), jnp.ones((4, 2)), jnp.ones((1, 2, 3))


def test_rejects_what_does_not_fit():
    for call, error, message in (
        (lambda: jvps(double, (X,), (T, T)), ValueError, "expected 1 tangents, .* got 2"),
        (lambda: jvps(double, (X,), C), ValueError, "shapes of the output, .*: use vjps"),
        (lambda: jvps(double, (X,), (C,)), ValueError, "shapes of the output, .*: use vjps"),
        (lambda: vjps(double, (X,), (T,)), ValueError, "shapes of the arguments, .*: use jvps"),
        (lambda: jvps(double, (X,), (T,), width=0), ValueError, "width must be at least 1, got 0"),
        (lambda: vjps(double, (X,), C, width=-2), ValueError, "width must be at least 1, got -2"),
        (lambda: vjps(square, (3.0,), 1.0), ValueError, "needs into=, which determines N"),
        (lambda: vjps(double, (X,), C, into=(None, None)), ValueError, "expected 1 accumulators"),
        (lambda: vjps(double, (X,), C, argnums=1), ValueError, "argnums 1 of a function of 1"),
        (lambda: jvps(square, (3,), (C[:, 0],)), TypeError, "argument 0 is int32, which has no d"),
        (lambda: vjps(jnp.multiply, (3, 2.0), C, argnums=0), TypeError, "argument 0 is int32"),
        (lambda: vjps(square, (3,), C[:, 0]), TypeError, "got none that is floating"),
        (lambda: jvps(double, (X,), (T,), width=1.5), TypeError, "must be an int or 'auto', got 1.5"),
        (lambda: jvps(double, X, (T,)), TypeError, r"must be a tuple with one .*\(x,\) for one"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
