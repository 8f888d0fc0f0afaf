"""`find_nonfinite`: the operation that produced the first NaN or infinity."""

import jax
import jax.numpy as jnp
import pytest

import fnet
from fnet import layers
from fnet.nonfinite import find_nonfinite

NET = fnet.serial(
    conv=layers.conv(3, 4, bias=False),
    abn=layers.abn(4),
    pool=layers.global_avg_pool(),
    head=layers.dense(4, 2),
)


def loss(params, state, x):
    with jax.named_scope("model"):
        y, _ = NET.apply(params, state, x, train=True)
    return jnp.square(y).mean()


def arguments():
    params, state = NET.init(jax.random.key(0))
    return params, state, jax.random.normal(jax.random.key(1), (4, 5, 5, 3))


def find_in_step(params, state, x):
    return find_nonfinite(jax.value_and_grad(loss), params, state, x)


def test_finite_results_give_none():
    assert find_in_step(*arguments()) is None


def test_names_a_parameter_that_is_not_finite():
    params, state, x = arguments()
    params["head"]["kernel"] = params["head"]["kernel"].at[1, 0].set(jnp.nan)
    assert str(find_in_step(params, state, x)) == "params['head']['kernel'] has nan"


def test_names_data_that_are_not_finite():
    params, state, x = arguments()
    assert str(find_in_step(params, state, x.at[2, 0, 0, 1].set(jnp.inf))) == "x has inf"


def test_reports_the_overflow_and_not_the_nan_it_leads_to():
    params, state, x = arguments()
    # Of one sign: a sum of inf and -inf is nan, and CPUs add in different orders.
    params["conv"]["kernel"] = jnp.abs(params["conv"]["kernel"]) * 1e38
    origin = find_in_step(params, state, jnp.abs(x) * 1e6)
    assert (origin.layer, origin.operation) == ("model/conv", "conv_general_dilated")
    assert (origin.backward, origin.value) == (False, "inf")


def test_reports_the_layer_of_a_derivative():
    def f(w, x):
        with jax.named_scope("root"):
            y = jnp.sqrt(w)
        return (x * y).sum()

    origin = find_nonfinite(jax.grad(f), jnp.zeros(3), jnp.ones(3))
    assert (origin.layer, origin.operation, origin.value) == ("root", "div", "inf")
    assert str(origin) == f"root (div, {origin.source}) gives inf"
    assert "test_nonfinite.py:" in origin.source


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_reports_an_overflow_in_the_backward_pass(wrap):
    def f(w):
        with jax.named_scope("first"):
            y = wrap(lambda w: w * 1e30)(w)
        with jax.named_scope("second"):
            return (y * 1e30).sum()

    origin = find_nonfinite(jax.grad(f), jnp.zeros(3))
    assert (origin.layer, origin.operation, origin.backward) == ("first", "mul", True)
    assert str(origin).startswith("first (backward, mul, ")


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_searches_inside_of_calls(wrap):
    @wrap
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.log(x)

    def f(x):
        with jax.named_scope("outer"):
            return (inner(x - 1) * 0).sum()

    origin = find_nonfinite(f, jnp.ones(3))
    assert (origin.layer, origin.operation, origin.value) == ("outer/inner", "log", "inf")


def test_a_loop_counts_as_one_operation():
    def f(x):
        def body(c, _):
            return c * x, None

        with jax.named_scope("loop"):
            return jax.lax.scan(body, x, length=5)[0].sum()

    origin = find_nonfinite(f, jnp.full(2, 1e20))
    assert (origin.layer, origin.operation, origin.value) == ("loop", "scan", "inf")


def test_does_not_report_the_infinities_of_a_mask():
    def f(scores, mask):
        with jax.named_scope("attention"):
            masked = jnp.where(mask, scores, -jnp.inf)
            return jax.nn.softmax(masked, where=None).sum()

    mask = jnp.asarray([[True, False], [False, False]])
    origin = find_nonfinite(f, jnp.ones((2, 2)), mask)
    assert (origin.layer, origin.operation, origin.value) == ("attention", "sub", "nan")
    assert find_nonfinite(f, jnp.ones((2, 2)), mask.at[1].set(True)) is None


@pytest.mark.parametrize("over", [jax.nn.softmax, jax.nn.logsumexp])
def test_reports_an_overflow_before_a_mask(over):
    def f(q, keep):
        with jax.named_scope("scores"):
            scores = q * 1e30
        with jax.named_scope("attention"):
            return over(jnp.where(keep, scores, -jnp.inf), axis=-1).sum()

    keep = jnp.asarray([[True, True, False]])
    origin = find_nonfinite(f, jnp.full((1, 3), 1e30), keep)
    assert (origin.layer, origin.operation, origin.value) == ("scores", "mul", "inf")


def test_accepts_integers_and_keys_as_arguments():
    def f(x, i, key):
        return (x[i] / jax.random.uniform(key, (), minval=1)).sum()

    args = jnp.asarray([1.0, jnp.nan]), jnp.asarray([0, 1])
    assert str(find_nonfinite(f, *args, jax.random.key(0))) == "x has nan"


def test_numbers_variadic_arguments():
    origin = find_nonfinite(lambda *xs: sum(xs), jnp.ones(2), jnp.asarray([1.0, jnp.nan]))
    assert str(origin) == "xs[1] has nan"
