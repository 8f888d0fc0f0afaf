"""Options of attention, stacks and language models that pretrained models need."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import layers, models
from fnet.layers import rotary
from fnet.layers.dot_product_attention import dot_product_attention


def naive_attention(q, k, v, *, causal, window, segments, scale, soft_cap):
    """The definition, with all scores, in NumPy's float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
    allowed = np.broadcast_to((j <= i) if causal else True, (q.shape[0], 1, len(i), len(i)))
    if window:
        allowed = allowed & (np.abs(i - j) < window)
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None])
    weights = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("causal", "window", "soft_cap"), [(True, None, 0.7), (True, 3, None), (False, 3, 0.7)]
)
def test_soft_cap_and_segments_match_the_definition(causal, window, soft_cap):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 11, 4, 6))
    k, v = k[:, :, :2], v[:, :, :2]
    segments = np.array([[1] * 4 + [2] * 7, [3] * 9 + [0] * 2])
    options = {"causal": causal, "window": window, "soft_cap": soft_cap, "scale": 0.9}
    expected = naive_attention(q, k, v, segments=segments, **options)
    for chunk in (None, 4):
        y = dot_product_attention(q, k, v, segments=jnp.asarray(segments), chunk=chunk, **options)
        chex.assert_trees_all_close(y, expected.astype(np.float32), atol=2e-6)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"soft_cap": 0.0}, ValueError, "soft_cap must be > 0, got 0.0"),
        ({"segments": jnp.zeros((1, 5), int)}, ValueError, r"segments must have shape \(1, 8\)"),
        ({"segments": jnp.zeros((1, 8))}, TypeError, "segments must be integers, got float32"),
    ],
)
def test_attention_rejects(options, error, match):
    q = jnp.zeros((1, 8, 1, 4))
    with pytest.raises(error, match=match):
        dot_product_attention(q, q, q, **options)


@pytest.mark.parametrize(("over", "window"), [("head", 3), ("heads", None)])
def test_decoding_matches_the_whole_sequence(over, window):
    layer = layers.attention(
        8, heads=2, groups=1, head_dim=6, causal=True, window=window, bias=False,
        rotary=layers.Rotary([1.0, 0.1]),
        variant=layers.AttentionVariant(
            output_bias=True, qk_norm=layers.rms_norm, qk_norm_over=over, scale=0.8, soft_cap=2.0
        ),
    )  # fmt: skip
    params, _ = layer.init(jax.random.key(0))
    sizes = {"head": (6, 6), "heads": (12, 6)}[over]
    assert (params["query_norm"]["scale"].size, params["key_norm"]["scale"].size) == sizes
    assert "bias" in params["output"]
    assert "bias" not in params["query_key_value"]
    x = jax.random.normal(jax.random.key(1), (2, 9, 8))
    whole, _ = layer.apply(params, {}, x, train=False)
    cache = layer.decode.init_cache(2, 9, jnp.float32)
    extend = jax.jit(layer.decode.extend)
    first, cache = extend(params, {}, cache, x[:, :4], jnp.int32(0))
    parts = [first]
    for i in range(4, 9):
        y, cache = extend(params, {}, cache, x[:, i : i + 1], jnp.int32(i))
        parts.append(y)
    chex.assert_trees_all_close(jnp.concatenate(parts, 1), whole, atol=2e-6)


def test_frequencies_rotate_the_first_features_only():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    at = jnp.arange(5)
    chex.assert_trees_all_close(
        rotary(x, at, [10000.0 ** (-i / 4) for i in range(4)]), rotary(x, at), atol=1e-6
    )
    y = rotary(x, at, [0.5, 0.1])
    chex.assert_trees_all_equal(y[..., 4:], x[..., 4:])
    chex.assert_trees_all_close(
        y[0, 3, 0, 0], x[0, 3, 0, 0] * np.cos(1.5) - x[0, 3, 0, 2] * np.sin(1.5), atol=1e-6
    )
    scaled = rotary(x, at, [0.5, 0.1], 1.5)
    chex.assert_trees_all_close(scaled[..., :4], 1.5 * y[..., :4], atol=1e-6)
    chex.assert_trees_all_equal(scaled[..., 4:], x[..., 4:])
    with pytest.raises(ValueError, match="expected 1 to 4 frequencies"):
        rotary(x, at, [0.1] * 5)


def test_post_norm_normalizes_each_branch():
    block = layers.Block(layers.dense(4, 4))
    net = layers.stack(4, [block], norm=None, post_norm="rms")

    # A mixer over the sequence may ignore it.
    params, _ = net.init(jax.random.key(0))
    assert sorted(params["0"]) == ["mixer", "mixer_post_norm"]
    x = jax.random.normal(jax.random.key(1), (1, 3, 4))
    branch = x @ params["0"]["mixer"]["kernel"]
    branch /= jnp.sqrt((branch**2).mean(-1, keepdims=True) + 1e-6)
    y, _ = net.apply(params, {}, x, train=True)
    chex.assert_trees_all_close(y, x + branch, atol=1e-6)


def test_residuals_in_float32_and_branches_in_bfloat16():
    net = layers.stack(4, [layers.Block(layers.dense(4, 4))] * 2, residual_dtype=jnp.float32)
    params, _ = net.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 3, 4), jnp.bfloat16)
    y, _ = net.apply(params, {}, x, train=True)
    expected = x.astype(jnp.float32)
    for i in ("0", "1"):
        h, _ = layers.rms_norm(4).apply(
            {"scale": jnp.ones(4)}, {}, expected.astype(x.dtype), train=True
        )
        branch, _ = layers.dense(4, 4).apply(params[i]["mixer"], {}, h, train=True)
        assert branch.dtype == jnp.bfloat16
        expected = expected + branch
    assert y.dtype == jnp.float32
    chex.assert_trees_all_equal(y, expected)

    model = small_model(dtype=jnp.bfloat16, residual_dtype=jnp.float32)
    params, _ = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 5), 0, 13)
    logits, _ = model.apply(params, {}, tokens, train=False)
    assert logits.dtype == jnp.bfloat16
    last, _ = model.decode.extend(params, {}, model.decode.init_cache(2, 5), tokens, jnp.int32(0))
    chex.assert_trees_all_close(last, logits[:, -1], atol=0.05)


def test_rms_norm_with_offset_stores_scale_minus_one():
    layer = layers.rms_norm(4, offset=1.0)
    params, _ = layer.init(jax.random.key(0))
    assert not params["scale"].any()
    x = jax.random.normal(jax.random.key(0), (2, 4))
    w = jnp.array([0.5, -0.5, 0.0, 2.0])
    y, _ = layer.apply({"scale": w.astype(jnp.bfloat16)}, {}, x, train=True)
    expected, _ = layers.rms_norm(4).apply({"scale": 1 + w}, {}, x, train=True)
    chex.assert_trees_all_close(y, expected, rtol=1e-6)
    y, _ = layers.rms_norm(4, scale=False, offset=1.0).apply({}, {}, x, train=True)
    chex.assert_trees_all_close(y, expected / (1 + w)[None], rtol=1e-6)


SCALED = models.LanguageModelVariant(embed_scale=2.0, logit_soft_cap=3.0)


def small_model(**options):
    mixer = layers.attention(8, 2, causal=True, rotary=100.0)
    block = layers.Block(mixer, layers.feed_forward(8, 16))
    model = models.language_model(vocabulary=13, width=8, blocks=[block, block], **options)
    return model._replace(
        init=jax.jit(model.init),
        apply=jax.jit(model.apply, static_argnames="train"),
        losses=jax.jit(model.losses, static_argnames="train"),
        decode=model.decode._replace(extend=jax.jit(model.decode.extend)),
    )


def test_packed_documents_have_the_losses_of_separate_rows():
    model = small_model(positions=6, tied=False, variant=SCALED)
    params, _ = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 10), 0, 13)
    labels = jnp.roll(tokens, -1, axis=1)
    segments = jnp.array([[1] * 4 + [2] * 6])
    with pytest.raises(ValueError, match="10 tokens, but positions are learned for 6"):
        model.losses(params, {}, tokens, labels, segments=segments, train=True)

    model = small_model(positions=10, tied=False, variant=SCALED)
    params, _ = model.init(jax.random.key(0))
    packed, _ = model.losses(params, {}, tokens, labels, segments=segments, train=True)
    parts = [
        model.losses(params, {}, tokens[:, part], labels[:, part], train=True)[0]
        for part in (slice(0, 4), slice(4, 10))
    ]
    chex.assert_trees_all_close(packed, jnp.concatenate(parts, 1), atol=1e-5)
    logits, _ = model.apply(params, {}, tokens, segments=segments, train=False)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    chex.assert_trees_all_close(packed, losses, atol=1e-5)
    assert jnp.abs(logits).max() <= 3.0


@pytest.mark.slow
def test_learned_positions_decode():
    model = small_model(positions=9, tied=False, variant=SCALED._replace(logit_soft_cap=5.0))
    params, _ = model.init(jax.random.key(0))
    assert params["pos_embedding"].shape == (9, 8)
    assert params["head"]["kernel"].shape == (8, 13)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 13)
    logits, _ = model.apply(params, {}, tokens, train=False)
    cache = model.decode.init_cache(2, 9)
    for first, last in ((0, 5), (5, 6), (6, 9)):
        got, cache = model.decode.extend(params, {}, cache, tokens[:, first:last], jnp.int32(first))
        chex.assert_trees_all_close(got, logits[:, last - 1], atol=1e-5)
    with pytest.raises(ValueError, match="a cache for 10 tokens"):
        model.decode.init_cache(2, 10)
