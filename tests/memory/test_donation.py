"""A DonationError names each leaf that is not updated in place, and why."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fnet.memory import DonationError, donation, peak


def compiled(f, state):
    return jax.jit(f, donate_argnums=0).lower(state, jnp.ones(3)).compile()


STATE = {"w": jnp.ones((3, 2)), "v": jnp.ones((3, 2)), "n": jnp.zeros((), jnp.int32)}


def test_a_dtype_drift_is_named():
    def step(state, x):
        return state | {"w": (state["w"] * x.sum()).astype(jnp.bfloat16)}, x.sum()

    with pytest.raises(DonationError) as error:
        donation(compiled(step, STATE))
    assert str(error.value) == (
        "state not updated in place: ['w'] drifts from float32[3, 2] to bfloat16[3, 2]: "
        "cast it back with .astype(float32)."
    )


def test_a_drift_is_named_even_if_another_leaf_takes_its_buffer():
    def step(state, x):
        return {"w": state["v"], "v": state["w"].astype(jnp.float16), "n": state["n"]}, x.sum()

    with pytest.raises(DonationError, match=r"\['v'\] drifts from float32\[3, 2\] to float16"):
        donation(compiled(step, STATE))


def test_a_changed_shape_and_a_dropped_leaf_are_named():
    def step(state, x):
        return {"w": state["w"][:2], "v": state["v"]}, x.sum()

    with pytest.raises(DonationError) as error:
        donation(compiled(step, STATE))
    assert "['w'] changes shape from float32[3, 2] to float32[2, 2]" in str(error.value)
    assert "['n'] (int32[]) has no output in its place: return it" in str(error.value)


def test_a_leaf_that_is_overwritten_without_being_read_is_named():
    def step(state, x):
        return state | {"v": jnp.zeros((3, 2))}, x.sum()

    with pytest.raises(DonationError, match=r"\['v'\] \(float32\[3, 2\]\) is overwritten without"):
        donation(compiled(step, STATE))


def test_a_step_without_outputs_names_the_missing_leaves():
    with pytest.raises(DonationError, match=r"\['w'\] .* has no output in its place: return it"):
        donation(compiled(lambda state, x: (), STATE))


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


@pytest.mark.parametrize("option", ["jax_debug_nans", "jax_debug_infs"])
def test_a_debug_option_that_turns_donation_off_is_named(option):
    f = jax.jit(lambda s, x: ({"w": s["w"] + x.sum()}, x), donate_argnums=0)
    jax.config.update(option, True)
    try:
        with pytest.raises(DonationError, match=f"{option} turns donation off"):
            donation(f.lower({"w": jnp.ones(3)}, jnp.ones(3)).compile())
    finally:
        jax.config.update(option, False)
