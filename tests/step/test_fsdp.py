"""FSDP: gathers where parameters are used, gradients that are sharded where they are computed."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fnet
from fnet import autodiff, layers, memory
from fnet.fsdp import gather_at_use, shard_state
from fnet.jaxpr import find_equations
from fnet.memory.peak import compile_min_memory

WIDTH, ROWS = 16, 16


def mesh_of(data, fsdp):
    axes = ("data", "fsdp")
    return jax.make_mesh((data, fsdp), axes, axis_types=(AxisType.Auto,) * 2)


def sharding_of(mesh, shape, scanned=False):
    """Shard the last axis that the devices divide, of arrays of two axes or more."""
    size, spec = mesh.shape["fsdp"], [None] * len(shape)
    for axis in range(len(shape) - 1, int(scanned) - 1, -1):
        if len(shape) > 1 and shape[axis] % size == 0 and size > 1:
            spec[axis] = "fsdp"
            break
    return NamedSharding(mesh, PartitionSpec(*spec))


def normal(key, *shape):
    return jax.random.normal(jax.random.key(key), shape) / np.sqrt(shape[-2])


# Losses (params, batch) -> losses, and parameters.


def unrolled(params, batch):
    x = batch["x"]
    for w, b in zip(params["w"], params["b"], strict=True):
        x = jnp.tanh(x @ w + b[None])
    return jnp.square(x).sum(-1)


def scanned(params, batch):
    x, _ = jax.lax.scan(
        lambda x, p: (jnp.tanh(x @ p["w"] + p["b"][None]), None), batch["x"], params
    )
    return jnp.square(x).sum(-1)


def checkpointed(params, batch):
    x, _ = jax.lax.scan(
        jax.checkpoint(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"][None]), None)), batch["x"], params
    )
    return jnp.square(x).sum(-1)


def tied(params, batch):
    x = params["table"][batch["token"]]
    logits = jnp.tanh(x @ params["w"]) @ params["table"].T
    return fnet.losses.cross_entropy(logits, batch["token"])


def cast(params, batch):
    x = batch["x"].astype(jnp.bfloat16)
    for w in params["w"]:
        x = jnp.tanh(x @ w.astype(jnp.bfloat16))
    return jnp.square(x.astype(jnp.float32)).sum(-1)


def recurrent(params, batch):
    def step(h, x):
        return jnp.tanh(x[:, None] * params["in"] + h @ params["w"]), None

    h, _ = jax.lax.scan(step, jnp.zeros((len(batch["x"]), WIDTH)), batch["x"].T)
    return jnp.square(h @ params["out"]).sum(-1)


def branches(params, batch):
    x = jax.lax.cond(
        batch["x"].sum() > 0, lambda x: x @ params["w"][0], lambda x: x @ params["w"][1], batch["x"]
    )
    return jnp.square(jax.jit(lambda x: x @ params["w"][2])(x)).sum(-1)


def alone(params, batch):
    w = params["w"][0] * jax.nn.sigmoid(params["w"][1]) + params["w"][2].T
    return jnp.square(batch["x"] @ w).sum(-1) + 0.1 * jnp.square(params["w"][0]).sum()


def by_devices(params, batch):
    """A part that is written for one device's rows."""
    mesh = mesh_of(2, 2)
    rows = PartitionSpec(("data", "fsdp"))
    specs = {"in_specs": (rows, PartitionSpec()), "out_specs": rows}
    product = jax.shard_map(jnp.matmul, mesh=mesh, **specs)
    return jnp.square(product(batch["x"], params["w"][0])).sum(-1)


def matrices(n):
    return {"w": [normal(i, WIDTH, WIDTH) for i in range(n)]}


STACK = {"w": normal(0, 3, WIDTH, WIDTH), "b": normal(1, 3, WIDTH)}
LOSSES = {
    unrolled: matrices(3) | {"b": [jnp.ones(WIDTH)] * 3},
    scanned: STACK,
    checkpointed: STACK,
    tied: {"table": normal(0, 32, WIDTH), "w": normal(1, WIDTH, WIDTH)},
    cast: matrices(2),
    recurrent: {
        "in": normal(2, 1, WIDTH),
        "w": normal(0, WIDTH, WIDTH),
        "out": normal(1, WIDTH, 8),
    },
    branches: matrices(3),
    alone: matrices(3),
}


def batch_of(rows=ROWS):
    return {
        "x": jax.random.normal(jax.random.key(7), (rows, WIDTH)),
        "token": jnp.arange(rows) % 32,
    }


def steps_of(f, params, mesh, scanned=False, **options):
    """Return the step, state and batch on one device, and the same on a mesh."""

    def loss(params, model_state, batch, key):
        return f(params, batch)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = jax.tree.map(jnp.array, params)  # a copy, because the step donates it
    state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))
    shardings = jax.tree.map(lambda a: sharding_of(mesh, a.shape, scanned), state)
    step = functools.partial(fnet.make_step, loss, optimizer, **options)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    batch = batch_of()
    # A copy, because both steps donate their states.
    copy = jax.tree.map(jnp.copy, state)
    return (step(), state, batch), (
        step(state_sharding=shardings),
        jax.device_put(copy, shardings),
        jax.device_put(batch, rows),
    )


def assert_equal_on(mesh, f, params, rtol=2e-5, **options):
    (step, state, batch), (sharded_step, sharded_state, sharded_batch) = steps_of(
        f, params, mesh, **options
    )
    for _ in range(2):
        state, metrics = step(state, batch)
        sharded_state, sharded_metrics = sharded_step(sharded_state, sharded_batch)
        chex.assert_trees_all_close(
            jax.device_get(sharded_metrics), jax.device_get(metrics), rtol=rtol, atol=rtol
        )
    params, expected = jax.device_get((sharded_state.params, state.params))
    chex.assert_trees_all_close(params, expected, rtol=10 * rtol, atol=10 * rtol)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("f", "options"),
    [
        (scanned, {"mode": autodiff.clipped(0.1, microbatches=2)}),
        (checkpointed, {"mode": autodiff.per_example()}),
        (cast, {}),
        (tied, {"remat": "segments"}),
        (alone, {"gather_axes": ("data",)}),
        (branches, {"microbatches": 2}),
        (unrolled, {"remat": "segments", "mode": autodiff.clipped(0.1)}),
        (recurrent, {"remat": "dots", "microbatches": 2}),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_trains_as_on_one_device(f, options):
    rtol = 1e-2 if f is cast else 5e-5  # sums of bfloat16 are rounded in another order
    is_stack = f in (scanned, checkpointed)
    assert_equal_on(mesh_of(2, 2), f, LOSSES[f], rtol, scanned=is_stack, **options)


def test_a_part_that_is_written_for_devices_stays():
    assert_equal_on(mesh_of(2, 2), by_devices, matrices(1))


def linen_problem():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.MultiHeadDotProductAttention(num_heads=4)(x[:, None])
            return nn.Dense(WIDTH)(nn.LayerNorm()(h[:, 0]))

    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((2, WIDTH)))
    return lambda params, batch: jnp.square(net.apply(params, batch["x"])).sum(-1), params


def equinox_problem():
    import equinox as eqx

    net = eqx.nn.MLP(WIDTH, WIDTH, 32, depth=2, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)

    def f(params, batch):
        return jnp.square(jax.vmap(eqx.combine(params, static))(batch["x"])).sum(-1)

    return f, params


def haiku_problem():
    import haiku as hk

    def apply(x):
        _, h = hk.dynamic_unroll(
            hk.LSTM(WIDTH), jnp.stack([x] * 3), hk.LSTM(WIDTH).initial_state(len(x))
        )
        return hk.Linear(WIDTH)(h.hidden)

    net = hk.without_apply_rng(hk.transform(apply))
    params = net.init(jax.random.key(0), jnp.ones((2, WIDTH)))
    return lambda params, batch: jnp.square(net.apply(params, batch["x"])).sum(-1), params


@pytest.mark.slow
@pytest.mark.parametrize("problem", [linen_problem, equinox_problem, haiku_problem])
def test_networks_of_other_libraries_train_as_on_one_device(problem):
    f, params = problem()
    assert_equal_on(mesh_of(2, 2), f, params)
    matrices = [a for a in jax.tree.leaves(params) if a.ndim == 2]
    # Once per pass; the backward pass does not need the first matrix.
    assert len(gathers(f, params, mesh_of(1, 4))) >= 2 * len(matrices) - 1


def test_the_optimizer_in_the_backward_pass_trains_as_on_one_device():
    tower = fnet.repeat(layers.dense(WIDTH, WIDTH), 3)
    params = {"tower": tower.init(jax.random.key(0))[0]}

    def f(params, batch):
        return jnp.square(tower.apply(params["tower"], {}, batch["x"], train=True)[0]).sum(-1)

    optimizer = optax.adam(1e-2)
    mesh = mesh_of(2, 2)

    def trained(sharded):
        copy = jax.tree.map(jnp.array, params)
        state = fnet.TrainState.create(params=copy, optimizer=optimizer, key=jax.random.key(0))
        shardings = jax.tree.map(lambda a: sharding_of(mesh, a.shape, scanned=True), state)
        step = fnet.make_step(
            lambda params, model_state, batch, key: f(params, batch),
            optimizer,
            autodiff.optimizer_in_backward("tower"),
            state_sharding=shardings if sharded else None,
        )
        state = jax.device_put(state, shardings) if sharded else state
        state, _ = step(state, batch_of())
        return jax.device_get(state.params)

    chex.assert_trees_all_close(trained(True), trained(False), rtol=1e-4, atol=1e-5)


# The gathers themselves.


def gathers(f, params, mesh, scanned=False):
    """Return the shapes of the arrays that a gradient gathers over the mesh, in order."""
    shardings = jax.tree.map(lambda a: sharding_of(mesh, a.shape, scanned), params)
    grad = jax.grad(lambda params, batch: f(params, batch).mean())
    closed = jax.make_jaxpr(gather_at_use(grad, (shardings, None), shardings))(params, batch_of())
    return [
        eqn.outvars[0].aval
        for eqn in find_equations(closed, "sharding_constraint")
        if not any(eqn.params["sharding"].spec)
    ]


def test_each_use_gathers_for_itself():
    mesh = mesh_of(1, 4)
    # The first layer needs no gradient of its input. Biases are not sharded.
    assert [a.shape for a in gathers(unrolled, LOSSES[unrolled], mesh)] == [(WIDTH, WIDTH)] * 5
    # The table is used for lookup and logits. A lookup needs no gather in the backward pass.
    table, w = (32, WIDTH), (WIDTH, WIDTH)
    shapes = [a.shape for a in gathers(tied, LOSSES[tied], mesh)]
    assert shapes == [table, w, table[::-1], table[::-1], w]


def test_scans_gather_one_layer_per_iteration():
    for f in (scanned, checkpointed):
        shapes = [a.shape for a in gathers(f, STACK, mesh_of(1, 4), scanned=True)]
        assert set(shapes) == {(WIDTH, WIDTH), (1, WIDTH)}


def test_a_loop_over_time_gathers_its_weights_once():
    mesh, params = mesh_of(1, 4), LOSSES[recurrent]
    shardings = jax.tree.map(lambda a: sharding_of(mesh, a.shape), params)
    grad = jax.grad(lambda params, batch: recurrent(params, batch).mean())
    closed = jax.make_jaxpr(gather_at_use(grad, (shardings, None), shardings))(params, batch_of())
    for loop in find_equations(closed, "scan"):
        inner = [
            e.params["sharding"]
            for e in find_equations(loop.params["jaxpr"], "sharding_constraint")
        ]
        assert all(any(s.spec) for s in inner)


def test_a_loop_of_unknown_length_gathers_one_layer_at_a_time():
    repeats = 3
    mesh = mesh_of(1, 4)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    shardings = jax.tree.map(lambda a: sharding_of(mesh, a.shape, scanned=True), STACK)
    grad = jax.grad(lambda params, batch: scanned(params, batch).mean())

    def repeated(params, batch, repeats):
        def add(_, sums):
            return jax.tree.map(jnp.add, sums, grad(params, batch))

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.fori_loop(0, repeats, add, zeros)

    f = gather_at_use(repeated, (shardings, None, None), shardings)
    shapes = [
        e.outvars[0].aval.shape
        for e in find_equations(jax.make_jaxpr(f)(STACK, batch_of(), repeats), "while")
        for e in find_equations(e.params["body_jaxpr"], "sharding_constraint")
        if not any(e.params["sharding"].spec)
    ]
    assert set(shapes) == {(WIDTH, WIDTH), (1, WIDTH)}
    sums = jax.jit(f)(jax.device_put(STACK, shardings), jax.device_put(batch_of(), rows), repeats)
    expected = repeated(STACK, batch_of(), repeats)
    chex.assert_trees_all_close(
        jax.device_get(sums), jax.device_get(expected), rtol=2e-5, atol=2e-6
    )


def test_weights_are_gathered_after_their_cast():
    assert {a.dtype for a in gathers(cast, LOSSES[cast], mesh_of(1, 4))} == {jnp.dtype("bfloat16")}


def test_what_depends_on_parameters_alone_is_not_gathered():
    shapes = [a.shape for a in gathers(alone, LOSSES[alone], mesh_of(1, 4))]
    assert shapes == [(WIDTH, WIDTH), ()]  # the product's weight, and the penalty


def constraints(f, shardings, *args, out=None):
    """Return the specs that the results of equations get, in order."""
    closed = jax.make_jaxpr(gather_at_use(f, shardings, out))(*args)
    return [tuple(e.params["sharding"].spec) for e in find_equations(closed, "sharding_constraint")]


def test_a_stack_that_a_scan_makes_of_parameters_is_sharded_as_its_rows():
    def f(stack, x):
        _, changed = jax.lax.scan(lambda _, w: (None, jnp.tanh(w)), None, stack)
        return jnp.einsum("bi,nio->nbo", x, changed)

    sharding = sharding_of(mesh_of(1, 4), STACK["w"].shape, scanned=True)
    specs = constraints(f, (sharding, None), STACK["w"], batch_of()["x"])
    assert specs == [(None, None, "fsdp"), (None, None, None)]


def test_rows_of_a_result_are_sharded_where_a_scan_makes_them():
    mesh = mesh_of(1, 4)
    stack, result = (
        NamedSharding(mesh, PartitionSpec(*s)) for s in ((None, None, "fsdp"), (None, "fsdp"))
    )

    def f(stack, x):
        return jax.lax.scan(lambda _, w: (None, x @ w), None, stack)[1]

    specs = constraints(f, (stack, None), STACK["w"], batch_of()["x"], out=result)
    assert specs == [(None, "fsdp"), (None, None), ("fsdp", None)]


def test_a_number_of_the_data_gathers_nothing():
    w = jnp.ones((4, 16))
    shardings = sharding_of(mesh_of(1, 4), w.shape), None
    assert constraints(lambda w, rate: w * rate, shardings, w, jnp.float32(0.1)) == []


@pytest.mark.parametrize(
    "of_results", [(("fsdp",), (None, None, "fsdp")), ((None, "fsdp"), (None, None, "fsdp"))]
)
def test_each_of_several_results_is_sharded_as_itself(of_results):
    mesh = mesh_of(1, 4)
    out = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in of_results]
    columns = NamedSharding(mesh, PartitionSpec(None, "fsdp"))

    def f(w, x):
        return jnp.split(x @ w, 2)

    specs = constraints(f, (columns, None), jnp.ones((8, 16)), jnp.ones((8, 4, 8)), out=out)
    padded = [(*spec, None, None)[:3] for spec in of_results]
    assert specs == [(None, "fsdp"), (None, None), *padded]


def test_what_is_added_to_a_reference_is_sharded_as_the_reference():
    result = NamedSharding(mesh_of(1, 4), PartitionSpec(None, None, "fsdp"))

    def f(x):
        total = jax.new_ref(jnp.zeros((2, 8, 16)))
        jax.ref.addupdate(total, ..., x @ jnp.ones((16, 16)))
        jax.ref.addupdate(total, 1, x[0] @ jnp.ones((16, 16)))  # one layer
        return total[...]

    specs = constraints(f, (None,), jnp.ones((2, 8, 16)), out=result)
    assert specs == [(None, None, "fsdp"), (None, "fsdp")]


def test_a_result_of_several_parts_is_sharded_as_a_whole():
    result = NamedSharding(mesh_of(1, 4), PartitionSpec(None, "fsdp"))

    def f(x):
        return jnp.concatenate([x @ jnp.ones((8, 16)), jnp.tanh(x @ jnp.ones((8, 16)))])

    assert constraints(f, (None,), jnp.ones((4, 8)), out=result) == [(None, "fsdp")]

    def turned(x):
        return jnp.tanh(x @ jnp.ones((8, 16))).T

    # Where the product is made; a sum of its rows has elements of its own.
    specs = constraints(turned, (None,), jnp.ones((4, 8)), out=result)
    assert specs == [("fsdp", None)]
    total = NamedSharding(result.mesh, PartitionSpec("fsdp"))
    assert constraints(lambda x: turned(x).sum(1), (None,), jnp.ones((4, 8)), out=total) == [
        ("fsdp",)
    ]


def test_codes_of_an_equation_with_several_results_are_gathered():
    codes = jnp.zeros((4, 16), jnp.int8)
    sharding = sharding_of(mesh_of(1, 4), codes.shape)
    specs = constraints(lambda codes, x: jax.lax.top_k(codes, 2)[1] * x, (sharding, None), codes, 2)
    assert specs == [(None, "fsdp"), (None, None)]


def test_axes_of_tensor_parallelism_are_not_gathered():
    mesh = mesh_of(2, 2)
    w = NamedSharding(mesh, PartitionSpec("fsdp", "data"))
    f = gather_at_use(lambda w, x: x @ w, (w, None), axes=("fsdp",))
    closed = jax.make_jaxpr(f)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    specs = [e.params["sharding"].spec for e in find_equations(closed, "sharding_constraint")]
    assert specs == [PartitionSpec("fsdp", "data"), PartitionSpec(None, ("data",))]


def test_functions_without_sharded_arguments_are_unchanged():
    def f(x):
        return x

    whole = NamedSharding(mesh_of(2, 2), PartitionSpec())
    alone = NamedSharding(mesh_of(4, 1), PartitionSpec("fsdp"))
    assert gather_at_use(f, (None,)) is f
    assert gather_at_use(f, (alone,), alone) is f
    assert gather_at_use(f, (whole,), whole) is f


# Memory.


def deep(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.square(x).sum(-1)


@pytest.mark.parametrize("is_stack", [False, True], ids=["unrolled", "scanned"])
def test_temporaries_are_at_most_two_gathered_layers_more(is_stack):
    n, devices, width, rows = 6, 4, 128, 64
    shape = jax.ShapeDtypeStruct((width, width), jnp.float32)
    params = [shape] * n
    f = deep
    if is_stack:
        params = jax.ShapeDtypeStruct((n, width, width), jnp.float32)

        def f(params, batch):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
            return jnp.square(x).sum(-1)

    optimizer = optax.adam(1e-3)

    def temporaries(mesh):
        def create(params):
            return fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))

        state = jax.eval_shape(create, params)
        shardings = jax.tree.map(lambda a: sharding_of(mesh, a.shape, is_stack), state)
        step = fnet.make_step(
            lambda params, model_state, batch, key: f(params, batch),
            optimizer,
            state_sharding=shardings,
        )
        state = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings
        )
        sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        x = jax.ShapeDtypeStruct((rows * devices, width), jnp.float32, sharding=sharding)
        return memory.peak(compile_min_memory(step.lower(state, {"x": x}))[0]).temporaries

    layer = 4 * width * width
    bound = temporaries(mesh_of(devices, 1)) + 2 * layer - n * layer * (devices - 1) / devices
    assert temporaries(mesh_of(1, devices)) <= bound


# Sharding of a state.


def test_shards_parameters_of_three_axes_and_their_moments():
    params = {"attention": jnp.zeros((64, 4, 16)), "embed": jnp.zeros((250, 64)), "b": jnp.zeros(4)}
    create = lambda key: fnet.TrainState.create(  # noqa: E731
        params=params, model_state={"mean": jnp.zeros(4096)}, optimizer=optax.adam(1e-3), key=key
    )
    shapes = shard_state(jax.eval_shape(create, jax.random.key(0)), mesh_of(1, 4))
    adam = shapes.opt_state[0]
    for tree in (shapes.params, adam.mu, adam.nu):
        assert tree["attention"].sharding.spec == PartitionSpec(None, None, "fsdp")
        assert tree["embed"].sharding.spec == PartitionSpec(None, "fsdp")
        assert tree["b"].sharding.spec == PartitionSpec()
    assert shapes.model_state["mean"].sharding.spec == PartitionSpec()
    assert shapes.step.sharding.spec == PartitionSpec()


@pytest.mark.parametrize(
    ("param", "shape", "spec"),
    [
        ((64, 8), (64, 8), ("fsdp",)),
        ((64, 8), (64, 1), ("fsdp",)),
        ((64, 8), (1, 8), ()),
        ((64, 8), (2, 8), ()),
        ((64, 8), (64,), ("fsdp",)),
        ((8, 64), (8,), ("fsdp",)),  # fewer axes: sharded by itself
    ],
)
def test_moments_are_sharded_as_their_parameter_if_they_divide_as_it_does(param, shape, spec):
    own = optax.GradientTransformation(lambda params: {"w": jnp.zeros(shape)}, lambda *a: a)
    create = lambda key: fnet.TrainState.create(  # noqa: E731
        params={"w": jnp.zeros(param)}, optimizer=own, key=key
    )
    shapes = shard_state(jax.eval_shape(create, jax.random.key(0)), mesh_of(1, 4), min_size=1)
    assert "fsdp" in shapes.params["w"].sharding.spec
    assert shapes.opt_state["w"].sharding.spec == PartitionSpec(*spec)


def test_shard_state_names_the_axes_of_the_mesh():
    state = fnet.TrainState.create(
        params={"w": jnp.zeros(4)}, optimizer=optax.sgd(0.1), key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match=r"axis must be an axis of the mesh, .*, got 'model'"):
        shard_state(state, mesh_of(1, 4), axis="model")


@pytest.mark.parametrize("caller", ["shard_state", "make_step"])
def test_rejects_the_train_state_of_flax(caller):
    tx = optax.sgd(0.1)
    state = train_state.TrainState.create(apply_fn=None, params={"w": jnp.zeros(4)}, tx=tx)
    step = fnet.make_step(lambda params, model_state, batch, key: batch["x"] @ params["w"], tx)
    calls = {
        "shard_state": lambda: shard_state(state, mesh_of(1, 4)),
        "make_step": lambda: step.apply(state, {"x": jnp.ones((2, 4))}),
    }
    message = rf"^{caller}: the state must be a fnet.TrainState, got a flax.training.train_state"
    with pytest.raises(TypeError, match=message):
        calls[caller]()
