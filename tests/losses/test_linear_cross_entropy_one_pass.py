"""`linear_cross_entropy` with the gradient in the forward pass, which a CPU does not choose."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from example_losses import Case, assert_clipped_like_a_loop
from linear_cross_entropy_cases import ALL_OPTIONS, arrays, reference_losses

import fnet
from fnet.losses import linear_cross_entropy as module

TOKENS = 23
COUNTED = jnp.arange(TOKENS) % 3 > 0
WEIGHTS = jnp.where(jnp.arange(TOKENS) % 5 > 0, 0.1 + jnp.arange(TOKENS) / TOKENS, 0)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """As on one GPU, with several tiles of tokens."""
    jax.clear_caches()
    monkeypatch.setattr(module, "_is_in_one_pass", lambda x: not module.keeps_examples_apart())


def weighted(x, kernel, labels, *, weights=None, **options):
    losses = reference_losses(x, kernel, labels, **options)
    return losses if weights is None else losses * weights


def gradients(f, labels, **options):
    @jax.jit
    def both(ct, x, kernel, bias):
        got, pullback = jax.vjp(lambda *a: f(*a[:2], labels, bias=a[2], **options), x, kernel, bias)
        return got, pullback(ct.astype(got.dtype))

    return both


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": WEIGHTS},
        {"mask": COUNTED, "weights": WEIGHTS, **ALL_OPTIONS},
        {"mask": jnp.zeros(TOKENS, bool)},
    ],
    ids=["all", "weights", "all options", "none"],
)
@pytest.mark.usefixtures("float64")
def test_losses_and_gradients_are_those_of_the_formula(options):
    x, kernel, bias, labels, uneven = arrays(TOKENS)
    ours = gradients(fnet.linear_cross_entropy, labels, **options)
    formula = gradients(weighted, labels, **options)
    # Equal cotangents scale the gradient of the forward pass, others need it again.
    for ct in (jnp.full(TOKENS, 0.7), uneven):
        got, want = (f(ct, x, kernel, bias) for f in (ours, formula))
        chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_an_embedding_table_and_tokens_of_two_axes():
    x, kernel, bias, labels, _ = arrays(2, 7)
    options = {"weights": WEIGHTS[:14].reshape(2, 7), **ALL_OPTIONS}
    ours = gradients(functools.partial(fnet.linear_cross_entropy, vocab_axis=0), labels, **options)
    got, (dx, dtable, dbias) = ours(jnp.ones((2, 7)), x, kernel.T, bias)
    want = gradients(weighted, labels, **options)(jnp.ones((2, 7)), x, kernel, bias)
    chex.assert_trees_all_close((got, (dx, dtable.T, dbias)), want, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_a_kernel_of_float16_does_not_overflow():
    x = jnp.full((2**14, 1), 8, jnp.float16)
    kernel, labels = jnp.zeros((1, 4), jnp.float16), jnp.zeros(2**14, int)
    grads = jax.jit(jax.grad(lambda k: fnet.linear_cross_entropy(x, k, labels).mean()))(kernel)
    chex.assert_trees_all_equal(grads, jnp.array([[-6, 2, 2, 2]], jnp.float16))


def test_padding_may_be_nan_and_a_label_out_of_range_gives_nan():
    x, kernel, bias, labels, _ = arrays(TOKENS, dtype=jnp.float32)
    x = jnp.where(COUNTED[:, None], x, jnp.nan)
    step = gradients(fnet.linear_cross_entropy, jnp.where(COUNTED, labels, -100), mask=COUNTED)
    losses, grads = step(jnp.ones(TOKENS), x, kernel, bias)
    chex.assert_tree_all_finite((losses, grads))
    assert not losses[~COUNTED].any()
    assert not grads[0][~COUNTED].any()
    wrong = gradients(fnet.linear_cross_entropy, labels.at[4].set(-100))
    losses, (dx, *_) = wrong(jnp.ones(TOKENS), jnp.nan_to_num(x), kernel, bias)
    assert list(jnp.flatnonzero(jnp.isnan(losses))) == [4]
    assert not dx[4].any()


@pytest.mark.parametrize(
    ("outer", "options"),
    [(jax.jvp, {"weights": WEIGHTS}), (jax.vjp, {"mask": COUNTED})],
    ids=["forward", "reverse"],
)
@pytest.mark.usefixtures("float64")
def test_second_derivatives_match_the_formula(outer, options):
    x, kernel, bias, labels, _ = arrays(TOKENS)
    vector = arrays(TOKENS, seed=1)[:3]

    @functools.partial(jax.jit, static_argnums=0)
    def hessian_times(f):
        def total(p):
            return f(p[0], p[1], labels, bias=p[2], **options, **ALL_OPTIONS).sum()

        if outer is jax.jvp:
            return jax.jvp(jax.grad(total), ((x, kernel, bias),), (vector,))[1]
        return jax.vjp(jax.grad(total), (x, kernel, bias))[1](vector)[0]

    got, want = hessian_times(fnet.linear_cross_entropy), hessian_times(weighted)
    chex.assert_trees_all_close(got, want, rtol=1e-9, atol=1e-11)


def test_tokens_that_do_not_count_are_skipped():
    """The number of tiles is known at run time with a mask, and when traced without."""
    x, kernel, _, labels, _ = arrays(32, dtype=jnp.float32)

    def loops(**mask):
        def total(x, **mask):
            return fnet.linear_cross_entropy(x, kernel, labels, **mask).sum()

        text = str(jax.make_jaxpr(jax.grad(total))(x, **mask))
        return text.count("while["), text.count("scan[")

    # In the forward pass, and again for other cotangents.
    assert loops() == (0, 2)
    assert loops(mask=jnp.ones(32, bool)) == (2, 0)


@pytest.mark.usefixtures("float64")
def test_rounded_cotangents_count_as_equal():
    x, kernel, bias, labels, _ = arrays(TOKENS, dtype=jnp.float32)
    ct = jnp.full(TOKENS, 0.7, jnp.float32).at[3].multiply(1 + 2.0**-23)
    got = gradients(fnet.linear_cross_entropy, labels)(ct, x, kernel, bias)
    want = gradients(weighted, labels)(ct, x, kernel, bias)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_gradient_takes_three_products_and_no_more_memory_than_a_quarter_of_the_logits():
    x, kernel, labels = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((512, 64), "float32"), ((64, 8192), "float32"), ((512,), "int32"))
    )
    step = jax.jit(
        jax.value_and_grad(lambda *a: fnet.linear_cross_entropy(*a).mean(), argnums=(0, 1))
    )
    compiled = step.lower(x, kernel, labels).compile()
    logits = 4 * 512 * 8192
    assert fnet.memory.peak(compiled).temporaries < 0.8 * logits
    text = compiled.as_text()
    assert "conditional" not in text  # The cotangents of a mean are known when it is compiled.


def test_examples_under_clipped_grad_stay_apart():
    x, kernel, _, labels, _ = arrays(4, 6, dtype=jnp.float32)

    def losses(kernel, x, labels):
        return fnet.linear_cross_entropy(x, kernel, labels).mean(1)

    assert_clipped_like_a_loop(Case(losses, kernel, (x, labels)), 0.5)
