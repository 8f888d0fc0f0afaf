"""Train state: parameters, their moving average (EMA), optimizer state, step and random key."""

from typing import Any, overload

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet import checks
from fnet.layer import Layer


@flax.struct.dataclass
class TrainState:
    """The arrays that a train step updates. The step donates them.

    No buffer occurs in a state twice.

    Attributes:
      step: Number of steps taken, int32 [].
      params: Trained arrays.
      model_state: Arrays that the forward pass updates (running statistics).
      opt_state: State of the optimizer.
      ema: Exponential moving average of ``params`` for evaluation, or None. Averages of 16-bit
        parameters are float32, because a step of an average is below the precision of 16 bits.
      key: Typed random key []. The randomness of step i is ``fold_in(key, i)``, so it is the
        same after a resume.

    Example:
      >>> import jax, optax, fnet
      >>> model = fnet.layers.dense(3, 2)
      >>> state = fnet.TrainState.create(model, optax.sgd(0.1), jax.random.key(0))
      >>> int(state.step), state.params["kernel"].shape
      (0, (3, 2))
    """

    step: Array
    params: Any
    model_state: Any
    opt_state: optax.OptState
    ema: Any
    key: Array

    @overload
    @classmethod
    def create(
        cls, model: Layer, optimizer: optax.GradientTransformation, key: Array, *, ema: bool = False
    ) -> "TrainState": ...

    @overload
    @classmethod
    def create(
        cls,
        *,
        params: Any,
        optimizer: optax.GradientTransformation,
        key: Array,
        model_state: Any = None,
        ema: bool = False,
    ) -> "TrainState": ...

    @classmethod
    def create(
        cls,
        model: Layer | None = None,
        optimizer: optax.GradientTransformation | None = None,
        key: Array | None = None,
        *,
        params: Any = None,
        model_state: Any = None,
        ema: bool = False,
    ) -> "TrainState":
        """Create a fresh state, from a `fnet.Layer` or from the parameters of any library.

        The state holds the given arrays, not copies. A step donates them, so pass copies of
        arrays you still need.

        Args:
          model: A layer whose ``init`` makes parameters and model state.
          optimizer: An optax gradient transformation.
          key: Typed random key []; seeds ``model.init`` and the randomness of all steps.
          params: Tree of parameters, in place of ``model``.
          model_state: Tree of arrays that the forward pass updates (batch statistics), if any.
          ema: Whether to maintain an exponential moving average of the parameters.

        Returns:
          The state at step 0.

        Raises:
          TypeError: If not exactly one of ``model`` and ``params`` is given, ``model_state`` comes
            with a model, or ``optimizer`` or ``key`` is missing or of another kind.
          ValueError: If ``params`` were donated.

        Example:
          >>> import jax, jax.numpy as jnp, optax, fnet
          >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
          >>> state = fnet.TrainState.create(
          ...     params=params, optimizer=optax.adam(1e-3), key=jax.random.key(0)
          ... )
          >>> int(state.step), jax.tree.map(jnp.shape, state.params)
          (0, {'bias': (2,), 'kernel': (3, 2)})
        """
        if (model is None) == (params is None):
            raise TypeError("TrainState.create: give either a model or params")
        if optimizer is None or key is None:
            missing = "optimizer" if optimizer is None else "key"
            raise TypeError(f"TrainState.create: {missing} is missing")
        if not hasattr(key, "dtype"):
            raise TypeError(
                f"TrainState.create: key must be a random key, as jax.random.key(0), got {key!r}"
            )
        checks.optimizer("TrainState.create", optimizer)
        arrays = [a for a in jax.tree.leaves(params) if isinstance(a, Array)]
        if any(a.is_deleted() for a in arrays if not isinstance(a, jax.core.Tracer)):
            raise ValueError(
                "TrainState.create: params were donated to an earlier step; make new ones, or pass "
                "copies, jax.tree.map(jnp.copy, params), to the first state"
            )
        init_key, key = jax.random.split(key)
        if model is not None and not hasattr(model, "init"):
            raise TypeError(
                "TrainState.create: expected a layer with init as the model, got "
                f"{type(model).__name__}; give parameters as params="
            )
        if model is not None:
            if model_state is not None:
                raise TypeError("TrainState.create: model_state comes with params, not a model")
            params, model_state = model.init(init_key)
        state = cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state={} if model_state is None else model_state,
            opt_state=optimizer.init(params),
            ema=jax.tree.map(_average_dtype, params) if ema else None,
            key=key,
        )
        return _without_shared_buffers(state)

    @property
    def evaluation_params(self) -> Any:
        """Parameters to evaluate: the moving average if there is one, else ``params``."""
        return self.params if self.ema is None else self.ema


def _average_dtype(p: Any) -> Any:
    dtype = getattr(p, "dtype", None)
    is_narrow = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return p.astype(jnp.float32) if is_narrow else p


def _without_shared_buffers(state: TrainState) -> TrainState:
    """Return the state as arrays, copying every buffer that occurs a second time.

    A buffer can be donated once only. The average starts as the parameters, some optimizers keep
    the initial parameters, and some parameters start as plain numbers.
    """
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Array):
            return jnp.array(leaf)
        shared = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if shared else leaf

    owned: TrainState = jax.tree.map(own, state)
    return owned


def check_state(caller: str, state: Any) -> None:
    """Raise TypeError for a train state of another library."""
    if not isinstance(state, TrainState):
        kind = type(state)
        raise TypeError(
            f"{caller}: the state must be a fnet.TrainState, got a "
            f"{kind.__module__}.{kind.__qualname__}; create it with "
            "fnet.TrainState.create(params=..., optimizer=..., key=...)"
        )
