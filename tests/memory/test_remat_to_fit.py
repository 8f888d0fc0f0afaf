"""A budget for losses that other libraries differentiate."""

import re

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from fnet import memory
from fnet.memory.tree import NOTHING, Blocks

WIDTH, DEPTH, ROWS = 32, 6, 512


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = jnp.tanh(layer(self.drop(nnx.gelu(norm(x)))))
        return x


class Equinox(eqx.Module):
    layers: list
    activation: object

    def __init__(self, key):
        keys = jax.random.split(key, DEPTH)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in keys]
        self.activation = jax.nn.gelu

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(self.activation(x)))
        return x


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(DEPTH):
            x = jnp.tanh(linen.Dense(WIDTH)(linen.gelu(x)))
        return x


def haiku(x):
    for _ in range(DEPTH):
        x = jnp.tanh(hk.Linear(WIDTH)(jax.nn.gelu(x)))
    return x


X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), jnp.float32)


def libraries():
    """By library: a loss, its first argument, and what differentiates it."""
    transformed = hk.without_apply_rng(hk.transform(haiku))
    return {
        "equinox": (
            lambda m, x: jnp.square(jax.vmap(m)(x)).mean(),
            Equinox(jax.random.key(0)),
            eqx.filter_value_and_grad,
        ),
        "linen": (
            lambda p, x: jnp.square(Linen().apply(p, x)).mean(),
            Linen().init(jax.random.key(0), X),
            jax.value_and_grad,
        ),
        "haiku": (
            lambda p, x: jnp.square(transformed.apply(p, x)).mean(),
            transformed.init(jax.random.key(0), X),
            jax.value_and_grad,
        ),
    }


def plain_bytes(loss, *args):
    plan = memory.remat_to_fit(loss, "1GiB", *args)[1]
    assert plan.chosen.policy.name == "none"
    return plan.chosen.peak.total


@pytest.mark.sweep(3)
@pytest.mark.parametrize("library", ["equinox", "haiku", "linen"])
def test_loss_of_a_library_fits_a_budget_with_the_same_gradients(library):
    with jax.numpy_rank_promotion("allow"):
        loss, model, value_and_grad = libraries()[library]
        budget = int(0.6 * plain_bytes(loss, model, X))
        fitted, plan = memory.remat_to_fit(loss, budget, model, X)
        assert plan.chosen.peak.total <= budget
        expected, actual = (value_and_grad(f)(model, X) for f in (loss, fitted))
        # The user's program has the bytes that were planned.
        arrays, static = eqx.partition(model, eqx.is_array)
        program = jax.jit(lambda a, x: value_and_grad(fitted)(eqx.combine(a, static), x))
        compiled = program.lower(arrays, X).compile(plan.chosen.compiler_options)
        assert memory.peak(compiled).total <= 1.02 * budget
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_nnx_variables_are_updated_as_without_the_budget():
    def loss(network, x):
        return jnp.square(network(x)).mean(), {"mean": x.mean()}

    def train(loss):
        network = Nnx(nnx.Rngs(0))
        optimizer = nnx.Optimizer(network, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(network, optimizer, x):
            (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(network, x)
            optimizer.update(network, grads)
            return value, aux

        for _ in range(2):
            value, aux = step(network, optimizer, X)
        return value, aux, nnx.state(network)

    with jax.numpy_rank_promotion("allow"):
        network = Nnx(nnx.Rngs(0))
        budget = int(0.85 * plain_bytes(loss, network, X))
        before = jax.tree.map(jnp.copy, nnx.state(network))
        fitted, plan = memory.remat_to_fit(loss, budget, network, X)
        assert plan.chosen.peak.total <= budget
        same = jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(network))
        assert all(jax.tree.leaves(same)), "planning changes nothing"
        expected, actual = train(loss), train(fitted)
    as_numbers = [
        [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in r]
        for r in (jax.tree.leaves(expected), jax.tree.leaves(actual))
    ]
    for a, b in zip(*as_numbers, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_held_bytes_count_and_shapes_are_enough():
    loss, model, _ = libraries()["linen"]
    with jax.numpy_rank_promotion("allow"):
        shapes = jax.eval_shape(lambda: (model, X))
        plain = plain_bytes(loss, *shapes)
        held = jax.ShapeDtypeStruct((plain // 16,), jnp.float32)
        _, plan = memory.remat_to_fit(loss, plain, *shapes, held=held)
    assert plan.chosen.peak.total <= plain - 4 * (plain // 16)
    assert plan.chosen.policy.chunks > 1  # Without held bytes, the plain step fits.


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "on plateau": optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau()),
}
DEEP = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 8
BATCH = jax.ShapeDtypeStruct((256, 32), jnp.float32)


def deep(params, x):
    for w in params:
        x = jnp.tanh(jnp.tanh(x @ w) * x)
    return jnp.square(x).mean()


def peak_of_step(loss, optimizer, options=None):
    """Compiled bytes of a user's step."""
    extra = optax.with_extra_args_support(optimizer)

    def step(params, moments, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, moments = extra.update(grads, moments, params, value=value)
        return optax.apply_updates(params, updates), moments, value

    step = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    return memory.peak(
        step.lower(DEEP, jax.eval_shape(optimizer.init, DEEP), BATCH).compile()
    ).total


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_of_an_optimizer_takes_what_is_planned_to_the_byte(name):
    optimizer = OPTIMIZERS[name]
    plain = peak_of_step(deep, optimizer)
    budget = int(0.5 * plain)
    fitted, plan = memory.remat_to_fit(deep, DEEP, BATCH, optimizer=optimizer, budget=budget)
    step = peak_of_step(fitted, optimizer, plan.chosen.compiler_options)
    assert step == plan.chosen.peak.total <= budget
    moments = jax.eval_shape(optimizer.init, DEEP)
    _, again = memory.remat_to_fit(deep, budget, DEEP, BATCH, optimizer=optimizer, held=[moments])
    assert again.chosen.peak == plan.chosen.peak, "the state is counted once"
    assert again.reserve == 0


def test_without_an_optimizer_its_state_is_held_and_some_bytes_stay_free():
    adam = optax.adam(1e-3)
    moments = jax.eval_shape(adam.init, DEEP)
    budget = int(0.7 * peak_of_step(deep, adam))
    fitted, plan = memory.remat_to_fit(deep, budget, DEEP, BATCH, held=moments)
    planned = plan.chosen.peak.total + memory.tree_bytes(moments)
    step = peak_of_step(fitted, adam, plan.chosen.compiler_options)
    assert step <= budget
    assert step == pytest.approx(planned, abs=memory.tree_bytes(DEEP) / 3)


def test_an_optimizer_sees_the_tree_that_a_user_gives_it():
    seen = []

    def record(updates, state, params):
        seen.append((jax.tree.structure(updates), jax.tree.structure(params)))
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), record)
    model, network = Equinox(jax.random.key(0)), Nnx(nnx.Rngs(0))
    counted = {"w": jnp.ones((WIDTH, WIDTH)), "count": jnp.int32(3)}
    cases = [
        (lambda m, x: jax.vmap(m)(x).mean(), model, eqx.filter(model, eqx.is_inexact_array)),
        (lambda m, x: m(x).mean(), network, nnx.state(network, nnx.Param)),
        (lambda p, x: (x @ p["w"]).mean() * p["count"], counted, counted | {"count": None}),
    ]
    with jax.numpy_rank_promotion("allow"):
        for loss, first, expected in cases:
            memory.remat_to_fit(loss, first, X, optimizer=spy, budget="1GiB")
            assert set(seen) == {(jax.tree.structure(expected),) * 2}
            seen.clear()


def test_nnx_variables_that_a_loss_swaps_and_attributes_are_updated():
    class Pair(nnx.Module):
        def __init__(self):
            self.w, self.calls = nnx.Param(jnp.eye(WIDTH)), 0
            self.a, self.b = nnx.Variable(jnp.ones(())), nnx.Variable(jnp.zeros(()))

    def loss(pair, x):
        pair.calls += 1
        pair.a[...], pair.b[...] = pair.b[...], pair.a[...]
        return jnp.square(jnp.tanh(x @ pair.w[...])).mean()

    pair = Pair()
    fitted, _ = memory.remat_to_fit(loss, "1GiB", pair, X)
    nnx.jit(nnx.value_and_grad(fitted))(pair, X)
    assert (float(pair.a[...]), float(pair.b[...]), pair.calls) == (0.0, 1.0, 1)


def test_describes_a_wrong_budget_or_optimizer_in_one_line():
    x = jnp.ones(3)
    for args, options, message in (
        ((), {}, "no budget; give it as budget= or in front"),
        (("10G", {}), {}, "budget: expected a number with a unit .*, got '10G'"),
        ((1e30, {}), {}, "budget: expected at least one byte and at most 16 EiB, got 1e\\+30"),
        (("1GiB",), {}, "the arguments of the loss are missing, the model first"),
        (("1GiB", {}), {"optimizer": nnx.Optimizer}, "optimizer must be an optax.*, got Optimizer"),
        (("1GiB", x, x), {"optimizer": optax.lbfgs()}, "optimizer.update .*: .*'value_fn'; plan"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"remat_to_fit: {message}") as error:
            memory.remat_to_fit(lambda p, x: jnp.float32(0), *args, **options)
        assert "\n" not in str(error.value)


def test_describes_results_that_are_no_loss_in_one_line():
    for result, given in (
        (jnp.ones(3), r"\(3,\)"),
        ((jnp.ones(3), {}), r"\(\(3,\), aux\)"),
        (None, "None; pass the loss, not the whole train step"),
        ({i: jnp.ones(2) for i in range(40)}, "dict of 40 arrays; pass the loss, not the whole"),
        (([jnp.ones(2)] * 3, jnp.ones(())), "tuple of 4 arrays; pass the loss, not the whole"),
        (jnp.ones((), int), "int32; return jnp.float32 of it"),
        ((1j * jnp.ones(()), {}), "complex64; return jnp.real of it"),
    ):
        with pytest.raises(TypeError, match=f"must .*, got {given}") as error:
            memory.remat_to_fit(lambda w, r=result: r, "1GiB", jnp.ones(()))
        assert "\n" not in str(error.value)


def tanh_layers(params, batch):
    y = batch["x"]
    for w in params:
        y = y + jnp.tanh(jax.nn.gelu(y @ w) * y)
    return jnp.square(y).mean()


@pytest.fixture(scope="module")
def planned_in_chunks():
    """A loss within 40 %, with the arguments that it was planned for."""
    args = [0.1 * jnp.eye(64)] * 3, {"x": jnp.ones((1024, 64))}
    planned, plan = memory.remat_to_fit(tanh_layers, "40%", *args)
    assert plan.chosen.policy.chunks > 1
    return planned, *args


@pytest.mark.parametrize("rows", [0, 700])
def test_the_planned_loss_takes_any_batch(rows, planned_in_chunks):
    planned, params, batch = planned_in_chunks
    batch = {"x": batch["x"][:rows], "table": jnp.zeros(10)}  # an array that is not cut
    pair = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (planned, tanh_layers)])
    found, wanted = pair(params, batch)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_a_share_is_of_the_plain_peak():
    params, batch = [0.1 * jnp.eye(64)] * 3, {"x": jnp.ones((1024, 64))}

    def update(params, batch):
        value, grads = jax.value_and_grad(tanh_layers)(params, batch)
        return jax.tree.map(jnp.subtract, params, grads), value

    step = jax.jit(update, donate_argnums=0)
    plain = memory.peak(step.lower(params, batch).compile()).total
    _, plan = memory.remat_to_fit(tanh_layers, "60%", params, batch, optimizer=optax.sgd(1.0))
    assert plan.budget == pytest.approx(0.6 * plain, rel=0.01)
    assert plan.chosen.peak.total <= plan.budget


def over_devices(of_device, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P("d"), jax.P()
    return jax.shard_map(
        lambda p, b: jax.lax.pmean(of_device(p, b), "d"),
        mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=check_vma,
    )  # fmt: skip


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_devices_compute_runs_in_chunks(check_vma):
    def of_device(params, batch):
        x = batch["x"]
        for w in params:
            x = x + jax.nn.relu(x @ w) * x
        return -jax.nn.log_softmax(x)[:, 0].mean()

    loss = over_devices(of_device, check_vma)
    params, batch = [0.1 * jnp.eye(64)] * 4, {"x": jnp.ones((4096, 64))}
    planned, plan = memory.remat_to_fit(loss, "50%", params, batch, optimizer=optax.sgd(0.1))
    assert plan.chosen.policy.chunks > 1
    pairs = (jax.jit(jax.grad(f))(params, batch) for f in (planned, loss))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_says_why_what_devices_compute_does_not_run_in_chunks():
    """With check_vma, JAX has no operation for weights that vary as little as these in a loop."""

    def of_device(params, batch):
        def cell(h, _):
            return jnp.tanh(h @ params[0] + batch["x"]), None

        return jnp.square(jax.lax.scan(cell, jnp.zeros_like(batch["x"]), None, 8)[0]).mean()

    params, batch = [0.1 * jnp.eye(64)], {"x": jnp.ones((4096, 64))}
    with pytest.raises(memory.BudgetError, match="what devices compute does not run in chunks: "):
        memory.remat_to_fit(over_devices(of_device, True), "50%", params, batch)


def test_a_planned_loss_names_the_remedy_for_forward_mode(planned_in_chunks):
    planned, params, batch = planned_in_chunks
    with pytest.raises(TypeError, match=r"^remat_to_fit: .* take jax\.jvp .* of the loss itself"):
        jax.jvp(lambda p: planned(p, batch), (params,), (params,))


TYPES = {jnp.dtype(t) for t in vars(jnp).values() if isinstance(t, type(jnp.int8))}
NOT_IN_XLA = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}
DTYPES = [t for t in sorted(TYPES, key=str) if t.itemsize < 8 or t == "complex64"]


def test_arrays_of_every_dtype_are_planned():
    """In a loss that mixes rows, so that arrays are planned one by one."""
    known = {str(t): jnp.ones(64, t) for t in DTYPES if str(t) not in NOT_IN_XLA}
    known["key"] = jax.random.key(0)

    def total(arrays):
        numbers = [
            jnp.real(a.astype(jnp.complex64)).sum() if a.dtype == jnp.complex64
            else a.astype(jnp.float32).sum()
            for name, a in arrays.items() if name != "key"
        ]  # fmt: skip
        return sum(numbers) + jax.random.normal(jax.random.clone(arrays["key"]))

    def loss(params, batch):
        y = batch["x"]
        for _ in range(2):
            y = jnp.fft.ifft(jnp.fft.fft(y, axis=0) * jnp.exp(1j * y), axis=0).real
            y = jnp.tanh(y @ params["w"])
        everywhere = params["arrays"], batch["arrays"], known
        return jnp.square(y).mean() + 1e-3 * sum(map(total, everywhere)), everywhere

    params = {"w": 0.1 * jnp.eye(64), "arrays": known}
    batch = {"x": jnp.ones((512, 64)), "arrays": known}
    planned, plan = memory.remat_to_fit(loss, "95%", params, batch)
    assert plan.chosen.peak.total <= plan.budget
    (found, aux), (wanted, _) = (
        jax.jit(jax.grad(f, has_aux=True, allow_int=True))(params, batch) for f in (planned, loss)
    )
    np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(aux, (known,) * 3)


def test_rejects_budget_that_nothing_fits():
    def loss(w):
        return jnp.sin(w).sum()

    named = r"lowest peak .*\. Raise the budget to (\S+ KiB), or"
    with pytest.raises(memory.BudgetError, match=named) as error:
        memory.remat_to_fit(loss, 6000, jnp.ones(1000))
    memory.remat_to_fit(loss, re.search(named, str(error.value))[1], jnp.ones(1000))


def test_rejects_a_budget_that_held_arrays_exceed():
    held = jax.ShapeDtypeStruct((1024,), jnp.float32)
    with pytest.raises(memory.BudgetError, match=r"4.02 KiB that stay in memory outside of the"):
        memory.remat_to_fit(lambda w: jnp.sin(w).sum(), 1024, jnp.ones(8), held=held)


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_a_rule_that_reads_traced_arrays_around_it_is_named(kind):
    """A trace of such a loss cannot be evaluated again: the arrays belong to the first one."""

    def loss(w, x):
        scale = jnp.tanh(x).mean()
        for _ in range(3):
            f = getattr(jax, kind)(jnp.tanh)
            if kind == "custom_vjp":
                f.defvjp(lambda h: (jnp.tanh(h), None), lambda _, ct: (ct * scale,))
            else:
                f.defjvp(lambda h, t: (jnp.tanh(*h), t[0] * scale))
            x = f(x @ w)
        return jnp.square(x).mean()

    args = jnp.ones((32, 32)), jnp.ones((512, 32))
    with pytest.raises(memory.BudgetError, match="reads traced arrays"):
        memory.remat_to_fit(loss, *args, budget="100KiB", optimizer=optax.sgd(0.1))


def test_rejects_a_gradient_in_place_of_a_loss():
    def loss(p, x):
        return jnp.tanh(x @ p["w"] + p["b"][None]).sum()

    p, x = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, jnp.ones((8, 4))
    with pytest.raises(TypeError, match=r"pass the loss itself, not jax\.value_and_grad of it"):
        memory.remat_to_fit(jax.value_and_grad(loss), "1GiB", p, x)
    # One array of the same shape may be anything.
    memory.remat_to_fit(lambda w: (w.sum(), jnp.sin(w)), "1GiB", jnp.ones(8))


def test_keys_that_the_loss_splits_for_a_loop_pass_between_windows():
    """Keys cannot be named for a checkpoint policy, and are inputs of the loop's window."""

    def loss(p, x, key):
        def body(carry, inputs):
            w, k = inputs
            kept = jax.random.bernoulli(k, 0.9, carry.shape)
            h = jnp.where(kept, jax.nn.gelu(carry @ w), 0)
            return carry + h - h.mean(0, keepdims=True), None

        y, _ = jax.lax.scan(body, x, (p["w"], jax.random.split(key, 4)))
        return jnp.square(y).mean() + jnp.square(jnp.tanh(y) @ p["v"]).mean()

    p = {"w": jnp.full((4, 16, 16), 0.1), "v": jnp.ones((16, 16))}
    arguments = p, jax.random.normal(jax.random.key(1), (128, 16)), jax.random.key(0)
    gradient = lambda f: jax.jit(jax.grad(f))(*arguments)  # noqa: E731
    fitted, plan = memory.remat_to_fit(loss, "50%", *arguments)
    assert plan.chosen.policy.name != "none"
    in_windows = Blocks(0.1, (NOTHING,)).apply(loss)
    with jax.debug_key_reuse(False):  # the same key twice, on purpose
        for f in (fitted, in_windows):
            # Sums of up to 6 over 128 rows, in another order.
            chex.assert_trees_all_close(gradient(f), gradient(loss), rtol=1e-5, atol=1e-5)
