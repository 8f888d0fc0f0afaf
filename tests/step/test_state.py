import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet


def test_parameters_may_begin_as_numbers():
    def loss(params, state, batch, key):
        return params["scale"] * batch["x"], fnet.Aux(state, {})

    model = fnet.Layer(lambda key: ({"scale": 1.0}, {"shift": np.float64(2)}), apply=None)
    optimizer = optax.sgd(0.5)
    state = fnet.TrainState.create(model, optimizer, jax.random.key(0))
    execute = fnet.compile_step(fnet.make_step(loss, optimizer), state, {"x": jnp.ones(2)})
    assert execute.report.state_bytes == execute.report.donation.aliased_bytes == 20
    assert execute(state, {"x": jnp.ones(2)})[0].params == {"scale": 0.5}


def test_rejects_parameters_that_an_earlier_step_has_donated():
    params = {"w": jnp.ones(3)}
    jax.jit(lambda p: jax.tree.map(jnp.sin, p), donate_argnums=0)(params)
    with pytest.raises(ValueError, match=r"donated to an earlier step; .*jnp\.copy, params"):
        fnet.TrainState.create(params=params, optimizer=optax.sgd(0.5), key=jax.random.key(0))
