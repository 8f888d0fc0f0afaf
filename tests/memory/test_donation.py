"""A DonationError names each leaf that is not updated in place, and why."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fnet.memory import DonationError, donation, peak


def compiled(f, state):
    return jax.jit(f, donate_argnums=0).lower(state, jnp.ones(3)).compile()


STATE = {"w": jnp.ones((3, 2)), "v": jnp.ones((3, 2)), "n": jnp.zeros((), jnp.int32)}


def test_what_is_not_updated_in_place_is_named():
    for step, *messages in (
        (
            lambda s, x: (s | {"w": (s["w"] * x.sum()).astype(jnp.bfloat16)}, x.sum()),
            "state not updated in place: ['w'] drifts from float32[3, 2] to bfloat16[3, 2]: cast it back with .astype(float32).",
        ),
        (  # even if another leaf takes its buffer
            lambda s, x: ({"w": s["v"], "v": s["w"].astype(jnp.float16), "n": s["n"]}, x.sum()),
            "['v'] drifts from float32[3, 2] to float16",
        ),
        (
            lambda s, x: ({"w": s["w"][:2], "v": s["v"]}, x.sum()),
            "['w'] changes shape from float32[3, 2] to float32[2, 2]", "['n'] (int32[]) has no output in its place: return it",
        ),
        (
            lambda s, x: (s | {"v": jnp.zeros((3, 2))}, x.sum()),
            "['v'] (float32[3, 2]) is overwritten without",
        ),
        (lambda s, x: (), "['w'] (float32[3, 2]) has no output in its place: return it"),
    ):  # fmt: skip
        with pytest.raises(DonationError) as error:
            donation(compiled(step, STATE))
        assert all(message in str(error.value) for message in messages)


def test_accepts_programs_of_nnx():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def step(model, x):
        model.kernel[...] = model.kernel[...] - x.sum()

    compiled = nnx.jit(step, donate_argnums=0).lower(model, jnp.ones(4)).compile()
    assert donation(compiled) == donation(compiled.compiled)
    assert donation(compiled).aliased_bytes >= 8 * 8 * 4
    assert peak(compiled).total == peak(compiled.compiled).total


def test_rejects_a_step_that_donates_nothing():
    with pytest.raises(DonationError, match="jit the step with donate_argnums, the"):
        donation(jax.jit(lambda s, x: (s, x)).lower(STATE, jnp.ones(3)).compile())


@pytest.mark.parametrize("kind", ["nans", "infs"])
def test_a_debug_option_that_turns_donation_off_is_named(kind):
    f = jax.jit(lambda s, x: ({"w": s["w"] + x.sum()}, x), donate_argnums=0)
    with (
        getattr(jax, f"debug_{kind}")(True),
        pytest.raises(DonationError, match=f"jax_debug_{kind} turns donation off"),
    ):
        donation(f.lower({"w": jnp.ones(3)}, jnp.ones(3)).compile())
