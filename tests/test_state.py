import jax
import jax.numpy as jnp
import numpy as np
import optax

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
