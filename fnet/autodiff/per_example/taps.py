"""Find where parameters meet data in a traced loss, and get the cotangents there.

A per-example gradient needs two arrays for each equation that combines a parameter with data:
the data, and the cotangent of the equation's result. A *tap* gives the cotangent. It is a zero
that is added to the result, so its gradient is the result's cotangent. Differentiating with
respect to taps instead of parameters skips all parameter gradients.

  - `find_uses` follows the parameters through a jaxpr. A reshaped, transposed, sliced, cast or
    scaled parameter is a `View`. An equation that combines a view with data is a `Use`.
  - `evaluate_with_taps` evaluates the jaxpr with a tap behind every use, and returns the data
    of every use.
"""

import enum
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fnet.autodiff.per_example.ghost_norm import (
    BiasAdd,
    computed_once,
    linear_equation,
    upper_squared_norms,
)
from fnet.jaxpr import (
    Arrangement,
    Layout,
    NoLayoutError,
    Propagation,
    Scan,
    Site,
    arrangements,
    aval,
    call_like,
    called_jaxpr,
    evaluate,
    in_scopes,
    interpret,
    is_identity,
    is_linear_in,
    moves_elements,
    rounds_coarsely,
    slope,
    stops_gradients,
    with_dtypes,
)
from fnet.jaxpr.custom_rules import AnyEquation, has_linear_rules, is_narrow, scale_of_rule
from fnet.mesh import argument_like

Path = tuple[int, ...]
"""Position of an equation: its index, preceded by the indices of the calls and scans around it."""


class View(NamedTuple):
    """Elements of a parameter in another arrangement.

    Attributes:
      param: Index of the parameter.
      layout: Which element of the parameter is where.
      from_param: ``parameter -> view``, without casts and scales.
      scans: Numbers of the enclosing scans that slice the parameter, outermost first. Each is a
        leading axis of ``layout``.
      scale: Factor that the elements were multiplied by. Added constants do not change gradients.
    """

    param: int
    layout: Layout
    from_param: Callable[[Any], Any]
    scans: tuple[int, ...] = ()
    scale: float = 1.0

    @classmethod
    def whole(cls, param: int, shape: tuple[int, ...]) -> "View":
        """Return the view of a whole parameter."""
        return cls(param, Layout.of(shape), lambda p: p)

    def sliced_by_scan(self, scan: int) -> "View":
        """Return the view in one iteration of a scan over its leading axis."""
        return self._replace(scans=(*self.scans, scan))

    def after(self, eqn: JaxprEqn, operand: int = 0) -> list["View"] | None:
        """Return the views that an equation of this view results in; None if it does more."""
        if rounds_coarsely(eqn):
            return None
        for factor in (slope(eqn, operand), scale_of_rule(eqn, operand)):
            if factor is not None:
                scale = self.scale * factor
                info = jnp.finfo(jnp.promote_types(aval(eqn.outvars[0]).dtype, jnp.float32))
                is_in_range = float(info.tiny) <= abs(scale) <= float(info.max) or not factor
                return [self._replace(scale=scale)] if is_in_range else None
        is_real = jnp.issubdtype(aval(eqn.outvars[0]).dtype, jnp.floating)
        if not is_real or not is_linear_in(eqn, [operand]):
            return None
        views = [self.arranged(arrange) for arrange in arrangements(eqn, len(self.scans)) or ()]
        return None if None in views else [view for view in views if view] or None

    def arranged(self, arrange: Arrangement) -> "View | None":
        """Return the view in another arrangement; None if it has no `Layout`."""
        from_param = self.from_param
        try:
            layout = arrange(self.layout)
        except NoLayoutError:
            return None
        return self._replace(layout=layout, from_param=lambda p: arrange(from_param(p)))

    def unscale(self, cotangent: Array) -> Array:
        """Return the cotangent of the elements, given the cotangent of the scaled view."""
        return cotangent if self.scale == 1 else cotangent * self.scale

    def to_param(self, cotangent: Array, param: Any) -> Array:
        """Return the parameter's gradient, given the cotangent of the view: a transposition.

        The cotangent is an `unscale`d one, with the scans first. Its batch axis is 1 long if the
        parameter was broadcast along the batch.
        """

        def view_of(p: Any) -> Any:
            view = self.from_param(p)
            return view[tuple(map(slice, cotangent.shape))] if view.ndim else view

        gradient: Array
        argument = argument_like(param.shape, cotangent)
        (gradient,) = jax.linear_transpose(view_of, argument)(cotangent)
        return gradient


class Data(enum.Enum):
    """A value that depends on data."""

    DATA = "data"


DATA = Data.DATA


class Derived(NamedTuple):
    """A value with a gradient that depends on parameters alone, and is no view of one.

    Attributes:
      params: Indices of the parameters.
    """

    params: frozenset[int]


State = View | Derived | Data | None
"""None: a value without a gradient that depends on no data."""


def takes_part(eqn: JaxprEqn, states: Sequence[State]) -> bool:
    """Whether an equation computes each example's own value, or its gradient is not linear.

    The gradient of a sum, such as over iterations, is then not the pull-back of the sum of
    cotangents.
    """
    if DATA in states:
        return True
    return any(state is not None for state in states) and not has_linear_rules(eqn)


def after_parameters(eqn: JaxprEqn, states: Sequence[State]) -> Sequence[State]:
    """Return the states of the results of an equation that no data takes part in."""
    with_gradient = [(k, state) for k, state in enumerate(states) if state is not None]
    if stops_gradients(eqn) or not with_gradient:
        return [None] * len(eqn.outvars)
    (number, state), *others = with_gradient
    if isinstance(state, View) and not others:
        views: list[View] | None = state.after(eqn, number)
        if views:
            return views
    derived = Derived(params_of(states))
    floating = [jnp.issubdtype(aval(v).dtype, jnp.inexact) for v in eqn.outvars]
    return [derived if f else None for f in floating]


def params_of(states: Sequence[State]) -> frozenset[int]:
    """Indices of the parameters that have a gradient through these values."""
    params: set[int] = set()
    for state in states:
        if isinstance(state, View):
            params.add(state.param)
        elif isinstance(state, Derived):
            params |= state.params
    return frozenset(params)


class Use(NamedTuple):
    """An equation that combines a parameter with data.

    Attributes:
      path: Position of the equation.
      view: View of the parameter.
      equation: A `LinearEquation` of the view, or `AnyEquation`.
      scan_lengths: Lengths of the enclosing scans, outermost first.
      out: Shape and dtype of the equation's result in one iteration; a list of them for
        `AnyEquation`.
      operand: Index of the operand that is the view.
      may_give_norm: Whether the tap may give the squared norm of the gradient alone, so that
        nothing is saved. It may inside of `jax.checkpoint`, if this is the gradient of one view and
        takes no more memory than data and result.
      gives_norm: Whether it does.
    """

    path: Path
    view: View
    equation: Any
    scan_lengths: tuple[int, ...]
    out: Any
    operand: int = 0
    may_give_norm: bool = False
    gives_norm: bool = False

    @property
    def tap_shapes(self) -> Any:
        """Shape of the tap, see `evaluate_with_taps`; a list of shapes for `AnyEquation`."""
        if self.gives_norm:
            return jax.ShapeDtypeStruct(self.scan_lengths, jnp.float32)
        return jax.tree.map(
            lambda out: jax.ShapeDtypeStruct((*self.scan_lengths, *out.shape), out.dtype), self.out
        )


class Weighed(NamedTuple):
    """Tap of a use that gives norms, in the pass that sums weighted gradients.

    XLA may round the two passes differently, and a gradient may consist of rounding errors. The
    second pass therefore shrinks what an example adds to the norm that the first pass counted.

    Attributes:
      wide: A float array like the view, with its scans first. Its cotangent is the weighted sum.
      squares: Squared norm of the example's gradient in the first pass, [*scan_lengths].
    """

    wide: Array
    squares: Array


class Uses(NamedTuple):
    """All uses of parameters in a function.

    Attributes:
      uses: Uses of the parameters that only meet data in single equations, in order.
      nonlinear: Parameters with a use that is not linear.
      unknown: Those of them that meet data in another way, such as in the carry of a scan.
    """

    uses: list[Use]
    nonlinear: frozenset[int]
    unknown: frozenset[int]

    def by_param(self) -> dict[int, list[Use]]:
        """The uses of each parameter."""
        uses: dict[int, list[Use]] = {}
        for use in self.uses:
            uses.setdefault(use.view.param, []).append(use)
        return uses

    def without(self, params: Collection[int]) -> list[Use]:
        """Return the uses of all but some parameters."""
        return [use for use in self.uses if use.view.param not in params]


def find_uses(closed: ClosedJaxpr, params: int) -> Uses:
    """Find the equations in which the first ``params`` arguments meet data.

    Looks into `jax.jit`, `jax.checkpoint` and `jax.lax.scan`. Functions with custom derivatives
    are single equations.
    """
    search = _Search()
    views = [View.whole(i, v.aval.shape) for i, v in enumerate(closed.jaxpr.invars[:params])]
    data = [DATA] * (len(closed.jaxpr.invars) - params)
    losses, *_ = search.run(closed, [*views, *data])
    search.add_unknown([losses])  # The loss itself may be a view of a parameter.
    nonlinear = {u.view.param for u in search.uses if isinstance(u.equation, AnyEquation)}
    unknown = frozenset(search.unknown)
    uses = Uses(search.uses, unknown | nonlinear, unknown)
    return uses._replace(uses=uses.without(unknown))


class _Search(Propagation[State]):
    """Follow views of parameters to the equations in which they meet data."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.unknown: set[int] = set()

    def constant(self, value: Any) -> State:
        return None

    def visit(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Enter calls, and scans in which data takes part."""
        if (inner := called_jaxpr(eqn)) is not None:
            return self.call(eqn, inner, states, site)
        if is_identity(eqn):
            return states
        if not takes_part(eqn, states):
            return after_parameters(eqn, states)
        if (scan := Scan.read(eqn)) is not None:
            self._enter(scan, states, site)
        elif not stops_gradients(eqn):
            self.equation(eqn, states, site)
        return [DATA] * len(eqn.outvars)

    def equation(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Add the use of a view, or say that its parameter has another use."""
        operands = [k for k, state in enumerate(states) if state not in (None, DATA)]
        if len(operands) != 1 or not self._add_use(eqn, states, operands[0], site):
            self.add_unknown(states)
        return [DATA] * len(eqn.outvars)

    def _add_use(self, eqn: JaxprEqn, states: list[State], operand: int, site: Site) -> bool:
        view = states[operand]
        if not isinstance(view, View):
            return False
        path, lengths = site.path, site.lengths
        shapes = [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in eqn.outvars]
        linear = linear_equation(eqn, operand)
        if linear and not (linear.requires_unique_elements and view.layout.has_repeats):
            is_one_view = len(lengths) == len(view.scans) and not view.layout.has_repeats
            may_give_norm = site.in_checkpoint and is_one_view and linear.norm_fits(eqn)
            self.uses.append(Use(path, view, linear, lengths, shapes[0], operand, may_give_norm))
            return True
        # Every iteration of a scan would save the parameter.
        equation = AnyEquation.read(eqn, operand)
        if lengths or DATA not in states or not equation:
            return False
        self.uses.append(Use(path, view, equation, lengths, shapes))
        return True

    def _enter(self, scan: Scan, states: list[State], site: Site) -> None:
        consts, carry, xs = scan.split(states)
        self.add_unknown(carry)
        slices = [
            state.sliced_by_scan(len(site.lengths)) if isinstance(state, View) else state
            for state in xs
        ]
        inputs = [*consts, *[DATA] * scan.num_carry, *slices]
        inside = site._replace(lengths=(*site.lengths, scan.length))
        self.add_unknown(self.run(scan.body, inputs, inside))

    def add_unknown(self, states: Sequence[State]) -> None:
        """Remember the parameters of these states: they meet data in another way."""
        self.unknown |= params_of(states)


def evaluate_with_taps(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    uses: Sequence[Use],
    taps: Sequence[Any],
    scale: Array | None = None,
) -> tuple[list[Any], list[Any]]:
    """Evaluate a traced function with a tap behind every use.

    Args:
      closed: The function.
      args: Its arguments.
      uses: Uses of its parameters.
      taps: Zeros for each use. They have the shapes of the equation's results in all iterations,
        and their cotangents are the cotangents of these results. If a use gives norms, its tap is
        [*scan_lengths], and the cotangent is the squared norm of the view's gradient.
      scale: Weight of the example. If given, taps of uses that give norms are `Weighed`.

    Returns:
      The results, and the data [*scan_lengths, ...] that each use combines with the parameter.
      The data is an empty array if the gradient does not depend on it.
    """
    numbers = {use.path: number for number, use in enumerate(uses)}
    evaluation = _Evaluation(numbers, uses, scale)
    results, data = evaluation.run(closed, args, (), dict(enumerate(taps)))
    return results, [data[number] for number in range(len(uses))]


_Data = dict[int, Any]
"""Data that meets the parameter, by index of the use."""


class _Evaluation(NamedTuple):
    at_path: dict[Path, int]
    uses: Sequence[Use]
    scale: Array | None

    def run(
        self, closed: ClosedJaxpr, args: Sequence[Any], path: Path, taps: Mapping[int, Any]
    ) -> tuple[list[Any], _Data]:
        index = itertools.count()
        data: _Data = {}
        computed, readers = _computed(closed.jaxpr, bool(path)), _readers(closed.jaxpr)

        def handle(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
            eqn_path = (*path, next(index))
            if eqn_path in self.at_path:
                number = self.at_path[eqn_path]
                use = self.uses[number]
                k = None if isinstance(use.equation, AnyEquation) else use.equation.data
                if k is not None and eqn.invars[k] in computed:
                    inputs[k] = _with_tangent(inputs[k])
                outs, data[number] = self._tapped(eqn, use, inputs, taps[number])
                # A sum with a bias and its terms have the same cotangent.
                following = [(*path, i) for v in eqn.outvars for i in readers.get(v, [])]
                uses = [self.uses[n] for p in following if (n := self.at_path.get(p)) is not None]
                if len(following) == 1 and any(isinstance(u.equation, BiasAdd) for u in uses):
                    return outs
                return list(map(_with_cotangent, outs))
            inner_taps = {n: taps[n] for n in self._within(eqn_path)}
            if not inner_taps:
                return evaluate(eqn, inputs)
            run_inner = self._call if Scan.read(eqn) is None else self._scan
            with in_scopes(eqn):
                outputs, inner_data = run_inner(eqn, inputs, eqn_path, inner_taps)
            data.update(inner_data)
            return outputs

        results = interpret(closed, args, handle)
        return results, data

    def _tapped(
        self, eqn: JaxprEqn, use: Use, inputs: list[Any], given: Any
    ) -> tuple[list[Any], Any]:
        """Evaluate the equation of a use, and return its data."""
        equation, nothing = use.equation, jnp.zeros(0)
        if isinstance(equation, AnyEquation):
            outs = list(map(tap, evaluate(eqn, inputs), given))
            return outs, [inputs[k] for k in equation.data]
        x = nothing if equation.data is None else inputs[equation.data]
        (out,) = evaluate(eqn, inputs)
        if not use.gives_norm:
            return [tap(out, given)], x
        if self.scale is None:
            return [_add_norm(use, out, x, given)], nothing
        return [_weigh(eqn, use, out, inputs, given, self.scale)], nothing

    def _within(self, path: Path) -> list[int]:
        """Indices of the uses inside a call or scan."""
        return [n for n, use in enumerate(self.uses) if use.path[: len(path)] == path]

    def _call(
        self, eqn: JaxprEqn, inputs: list[Any], path: Path, taps: Mapping[int, Any]
    ) -> tuple[list[Any], _Data]:
        inner: Any = called_jaxpr(eqn)

        def call(inputs: list[Any], taps: Any) -> tuple[list[Any], _Data]:
            return self.run(inner, inputs, path, taps)

        return call_like(eqn, call)(inputs, taps)

    def _scan(
        self, eqn: JaxprEqn, inputs: list[Any], path: Path, taps: Mapping[int, Any]
    ) -> tuple[list[Any], _Data]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(inputs)

        def body(carry: list[Any], slices: list[Any], taps: Any) -> tuple[list[Any], _Data]:
            return self.run(scan.body, [*consts, *carry, *slices], path, taps)

        return scan.evaluate(body, carry, xs, taps)


def _computed(jaxpr: Jaxpr, is_inner: bool) -> set[Any]:
    """Variables that are computed here and not only moved, or rounded outside of a call."""
    computed: set[Any] = {v for v in jaxpr.invars if is_inner and is_narrow(v)}
    for eqn in jaxpr.eqns:
        only_moves = moves_elements(eqn) or is_identity(eqn)
        own = {v for v in eqn.invars if not isinstance(v, Literal)} & computed
        if own or not only_moves or any(map(is_narrow, eqn.outvars)):
            computed |= set(eqn.outvars)
    return computed


def _readers(jaxpr: Jaxpr) -> dict[Any, list[int]]:
    """Indices of the equations that read each variable; results are read by one more."""
    readers: dict[Any, list[int]] = {}
    for i, atoms in enumerate([*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]):
        for v in atoms:
            if not isinstance(v, Literal):
                readers.setdefault(v, []).append(i)
    return readers


@jax.custom_jvp
def tap(x: Array, zeros: Array) -> Array:
    """Return ``x + zeros``, as a function that ignores ``zeros`` until it is differentiated.

    XLA then never creates the zeros. The cotangent of ``zeros`` is the cotangent of the result.
    """
    return x


@tap.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]


@jax.custom_vjp
def _with_cotangent(x: Array) -> Array:
    """Return ``x``. Its cotangent is `computed_once`."""
    return x


_with_cotangent.defvjp(lambda x: (x, None), lambda _, ct: (computed_once(ct),))


@jax.custom_jvp
def _with_tangent(x: Array) -> Array:
    """Return ``x``, `computed_once`."""
    result: Array = computed_once(x)
    return result


@_with_tangent.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _with_tangent(primals[0]), tangents[0]


def _add_norm(use: Use, out: Array, x: Array, zero: Array) -> Array:
    """Return ``out``. The cotangent of ``zero`` is the squared norm of the use's gradient."""

    @jax.custom_vjp
    def with_norm(out: Array, x: Array, zero: Array) -> Array:
        return out

    def backward(x: Array, ct: Array) -> tuple[Array, None, Array]:
        return ct, None, _squares_of_use(use, x, ct)

    with_norm.defvjp(lambda out, x, zero: (out, x), backward)
    result: Array = with_norm(out, jax.lax.stop_gradient(x), zero)
    return result


def _squares_of_use(use: Use, x: Array, ct: Array) -> Array:
    """Upper bound of the squared norm of a use's gradient for one example, float32 []."""
    x, ct = (a[None, None, None] for a in (x, use.view.unscale(ct)))
    return upper_squared_norms(use.equation, x, ct)[0].astype(jnp.float32)


def is_floating(a: Any) -> bool:
    """Whether a value is of a real floating dtype."""
    return bool(jnp.issubdtype(a.dtype, jnp.floating))


def _weigh(
    eqn: JaxprEqn, use: Use, out: Array, inputs: Sequence[Any], given: "Weighed", scale: Array
) -> Array:
    """Return ``out``. The cotangent of ``given.wide`` is ``scale`` times the operand's gradient.

    It is float32 or wider, and so is the sum over a batch, whatever the dtype of the equation.
    The cotangent of ``out`` is not scaled, so the backward pass before it is the loss's own.
    """
    operand, data = use.operand, use.equation.data
    wide_eqn = with_dtypes(eqn, lambda _: given.wide.dtype)

    @jax.custom_jvp
    def of_operand(out: Array, wide: Array, inputs: list[Any]) -> Array:
        return out.astype(wide.dtype)  # Nobody reads it.

    @of_operand.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        _, wide, inputs = primals
        inputs = [a.astype(wide.dtype) if is_floating(a) else a for a in inputs]

        def function(parameter: Array) -> Array:
            values = [*inputs[:operand], parameter, *inputs[operand + 1 :]]
            result: Array = evaluate(wide_eqn, values)[0]
            return result

        _, tangent = jax.jvp(function, (inputs[operand],), (tangents[1],))
        return of_operand(*primals), tangent

    @jax.custom_vjp
    def weighted(a: Array, x: Array, scale: Array, squares: Array) -> Array:
        return a

    def backward(residuals: Any, ct: Array) -> tuple[Array, None, None, None]:
        x, scale, squares = residuals
        own = _squares_of_use(use, x, ct)
        shrink = jnp.where(own > squares, jnp.sqrt(squares) / jnp.sqrt(own), 1)
        return ct * (scale * shrink).astype(ct.dtype), None, None, None

    weighted.defvjp(lambda a, *residuals: (a, residuals), backward)
    x = jnp.zeros(0) if data is None else inputs[data]
    contribution = of_operand(jax.lax.stop_gradient(out), given.wide, list(inputs))
    contribution = weighted(contribution, jax.lax.stop_gradient(x), scale, given.squares)
    weighed_out: Array = tap(out, contribution.astype(out.dtype))
    return weighed_out
