import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layer_cases import initial

import fnet
from fnet import layers, serial
from fnet.jaxpr import inner_jaxprs
from fnet.memory import compile_min_memory, estimate_cost, peak, remat_in_segments
from fnet.memory.pieces import pieces
from fnet.memory.remat import REMAT_POLICIES, remat_nested, segments


def every_jaxpr(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from every_jaxpr(getattr(inner, "jaxpr", inner))


DEPTH, WIDTH, BATCH = 24, 64, 512
ACTIVATION = BATCH * WIDTH * 4


def chain(params, x):
    for kernel in params:
        x = jnp.tanh(jnp.tanh(x @ kernel) * x)
    return x.sum()


def scanned(params, x):
    def layer(x, kernel):
        return jnp.tanh(jnp.tanh(x @ kernel) * x), None

    return jax.lax.scan(layer, x, jnp.stack(params))[0].sum()


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    kernels = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(DEPTH)]
    return kernels, rng.normal(size=(BATCH, WIDTH)).astype(np.float32)


def temporaries(f):
    compiled, _ = compile_min_memory(jax.jit(jax.grad(f)).lower(*inputs()))
    return peak(compiled).temporaries / ACTIVATION


def flops(f):
    return estimate_cost(jax.make_jaxpr(jax.grad(f))(*inputs())).flops


@functools.cache
def plain(f):
    return jax.jit(jax.value_and_grad(f))(*inputs())


@pytest.mark.sweep(6)
@pytest.mark.parametrize("f", [chain, scanned], ids=["chain", "scan"])
@pytest.mark.parametrize("policy", ["segments", "nested", "dots"])
def test_policies_change_neither_values_nor_gradients(f, policy):
    ours = jax.jit(jax.value_and_grad(REMAT_POLICIES[policy].apply(f)))(*inputs())
    chex.assert_trees_all_close(ours, plain(f), rtol=1e-5)


def test_temporaries_of_a_deep_network_grow_with_the_root_of_its_depth():
    # 24 blocks of three arrays: 2 * sqrt(72) is 17, and the gradients are 3 more.
    assert temporaries(chain) > 48
    assert temporaries(remat_in_segments(chain)) < 22


def test_nested_segments_save_few_inputs_and_no_hidden_layer():
    depth, wide = 9, 16 * WIDTH

    def f(params, x):
        for a, b in params:
            x = x + jnp.tanh(x @ a) @ b
        return jnp.square(x).sum()

    rng = np.random.default_rng(0)
    shapes = [[(WIDTH, wide), (wide, WIDTH)]] * depth
    params = [[rng.normal(size=s).astype(np.float32) / s[0] for s in ab] for ab in shapes]
    x = inputs()[1]

    def compiled(f):
        return compile_min_memory(jax.jit(jax.grad(f)).lower(params, x))[0]

    in_segments, nested = (compiled(g) for g in (remat_in_segments(f), remat_nested(f)))
    chex.assert_trees_all_close(nested(params, x), jax.grad(f)(params, x), rtol=1e-4, atol=1e-4)
    # Inputs of three groups and of two more blocks, and little else; a hidden layer is 16 of them.
    assert peak(in_segments).temporaries > 2 * 16 * ACTIVATION
    assert peak(nested).temporaries < 13 * ACTIVATION


def test_nested_segments_save_no_mask_of_all_chunks_of_attention():
    mixer = layers.attention(16, 4, groups=2, causal=True)
    net = layers.stack(16, [layers.Block(mixer, layers.feed_forward(16, 32))] * 2)
    params, _ = jax.eval_shape(net.init, jax.random.key(0))
    tokens = 2048

    def loss(params, x):
        return net.apply(params, {}, x, train=True)[0].sum()

    shapes = params, jax.ShapeDtypeStruct((1, tokens, 16), "float32")
    closed = jax.make_jaxpr(jax.grad(remat_nested(loss)))(*shapes)
    made = [v.aval.size for j in every_jaxpr(closed.jaxpr) for e in j.eqns for v in e.outvars]
    assert max(made) < tokens**2 / 4


def test_a_loop_saves_its_carry_and_rematerializes_each_iteration():
    # One carry per iteration, and two stacks of kernels as large as 3 activations each.
    assert temporaries(scanned) > 3 * DEPTH
    assert DEPTH < temporaries(remat_in_segments(scanned)) < DEPTH + 12


def test_cuts_are_optimal_with_one_large_part_that_cannot_be_cut():
    blocks, made_a_block, head = 6, 4 * ACTIVATION, 10 * ACTIVATION

    def f(kernels, wide, x):
        for kernel in kernels:
            x = jnp.tanh(jnp.tanh(x @ kernel) * x)
        return jnp.tanh(x @ wide).sum()

    kernels, x = inputs()
    wide = np.ones((WIDTH, 5 * WIDTH), np.float32)
    closed = jax.make_jaxpr(f)(kernels[:blocks], wide, x)

    def needed(cuts):
        """Bytes that pass at the cuts after blocks, plus bytes of the largest segment."""
        bounds = [0, *cuts, blocks]
        made = [(b - a) * made_a_block for a, b in itertools.pairwise(bounds)]
        made[-1] += head
        return len(cuts) * ACTIVATION + max(made)

    subsets = (itertools.combinations(range(1, blocks + 1), n) for n in range(blocks + 1))
    best = min(map(needed, itertools.chain(*subsets)))
    parts, chosen = pieces(closed.jaxpr), segments(closed)
    largest = max(sum(p.made for p in parts if w.start <= p.start < w.end) for w in chosen)
    starts = {w.start for w in chosen}
    scalar = 4  # the sum at the end
    assert sum(p.passing for p in parts if p.start in starts) + largest <= best + scalar


def test_flops_grow_by_less_than_one_forward_pass():
    # One of three products per layer runs again, except in the last segment.
    assert flops(chain) < flops(remat_in_segments(chain)) < 4 / 3 * flops(chain)


@pytest.mark.slow
def test_policy_dots_repeats_no_product():
    products = (3 * DEPTH - 1) * 2 * BATCH * WIDTH**2
    repeated = flops(REMAT_POLICIES["dots"].apply(chain)) - flops(chain)
    assert 0 < repeated < 0.05 * products
    assert temporaries(REMAT_POLICIES["dots"].apply(chain)) < 0.75 * temporaries(chain)


def test_model_state_keys_and_named_scopes_pass_through():
    model = fnet.serial(
        conv=layers.conv(3, 8, 3),
        abn=layers.abn(8),
        blocks=fnet.serial(*[fnet.residual(layers.conv(8, 8, 3))] * 4),
        pool=layers.global_avg_pool(),
    )
    params, state = initial(model)
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))

    def loss(params, state, x, key):
        x = x + jax.random.normal(key, x.shape)
        y, state = model.apply(params, state, x, train=True)
        return (y**2).mean(), state

    def gradient(f):
        differentiated = jax.jit(jax.value_and_grad(f, has_aux=True))
        return differentiated(params, state, x, jax.random.key(2))

    chex.assert_trees_all_close(
        gradient(remat_in_segments(loss)), gradient(loss), rtol=1e-4, atol=1e-6
    )
    lowered = jax.jit(jax.grad(remat_in_segments(loss), has_aux=True)).lower(
        params, state, x, jax.random.key(3)
    )
    assert "blocks/2/body" in lowered.as_text(debug_info=True)


def test_named_scopes_around_jit_and_scan_pass_through():
    @jax.jit
    def f(params, x):
        with jax.named_scope("outer"):
            return scanned(params, jax.jit(jnp.sin)(x))

    text = jax.jit(remat_in_segments(f)).lower(*inputs()).as_text(debug_info=True)
    assert "outer/sin" in text
    assert "outer/while" in text


def test_functions_without_cuts_return_the_same():
    x = jnp.arange(3.0)
    chex.assert_trees_all_equal(remat_in_segments(lambda x: x)(x), x)
    chex.assert_trees_all_equal(remat_in_segments(lambda x: {"a": 2 * x})(x), {"a": 2 * x})
    assert remat_in_segments(lambda x, *, n: x.sum() + n)(x, n=1) == 4
    chex.assert_trees_all_equal(
        jax.grad(remat_in_segments(lambda x: jnp.sin(x[0])))(x)[1:], x[1:] * 0
    )


def test_offload_saves_the_carries_of_a_loop_in_host_memory():
    def kept(policy):
        found = fnet.memory.residuals(REMAT_POLICIES[policy].apply(scanned), *inputs())
        return [(r.alias_of, r.added) for r in found if r.shape == (DEPTH, BATCH, WIDTH)]

    assert kept("offload") == [("host memory", 0)]
    assert [where for where, _ in kept("segments")] == [""]


def test_a_chain_of_products_and_activations_is_cut():
    def dense(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return x.sum()

    assert temporaries(remat_in_segments(dense)) < 0.6 * temporaries(dense)


@pytest.mark.parametrize("wrap", [fnet.recompute, fnet.memory.remat_in_segments])
def test_strings_and_bools_by_keyword_are_static(wrap):
    model = serial(dense=layers.dense(4, 4), drop=layers.dropout(0.5))
    params, state = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4))

    def gradient(apply, train):
        key = jax.random.key(2) if train else None
        loss = lambda p: jnp.sin(apply(p, state, x, key=key, train=train)[0]).sum()  # noqa: E731
        return jax.grad(loss)(params)

    for train in (True, False):
        chex.assert_trees_all_close(
            gradient(wrap(model.apply), train), gradient(model.apply, train), rtol=1e-6
        )

    def f(x, scale, *, how, where=None):
        assert (how, where) == ("mean", None)
        return (scale * x).mean()

    assert wrap(f)(x, scale=jnp.float32(2), how="mean", where=None) == 2 * x.mean()
    assert wrap(f).__name__ == "f"


@pytest.mark.slow
@pytest.mark.skipif("jax_remat3" not in jax.config.values, reason="this JAX has one checkpoint")
def test_the_next_implementation_of_checkpoint_is_followed():
    def losses(params, x):
        for w in params:
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) + x)(w, x)
        return jnp.square(x).mean(-1)

    params = [0.1 * jnp.eye(64) for _ in range(6)]
    adam, batch = optax.adam(1e-3), {"x": jnp.ones((512, 64))}
    state = fnet.TrainState.create(params=params, optimizer=adam, key=jax.random.key(0))
    step = fnet.make_step(lambda params, _, batch, key: losses(params, batch["x"]), adam)
    peaks, norms = [], []
    before = jax.config.values["jax_remat3"]
    try:
        for switch in (False, True):
            jax.config.update("jax_remat3", switch)
            plain = fnet.compile_step(step, state, batch).report.peak.total
            fitted = fnet.compile_step(step, state, batch, budget=int(0.8 * plain))
            clipped = fnet.autodiff.clipped_grad(losses, 1.0)
            peaks.append((plain, fitted.report.peak.total))
            norms.append(clipped(params, batch["x"][:4])[1].norms)
    finally:
        jax.config.update("jax_remat3", before)
    assert all(fitted <= 0.8 * plain for plain, fitted in peaks)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
