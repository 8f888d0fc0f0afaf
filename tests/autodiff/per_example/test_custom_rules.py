"""Per-example gradients through custom derivatives and equations that are not linear."""

import jax
import jax.numpy as jnp
import pytest
from example_losses import B, Case, assert_clipped_like_a_loop, normal, row_losses

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


@pytest.mark.parametrize("name", ["scaled", "masked"])
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
