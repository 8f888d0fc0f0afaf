"""A layer is a pair of pure functions; combinators make layers from layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet.autodiff.updating_scan import UpdatedStack

Params = dict[str, Any]
State = dict[str, Any]


class Decode(NamedTuple):
    """How a layer along time goes on from where it stopped, a few positions at a time.

    Attributes:
      start: ``start(batch, length, dtype) -> cache``: an empty past with room for
        ``length`` positions; a pytree of arrays, of ``dtype`` where they hold
        activations, ``{}`` for a layer without memory.
      extend: ``extend(params, state, cache, x, position) -> (y, cache)``: what
        ``apply(..., train=False)`` gives at the next t positions. ``x`` and ``y`` are
        [B, t, D], t >= 1: a whole prompt, or one token; ``position``, int32 [], is how many
        came before. State is read and never renewed.
    """

    start: Callable[[int, int, DTypeLike], Any]
    extend: Callable[[Params, State, Any, Array, Array], tuple[Array, Any]]


class Layer(NamedTuple):
    """A pure layer: how to make its arrays, and how to use them.

    Attributes:
      init: ``init(key) -> (params, state)``. ``key`` is a typed key
        (``jax.random.key``). ``params`` are trained, ``state`` is not (running
        statistics). Both are nested dicts of arrays, with nothing static in
        them; a layer without either gives ``{}``. Sizes are arguments of the
        layer, so ``jax.eval_shape(layer.init, key)`` needs no data.
      apply: ``apply(params, state, x, *, key=None, train) -> (y, state)``.
        ``train`` is a Python bool; ``key`` feeds layers that draw (dropout).
        Layers along time [B, T, D] also take ``mask`` [B, T], True for a real token.
      decode: of layers along time that can go on from where they stopped; None
        for others.
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]
    decode: Decode | None = None


def stateless(f: Callable[[Array], Array]) -> Layer:
    """A layer without parameters or state that applies ``f`` to its input."""

    def init(key: Array) -> tuple[Params, State]:
        del key
        return {}, {}

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        del params, key, train
        return f(x), state

    return Layer(init, apply)


def init_children(children: dict[str, Layer], key: Array) -> tuple[Params, State]:
    """Params and state of named layers, one independent key each; empty ones are left out."""
    params: Params = {}
    state: State = {}
    for i, (name, layer) in enumerate(children.items()):
        p, s = layer.init(jax.random.fold_in(key, i))
        params |= {name: p} if p else {}
        state |= {name: s} if s else {}
    return params, state


def apply_child(
    children: dict[str, Layer],
    name: str,
    params: Params,
    state: State,
    x: Array,
    *,
    key: Array | None,
    train: bool,
    **inputs: Any,
) -> tuple[Array, State]:
    """Applies ``children[name]``; returns its output and ``state`` with that child's part renewed.

    ``inputs`` are further arguments of the child's ``apply``.

    The child runs under ``jax.named_scope(name)``, so that its operations carry
    its path into the compiled program.
    """
    child_key = None if key is None else jax.random.fold_in(key, list(children).index(name))
    with jax.named_scope(name):
        y, s = children[name].apply(
            params.get(name, {}), state.get(name, {}), x, key=child_key, train=train, **inputs
        )
    return y, (state | {name: s} if s else state)


def serial(*layers: Layer, **named: Layer) -> Layer:
    """Layers applied one after the other.

    Args:
      *layers: named ``"0"``, ``"1"``, ... in ``params`` and ``state``.
      **named: further layers under names of their own, after ``layers``.

    Returns:
      A layer with ``params = {name: params of that layer}``, the same for ``state``.

    Raises:
      ValueError: if a name is that of one of ``layers``.
    """
    numbered = {str(i): layer for i, layer in enumerate(layers)}
    if both := sorted(numbered.keys() & named.keys()):
        raise ValueError(f"serial: {both} are the names of layers that are given without one")
    children = numbered | named

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        for name in children:
            x, state = apply_child(children, name, params, state, x, key=key, train=train)
        return x, state

    return Layer(lambda key: init_children(children, key), apply)


def residual(body: Layer, shortcut: Layer | None = None) -> Layer:
    """``y = shortcut(x) + body(x)`` (He et al. 2016); the shortcut is the identity by default.

    Args:
      body: a layer.
      shortcut: a layer that gives what ``body`` gives in shape; None: the identity.

    Returns:
      A layer with params and state ``{"body": ..., "shortcut": ...}``, without what is empty.

    Raises:
      ValueError: if the two branches give different shapes.
    """
    children = {"body": body, "shortcut": shortcut or stateless(lambda x: x)}

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        y, state = apply_child(children, "body", params, state, x, key=key, train=train)
        s, state = apply_child(children, "shortcut", params, state, x, key=key, train=train)
        if y.shape != s.shape:
            raise ValueError(
                f"residual: body gives {y.shape}, shortcut gives {s.shape}; "
                "pass a shortcut layer that maps the input to the body's shape"
            )
        return s + y, state

    return Layer(lambda key: init_children(children, key), apply)


def repeat(layer: Layer, n: int) -> Layer:
    """``n`` copies of ``layer`` in a row, compiled once: a scan over stacked parameters.

    Every leaf of ``params`` and ``state`` gains a leading axis of length ``n``.
    Copies differ in their initial values and keys, not in their code. On CPU a
    convolution inside a scan is many times slower than outside: there, write
    ``serial(*[layer] * n)``, which unrolls. The copies can be trained without their
    gradients ever existing together: `fnet.autodiff.optimizer_in_backward`.

    Args:
      layer: one that gives what it takes in shape and dtype.
      n: how many copies, >= 1.

    Returns:
      A layer with the params and state of ``layer``, every leaf [n, ...].

    Raises:
      ValueError: if ``n < 1``.
      TypeError: from JAX, when applied, if ``layer`` gives another shape or dtype than it takes.
    """
    check_sizes("repeat", n=n)

    def init(key: Array) -> tuple[Params, State]:
        return jax.vmap(layer.init)(jax.random.split(key, n))

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        keys = None if key is None else jax.random.split(key, n)

        def copy(p: Params, inputs: tuple[State, Array | None], x: Array) -> tuple[Array, State]:
            s, k = inputs
            return layer.apply(p, s, x, key=k, train=train)

        if isinstance(params, UpdatedStack):
            return params.scan(copy, (state, keys), x)
        return jax.lax.scan(lambda x, pi: copy(*pi, x), x, (params, (state, keys)), length=n)

    return Layer(init, apply)


def check_sizes(where: str, **sizes: int) -> None:
    """Refuses sizes below 1.

    Args:
      where: whose they are, for the message.
      **sizes: by name.

    Raises:
      ValueError: naming the first of them.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{where}: {name} must be at least 1, got {size}")


def check_floating(where: str, x: Array) -> None:
    """Refuses integers: cast to them, a kernel of small numbers is 0."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"{where}: x must be floating, got {x.dtype}")
