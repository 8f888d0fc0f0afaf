"""The fused kernel of a GPU: when it is taken, and what it is told. cuDNN itself is not there."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

from fnet.layers.dot_product_attention import dot_product_attention

B, H, D = 2, 4, 8


class Kernel:
    """Stands for cuDNN's: what the program would compute for a GPU is told by a sine."""

    def __init__(self, error=None):
        self.error, self.told = error, []

    def __call__(self, q, k, v, *, implementation, **how):
        assert implementation == "cudnn"
        self.told.append(how)
        if self.error:
            raise self.error
        return jnp.sin(q)


def lowered_for(platform, f, dtype):
    x = jax.ShapeDtypeStruct((B, 16, H, D), dtype)
    fresh = lambda *a: f(*a)  # noqa: E731  (not one that jit has seen before)
    return jax.jit(fresh).trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()


def test_a_gpu_takes_its_fused_kernel_and_no_other_backend_does(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", Kernel())
    for dtype in (jnp.bfloat16, jnp.float16):
        assert "sine" in lowered_for("cuda", dot_product_attention, dtype)
        assert "dot_general" not in lowered_for("cuda", dot_product_attention, dtype)
        assert "sine" not in lowered_for("cpu", dot_product_attention, dtype)
        assert "sine" not in lowered_for("tpu", dot_product_attention, dtype)


@pytest.mark.parametrize(
    ("given", "told"),
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
def test_the_fused_kernel_is_told_what_is_attended_to(given, told, monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    f = functools.partial(dot_product_attention, **given)
    assert "sine" in lowered_for("cuda", f, jnp.bfloat16)
    assert kernel.told
    assert all(how == told for how in kernel.told)


@pytest.mark.parametrize(("capability", "fused"), [("7.5", False), ("8.0", True)])
def test_a_gpu_without_the_kernel_takes_chunks(capability, fused, monkeypatch):
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
def test_what_the_fused_kernel_does_not_do_goes_in_chunks(dtype, kwargs, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", Kernel())
    f = functools.partial(dot_product_attention, **kwargs)
    assert "sine" not in lowered_for("cuda", f, dtype)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("cuDNN not found."), NotImplementedError("head dim"), ValueError("shape")],
)
def test_without_a_fused_kernel_for_these_arrays_a_gpu_takes_chunks(error, monkeypatch):
    kernel = Kernel(error)
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    assert "dot_general" in lowered_for("cuda", dot_product_attention, jnp.bfloat16)
    assert kernel.told
