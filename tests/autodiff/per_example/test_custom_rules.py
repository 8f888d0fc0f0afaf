"""Per-example gradients through custom derivatives and equations that are not linear."""

import jax
import jax.numpy as jnp
import pytest
from example_losses import B, Case, assert_clipped_like_a_loop, normal, row_losses

import fnet
from fnet.autodiff import gradient_strategies
from fnet.jaxpr.custom_rules import is_linear


def quantizer(backward):
    """Round to multiples of 1/4, with this backward rule ``(x, ct) -> ct``."""

    @jax.custom_vjp
    def quantize(x):
        return jnp.round(x * 4) / 4

    quantize.defvjp(lambda x: (quantize(x), x), lambda x, ct: (backward(x, ct),))
    return quantize


RULES = {
    "identity": (lambda x, ct: ct, "ghost norm"),
    "scaled": (lambda x, ct: -3 * ct, "ghost norm"),
    "masked": (lambda x, ct: jnp.where(jnp.abs(x) < 1, ct, 0), "derived"),
    "sign": (lambda x, ct: jnp.sign(ct), "autodiff"),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", RULES)
def test_weights_quantized_by_a_custom_vjp(name):
    backward, strategy = RULES[name]
    quantize = quantizer(backward)

    def loss(p, x):
        return row_losses(jnp.tanh(x @ quantize(p["w"].T)) @ p["head"])

    params = {"w": normal(0, 6, 6), "head": normal(1, 6, 2)}
    case = Case(loss, params, (normal(9, B, 5, 6),))
    assert gradient_strategies(loss, params, *case.batch)["w"] == strategy
    assert_clipped_like_a_loop(case, 1.0)


def test_only_linear_rules_are_linear():
    for name, (backward, _) in RULES.items():
        (eqn,) = jax.make_jaxpr(quantizer(backward))(jnp.ones(3)).eqns
        assert is_linear(eqn) == (name != "sign")


@pytest.mark.slow
def test_a_large_tied_embedding_with_a_fused_head():
    vocabulary, width = 20_000, 64  # Gradients of all examples exceed the memory budget.

    def loss(p, t):
        h = jnp.tanh(p["table"][t[:, :-1]] @ p["w"])
        return fnet.linear_cross_entropy(h, p["table"], t[:, 1:], vocab_axis=0).mean(1)

    params = {"table": normal(0, vocabulary, width), "w": normal(1, width, width)}
    tokens = jax.random.randint(jax.random.key(2), (B, 4), 0, vocabulary)
    expected = {"table": "materialized in chunks", "w": "ghost norm"}
    assert gradient_strategies(loss, params, tokens) == expected
    assert_clipped_like_a_loop(Case(loss, params, (tokens,)), 1.0)
