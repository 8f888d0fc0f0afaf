"""In-place batch norm on several devices: results match a single device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abn_cases import C, arrays, compiled, loss, norm, with_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers

# Real examples per device: 3, 0, 4, 1.
UNEVEN = np.array([1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0], bool)
ROWS = P("d")


def mesh(shape=(4,), names=("d",), axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


@pytest.mark.parametrize(
    ("axis_type", "activation"), [(AxisType.Auto, "elu"), (AxisType.Explicit, "gelu")]
)
@pytest.mark.usefixtures("float64")
def test_sharded_arrays_under_jit_match_one_device(axis_type, activation):
    x, gamma, beta, mean, variance, weights = arrays(16, 2, C)
    f = jax.jit(with_gradients(loss, activation=activation))
    devices = mesh(axis_type=axis_type)
    rows, copies = NamedSharding(devices, P("d")), NamedSharding(devices, P())
    mask = jnp.asarray(UNEVEN)
    shardings = (rows, copies, copies, copies, copies, rows, rows)
    sharded = list(map(jax.device_put, (x, gamma, beta, mean, variance, weights, mask), shardings))
    got = f(*sharded)
    y, dx = got[0][1][0], got[1][0]
    assert y.sharding.is_equivalent_to(rows, y.ndim)
    assert dx.sharding.is_equivalent_to(rows, dx.ndim)
    assert "all-gather" not in f.lower(*sharded).compile().as_text()
    expected = f(x, gamma, beta, mean, variance, weights, mask)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(expected), atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sharded_16_bit_arrays_match_one_device(dtype):
    x, gamma, beta, mean, variance, weights = arrays(16, 2, C)
    x, weights = x.astype(dtype), weights.astype(dtype)
    f = jax.jit(with_gradients(loss))
    (_, expected), expected_grads = f(x, gamma, beta, mean, variance, weights)
    rows = NamedSharding(mesh(), P("d"))
    (_, got), grads = f(
        jax.device_put(x, rows), gamma, beta, mean, variance, jax.device_put(weights, rows)
    )
    chex.assert_type([got[0], got[1], grads[0], grads[1]], [dtype, jnp.float32] * 2)
    step = float(jnp.finfo(dtype).eps)
    for a, b in ((got[0], expected[0]), (grads[0], expected_grads[0])):
        chex.assert_trees_all_close(np.float32(a), np.float32(b), rtol=step, atol=step)
    chex.assert_trees_all_close(got[1:], expected[1:], rtol=1e-6)
    chex.assert_trees_all_close(grads[1:], expected_grads[1:], rtol=1e-4, atol=1e-5)


# axis_name under shard_map


def mapped(body, check_vma, mask, out_specs, devices=None, rows=ROWS):
    """``body(x, gamma, beta, mean, variance, weights, mask)`` with rows sharded over devices."""
    return jax.shard_map(
        body,
        mesh=devices or mesh(),
        in_specs=(rows, P(), P(), P(), P(), rows, P() if mask is None else rows),
        out_specs=out_specs,
        check_vma=check_vma,
    )


@pytest.mark.parametrize(
    ("n", "mask", "options", "check_vma"),
    [
        (4, None, {"train": True}, False),
        (16, UNEVEN, {"train": False}, True),
        (16, UNEVEN, {"activation": "gelu"}, True),
    ],
)
@pytest.mark.usefixtures("float64")
def test_gradients_outside_shard_map_match_one_device(n, mask, options, check_vma):
    data = *arrays(n, C), None if mask is None else jnp.asarray(mask)

    def body(*a):
        total, out = loss(*a, axis_name="d", **options)
        return jax.lax.psum(total, "d"), out

    over_devices = mapped(body, check_vma, mask, (P(), (P("d"), P(), P())))
    got, expected = compiled(with_gradients(over_devices), with_gradients(loss, **options))(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@pytest.mark.parametrize(("train", "check_vma"), [(True, True), (False, False)])
@pytest.mark.usefixtures("float64")
def test_gradients_inside_shard_map_are_complete_or_per_device(train, check_vma):
    data = *arrays(16, C), jnp.asarray(UNEVEN)

    def body(*a):
        _, (dx, dgamma, dbeta) = with_gradients(loss, train=train, axis_name="d")(*a)
        if not check_vma:
            dgamma, dbeta = jax.lax.psum((dgamma, dbeta), "d")
        return dx, dgamma, dbeta

    inside = mapped(body, check_vma, UNEVEN, (P("d"), P(), P()))
    got, (_, expected) = compiled(inside, with_gradients(loss, train=train))(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@pytest.mark.parametrize("axis_name", [("d", "e"), "d"])
@pytest.mark.usefixtures("float64")
def test_parameters_may_be_replicated_over_more_axes_than_the_statistics(axis_name):
    data = *arrays(16, C), jnp.asarray(UNEVEN)

    def body(*a):
        return jax.lax.psum(loss(*a, axis_name=axis_name)[0], ("d", "e")), ()

    def groups(x, *rest):
        # With axis_name "d", statistics are shared by devices of equal "e".
        def select(e, *arrays):
            return (a.reshape(2, 2, 4, *a.shape[1:])[:, e].reshape(8, *a.shape[1:]) for a in arrays)

        *shared, weights, mask = rest
        return sum(loss(*select(e, x), *shared, *select(e, weights, mask))[0] for e in range(2)), ()

    rows = P(("d", "e"))
    devices = mesh((2, 2), ("d", "e"))
    over_devices = mapped(body, True, UNEVEN, (P(), ()), devices, rows)
    (_, got), (_, expected) = compiled(
        with_gradients(over_devices), with_gradients(groups if axis_name == "d" else loss)
    )(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_gradients_of_per_device_parameters_match_the_formula():
    x, _, _, _, _, weights = arrays(16, C)
    gamma, beta = arrays(4, C, seed=1)[0], arrays(4, C, seed=2)[0]

    def formula(x, gamma, beta):
        z = (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)
        g = jnp.repeat(jnp.abs(gamma) + 1e-5, 4, axis=0)
        return (jax.nn.elu(z * g + jnp.repeat(beta, 4, axis=0), 0.7) * weights).sum()

    over_devices = jax.shard_map(
        lambda x, gamma, beta: norm(x, gamma[0], beta[0], None, None, axis_name="d")[0],
        mesh=mesh(),
        in_specs=P("d"),
        out_specs=P("d"),
    )
    got, expected = compiled(
        jax.grad(lambda *a: (over_devices(*a) * weights).sum(), (0, 1, 2)),
        jax.grad(formula, (0, 1, 2)),
    )(x, gamma, beta)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_replicated_input_gets_the_sum_of_the_devices_gradients():
    x, _, _, _, _, weights = arrays(6, C)
    gamma, beta = arrays(4, C, seed=1)[0], arrays(4, C, seed=2)[0]

    def apart(x, gamma, beta):
        return (norm(x, gamma[0], beta[0], None, None)[0] * weights)[None]

    over_devices = jax.shard_map(
        apart, mesh=mesh(), in_specs=(P(), P("d"), P("d")), out_specs=P("d")
    )

    def one_device(x, gamma, beta):
        return sum(apart(x, gamma[i : i + 1], beta[i : i + 1]).sum() for i in range(4))

    got, expected = compiled(
        jax.grad(lambda *a: over_devices(*a).sum(), (0, 1, 2)), jax.grad(one_device, (0, 1, 2))
    )(x, gamma, beta)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_second_derivatives_through_shard_map_match_one_device():
    x, gamma, beta, *rest = *arrays(16, C), jnp.asarray(UNEVEN)
    directions = arrays(16, C, seed=5)[:3]

    def body(*a):
        return jax.lax.psum(loss(*a, axis_name="d")[0], "d")

    over_devices = mapped(body, True, UNEVEN, P())

    def hessian_vector(f):
        gradient = jax.grad(lambda *a: f(*a, *rest), (0, 1, 2))
        return lambda *a: jax.jvp(gradient, a, tuple(directions))[1]

    got, expected = compiled(hessian_vector(over_devices), hessian_vector(lambda *a: loss(*a)[0]))(
        x, gamma, beta
    )
    chex.assert_trees_all_close(got, expected, atol=1e-11)


@pytest.mark.parametrize("norm_layer", [layers.abn, layers.batch_norm])
def test_evaluation_needs_no_axis_name(norm_layer):
    params, state = norm_layer(C).init(jax.random.key(0))
    x = jnp.linspace(-1, 2, 4 * C).reshape(4, C)
    evaluated = [
        norm_layer(C, axis_name=axis).apply(params, state, x, train=False) for axis in ("d", None)
    ]
    chex.assert_trees_all_equal(*evaluated)


def test_rejects_one_sample_over_all_devices():
    one_device = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        lambda x: norm(x, None, None, None, None, axis_name="d")[0],
        mesh=one_device,
        in_specs=P("d"),
        out_specs=P("d"),
    )
    with pytest.raises(ValueError, match=r"one sample per channel .*: x has shape \(1, 3\)"):
        f(jnp.ones((1, C)))


# axis_name under vmap


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.usefixtures("float64")
def test_gradients_inside_and_outside_vmap_match_one_device(train):
    *data, weights = arrays(16, C)
    mask = jnp.asarray(UNEVEN)
    options = {"activation": "elu", "train": train}
    (_, out), expected = jax.jit(with_gradients(loss, **options))(*data, weights, mask)
    x, *shared = data
    grouped = [a.reshape(4, 4, *a.shape[1:]) for a in (x, weights, mask)]
    axes = (0, None, None, None, None, 0, 0)
    part = functools.partial(loss, axis_name="i", **options)

    def mapped_loss(*a):
        parts, outs = jax.vmap(part, axes, axis_name="i")(*a)
        return parts.sum(), outs

    within = jax.vmap(with_gradients(part), axes, axis_name="i")
    ((_, (y, *statistics)), got), (_, (dx, *shares)) = compiled(
        with_gradients(mapped_loss), within
    )(grouped[0], *shared, *grouped[1:])
    chex.assert_trees_all_close(y.reshape(16, C), out[0], atol=1e-12)
    for statistic, one in zip(statistics, out[1:], strict=True):
        chex.assert_trees_all_close(statistic, jnp.stack([one] * 4), atol=1e-12)
    chex.assert_trees_all_close((got[0].reshape(16, C), *got[1:]), expected, atol=1e-12)
    got = dx.reshape(16, C), *(share.sum(0) for share in shares)
    chex.assert_trees_all_close(got, expected, atol=1e-12)
