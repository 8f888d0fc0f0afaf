"""Compiled memory of `linear_cross_entropy`: chunks of logits, and no copy of the kernel."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from linear_cross_entropy_cases import ALL_OPTIONS

from fnet.losses.linear_cross_entropy import linear_cross_entropy
from fnet.memory import compile_min_memory, peak

S = jax.ShapeDtypeStruct
TOKENS, WIDTH, VOCABULARY = 1024, 256, 32_768
SHAPES = (
    S((TOKENS, WIDTH), jnp.float32),
    S((WIDTH, VOCABULARY), jnp.float32),
    S((TOKENS,), jnp.int32),
)


def value_and_gradients(f, argnums=(0, 1)):
    return jax.jit(jax.value_and_grad(lambda *a: f(*a).mean(), argnums=argnums))


@functools.cache
def temporaries(f, vocabulary=VOCABULARY):
    """Temporaries of value and gradients, with the compiler options that need the least."""
    x, _, labels = SHAPES
    lowered = value_and_gradients(f).lower(x, S((WIDTH, vocabulary), jnp.float32), labels)
    return peak(compile_min_memory(lowered)[0]).temporaries


def optax_losses(x, kernel, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ kernel, labels)


def test_temporaries_are_at_most_3_percent_of_optax():
    assert temporaries(linear_cross_entropy) <= 0.03 * temporaries(optax_losses)


def test_temporaries_do_not_depend_on_the_vocabulary():
    assert temporaries(linear_cross_entropy, 4 * VOCABULARY) == temporaries(linear_cross_entropy)


def test_options_add_at_most_1_percent_of_temporaries():
    f = functools.partial(linear_cross_entropy, **ALL_OPTIONS)
    assert temporaries(f) <= 1.01 * temporaries(linear_cross_entropy)


CHUNK_OF_LOGITS = 4 * TOKENS * 1024
x_, kernel_, labels_ = SHAPES
OTHER_CALLS = {
    "losses only": (jax.jit(linear_cross_entropy), SHAPES),
    "vocabulary not divisible by the chunk": (
        value_and_gradients(linear_cross_entropy),
        (x_, S((WIDTH, 50_257), jnp.float32), labels_),
    ),
    "bfloat16 with a float32 kernel": (
        value_and_gradients(linear_cross_entropy),
        (S((TOKENS, WIDTH), jnp.bfloat16), kernel_, labels_),
    ),
    "embedding table": (
        value_and_gradients(functools.partial(linear_cross_entropy, vocab_axis=0)),
        (x_, S((VOCABULARY, WIDTH), jnp.float32), labels_),
    ),
}


@pytest.mark.parametrize(("jitted", "shapes"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_neither_logits_nor_a_copy_of_the_kernel_are_materialized(jitted, shapes):
    assert peak(jitted.lower(*shapes).compile()).temporaries <= 2.5 * CHUNK_OF_LOGITS


def test_forward_over_reverse_stays_chunked():
    gradients = jax.grad(lambda *a: linear_cross_entropy(*a).mean(), argnums=(0, 1))

    @jax.jit
    def hessian_times(x, kernel, labels, *vector):
        return jax.jvp(lambda *arrays: gradients(*arrays, labels), (x, kernel), vector)[1]

    compiled = hessian_times.lower(*SHAPES, *SHAPES[:2]).compile()
    assert peak(compiled).temporaries <= 5 * CHUNK_OF_LOGITS


def test_temporaries_grow_with_the_chunk():
    small, large = (
        temporaries(functools.partial(linear_cross_entropy, chunk=c)) for c in (256, 4096)
    )
    assert large - small == pytest.approx(4 * (TOKENS + WIDTH) * (4096 - 256), rel=0.2)
