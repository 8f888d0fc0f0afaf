"""Convolutions on a CPU as matrix products or sums, where XLA's own are slow: docs/cpu.md.

**3x3 convolutions** use Winograd's minimal filtering: a tile of 2x2 outputs is 16 products of
transformed inputs and kernels, in place of 36, over a few images that fit into the cache. Dilated
kernels that mostly meet padding are one product for each kernel element.

**Depthwise convolutions** are one fused sum of shifted images, by the input of a strided one one
for each phase of the stride. **Grouped convolutions** are a loop over blocks of about 32 channels,
whose kernels have zeros between groups: an input that is not finite reaches all of its block.

References: Lavin and Gray 2016, "Fast algorithms for convolutional neural networks", CVPR,
  arXiv:1509.09308, section 4.1: F(2x2, 3x3) and its matrices.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from fnet import measured
from fnet.cpu.tracing import is_for_cpu
from fnet.jaxpr import ShardMap, aval, call_in_place, rewrite, transformed
from fnet.jaxpr.primitives import ConvGeneralDilated

T = TypeVar("T")
Convolve = Callable[[Array, Array], Array]

# Sums of 16-bit products are in float32.
_DTYPES = {jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}


def count_cpus(tree: Any) -> int:
    """Return the number of CPUs that hold the arrays of a pytree; 0 on other devices."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    devices = {d for s in shardings if s for d in s.device_set}
    platforms = {d.platform for d in devices} or {jax.default_backend()}
    return max(len(devices), 1) if platforms == {"cpu"} else 0


def for_cpus(f: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """Make a function that is jitted compute its convolutions in ways that are faster on a CPU.

    It replaces float32 convolutions, their gradients by input and their gradients by kernel, also
    inside of scans and remat: large 3x3 ones of stride 1, depthwise ones and grouped ones. Values
    differ by rounding: about 1e-6, relative to the largest. Differentiate the function before, not
    after.

    ``count`` is the number of CPUs that the program runs on; 0 for other devices, which changes
    nothing. On several, loops over images would gather sharded batches: 3x3 convolutions and kernel
    gradients of depthwise ones stay.
    """
    if not count:
        return f
    # Derivative rules hold no convolutions that run: everything is differentiated already.
    choose = functools.partial(_on_cpus, one_device=count == 1)
    return transformed(f, lambda c, _: rewrite(c, functools.partial(_replace, choose, {})))


def for_loops(f: Callable[..., T]) -> Callable[..., T]:
    """Make the body of a loop compute its convolutions in the layout that is fast on a CPU.

    XLA has a fast implementation for the layout [batch, space, features] x [space, in, out]. It
    transposes others, such as in backward passes, but not inside of loops, where they take 10 to 90
    times as long. Nothing changes for other devices, and inside of a `jax.shard_map`, which checks
    along which axes the results of calls vary. Differentiate the function before, not after.
    """
    if not is_for_cpu():
        return f
    replace = functools.partial(_replace, _in_fast_layout, {})
    return transformed(f, lambda c, _: rewrite(c, replace, lambda eqn: ShardMap.read(eqn) is None))


def _replace(
    choose: Callable[[ConvGeneralDilated], Convolve | None],
    made: dict[Any, JaxprEqn | None],
    eqn: JaxprEqn,
) -> JaxprEqn:
    conv = ConvGeneralDilated.read(eqn)
    if conv is None:
        return eqn
    # Equal convolutions share one program, which is traced and lowered once.
    key = tuple(aval(v) for v in eqn.invars), tuple(sorted(eqn.params.items()))
    if key not in made:
        f = choose(conv)
        made[key] = f and call_in_place(eqn, f)
    call = made[key]
    return eqn.replace(primitive=call.primitive, params=call.params) if call else eqn


def _on_cpus(conv: ConvGeneralDilated, *, one_device: bool) -> Convolve | None:
    if not _has_default_precision(conv):
        return None
    return _by_groups(conv, one_device=one_device) or (_algorithm(conv) if one_device else None)


def _in_fast_layout(conv: ConvGeneralDilated) -> Convolve | None:
    lhs, rhs, out = conv.dimension_numbers
    space = tuple(range(1, len(lhs) - 1))
    images = 0, len(space) + 1, *space
    kernel = len(space) + 1, len(space), *(i - 1 for i in space)
    fast = jax.lax.ConvDimensionNumbers(images, kernel, images)
    if conv.dimension_numbers == fast:
        return None

    def f(x: Array, y: Array) -> Array:
        x = x.transpose([lhs[images.index(i)] for i in range(x.ndim)])
        y = y.transpose([rhs[kernel.index(i)] for i in range(y.ndim)])
        params = conv.eqn.params | {"dimension_numbers": fast}
        found: Array = conv.eqn.primitive.bind(x, y, **params)
        return found.transpose([images[out.index(i)] for i in range(found.ndim)])

    return f


def _has_default_precision(conv: ConvGeneralDilated) -> bool:
    dtypes = {aval(v).dtype for v in (*conv.eqn.invars, *conv.eqn.outvars)}
    is_default = conv.precision in (None, (jax.lax.Precision.DEFAULT,) * 2)
    return is_default and len(dtypes) == 1 and dtypes <= _DTYPES


def _by_groups(conv: ConvGeneralDilated, *, one_device: bool) -> Convolve | None:
    lhs, rhs, out = (aval(v) for v in (*conv.eqn.invars, *conv.eqn.outvars))
    rank = len(lhs.shape) - 2
    groups = max(conv.feature_group_count, conv.batch_group_count)
    if groups == 1 or rank not in (1, 2):
        return None

    def two(values: Iterable[int]) -> tuple[int, ...]:
        """Return values of two axes. A sequence is an image of one row."""
        return (*[1] * (2 - rank), *values)

    def images(x: Array) -> Array:
        return x.reshape(x.shape[0], *two(x.shape[1:-1]), x.shape[-1])

    padding = (*[(0, 0)] * (2 - rank), *conv.padding)
    strides, dilation = two(conv.window_strides), two(conv.rhs_dilation)
    spacing = two(conv.lhs_dilation)
    spatial = tuple(range(1, rank + 1))
    match conv.dimension_numbers:
        case (lhs_spec, (to_out, to_in, *within), out_spec) if (
            lhs_spec == out_spec == (0, rank + 1, *spatial)
            and conv.feature_group_count == lhs.shape[-1] == out.shape[-1]
        ):
            size = two(rhs.shape[d] for d in within)
            window = _Window(two(out.shape[1:-1]), padding, dilation, strides, spacing)

            def f(x: Array, y: Array) -> Array:
                kernel = y.transpose(*within, to_in, to_out)
                kernel = kernel.reshape(*size, 1, 1, 1, kernel.shape[-1])
                return _depthwise(images(x), kernel, window)

        case (lhs_spec, rhs_spec, out_spec) if (
            lhs_spec == rhs_spec == (rank + 1, 0, *spatial)
            and out_spec == (rank, rank + 1, *range(rank))
            and conv.batch_group_count == lhs.shape[-1] == rhs.shape[-1]
        ):
            # A strided convolution has a dilated cotangent, and a dilated one a strided window.
            window = _Window(two(rhs.shape[1:-1]), padding, strides, dilation, spacing)
            size = two(out.shape[:rank])
            shape = (*size, *out.shape[rank:])
            if not one_device:
                return None

            def f(x: Array, y: Array) -> Array:
                return _depthwise_kernel_gradient(images(x), images(y), shape, window)

        case _:
            return for_cpus(functools.partial(_in_blocks, conv, groups), 1 if one_device else 2)
    if math.prod(size) > measured.MOST_ELEMENTS:
        return None
    return lambda x, y: f(x, y).reshape(out.shape).astype(out.dtype)


class _Window(NamedTuple):
    """A window over images [N, H, W, C]. Winograd's algorithm is for 3x3 of stride 1.

    ``size`` is that of the output, ``padding`` is (low, high) per axis, and ``spacing`` the
    distance between pixels of the images.
    """

    size: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    spacing: tuple[int, ...] = (1, 1)

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles per axis. Tiles of a dilated window have holes, which others fill."""
        rows, columns = (
            -(-size // (2 * d)) for size, d in zip(self.size, self.dilation, strict=True)
        )
        return rows, columns

    @property
    def num_tiles(self) -> int:
        return math.prod(self.tiles) * math.prod(self.dilation)

    @property
    def covered(self) -> tuple[int, int]:
        (rows, columns), (down, right) = self.tiles, self.dilation
        return 2 * down * rows, 2 * right * columns

    def pad(self, x: Array) -> Array:
        """Pad images once: XLA would compute the padding again for each kernel element."""
        pads = [(*pair, n - 1) for pair, n in zip(self.padding, self.spacing, strict=True)]
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
        barrier: Array = jax.lax.optimization_barrier(padded)
        return barrier

    def along(self, axis: int, element: int) -> slice:
        """Return the padded inputs that meet a kernel element, over all outputs."""
        start = element * self.dilation[axis]
        stop = start + (self.size[axis] - 1) * self.strides[axis] + 1
        return slice(start, stop, self.strides[axis])


def _depthwise(x: Array, kernel: Array, window: _Window) -> Array:
    """Convolve each channel of [N, H, W, C] with its kernel, [rows, columns, 1, 1, 1, C]."""
    if max(window.spacing) > 1 and window.strides == window.dilation == (1, 1):
        return _depthwise_of_spaced(x, kernel.astype(jnp.float32), window)
    x = window.pad(x)
    elements = itertools.product(*map(range, kernel.shape[:2]))
    kernel = kernel.astype(jnp.float32)
    terms = [x[:, window.along(0, i), window.along(1, j)] * kernel[i, j] for i, j in elements]
    return functools.reduce(jnp.add, terms)


def _depthwise_of_spaced(x: Array, kernel: Array, window: _Window) -> Array:
    """Convolve images whose pixels are apart, as in the gradient of a strided convolution.

    Outputs of one phase, such as even rows and columns, meet pixels with a part of the kernel. So
    the spaces between pixels are not multiplied.
    """

    def phases(axis: int) -> list[tuple[range, int]]:
        """Return the kernel elements of each phase, and the first pixel that they meet."""
        padding, step = window.padding[axis][0], window.spacing[axis]
        firsts = [(padding - phase) % step for phase in range(step)]
        return [
            (range(first, kernel.shape[axis], step), (phase + first - padding) // step)
            for phase, first in enumerate(firsts)
        ]

    rows, columns = phases(0), phases(1)
    height, width = (-(-n // step) for n, step in zip(window.size, window.spacing, strict=True))
    pads = [
        (
            max(-min(start for _, start in met), 0),
            max(max(start + len(elements) for elements, start in met) + length - 1 - n, 0),
        )
        for met, length, n in ((rows, height, x.shape[1]), (columns, width, x.shape[2]))
    ]
    x = jax.lax.optimization_barrier(jnp.pad(x, [(0, 0), *pads, (0, 0)]))

    def phase(down: tuple[range, int], right: tuple[range, int]) -> Array:
        total = jnp.zeros((x.shape[0], height, width, x.shape[3]), jnp.float32)
        for (a, i), (b, j) in itertools.product(enumerate(down[0]), enumerate(right[0])):
            top, left = pads[0][0] + down[1] + a, pads[1][0] + right[1] + b
            total += x[:, top : top + height, left : left + width] * kernel[i, j]
        return total

    y = jnp.stack([jnp.stack([phase(r, c) for c in columns], 3) for r in rows], 2)
    y = y.reshape(x.shape[0], height * len(rows), width * len(columns), x.shape[3])
    return y[:, : window.size[0], : window.size[1]]


def _depthwise_kernel_gradient(
    x: Array, cotangent: Array, shape: tuple[int, ...], window: _Window
) -> Array:
    """Return the gradient by a depthwise kernel, [rows, columns, 1, C], row by row of images."""
    x = window.pad(x)
    rows, columns, _, channels = shape
    images, height = cotangent.shape[:2]
    block = (1, (rows - 1) * window.dilation[0] + 1, *x.shape[2:])

    def add(total: Array, position: tuple[Array, Array]) -> tuple[Array, None]:
        image, row = position
        inputs = jax.lax.dynamic_slice(x, (image, row * window.strides[0], 0, 0), block)[0]
        outputs = cotangent[image, row].astype(jnp.float32)
        products = [
            (inputs[i * window.dilation[0], window.along(1, j)] * outputs).sum(0)
            for i, j in itertools.product(range(rows), range(columns))
        ]
        return total + jnp.stack(products), None

    positions = jnp.divmod(jnp.arange(images * height), height)
    total, _ = jax.lax.scan(add, jnp.zeros((rows * columns, channels), jnp.float32), positions)
    return total.reshape(shape)


def _in_blocks(conv: ConvGeneralDilated, groups: int, x: Array, y: Array) -> Array:
    """Convolve blocks of groups, each as one group whose kernel has zeros between the groups."""
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    # In a loop, only [batch, *space, in] x [*space, in, out] is fast.
    x = x.transpose(lhs_spec[0], *lhs_spec[2:], lhs_spec[1])
    y = y.transpose(*rhs_spec[2:], rhs_spec[1], rhs_spec[0])
    last = x.ndim - 1
    images = (0, last, *range(1, last))
    numbers = jax.lax.ConvDimensionNumbers(images, (last, last - 1, *range(last - 1)), images)
    own = {"dimension_numbers": numbers, "feature_group_count": 1, "batch_group_count": 1}
    is_kernel_gradient = conv.batch_group_count > 1
    axis = 0 if is_kernel_gradient else last
    n_in, n_out = x.shape[axis] // groups, y.shape[last] // groups
    most = max(measured.BLOCK // max(n_in, n_out), 1)
    merged = max(n for n in range(1, most + 1) if groups % n == 0)

    def diagonal(kernel: Array, axis: int) -> Array:
        rows, columns = (
            jax.lax.broadcasted_iota(int, kernel.shape, a) // n
            for a, n in ((axis, n_in), (last, n_out))
        )
        return jnp.where(rows == columns, kernel, 0)

    def block(i: Array, out: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(x, i * merged * n_in, merged * n_in, axis)
        kernel = jax.lax.dynamic_slice_in_dim(y, i * merged * n_out, merged * n_out, last)
        if is_kernel_gradient:
            result = diagonal(conv.bind(part, kernel, **own), 0)
            result = result.reshape(merged, n_in, *result.shape[1:]).sum(0)
        else:
            kernel = diagonal(jnp.concatenate([kernel] * merged, last - 1), last - 1)
            result = conv.bind(part, kernel, **own)
        return jax.lax.dynamic_update_slice_in_dim(out, result, i * merged * n_out, last)

    shape, to = aval(conv.eqn.outvars[0]).shape, (out_spec[0], *out_spec[2:], out_spec[1])
    out = jnp.zeros([shape[d] for d in to], x.dtype)
    out = jax.lax.fori_loop(0, groups // merged, block, out)
    return jnp.moveaxis(out, range(last + 1), to)


def _algorithm(conv: ConvGeneralDilated) -> Convolve | None:
    numbers = conv.dimension_numbers
    lhs, rhs, out = (aval(v) for v in (*conv.eqn.invars, *conv.eqn.outvars))
    is_grouped = max(conv.feature_group_count, conv.batch_group_count) > 1
    if lhs.dtype != jnp.float32 or len(lhs.shape) != 4 or is_grouped:
        return None
    padding, dilation = conv.padding, conv.rhs_dilation
    strides, spacing = conv.window_strides, conv.lhs_dilation
    # The gradient by the kernel: channels are the batch, and images the features.
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    is_kernel_gradient = specs == ((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))
    if is_kernel_gradient and out.shape[:2] == spacing == (1, 1):
        window = _Window(rhs.shape[1:3], padding, strides, dilation)
        return lambda x, cotangent: _overlaps_kernel_gradient(x, cotangent, window, (1, 1))
    if min(min(pair) for pair in padding) < 0:  # crops
        return None
    if numbers.lhs_spec == numbers.out_spec == (0, 3, 1, 2) and numbers.rhs_spec[2:] == (0, 1):
        window = _Window(out.shape[1:3], padding, dilation, strides, spacing)
        elements = math.prod(rhs.shape[:2])
        channels = lhs.shape[3], out.shape[3]
        if math.prod(lhs.shape[1:3]) < elements <= measured.MOST_ELEMENTS:
            convolve = _convolve_overlaps  # XLA would swap both, and take 50 to 200 times as long
        elif rhs.shape[:2] != (3, 3) or strides != (1, 1) or spacing != (1, 1):
            return None
        elif _pays(window, lhs.shape[0], channels, kernel_gradient=False):
            convolve = _convolve
        elif _is_mostly_padding(window, lhs.shape, channels):
            convolve = _convolve_overlaps
        else:
            return None
        # The gradient by the input contracts the last axis of the kernel.
        is_transposed = numbers.rhs_spec[0] == 2
        return lambda x, kernel: convolve(x, kernel, window, is_transposed)
    if is_kernel_gradient:
        if out.shape[:2] != (3, 3) or dilation != (1, 1) or spacing != (1, 1):
            return None
        window = _Window(rhs.shape[1:3], padding, strides)
        channels = lhs.shape[3], rhs.shape[3]
        if _pays(window, lhs.shape[0], channels, kernel_gradient=True):
            return lambda x, cotangent: _kernel_gradient(x, cotangent, window)
        if _is_mostly_padding(window, lhs.shape, channels):
            return lambda x, cotangent: _overlaps_kernel_gradient(x, cotangent, window, (3, 3))
    return None


def _pays(
    window: _Window, images: int, channels: tuple[int, int], *, kernel_gradient: bool
) -> bool:
    direct = 9 * images * math.prod(window.size) * math.prod(channels)
    chunk = _images_at_a_time(images, window, channels)
    if direct < measured.LEAST_MULTIPLICATIONS or chunk is None:
        return False
    tiles = 16 * images * window.num_tiles
    kernel = 16 * math.prod(channels)
    cost = tiles * sum(channels) * measured.TILE_COST + kernel * measured.KERNEL_COST
    if kernel_gradient:
        if 4 * kernel >= measured.LARGEST_CHUNK:  # a loop holds three such sums
            return False
        cost += images // chunk * kernel * measured.SUM_COST
    products = tiles * math.prod(channels) * (measured.GRADIENT_COST if kernel_gradient else 1)
    return direct >= measured.LEAST_SAVING * (cost + products)


def _is_mostly_padding(window: _Window, shape: tuple[int, ...], channels: tuple[int, int]) -> bool:
    direct = 9 * math.prod(window.size)
    overlaps = _overlaps(window, shape, (3, 3))
    used = sum(math.prod(o.stop - o.start for o in outputs) for *_, outputs in overlaps)
    large = shape[0] * direct * math.prod(channels) >= measured.LEAST_MULTIPLICATIONS
    return large and used <= measured.MOST_USED * direct


def _overlaps(
    window: _Window, shape: tuple[int, ...], kernel: tuple[int, ...]
) -> list[tuple[tuple[int, int], tuple[slice, slice], tuple[slice, slice]]]:
    """Return each kernel element that meets images, the inputs it meets, and their outputs."""

    def along(axis: int, i: int) -> list[slice]:
        shift = i * window.dilation[axis] - window.padding[axis][0]
        starts = (n * window.strides[axis] + shift for n in range(window.size[axis]))
        pixels = [(*divmod(start, window.spacing[axis]), n) for n, start in enumerate(starts)]
        met = [(pixel, n) for pixel, rest, n in pixels if not rest and 0 <= pixel < shape[axis + 1]]
        steps = [b - a for a, b in zip(met[0], met[1], strict=True)] if met[1:] else [1, 1]
        ends = zip(met[0], met[-1], steps, strict=True) if met else ()
        return [slice(first, last + 1, step) for first, last, step in ends]

    overlaps = []
    for i, j in itertools.product(*map(range, kernel)):
        rows, columns = along(0, i), along(1, j)
        if rows and columns:
            inputs, outputs = zip(rows, columns, strict=True)
            overlaps.append(((i, j), inputs, outputs))
    return overlaps


def _convolve_overlaps(x: Array, kernel: Array, window: _Window, is_transposed: bool) -> Array:
    """Convolve like `_convolve`, by one product for each kernel element."""
    contraction = "nhwc,dc->nhwd" if is_transposed else "nhwc,cd->nhwd"
    y = jnp.zeros((x.shape[0], *window.size, kernel.shape[2 if is_transposed else 3]), x.dtype)
    for element, inputs, outputs in _overlaps(window, x.shape, kernel.shape[:2]):
        product = jnp.einsum(contraction, x[:, *inputs], kernel[element])
        pads = [
            (o.start, size - o.start - (n - 1) * o.step - 1, o.step - 1)
            for o, size, n in zip(outputs, window.size, product.shape[1:3], strict=True)
        ]
        y += jax.lax.pad(product, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    return y


def _overlaps_kernel_gradient(
    x: Array, cotangent: Array, window: _Window, size: tuple[int, int]
) -> Array:
    gradient = [jnp.zeros((x.shape[3], cotangent.shape[3]), x.dtype)] * math.prod(size)
    for (i, j), inputs, outputs in _overlaps(window, x.shape, size):
        # With one axis to contract, XLA does not transpose the images before the product.
        rows = (a.reshape(-1, a.shape[3]) for a in (x[:, *inputs], cotangent[:, *outputs]))
        gradient[size[1] * i + j] = jnp.einsum("mc,md->cd", *rows)
    return jnp.stack(gradient).reshape(*size, *gradient[0].shape)


def _images_at_a_time(images: int, window: _Window, channels: tuple[int, int]) -> int | None:
    """Return the number of images in a chunk, a divisor of all; None if none fits."""
    image = 16 * 4 * sum(channels) * window.num_tiles
    fitting = max(measured.CHUNK // image, measured.LEAST_IMAGES)
    chunk = max(n for n in range(1, images + 1) if images % n == 0 and n <= fitting)
    fits = chunk >= measured.LEAST_IMAGES and chunk * image <= measured.LARGEST_CHUNK
    return chunk if fits else None


def _convolve(x: Array, kernel: Array, window: _Window, is_transposed: bool) -> Array:
    """Convolve images [N, H, W, C] with a kernel [3, 3, C, D], or [3, 3, D, C] if transposed."""
    # XLA would transform the kernels of all layers early.
    x, kernel = jax.lax.optimization_barrier((x, kernel))
    transformed = _on_both_axes(_G, [list(row) for row in kernel])  # G g G^T, [16, C, D]
    channels = (x.shape[3], kernel.shape[2 if is_transposed else 3])
    contraction = "k...c,kdc->k...d" if is_transposed else "k...c,kcd->k...d"

    def one(x: Array) -> Array:
        products = jnp.einsum(contraction, _transform_inputs(x, window), transformed)
        y = _outputs(products).reshape(x.shape[0], *window.covered, channels[1])
        return y[:, : window.size[0], : window.size[1]]

    y: Array = jax.lax.map(one, _in_chunks(x, window, channels))
    return y.reshape(x.shape[0], *window.size, channels[1])


def _kernel_gradient(x: Array, cotangent: Array, window: _Window) -> Array:
    channels = x.shape[3], cotangent.shape[3]

    def add(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        x, cotangent = chunk
        tiles, cotangents = _transform_inputs(x, window), _transform_cotangents(cotangent, window)
        return total + jnp.einsum("k...c,k...d->kcd", tiles, cotangents), None

    chunks = _in_chunks(x, window, channels), _in_chunks(cotangent, window, channels)
    total, _ = jax.lax.scan(add, jnp.zeros((16, *channels), jnp.float32), chunks)
    # The transpose of the kernel's transform.
    rows = [list(row) for row in total.reshape(4, 4, *channels)]
    return _on_both_axes(tuple(zip(*_G, strict=True)), rows).reshape(3, 3, *channels)


def _in_chunks(x: Array, window: _Window, channels: tuple[int, int]) -> Array:
    chunk = _images_at_a_time(x.shape[0], window, channels)
    return x.reshape(-1, chunk or 1, *x.shape[1:])


def _transform_inputs(x: Array, window: _Window) -> Array:
    """Transform tiles of 4x4 inputs: B^T d B, [16, N, rows, dilation, columns, dilation, C]."""
    (rows, columns), (down, right) = window.tiles, window.dilation
    needed = (2 * down * (rows + 1), 2 * right * (columns + 1))
    x = jnp.pad(x, _pads([low for low, _ in window.padding], needed, x.shape))
    x = x.reshape(x.shape[0], rows + 1, 2, down, columns + 1, 2, right, x.shape[3])

    def tap(i: int, j: int) -> Array:
        return x[:, i // 2 : i // 2 + rows, i % 2, :, j // 2 : j // 2 + columns, j % 2]

    return _on_both_axes(_B_T, [[tap(i, j) for j in range(4)] for i in range(4)])


def _outputs(products: Array) -> Array:
    """Transform products to outputs: A^T m A, [N, rows, 2, dilation, columns, 2, dilation, D]."""
    y = _on_both_axes(_A_T, [list(row) for row in products.reshape(4, 4, *products.shape[1:])])
    # Axes: two rows and two columns of a tile, N, rows, dilation, columns, dilation, D.
    y = y.reshape(2, 2, *y.shape[1:])
    return y.transpose(2, 3, 0, 4, 5, 1, 6, 7)


def _transform_cotangents(y: Array, window: _Window) -> Array:
    """Transform tiles of 2x2 cotangents: A y A^T, the transpose of `_outputs`."""
    (rows, columns), (down, right) = window.tiles, window.dilation
    y = jnp.pad(y, _pads((0, 0), window.covered, y.shape))
    y = y.reshape(y.shape[0], rows, 2, down, columns, 2, right, y.shape[3])
    tiles = [[y[:, :, i, :, :, j] for j in range(2)] for i in range(2)]
    return _on_both_axes(tuple(zip(*_A_T, strict=True)), tiles)


def _pads(
    lows: Sequence[int], needed: tuple[int, int], shape: tuple[int, ...]
) -> list[tuple[int, int]]:
    pads = [(low, n - size - low) for low, n, size in zip(lows, needed, shape[1:3], strict=True)]
    return [(0, 0), *pads, (0, 0)]


_Matrix = tuple[tuple[float, ...], ...]
_B_T: _Matrix = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_A_T: _Matrix = ((1, 1, 1, 0), (0, 1, -1, -1))
_G: _Matrix = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))


def _on_both_axes(matrix: _Matrix, parts: list[list[Array]]) -> Array:
    """Compute ``matrix @ parts @ matrix.T`` in additions, and stack the results, row by row."""

    def combine(row: tuple[float, ...], parts: list[Array]) -> Array:
        # Operators of arrays would take most of the time to trace.
        (sign, total), *rest = [
            (f, part if abs(f) == 1 else jax.lax.mul(part, part.dtype.type(abs(f))))
            for f, part in zip(row, parts, strict=True)
            if f
        ]
        total = total if sign > 0 else jax.lax.neg(total)
        for sign, term in rest:
            total = jax.lax.add(total, term) if sign > 0 else jax.lax.sub(total, term)
        return total

    by_rows = [[combine(row, [*column]) for column in zip(*parts, strict=True)] for row in matrix]
    return jnp.stack([combine(row, parts) for parts in by_rows for row in matrix])
