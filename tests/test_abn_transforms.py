"""In-place norm under JAX's transforms: each result equals the plain one on a single device."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fnet
from fnet import layers

C = 3
# Real examples per device: 3, 0, 4, 1.
UNEVEN = np.array([1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0], bool)
BATCHES = {
    "uneven, empty on one device": (16, UNEVEN),
    "one sample a device": (4, None),
}
ROWS = P("d")
BOTH_MODES = pytest.mark.parametrize("check_vma", [True, False])


def mesh(shape=(4,), names=("d",), axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def arrays(*shape, seed=0):
    """x [*shape], gamma, beta, running mean and variance [C], the loss's weights [*shape]."""
    rng = np.random.default_rng(seed)
    x, weights = rng.normal(size=shape) * 2 + 1, rng.normal(size=shape)
    gamma, beta, mean = rng.normal(size=(3, shape[-1]))
    variance = rng.uniform(0.5, 2, size=shape[-1])
    return [jnp.asarray(a) for a in (x, gamma, beta, mean, variance, weights)]


def norm(x, gamma, beta, mean, variance, mask=None, *, train=True, **options):
    return fnet.abn(
        x, gamma, beta, mean, variance, train=train, mask=mask,
        **({"activation": "elu", "activation_param": 0.7} | options),
    )  # fmt: skip


def loss(x, gamma, beta, mean, variance, weights, mask=None, **options):
    """The loss, and beside it all that the norm returns."""
    out = norm(x, gamma, beta, mean, variance, mask, **options)
    return (out[0] * weights).sum(), out


def with_gradients(f, **options):
    """((loss, aux), gradients of x, gamma and beta) of a loss."""
    return jax.value_and_grad(functools.partial(f, **options), (0, 1, 2), has_aux=True)


def compiled(*functions):
    """All the functions of the same arguments in one program, unoptimised: compiled sooner."""
    return jax.jit(
        lambda *a: tuple(f(*a) for f in functions),
        compiler_options={"xla_backend_optimization_level": 0},
    )


# Global arrays under jit


@pytest.mark.parametrize(
    ("axis_type", "mask", "activation"),
    [
        (AxisType.Auto, None, "elu"),
        (AxisType.Auto, UNEVEN, "elu"),
        (AxisType.Explicit, UNEVEN, "elu"),
        (AxisType.Auto, UNEVEN, "gelu"),
    ],
)
@pytest.mark.usefixtures("float64")
def test_sharded_arrays_under_jit_give_what_one_device_gives(axis_type, mask, activation):
    x, gamma, beta, mean, variance, weights = arrays(16, 2, C)
    f = jax.jit(with_gradients(loss, activation=activation))
    devices = mesh(axis_type=axis_type)
    rows, copies = NamedSharding(devices, P("d")), NamedSharding(devices, P())
    mask = None if mask is None else jnp.asarray(mask)
    sharded = [
        jax.device_put(a, s)
        for a, s in zip(
            (x, gamma, beta, mean, variance, weights, mask),
            (rows, copies, copies, copies, copies, rows, rows),
            strict=True,
        )
    ]
    got = f(*sharded)
    y, dx = got[0][1][0], got[1][0]
    assert y.sharding.is_equivalent_to(rows, y.ndim)
    assert dx.sharding.is_equivalent_to(rows, dx.ndim)
    assert "all-gather" not in f.lower(*sharded).compile().as_text()
    expected = f(x, gamma, beta, mean, variance, weights, mask)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(expected), atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sharded_half_precision_gives_what_one_device_gives(dtype):
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
    """``body(x, gamma, beta, mean, variance, weights, mask)``, rows over the devices."""
    return jax.shard_map(
        body,
        mesh=devices or mesh(),
        in_specs=(rows, P(), P(), P(), P(), rows, P() if mask is None else rows),
        out_specs=out_specs,
        check_vma=check_vma,
    )


@BOTH_MODES
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.usefixtures("float64")
def test_gradients_outside_shard_map_equal_one_devices(batch, train, check_vma):
    n, mask = BATCHES[batch]
    data = *arrays(n, C), None if mask is None else jnp.asarray(mask)

    def body(*a):
        total, out = loss(*a, train=train, axis_name="d")
        return jax.lax.psum(total, "d"), out

    over_devices = mapped(body, check_vma, mask, (P(), (P("d"), P(), P())))
    got, expected = compiled(with_gradients(over_devices), with_gradients(loss, train=train))(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@BOTH_MODES
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.usefixtures("float64")
def test_gradients_inside_shard_map_are_whole_or_one_devices_share(train, check_vma):
    data = *arrays(16, C), jnp.asarray(UNEVEN)

    def body(*a):
        _, (dx, dgamma, dbeta) = with_gradients(loss, train=train, axis_name="d")(*a)
        if not check_vma:
            dgamma, dbeta = jax.lax.psum((dgamma, dbeta), "d")
        return dx, dgamma, dbeta

    inside = mapped(body, check_vma, UNEVEN, (P("d"), P(), P()))
    got, (_, expected) = compiled(inside, with_gradients(loss, train=train))(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_inside_shard_map_that_tracks_devices_a_summed_loss_has_the_same_gradients():
    data = *arrays(16, C), jnp.asarray(UNEVEN)

    def summed(*a):
        return jax.lax.psum(loss(*a, axis_name="d")[0], "d"), None

    inside = mapped(lambda *a: with_gradients(summed)(*a)[1], True, UNEVEN, (P("d"), P(), P()))
    got, (_, expected) = compiled(inside, with_gradients(loss))(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@BOTH_MODES
@pytest.mark.usefixtures("float64")
def test_an_activation_that_is_recomputed_has_one_devices_gradients(check_vma):
    data = *arrays(16, C), jnp.asarray(UNEVEN)

    def body(*a):
        return jax.lax.psum(loss(*a, axis_name="d", activation="gelu")[0], "d"), ()

    over_devices = mapped(body, check_vma, UNEVEN, (P(), ()))
    (_, got), (_, expected) = compiled(
        with_gradients(over_devices), with_gradients(loss, activation="gelu")
    )(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@BOTH_MODES
@pytest.mark.parametrize("axis_name", [("d", "e"), "d"])
@pytest.mark.usefixtures("float64")
def test_parameters_may_be_shared_over_more_axes_than_the_statistics(axis_name, check_vma):
    data = *arrays(16, C), jnp.asarray(UNEVEN)

    def body(*a):
        return jax.lax.psum(loss(*a, axis_name=axis_name)[0], ("d", "e")), ()

    def groups(x, gamma, beta, mean, variance, weights, mask):
        # With "d" alone, statistics are global over the devices of equal "e".
        def of_group(a, e):
            return a.reshape(2, 2, 4, *a.shape[1:])[:, e].reshape(8, *a.shape[1:])

        return sum(
            loss(
                of_group(x, e), gamma, beta, mean, variance, of_group(weights, e), of_group(mask, e)
            )[0]
            for e in range(2)
        ), ()

    rows = P(("d", "e"))
    devices = mesh((2, 2), ("d", "e"))
    over_devices = mapped(body, check_vma, UNEVEN, (P(), ()), devices, rows)
    (_, got), (_, expected) = compiled(
        with_gradients(over_devices), with_gradients(groups if axis_name == "d" else loss)
    )(*data)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@BOTH_MODES
@pytest.mark.usefixtures("float64")
def test_parameters_of_a_devices_own_get_the_gradients_of_the_defining_formula(check_vma):
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
        check_vma=check_vma,
    )
    got, expected = compiled(
        jax.grad(lambda *a: (over_devices(*a) * weights).sum(), (0, 1, 2)),
        jax.grad(formula, (0, 1, 2)),
    )(x, gamma, beta)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@BOTH_MODES
@pytest.mark.usefixtures("float64")
def test_an_input_that_devices_share_gets_the_sum_of_their_gradients(check_vma):
    x, _, _, _, _, weights = arrays(6, C)
    gamma, beta = arrays(4, C, seed=1)[0], arrays(4, C, seed=2)[0]

    def apart(x, gamma, beta):
        return (norm(x, gamma[0], beta[0], None, None)[0] * weights)[None]

    over_devices = jax.shard_map(
        apart,
        mesh=mesh(),
        in_specs=(P(), P("d"), P("d")),
        out_specs=P("d"),
        check_vma=check_vma,
    )

    def one_device(x, gamma, beta):
        return sum(apart(x, gamma[i : i + 1], beta[i : i + 1]).sum() for i in range(4))

    got, expected = compiled(
        jax.grad(lambda *a: over_devices(*a).sum(), (0, 1, 2)), jax.grad(one_device, (0, 1, 2))
    )(x, gamma, beta)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


@BOTH_MODES
@pytest.mark.usefixtures("float64")
def test_second_derivatives_through_shard_map_equal_one_devices(check_vma):
    x, gamma, beta, *rest = *arrays(16, C), jnp.asarray(UNEVEN)
    directions = arrays(16, C, seed=5)[:3]

    def body(*a):
        return jax.lax.psum(loss(*a, axis_name="d")[0], "d")

    over_devices = mapped(body, check_vma, UNEVEN, P())

    def hessian_vector(f):
        gradient = jax.grad(lambda *a: f(*a, *rest), (0, 1, 2))
        return lambda *a: jax.jvp(gradient, a, tuple(directions))[1]

    got, expected = compiled(hessian_vector(over_devices), hessian_vector(lambda *a: loss(*a)[0]))(
        x, gamma, beta
    )
    chex.assert_trees_all_close(got, expected, atol=1e-11)


def matmul():
    """``x @ kernel``, as a layer."""
    return fnet.Layer(
        lambda key: ({"kernel": jax.random.normal(key, (C, C))}, {}),
        lambda params, state, x, *, key=None, train: (x @ params["kernel"], state),
    )


@BOTH_MODES
@pytest.mark.parametrize("activation", ["leaky_relu", "gelu"])
@pytest.mark.usefixtures("float64")
def test_a_recomputed_network_in_shard_map_has_one_devices_gradients(activation, check_vma):
    def network(axis_name):
        def norm():
            return layers.abn(C, activation=activation, axis_name=axis_name)

        return fnet.serial(matmul(), norm(), matmul(), norm())

    params, state = wide(network(None).init(jax.random.key(0)))
    x, _, _, _, _, weights = arrays(16, C)

    def body(params, x, weights):
        y, new_state = fnet.recompute(functools.partial(network("d").apply, train=True))(
            params, state, x
        )
        return jax.lax.psum((y * weights).sum(), "d"), new_state

    def one_device(params, x, weights):
        y, new_state = network(None).apply(params, state, x, train=True)
        return (y * weights).sum(), new_state

    over_devices = jax.shard_map(
        body,
        mesh=mesh(),
        in_specs=(P(), P("d"), P("d")),
        out_specs=(P(), P()),
        check_vma=check_vma,
    )
    got, expected = compiled(
        *(jax.value_and_grad(f, (0, 1), has_aux=True) for f in (over_devices, one_device))
    )(params, x, weights)
    chex.assert_trees_all_close(got, expected, atol=1e-11)


def test_one_sample_over_all_devices_is_refused():
    one_device = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        lambda x: norm(x, None, None, None, None, axis_name="d")[0],
        mesh=one_device,
        in_specs=P("d"),
        out_specs=P("d"),
    )
    with pytest.raises(ValueError, match=r"one sample a channel: x has shape \(1, 3\)"):
        f(jnp.ones((1, C)))


# axis_name under vmap


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("activation", ["elu", "gelu"])
@pytest.mark.usefixtures("float64")
def test_gradients_of_and_within_vmap_equal_one_devices(activation, train):
    *data, weights = arrays(16, C)
    mask = jnp.asarray(UNEVEN)
    options = {"activation": activation, "train": train}
    (_, out), expected = jax.jit(with_gradients(loss, **options))(*data, weights, mask)
    x, *shared = data
    grouped = [a.reshape(4, 4, *a.shape[1:]) for a in (x, weights, mask)]
    axes = (0, None, None, None, None, 0, 0)
    part = functools.partial(loss, axis_name="i", **options)

    def of_vmap(*a):
        parts, outs = jax.vmap(part, axes, axis_name="i")(*a)
        return parts.sum(), outs

    within = jax.vmap(with_gradients(part), axes, axis_name="i")
    ((_, (y, *statistics)), got), (_, (dx, *shares)) = compiled(with_gradients(of_vmap), within)(
        grouped[0], *shared, *grouped[1:]
    )
    chex.assert_trees_all_close(y.reshape(16, C), out[0], atol=1e-12)
    for statistic, one in zip(statistics, out[1:], strict=True):
        chex.assert_trees_all_close(statistic, jnp.stack([one] * 4), atol=1e-12)
    chex.assert_trees_all_close((got[0].reshape(16, C), *got[1:]), expected, atol=1e-12)
    got = dx.reshape(16, C), *(share.sum(0) for share in shares)
    chex.assert_trees_all_close(got, expected, atol=1e-12)


# Networks: export, recomputation, scan


def wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float64), tree)


def small_network():
    """Both forms of the norm: one that keeps its output, one that keeps z."""
    return fnet.serial(
        layers.conv(2, C, bias=False),
        layers.abn(C),
        layers.conv(C, C, bias=False),
        layers.abn(C, activation="gelu", decay=None),
        layers.global_avg_pool(),
        layers.dense(C, 2),
    )


def images(n=4):
    return jnp.asarray(np.random.default_rng(3).normal(size=(n, 5, 5, 2)))


@pytest.mark.parametrize("batch", ["6", "n"])
@pytest.mark.parametrize("serialised", [False, True])
def test_an_exported_network_evaluates_as_the_network_itself(batch, serialised):
    if serialised:
        pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    network = small_network()
    params, state = network.init(jax.random.key(0))
    state["1"]["running_mean"] = jnp.arange(C) / 10
    state["3"]["running_var"] = jnp.arange(C) + 0.5
    evaluate = jax.jit(lambda *a: network.apply(*a, train=False)[0])
    shape = jax.export.symbolic_shape(f"{batch}, 5, 5, 2")
    exported = jax.export.export(evaluate)(params, state, jax.ShapeDtypeStruct(shape, jnp.float32))
    if serialised:
        exported = jax.export.deserialize(exported.serialize())
    for x in (images(6),) if batch == "6" else (images(6), images(1)):
        chex.assert_trees_all_close(
            exported.call(params, state, x), evaluate(params, state, x), atol=1e-6
        )


def test_training_with_a_symbolic_batch_is_exported():
    f = jax.jit(lambda x: norm(x, None, None, jnp.zeros(C), jnp.ones(C)))
    shape = jax.export.symbolic_shape(f"n, {C}")
    exported = jax.export.export(f)(jax.ShapeDtypeStruct(shape, jnp.float32))
    x = arrays(6, C)[0].astype(jnp.float32)
    chex.assert_trees_all_close(exported.call(x), f(x), atol=1e-6)


def training_loss(apply):
    """((loss, new state), gradients of params and x) of a network's ``apply``."""

    def f(params, x, state):
        y, new_state = apply(params, state, x, train=True)
        return jnp.square(y).sum(), new_state

    return jax.value_and_grad(f, (0, 1), has_aux=True)


@pytest.mark.parametrize("remember", [jax.checkpoint, fnet.recompute])
@pytest.mark.usefixtures("float64")
def test_recomputation_changes_neither_gradients_nor_the_one_update_of_the_state(remember):
    network = small_network()
    params, state = wide(network.init(jax.random.key(0)))
    x = images()

    def remembering(params, state, x, *, train):
        return remember(functools.partial(network.apply, train=train))(params, state, x)

    def mean_after_one_update(params, x, state):
        y, _ = layers.conv(2, C, bias=False).apply(params["0"], {}, x, train=True)
        return 0.9 * state["1"]["running_mean"] + 0.1 * y.mean((0, 1, 2))

    got, expected, mean = compiled(
        training_loss(remembering), training_loss(network.apply), mean_after_one_update
    )(params, x, state)
    chex.assert_trees_all_close(got, expected, atol=1e-11)
    (_, new_state), _ = got
    chex.assert_trees_all_close(new_state["1"]["running_mean"], mean, atol=1e-11)
    assert float(new_state["3"]["count"]) == 1


@pytest.mark.parametrize("remember", [lambda f: f, fnet.recompute], ids=["kept", "recomputed"])
@pytest.mark.parametrize("activation", ["leaky_relu", "gelu"])
@pytest.mark.usefixtures("float64")
def test_a_scan_over_layers_has_the_gradients_and_state_of_the_unrolled_ones(activation, remember):
    block = fnet.serial(layers.dense(C, C, bias=False), layers.abn(C, activation=activation))
    scanned = fnet.repeat(block, 3)
    params, state = wide(scanned.init(jax.random.key(0)))
    x = arrays(6, C)[0]

    def unrolled(params, state, x, *, train):
        states = []
        for i in range(3):
            p, s = jax.tree.map(lambda a, i=i: a[i], (params, state))
            x, s = block.apply(p, s, x, train=train)
            states.append(s)
        return x, jax.tree.map(lambda *s: jnp.stack(s), *states)

    def applied(params, state, x, *, train):
        return remember(functools.partial(scanned.apply, train=train))(params, state, x)

    got, expected = compiled(training_loss(applied), training_loss(unrolled))(params, x, state)
    chex.assert_trees_all_close(got, expected, atol=1e-11)


# Forward mode


@pytest.mark.parametrize("train", [True, False])
def test_forward_mode_over_the_norm_is_refused_by_jax(train):
    x, gamma, beta, mean, variance, _ = arrays(6, C)
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp"):
        jax.jvp(lambda x: norm(x, gamma, beta, mean, variance, train=train), (x,), (x,))


@pytest.mark.parametrize(
    ("activation", "train"),
    [("elu", True), ("elu", False), ("softplus", True), ("gelu", True)],
)
@pytest.mark.usefixtures("float64")
def test_forward_over_reverse_equals_reverse_over_reverse(activation, train):
    x, gamma, beta, *rest = arrays(6, C)
    directions = tuple(arrays(6, C, seed=5)[:3])
    gradient = jax.grad(
        lambda *a: loss(*a, *rest, activation=activation, train=train)[0], (0, 1, 2)
    )

    def along(*a):
        return sum((g * d).sum() for g, d in zip(gradient(*a), directions, strict=True))

    def difference(*a):
        step = 1e-5
        ahead, behind = (
            gradient(*(p + s * d for p, d in zip(a, directions, strict=True)))
            for s in (step, -step)
        )
        return jax.tree.map(lambda p, q: (p - q) / (2 * step), ahead, behind)

    forward, reverse, differences = compiled(
        lambda *a: jax.jvp(gradient, a, directions)[1], jax.grad(along, (0, 1, 2)), difference
    )(x, gamma, beta)
    chex.assert_trees_all_close(forward, reverse, atol=1e-11)
    chex.assert_trees_all_close(forward, differences, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"), [(layers.dense(C, 2), (4, C)), (layers.conv(C, 2), (2, 4, 4, C))]
)
@pytest.mark.usefixtures("float64")
def test_forward_mode_over_linear_layers_is_their_derivative(layer, shape):
    params = wide(layer.init(jax.random.key(0))[0])
    x, _, _, _, _, dx = arrays(*shape)
    dparams = jax.tree.map(jnp.cos, params)

    def f(params, x):
        return layer.apply(params, {}, x, train=True)[0]

    def shifted(params, x, sign):
        return f(jax.tree.map(lambda a, d: a + sign * d, params, dparams), x + sign * dx)

    # Central differences are exact for what is bilinear.
    tangent, of_x, of_params, expected = compiled(
        lambda p, x: jax.jvp(f, (p, x), (dparams, dx))[1],
        lambda p, x: jax.jvp(lambda x: f(p, x), (x,), (dx,))[1],
        lambda p, x: jax.jvp(lambda p: f(p, x), (p,), (dparams,))[1],
        lambda p, x: (shifted(p, x, 1) - shifted(p, x, -1)) / 2,
    )(params, x)
    chex.assert_trees_all_close(tangent, expected, atol=1e-12)
    chex.assert_trees_all_close(of_x + of_params, tangent, atol=1e-12)
