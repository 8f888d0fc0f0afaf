"""Clipped gradients of an accelerator, which keeps gradients in microbatches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from fnet.autodiff.examples import examples
from fnet.autodiff.per_example import backward
from fnet.cpu.tracing import traced_for
from fnet.jaxpr import find_equations

GPU = jax.sharding.AbstractDevice("", None, "gpu")
SIZE, TOKENS, WIDTH = 12, 256, 16


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(backward, "KEPT_ELEMENTS_PER_EQUATION", 1)
    with traced_for(GPU):
        yield


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"embed": (20, WIDTH), "up": (WIDTH, 32), "bias": (32,), "down": (32, WIDTH)}
    params = {n: jnp.asarray(0.3 * rng.normal(size=s), dtype) for n, s in shapes.items()}
    tokens = jnp.asarray(rng.integers(0, 20, (SIZE, TOKENS)))
    return params, tokens


def losses(params, tokens):
    x = params["embed"][tokens]
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None, None])
    masked = params["down"] * jnp.tri(32, WIDTH)
    y = x + hidden @ params["down"]
    return jnp.square(y @ masked.T).mean((1, 2))


def strategies(loss=losses):
    return fnet.autodiff.gradient_strategies(loss, *arrays())


def test_matrices_that_meet_many_tokens_are_kept_in_microbatches(accelerator):
    params, tokens = arrays()
    expected = jax.jit(fnet.clipped_grad(losses, 0.05, microbatch_size=1))(params, tokens)
    with jax.default_matmul_precision("float32"):
        got = jax.jit(fnet.clipped_grad(losses, 0.05))(params, tokens)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-7)
    # `down` is also part of a derived kernel, and few tokens meet a row of the table.
    assert strategies()["up"] == "autodiff"
    assert strategies()["bias"] != "autodiff"
    assert strategies()["embed"] != "autodiff"
    program = jax.make_jaxpr(fnet.clipped_grad(losses, 0.05))(params, tokens)
    assert f"i32[2,6,{TOKENS}]" in str(program)


def test_a_mask_and_per_layer_clips_stay(accelerator):
    params, tokens = arrays()
    mask = jnp.arange(SIZE) % 3 > 0
    for options in ({"per_layer": True}, {"rescale_to_unit_norm": True}):
        step = jax.jit(fnet.clipped_grad(losses, 0.05, **options))
        alone = jax.jit(fnet.clipped_grad(losses, 0.05, microbatch_size=1, **options))
        with jax.default_matmul_precision("float32"):
            got, expected = (f(params, tokens, mask=mask) for f in (step, alone))
        chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-7)


def test_kept_gradients_are_rounded_as_products_are_before_their_norm_is_taken(accelerator):
    params, tokens = arrays()
    clip = 0.05
    gradient = jax.jit(fnet.clipped_grad(losses, clip))
    exact = jax.jit(fnet.clipped_grad(losses, clip, microbatch_size=1))
    got, expected = gradient(params, tokens)[0], exact(params, tokens)[0]
    error = np.abs(got["up"] - expected["up"]).max() / np.abs(expected["up"]).max()
    assert 1e-5 < error < 2**-8
    chex.assert_trees_all_close(got["bias"], expected["bias"], rtol=1e-4)
    for example in np.eye(SIZE, dtype=bool):
        alone, info = gradient(params, tokens, mask=jnp.asarray(example))
        norm = np.sqrt(sum(np.square(a, dtype=np.float64).sum() for a in alone.values()))
        assert info.norms.max() > clip
        np.testing.assert_allclose(norm, clip, rtol=1e-5)


def test_a_checkpoint_runs_again_once_and_its_products_are_never_in_float32(accelerator):
    params, tokens = arrays()
    gradient = fnet.clipped_grad(jax.checkpoint(losses), 0.05)
    program = jax.make_jaxpr(gradient)(params, tokens)
    assert len(list(find_equations(program, "tanh"))) == 2
    assert strategies(jax.checkpoint(losses)) == strategies()
    results = [e.outvars[0].aval for e in find_equations(program, "dot_general")]
    assert (1, SIZE // 2, *params["up"].shape) in {
        a.shape for a in results if a.dtype == "bfloat16"
    }
    expected = jax.jit(fnet.clipped_grad(losses, 0.05))(params, tokens)[0]
    chex.assert_trees_all_close(jax.jit(gradient)(params, tokens)[0], expected, rtol=1e-5)


def test_small_factors_inside_of_a_checkpoint_are_saved(accelerator, monkeypatch):
    """In microbatches; nothing is saved for a second backward pass of the whole batch."""
    monkeypatch.setattr(backward, "KEPT_TOKEN_BYTES", 1e9)
    params, tokens = arrays()
    loss, mask = jax.checkpoint(losses), jnp.arange(SIZE) % 3 > 0
    for options in ({}, {"per_layer": True}):
        gradient = fnet.clipped_grad(loss, 0.05, **options)
        alone = fnet.clipped_grad(loss, 0.05, microbatch_size=1, **options)
        got, expected = (jax.jit(f)(params, tokens, mask=mask) for f in (gradient, alone))
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-7)
        program = jax.make_jaxpr(gradient)(params, tokens)
        assert len(list(find_equations(program, "tanh"))) == 2
    assert strategies(loss)["up"] == "materialized"


def test_small_programs_keep_no_gradients():
    params, tokens = arrays()
    for device, size in ((None, 1), (GPU, SIZE)):
        with traced_for(device):
            traced = backward.trace_loss("loss", losses, params, examples("loss", [tokens]))
            assert traced.microbatches(None) == (size, (), True)
