"""Parts of a loss that run in chunks: exact, smaller, and found where rows stay apart."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from random_programs import ANY_PROGRAMS, BATCH, PARAMS, run

from fnet import memory
from fnet.jaxpr import find_equations
from fnet.memory import regions
from fnet.memory.apply import trace_inlined
from fnet.memory.regions import Region, Whole, cut, divide

QUICK = settings(
    max_examples=2, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
THOROUGH = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
N, WIDTH = 128, 32
cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def weights(seed, count):
    return [0.2 * normal((seed, i), WIDTH, WIDTH) for i in range(count)]


def tower(layers, x):
    for w in layers:
        x = x + jax.nn.gelu(x @ w)
    return x


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def contrastive(params, batch):
    a, b = unit(tower(params["a"], batch["x"])), unit(tower(params["b"], batch["y"]))
    scores, labels = 30 * a @ b.T, jnp.arange(len(a))
    return ((cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2).mean()


def two_views(params, batch):
    z = unit(tower(params["a"], jnp.concatenate([batch["x"], batch["y"]])))
    scores = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, 30 * z @ z.T)
    return cross_entropy(scores, jnp.roll(jnp.arange(len(z)), len(z) // 2)).mean()


def policy_gradient(params, batch):
    logits = tower(params["a"], batch["x"])
    advantage = batch["y"][:, 0] ** 2
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return -(advantage * jax.nn.log_softmax(logits)[:, 0]).mean() + jnp.square(logits).mean()


def points(params, batch):
    def u(x):
        for w in params["a"]:
            x = jnp.tanh(x @ w)
        return x.sum()

    def residual(x):
        return jax.jvp(jax.grad(u), (x,), (jnp.eye(WIDTH)[0],))[1][0] - u(x)

    return jnp.square(jax.vmap(residual)(batch["x"])).mean()


def dropout(params, batch):
    h = batch["x"]
    for i, w in enumerate(params["a"]):
        h = jax.nn.relu(h @ w)
        h = jnp.where(jax.random.bernoulli(jax.random.key(i), 0.5, h.shape), 2 * h, 0)
    return jax.nn.log_softmax(h)[jnp.arange(N), jnp.arange(N) % WIDTH].mean()


def edges(params, batch):
    """Messages along edges are summed at nodes."""
    nodes = batch["nodes"]
    messages = tower(params["a"], nodes[batch["from"]] - nodes[batch["to"]])
    summed = jax.ops.segment_sum(messages, batch["to"], len(nodes))
    return jnp.square(jnp.tanh(summed @ params["b"][0])).mean()


def recurrent(params, batch):
    def cell(h, x):
        h = jnp.tanh(h @ params["a"][0] + x)
        return h, h.sum(-1)

    xs = jnp.stack([batch["x"]] * 4)
    h, sums = jax.lax.scan(cell, jnp.zeros((N, WIDTH)), xs)
    return (h @ params["b"][0]).var(-1).mean() + sums.mean()


def normalized(params, batch):
    """Batch norm between layers: statistics run through the rows once more for each layer."""
    h = batch["x"]
    for w in params["a"]:
        h = h @ w
        mean, var = h.mean(0, keepdims=True), h.var(0, keepdims=True)
        h = jax.nn.relu((h - mean) / jnp.sqrt(var + 1e-5))
    return jnp.square(h @ params["b"][0]).mean()


def standardized(params, batch):
    x = batch["x"]
    mean, std = x.mean(0, keepdims=True), x.std(0, keepdims=True)
    return jnp.square(tower(params["a"], (x - mean) / (std + 1e-3))).mean()


def rounds(params, batch):
    """Two rounds of messages between nodes, which are as many as edges."""
    h = jnp.pad(batch["nodes"], ((0, 504), (0, 0)))
    for w in params["a"][:2]:
        messages = tower(params["b"], h[batch["from"]] - h[batch["to"]])
        h = jnp.tanh((h + jax.ops.segment_sum(messages, batch["to"], len(h)) / 64) @ w)
    return jnp.square(h).mean()


def ranked(params, batch):
    """Pairs in the order of their labels; the comparison of labels is read twice."""
    score, label = tower(params["a"], batch["x"]).mean(1), batch["y"][:, 0]
    better = label[:, None] > label[None]
    losses = jnp.where(better, jax.nn.softplus(score[None] - score[:, None]), 0)
    return losses.sum() / better.sum()


LOSSES = [
    contrastive, two_views, policy_gradient, points, dropout, edges, recurrent, normalized,
    ranked, standardized, rounds,
]  # fmt: skip
SMALLER = {
    "contrastive": 0.35, "two_views": 0.35, "policy_gradient": 0.2, "edges": 0.3, "recurrent": 0.5,
    "normalized": 0.5,
}  # fmt: skip


@functools.cache
def arguments():
    params = {"a": weights(0, 3), "b": weights(1, 3)}
    batch = {"x": normal(2, N, WIDTH), "y": normal(3, N, WIDTH)}
    rng = np.random.default_rng(4)
    ends = {name: jnp.asarray(rng.integers(0, 8, 512)) for name in ("from", "to")}
    return params, batch, {"nodes": normal(5, 8, WIDTH), **ends}


def arguments_of(loss):
    params, batch, graph = arguments()
    return params, graph if loss in (edges, rounds) else batch


def assert_same(f, g, args):
    for a, b in zip(
        *(jax.tree.leaves(jax.jit(jax.value_and_grad(h))(*args)) for h in (f, g)), strict=True
    ):
        scale = max(float(jnp.abs(b).max()), 1e-3)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * scale)


def dearest(f, args, share=1.0):
    """A number of rows that are dear to compute again."""
    return round(share * len(division(f, args).dearest))


@pytest.mark.sweep(9)
@pytest.mark.parametrize(("chunks", "share"), [(3, 0.0), (16, 0.0), (3, 1.0), (5, 0.5)])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_stay(loss, chunks, share):
    args = arguments_of(loss)
    assert_same(cut(loss, chunks, keep=dearest(loss, args, share)), loss, args)


def test_kept_rows_are_not_computed_again():
    """The cotangent of a ratio is known only after all rows, so chunks run twice."""

    def loss(params, batch):
        h = tower(params["a"], batch["x"])
        return jnp.square(h).mean() / (1 + jnp.abs(h).mean())

    args = arguments_of(loss)
    some, most = (dearest(loss, args, share) for share in (0.4, 1.0))
    assert 0 < some < most
    flops = [
        memory.estimate_cost(jax.make_jaxpr(jax.grad(f))(*args)).flops
        for f in (loss, *(cut(loss, 4, keep=keep) for keep in (0, some, most)))
    ]
    ratios = [n / flops[0] for n in flops[1:]]
    assert ratios[0] > 1.3
    assert ratios[0] > ratios[1] > ratios[2]
    assert ratios[2] < 1.12  # elementwise operations alone
    assert_same(cut(loss, 4, keep=some), loss, args)
    # Another program has other rows, and as many are kept.
    assert_same(cut(contrastive, 4, keep=most), contrastive, arguments_of(contrastive))


@pytest.mark.parametrize(("loss", "most"), [(standardized, 1.06), (rounds, 1.55)])
def test_what_needs_sums_over_rows_runs_once(loss, most):
    args = arguments_of(loss)
    plain, chunked = (
        memory.estimate_cost(jax.make_jaxpr(jax.grad(f))(*args)).flops
        for f in (loss, cut(loss, 16))
    )
    assert chunked < most * plain


@pytest.mark.sweep(6)
@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_take_less_memory(loss):
    args = arguments_of(loss)

    def temporaries(f):
        lowered = jax.jit(jax.value_and_grad(f)).lower(*args)
        options = memory.CANDIDATE_OPTIONS["cpu"]
        return min(memory.peak(lowered.compile(dict(o))).temporaries for o in options)

    assert temporaries(cut(loss, 16)) < SMALLER.get(loss.__name__, 0.3) * temporaries(loss)


def division(f, args, count=1):
    closed, leaves, _ = trace_inlined(f, args, {})
    params = len(jax.tree.leaves(args[:count]))
    return divide(closed, [i < params for i in range(len(leaves))])


def test_a_loss_of_single_examples_is_one_region_that_computes_its_gradient_at_once():
    def loss(params, batch):
        return jnp.square(tower(params["a"], batch["x"])).mean()

    args = arguments_of(loss)
    (region,) = division(loss, args).regions
    assert region.objective == 0
    plain, chunked = (
        memory.estimate_cost(jax.make_jaxpr(jax.value_and_grad(f))(*args)).flops
        for f in (loss, cut(loss, 4))
    )
    assert chunked < 1.02 * plain


def test_the_axis_of_the_examples_is_found_behind_many_frozen_weights():
    sizes = range(3, 20)
    frozen = [jnp.ones((k, k + 1)) for k in sizes]

    def loss(params, frozen, batch):
        h = batch["x"][:, :3]
        for w in frozen:
            h = jnp.tanh(h @ w)
        return jnp.square(batch["y"] @ params["a"][0] + h.sum(1, keepdims=True)).sum()

    params, batch = {"a": weights(0, 1)}, {"x": normal(1, 31, WIDTH), "y": normal(2, 31, WIDTH)}
    (region,) = division(loss, (params, frozen, batch)).regions
    assert region.size == 31


def test_several_terms_of_a_loss_are_one_number():
    def loss(params, batch):
        h = tower(params["a"], batch["x"])
        penalty = sum(jnp.square(w).sum() for w in params["a"])
        return jnp.square(h).mean() - 2 * jnp.tanh(h).sum() / N + 0.1 * penalty

    args = arguments_of(loss)
    assert [r.objective for r in division(loss, args).regions] == [0]
    assert_same(cut(loss, 5), loss, args)


def test_a_rule_that_is_not_linear_sees_the_cotangent():
    @jax.custom_vjp
    def limited(x):
        return x

    limited.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))

    def loss(params, batch):
        return jnp.square(limited(tower(params["a"], batch["x"]))).mean()

    args = arguments_of(loss)
    assert [r.objective for r in division(loss, args).regions] == [None]
    assert_same(cut(loss, 5), loss, args)


def test_a_loss_scale_of_float16_enters_the_backward_pass():
    def loss(w, x):
        return 1e-5 * jnp.square(jnp.tanh(x @ w).astype(jnp.float32)).mean()

    args = [0.5 * normal(i, 64, 64).astype(jnp.float16) for i in range(2)]
    scaled = [lambda *args, f=f: 2.0**20 * f(*args) for f in (cut(loss, 4), loss)]
    got, expected = (jax.jit(jax.grad(f))(*args) for f in scaled)
    chex.assert_trees_all_close(got, expected, atol=2e-3)


def test_a_matrix_of_similarities_is_computed_by_its_rows_and_by_its_columns():
    parts = division(contrastive, arguments_of(contrastive)).parts
    towers, *similarities = [p for p in parts if isinstance(p, Region)]
    assert [v.aval.shape for v in towers.jaxpr.outvars] == [(N, WIDTH), (WIDTH, N)]
    assert len(similarities) == 2
    largest = max(v.aval.size for p in parts for v in _results(p))
    assert largest == N * WIDTH


def _results(part):
    if isinstance(part, Region):
        return part.jaxpr.outvars
    return [v for e in part.eqns for v in e.outvars]


def test_pairs_of_one_array_are_computed_by_its_rows():
    def loss(params, label):
        return (label[:, None] > label[None]).sum() * params["a"][0].sum()

    params, batch, _ = arguments()
    found = division(loss, (params, batch["y"][:, 0]))
    assert [region.size for region in found.regions] == [N]
    wholes = [e for p in found.parts if isinstance(p, Whole) for e in p.eqns]
    assert max(v.aval.size for e in wholes for v in e.outvars) < N * N


def test_what_mixes_rows_is_named():
    def loss(params, batch):
        h = jnp.sort(jnp.sort(batch["x"], axis=0), axis=1)
        return jnp.square(jnp.tanh(h @ params["a"][0])).mean()

    reasons = division(loss, arguments_of(loss)).reasons
    assert any(r.startswith("sort") and r.endswith("mixes rows") for r in reasons)
    with pytest.raises(ValueError, match="no argument but the parameters has rows"):
        jax.grad(cut(lambda w: jnp.linalg.norm(w), 2))(jnp.ones(4))


def test_an_axis_may_begin_inside():
    """The loss head of one sequence, whose attention mixes its tokens."""

    def loss(params, tokens):
        h = tower(params["a"], tokens)
        h = jax.nn.softmax(h @ h.T) @ h
        return cross_entropy(h @ params["head"], jnp.arange(N)).mean()

    params = {"a": weights(0, 1), "head": normal(3, WIDTH, 512)}
    args = params, normal(1, N, WIDTH)
    assert [r.size for r in division(loss, args).regions][-1] == N
    plain, chunked = (jax.jit(jax.grad(f)).lower(*args).compile() for f in (loss, cut(loss, 8)))
    assert memory.peak(chunked).temporaries < 0.5 * memory.peak(plain).temporaries
    chex.assert_trees_all_close(chunked(*args), plain(*args), rtol=1e-5, atol=1e-6)


def test_sums_of_narrow_numbers_are_added_in_float32():
    def loss(w, x):
        return (x @ w).sum()

    w, x = jnp.ones(4, jnp.bfloat16), jnp.ones((1024, 4), jnp.bfloat16) / 3
    expected = jax.grad(loss)(w.astype(jnp.float32), x.astype(jnp.float32))
    got = jax.grad(cut(loss, 128))(w, x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.004)


def test_stopped_values_reach_operations_without_derivative():
    def loss(w, x):
        h = jnp.tanh(jnp.tanh(x @ w) @ w)
        stopped = jax.lax.stop_gradient(jnp.abs(h).sum(-1))
        root, _ = jax.lax.while_loop(
            lambda s: (jnp.abs(s[0] ** 3 - stopped).max() > 1e-3) & (s[1] < 30),
            lambda s: (s[0] - (s[0] ** 3 - stopped) / (3 * s[0] ** 2 + 1), s[1] + 1),
            (jnp.ones(len(h)), 0),
        )
        return (h.sum(-1) * root).mean()

    x, w = normal(0, 64, 16), 0.3 * normal(1, 16, 16)
    expected, got = (jax.jit(jax.value_and_grad(g))(w, x) for g in (loss, cut(loss, 4)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, expected)


def test_rules_are_asked_for_what_is_differentiated_alone():
    """As of `equinox.internal.nondifferentiable`, whose rule raises."""

    @jax.custom_jvp
    def fixed(x):
        return x

    @fixed.defjvp
    def rule(primals, tangents):
        raise RuntimeError("unexpected tangent")

    def loss(params, batch):
        h = tower(params["a"], fixed(batch["x"]))
        return jnp.square(h).mean() / (1 + jnp.abs(h * fixed(batch["y"])).mean())

    args = arguments_of(loss)
    assert [r.size for r in division(loss, args).regions] == [N]
    assert_same(cut(loss, 4), loss, args)
    params, batch = args
    smaller, plan = memory.remat_to_fit(loss, params, batch, budget="160KiB")
    assert plan.chosen.policy.chunks > 1
    assert_same(smaller, loss, args)


def test_what_no_result_needs_is_not_computed():
    """A loop that also finds the worst row, as solvers do that may stop early."""

    def step(w, x):
        return jnp.tanh(x @ w)

    def run(params, batch):
        def body(carry):
            i, x, _ = carry
            return i + 1, step(params["a"][0], x), jnp.sort(jnp.abs(x).sum(-1))[0]

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, batch["x"], 0.0))[1]

    def unrolled(params, batch):
        return functools.reduce(lambda x, _: step(params["a"][0], x), range(3), batch["x"])

    solve = jax.custom_vjp(run)
    solve.defvjp(lambda *args: (run(*args), args), lambda args, ct: jax.vjp(unrolled, *args)[1](ct))
    args = arguments_of(run)
    loss = lambda *args: jnp.square(solve(*args)).mean()  # noqa: E731
    assert [r.size for r in division(loss, args).regions] == [N]
    assert_same(cut(loss, 4), loss, args)


def test_callbacks_stay_outside_and_run_once():
    seen = []

    def loss(w, x):
        h = jnp.tanh(x @ w)
        jax.debug.callback(lambda h: seen.append(h.shape), h)
        return jnp.square(jnp.tanh(h @ w)).mean()

    args = weights(0, 1)[0], normal(1, N, WIDTH)
    assert_same(cut(loss, 4), loss, args)
    jax.effects_barrier()
    assert seen == [(N, WIDTH)] * 2


def check(program):
    """A random program in chunks: values and gradients stay. Returns whether it had a region."""

    def loss(params, *batch):
        leaves = jax.tree.leaves(run(program, params, *batch))
        return sum(jnp.sum(jnp.sin(a)) for a in leaves if jnp.issubdtype(a.dtype, jnp.floating))

    args = PARAMS, *BATCH
    expected = jax.jit(jax.value_and_grad(loss))(*args)
    if not division(loss, args).regions:
        return False
    for n, keep in ((2, 0), (3, dearest(loss, args, 0.5))):
        got = jax.jit(jax.value_and_grad(cut(loss, n, keep=keep)))(*args)
        for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if np.isfinite(b).all():
                np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4 * max(np.abs(b).max(), 1))
    return True


@pytest.mark.parametrize("effort", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.slow)])
def test_random_programs_stay(effort, monkeypatch, allow_rank_promotion):
    monkeypatch.setattr(regions, "LEAST_SHARE", 0.0)
    cuts = []

    @effort
    @given(ANY_PROGRAMS)
    def run_all(program):
        cuts.append(check(program))

    with jax.debug_key_reuse(False):
        run_all()
    assert sum(cuts) > len(cuts) / 4


AFFINE = {
    "plus one": lambda m: 1.1 * m + 1,
    "fori": lambda m: jax.lax.fori_loop(0, 3, lambda i, c: 1.1 * c + 1, m),
    "while": lambda m: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, 1.1 * c[1] + 1), (0, m)
    )[1],
    "16 bits": lambda m: m.astype(jnp.bfloat16) + 1,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", AFFINE)
def test_a_number_is_added_to_a_sum_over_rows_once(name):
    def loss(w, x):
        return AFFINE[name](x.mean()) * jnp.square(jnp.tanh(jnp.tanh(x @ w) * x)).mean()

    args = normal(0, WIDTH, WIDTH) / 8, normal(1, N, WIDTH)
    with jax.numpy_dtype_promotion("standard"):
        expected, actual = (jax.value_and_grad(f)(*args) for f in (loss, cut(loss, 4)))
    rtol = 1e-2 if name == "16 bits" else 1e-5
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max()))


def test_a_rule_that_reads_traced_arrays_around_it_is_not_cut():
    """JAX cannot trace such a loss twice either: it fails under `jax.checkpoint`."""

    def loss(w, x, n):
        f = jax.custom_vjp(lambda y: jnp.tanh(y) * n)
        f.defvjp(lambda y: (f(y), y), lambda y, g: (g * n * (1 - jnp.square(jnp.tanh(y))),))
        return jnp.square(f(x @ w)).mean()

    args = normal(0, WIDTH, WIDTH), normal(1, N, WIDTH), jnp.int32(2)
    found = division(loss, args)
    assert any(reason.startswith("custom_vjp_call at ") for reason in found.reasons)
    assert not [e for r in found.regions for e in find_equations(r.jaxpr, "custom_vjp_call")]


def test_batches_that_never_meet_run_in_one_region():
    """Such as a generator's examples and real ones, which two networks see."""

    def loss(params, batch):
        made = tower(params["a"], batch["x"])
        other = jnp.square(tower(params["b"], made)).mean()
        return other + jnp.square(tower(params["b"], batch["y"])).mean()

    args = {k: weights(i, 3) for i, k in enumerate("ab")}, {"x": normal(1, N, WIDTH)}
    args[1]["y"] = normal(2, N, WIDTH)
    (region,) = division(loss, args).regions
    assert region.objective is not None
    assert_same(cut(loss, 4), loss, args)


def ruled(f, rule, kind=jax.custom_jvp):
    made = kind(f)
    made.defvjp(*rule(made)) if kind is jax.custom_vjp else made.defjvp(rule(made))
    return made


TRIPLED = ruled(jnp.sin, lambda f: lambda p, t: (f(*p), 3 * jnp.cos(p[0]) * t[0]))
SQUARED = ruled(  # its rule has the function itself, and another one
    jnp.sin,
    lambda f: (lambda x: (f(x), TRIPLED(x)), lambda s, ct: (5 * ct * s * f(s),)),
    jax.custom_vjp,
)
MIXING = ruled(jnp.sin, lambda f: lambda p, t: (f(*p), t[0] - t[0].mean(0, keepdims=True)))
MIXED_LATER = ruled(
    jnp.sin, lambda f: (lambda x: (f(x), MIXING(x)), lambda s, g: (g * s,)), kind=jax.custom_vjp
)


@pytest.mark.parametrize("f", [TRIPLED, SQUARED, MIXED_LATER])
def test_derivatives_of_derivatives_follow_rules_of_rules_or_are_refused(f):
    k, x = normal(5, 4, 4), normal(6, 8, 4)

    def second(loss):
        return jax.grad(lambda k: jnp.square(jax.grad(loss)(k, x)).sum())(k)

    def loss(k, x):
        return jnp.square(jnp.tanh(f(x @ k))).mean()

    chex.assert_trees_all_close(jax.grad(cut(loss, 4))(k, x), jax.grad(loss)(k, x), atol=1e-6)
    if f is not MIXED_LATER:
        chex.assert_trees_all_close(second(cut(loss, 4)), second(loss), atol=1e-5)
        return
    with pytest.raises(ValueError, match="derivative of the derivative of custom_jvp_call at "):
        second(cut(loss, 4))
