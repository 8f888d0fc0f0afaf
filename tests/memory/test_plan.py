import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet
from fnet import layers, memory
from fnet.memory import BudgetError, estimate_cost
from fnet.memory.plan import plan
from fnet.memory.remat import REMAT_POLICIES, policies_for
from fnet.memory.search import Planner
from fnet.memory.tree import PLAIN, Rows
from fnet.step import divisors

WIDTH, DEPTH, BATCH = 32, 8, 512


def dense_network():
    blocks = [fnet.serial(layers.dense(WIDTH, WIDTH), layers.activation("tanh"))] * DEPTH
    return fnet.serial(*blocks, head=layers.dense(WIDTH, 10))


def arguments(model, optimizer=None, shape=(WIDTH,)):
    optimizer = optimizer or optax.sgd(0.1)

    def loss(params, model_state, batch, key):
        logits, model_state = model.apply(params, model_state, batch["x"], train=True)
        losses = fnet.losses.cross_entropy(logits, batch["label"])
        return losses, fnet.Aux(model_state, {})

    state = jax.eval_shape(
        lambda key: fnet.TrainState.create(model, optimizer, key), jax.random.key(0)
    )
    batch = {
        "x": jax.ShapeDtypeStruct((BATCH, *shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    return fnet.make_step(loss, optimizer), state, batch


@pytest.fixture(scope="module")
def step_and_peaks():
    """A dense network's step, its plan without a budget, and the peak of each named policy."""
    args = arguments(dense_network())
    plan = fnet.plan_step(*args)
    peaks = {}
    for c in fnet.plan_step(*args, policies=("none", "segments")).candidates:
        peaks[c.policy.name] = min(peaks.get(c.policy.name, c.peak.total), c.peak.total)
    return args, plan, peaks


def test_without_a_budget_the_fastest_of_a_pareto_front_is_chosen(step_and_peaks):
    _, plan, peaks = step_and_peaks
    assert plan.chosen.policy.name == "none"
    assert plan.chosen.microbatches == 1
    assert [c.cost.time for c in plan.candidates] == sorted(c.cost.time for c in plan.candidates)
    front = [(c.cost.time, c.peak.total) for c in plan.front]
    assert len(front) >= 3
    assert front == sorted(front)
    assert [p for _, p in front] == sorted((p for _, p in front), reverse=True)
    assert front[-1][1] < 1.05 * peaks["segments"]


def test_the_fastest_candidate_that_fits_the_budget_is_chosen(step_and_peaks):
    args, _, peaks = step_and_peaks
    budget = (peaks["none"] + peaks["segments"]) // 2
    plan = fnet.plan_step(*args, budget, policies=("none", "segments"), microbatch_choices=(1,))
    assert plan.chosen.peak.total <= budget
    faster = [c for c in plan.candidates if c.cost.time < plan.chosen.cost.time]
    assert faster
    assert all(c.peak.total > budget for c in faster)


def test_the_compiled_step_has_the_planned_peak(step_and_peaks):
    (step, state, batch), _, peaks = step_and_peaks
    budget = int(0.75 * peaks["none"])
    plan = fnet.plan_step(step, state, batch, budget, microbatch_choices=(1,))
    chosen = plan.chosen
    assert chosen.policy.name == "planned"
    assert chosen.peak.total <= budget
    assert len(plan.candidates) <= 10
    executable = fnet.compile_step(
        step.replace(remat=chosen.policy), state, batch, compiler_options=chosen.compiler_options
    )
    assert executable.report.peak == chosen.peak


def test_a_batch_with_statistics_is_not_split():
    model = fnet.serial(layers.dense(WIDTH, WIDTH), layers.abn(WIDTH), layers.dense(WIDTH, 10))
    step, state, batch = arguments(model)
    message = r"must have the step's own number, 1, .* updates model_state\['1'\]\['running_mean'\]"
    with pytest.raises(ValueError, match=message):
        fnet.plan_step(step, state, batch, microbatch_choices=(2,))
    plan = fnet.plan_step(step, state, batch, microbatch_choices=(1, 2))
    assert {c.microbatches for c in plan.candidates} == {1}
    with pytest.raises(BudgetError, match="the lowest peak found is"):
        fnet.compile_step(step, state, batch, budget=memory.tree_bytes(state) + 1)


def test_a_batch_of_a_loss_that_swaps_state_is_not_split():
    def loss(params, model_state, batch, key):
        swapped = {"a": model_state["b"], "b": model_state["a"]}
        return jnp.square(batch["x"] @ params["w"]).sum(1), fnet.Aux(swapped, {})

    optimizer = optax.sgd(0.1)
    state = fnet.TrainState.create(
        params={"w": jnp.eye(WIDTH)}, optimizer=optimizer, key=jax.random.key(0),
        model_state={"a": jnp.zeros(()), "b": jnp.ones(())},
    )  # fmt: skip
    batch = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}
    with pytest.raises(ValueError, match=r"the loss updates model_state\['a'\]"):
        fnet.plan_step(fnet.make_step(loss, optimizer), state, batch, microbatch_choices=(2,))


def contrastive(mode=fnet.autodiff.mean):
    """A step whose losses compare each example with all others."""

    def loss(params, model_state, batch, key):
        a, b = (jnp.tanh(batch[name] @ params[name]) for name in "ab")
        scores = a @ b.T
        return optax.losses.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(a)))

    optimizer = optax.sgd(0.1)
    params = {name: jnp.eye(WIDTH) for name in "ab"}
    state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))
    batch = {name: jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32) for name in "ab"}
    return fnet.make_step(loss, optimizer, mode), state, batch


def test_a_loss_that_compares_examples_is_not_split():
    arguments = contrastive()
    plan = fnet.plan_step(*arguments, "1GiB", microbatch_choices=(1, 2, 4))
    assert {c.microbatches for c in plan.candidates} == {1}
    with pytest.raises(ValueError, match=r"the step's own number, 1, .*: dot_general at "):
        fnet.plan_step(*arguments, microbatch_choices=(2, 4))
    peak = min(c.peak.total for c in plan.candidates)
    assert fnet.compile_step(*arguments, budget=peak // 3).report.peak.total <= peak // 3


def test_only_an_accelerator_may_take_microbatches_of_a_loss_that_keeps_examples_apart(
    step_and_peaks, monkeypatch
):
    args, _, peaks = step_and_peaks
    given = []

    def recorded(*args, microbatches, **options):
        given.append(microbatches)
        return plan(*args, microbatches=microbatches, **options)

    monkeypatch.setattr("fnet.step.plan", recorded)
    fnet.plan_step(*args, peaks["none"])
    monkeypatch.setattr("fnet.step.platform_of", lambda target: "cuda")
    fnet.plan_step(*args, peaks["none"])
    fnet.plan_step(*contrastive(), "1GiB")
    rows = len(jax.tree.leaves(args[2])[0])
    assert given == [(1,), tuple(divisors(rows)), (1,)]


def test_microbatches_that_the_user_chose_stay():
    step, state, batch = contrastive(fnet.autodiff.microbatches(4))
    assert fnet.plan_step(step, state, batch, "1GiB").chosen.microbatches == 4


def test_a_printed_plan_shows_the_budget_and_the_choice(step_and_peaks):
    args, _, peaks = step_and_peaks
    policies = "none", "segments"
    plan = fnet.plan_step(
        *args, peaks["none"], policies=policies, reserve=1024, microbatch_choices=(1,)
    )
    budget, chosen, by, compiling = str(plan).split("\n")
    assert budget == f"budget  {memory.format_bytes(peaks['none'])}"
    size = memory.format_bytes(plan.chosen.peak.total)
    assert chosen.startswith(f"chosen  {size} + 1.00 KiB held, 1.")
    assert chosen.endswith(" times the plain FLOPs")
    assert by == "by      segments"
    assert compiling == "compile with plan.chosen.compiler_options"  # on a CPU
    plan = plan._replace(chosen=plan.candidates[0]._replace(compiler_options={}))
    assert str(plan).endswith("by      no change\ncompile as is")


def test_a_budget_below_state_and_reserve_names_the_larger_one_first(step_and_peaks):
    (step, state, batch), *_ = step_and_peaks
    size = memory.tree_bytes(state)
    for reserve, parts in (
        (0, f"the train state takes {memory.format_bytes(size)}"),
        (2**20, r"the process takes 1.00 MiB besides the step \(.*\), and the train state takes"),
        (2**10, r"the train state takes .*, and the process takes 1.00 KiB besides the step"),
    ):
        more = memory.format_bytes(size + reserve)
        with pytest.raises(BudgetError, match=rf"too small: {parts}.*\. Give more than {more}"):
            fnet.plan_step(step, state, batch, size - 1, reserve=reserve)


def test_a_budget_that_nothing_fits_names_the_lowest_peak_and_its_policy(step_and_peaks):
    (step, state, batch), _, peaks = step_and_peaks
    budget, some = memory.tree_bytes(state) + 1, ("none", "segments")
    with pytest.raises(
        BudgetError, match=f"lowest peak found is {memory.format_bytes(peaks['segments'])}, by seg"
    ):
        fnet.plan_step(step, state, batch, budget, policies=some, microbatch_choices=(1,))


def test_a_budget_that_nothing_fits_names_the_peak_of_the_most_chunks():
    model = fnet.serial(layers.dense(WIDTH, WIDTH), head=layers.dense(WIDTH, 10))
    step, state, batch = arguments(model)
    with pytest.raises(BudgetError, match=rf"by (.* in )?{BATCH} chunks"):
        fnet.compile_step(step, state, batch, budget=memory.tree_bytes(state) + 1)


def test_rejects_unknown_policies_and_unreadable_budgets(step_and_peaks):
    args, *_ = step_and_peaks
    with pytest.raises(ValueError, match=r"expected policies for cpu of .*'segments'.*got 'hope'"):
        fnet.plan_step(*args, policies=("hope",))
    with pytest.raises(ValueError, match=r"for cpu.*got 'offload'"):
        fnet.plan_step(*args, policies=("offload",))
    with pytest.raises(ValueError, match=r"policy and microbatches >= 1, got .* \[\]"):
        fnet.plan_step(*args, policies=("none",), microbatch_choices=())
    with pytest.raises(ValueError, match="4GiB"):
        fnet.plan_step(*args, "much")


def test_progress_is_called_with_each_candidate_on_one_thread(step_and_peaks):
    args, *_ = step_and_peaks
    candidates, threads = [], set()

    def progress(candidate):
        candidates.append(candidate)
        threads.add(threading.get_ident())

    plan = fnet.plan_step(*args, policies=("none",), progress=progress)
    assert sorted(map(str, candidates)) == sorted(map(str, plan.candidates))
    assert threads == {threading.get_ident()}


def test_accepts_a_batch_with_a_scalar(step_and_peaks):
    (step, state, batch), *_ = step_and_peaks
    batch = {"at": jax.ShapeDtypeStruct((), jnp.float32), **batch}
    assert fnet.plan_step(step, state, batch, policies=("none",)).chosen.microbatches == 1


def test_rejects_an_unknown_remat_policy_and_impossible_microbatches(step_and_peaks):
    (step, state, batch), *_ = step_and_peaks
    with pytest.raises(ValueError, match=r"remat must be one of \['none', .* got 'hope'"):
        step.replace(remat="hope")
    with pytest.raises(ValueError, match="microbatches must be at least 1, got 0"):
        step.replace(microbatches=0)
    per_example = fnet.make_step(step.loss, optax.sgd(0.1), fnet.autodiff.per_example())
    with pytest.raises(ValueError, match=r"mode PerExampleMode\(per_layer=False\) cannot be split"):
        fnet.plan_step(per_example, state, batch, microbatch_choices=(1, 2))


def test_rejects_a_plan_of_a_jitted_function(step_and_peaks):
    (step, state, batch), *_ = step_and_peaks
    with pytest.raises(
        TypeError, match=r"step of fnet.make_step, got PjitFunction; .* fnet.memory.remat_to_fit"
    ):
        fnet.compile_step(jax.jit(step.apply, donate_argnums=0), state, batch, budget="1GiB")


def test_compile_step_keeps_to_its_budget(step_and_peaks):
    (step, state, batch), _, peaks = step_and_peaks
    budget = int(0.9 * peaks["none"])
    candidates = []
    executable = fnet.compile_step(step, state, batch, budget=budget, progress=candidates.append)
    assert executable.report.peak.total <= budget
    assert executable.step.remat in [c.policy for c in candidates]
    assert executable.step.remat.chunks > 1 or str(executable.step.remat) != "none"
    with pytest.raises(ValueError, match="a budget chooses the compiler options"):
        fnet.compile_step(step, state, batch, budget=budget, compiler_options={})


def raising(code, message):
    """A lowered program that the compiler rejects."""
    error = type("Error", (jax.errors.JaxRuntimeError,), {"error_code_string": code})

    def refuse(compiler_options):
        raise error(f"{code}: {message}")

    return types.SimpleNamespace(compile=refuse)


def test_the_peak_of_a_program_rejected_as_too_large_is_the_size_in_the_message():
    for message, size in (
        ("Ran out. Used 20.06G of 15.75G hbm.", int(20.06 * 2**30)),
        ("buffer (512.00M) exceeds available HBM (15.75G)", 512 * 2**20),
    ):
        estimate = memory.estimate_peak(raising("RESOURCE_EXHAUSTED", message), {})
        assert (estimate.temporaries, estimate.total) == (size, size)
    for code, message in (("INTERNAL", "Used 1.0G of 2.0G"), ("RESOURCE_EXHAUSTED", "threads")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            memory.estimate_peak(raising(code, message), {})


def test_offload_works_on_platforms_with_host_memory():
    platforms = "cpu", "cuda", "rocm", "tpu"
    assert ["offload" in policies_for(p) for p in platforms] == [False, True, True, True]


def test_smaller_is_the_fastest_candidate_with_a_lower_peak():
    programs = {
        "none": lambda x: jnp.broadcast_to(x.sum(), (1000,)),
        "segments": lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=1000)[0],
    }
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def plan_with(*policies):
        return plan(
            lambda policy, split: jax.jit(programs[policy.name]).trace(x), policies=policies
        )

    both = plan_with("none", "segments")
    assert (str(both.chosen.policy), str(both.smaller.policy)) == ("none", "segments")
    assert plan_with("segments").smaller is None


def test_plans_a_loss_without_temporaries():
    def build(policy, microbatches):
        return jax.jit(jax.grad(policy.apply(lambda w: jnp.sin(w).sum()))).trace(jnp.ones(8))

    assert memory.plan(build, np.int64(2**20)).chosen.policy.name == "none"


def test_no_more_chunks_than_a_budget_needs():
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(jnp.tanh(x @ w) * x)
        return jnp.square(x).mean()

    def build(policy, microbatches):
        f = jax.value_and_grad(policy.apply(loss))
        return jax.jit(f).trace(jnp.zeros((32, 32)), jnp.zeros((4096, 32)))

    assert 1 < plan(build, "700KiB").chosen.policy.chunks < 4096


def test_a_region_that_is_not_differentiated_is_cut_but_nothing_is_planned_inside():
    """Such as a teacher's targets, beside a part that mixes rows."""

    def loss(w, x):
        targets = x
        for _ in range(3):
            targets = jnp.sin(targets * jnp.cumsum(targets, 1))
        return jnp.linalg.det(jnp.linalg.solve(w, targets[::8]))

    def build(policy, microbatches):
        return jax.jit(jax.grad(policy.apply(loss))).trace(jnp.eye(32), jnp.zeros((256, 32)))

    with pytest.raises(BudgetError, match="the lowest peak found is"):
        plan(build, 10_000)


def test_losses_that_a_step_calls_are_planned_each_by_its_own_trace():
    """The second one has the types of the first; the batch is split inside of the third."""

    def layers(params, x, f):
        for w in params:
            x = f(x @ w)
        return jnp.square(x).mean()

    params, x = [jnp.eye(16)] * 6, jnp.ones((256, 16))

    def build(policy, n):
        first = policy.apply(lambda params, x: layers(params, x, jnp.tanh))
        second = policy.apply(lambda params, x: layers(params, x, lambda y: jnp.sin(y) * y))

        def step(params, x):
            return jax.grad(lambda p: first(p, x) + second(p, x))(params)

        return jax.jit(step).trace(params, x)

    planner = Planner(build, [1], None, True, 0)
    traced = planner.trace(Rows(4))
    expected = estimate_cost(build(REMAT_POLICIES["none"], 1).jaxpr).flops
    assert planner.plain.option.cost.flops == pytest.approx(expected, rel=0.01)
    assert expected < traced.option.cost.flops < 1.5 * expected

    def split(policy, n):
        def whole(params, x):
            parts = x.reshape(n, -1, 16)
            return jax.lax.map(lambda part: layers(params, part, jnp.tanh), parts).mean()

        return jax.jit(jax.grad(policy.apply(whole))).trace(params, x)

    planner = Planner(split, [1, 8], None, True, 0)
    assert planner.trace(PLAIN, 8).option.bytes < planner.trace(PLAIN, 1).option.bytes
