import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from fnet.autodiff.batched import jvps, vjps
from fnet.autodiff.jacobian import hvps, jacobian
from fnet.autodiff.lanes import Linear
from fnet.memory import donation, peak

WIDTHS = [1, 2, 3, 4, 7, "auto"]


def square(x):
    return x**2


# The goldens are those of Rust's tests of Enzyme's batch mode (rust-lang/rust pull request 137880).
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


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def network(params, x):
    for w, b in params["layers"]:
        x = jnp.tanh(x @ w + b[None])
    return {"y": x, "energy": (x**2).sum()}


def params_of(sizes, seed=0):
    return {
        "layers": [
            (normal(seed + 2 * i, a, b) / a**0.5, normal(seed + 2 * i + 1, b))
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        ]
    }


def lanes_of(tree, n, seed=50):
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [normal(seed + i, n, *jnp.shape(a)) for i, a in enumerate(leaves)]
    )


def lane(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


def stack(trees):
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)


def pack(tree, like):
    return jax.tree.map(lambda a, p: a.reshape(-1, *p.shape[1:]) if p.ndim else a, tree, like)


@pytest.mark.parametrize("width", WIDTHS)
def test_four_tangents_of_a_square(width):
    out, tangents = jvps(square, (3.0,), (jnp.asarray([1.0, 2, 3, 0]),), width=width)
    assert float(out) == 9.0
    np.testing.assert_array_equal(tangents, [6.0, 12.0, 18.0, 0.0])
    _, separate = jvps(square, (3.0,), ([1.0, 2.0, 3.0, 0.0],), width=width)
    assert [float(t) for t in separate] == [6.0, 12.0, 18.0, 0.0]


@pytest.mark.parametrize("width", WIDTHS)
def test_identity_tangents_are_the_columns_and_packed_ones_lie_end_to_end(width):
    x = jnp.ones(4)
    stacked = jvps(times_m, (x,), (jnp.eye(4),), width=width, primal=False)
    packed = jvps(times_m, (x,), (jnp.eye(4).reshape(16),), width=width, primal=False)
    assert packed.shape == (20,)
    for i in range(4):
        np.testing.assert_allclose(stacked[i], M[:, i], rtol=1e-6)
        np.testing.assert_allclose(packed[5 * i : 5 * i + 5], M[:, i], rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", [1.0, np.ones(4, np.float32)], ids=["one seed", "four seeds"])
def test_reverse_adds_to_its_accumulators_and_takes_their_buffers(seed, width):
    zeros = jnp.zeros(4)
    out, (once,) = vjps(square, (3.0,), seed, into=(zeros,), width=width)
    assert float(out) == 9.0
    assert zeros.is_deleted()
    np.testing.assert_array_equal(once, [6.0] * 4)
    (twice,) = vjps(square, (3.0,), seed, into=(once,), width=width, primal=False)
    assert once.is_deleted()
    np.testing.assert_array_equal(twice, [12.0] * 4)


@pytest.mark.parametrize("seed", [1.0, [1.0, 1.0]], ids=["one seed", "two seeds"])
def test_separate_accumulators_come_back_separate(seed):
    zeros = [jnp.zeros(()), jnp.ones(())]
    (grads,) = vjps(square, (3.0,), seed, into=(zeros,), primal=False)
    assert [float(g) for g in grads] == [6.0, 7.0]
    assert all(z.is_deleted() for z in zeros)


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    batch=st.integers(1, 4),
    n=st.integers(1, 7),
    width=st.one_of(st.just("auto"), st.integers(1, 9)),
    form=st.sampled_from(["stacked", "packed", "separate"]),
)
def test_jvps_and_vjps_equal_single_passes(sizes, batch, n, width, form):
    params, x = params_of(sizes), normal(30, batch, sizes[0])
    f = lambda params: network(params, x)  # noqa: E731
    out = jax.jit(f)(params)
    tangents, cotangents = lanes_of(params, n), lanes_of(out, n, 80)
    jvp = jax.jit(lambda t: jax.jvp(f, (params,), (t,))[1])
    pull = jax.jit(lambda c: jax.vjp(f, params)[1](c)[0])
    expected_out = stack([jvp(lane(tangents, i)) for i in range(n)])
    expected = stack([pull(lane(cotangents, i)) for i in range(n)])
    into = lanes_of(params, n, 110)
    added = jax.tree.map(jnp.add, into, expected)

    def give(tree, like):
        if form == "separate":
            return [lane(tree, i) for i in range(n)]
        return pack(tree, like) if form == "packed" else tree

    def get(tree, like):
        if form == "separate":
            return stack(tree)
        return jax.tree.map(lambda a, p: a.reshape(n, *p.shape), tree, like)

    @jax.jit
    def batched(tangents, cotangents, into):
        return (
            jvps(f, (params,), (tangents,), width=width),
            vjps(f, (params,), cotangents, width=width),
            vjps(f, (params,), cotangents, width=width, into=(into,)),
        )

    (got_out, got), (again, (grads,)), (_, (sums,)) = batched(
        give(tangents, params), give(cotangents, out), give(into, params)
    )
    chex.assert_trees_all_close((got_out, again), (out, out), atol=1e-5)
    chex.assert_trees_all_close(get(got, out), expected_out, atol=1e-5)
    chex.assert_trees_all_close(get(grads, params), expected, atol=1e-5)
    chex.assert_trees_all_close(get(sums, params), added, atol=1e-5)


@settings(max_examples=5, deadline=None)
@given(
    n_in=st.integers(1, 5),
    n_out=st.integers(1, 5),
    width=st.one_of(st.just("auto"), st.integers(1, 6)),
    mode=st.sampled_from(["auto", "forward", "reverse"]),
)
def test_a_jacobian_is_that_of_jax(n_in, n_out, width, mode):
    w, x, y = normal(0, n_out, n_in), normal(1, n_in), normal(2, 2, n_out)

    def f(x, y):
        z = jnp.sin(w @ x["a"]) * x["s"]
        return {"z": z, "product": y @ z}

    args = {"a": x, "s": jnp.asarray(1.5)}, y
    got = jax.jit(jacobian(f, mode=mode, width=width))(*args)
    chex.assert_trees_all_close(got, jax.jit(jax.jacfwd(f))(*args), atol=1e-5)
    got = jax.jit(jacobian(f, (1, 0), mode=mode, width=width))(*args)
    chex.assert_trees_all_close(got, jax.jit(jax.jacrev(f, (1, 0)))(*args), atol=1e-5)


def test_a_jacobian_goes_the_way_with_fewer_lanes():
    def lanes(n_in, n_out):
        f = jacobian(lambda x: normal(0, n_out, n_in) @ jnp.sin(x), width=3)
        text = str(jax.make_jaxpr(f)(jnp.ones(n_in)))
        return "length=2" in text

    # 6 lanes are two chunks of 3; the other way would take 90 / 3.
    assert lanes(6, 90)
    assert lanes(90, 6)


@settings(max_examples=5, deadline=None)
@given(n=st.integers(1, 5), width=st.one_of(st.just("auto"), st.integers(1, 6)))
def test_hvps_are_products_with_the_hessian(n, width):
    f = lambda x, y: (jnp.sin(x) ** 2 @ y) + (x**3).sum()  # noqa: E731
    x, y, t = normal(0, 4), normal(1, 4), normal(2, n, 4)
    hessian = jax.hessian(f)(x, y)
    (grad, left_out), (products, none) = hvps(f, (x, y), (t, None), width=width)
    assert left_out is None
    assert none is None
    chex.assert_trees_all_close(grad, jax.grad(f)(x, y), atol=1e-5)
    chex.assert_trees_all_close(products, t @ hessian, atol=1e-4)
    (packed, _) = hvps(f, (x, y), (t.reshape(-1), None), width=width, primal=False)
    chex.assert_trees_all_close(packed.reshape(n, 4), t @ hessian, atol=1e-4)


def mlp(sizes=(48, 64, 8), batch=4):
    return params_of(sizes), normal(30, batch, sizes[0])


def test_memory_in_reverse_grows_with_width_and_not_with_lanes():
    params, x = mlp()
    lane_bytes = sum(a.nbytes for a in jax.tree.leaves(params))

    def temporaries(n, width):
        def f(params, cotangents, into):
            return vjps(
                lambda p: network(p, x)["y"],
                (params,),
                cotangents,
                into=(into,),
                width=width,
                primal=False,
            )

        args = params, jnp.ones((n, 4, 8)), lanes_of(params, n)
        compiled = jax.jit(f, donate_argnums=2).lower(*args).compile()
        return peak(compiled).temporaries

    narrow, wide = temporaries(12, 2), temporaries(12, 6)
    assert wide > 2 * narrow
    assert temporaries(48, 2) < 1.1 * narrow
    assert narrow < 4 * lane_bytes


def test_memory_in_forward_grows_with_width_and_not_with_lanes():
    params, x = mlp(batch=64)

    def temporaries(n, width):
        f = functools.partial(
            jvps, lambda p: network(p, x)["energy"], (params,), width=width, primal=False
        )
        return peak(jax.jit(f).lower((lanes_of(params, n),)).compile()).temporaries

    narrow, wide = temporaries(12, 2), temporaries(12, 6)
    assert wide > 2 * narrow
    assert temporaries(48, 2) < 1.1 * narrow


@pytest.mark.parametrize("form", ["stacked", "packed", "separate"])
def test_accumulators_are_updated_in_place_under_jit(form):
    params, x = mlp((256, 512, 8))
    n = 16
    into = lanes_of(params, n)
    if form == "packed":
        into = pack(into, params)
    if form == "separate":
        into = [lane(into, i) for i in range(n)]

    def step(into, params, cotangents):
        f = lambda p: network(p, x)["y"]  # noqa: E731
        return vjps(f, (params,), cotangents, into=(into,), primal=False)[0]

    cotangents = list(jnp.ones((n, 4, 8))) if form == "separate" else jnp.ones((n, 4, 8))
    compiled = jax.jit(step, donate_argnums=0).lower(into, params, cotangents).compile()
    all_lanes = sum(a.nbytes for a in jax.tree.leaves(into))
    assert donation(compiled).aliased_bytes == all_lanes
    if form != "separate":
        assert peak(compiled).temporaries < all_lanes / 3


def test_primal_is_evaluated_once():
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


def test_integers_and_keys_inside_a_tree_are_constants():
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


def test_mixed_forms_come_back_stacked():
    f = lambda x, y: x * y  # noqa: E731
    x, y = jnp.ones(2), jnp.full(2, 2.0)
    got = jvps(f, (x, y), (jnp.eye(2).reshape(4), jnp.eye(2)), primal=False)
    chex.assert_trees_all_close(got, 3.0 * jnp.eye(2))
    got = jvps(f, (x, y), (list(jnp.eye(2)), jnp.eye(2)), primal=False)
    chex.assert_trees_all_close(got, 3.0 * jnp.eye(2))


def test_a_list_of_one_array_has_separate_lanes_too():
    got = jvps(lambda x: [2.0 * x[0]], ([jnp.ones(3)],), ([[jnp.ones(3)]],), primal=False)
    chex.assert_trees_all_close(got, ([jnp.full(3, 2.0)],))


@pytest.mark.parametrize("width", [1, 2, "auto"])
def test_under_jit_vmap_grad_and_in_bfloat16(width):
    params, x = params_of([3, 4, 2]), normal(30, 5, 3)
    f = lambda p, x: network(p, x)["y"]  # noqa: E731
    t = lanes_of(params, 3)
    expected = jvps(f, (params, x), (t, None), primal=False)
    got = jax.jit(lambda p, x, t: jvps(f, (p, x), (t, None), width=width, primal=False))(
        params, x, t
    )
    chex.assert_trees_all_close(got, expected, atol=1e-5)

    def over(x):
        return jvps(f, (params, x[None]), (t, None), width=width, primal=False)[:, 0]

    chex.assert_trees_all_close(jax.vmap(over, out_axes=1)(x), expected, atol=1e-5)

    def energy(x, width):
        return (jvps(f, (params, x), (t, None), width=width, primal=False) ** 2).sum()

    plain = jax.jit(jax.grad(lambda x: energy(x, 3)))(x)
    got = jax.jit(jax.grad(lambda x: energy(x, width)))(x)
    chex.assert_trees_all_close(got, plain, atol=1e-4)

    def penalty(p):
        c = jnp.ones((3, 5, 2))
        return sum((g**2).sum() for g in jax.tree.leaves(vjps(f, (p, x), c, width=width)[1]))

    def single(p):
        grads = jax.vjp(f, p, x)[1](jnp.ones((5, 2)))
        return 3 * sum((g**2).sum() for g in jax.tree.leaves(grads))

    penalties = jax.jit(jax.grad(penalty))(params), jax.jit(jax.grad(single))(params)
    chex.assert_trees_all_close(*penalties, atol=1e-3)

    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    c = jnp.ones((3, 5, 2), jnp.bfloat16)
    grads = vjps(f, half, c, width=width, primal=False)
    chex.assert_type(jax.tree.leaves(grads), jnp.bfloat16)


def test_through_checkpoint_scan_and_convolutions():
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
    t, c = lanes_of(p, 5), normal(90, 5, 1, 5)
    expected = jax.jit(jax.vmap(lambda t: jax.jvp(f, (p,), (t,))[1]))(t)
    expected_grads = jax.jit(jax.vmap(lambda c: jax.vjp(f, p)[1](c)[0]))(c)
    for width in (2, "auto"):
        got = jax.jit(lambda t, w=width: jvps(f, (p,), (t,), width=w, primal=False))(t)
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-3)
        (grads,) = jax.jit(lambda c, w=width: vjps(f, (p,), c, width=w, primal=False))(c)
        chex.assert_trees_all_close(grads, expected_grads, rtol=1e-4, atol=1e-3)


def test_custom_rules_are_kept_and_forward_mode_of_a_custom_vjp_is_jax_s_error():
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


@pytest.mark.parametrize("width", [2, 3, "auto"])
def test_inside_shard_map(width):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x, t = normal(0, 3, 2), normal(1, 8, 3), normal(2, 5, 8, 3)
    f = lambda x: jnp.sin(x @ w)  # noqa: E731
    spec, lanes = PartitionSpec("d"), PartitionSpec(None, "d")
    local = lambda x, t: jvps(f, (x,), (t,), width=width, primal=False)  # noqa: E731
    got = jax.shard_map(local, mesh=mesh, in_specs=(spec, lanes), out_specs=lanes)(x, t)
    chex.assert_trees_all_close(got, jvps(f, (x,), (t,), primal=False), atol=1e-5)


def test_products_over_lanes_are_written_without_a_copy():
    w, x = normal(0, 16, 24), normal(1, 8, 16)
    pull = jax.vjp(lambda w: x @ w, w)[1]
    linear = Linear.of(lambda c: list(pull(c)), [jnp.ones((8, 24))])
    lanes = jax.ShapeDtypeStruct((5, 8, 24), jnp.float32)
    plain = jax.jit(jax.vmap(pull)).lower(lanes).compile()
    ours = jax.jit(lambda c: linear.at_once([c])).lower(lanes).compile()
    results = 5 * w.nbytes
    assert peak(plain).temporaries >= results
    # Only the argument that all lanes share, once a lane.
    assert peak(ours).temporaries <= 5 * x.nbytes + 1024


X = jnp.ones((2, 3))


def double(x):
    return 2.0 * x.sum(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jvps(double, (X,), (X[None], X[None])), "expected 1 tangents, .* got 2"),
        (lambda: jvps(double, (X,), jnp.ones((4, 2))), "follows the output: a reverse activity"),
        (lambda: jvps(double, (X,), (jnp.ones((4, 2)),)), "follows the output: a reverse activity"),
        (
            lambda: vjps(double, (X,), (jnp.ones((4, 2, 3)),)),
            "follows the arguments: a forward activity in reverse mode",
        ),
        (
            lambda: jvps(jnp.add, (1.0, 2.0), (jnp.ones(2), jnp.ones(3))),
            "argument 0 has 2, argument 1 has 3",
        ),
        (lambda: jvps(double, (X,), (jnp.ones((0, 2, 3)),)), "at least 1 lane, got N = 0"),
        (lambda: jvps(double, (X,), ([],)), "N must be at least 1"),
        (lambda: jvps(double, (X,), (None,)), "at least one argument, got None for all"),
        (lambda: jvps(double, (X,), (jnp.ones((4, 3, 2)),)), r"\(N, 2, 3\) stacked or \(N \* 2, 3"),
        (lambda: jvps(double, (X,), (jnp.ones((5, 3)),)), r"got \(5, 3\)"),
        (lambda: jvps(double, (X,), ([X, X[:1]],)), r"lane 1: expected shape \(2, 3\), got \(1, 3"),
        (lambda: jvps(double, (X,), (X[None],), width=0), "width must be at least 1, got 0"),
        (
            lambda: vjps(double, (X,), jnp.ones((4, 2)), width=-2),
            "width must be at least 1, got -2",
        ),
        (lambda: jacobian(double, width=0), "width must be at least 1, got 0"),
        (
            lambda: jacobian(double, mode="sideways"),
            "'auto', 'forward' or 'reverse', got 'sideways'",
        ),
        (lambda: vjps(square, (3.0,), 1.0), "needs into=, which says how many"),
        (
            lambda: vjps(double, (X,), jnp.ones((4, 2)), into=(jnp.ones((3, 2, 3)),)),
            "into, argument 0 has 3, the cotangents has 4",
        ),
        (
            lambda: vjps(double, (X,), jnp.ones((4, 2)), into=(jnp.ones((4, 3, 3)),)),
            r"into, argument 0: expected shape \(N, 2, 3\)",
        ),
        (
            lambda: vjps(double, (X,), jnp.ones((4, 2)), into=(None, None)),
            "expected 1 accumulators",
        ),
        (lambda: vjps(double, (X,), jnp.ones((4, 2)), argnums=1), "argnums 1 of a function of 1"),
        (lambda: hvps(double, (X,), (X[None],)), r"function to a scalar, got shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jvps(square, (3,), (jnp.ones(4),)),
            "argument 0 is int32, which has no derivative",
        ),
        (lambda: vjps(jnp.multiply, (3, 2.0), jnp.ones(4), argnums=0), "argument 0 is int32"),
        (lambda: vjps(square, (3,), jnp.ones(4)), "got none that is floating"),
        (
            lambda: jvps(double, (X,), (jnp.ones((4, 2, 3), jnp.float16),)),
            r"expected dtype float32, got float16; cast it with .astype\(float32\)",
        ),
        (lambda: vjps(double, (X,), jnp.ones((4, 2), int)), "expected dtype float32, got int32"),
        (
            lambda: vjps(double, (X,), jnp.ones((4, 2)), into=(jnp.ones((4, 2, 3), jnp.float16),)),
            "into, argument 0: expected dtype float32, got float16",
        ),
        (
            lambda: jvps(double, (X,), (X[None],), width=1.5),
            "width must be an int or 'auto', got 1.5",
        ),
        (
            lambda: jvps(double, X, (X[None],)),
            r"primals must be a tuple of arguments.*\(x,\) for one",
        ),
        (lambda: jacobian(square)(3), "expected a real floating argument, got int32"),
    ],
)
def test_what_has_no_derivative_or_another_dtype_is_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()
