import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fnet
from fnet import layers, measured, models
from fnet.cpu.convolutions import for_cpus, for_loops
from fnet.cpu.tracing import traced_for
from fnet.jaxpr import find_equations
from fnet.layers.pooling import global_max_pool
from fnet.memory.regions import cut

# images, channels in and out, padding, dilation: odd sizes, uneven padding, holes.
SHAPES = {
    "dilated": ((4, 8, 11), 3, 5, ((2, 2), (3, 3)), (2, 3)),
    "same": ((4, 7, 8), 3, 5, "SAME", (1, 1)),
    "uneven": ((6, 5, 6), 4, 4, ((2, 0), (0, 1)), (1, 1)),
}


@pytest.fixture
def any_size(monkeypatch):
    """Replaces convolutions of any size, so that tests can be small."""
    monkeypatch.setattr(measured, "LEAST_SAVING", 0)
    monkeypatch.setattr(measured, "LEAST_MULTIPLICATIONS", 0)


def convolution(x, kernel, padding="SAME", dilation=(1, 1), **options):
    numbers = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NLC", "LIO", "NLC")
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        **({"window_strides": (1, 1), "padding": padding, "rhs_dilation": dilation} | options),
        dimension_numbers=numbers,
    )


def with_gradients(conv):
    """Output and both gradients."""

    def f(x, kernel, cotangent):
        y, pull = jax.vjp(conv, x, kernel)
        return y, *pull(cotangent)

    return f


def all_three(padding, dilation):
    return with_gradients(lambda x, k: convolution(x, k, padding, dilation))


def assert_matches_float64(f, fast, args):
    with jax.enable_x64(True):
        expected = jax.jit(f)(*(np.float64(a) for a in args))
    for got, exact in zip(jax.jit(fast)(*args), expected, strict=True):
        assert np.asarray(exact).dtype == np.float64
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def arrays(images, n_in, n_out, padding, dilation):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*images, n_in)).astype(np.float32)
    kernel = (rng.normal(size=(3, 3, n_in, n_out)) / np.sqrt(9 * n_in)).astype(np.float32)
    y = jax.eval_shape(lambda: convolution(x, kernel, padding, dilation))
    return x, kernel, rng.normal(size=y.shape).astype(np.float32)


def convolutions_left(f, *args):
    return len(list(find_equations(jax.make_jaxpr(f)(*args), "conv_general_dilated")))


@pytest.mark.parametrize("shape", ["dilated", "uneven"])
def test_outputs_and_gradients_match_float64(shape, any_size):
    args = arrays(*SHAPES[shape])
    f = all_three(*SHAPES[shape][3:])
    assert convolutions_left(f, *args) == 3
    assert convolutions_left(for_cpus(f), *args) == 0
    with jax.enable_x64(True):
        expected = jax.jit(f)(*(np.float64(a) for a in args))
    for got, exact in zip(jax.jit(for_cpus(f))(*args), expected, strict=True):
        got, exact = np.asarray(got), np.asarray(exact)
        assert got.shape == exact.shape
        assert exact.dtype == np.float64
        assert np.abs(got - exact).max() < 3e-6 * np.abs(exact).max()


def test_only_equal_convolutions_share_a_program(any_size):
    def f(x, kernel):
        return [convolution(x, kernel, ((low, 2 - low), (1, 1))) for low in (2, 0, 2)]

    x, kernel, _ = arrays(*SHAPES["same"])
    assert_matches_float64(f, for_cpus(f), (x, kernel))
    calls = jax.make_jaxpr(for_cpus(f))(x, kernel).eqns
    assert [c.params["jaxpr"] is calls[0].params["jaxpr"] for c in calls] == [True, False, True]


def test_kernels_that_reach_beyond_the_images_match_float64(monkeypatch):
    monkeypatch.setattr(measured, "LEAST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(measured, "LEAST_SAVING", np.inf)  # not Winograd's algorithm
    padding, dilation = ((5, 4), (9, 8)), (5, 8)
    args = arrays((3, 7, 6), 4, 5, padding, dilation)
    f = all_three(padding, dilation)
    assert convolutions_left(for_cpus(f), *args) == 0
    assert_matches_float64(f, for_cpus(f), args)


@pytest.mark.parametrize(
    ("size", "kernel", "strides", "left"),
    [
        ((2, 2), (3, 3), (1, 1), 1),
        ((4, 3), (3, 3), (2, 2), 2),
        ((5, 4), (5, 3), (2, 3), 2),
        ((5, 4), (1, 1), (1, 1), 2),  # the gradient by a 1x1 kernel is one product
        ((9, 8), (1, 1), (2, 3), 2),
    ],
)
def test_one_product_per_element_of_the_kernel_matches_float64(size, kernel, strides, left):
    rng = np.random.default_rng(0)

    def conv(x, kernel):
        return convolution(x, kernel, "SAME", window_strides=strides)

    f = with_gradients(conv)
    x = rng.normal(size=(3, *size, 4)).astype(np.float32)
    weights = rng.normal(size=(*kernel, 4, 5)).astype(np.float32)
    args = x, weights, rng.normal(size=conv(x, weights).shape).astype(np.float32)
    assert convolutions_left(for_cpus(f), *args) == left
    assert_matches_float64(f, for_cpus(f), args)


# images, channels, groups, kernel, strides, padding, dilation.
GROUPED = {
    "depthwise": ((3, 6, 5), 4, 4, (3, 3), (1, 1), "SAME", (1, 1)),
    "depthwise, large kernel": ((2, 5, 6), 3, 3, (7, 5), (1, 1), "SAME", (1, 1)),
    "depthwise, strided": ((2, 8, 7), 4, 4, (3, 3), (2, 3), "SAME", (1, 1)),
    "depthwise, cropped by its stride": ((2, 8, 8), 4, 4, (2, 2), (3, 3), "VALID", (1, 1)),
    "depthwise, dilated": ((2, 9, 8), 2, 2, (3, 2), (1, 1), ((1, 2), (3, 0)), (2, 3)),
    "depthwise, sequences": ((3, 9), 4, 4, (4,), (1,), ((3, 0),), (1,)),
    "grouped, sequences": ((3, 9), 4, 2, (4,), (2,), "SAME", (1,)),
    "grouped": ((3, 6, 5), 8, 2, (3, 3), (1, 1), "SAME", (1, 1)),
    "grouped, in two blocks": ((3, 6, 5), 48, 6, (3, 3), (1, 1), "SAME", (1, 1)),
    "grouped, wider than a block": ((2, 5, 4), 80, 2, (3, 3), (1, 1), "SAME", (1, 1)),
    "grouped, strided and dilated": ((2, 9, 8), 6, 3, (3, 2), (2, 1), "SAME", (1, 2)),
}


def test_depthwise_convolutions_of_bfloat16_are_summed_in_float32():
    kernel = jnp.ones((8, 8, 1, 4), jnp.bfloat16)
    x = jnp.full((2, 12, 12, 4), 1 + 2**-7, jnp.bfloat16)

    def gradient(kernel):
        options = {"feature_group_count": 4}
        return jax.grad(lambda k: convolution(x, k, "VALID", **options).sum())(kernel)

    for f, exact in (
        (lambda k: convolution(x, k, "VALID", feature_group_count=4), 64.5),
        (gradient, 50.390625),
    ):
        assert convolutions_left(for_cpus(f), kernel) == 0
        y = jax.jit(for_cpus(f))(kernel)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(y, jnp.bfloat16(exact))


@pytest.mark.parametrize(
    ("case", "one_device"),
    [*((case, True) for case in GROUPED), ("depthwise", False), ("grouped", False)],
)
def test_grouped_convolutions_match_float64(case, one_device, monkeypatch):
    monkeypatch.setattr(measured, "LEAST_MULTIPLICATIONS", 0)
    images, channels, groups, size, strides, padding, dilation = GROUPED[case]
    rng = np.random.default_rng(0)

    def conv(x, kernel):
        options = {"window_strides": strides, "feature_group_count": groups}
        return convolution(x, kernel, padding, dilation, **options)

    f = with_gradients(conv)
    x = rng.normal(size=(*images, channels)).astype(np.float32)
    kernel = rng.normal(size=(*size, channels // groups, channels)).astype(np.float32)
    cotangent = rng.normal(size=jax.eval_shape(conv, x, kernel).shape).astype(np.float32)
    args = x, kernel, cotangent
    fast = for_cpus(f, 1 if one_device else 4)
    # The gradient by a depthwise kernel runs over images, which several devices may share.
    left = (not one_device) if groups == channels else 3
    assert convolutions_left(fast, *args) == left
    assert_matches_float64(f, fast, args)


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({"window_strides": (2, 2)}, "float32"),
        ({"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}, "float32"),
        ({"padding": ((-1, 1), (1, 1))}, "float32"),
        ({"precision": "highest"}, "float32"),
        ({}, "bfloat16"),
    ],
)
def test_leaves_other_convolutions_alone(change, dtype):
    groups = change.get("feature_group_count", 1)
    x, kernel = jnp.ones((8, 16, 16, 64), dtype), jnp.ones((3, 3, 64 // groups, 64), dtype)

    def f(x, kernel):
        return convolution(x, kernel, **change)

    assert convolutions_left(for_cpus(f), x, kernel) == 1


@pytest.mark.parametrize(
    ("images", "n_in", "n_out", "left"),
    [
        ((64, 15, 15), 128, 128, 0),
        ((64, 3, 3), 512, 512, 3),  # the kernel is larger than the images
        ((64, 32, 32), 8, 64, 3),  # transforms cost more than products
        ((1, 64, 64), 64, 64, 3),  # nothing to run over
        ((2, 4, 4), 16, 16, 3),  # tiny
        ((8, 16, 16), 512, 512, 1),  # sums of the gradient by the kernel are large
    ],
)
def test_replaces_convolutions_that_are_estimated_to_be_faster(images, n_in, n_out, left):
    sizes = (*images, n_in), (3, 3, n_in, n_out), (*images, n_out)
    shapes = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    assert convolutions_left(for_cpus(all_three("SAME", (1, 1))), *shapes) == left


def step_of(model, size, batch=16):
    def loss(params, model_state, batch, key):
        logits, model_state = model.apply(params, model_state, batch["x"], train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses, fnet.Aux(model_state, {})

    optimizer = optax.sgd(0.1)
    state = jax.eval_shape(lambda: fnet.TrainState.create(model, optimizer, jax.random.key(0)))
    batch = {"x": jnp.zeros((batch, *size)), "y": jnp.zeros(batch, jnp.int32)}
    return fnet.make_step(loss, optimizer), state, jax.eval_shape(lambda: batch)


@pytest.mark.slow
def test_a_step_for_one_cpu_takes_little_more_memory_than_with_convolutions():
    model = models.get("resnet9", num_classes=10, widths=(64, 128, 128))
    step, state, batch = step_of(model, (32, 32, 3))
    options = fnet.memory.CANDIDATE_OPTIONS["cpu"][1]
    plain, fast = (
        fnet.memory.peak(low.compile(compiler_options=options)).total
        for low in (step.jitted.lower(state, batch), step.lower(state, batch))
    )
    assert fast <= 1.2 * plain  # 1.15, with the workspaces of both


def test_a_step_for_several_devices_keeps_its_convolutions():
    model = fnet.serial(conv=layers.conv(64, 64), pool=global_max_pool())
    step, state, batch = step_of(model, (16, 16, 64))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], []))

    def on(at, tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), tree)

    for arguments, left in (((on(whole, state), on(rows, batch)), 2), ((state, batch), 0)):
        jaxpr = step.trace(*arguments).jaxpr
        assert len(list(find_equations(jaxpr, "conv_general_dilated"))) == left


def test_a_scan_of_rematerialized_layers_computes_the_same(any_size):
    layer = fnet.repeat(layers.conv(4, 4), 2)
    params, state = jax.jit(layer.init)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 4))

    def loss(params):
        y, _ = jax.checkpoint(lambda p: layer.apply(p, state, x, train=True))(params)
        return (y**2).mean()

    gradient = jax.grad(loss)
    assert convolutions_left(gradient, params) == 4
    assert convolutions_left(for_cpus(gradient), params) == 0
    plain, fast = jax.jit(gradient)(params), jax.jit(for_cpus(gradient))(params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(fast), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max(), rtol=1e-4)


FAST = jax.lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


def layouts(jaxpr):
    found = find_equations(jaxpr, "conv_general_dilated")
    return {e.params["dimension_numbers"] for e in found}


@pytest.mark.parametrize(
    "options",
    [{}, {"window_strides": (2, 1)}, {"lhs_dilation": (1, 2)}, {"feature_group_count": 2}],
    ids=str,
)
def test_convolutions_of_loops_differ_in_their_layout_alone(options):
    def conv(x, kernel):
        return convolution(x, kernel, [(1, 0), (2, 1)], (2, 1), **options)

    f = with_gradients(conv)
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(3, 9, 8, 4)), rng.normal(size=(3, 2, 4, 6))
    kernel = kernel[:, :, : 4 // options.get("feature_group_count", 1)]
    y = jax.eval_shape(conv, x, kernel)
    args = [np.float32(a) for a in (x, kernel, rng.normal(size=y.shape))]
    changed, plain = (layouts(jax.make_jaxpr(f)(*args)) for f in (for_loops(f), f))
    assert changed == {FAST} != plain
    assert_matches_float64(f, for_loops(f), args)


def chunks(loss, params, x):
    return jax.grad(cut(lambda p, x: loss(p, x).mean(), 4))(params, x)


def microbatches(loss, params, x):
    def per_example(p, state, batch, key):
        return loss(p, batch["x"]), fnet.Aux(state, {})

    return fnet.accumulate_grad(per_example, 4)(params, {}, {"x": x}, None)[0]


def jacobian_rows(loss, params, x):
    return fnet.jacobian(lambda p: loss(p, x), mode="reverse", width=2)(params).mean(0)


@pytest.mark.parametrize("derivative", [chunks, microbatches, jacobian_rows])
def test_loops_have_the_layout_that_is_fast_on_a_cpu(derivative):
    def loss(kernel, x):
        y = jnp.tanh(convolution(convolution(x, kernel), kernel))
        return jnp.square(y).mean((1, 2, 3))

    rng = np.random.default_rng(0)
    args = [np.float32(rng.normal(size=s)) for s in ((3, 3, 4, 4), (8, 6, 6, 4))]

    def in_loops(platform):
        with traced_for(jax.sharding.AbstractDevice("", None, platform)):
            jaxpr = jax.make_jaxpr(lambda *args: derivative(loss, *args))(*args)
        return set().union(*(layouts(e.params["jaxpr"]) for e in find_equations(jaxpr, "scan")))

    assert in_loops("cpu") == {FAST}
    assert in_loops("gpu") - {FAST}, "as they are"
    expected = jax.grad(lambda p: loss(p, args[1]).mean())(args[0])
    np.testing.assert_allclose(derivative(loss, *args), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["shard_map", "x64", "disable_jit"])
def test_loops_keep_what_a_loss_does_around_its_convolutions(way):
    def mean(kernel, x):
        return jnp.square(convolution(jnp.tanh(convolution(x, kernel)), kernel)).mean()

    def over_devices(kernel, x):
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        part = jax.shard_map(
            lambda *args: jax.lax.pmean(mean(*args), "d"),
            mesh=mesh, in_specs=(P(), P("d")), out_specs=P(),
        )  # fmt: skip
        return part(kernel, x)

    def in_float64(kernel, x):
        with jax.enable_x64(True):
            return mean(kernel.astype("float64"), x.astype("float64")).astype("float32")

    loss = {"shard_map": over_devices, "x64": in_float64}.get(way, mean)
    rng = np.random.default_rng(0)
    args = [np.float32(rng.normal(size=s)) for s in ((3, 3, 4, 4), (8, 6, 6, 4))]
    with jax.disable_jit(way == "disable_jit"):
        got = microbatches(lambda k, x: jnp.broadcast_to(loss(k, x), x.shape[:1]), *args)
    np.testing.assert_allclose(got, jax.grad(mean)(*args), rtol=1e-4, atol=1e-6)
