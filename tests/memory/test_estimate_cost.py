"""FLOPs and bytes of traced programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from fnet.memory import Cost, cost, estimate_cost


def count(f, *shapes):
    return estimate_cost(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes)))


def test_a_matrix_product_takes_two_flops_per_multiply_add():
    cost = Cost(flops=2 * 3 * 5 * 7, bytes=4 * (15 + 35 + 21))
    assert count(lambda a, b: a @ b, (3, 5), (5, 7)) == cost
    assert count(lambda a, b: a @ b, (4, 3, 5), (4, 5, 7)).flops == 4 * 2 * 3 * 5 * 7


def test_rematerialization_counts():
    def f(x, kernel):
        return jnp.sin(jnp.sin(x @ kernel) @ kernel).sum()

    plain = count(jax.grad(f), (16, 16), (16, 16)).flops
    assert count(jax.grad(jax.checkpoint(f)), (16, 16), (16, 16)).flops >= plain + 2 * 16**3


def test_flops_of_a_resnet_agree_with_the_compiler():
    model = fnet.models.get("resnet18", num_classes=10)
    params, state = jax.eval_shape(model.init, jax.random.key(0))

    def loss(params, state, x):
        return model.apply(params, state, x, train=True)[0].sum()

    args = params, state, jax.ShapeDtypeStruct((1, 224, 224, 3), "float32")
    traced = jax.jit(jax.grad(loss)).trace(*args)
    # XLA does not count windows that see only padding.
    compilers = traced.lower().cost_analysis()["flops"]
    assert abs(estimate_cost(traced.jaxpr).flops / compilers - 1) < 0.1


def strided(x, kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)


def test_elementwise_operations_count_their_results_alone_and_convolutions_their_window():
    assert count(jnp.sin, (8,)) == Cost(flops=8, bytes=32)
    x, kernel, y = (2, 8, 8, 3), (3, 3, 3, 5), (2, 4, 4, 5)
    cost = count(strided, x, kernel)
    assert cost.bytes == 4 * sum(map(np.prod, (x, kernel, y)))
    assert cost.flops == 2 * np.prod(y) * np.prod(kernel[:3])


def test_dilation_zeros_do_not_count():
    x, kernel, y = (2, 8, 8, 3), (3, 3, 3, 5), (2, 4, 4, 5)

    def transposed(dy, kernel):
        given = jax.ShapeDtypeStruct(x, jnp.float32)
        return jax.linear_transpose(lambda x: strided(x, kernel), given)(dy)[0]

    forward = count(strided, x, kernel).flops
    assert count(transposed, y, kernel).flops == pytest.approx(forward, rel=0.05)


def test_a_scan_counts_every_iteration_and_a_cond_its_largest_branch():
    def f(x):
        x, _ = jax.lax.scan(lambda x, _: (x @ x, None), x, length=6)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: (x @ x) @ x, x)

    products = (6 + 2) * 2 * 8**3
    assert products <= count(f, (8, 8)).flops < products + 100


def test_a_priced_cost_takes_the_time_of_its_flops_bytes_and_launches():
    priced = cost.Rates(bytes=3.0, launch=7.0).priced(Cost(100, 10), 2)
    assert priced.time * cost.FLOPS_PER_BYTE == pytest.approx(100 + 3 * 10 + 7 * 2)
    assert (priced.flops, priced.bytes) == (100, 10)
    assert Cost(1, 2).with_more(Cost(3, 4), 5) == Cost(16, 22)
    assert Cost(flops=40, bytes=3).time == 323  # a FLOP takes as long as eight bytes
    peaks = SimpleNamespace(flops={"float32": 1e12, "bfloat16": 1e15}, bandwidth=1e11, launch=1e-6)
    rates = cost.Rates.of(peaks)
    assert rates.launch == pytest.approx(cost.MATRIX_UNITS * 1e6)
    assert rates.bytes == pytest.approx(cost.MOVED * cost.MATRIX_UNITS * 10)
