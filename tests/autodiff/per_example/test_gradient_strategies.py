"""The strategy for each parameter: ghost norm, materialized or automatic differentiation."""

import example_losses
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import CASES, B, Case, assert_clipped_like_a_loop, row_losses

from fnet.autodiff.per_example.clipped import clipped_grad, gradient_strategies
from fnet.memory import peak


def test_merged_and_split_rows_keep_the_ghost_norm():
    sizes = []

    def loss(p, x):
        sizes.append(len(x))
        h = jnp.tanh(x.reshape(-1, x.shape[-1]) @ p["w"])
        return row_losses(h.reshape(*x.shape[:2], -1) @ p["v"])

    case = CASES["dense_over_sequence"]()
    p = {name: case.params[name] for name in ("w", "v")}
    assert gradient_strategies(loss, p, *case.batch) == {"w": "ghost norm", "v": "ghost norm"}
    assert set(sizes) == {1, B}
    assert_clipped_like_a_loop(Case(loss, p, case.batch), tolerance=1e-5)


def triangular(w, x):
    return row_losses(jnp.tanh(x @ (w * np.tri(len(w), dtype=np.float32))))


def test_masked_kernel_is_derived():
    w, x = example_losses.normal(0, 8, 8), example_losses.normal(1, B, 8)
    assert gradient_strategies(triangular, w, x) == "derived"
    assert_clipped_like_a_loop(Case(triangular, w, (x,)), tolerance=1e-5)


@jax.custom_jvp
def product(x, w):
    """A function with a rule of its own is not known to be linear."""
    return x @ w


product.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))


def with_custom_product(w, x):
    return row_losses(jnp.tanh(product(x, w)))


@pytest.mark.parametrize(
    ("width", "strategy"),
    [(None, "autodiff"), (1, "materialized in chunks"), (4, "materialized in chunks")],
)
def test_nonlinear_use_of_data_and_parameter_uses_autodiff(width, strategy):
    w, x = example_losses.normal(0, 8, 8), example_losses.normal(1, B, 8)
    assert gradient_strategies(with_custom_product, w, x, width=width) == strategy
    assert_clipped_like_a_loop(Case(with_custom_product, w, (x,)), width=width, tolerance=1e-5)


def test_a_parameter_in_the_carry_of_a_loop_uses_autodiff_of_the_loss():
    def loss(w, x):
        def layer(carry, _):
            w, h = carry
            return (0.9 * w, jnp.tanh(h @ w)), None

        (_, h), _ = jax.lax.scan(layer, (w, x), None, 2)
        return row_losses(h)

    w, x = example_losses.normal(0, 8, 8), example_losses.normal(1, B, 8)
    assert gradient_strategies(loss, w, x, width=4) == "autodiff in chunks"
    assert_clipped_like_a_loop(Case(loss, w, (x,)), width=4, tolerance=1e-5)


@pytest.mark.parametrize(
    ("loss", "width", "size", "times"),
    [(triangular, None, 256, 16), (with_custom_product, 1, 128, 8)],
)
def test_norms_of_derived_parameters_and_a_width_limit_memory(loss, width, size, times):
    w, x = (jax.ShapeDtypeStruct((n, size), jnp.float32) for n in (size, 64))
    compiled = jax.jit(clipped_grad(loss, 1.0, width=width)).lower(w, x).compile()
    # Gradients of all examples would take 64 times.
    assert peak(compiled).temporaries < times * w.size * 4


def test_strategy_of_each_parameter():
    def strategies(name):
        case = CASES[name]()
        return gradient_strategies(case.loss, case.params, *case.batch)

    assert strategies("dense")["w"] == strategies("tied_embedding")["embedding"] == "ghost norm"
    assert strategies("dense_over_sequence")["b"] == "materialized"
    assert "autodiff" not in strategies("scaled_parameters").values()
    assert strategies("nonlinear_uses")["w"] == "derived"
    assert strategies("nonlinear_uses")["unused"] == "unused"


@pytest.mark.usefixtures("real_sizes")
def test_gradients_are_materialized_if_they_take_little_memory():
    """Convolutions over a sequence, and dense layers on each position: one product, not two."""
    params = {"convolution": jnp.ones((2, 16, 32)), "dense": jnp.ones((32, 64)), "b": jnp.ones(64)}
    x = jax.random.normal(jax.random.key(0), (16, 24, 16))
    numbers = ("NHC", "HIO", "NHC")

    def loss(p, x):
        y = jax.lax.conv_general_dilated(
            x, p["convolution"], (1,), [(1, 0)], dimension_numbers=numbers
        )
        return ((jnp.tanh(y) @ p["dense"] + p["b"]) ** 2).sum((1, 2))

    assert set(gradient_strategies(loss, params, x).values()) == {"materialized"}
    # A dense layer on one position has a single term, whose factors give the norm.
    assert gradient_strategies(lambda w, x: (x @ w).sum(1), jnp.ones((4, 4)), x[:, 0, :4]) == (
        "ghost norm"
    )
    assert_clipped_like_a_loop(Case(loss, params, (x,)), 3.0, tolerance=1e-5)
    clipped = jax.jit(lambda p, x: clipped_grad(loss, 3.0)(p, x)[0])
    plain = jax.jit(jax.grad(lambda p, x: loss(p, x).mean()))
    flops = [f.lower(params, x).compile().cost_analysis()["flops"] for f in (clipped, plain)]
    assert flops[0] <= 1.15 * flops[1]
