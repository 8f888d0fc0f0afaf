import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fnet
from fnet import layers, losses, repeat, residual, serial
from fnet.memory import Peak, donation, peak, target, timeline, tree_bytes
from fnet.memory.peak import CANDIDATE_OPTIONS

OPTIONS = CANDIDATE_OPTIONS["cpu"]
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def compiled(f, *args, options=OPTIONS[0], **jit):
    return jax.jit(f, **jit).lower(*args).compile(compiler_options=options)


def step_of(model, x):
    """A train step of the model with Adam, lowered."""

    def loss(params, state, batch, key):
        logits, state = model.apply(params, state, batch["x"], train=True)
        return losses.cross_entropy(logits, batch["label"]), fnet.Aux(state, {})

    rule = optax.adam(1e-3)
    state = jax.eval_shape(lambda: fnet.TrainState.create(model, rule, jax.random.key(0)))
    batch = {"x": x, "label": jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)}
    return fnet.make_step(loss, rule).lower(state, batch)


def block(n_in, n_out):
    return serial(conv=layers.conv(n_in, n_out), abn=layers.abn(n_out))


def dense_net():
    return layers.mlp([32, 64, 64, 10]), jax.ShapeDtypeStruct((64, 32), jnp.float32)


def conv_net():
    model = serial(
        stem=block(3, 16),
        stage0=block(16, 16),
        stage1=block(16, 16),
        stage2=block(16, 16),
        pool=layers.global_avg_pool(),
        head=layers.dense(16, 10),
    )
    return model, jax.ShapeDtypeStruct((8, 16, 16, 3), jnp.float32)


def scanned_net():
    layer = residual(serial(up=layers.dense(32, 64), down=layers.dense(64, 32)))
    model = serial(blocks=repeat(layer, 4), head=layers.dense(32, 10))
    return model, jax.ShapeDtypeStruct((256, 32), jnp.float32)


NETS = {"dense": dense_net, "conv": conv_net, "scanned": scanned_net}


@pytest.fixture(scope="module", params=[("dense", 1), ("conv", 0), ("scanned", 1)], ids=str)
def step(request):
    name, candidate = request.param
    return step_of(*NETS[name]()).compile(compiler_options=OPTIONS[candidate])


def test_buffers_at_the_peak_sum_to_the_curve(step):
    p = peak(step)
    # The rest are gaps between buffers, a larger share in a small net.
    assert 0.985 * p.assigned <= max(p.curve) <= p.assigned
    # The list of a program's outputs is itself a buffer: one pointer each.
    pointers = 8 * len(jax.tree.leaves(step.out_info))
    sizes = [buffer.bytes for buffer in p.timeline.at_peak]
    assert [buffer.bytes for buffer in p.largest] == sorted(sizes, reverse=True)[:10]
    everything = sum(sizes)
    assert everything + pointers == max(p.curve) == p.curve[p.timeline.peak_index]
    # Donated state counts once.
    arguments, outputs = (
        sum(b.bytes for b in p.timeline.at_peak if b.kind == kind)
        for kind in ("argument", "output")
    )
    assert (arguments, outputs + pointers) == (p.arguments, p.outputs - p.aliased)


def test_arguments_have_names_and_no_phase(step):
    p = peak(step)
    named = [buffer.layer for buffer in p.timeline.at_peak if buffer.kind == "argument"]
    leaves = [path for path, _ in jax.tree_util.tree_leaves_with_path(step.args_info)]
    assert len(named) == len(leaves)
    keys = [jax.tree_util.keystr(path[2:]) for path in leaves]
    functions = ["state" if path[1].idx == 0 else "batch" for path in leaves]
    assert sorted(named) == sorted(f + k for f, k in zip(functions, keys, strict=True))
    assert {b.phase for b in p.timeline.at_peak if b.kind == "argument"} == {""}


def test_temporaries_of_a_conv_net_have_layer_names():
    p = peak(step_of(*conv_net()).compile(compiler_options=OPTIONS[1]))
    activation = 4 * 8 * 16 * 16 * 16
    large = [b for b in p.largest if b.bytes >= activation]
    kept = {b.layer for b in large if b.phase == "forward"}
    assert {"stem/abn", "stage0/abn", "stage1/abn", "stage2/abn"} <= kept
    assert {b.kind for b in large} == {"temporary"}
    assert {b.dtype for b in large} == {"float32"}


def test_stacks_of_a_scan_have_the_names_of_inner_layers():
    p = peak(step_of(*scanned_net()).compile(compiler_options=OPTIONS[1]))
    stacked = {(b.layer, b.phase) for b in p.timeline.at_peak if b.shape == (4, 256, 32)}
    assert ("blocks", "forward") in stacked
    gradients = {
        (b.layer, b.phase)
        for b in p.timeline.at_peak
        if b.kind == "temporary" and b.shape in ((4, 32, 64), (4, 64, 32))
    }
    assert gradients == {("blocks/body/up", "backward"), ("blocks/body/down", "backward")}


def test_peak_reports_the_numbers_of_the_compiler():
    model, x = dense_net()
    program = step_of(model, x).compile()
    stats = program.memory_analysis()
    parts = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "workspace": 0,
        "constants": 0,
    }
    total = parts["arguments"] + parts["outputs"] - parts["aliased"] + parts["temporaries"]
    assert peak(program).as_dict() == parts | {"total": total}
    assert parts["temporaries"] > 0


def test_arrays_that_a_program_closes_over_are_a_part_of_its_peak():
    for make in (np.asarray, jnp.asarray):
        table = make(np.arange(6400, dtype=np.float32).reshape(100, 64))
        p = peak(compiled(lambda i, table=table: jnp.asarray(table)[i], jnp.arange(8)))
        assert p.constants == 25_600
        assert p.total == p.assigned + p.constants


def test_the_curve_of_a_known_program():
    def f(x):
        with jax.named_scope("first"):
            a = jnp.sort(x, axis=0)
        with jax.named_scope("second"):
            b = a @ a  # a and b are alive
        with jax.named_scope("third"):
            c = jnp.sort(b @ x, axis=1)  # b and b @ x are alive; then c sorts in place
        return c[0]

    p = peak(compiled(f, X))
    array = 4 * 64 * 64
    large = [(live - p.arguments - p.outputs) / array for live in p.curve]
    assert [n for n, _ in itertools.groupby(large)] == [0, 1, 2, 1]
    assert max(p.curve) == p.total == p.arguments + p.outputs + 2 * array
    assert [(b.bytes, b.kind, b.layer, b.shape, b.dtype) for b in p.largest] == [
        (array, "argument", "x", (64, 64), "float32"),
        (array, "temporary", "first", (64, 64), "float32"),
        (array, "temporary", "second", (64, 64), "float32"),
        (256, "output", "", (64,), "float32"),
    ]


def test_a_program_without_temporaries_has_a_flat_curve():
    for donate, kinds in (((), ["argument", "output"]), (0, ["argument"])):
        p = peak(compiled(lambda x: x + 1, X, donate_argnums=donate))
        assert p.temporaries == 0
        assert set(p.curve) == {p.total}
        assert [b.kind for b in p.largest] == kinds


PROGRAMS = {
    "branches": (lambda i, x: jax.lax.cond(i > 0, lambda x: (x @ x) @ x, jnp.sin, x), (1, X)),
    "a loop": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.tanh(c @ x), x),
        (X,),
    ),
    "rematerialization": (
        jax.grad(
            lambda x: jax.lax.scan(
                jax.checkpoint(lambda c, _: (jnp.tanh(jnp.tanh(c @ x) @ x), None)), x, length=4
            )[0].sum()
        ),
        (X,),
    ),
    "a batched gradient": (
        jax.vmap(jax.grad(lambda x: jnp.tanh(x @ x).sum())),
        (jax.ShapeDtypeStruct((8, 64, 64), jnp.float32),),
    ),
    "a sort": (lambda x: jnp.sort(x * 2, axis=0)[::-1] + 1, (X,)),
    "an eigendecomposition": (lambda x: jnp.linalg.eigh(x + x.T)[1], (X,)),
    "writing in place": (lambda x: (x.at[3].set(x[4]), x.at[4].add(x[3]).sum()), (X,)),
    "small numbers": (lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16), (X,)),
}


def test_the_curve_stays_within_the_assigned_bytes():
    for name, (f, args) in PROGRAMS.items():
        p = peak(compiled(f, *args))
        # Gaps between buffers are 8 % of the rematerialization that JAX 0.11 compiles.
        least = 0.91 if name == "rematerialization" and jax.__version_info__ >= (0, 11) else 0.985
        assert least * p.assigned <= max(p.curve) <= p.assigned, name


def test_a_sharded_program_reports_bytes_per_device():
    mesh = Mesh(jax.devices()[:4], ("data",))
    x = jax.ShapeDtypeStruct(
        (256, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    p = peak(compiled(lambda x: jnp.sin(x) @ x.T @ x, x))
    # The rest are gaps between buffers, a larger share in a small net.
    assert 0.985 * p.assigned <= max(p.curve) <= p.assigned
    argument = next(b for b in p.timeline.at_peak if b.kind == "argument")
    assert (argument.shape, argument.bytes) == ((64, 64), 4 * 64 * 64)


def test_tree_bytes_of_sharded_keys_are_per_device():
    mesh = Mesh(jax.devices()[:4], ("data",))
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, PartitionSpec("data"))
    )
    assert tree_bytes(keys) == 2 * 8
    assert tree_bytes(jax.random.key(0, impl="rbg")) == 16


def test_two_compilations_give_the_same_timeline():
    # Two equal networks, so that the second is not taken from a cache.
    first, second = (step_of(*dense_net()).compile() for _ in range(2))
    assert first.runtime_executable() is not second.runtime_executable()
    assert peak(first).timeline == peak(second).timeline


def test_a_copied_peak_has_numbers_but_no_timeline():
    p = peak(compiled(lambda x: (x @ x) @ x, X))
    for numbers in (copy.copy(p), pickle.loads(pickle.dumps(p)), Peak(*p), p._replace(outputs=1)):
        assert isinstance(numbers, Peak)
        with pytest.raises(ValueError, match=r"the object that peak\(compiled\) returned"):
            numbers.curve  # noqa: B018
    assert copy.deepcopy(p) == p
    assert len(p.curve) == len(p.timeline.instructions)


def test_the_curve_of_a_program_for_an_h100():
    try:
        h100 = target.describe("h100")
    except RuntimeError as error:
        pytest.skip(str(error))
    model, x = scanned_net()
    params, state = jax.eval_shape(model.init, jax.random.key(0))

    def loss(params, state, x):
        return model.apply(params, state, x, train=True)[0].mean()

    p = peak(target.compile_for(h100, jax.jit(jax.grad(loss)), params, state, x))
    assert 0.95 * p.assigned <= max(p.curve) <= p.assigned
    assert {"blocks/body/up", "blocks/body/down"} <= {b.layer for b in p.timeline.at_peak}


@pytest.mark.parametrize("read", [peak, timeline, donation])
def test_names_the_call_that_compiles_a_program(read):
    def f(x):
        return x + 1

    program, linear = jax.jit(f), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    of_nnx = nnx.jit(nnx.Linear.__call__)
    cases = (
        (program.lower(X), r"got Lowered; call \.compile\(\)"),
        (program.trace(X), r"got Traced; call \.lower\(\)\.compile\(\)"),
        (program, r"got f; call \.lower\(\.\.\.\)\.compile\(\)"),
        (of_nnx, r"got __call__; call \.lower\(\.\.\.\)\.compile\(\)"),
        (of_nnx.lower(linear, jnp.ones((1, 2))), r"got Lowered; call \.compile\(\)"),
        (f, r"got f; call jax\.jit\(f\)\.lower\(\.\.\.\)\.compile\(\)"),
    )
    for given, message in cases:
        with pytest.raises(TypeError, match=f"expected a compiled program, {message}"):
            read(given)
