"""Everything a training run carries from step to step."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet.layer import Layer


@flax.struct.dataclass
class TrainState:
    """The donated argument of a train step. No buffer stands in it twice.

    Attributes:
      step: steps taken, int32 [].
      params: trained arrays.
      model_state: arrays that the forward pass renews (running statistics).
      opt_state: the optimizer's.
      ema: exponential moving average of ``params`` for evaluation, or None.
      key: typed key []; the randomness of step i is ``fold_in(key, i)``, so that
        it is the same after a resume.
    """

    step: Array
    params: Any
    model_state: Any
    opt_state: optax.OptState
    ema: Any
    key: Array

    @classmethod
    def create(
        cls, model: Layer, optimizer: optax.GradientTransformation, key: Array, *, ema: bool = False
    ) -> "TrainState":
        """A fresh state; ``key`` (typed, []) seeds both the initial values and all later steps.

        It holds the very arrays that ``model.init`` gives, and a step deletes those of the state
        it is given: an ``init`` that gives arrays from elsewhere should copy them.
        """
        init_key, key = jax.random.split(key)
        params, model_state = model.init(init_key)
        state = cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=model_state,
            opt_state=optimizer.init(params),
            ema=params if ema else None,
            key=key,
        )
        return _each_once(state)

    @property
    def evaluation_params(self) -> Any:
        """The averaged parameters where they are kept, else the parameters."""
        return self.params if self.ema is None else self.ema


def _each_once(state: TrainState) -> TrainState:
    """The state as arrays, with copies where one stands again, which could not be donated.

    An average begins as the parameters; some optimizers keep the first parameters. Some
    parameters begin as a plain number.
    """
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Array):
            return jnp.array(leaf)
        again = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if again else leaf

    owned: TrainState = jax.tree.map(own, state)
    return owned
