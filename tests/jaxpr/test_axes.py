"""Rows of primitives: what they say of axes, linearity and elements is confirmed numerically."""

import itertools
import subprocess
import sys

import equation_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equation_cases import NOT_RUN, WITHOUT_ROW, equations
from jax.extend.core import Literal, Primitive

from fnet import jaxpr
from fnet.jaxpr import slope
from fnet.jaxpr.axes import ROWS

pytestmark = pytest.mark.usefixtures("allow_key_reuse", "allow_rank_promotion")


# Coverage.

JAX = """
import gc, importlib, sys
for name in (
    "lax lax.linalg nn numpy numpy.linalg numpy.fft random scipy.linalg scipy.special scipy.signal "
    "scipy.sparse.linalg scipy.stats image ops custom_derivatives custom_batching ffi ad_checkpoint "
    "experimental.custom_partitioning experimental.checkify experimental.sparse experimental.ode "
    "experimental.layout experimental.multihost_utils experimental.shard_alike "
    "extend.core.primitives"
).split():
    try:
        importlib.import_module(f"jax.{name}")
    except ImportError:
        assert name == "experimental.shard_alike"
import fnet.backward_pass
from fnet.jaxpr.axes import ROWS
from jax.extend.core import Primitive
names = {p.name for p in gc.get_objects() if isinstance(p, Primitive)}
listed = sys.argv[1].split()
assert len(names) > 250
assert len(listed) == len(set(listed))
assert not set(ROWS) & set(listed), set(ROWS) & set(listed)
assert names <= set(ROWS) | set(listed), names - set(ROWS) - set(listed)
"""


def test_every_primitive_has_a_row_or_is_listed_without_one():
    subprocess.run([sys.executable, "-c", JAX, " ".join(WITHOUT_ROW.values())], check=True)


def test_every_row_has_a_case_or_a_reason():
    cases = set(equation_cases.CASES) | set(equation_cases.COLLECTIVES)
    reasons = set(" ".join(NOT_RUN.values()).split())
    assert not reasons & cases
    assert (cases | reasons) & set(equation_cases.PRIMITIVES) >= set(ROWS) & set(
        equation_cases.PRIMITIVES
    )


# Arrays.


def to_host(a):
    """The array in NumPy. Random keys have their data as a further axis."""
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.extended)
    return np.asarray(jax.random.key_data(a) if is_key else a)


def from_host(a, like):
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.extended)
    return jax.random.wrap_key_data(jnp.asarray(a)) if is_key else jnp.asarray(a)


def close(a, b):
    a, b = to_host(a), to_host(b)
    if a.dtype.kind not in "fc" and a.dtype.kind in "iubV" and a.dtype.name not in LOW_PRECISION:
        return a.shape == b.shape and bool((a == b).all())
    a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
    return a.shape == b.shape and np.allclose(a, b, 1e-5, 1e-5, equal_nan=True)


LOW_PRECISION = ("bfloat16", "float8_e4m3fn")


class Axis:
    """An axis of some arrays, which may be split into parts."""

    def __init__(self, factor, equation):
        self.factor, self.equation = factor, equation
        self.first = 0 if equation.mesh is None else 1
        self.n = self.count()

    def count(self):
        """Number of positions, or of parts; 0 if the axes have different ones."""
        if self.factor.parts is not None:
            return self.factor.parts
        eqn = self.equation.eqn
        pairs = [*zip(eqn.invars, self.factor.operands, strict=True)]
        pairs += zip(eqn.outvars, self.factor.results, strict=True)
        sizes = {(jaxpr.aval(v).shape or (1,))[axis] for v, axis in pairs if axis is not None}
        return sizes.pop() if len(sizes) == 1 else 0

    def change(self, arrays, axes, f):
        """Apply ``f`` to these arrays with the positions as the first axis."""
        changed = []
        for k, (a, axis) in enumerate(zip(arrays, axes, strict=True)):
            host = to_host(a)
            axis = None if axis is None or host.ndim <= self.first else axis + self.first
            if axis is None:
                changed.append(a)
                continue
            moved = np.moveaxis(host, axis, 0)
            parts = moved.reshape(self.n, len(moved) // self.n, *moved.shape[1:])
            moved = np.asarray(f(parts, k)).reshape(moved.shape)
            changed.append(from_host(np.moveaxis(moved, 0, axis), a))
        return changed

    def parts(self, array, k):
        """Operand k with the positions as the first axis."""
        moved = np.moveaxis(to_host(array), self.factor.operands[k] + self.first, 0)
        return moved.reshape(self.n, len(moved) // self.n, *moved.shape[1:])

    def operands(self, arrays, f):
        return self.change(arrays, self.factor.operands, f)

    def results(self, arrays, f):
        return self.change(arrays, self.factor.results, f)

    def mixed(self, first, second, position):
        """Operands of the first draw at a position, and of the second elsewhere."""

        def choose(parts, k):
            chosen = self.parts(second[k], k).copy()
            chosen[position] = parts[position]
            return chosen

        return self.operands(first, choose)

    def kept(self, results, position):
        """The results at one position."""
        return [
            np.take(np.moveaxis(to_host(a), axis + self.first, 0).reshape(self.n, -1), position, 0)
            if axis is not None and to_host(a).ndim > self.first
            else to_host(a)
            for a, axis in zip(results, self.factor.results, strict=True)
        ]


def is_separate(equation, factor):
    """Whether each position of the results follows from this position of the operands alone."""
    axis, (first, second, *_) = Axis(factor, equation), equation.draws
    if not axis.n:
        return False
    shared = axis.operands(first, lambda parts, k: axis.parts(second[k], k))
    expected, others = equation.run(first), equation.run(shared)
    if axis.n > 1:
        rolled = equation.run(axis.operands(first, lambda parts, _: np.roll(parts, 1, 0)))
        by_hand = axis.results(expected, lambda parts, _: np.roll(parts, 1, 0))
        if not all(map(close, rolled, by_hand)):
            return False
    if 0 in [to_host(a).size for a in (*first, *expected)]:
        return True
    for position in range(axis.n):
        got = equation.run(axis.mixed(first, second, position))
        for p in range(axis.n):
            own = axis.kept(expected if p == position else others, p)
            if not all(map(close, axis.kept(got, p), own)):
                return False
    return True


def is_sum(equation, factor):
    """Whether results are a sum over positions of the same function of each position."""
    axis, (first, second, *_) = Axis(factor, equation), equation.draws
    shared = axis.operands(first, lambda parts, k: axis.parts(second[k], k))
    every, none = equation.run(first), equation.run(shared)
    rolled = equation.run(axis.operands(first, lambda parts, _: np.roll(parts, 1, 0)))
    if not axis.n or not all(map(close, rolled, every)):
        return False
    changes = [np.zeros_like(to_host(a)) for a in every]
    for position in range(axis.n):
        got = equation.run(axis.mixed(first, second, position))
        changes = [c + to_host(a) - to_host(b) for c, a, b in zip(changes, got, none, strict=True)]
    sums = [to_host(a) + change for a, change in zip(none, changes, strict=True)]
    return all(map(close, every, sums))


NAMES = sorted(set(ROWS) & (set(equation_cases.CASES) | set(equation_cases.COLLECTIVES)))

OF_RULES = {ROWS[name].factors.__code__: name for name in reversed(NAMES)}.values()
"""The first primitive of each rule."""

# Of any function, of bits, or by chance.
SUM_BUT_UNKNOWN = {"psum", "reduce", "reduce_and", "reduce_or", "scatter", "scatter-max"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OF_RULES)) for n in NAMES]
)
def test_factors(name):
    for equation in equations(name, 2):
        for factor in jaxpr.factors(equation.eqn):
            assert len(factor.operands) == len(equation.eqn.invars)
            assert len(factor.results) == len(equation.eqn.outvars)
            if factor.is_separate:
                assert is_separate(equation, factor), f"{factor} of {equation.eqn}"
            elif not factor.is_sum:
                assert name in SUM_BUT_UNKNOWN or not is_sum(equation, factor), equation.eqn
            else:
                assert is_sum(equation, factor), f"{factor} of {equation.eqn}"


B = 3


def merged(rows, axis, first, is_scalar):
    """One array in place of several, with these along an axis of one of them."""
    hosts = [*map(to_host, rows)]
    if is_scalar:
        return from_host(np.stack(hosts, first), rows[0])
    return from_host(np.concatenate(hosts, first + axis), rows[0])


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", NAMES)
def test_a_longer_axis_equals_vmap(name):
    for equation in equations(name, B):
        eqn, first = equation.eqn, 0 if equation.mesh is None else 1
        row, draws = ROWS[name], [*zip(*equation.draws, strict=True)]

        def join(columns, axes, atoms, first=first):
            return [
                own[0] if axis is None else merged(own, axis, first, not jaxpr.aval(v).shape)
                for own, axis, v in zip(columns, axes, atoms, strict=True)
            ]

        for factor in jaxpr.factors(eqn):
            own = [
                v for v, axis in zip(eqn.invars, factor.operands, strict=True) if axis is not None
            ]
            is_fixed = any(isinstance(v, Literal) for v in own) and not row.broadcasts
            if not factor.is_separate or not own or is_fixed:
                continue
            rows = zip(draws, factor.operands, strict=True)
            rows = [[own[0]] * B if axis is None else own for own, axis in rows]
            columns = [*zip(*map(equation.run, zip(*rows, strict=True)), strict=True)]
            operands = join(draws, factor.operands, eqn.invars)
            results = equation.run(operands, jaxpr.lengthen(eqn, factor, B))
            expected = join(columns, factor.results, eqn.outvars)
            assert all(map(close, results, expected)), f"{factor} of {eqn}"


def test_a_longer_axis_of_copies():
    (equation,) = equations("broadcast_in_dim", 1)[:1]
    factor = jaxpr.Factor((None,), (0,))
    assert factor in jaxpr.factors(equation.eqn)
    assert not jaxpr.places_once(equation.eqn)
    longer = equation.run(equation.draws[0], jaxpr.lengthen(equation.eqn, factor, 2))
    assert close(longer[0], np.concatenate(equation.run(equation.draws[0]) * 2))


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", [name for name in NAMES if ROWS[name].broadcasts])
def test_operands_that_are_repeated(name):
    for equation in equations(name, 1):
        (draw,), eqn = equation.draws, equation.eqn
        shape = jaxpr.aval(eqn.outvars[0]).shape
        whole = [k for k in inputs(eqn) if jaxpr.aval(eqn.invars[k]).shape == shape]
        for k in whole if shape and len(whole) > 1 else ():
            ones = [a[:1] if i == k else a for i, a in enumerate(draw)]
            copies = jnp.broadcast_to(jnp.asarray(draw[k][:1]), shape)
            whole = [copies if i == k else a for i, a in enumerate(draw)]
            pairs = zip(equation.run(ones), equation.run(whole), strict=True)
            assert all(close(a, b) for a, b in pairs), eqn


# Linearity.


def inputs(eqn):
    """Numbers of operands that may change, each for itself."""
    atoms = [v for v in eqn.invars if not isinstance(v, Literal)]
    return [k for k, v in enumerate(eqn.invars) if atoms.count(v) == 1]


def in_double(a):
    """The array in NumPy, wide enough to add and multiply."""
    a = to_host(a)
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def is_linear(equation, operands):
    """Whether the results are additive and homogeneous in these operands."""
    first, second, third, *_ = equation.draws
    arrays = [*(first[k] for k in operands), *(jaxpr.aval(v) for v in equation.eqn.outvars)]
    if not all(jnp.issubdtype(a.dtype, jnp.number) for a in arrays):
        return False

    def combined(a, b):
        return 2 * in_double(a) - 4 * in_double(b)

    def run(draw):
        chosen = [draw[k] if k in operands else a for k, a in enumerate(third)]
        return equation.run([jnp.asarray(a, b.dtype) for a, b in zip(chosen, third, strict=True)])

    pairs = enumerate(zip(first, second, strict=True))
    both = [combined(*pair) if k in operands else pair[0] for k, pair in pairs]
    results = zip(run(both), run(first), run(second), strict=True)
    return all(
        np.allclose(in_double(a), combined(b, c), *[tolerance(equation.eqn)] * 2, equal_nan=True)
        for a, b, c in results
    )


def tolerance(eqn):
    """Rounding to bfloat16 counts as linear."""
    is_rounded = any(jaxpr.aval(v).dtype == jnp.bfloat16 for v in eqn.outvars)
    return 0.05 if is_rounded or eqn.params.get("mantissa_bits") == 7 else 1e-5


LINEAR_BUT_UNKNOWN = {
    ("neg", (0,)),  # of integers
    ("optimization_barrier", (0, 1, 2)),  # also of integers
    ("ormqr", (2,)),
    ("polynomial", (1, 2, 3)),  # in its coefficients
    ("reduce", (0,)),  # with any function
    ("reduce_window", (0,)),
    ("scatter-mul", (0,)),
    ("shift_left", (0,)),
    ("tie", (0, 1)),  # does not read operand 0
    # By chance.
    ("nextafter", (0,)),
    ("nextafter", (0, 1)),
    ("select_n", (1,)),
    ("select_n", (2,)),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", NAMES)
def test_linearity(name):
    for equation in equations(name, 3):
        own = inputs(equation.eqn)
        for count in range(1, len(own) + 1):
            for operands in itertools.combinations(own, count):
                claimed = jaxpr.is_linear_in(equation.eqn, operands)
                if claimed or (name, operands) not in LINEAR_BUT_UNKNOWN:
                    assert claimed == is_linear(equation, operands), (operands, str(equation.eqn))


def slope_of(equation, operand):
    """The number c if results are ``c x + d`` for several x, with any d; else None."""
    first, second, third, *_ = equation.draws
    arrays = [jaxpr.aval(v) for v in (equation.eqn.invars[operand], *equation.eqn.outvars)]
    if len({a.shape for a in arrays}) > 1 or not all(map(is_float, arrays)):
        return None
    change = in_double(second[operand]) - in_double(first[operand])
    changes = []
    for others in (first, second, third):
        (before,), (after,) = (
            equation.run([a if k == operand else b for k, b in enumerate(others)])
            for a in (first[operand], second[operand])
        )
        changes.append(in_double(after) - in_double(before))
    slope = float((changes[0] * change).sum() / (change * change).sum())
    rounding = tolerance(equation.eqn)
    return slope if np.allclose(changes, slope * change, rounding, rounding) else None


SLOPES_BY_CHANCE = {
    ("clamp", 1),
    ("polynomial", 1),
    *itertools.product(("nextafter", "select_n"), range(3)),
}


def test_slopes():
    for name in (name for name in NAMES if ROWS[name].is_elementwise):
        for equation in equations(name, 3):
            first, second, *_ = equation.draws
            for operand in inputs(equation.eqn):
                if close(first[operand], second[operand]):
                    continue  # a constant
                got, expected = slope(equation.eqn, operand), slope_of(equation, operand)
                case = operand, str(equation.eqn)
                if jnp.issubdtype(equation.eqn.invars[operand].aval.dtype, jnp.integer):
                    assert got in (None, 1), case
                elif got is None:
                    assert expected is None or (name, operand) in SLOPES_BY_CHANCE, case
                else:
                    assert abs(got - expected) < tolerance(equation.eqn), case


def test_complex_values_have_no_slope():
    (eqn,) = jax.make_jaxpr(jnp.real)(jnp.ones(3, complex)).eqns
    assert slope(eqn, 0) is None


# Elements.


def depends_on_one_element(equation):
    """Whether each element of the results follows from the same elements of the operands."""
    first, second, *_ = equation.draws
    eqn, first_axis = equation.eqn, 0 if equation.mesh is None else 1
    shapes = {jaxpr.aval(v).shape for v in eqn.outvars}
    if len(shapes) > 1:
        return False
    (shape,) = shapes
    size = int(np.prod(shape))

    def broadcasts(own):
        pairs = zip(own, shape, strict=False)
        return not own or (len(own) == len(shape) and all(a in (1, b) for a, b in pairs))

    if not all(broadcasts(jaxpr.aval(v).shape) for v in eqn.invars):
        return False

    def select(chosen, a, b):
        """The first array at chosen elements, and the second elsewhere."""
        a, b = to_host(a), to_host(b)
        keys = a.ndim - first_axis - chosen.ndim
        return np.where(chosen.reshape((*shape, *[1] * keys)), a, b)

    def run(chosen):
        pairs = zip(first, second, eqn.invars, strict=True)
        return equation.run(
            [
                from_host(select(chosen, a, b), a) if jaxpr.aval(v).shape == shape else a
                for a, b, v in pairs
            ]
        )

    everywhere, nowhere = run(np.ones(shape, bool)), run(np.zeros(shape, bool))
    for number in range(size):
        chosen = (np.arange(size) == number).reshape(shape)
        results = zip(run(chosen), everywhere, nowhere, strict=True)
        if not all(close(got, select(chosen, a, b)) for got, a, b in results):
            return False
    return True


def is_same(equation):
    """Whether result i is operand i."""
    for draw in equation.draws:
        results = equation.run(draw)
        if any(a.dtype != b.dtype or not close(a, b) for a, b in zip(draw, results, strict=False)):
            return False
    return len(results) <= len(draw)


def moves(equation):
    """Whether elements of the results are elements of the operands, up to rounding."""
    for draw in equation.draws:
        results = equation.run(draw)
        for f in (np.abs, np.negative, lambda a: 4 * a):
            changed = equation.run(
                [from_host(f(to_host(a)), a) if is_float(a) else a for a in draw]
            )
            expected = [f(to_host(a)) if is_float(a) else a for a in results]
            if not all(map(close, changed, expected)):
                return False
        elements = np.concatenate([in_double(a).ravel() for a in draw if is_float(a)])
        for a in filter(is_float, results):
            distances = np.abs(in_double(a).reshape(-1, 1) - elements).min(1, initial=np.inf)
            if not (distances <= 0.1 * np.abs(in_double(a)).ravel()).all():
                return False
    return True


def is_float(a):
    return bool(jnp.issubdtype(a.dtype, jnp.floating))


def moves_to_one_place(equation):
    """Whether the results have the same elements as the operands, up to rounding."""
    for draw in equation.draws:
        sides = [
            np.sort(np.concatenate([in_double(a).ravel() for a in arrays]))
            for arrays in (draw, equation.run(draw))
        ]
        if sides[0].shape != sides[1].shape or not np.allclose(*sides, 0.1, 1e-5):
            return False
    return True


IDENTITIES = {name for name in NAMES if ROWS[name].is_identity}
BUT_UNKNOWN = {
    jaxpr.is_elementwise: IDENTITIES
    | {"bitcast_convert_type", "pmax", "pmin", "ppermute", "psum", "psum_invariant"}
    # Of one element, or with other arrays fixed.
    | {"broadcast_in_dim", "dynamic_update_slice", "iota", "random_bits", "random_split"}
    | {"reshape", "scatter"},
    jaxpr.is_identity: {"copy", "name", "stop_gradient", "nextafter"},
    jaxpr.moves_elements: {
        "nextafter",
        "ppermute",
        "reduce_window_sum",
        "scatter",
        "select_n",
        "tie",
    },
    jaxpr.places_once: {"pad", "ppermute", "sort"},
}
"""Rows for which more is true than they say."""

CONFIRMED = {
    jaxpr.is_elementwise: depends_on_one_element,
    jaxpr.is_identity: is_same,
    jaxpr.moves_elements: moves,
    jaxpr.places_once: moves_to_one_place,
}


def test_attention_of_cudnn_computes_each_example_alone():
    attention = Primitive("dot_product_attention_fwd_wrapper")
    attention.multiple_results = True
    attention.def_abstract_eval(lambda q, *others, **_: [q, q])
    for options, present, is_known in (
        ({}, (0, 1, 2), True),
        ({}, (0, 1, 2, 3, 4, 5), True),
        ({}, (0, 1, 2, 6), False),  # offsets of documents
        ({}, (0, 1, 2, 9), False),  # pages
        ({"dropout_rate": 0.1}, (0, 1, 2), False),
        ({"variadic_args": (True, True)}, (0, 1, 2), False),
    ):
        params = {"dropout_rate": 0.0, "variadic_args": (True, False)} | options
        arrays = [jnp.ones((2, 3, 4, 5) if i in present else (0,)) for i in range(10)]
        (eqn,) = jax.make_jaxpr(lambda *a, p=params: attention.bind(*a, **p))(*arrays).eqns
        axes = tuple(0 if i in present else None for i in range(10))
        expected = [(axes, (0, 0))] if is_known else []
        assert [(f.operands, f.results) for f in jaxpr.factors(eqn)] == expected


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", NAMES)
def test_elements(name):
    for equation, question in itertools.product(equations(name, 2), BUT_UNKNOWN):
        arrays = [jaxpr.aval(v) for v in (*equation.eqn.invars, *equation.eqn.outvars)]
        if question in (jaxpr.moves_elements, jaxpr.places_once):
            literals = [jaxpr.aval(v) for v in equation.eqn.invars if isinstance(v, Literal)]
            ends = [jaxpr.aval(equation.eqn.outvars[0])]
            may_change = "fill_value" in equation.eqn.params or any(map(is_float, literals))
            if may_change or not equation.eqn.invars or not all(map(is_float, (arrays[0], *ends))):
                continue
        is_true = CONFIRMED[question](equation)
        if question(equation.eqn):
            assert is_true, equation.eqn
        else:
            assert not is_true or name in BUT_UNKNOWN[question], equation.eqn
