"""When the fused kernel of a GPU is used, and its arguments; cuDNN itself is mocked."""

import functools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from fnet.layers.dot_product_attention import dot_product_attention

B, H, D = 2, 4, 8


class Kernel:
    """A mock of the cuDNN kernel, which marks its use with a sine."""

    def __init__(self, error=None):
        self.error, self.expected_options = error, []

    def __call__(self, q, k, v, *, implementation, **how):
        assert implementation == "cudnn"
        self.expected_options.append(how)
        if self.error:
            raise self.error
        return jnp.sin(q)


def lowered_for(platform, f, dtype):
    x = jax.ShapeDtypeStruct((B, 16, H, D), dtype)
    fresh = lambda *a: f(*a)  # noqa: E731  (a new function, not cached by jit)
    return jax.jit(fresh).trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()


def test_only_gpus_use_the_fused_kernel(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", Kernel())
    for dtype in (jnp.bfloat16, jnp.float16):
        assert "sine" in lowered_for("cuda", dot_product_attention, dtype)
        assert "dot_general" not in lowered_for("cuda", dot_product_attention, dtype)
        assert "sine" not in lowered_for("cpu", dot_product_attention, dtype)
        assert "sine" not in lowered_for("tpu", dot_product_attention, dtype)


@pytest.mark.parametrize(
    ("given", "expected_options"),
    [
        ({}, {"is_causal": False, "scale": D**-0.5}),
        ({"causal": True, "scale": 0.3}, {"is_causal": True, "scale": 0.3}),
        (
            {"causal": True, "window": 4},
            {"is_causal": True, "scale": D**-0.5, "local_window_size": (3, 0)},
        ),
        ({"window": 4}, {"is_causal": False, "scale": D**-0.5, "local_window_size": (3, 3)}),
        ({"causal": True, "window": 16}, {"is_causal": True, "scale": D**-0.5}),  # all 16 keys
    ],
)
def test_fused_kernel_gets_mask_options_and_scale(given, expected_options, monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    f = functools.partial(dot_product_attention, **given)
    assert "sine" in lowered_for("cuda", f, jnp.bfloat16)
    assert kernel.expected_options
    assert all(how == expected_options for how in kernel.expected_options)


@pytest.mark.parametrize(("capability", "fused"), [("7.5", False), ("8.0", True)])
def test_gpu_older_than_ampere_uses_chunks(capability, fused, monkeypatch):
    gpu = types.SimpleNamespace(compute_capability=capability)
    devices = jax.local_devices

    def local_devices(*args, backend=None, **more):
        return [gpu] if backend == "cuda" else devices(*args, backend=backend, **more)

    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(jax.nn, "dot_product_attention", Kernel())
    assert ("sine" in lowered_for("cuda", dot_product_attention, jnp.bfloat16)) is fused


@pytest.mark.parametrize(
    ("dtype", "kwargs"),
    [
        (jnp.float32, {}),
        (jnp.bfloat16, {"chunk": 4}),
        (jnp.bfloat16, {"scale": jnp.float32(0.5)}),
        (jnp.bfloat16, {"mask": jnp.ones((1, 1, 1, 16), bool)}),
    ],
)
def test_unsupported_options_use_chunks(dtype, kwargs, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", Kernel())
    f = functools.partial(dot_product_attention, **kwargs)
    assert "sine" not in lowered_for("cuda", f, dtype)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("cuDNN not found."), NotImplementedError("head dim"), ValueError("shape")],
)
def test_gpu_without_a_kernel_for_the_shapes_uses_chunks(error, monkeypatch):
    kernel = Kernel(error)
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    assert "dot_general" in lowered_for("cuda", dot_product_attention, jnp.bfloat16)
    assert kernel.expected_options


def test_odd_lengths_use_chunks(traced_cudnn):
    def gradient_for(length):
        x = jax.ShapeDtypeStruct((B, length, H, D), jnp.bfloat16)
        gradient = jax.grad(lambda q: dot_product_attention(q, q, q).astype(jnp.float32).sum())
        return jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    assert "__cudnn$fmha" in gradient_for(16)
    assert "__cudnn$fmha" not in gradient_for(197)  # a ViT of 14 x 14 patches and a class token


@pytest.fixture
def traced_cudnn(monkeypatch):
    """Let JAX trace its call of cuDNN's attention, which only CUDA lowers, without cuDNN."""
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)


def attention_losses(w, x):
    q = (x @ w).reshape(*x.shape[:2], 2, 64)
    y = dot_product_attention(q, q, q, causal=True).reshape(x.shape)
    return (y @ w).astype(jnp.float32).mean((1, 2)) ** 2


def bfloat16_arguments():
    w = jax.random.normal(jax.random.key(0), (128, 128), jnp.bfloat16) / 8
    return w, jax.random.normal(jax.random.key(1), (3, 16, 128), jnp.bfloat16)


def test_clipped_gradients_with_the_fused_kernel(traced_cudnn):
    w, x = bfloat16_arguments()
    clipped = fnet.clipped_grad(attention_losses, 0.1)
    expected = jax.grad(lambda w: attention_losses(w, x[:1]).sum())(w)
    expected *= jnp.minimum(1, 0.1 / jnp.linalg.norm(expected.astype(jnp.float32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the rows of the kernel are known not to mix
        total, _ = jax.jit(clipped)(w, x[:1])
        text = jax.jit(clipped).trace(w, x).lower(lowering_platforms=("cuda",)).as_text()
    np.testing.assert_allclose(total, expected, rtol=0.05, atol=1e-3)
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2
    assert all("tensor<3x16x2x64xbf16>" in call for call in calls)  # all examples at once


def test_clipped_gradients_with_the_fused_kernel_before_merged_positions(traced_cudnn):
    def losses(w, x):
        q = (x @ w).reshape(*x.shape[:2], 2, 64)
        y = dot_product_attention(q, q, q, causal=True).reshape(-1, x.shape[2]) @ w
        return y.reshape(x.shape).astype(jnp.float32).mean((1, 2)) ** 2

    w, x = bfloat16_arguments()
    clipped = jax.jit(fnet.clipped_grad(losses, 0.1))
    text = clipped.trace(w, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmha") >= 2


def test_bias_of_the_fused_kernel_is_not_assumed_to_be_separable(traced_cudnn):
    w, x = bfloat16_arguments()

    def losses(w, x):
        q = (x @ w).reshape(*x.shape[:2], 2, 64)
        bias = jnp.broadcast_to(w[:16, :16], (1, 2, 16, 16))
        y = jax.nn.dot_product_attention(q, q, q, bias, implementation="cudnn")
        return y.astype(jnp.float32).mean((1, 2, 3))

    with pytest.raises(ValueError, match=r"not known whether .* mixes the examples"):
        jax.jit(fnet.clipped_grad(losses, 0.1)).trace(w, x)
