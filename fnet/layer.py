"""`Layer`, a pair of pure functions, and combinators: serial, residual, repeat."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.typing import DTypeLike

from fnet import checks
from fnet.autodiff.fused_optimizer.stack import StackPlaceholder

Params = dict[str, Any]
State = dict[str, Any]


class Decode(NamedTuple):
    """Incremental evaluation of a layer over the sequence, with a cache.

    Attributes:
      init_cache: ``init_cache(batch, length, dtype) -> cache``. The cache is a pytree of
        arrays with room for ``length`` positions; activations in it have ``dtype``. It is
        ``{}`` for a layer without memory.
      extend: ``extend(params, state, cache, x, position) -> (y, cache)``. It evaluates the
        next t positions as ``apply(..., train=False)`` does on the whole sequence. ``x``
        and ``y`` are [B, t, D] with t >= 1, a whole prompt or one token. ``position``,
        int32 [], is the number of positions before them. The state is only read.
      restart_lengths: lengths of a cache up to which outputs are the same, if longer ones have
        others (LongRoPE) or are refused (learned positions). A text that outgrows one is read
        again.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.causal_conv(3)
      >>> params, _ = layer.init(jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (1, 6, 3))
      >>> whole, _ = layer.apply(params, {}, x, train=False)
      >>> cache = layer.decode.init_cache(1, 6, jnp.float32)
      >>> extend = layer.decode.extend
      >>> first, cache = extend(params, {}, cache, x[:, :4], jnp.int32(0))
      >>> last, cache = extend(params, {}, cache, x[:, 4:], jnp.int32(4))
      >>> bool(jnp.allclose(jnp.concatenate([first, last], axis=1), whole))
      True
    """

    init_cache: Callable[[int, int, DTypeLike], Any]
    extend: Callable[[Params, State, Any, Array, Array], tuple[Array, Any]]
    restart_lengths: tuple[int, ...] = ()


class Layer(NamedTuple):
    """A layer as a pair of pure functions, like ``(init, update)`` in optax.

    Attributes:
      init: ``init(key) -> (params, state)``. ``key`` is a typed key (``jax.random.key``).
        ``params`` are trained; ``state``, such as running statistics, is not. Both are
        nested dicts of arrays, or ``{}``. Sizes are arguments of the function that builds
        the layer, so ``jax.eval_shape(layer.init, key)`` needs no data.
      apply: ``apply(params, state, x, *, key=None, train) -> (y, state)``. ``train`` is a
        Python bool. ``key`` is needed by random layers such as dropout. Layers over the
        sequence [B, T, D] also take ``mask`` [B, T], True for a real token.
      decode: A `Decode` for layers that can be evaluated incrementally, otherwise None.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> def init(key):
      ...     return {"scale": jnp.ones(3)}, {}
      >>> def apply(params, state, x, *, key=None, train):
      ...     return x * params["scale"][None], state
      >>> layer = fnet.Layer(init, apply)
      >>> params, state = layer.init(jax.random.key(0))
      >>> y, state = layer.apply(params, state, jnp.ones((2, 3)), train=True)
      >>> y.shape
      (2, 3)
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]
    decode: Decode | None = None


def stateless(f: Callable[[Array], Array]) -> Layer:
    """Build a layer without params or state that applies ``f`` to its input.

    Args:
      f: a function of one array [...] of any dtype.

    Returns:
      A layer, x [...] -> ``f(x)``.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet.layer import stateless
      >>> y, _ = stateless(jnp.square).apply({}, {}, jnp.array([3.0]), train=True)
      >>> y.tolist()
      [9.0]
    """
    return from_function(lambda key: {}, lambda params, x: f(x))


def from_function(init: Callable[[Array], Params], f: Callable[[Params, Array], Array]) -> Layer:
    """Build a layer without state or randomness from a function of its params and input.

    Args:
      init: ``init(key) -> params``.
      f: ``f(params, x) -> y``, the same in training and evaluation.

    Returns:
      A layer, x [...] -> ``f(params, x)``.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> init = lambda key: {"scale": jnp.ones(1)}
      >>> layer = fnet.layer.from_function(init, lambda p, x: p["scale"] * x)
      >>> params, state = layer.init(jax.random.key(0))
      >>> y, _ = layer.apply(params, state, jnp.array([3.0]), train=True)
      >>> y.tolist()
      [3.0]
    """

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        del key, train
        return f(params, x), state

    return Layer(lambda key: (init(key), {}), apply)


def init_children(children: dict[str, Layer], key: Array) -> tuple[Params, State]:
    """Initialize layers by name, each with its own key.

    Args:
      children: layers by name.
      key: a typed key.

    Returns:
      ``(params, state)``: dicts with one entry per child, without empty entries.

    Example:
      >>> import jax
      >>> from fnet import layers
      >>> from fnet.layer import init_children
      >>> children = {"norm": layers.abn(3), "act": layers.activation("relu")}
      >>> params, state = init_children(children, jax.random.key(0))
      >>> sorted(params), sorted(state["norm"])
      (['norm'], ['running_mean', 'running_var'])
    """
    params: Params = {}
    state: State = {}
    for i, (name, layer) in enumerate(children.items()):
        p, s = layer.init(jax.random.fold_in(key, i))
        params |= {name: p} if p else {}
        state |= {name: s} if s else {}
    return params, state


class Children:
    """The children of a layer while it is applied.

    ``children(name, x, **inputs)`` applies a child to ``x`` and updates its entry of the state. The
    child runs under ``jax.named_scope(name)``, so its operations carry its path in the compiled
    program, in profiles and in memory reports. Each child derives a key of its own.

    Attributes:
      params: Params of all children.
      state: State of all children, updated by the calls so far.
      key: Key of the parent, or None.
      train: As for `Layer`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers
      >>> from fnet.layer import Children, init_children
      >>> by_name = {"hidden": layers.dense(3, 8), "act": layers.activation("relu")}
      >>> params, state = init_children(by_name, jax.random.key(0))
      >>> children = Children(by_name, params, state, key=None, train=True)
      >>> children("act", children("hidden", jnp.ones((2, 3)))).shape
      (2, 8)
    """

    def __init__(
        self, layers: dict[str, Layer], params: Params, state: State, key: Array | None, train: bool
    ):
        self._layers = layers
        self.params, self.state, self.key, self.train = params, state, key, train

    def __call__(self, name: str, x: Array, **inputs: Any) -> Array:
        """Apply a child to ``x``."""
        key = self.key
        if key is not None:
            key = jax.random.fold_in(key, list(self._layers).index(name))
        with jax.named_scope(name):
            own = self.params.get(name, {}), self.state.get(name, {})
            y, state = self._layers[name].apply(*own, x, key=key, train=self.train, **inputs)
        if state:
            self.state = self.state | {name: state}
        return y

    def optional(self, name: str, x: Array) -> Array:
        """Apply a child if there is one of this name."""
        return self(name, x) if name in self else x

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def in_order(self, names: Iterable[str], x: Array) -> Array:
        """Apply children one after the other."""
        for name in names:
            x = self(name, x)
        return x


def composite(
    layers: dict[str, Layer],
    f: Callable[..., Any],
    *,
    init: Callable[[Array], tuple[Params, State]] | None = None,
    random: bool = True,
) -> Layer:
    """Build a layer from others and a function that applies them.

    Args:
      layers: layers by name.
      f: ``f(children, x, **inputs) -> y``. ``children(name, x)`` applies a layer. ``inputs`` are
        further arguments of ``apply``.
      init: ``init`` of the layer; None: `init_children`.
      random: whether a child needs a key.

    Returns:
      A layer with ``params = {name: params of that layer}``; ``state`` has the same form.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> children = dict.fromkeys(("gate", "up"), fnet.layers.dense(3, 3))
      >>> net = fnet.layer.composite(children, lambda c, x: c("gate", x) * c("up", x))
      >>> params, state = net.init(jax.random.key(0))
      >>> y, state = net.apply(params, state, jnp.ones((2, 3)), train=True)
      >>> sorted(params), y.shape
      (['gate', 'up'], (2, 3))
    """

    def apply(
        params: Params,
        state: State,
        x: Array,
        *,
        key: Array | None = None,
        train: bool,
        **inputs: Any,
    ) -> tuple[Any, State]:
        children = Children(layers, params, state, key if random else None, train)
        y = f(children, x, **inputs)
        return y, children.state

    return Layer(init or functools.partial(init_children, layers), apply)


def serial(*layers: Layer, **named: Layer) -> Layer:
    """Compose layers in order.

    Args:
      *layers: layers with the names ``"0"``, ``"1"``, ... in ``params`` and ``state``.
      **named: further layers with names, applied after ``layers``.

    Returns:
      A layer with ``params = {name: params of that layer}``; ``state`` has the same form.

    Raises:
      ValueError: if a keyword equals the number of an unnamed layer.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> from fnet import layers
      >>> net = fnet.serial(hidden=layers.dense(3, 8), act=layers.activation("relu"))
      >>> params, state = net.init(jax.random.key(0))
      >>> jax.tree.map(jnp.shape, params)
      {'hidden': {'bias': (8,), 'kernel': (3, 8)}}
      >>> y, state = net.apply(params, state, jnp.ones((2, 3)), train=True)
      >>> y.shape
      (2, 8)
    """
    numbered = {str(i): layer for i, layer in enumerate(layers)}
    if both := sorted(numbered.keys() & named.keys()):
        raise ValueError(f"serial: the names {both} belong to unnamed layers; choose other names")
    children = numbered | named
    return composite(children, lambda child, x: child.in_order(children, x))


def residual(body: Layer, shortcut: Layer | None = None) -> Layer:
    """Add a shortcut to a layer: ``y = shortcut(x) + body(x)`` (He et al. 2016).

    Args:
      body: a layer.
      shortcut: a layer whose output has the shape of the body's output; None: identity.

    Returns:
      A layer with params and state ``{"body": ..., "shortcut": ...}``, without empty entries.

    Raises:
      ValueError: if the outputs of body and shortcut differ in shape.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> block = fnet.residual(fnet.layers.dense(4, 4))
      >>> params, state = block.init(jax.random.key(0))
      >>> x = jnp.ones((2, 4))
      >>> y, _ = block.apply(params, state, x, train=True)
      >>> bool(jnp.allclose(y, x + x @ params["body"]["kernel"]))
      True
    """
    children = {"body": body, "shortcut": shortcut or stateless(lambda x: x)}

    def add(child: Children, x: Array) -> Array:
        y, s = child("body", x), child("shortcut", x)
        if y.shape != s.shape:
            raise ValueError(
                f"residual: body gives {y.shape}, shortcut gives {s.shape}; "
                "pass a shortcut layer that maps the input to the body's shape"
            )
        return s + y

    return composite(children, add)


def repeat(layer: Layer, n: int) -> Layer:
    """Apply ``n`` copies of a layer in order, as a ``lax.scan`` over stacked parameters.

    The layer is compiled once. The copies differ in parameters, state and keys. To train them
    without materializing all their gradients at once, use `fnet.autodiff.optimizer_in_backward`.

    On CPU a convolution inside a scan is many times slower than outside. There, write
    ``serial(*[layer] * n)``, which unrolls.

    Args:
      layer: a layer whose output has the shape and dtype of its input.
      n: number of copies, >= 1.

    Returns:
      A layer with the params and state of ``layer``, each leaf stacked to [n, ...].

    Raises:
      ValueError: if ``n < 1``.
      TypeError: from JAX, when applied, if the layer changes the shape or dtype of its input.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> tower = fnet.repeat(fnet.layers.dense(4, 4), 3)
      >>> params, state = tower.init(jax.random.key(0))
      >>> jax.tree.map(jnp.shape, params)
      {'bias': (3, 4), 'kernel': (3, 4, 4)}
      >>> tower.apply(params, state, jnp.ones((2, 4)), train=True)[0].shape
      (2, 4)
    """
    checks.sizes("repeat", n=n)

    def init(key: Array) -> tuple[Params, State]:
        return jax.vmap(layer.init)(jax.random.split(key, n))

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        keys = None if key is None else jax.random.split(key, n)

        def apply_copy(
            p: Params, state_and_key: tuple[State, Array | None], x: Array
        ) -> tuple[Array, State]:
            s, k = state_and_key
            return layer.apply(p, s, x, key=k, train=train)

        if isinstance(params, StackPlaceholder):
            return params.scan(apply_copy, (state, keys), x)
        return jax.lax.scan(lambda x, pi: apply_copy(*pi, x), x, (params, (state, keys)), length=n)

    return Layer(init, apply)
