"""Golden: optax's cross-entropy of whole logits, and the defining formulas through autodiff."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import losses
from fnet.backward_pass import recompute
from fnet.losses import linear_cross_entropy
from fnet.memory import compile_smallest, peak

D, V = 5, 37
S = jax.ShapeDtypeStruct


def arrays(*tokens, dtype=jnp.float64, width=D, words=V, seed=0):
    """x, kernel, bias, labels, and weights that make one number of the losses."""
    rng = np.random.default_rng(seed)
    shapes = ((*tokens, width), (width, words), (words,), tokens)
    x, kernel, bias, weights = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return x, kernel, bias, jnp.asarray(rng.integers(0, words, tokens)), weights


def whole_logits(x, kernel, bias=None, *, soft_cap=None):
    """In float32 or wider, of the numbers given."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = x.astype(wide) @ kernel.astype(wide)
    if bias is not None:
        z += jnp.expand_dims(bias.astype(wide), range(z.ndim - 1))
    return z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)


def from_whole_logits(
    x, kernel, labels, *, bias=None, mask=None, smoothing=0.0, z_loss=0.0, soft_cap=None
):
    """The docstring's formula, written down."""
    z = whole_logits(x, kernel, bias, soft_cap=soft_cap)
    lse = jax.nn.logsumexp(z, -1)
    picked = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
    got = lse - (1 - smoothing) * picked - smoothing * z.mean(-1) + z_loss * lse**2
    return got if mask is None else jnp.where(mask, got, 0)


def with_gradients(f, labels, weights, **options):
    """Losses and the gradients by x, kernel and bias of their weighted sum; compiled."""

    @jax.jit
    def both(x, kernel, bias):
        def of_arrays(x, kernel, bias):
            return f(x, kernel, labels, bias=bias, **options)

        got, pullback = jax.vjp(of_arrays, x, kernel, bias)
        return got, pullback(weights.astype(got.dtype))

    return both


@pytest.mark.parametrize(
    ("tokens", "chunk"),
    [((), 8), ((6,), 1), ((6,), V), ((2, 3), 10), ((2, 1, 3), None)],
)
@pytest.mark.usefixtures("float64")
def test_losses_and_gradients_are_those_of_optax(tokens, chunk):
    x, kernel, bias, labels, weights = arrays(*tokens)

    def of_optax(x, kernel, labels, *, bias):
        logits = whole_logits(x, kernel, bias)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    got = with_gradients(linear_cross_entropy, labels, weights, chunk=chunk)(x, kernel, bias)
    want = with_gradients(of_optax, labels, weights)(x, kernel, bias)
    assert got[0].shape == tokens
    assert got[0].dtype == jnp.float64
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_float32_is_within_rounding_of_optax():
    x, kernel, bias, labels, weights = arrays(64, dtype=jnp.float32, width=32, words=1500)

    def of_optax(x, kernel, labels, *, bias):
        logits = whole_logits(x, kernel, bias)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    got = with_gradients(linear_cross_entropy, labels, weights)(x, kernel, bias)
    want = with_gradients(of_optax, labels, weights)(x, kernel, bias)
    chex.assert_trees_all_equal_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_has_float32_losses_and_gradients_as_good_as_one_rounding(kernel_dtype):
    x, kernel, bias, labels, weights = arrays(64, dtype=jnp.float32, width=32, words=500)
    # Numbers that bfloat16 has, so that only what is computed is rounded.
    x, kernel = (a.astype(jnp.bfloat16) for a in (x, kernel))
    got = with_gradients(linear_cross_entropy, labels, weights, chunk=64)(
        x, kernel.astype(kernel_dtype), bias
    )
    want = with_gradients(from_whole_logits, labels, weights)(
        x.astype(jnp.float32), kernel.astype(jnp.float32), bias
    )
    assert got[0].dtype == jnp.float32
    assert [g.dtype for g in got[1]] == [x.dtype, kernel_dtype, bias.dtype]
    chex.assert_trees_all_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for g, w in zip(got[1], want[1], strict=True):
        error = jnp.linalg.norm((g.astype(jnp.float32) - w).ravel())
        assert error < 2**-8 * jnp.linalg.norm(w.ravel())


def test_the_kernels_gradient_is_summed_in_float32():
    # 4,096 equal parts: in bfloat16 a sum stops growing at 256 times a part.
    tokens, words = 4096, 4
    x, kernel = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((1, words), jnp.bfloat16)
    labels = jnp.zeros(tokens, int)
    got = jax.grad(lambda k: linear_cross_entropy(x, k, labels, chunk=2).sum())(kernel)
    chex.assert_trees_all_equal(got.astype(jnp.float32), jnp.asarray([[-3072.0, 1024, 1024, 1024]]))


OPTIONS = {
    "smoothing": {"smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "soft cap": {"soft_cap": 1.5},
}
ALL_OPTIONS = {"smoothing": 0.2, "z_loss": 0.03, "soft_cap": 2.0}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.usefixtures("float64")
def test_each_option_is_its_formula(options):
    x, kernel, bias, labels, weights = arrays(2, 3)
    got = with_gradients(linear_cross_entropy, labels, weights, chunk=8, **options)(x, kernel, bias)
    want = with_gradients(from_whole_logits, labels, weights, **options)(x, kernel, bias)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_smoothing_means_what_it_means_to_cross_entropy():
    x, kernel, _, labels, _ = arrays(6, dtype=jnp.float32)

    @jax.jit
    def both(x, kernel):
        fused = linear_cross_entropy(x, kernel, labels, smoothing=0.1, chunk=8)
        return fused, losses.cross_entropy(x @ kernel, labels, smoothing=0.1)

    chex.assert_trees_all_close(*both(x, kernel), rtol=1e-5)


@pytest.mark.usefixtures("float64")
def test_an_embeddings_matrix_is_taken_as_it_is():
    x, kernel, bias, labels, weights = arrays(2, 3)
    flipped = with_gradients(
        linear_cross_entropy, labels, weights, vocab_axis=0, chunk=8, **ALL_OPTIONS
    )
    losses_, (dx, dembedding, dbias) = flipped(x, kernel.T, bias)
    want = with_gradients(from_whole_logits, labels, weights, **ALL_OPTIONS)(x, kernel, bias)
    chex.assert_trees_all_close((losses_, (dx, dembedding.T, dbias)), want, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_masked_tokens_count_nothing_whatever_they_hold():
    x, kernel, bias, labels, weights = arrays(8)
    real = np.array([1, 0, 1, 1, 0, 1, 0, 0], bool)
    x = x.at[1].set(jnp.nan).at[4].set(jnp.inf)
    labels = labels.at[~real].set(jnp.asarray([-100, V, 3, -1]))
    options = ALL_OPTIONS | {"chunk": 8}
    got, (dx, dkernel, dbias) = with_gradients(
        linear_cross_entropy, labels, weights, mask=jnp.asarray(real), **options
    )(x, kernel, bias)
    fewer, (dx_fewer, dkernel_fewer, dbias_fewer) = with_gradients(
        linear_cross_entropy, labels[real], weights[real], **options
    )(x[real], kernel, bias)
    assert (got[~real] == 0).all()
    assert (dx[~real] == 0).all()
    chex.assert_trees_all_close(
        (got[real], dx[real], dkernel, dbias),
        (fewer, dx_fewer, dkernel_fewer, dbias_fewer),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.usefixtures("float64")
def test_words_with_bias_minus_infinity_have_no_probability():
    x, kernel, bias, labels, weights = arrays(6)
    labels = labels % (V - 20) + 20  # none of the first 20 words, which fill two chunks and a half
    bias = bias.at[:20].set(-jnp.inf)
    got, (dx, dkernel, dbias) = with_gradients(linear_cross_entropy, labels, weights, chunk=8)(
        x, kernel, bias
    )
    fewer, (dx_fewer, dkernel_fewer, dbias_fewer) = with_gradients(
        linear_cross_entropy, labels - 20, weights, chunk=8
    )(x, kernel[:, 20:], bias[20:])
    chex.assert_trees_all_close((got, dx), (fewer, dx_fewer), rtol=1e-10, atol=1e-12)
    chex.assert_trees_all_close(dkernel, jnp.pad(dkernel_fewer, ((0, 0), (20, 0))), atol=1e-12)
    chex.assert_trees_all_close(dbias, jnp.pad(dbias_fewer, (20, 0)), atol=1e-12)


def test_logits_far_beyond_what_exp_can_hold_give_finite_losses():
    x, kernel = jnp.asarray([[1000.0]]), jnp.asarray([[-1.0, 0, 1, 0.5]])
    got, gradients = jax.value_and_grad(
        lambda x, k: linear_cross_entropy(x, k, jnp.asarray([0]), chunk=1).sum(), argnums=(0, 1)
    )(x, kernel)
    chex.assert_trees_all_close(got, 2000.0)
    chex.assert_trees_all_close(
        gradients, (jnp.asarray([[2.0]]), jnp.asarray([[-1000.0, 0, 1000, 0]]))
    )


def test_a_label_that_is_no_word_gives_nan_and_only_there():
    x, kernel, *_ = arrays(6, dtype=jnp.float32)
    labels = jnp.asarray([0, -1, V - 1, -100, V, 10 * V])
    got = linear_cross_entropy(x, kernel, labels, chunk=8)
    assert np.isnan(got).tolist() == [False, True, False, True, True, True]


def test_labels_may_be_narrower_than_the_vocabulary():
    x, kernel, _, labels, _ = arrays(3, dtype=jnp.float32, words=300)
    labels = labels % 256
    got = linear_cross_entropy(x, kernel, labels.astype(jnp.uint8), chunk=8)
    chex.assert_trees_all_equal(got, linear_cross_entropy(x, kernel, labels, chunk=8))


@pytest.mark.usefixtures("float64")
def test_gradients_of_each_example_by_vmap_are_those_of_a_loop():
    x, kernel, bias, labels, _ = arrays(4, 3)

    def of_one(x, kernel, bias, labels):
        return linear_cross_entropy(x, kernel, labels, bias=bias, chunk=8, z_loss=0.01).sum()

    gradients = jax.jit(jax.grad(of_one, argnums=(0, 1, 2)))
    got = jax.vmap(gradients, (0, None, None, 0))(x, kernel, bias, labels)
    each = [gradients(x[i], kernel, bias, labels[i]) for i in range(4)]
    chex.assert_trees_all_close(got, jax.tree.map(lambda *g: jnp.stack(g), *each), atol=1e-12)


@pytest.mark.parametrize("outer", [jax.jvp, jax.vjp], ids=["forward", "reverse"])
@pytest.mark.usefixtures("float64")
def test_second_derivatives_are_right_over_reverse(outer):
    x, kernel, bias, labels, weights = arrays(3)

    def gradients(f):
        return jax.grad(lambda p: (f(p[0], p[1], labels, bias=p[2]) * weights).sum())

    @functools.partial(jax.jit, static_argnums=0)
    def hessian_times(f, vector):
        if outer is jax.jvp:
            return jax.jvp(gradients(f), ((x, kernel, bias),), (vector,))[1]
        return jax.vjp(gradients(f), (x, kernel, bias))[1](vector)[0]

    options = {"soft_cap": 2.0, "z_loss": 0.1, "smoothing": 0.1}
    vector = arrays(3, seed=1)[:3]
    got = hessian_times(functools.partial(linear_cross_entropy, chunk=8, **options), vector)
    want = hessian_times(functools.partial(from_whole_logits, **options), vector)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_forward_mode_alone_is_refused():
    x, kernel, _, labels, _ = arrays(3, dtype=jnp.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: linear_cross_entropy(x, kernel, labels), (x,), (x,))


def test_recompute_keeps_the_logsumexp_and_does_not_pass_over_the_words_again():
    x, kernel, _, labels, _ = arrays(3, dtype=jnp.float32)

    def loss(x, kernel):
        return linear_cross_entropy(x, kernel, labels, chunk=8).sum()

    loops = [
        str(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(x, kernel)).count(" scan[")
        for f in (loss, recompute(loss), jax.checkpoint(loss))
    ]
    assert loops == [2, 2, 3]


def mesh(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


@functools.cache
def on_one_device():
    """Arguments [4, 8, ...] with a mask, and what they give unsharded."""
    x, kernel, bias, labels, weights = arrays(4, 8)
    mask = jnp.arange(8)[None] < jnp.asarray([[8], [3], [0], [5]])
    arguments = (x, kernel, bias, labels, mask, weights)
    return arguments, losses_and_gradients(*arguments)


@jax.jit
def losses_and_gradients(x, kernel, bias, labels, mask, weights):
    return with_gradients(linear_cross_entropy, labels, weights, mask=mask, chunk=8, z_loss=0.01)(
        x, kernel, bias
    )


@pytest.mark.parametrize(
    ("spec", "axis_type"),
    [
        (P(("a", "b")), AxisType.Auto),
        (P("a", "b"), AxisType.Auto),
        (P("a", "b"), AxisType.Explicit),
    ],
)
@pytest.mark.usefixtures("float64")
def test_sharded_tokens_under_jit_give_what_one_device_gives(spec, axis_type):
    arguments, want = on_one_device()
    devices = mesh((2, 2), ("a", "b"), axis_type)
    rows, copies = NamedSharding(devices, spec), NamedSharding(devices, P())
    sharded = jax.device_put(arguments, (rows, copies, copies, rows, rows, rows))
    compiled = losses_and_gradients.lower(*sharded).compile()
    got = compiled(*sharded)
    assert got[0].sharding.is_equivalent_to(rows, 2)
    assert got[1][0].sharding.is_equivalent_to(rows, 3)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.usefixtures("float64")
def test_a_kernel_sharded_over_its_words_under_jit_gives_the_right_gradients():
    x, kernel, bias, labels, weights = arrays(8, words=36)
    f = with_gradients(linear_cross_entropy, labels, weights, chunk=8)
    want = f(x, kernel, bias)
    words = NamedSharding(mesh((4,), ("a",)), P(None, "a"))
    got = f(x, jax.device_put(kernel, words), bias)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_kernel_explicitly_sharded_over_its_words_is_refused():
    x, kernel, _, labels, _ = arrays(8, dtype=jnp.float32, words=36)
    devices = mesh((4,), ("a",), AxisType.Explicit)
    kernel = jax.device_put(kernel, NamedSharding(devices, P(None, "a")))
    with pytest.raises(ValueError, match=r"kernel must not be sharded over its words, got 'a'"):
        linear_cross_entropy(x, kernel, labels)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.usefixtures("float64")
def test_inside_shard_map_the_gradients_are_complete(check_vma):
    (x, kernel, bias, labels, mask, weights), want = on_one_device()
    rows = P("a")

    def f(x, kernel, labels, *, bias, mask):
        def on_each(x, kernel, labels, bias, mask):
            return linear_cross_entropy(
                x, kernel, labels, bias=bias, mask=mask, chunk=8, z_loss=0.01
            )

        return jax.shard_map(
            on_each,
            mesh=mesh((4,), ("a",)),
            in_specs=(rows, P(), rows, P(), rows),
            out_specs=rows,
            check_vma=check_vma,
        )(x, kernel, labels, bias, mask)

    got = with_gradients(f, labels, weights, mask=mask)(x, kernel, bias)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


TOKENS, WIDTH, WORDS = 1024, 256, 32_768
SHAPES = (S((TOKENS, WIDTH), jnp.float32), S((WIDTH, WORDS), jnp.float32), S((TOKENS,), jnp.int32))


def value_and_gradients(f, argnums=(0, 1)):
    return jax.jit(jax.value_and_grad(lambda *a: f(*a).mean(), argnums=argnums))


@functools.cache
def temporaries(f, words=WORDS):
    """Of value and gradients, with the compiler options that need the least."""
    x, _, labels = SHAPES
    lowered = value_and_gradients(f).lower(x, S((WIDTH, words), jnp.float32), labels)
    return peak(compile_smallest(lowered)[0]).temporaries


def of_whole_logits(x, kernel, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ kernel, labels)


def test_temporaries_are_a_small_part_of_those_of_whole_logits():
    assert temporaries(linear_cross_entropy) <= 0.03 * temporaries(of_whole_logits)


def test_four_times_the_words_take_the_same_bytes():
    assert temporaries(linear_cross_entropy, 4 * WORDS) == temporaries(linear_cross_entropy)


def test_options_take_next_to_nothing():
    f = functools.partial(linear_cross_entropy, **ALL_OPTIONS)
    assert temporaries(f) <= 1.01 * temporaries(linear_cross_entropy)


CHUNK_OF_LOGITS = 4 * TOKENS * 1024
x_, kernel_, labels_ = SHAPES
OTHER_CALLS = {
    "losses alone": (jax.jit(linear_cross_entropy), SHAPES),
    "a gradient of x alone": (value_and_gradients(linear_cross_entropy, argnums=0), SHAPES),
    "words that are no multiple of the chunk": (
        value_and_gradients(linear_cross_entropy),
        (x_, S((WIDTH, 50_257), jnp.float32), labels_),
    ),
    "two dimensions of tokens": (
        value_and_gradients(linear_cross_entropy),
        (S((8, 128, WIDTH), jnp.float32), kernel_, S((8, 128), jnp.int32)),
    ),
    "bfloat16 with a float32 kernel": (
        value_and_gradients(linear_cross_entropy),
        (S((TOKENS, WIDTH), jnp.bfloat16), kernel_, labels_),
    ),
    "an embedding's matrix": (
        value_and_gradients(functools.partial(linear_cross_entropy, vocab_axis=0)),
        (x_, S((WORDS, WIDTH), jnp.float32), labels_),
    ),
}


@pytest.mark.parametrize(("jitted", "shapes"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_nothing_of_the_logits_or_the_kernels_size_is_made(jitted, shapes):
    assert peak(jitted.lower(*shapes).compile()).temporaries <= 2.5 * CHUNK_OF_LOGITS


def test_a_second_derivative_forward_over_reverse_stays_chunked():
    gradients = jax.grad(lambda *a: linear_cross_entropy(*a).mean(), argnums=(0, 1))

    @jax.jit
    def hessian_times(x, kernel, labels, *vector):
        return jax.jvp(lambda *arrays: gradients(*arrays, labels), (x, kernel), vector)[1]

    compiled = hessian_times.lower(*SHAPES, *SHAPES[:2]).compile()
    assert peak(compiled).temporaries <= 5 * CHUNK_OF_LOGITS


def test_temporaries_follow_the_chunk():
    small, large = (
        temporaries(functools.partial(linear_cross_entropy, chunk=c)) for c in (256, 4096)
    )
    assert large - small == pytest.approx(4 * (TOKENS + WIDTH) * (4096 - 256), rel=0.2)


BAD = {
    "kernel of another width": (
        {"kernel": jnp.ones((4, V))},
        r"x \(6, 5\) and vocab_axis=1 kernel must have shape \(5, V\), got \(4, 37\)",
    ),
    "kernel the other way round": (
        {"kernel": jnp.ones((V, D))},
        r"kernel must have shape \(5, V\), got \(37, 5\)",
    ),
    "embedding the other way round": (
        {"vocab_axis": 0},
        r"vocab_axis=0 kernel must have shape \(V, 5\), got \(5, 37\)",
    ),
    "no words": ({"kernel": jnp.ones((D, 0))}, r"a word and a feature, got \(5, 0\)"),
    "no axis": ({"x": jnp.ones(())}, r"rank >= 1, got shape \(\)"),
    "labels": (
        {"labels": jnp.zeros((6, 1), int)},
        r"labels must have shape \(6,\), that of x \(6, 5\) .*, got \(6, 1\)",
    ),
    "bias": ({"bias": jnp.ones(D)}, r"bias must have shape \(37,\), .*\(5, 37\), got \(5,\)"),
    "mask's shape": (
        {"mask": jnp.ones(5, bool)},
        r"mask must be bool of shape \(6,\), got bool \(5,\)",
    ),
    "mask's dtype": ({"mask": jnp.ones(6)}, r"mask must be bool of shape \(6,\), got float32"),
    "vocab_axis": ({"vocab_axis": -1}, "vocab_axis must be 0 or 1, got -1"),
    "chunk": ({"chunk": 0}, r"chunk must be an integer >= 1, .*, got 0"),
    "chunk's type": ({"chunk": 8.0}, r"chunk must be an integer >= 1, .*, got 8.0"),
    "smoothing": ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
    "z_loss": ({"z_loss": -0.1}, "z_loss must be >= 0, got -0.1"),
    "soft_cap": ({"soft_cap": 0.0}, r"soft_cap must be > 0, or None for no cap, got 0.0"),
}
BAD_TYPES = {
    "labels": ({"labels": jnp.zeros(6)}, "labels must be integers, .*, got float32"),
    "x": ({"x": jnp.ones((6, D), int)}, "x must be floating, got int32"),
    "kernel": ({"kernel": jnp.ones((D, V), int)}, "kernel must be floating, got int32"),
    "bias": ({"bias": jnp.ones(V, int)}, "bias must be floating, got int32"),
}


def call_with(changes):
    x, kernel, _, labels, _ = arrays(6, dtype=jnp.float32)
    linear_cross_entropy(**({"x": x, "kernel": kernel, "labels": labels} | changes))


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_with_both_values(changes, message):
    with pytest.raises(ValueError, match=f"linear_cross_entropy: .*{message}"):
        call_with(changes)


@pytest.mark.parametrize(("changes", "message"), BAD_TYPES.values(), ids=BAD_TYPES)
def test_other_dtypes_are_refused(changes, message):
    with pytest.raises(TypeError, match=f"linear_cross_entropy: {message}"):
        call_with(changes)
