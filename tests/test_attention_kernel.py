"""When the fused kernel of a GPU is used, and its arguments; cuDNN itself is mocked."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

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
