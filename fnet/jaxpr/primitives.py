"""Typed readers of equations: the parameters of a primitive, and what follows from them.

Code outside of `fnet.jaxpr` compares no names of primitives and reads no parameters. It asks a
reader, such as ``DotGeneral.read(eqn)``, `Scan`, `While` or `ShardMap`, or a row of `axes`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fnet.jaxpr.interpreter import Scan, aval, find_equations, inner_jaxprs, nbytes

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reader:
    """An equation of one primitive. The fields of a subclass are parameters, named as in JAX.

    Readers are equal if these parameters are.

    Attributes:
      eqn: The equation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.jaxpr.primitives import DotGeneral
      >>> closed = jax.make_jaxpr(jnp.matmul)(jnp.ones((5, 2)), jnp.ones((2, 3)))
      >>> dot = DotGeneral.read(closed.eqns[0])
      >>> dot.axes(0), dot.flops
      (((), (1,), (0,)), 60)
    """

    primitive: ClassVar[str]
    eqn: JaxprEqn = dataclasses.field(compare=False)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Self:
        """Read an equation of this primitive."""
        return cls(eqn, *(eqn.params[f.name] for f in dataclasses.fields(cls)[1:]))

    @classmethod
    def read(cls, eqn: JaxprEqn) -> Self | None:
        """Read an equation if it is of this primitive, else return None."""
        return cls.of(eqn) if eqn.primitive.name == cls.primitive else None

    @classmethod
    def find(cls, jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Self]:
        """Yield all equations of this primitive, inner jaxprs included."""
        return filter(None, map(cls.read, find_equations(jaxpr, cls.primitive)))

    def replace(self, **params: Any) -> JaxprEqn:
        """Return the equation with some other parameters."""
        new: JaxprEqn = self.eqn.replace(params=self.eqn.params | params)
        return new

    def bind(self, *arrays: Any, **params: Any) -> Any:
        """Apply the primitive to other arrays, with some other parameters."""
        return self.eqn.primitive.bind(*arrays, **self.eqn.params | params)


@dataclasses.dataclass(frozen=True)
class DotGeneral(Reader):
    """A product of matrices, ``dot_general``."""

    primitive = "dot_general"
    dimension_numbers: tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
    precision: Any

    def axes(self, operand: int) -> tuple[Axes, Axes, Axes]:
        """Axes of an operand: those of the batch, those that are summed over, and its own."""
        summed, batch = (dims[operand] for dims in self.dimension_numbers)
        ndim = aval(self.eqn.invars[operand]).ndim
        return batch, summed, tuple(i for i in range(ndim) if i not in (*batch, *summed))

    def size(self, operand: int, axes: Axes) -> int:
        """Number of elements along some axes of an operand."""
        return math.prod(aval(self.eqn.invars[operand]).shape[i] for i in axes)

    @property
    def flops(self) -> int:
        """2 per multiply-add."""
        return 2 * int(aval(self.eqn.outvars[0]).size) * self.size(0, self.axes(0)[1])


@dataclasses.dataclass(frozen=True)
class ConvGeneralDilated(Reader):
    """A convolution, ``conv_general_dilated``."""

    primitive = "conv_general_dilated"
    dimension_numbers: jax.lax.ConvDimensionNumbers
    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_group_count: int
    batch_group_count: int
    precision: Any
    preferred_element_type: Any

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return tuple(aval(self.eqn.invars[1]).shape)

    @property
    def window(self) -> tuple[int, ...]:
        """Lengths of the kernel along the axes of space."""
        return tuple(self.kernel[i] for i in self.dimension_numbers.rhs_spec[2:])

    @property
    def flops(self) -> int:
        """2 per multiply-add. XLA skips the zeros of a gradient's dilation."""
        out_channels = self.kernel[self.dimension_numbers.rhs_spec[0]]
        products = math.prod(self.kernel) // out_channels // math.prod(self.lhs_dilation)
        return 2 * int(aval(self.eqn.outvars[0]).size) * max(products, 1)


@dataclasses.dataclass(frozen=True)
class Gather(Reader):
    """Slices that begin at the indices of an array, ``gather``."""

    primitive = "gather"
    dimension_numbers: jax.lax.GatherDimensionNumbers
    slice_sizes: tuple[int, ...]
    mode: jax.lax.GatherScatterMode


@dataclasses.dataclass(frozen=True)
class Slice(Reader):
    """A part of an array, ``slice``."""

    primitive = "slice"
    start_indices: tuple[int, ...]
    limit_indices: tuple[int, ...]
    strides: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class DynamicSlice(Reader):
    """A part of an array that begins where other operands say, ``dynamic_slice``."""

    primitive = "dynamic_slice"
    slice_sizes: tuple[int, ...]


class DynamicUpdateSlice(Reader):
    """An array of which a part is replaced by another array, ``dynamic_update_slice``."""

    primitive = "dynamic_update_slice"


class Add(Reader):
    """A sum of two arrays, ``add``."""

    primitive = "add"


class Mul(Reader):
    """An elementwise product of two arrays, ``mul``."""

    primitive = "mul"


@dataclasses.dataclass(frozen=True)
class Cond(Reader):
    """A `jax.lax.cond` or `jax.lax.switch`, whose first operand chooses one of the branches."""

    primitive = "cond"
    branches: tuple[ClosedJaxpr, ...]


def product(eqn: JaxprEqn) -> DotGeneral | ConvGeneralDilated | None:
    """Read an equation if it is a product of matrices or a convolution."""
    return DotGeneral.read(eqn) or ConvGeneralDilated.read(eqn)


def total(eqn: JaxprEqn, measure: Callable[[JaxprEqn], int]) -> int:
    """Sum a number over what an equation runs.

    A scan counts every iteration, a while loop one, a cond the most expensive branch.

    Args:
      eqn: An equation.
      measure: The number of an equation without inner jaxprs.
    """
    parts = [sum(total(e, measure) for e in jaxpr.eqns) for jaxpr in inner_jaxprs(eqn)]
    # The inner jaxpr of a scatter or a reduction combines two numbers.
    if not parts or eqn.primitive.name.startswith(("scatter", "reduce", "select_and")):
        return measure(eqn)
    scan = Scan.read(eqn)
    return max(parts) if Cond.read(eqn) else sum(parts) * (scan.length if scan else 1)


def made_bytes(eqn: JaxprEqn) -> int:
    """Bytes of all results of what an equation runs; see `total`."""
    return total(eqn, lambda e: sum(map(nbytes, e.outvars)))
