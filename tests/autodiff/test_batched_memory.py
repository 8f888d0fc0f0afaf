"""Memory of `jvps` and `vjps` grows with ``width``, not with N."""

import functools

import jax
import jax.numpy as jnp
import pytest
from batched_cases import network, normal, pack, params_of

from fnet.autodiff.batched.derivatives import jvps, vjps
from fnet.autodiff.batched.linear import Linear
from fnet.memory import donation, peak, tree_bytes


def mlp(sizes=(48, 64, 8), batch=4):
    return params_of(sizes), normal(30, batch, sizes[0])


def shapes_of_tangents(tree, n):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape), a.dtype), tree)


def test_memory_of_vjps_grows_with_width_and_not_with_n():
    params, x = mlp()

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

        args = params, jax.ShapeDtypeStruct((n, 4, 8), jnp.float32), shapes_of_tangents(params, n)
        compiled = jax.jit(f, donate_argnums=2).lower(*args).compile()
        return peak(compiled).temporaries

    narrow, wide = temporaries(12, 2), temporaries(12, 6)
    assert wide > 2 * narrow
    assert temporaries(48, 2) < 1.1 * narrow
    assert narrow < 4 * tree_bytes(params)


def test_memory_of_jvps_grows_with_width_and_not_with_n():
    params, x = mlp(batch=64)

    def temporaries(n, width):
        f = functools.partial(
            jvps, lambda p: network(p, x)["energy"], (params,), width=width, primal=False
        )
        return peak(jax.jit(f).lower((shapes_of_tangents(params, n),)).compile()).temporaries

    narrow, wide = temporaries(12, 2), temporaries(12, 6)
    assert wide > 2 * narrow
    assert temporaries(48, 2) < 1.1 * narrow


@pytest.mark.parametrize("layout", ["stacked", "packed", "separate"])
def test_accumulators_are_updated_in_place_under_jit(layout):
    params, x = mlp((256, 512, 8))
    n = 16
    cotangents = jax.ShapeDtypeStruct((n, 4, 8), jnp.float32)
    into = shapes_of_tangents(params, n)
    if layout == "packed":
        into = jax.eval_shape(lambda tree: pack(tree, params), into)
    if layout == "separate":
        into = [jax.eval_shape(lambda: params)] * n
        cotangents = [jax.ShapeDtypeStruct((4, 8), jnp.float32)] * n

    def step(into, params, cotangents):
        f = lambda p: network(p, x)["y"]  # noqa: E731
        return vjps(f, (params,), cotangents, into=(into,), primal=False)[0]

    compiled = jax.jit(step, donate_argnums=0).lower(into, params, cotangents).compile()
    all_gradients = n * tree_bytes(params)
    assert donation(compiled).aliased_bytes == all_gradients
    if layout != "separate":
        assert peak(compiled).temporaries < all_gradients / 3


def test_batched_products_need_no_copy():
    w, x = normal(0, 16, 24), normal(1, 8, 16)
    pull = jax.vjp(lambda w: x @ w, w)[1]
    linear = Linear.of(lambda c: list(pull(c)), [jnp.ones((8, 24))])
    cotangents = jax.ShapeDtypeStruct((5, 8, 24), jnp.float32)
    plain = jax.jit(jax.vmap(pull)).lower(cotangents).compile()
    ours = jax.jit(lambda c: linear.evaluate_batch([c])).lower(cotangents).compile()
    results = 5 * w.nbytes
    assert peak(plain).temporaries >= results
    # A copy of the shared operand for each cotangent, but none of the results.
    assert peak(ours).temporaries <= 5 * x.nbytes + 1024
