"""Frozen weights in 8 or 4 bits: int8 per output channel, nf4 in blocks of 64.

`quantize` replaces the matrices of a tree by `Quantized` leaves. `fnet.lora` computes with such
trees and dequantizes one layer at a time. Stored with its scales in bfloat16, a weight takes 8
bits (int8) or 4.25 bits (nf4).
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet.precision import sum_dtype

KINDS = ("int8", "nf4")
"""Kinds of quantized weights."""

BLOCK = 64
"""Number of consecutive inputs that share a scale in nf4."""

# fmt: off
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
"""The 16 values of nf4, relative to the largest absolute value of a block."""
# fmt: on

Targets = Sequence[str] | Mapping[str, str]
"""Patterns of paths, as `fnmatch` reads them; or a mapping from such patterns to layouts."""

_LAYOUTS = {2: "io", 3: "nio", 4: "iiio", 5: "iiiio"}


class Layout(NamedTuple):
    """Role of each of the last axes of a weight: ``"i"`` for inputs or ``"o"`` for outputs.

    Leading axes without a role count stacked layers.
    """

    roles: str

    @classmethod
    def of(cls, where: str, path: str, ndim: int, text: str | None) -> "Layout":
        """Read a layout such as ``"nio"``; None is the default for this number of axes."""
        text = _LAYOUTS.get(ndim, "") if text is None else text
        roles = text.lstrip("n")
        if {*roles} != {"i", "o"} or len(text) != ndim:
            raise ValueError(
                f"{where}: {path!r} has {ndim} axes, got the layout {text!r}; give its pattern a "
                'layout of one letter per axis: "n" for stacked layers, then "i" for inputs and '
                '"o" for outputs, as in targets={"*kernel": "io"}'
            )
        return cls(roles)

    def axes(self, role: str) -> tuple[int, ...]:
        """Return the axes of a role, counted from the end."""
        return tuple(i - len(self.roles) for i, r in enumerate(self.roles) if r == role)

    def size(self, shape: Sequence[int], role: str) -> int:
        """Return the number of inputs or outputs of a weight, given its last axes at least."""
        return math.prod(shape[i] for i in self.axes(role))

    def stack(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths of the axes that count layers."""
        return tuple(shape[: len(shape) - len(self.roles)])

    def as_matrix(self, weight: Array) -> Array:
        """Return a weight as [*stack, in, out]."""
        stack = self.stack(weight.shape)
        order = [a + weight.ndim for a in (*self.axes("i"), *self.axes("o"))]
        matrix = jnp.transpose(weight, (*range(len(stack)), *order))
        return matrix.reshape(*stack, self.size(weight.shape, "i"), self.size(weight.shape, "o"))

    def from_matrix(self, matrix: Array, sizes: Sequence[int]) -> Array:
        """Return [*stack, in, out] in this layout, with ``sizes`` of the axes that have a role."""
        stack = matrix.shape[:-2]
        order = [a + len(sizes) for a in (*self.axes("i"), *self.axes("o"))]
        weight = matrix.reshape(*stack, *(sizes[a] for a in order))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return jnp.transpose(weight, (*range(len(stack)), *(len(stack) + a for a in inverse)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["kind", "layout", "sizes", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized weight, in place of an array in a tree of parameters.

    It is a pytree node of two arrays, so it can be jitted, donated, sharded and saved. Leading
    axes count stacked layers: a `jax.lax.scan` slices it like the array.

    Attributes:
      codes: int8 [*stack, in, out]; for nf4 uint8 [*stack, in / 2, out], two codes a byte.
      scales: [*stack, out]; for nf4 [*stack, in / 64, out].
      kind: One of `KINDS`.
      layout: Role of each axis of the weight.
      sizes: Lengths of the weight's axes after the stack.
      dtype: Dtype of the weight.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> params = {"kernel": jax.random.normal(jax.random.key(0), (128, 32))}
      >>> weight = fnet.quantization.quantize(params, "nf4")["kernel"]
      >>> weight.shape, weight.codes.shape, weight.scales.shape
      ((128, 32), (64, 32), (2, 32))
    """

    codes: Any
    scales: Any
    kind: str
    layout: Layout
    sizes: tuple[int, ...]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return (*self.codes.shape[:-2], *self.sizes)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the weight."""
        return math.prod(self.shape)

    def dequantize(self, dtype: DTypeLike | None = None) -> Array:
        """Return the weight in its own dtype, or in ``dtype``. Products are rounded once."""
        if self.kind == "int8":
            levels = self.codes.astype(jnp.float32) * self.scales.astype(jnp.float32)[..., None, :]
        else:
            levels = _nf4_values(self)
        return self.layout.from_matrix(levels.astype(dtype or self.dtype), self.sizes)


def is_quantized(leaf: Any) -> bool:
    """Whether a node of a tree is a `Quantized` weight."""
    return isinstance(leaf, Quantized)


def quantize(
    params: Any,
    kind: str,
    targets: Targets = ("*kernel",),
    *,
    scale_dtype: DTypeLike = jnp.bfloat16,
) -> Any:
    """Quantize the weights whose path matches a pattern.

    With the levels q_k of the kind, a weight W [in, out] becomes codes c and scales s,

        W_io ~ q[c_io] s_o,              int8: q = -127 ... 127, s_o = max_i |W_io| / 127
        W_io ~ q[c_io] s_(i div 64),o,    nf4: q = NF4_LEVELS,   s = max over the block of |W|

    Scales are rounded first, so the codes make up for their rounding. The error of int8 is at
    most s_o / 2 plus rounding. The error of nf4 is at most 0.152 of the block's largest value.

    It is a pure function of arrays. Under `jax.jit` with the weights donated, each is freed when
    its codes exist. With `jax.eval_shape` it gives shapes.

    Args:
      params: Tree of parameters of any library.
      kind: ``"int8"`` or ``"nf4"``.
      targets: Patterns of paths. The path of a leaf joins its keys by "/", as in
        ``"blocks/0/attention/query/kernel"``; `*` also matches "/". A mapping from patterns to
        layouts gives the axes: ``"oi"`` for Equinox and torch, ``"ioo"`` for the query of flax.
        By default [in, out], [layers, in, out], or a convolution [..., in, out].
      scale_dtype: bfloat16 or float32.

    Returns:
      The tree with `Quantized` leaves. Other leaves are unchanged.

    Raises:
      ValueError: If the kind is unknown, a pattern matches nothing, or a layout does not fit.
      TypeError: If a matching leaf is not floating, or is quantized.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import quantization
      >>> params = {
      ...     "kernel": jnp.array([[1.0, -2.0], [0.5, 0.25]]),
      ...     "bias": jnp.zeros(2),
      ... }
      >>> quantized = quantization.quantize(params, "int8", scale_dtype=jnp.float32)
      >>> print(quantized["kernel"].codes)
      [[ 127 -127]
       [  64   16]]
      >>> restored = quantization.dequantize(quantized)["kernel"]
      >>> bool(jnp.abs(restored - params["kernel"]).max() < 0.01)
      True

    References:
      Dettmers et al. 2023, "QLoRA: Efficient finetuning of quantized LLMs", arXiv:2305.14314.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize: kind must be one of {list(KINDS)}, got {kind!r}")
    layouts = find_targets("quantize", params, targets)
    convert = _to_int8 if kind == "int8" else _to_nf4

    def replace(path: str, leaf: Any) -> Any:
        if path not in layouts:
            return leaf
        layout = layouts[path]
        codes, scales = convert(layout.as_matrix(jnp.asarray(leaf)), scale_dtype)
        sizes = tuple(leaf.shape[-len(layout.roles) :])
        return Quantized(codes, scales, kind, layout, sizes, jnp.dtype(leaf.dtype))

    return map_with_paths(replace, params)


def dequantize(params: Any) -> Any:
    """Replace the `Quantized` leaves of a tree by arrays.

    Args:
      params: A tree as `quantize` returns.

    Returns:
      The tree with arrays in the dtypes and layouts of the original weights.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet import quantization
      >>> params = {"kernel": jnp.eye(64, 2)}
      >>> restored = quantization.dequantize(quantization.quantize(params, "nf4"))
      >>> bool((restored["kernel"] == params["kernel"]).all())
      True
    """
    return jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


class WeightReport(NamedTuple):
    """Cost of quantizing one weight, or all of them.

    Attributes:
      bytes_before: Bytes of the array.
      bytes_after: Bytes of codes and scales.
      error: Norm of the difference, divided by the norm of the weight.
    """

    bytes_before: int
    bytes_after: int
    error: float


class Report(NamedTuple):
    """Bytes and errors of quantized weights.

    Attributes:
      weights: `WeightReport` of each quantized weight, by path.
      total: `WeightReport` of all leaves together, quantized or not. Its error counts all
        quantized weights.
    """

    weights: dict[str, WeightReport]
    total: WeightReport


def report(params: Any, quantized: Any) -> Report:
    """Compare parameters with their quantized form.

    Args:
      params: Tree of parameters.
      quantized: What `quantize` returned for it.

    Returns:
      Bytes before and after, and relative errors: by path, and in total.

    Raises:
      ValueError: If the trees differ in structure.

    Example:
      >>> import jax
      >>> from fnet import quantization
      >>> params = {"kernel": jax.random.normal(jax.random.key(0), (256, 256))}
      >>> report = quantization.report(params, quantization.quantize(params, "nf4"))
      >>> report.total.bytes_before / report.total.bytes_after  # 32 / 4.25 bits
      7.529411764705882
      >>> round(report.weights["kernel"].error, 2)
      0.09
    """
    before, after = dict(leaves_with_paths(params)), dict(leaves_with_paths(quantized))
    if before.keys() != after.keys():
        raise ValueError(
            "report: the trees must have the same paths, differ in "
            f"{sorted(before.keys() ^ after.keys())}"
        )
    weights, squares = {}, [0.0, 0.0]
    for path, leaf in after.items():
        if not is_quantized(leaf):
            continue
        errors, norms = _squares(before[path], leaf)
        squares[0] += float(errors)
        squares[1] += float(norms)
        weights[path] = WeightReport(
            _nbytes(before[path]), _nbytes(leaf), _ratio(float(errors), float(norms))
        )
    total = WeightReport(
        sum(map(_nbytes, before.values())), sum(map(_nbytes, after.values())), _ratio(*squares)
    )
    return Report(weights, total)


def _ratio(errors: float, norms: float) -> float:
    return math.sqrt(errors / norms) if norms else 0.0


@jax.jit
def _squares(weight: Array, quantized: Quantized) -> tuple[Array, Array]:
    dtype = sum_dtype(weight.dtype)
    difference = weight.astype(dtype) - quantized.dequantize(dtype)
    return jnp.square(difference).sum(), jnp.square(weight.astype(dtype)).sum()


def _nbytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


# The two kinds, for matrices [*stack, in, out].


def _to_int8(matrix: Array, scale_dtype: DTypeLike) -> tuple[Array, Array]:
    matrix = matrix.astype(jnp.float32)
    scales = (jnp.abs(matrix).max(-2) / 127).astype(scale_dtype)
    codes = jnp.round(matrix / _divisor(scales)[..., None, :])
    return jnp.clip(codes, -127, 127).astype(jnp.int8), scales


def _to_nf4(matrix: Array, scale_dtype: DTypeLike) -> tuple[Array, Array]:
    *stack, rows, cols = matrix.shape
    padding = [(0, 0)] * len(stack) + [(0, -rows % BLOCK), (0, 0)]
    blocks = jnp.pad(matrix.astype(jnp.float32), padding).reshape(*stack, -1, BLOCK, cols)
    scales = jnp.abs(blocks).max(-2).astype(scale_dtype)
    levels = jnp.array(NF4_LEVELS, jnp.float32)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = jnp.searchsorted(middles, blocks / _divisor(scales)[..., None, :]).astype(jnp.uint8)
    # A byte holds row r of the first half of a block and row r of the second half, so that
    # unpacking concatenates and does not interleave.
    low, high = jnp.split(codes, 2, axis=-2)
    return (low | high << 4).reshape(*stack, -1, cols), scales


def _nf4_values(weight: Quantized) -> Array:
    *stack, rows, cols = weight.codes.shape
    codes = weight.codes.reshape(*stack, 2 * rows // BLOCK, BLOCK // 2, cols)
    codes = jnp.concatenate([codes & 15, codes >> 4], axis=-2)
    levels = jnp.array(NF4_LEVELS, jnp.float32).at[codes].get(mode="promise_in_bounds")
    blocks: Array = levels * weight.scales.astype(jnp.float32)[..., None, :]
    return blocks.reshape(*stack, 2 * rows, cols)[..., : weight.layout.size(weight.sizes, "i"), :]


def _divisor(scales: Array) -> Array:
    """Return scales to divide by. A column of zeros has the scale 0."""
    return jnp.where(scales == 0, 1, scales).astype(jnp.float32)


# Paths.


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their paths, keys joined by "/".

    A `Quantized` weight is a leaf. Variables of flax nnx have the path of their array.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return [(_path(keys), leaf) for keys, leaf in leaves]


def map_with_paths(f: Any, tree: Any) -> Any:
    """Map ``f(path, leaf)`` over the leaves of a tree; see `leaves_with_paths`."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: f(_path(keys), leaf), tree, is_leaf=is_quantized
    )


def _path(keys: Sequence[Any]) -> str:
    # The last key of a variable of flax nnx is its attribute `value`.
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def find_targets(where: str, params: Any, targets: Targets) -> dict[str, Layout]:
    """Return the layout of each leaf whose path matches a pattern; the first pattern counts.

    A pattern behind ``!`` leaves out what it matches. It is a ValueError if a pattern matches no
    leaf or a layout does not fit, and a TypeError if a leaf is no floating weight. ``where`` is the
    caller, for errors.
    """
    if isinstance(targets, str):
        raise TypeError(f"{where}: targets must be a sequence of patterns, got {targets!r}")
    given = dict(targets) if isinstance(targets, Mapping) else dict.fromkeys(targets)
    left_out = [p[1:] for p in given if p.startswith("!")]
    patterns = {p: layout for p, layout in given.items() if not p.startswith("!")}
    leaves = leaves_with_paths(params)
    found: dict[str, Layout] = {}
    unused = set(patterns)
    for path, leaf in leaves:
        matching = [p for p in patterns if fnmatch.fnmatchcase(path, p)]
        unused -= set(matching)
        if not matching or any(fnmatch.fnmatchcase(path, p) for p in left_out):
            continue
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{where}: {path!r} must be a floating weight, got {dtype or type(leaf).__name__};"
                " narrow the patterns"
            )
        if is_quantized(leaf) and where == "quantize":
            raise TypeError(f"{where}: {path!r} is already quantized; dequantize it before")
        found[path] = Layout.of(where, path, len(leaf.shape), patterns[matching[0]])
    if unused:
        paths = [path for path, _ in leaves]
        shown = ", ".join(map(repr, paths[:8])) + ", ..." * (len(paths) > 8)
        raise ValueError(f"{where}: no parameter matches {sorted(unused)}; the paths are {shown}")
    return found
