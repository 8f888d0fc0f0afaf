"""Noise of each way to train privately: its standard deviation in each real number."""

import jax
import jax.numpy as jnp
import optax
import pytest

import fnet
from fnet import privacy
from fnet.autodiff import AdaptiveClipping, clipped

SIZE, PRIVATE = 20_000, {"noise_multiplier": 2.0, "expected_batch_size": 10.0}
ADAPTIVE = AdaptiveClipping(1.0, count_noise=100.0, **PRIVATE)
MODES = {
    "independent": (clipped(1.0, **PRIVATE), 0.2),
    # The first noise is that of a column of the matrix: (1, 1/2, 3/8, 5/16).
    "banded": (
        clipped(1.0, strategy=privacy.banded_square_root(4), **PRIVATE),
        0.2 * 381**0.5 / 16,
    ),
    "adaptive": (ADAPTIVE, ADAPTIVE.gradient_noise / 10),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("name", MODES)
def test_first_step_has_the_stated_noise(name, dtype):
    mode, expected = MODES[name]
    optimizer = mode.wrap_optimizer(optax.sgd(1.0))
    params = {"w": jnp.zeros(SIZE, dtype), "other": jnp.zeros(SIZE, dtype)}
    state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))
    step = fnet.make_step(
        lambda p, _, b, __: jnp.abs(b["x"] @ (p["w"] + p["other"])) ** 2, optimizer, mode
    )
    batch = {"x": jnp.zeros((4, SIZE))}
    state, _ = fnet.compile_step(step, state, batch, compiler_options={})(state, batch)
    shared = jnp.corrcoef(jnp.stack([state.params["w"], state.params["other"]]))[0, 1]
    assert abs(shared) < 5 / SIZE**0.5
    parts = jnp.stack([state.params["w"].real, state.params["w"].imag])[
        : jnp.dtype(dtype).itemsize // 4
    ]
    assert parts.std(1) == pytest.approx(expected, rel=0.03)


def test_noise_of_a_narrow_array_is_rounded_once():
    wide, narrow = (
        privacy.add_noise({"w": jnp.ones(SIZE, dtype)}, 0.3, jax.random.key(0))["w"]
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert narrow.dtype == jnp.bfloat16
    assert (narrow == wide.astype(jnp.bfloat16)).all()


def test_rejects_integers_whose_noise_would_be_cut():
    with pytest.raises(TypeError, match=r"add_noise: expected floating or complex.*int32"):
        privacy.add_noise({"count": jnp.arange(3)}, 1.0, jax.random.key(0))
