"""Language models with every mixer, and text generation."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from fnet import layers, models
from fnet.generate import _decode, _phases, _Run, _Sampling
from fnet.layer import Decode

V, WIDTH, T = 11, 16, 12

MIXERS = {
    "attention": lambda: layers.attention(
        WIDTH, 4, groups=2, causal=True, rotary=100.0, bias=False
    ),
    "window": lambda: layers.attention(WIDTH, 2, causal=True, window=4, rotary=100.0),
    "mamba": lambda: layers.mamba(WIDTH, state=4),
    "mamba2": lambda: layers.mamba2(WIDTH, head=8, state=4),
    "rg_lru": lambda: layers.rg_lru(WIDTH, heads=2),
}


@functools.cache
def build(*mixers, context="lagged", **options):
    """A model with one block per mixer, its parameters and a non-zero state."""
    blocks = [layers.Block(MIXERS[name](), layers.feed_forward(WIDTH, 24)) for name in mixers]
    model = models.language_model(
        vocabulary=V, width=WIDTH, blocks=blocks, context=context, **options
    )
    params, state = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: a + 2 if path[-1].key == "strength" else a, params
    )
    state = jax.tree.map(
        lambda a: 0.5 * jax.random.uniform(jax.random.key(a.size), a.shape, minval=-1), state
    )
    return model, params, state


def tokens(t=T, seed=1):
    return jax.random.randint(jax.random.key(seed), (2, t), 0, V)


MIXED = "attention", "mamba"


def test_losses_are_the_cross_entropy_of_the_logits():
    model, params, state = build(*MIXED)
    logits, _ = jax.jit(lambda x: model.apply(params, state, x, train=False))(tokens())
    chex.assert_shape(logits, (2, T, V))
    losses, _ = jax.jit(lambda x, y: model.losses(params, state, x, y, train=False))(
        tokens(), tokens(seed=2)
    )
    expected = -jax.nn.log_softmax(logits)[
        jnp.arange(2)[:, None], jnp.arange(T)[None], tokens(seed=2)
    ]
    chex.assert_trees_all_close(losses, expected, atol=1e-5)


def test_padding_may_have_any_index():
    model, params, state = build(*MIXED)
    lengths = jnp.asarray([7, T])
    is_real = jnp.arange(T)[None] < lengths[:, None]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params, x, y):
        losses, after = model.losses(params, state, x, y, train=True, lengths=lengths)
        return losses.sum(), (losses, after)

    got, expected = (
        gradient(params, *(jnp.where(is_real, tokens(seed=i), pad) for i in (1, 2)))
        for pad in (-100, 0)
    )
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("extra", [{}, {"segments": jnp.array([[1] * 5 + [2] * 7] * 2)}])
def test_a_loss_does_not_depend_on_which_others_are_learned(extra):
    model, params, state = build(*MIXED)

    @jax.jit
    def losses(loss_mask):
        return model.losses(
            params, state, tokens(), tokens(seed=2), train=True, loss_mask=loss_mask, **extra
        )

    every, expected_state = losses(jnp.ones((2, T), bool))
    for seed in range(3):
        learned = jax.random.bernoulli(jax.random.key(seed), 0.5, (2, T))
        got, got_state = losses(learned)
        chex.assert_trees_all_equal(got, jnp.where(learned, every, 0))
        chex.assert_trees_all_equal(got_state, expected_state)  # of the attention context
    answer = jnp.broadcast_to(jnp.arange(T) >= 8, (2, T))
    chex.assert_trees_all_equal(losses(answer)[0][:, 8:], every[:, 8:])


def test_labels_that_are_not_learned_may_have_any_value():
    model, params, state = build("attention")
    learned = tokens(seed=2) > 4
    run = functools.partial(model.losses, train=True, loss_mask=learned)
    labels = jnp.where(learned, tokens(seed=2), -100)
    got = jax.jit(run)(params, state, tokens(), labels)
    chex.assert_trees_all_equal(got, jax.jit(run)(params, state, tokens(), tokens(seed=2)))


def test_padding_on_the_left_is_a_document_of_its_own():
    model, params, state = build("attention", "mamba", context=None)
    attention_mask = jnp.arange(T)[None] >= jnp.array([[5], [0]])
    apply = functools.partial(model.apply, params, state, train=False)
    padded, _ = jax.jit(lambda x: apply(x, segments=attention_mask.astype(int)))(tokens())
    alone, _ = jax.jit(apply)(tokens()[:1, 5:])
    chex.assert_trees_all_close(padded[:1, 5:], alone, atol=1e-5)


def test_one_mask_for_attention_and_loss_is_refused():
    model, params, state = build("attention")
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        model.losses(params, state, tokens(), tokens(), train=True, mask=jnp.ones((2, T), bool))
    run = functools.partial(model.losses, params, state, tokens(), tokens(), train=True)
    with pytest.raises(ValueError, match=r"loss_mask: mask must be bool of shape \(2, 12\)"):
        run(loss_mask=jnp.ones((2, T)))
    with pytest.raises(ValueError, match=r"lengths must have shape \(2,\)"):
        run(lengths=jnp.ones((2, T), int))


def test_decoding_matches_the_logits_of_the_whole_sequence():
    """So it is causal, also in training, where the logits are the same."""
    model, params, state = build(*MIXED)
    whole, _ = jax.jit(lambda x: model.apply(params, state, x, train=False))(tokens())
    trained, _ = jax.jit(lambda x: model.apply(params, state, x, train=True))(tokens())
    chex.assert_trees_all_close(trained, whole, atol=1e-5)
    extend = jax.jit(model.decode.extend)
    for prompt in (1, 5, T):
        cache = model.decode.init_cache(2, T, jnp.float32)
        logits, cache = extend(params, state, cache, tokens()[:, :prompt], jnp.int32(0))
        chex.assert_trees_all_close(logits, whole[:, prompt - 1], atol=2e-5)
        for i in range(prompt, T):
            logits, cache = extend(params, state, cache, tokens()[:, i : i + 1], jnp.int32(i))
            chex.assert_trees_all_close(logits, whole[:, i], atol=2e-5)


def test_embedding_is_tied_to_the_head():
    _, params, _ = build("attention")
    assert set(params) == {"embedding", "blocks", "norm"}


def test_without_context_the_state_is_empty():
    assert build("attention", "mamba", context=None)[2] == {}


def test_sampled_tokens_have_the_expected_frequencies():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125]))

    def share(**options):
        draw = jax.vmap(lambda k: fnet.sample_token(k, logits[None], **options)[0])
        keys = jax.random.split(jax.random.key(len(str(options))), 4000)
        return np.bincount(jax.jit(draw)(keys), minlength=4) / len(keys)

    np.testing.assert_allclose(share(), [0.5, 0.25, 0.125, 0.125], atol=0.03)
    np.testing.assert_allclose(share(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(share(min_p=0.4), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(share(top_p=0.5), [1, 0, 0, 0])
    np.testing.assert_allclose(share(top_p=0.51), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(share(temperature=0.5), np.array([16, 4, 1, 1]) / 22, atol=0.03)
    np.testing.assert_allclose(share(temperature=0), [1, 0, 0, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lengths": [3]}, r"must be 2 integers from 1 to 3 .*, got \[3\]"),
        ({"prompt_lengths": [0, 3]}, r"got \[0, 3\]"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\], got 2"),
        ({"temperature": -1}, "temperature must be >= 0, got -1"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"chunk": 0}, "chunk must be >= 1, got 4 and 0"),
    ],
)
def test_stream_rejects_options_out_of_range(options, message):
    model, params, state = build("attention")
    with pytest.raises(ValueError, match=message):
        next(fnet.stream(model, params, state, tokens(3), jax.random.key(0), 4, **options))


def test_stream_rejects_empty_prompt_and_bidirectional_model():
    model, params, state = build("attention")
    with pytest.raises(ValueError, match="P >= 1"):
        next(fnet.stream(model, params, state, tokens(0), jax.random.key(0), 4))
    bidirectional = layers.Block(layers.attention(WIDTH, 2))
    undecodable = models.language_model(vocabulary=V, width=WIDTH, blocks=[bidirectional])
    with pytest.raises(ValueError, match="causal"):
        next(fnet.stream(undecodable, {}, {}, tokens(3), jax.random.key(0), 4))


@pytest.mark.slow
def test_cache_is_updated_in_place():
    model, params, state = build("attention", "mamba")
    carry = tokens(503), jax.eval_shape(lambda: model.decode.init_cache(2, 503))
    run, at = _Run(*[jnp.array([3, 3])] * 2, jax.random.key(0)), (jnp.asarray(3), jnp.asarray(8))
    compiled = _decode.lower(model, _Sampling(), carry, at, run, params, state).compile()
    cache = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(carry))
    assert fnet.memory.peak(compiled).aliased >= cache


@pytest.mark.parametrize("logits", [[-50.0, -40.0, -90.0], [40.0, 50.0, 45.0]])
def test_tiny_temperature_is_greedy(logits):
    sampled = fnet.sample_token(jax.random.key(0), jnp.array([logits]), temperature=1e-37)
    assert sampled.tolist() == [1]


def test_temperature_applies_before_top_k_and_top_k_before_top_p():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))

    def sampled(**options):
        draw = jax.jit(jax.vmap(lambda k: fnet.sample_token(k, logits, **options)[0]))
        return {*draw(jax.random.split(jax.random.key(0), 300)).tolist()}

    assert sampled(temperature=0.5, top_p=0.6) == {0}  # token 0 has 16/22
    assert sampled(top_k=2, top_p=0.6) == {0}  # token 0 has 2/3 of two
    assert sampled(top_k=9) == {0, 1, 2, 3}  # more than V
    assert sampled(top_k=1) == sampled(min_p=1) == sampled(top_p=1e-6) == {0}
    assert sampled(top_p=1) == sampled(min_p=0) == {0, 1, 2, 3}


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 1.5}])
def test_sample_token_rejects_options_out_of_range(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be .*, got"):
        fnet.sample_token(jax.random.key(0), jnp.zeros((1, 4)), **options)


OF_SAMPLING = {"repetition_penalty": 1.3, "min_p": 0.05, "top_k": 7, "temperature": 0.7}


def test_rows_of_a_batch_continue_as_they_do_alone():
    """Prompts of several lengths in one batch, whose padding is not read."""
    model, params, state = build(*MIXED)
    lengths, keys = (1, 20), jax.random.split(jax.random.key(5))
    prompts = jax.random.randint(jax.random.key(7), (2, 20), 0, V)
    padded = jnp.where(jnp.arange(20)[None] < jnp.array(lengths)[:, None], prompts, -100)
    run = functools.partial(fnet.generate, model, params, state, length=30, **OF_SAMPLING)
    together = run(padded, key=keys, prompt_lengths=lengths)
    for row, n in enumerate(lengths):
        alone = run(prompts[row : row + 1, :n], key=keys[row : row + 1])
        chex.assert_trees_all_equal(together[row], alone[0])


def test_many_prompts_need_few_programs():
    def cache_of(batch, length):
        return {"room": jnp.zeros(length)}

    model = UNIFORM._replace(decode=UNIFORM.decode._replace(init_cache=cache_of))
    before = _decode._cache_size()
    for t in (40, 1, 7, 16, 17, 33, 55):
        fnet.generate(model, {}, {}, tokens(t), jax.random.key(0), 5)
    assert _decode._cache_size() == before + 1


def test_phases_end_where_a_cache_restarts_and_with_the_last_token():
    for restarts, first, total in itertools.product([(), (5,), (300, 90)], [1, 80, 91], [90, 500]):
        phases = [*_phases(restarts, first, total)]
        ends = [end for end, _ in phases]
        within = sorted(r for r in restarts if first <= r < total - 1)
        assert ends == ([*(r + 1 for r in within), total] if first < total else [])
        for end, room in phases:
            limits = [r for r in restarts if r >= end - 1]
            assert end - 1 <= room <= min([*limits, 1.25 * end + 64])
            assert not restarts or limits or room == end - 1  # a longer one would be another


def test_repeated_tokens_are_penalized():
    logits = jnp.array([[2.0, 1.9, -1.0, -1.1]])
    model = UNIFORM._replace(
        decode=UNIFORM.decode._replace(extend=lambda p, s, cache, x, at: (logits, cache))
    )

    def greedy(prompt, penalty):
        run = functools.partial(fnet.generate, model, {}, {}, jnp.array([prompt]))
        return run(jax.random.key(0), 3, temperature=0.0, repetition_penalty=penalty)[0].tolist()

    assert greedy([3], 1.0) == greedy([3], None) == [0, 0, 0]
    assert greedy([3], 1.2) == [0, 1, 0]  # 2.0, then 1.9 of 2 / 1.2, then both are divided
    assert greedy([0], 1.2) == [1, 0, 0]
    with pytest.raises(ValueError, match="repetition_penalty must be > 0, got 0"):
        greedy([0], 0)


def test_a_text_that_outgrows_a_restart_length_is_read_again():
    def cache_of(batch, length):
        return {"room": jnp.full((), length)}

    def extend(params, state, cache, x, at):  # prints the room of its cache
        return jnp.full((len(x), 97), 0.0).at[:, jnp.minimum(cache["room"], 96)].set(1.0), cache

    model = fnet.Layer(None, None, Decode(cache_of, extend, (5,)))
    run = functools.partial(fnet.generate, model, {}, {}, key=jax.random.key(0), temperature=0.0)
    assert run(jnp.zeros((1, 3), int), length=5)[0].tolist() == [5, 5, 5, 7, 7]
    assert run(jnp.zeros((1, 3), int), length=3)[0].tolist() == [5, 5, 5]
    assert run(jnp.zeros((1, 9), int), length=2)[0].tolist() == [10, 10]


UNIFORM = fnet.Layer(
    None,
    None,
    Decode(
        lambda batch, length: {},
        lambda params, state, cache, x, at: (jnp.zeros((len(x), 97)), cache),
    ),
)


@pytest.mark.parametrize("chunk", [2, 7])
def test_token_n_is_sampled_with_the_key_folded_with_n(chunk):
    key, prompt = jax.random.key(3), jnp.zeros((2, 3), jnp.int32)
    chunks = list(fnet.stream(UNIFORM, {}, {}, prompt, key, 5, chunk=chunk))
    expected = [fnet.sample_token(jax.random.fold_in(key, n), jnp.zeros((2, 97))) for n in range(5)]
    chex.assert_trees_all_equal(jnp.concatenate(chunks, 1), jnp.stack(expected, 1))


@pytest.mark.parametrize(
    ("shape", "length", "message"),
    [((2, 3), 0, "must be >= 1, got 0 and 16"), ((3,), 4, r"prompt must be \[B, P\].*\(3,\)")],
)
def test_stream_rejects_zero_length_and_prompt_without_batch(shape, length, message):
    prompt = jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError, match=message):
        next(fnet.stream(UNIFORM, {}, {}, prompt, jax.random.key(0), length))
