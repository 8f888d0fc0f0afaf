"""Memory that convolutions and matrix products on a CPU allocate while they run.

XLA gives them to Eigen and to YNNPACK, which copy operands into forms of their own. The compiler's
assignment of buffers does not count these copies.
"""

import math
from collections.abc import Iterator, Sequence

from fnet import hlo, measured
from fnet.cpu.options import IS_JAXLIB_0_10

_WORKSPACES = ("convolution", "dot")
_HAS_TILES = not IS_JAXLIB_0_10
"""Whether convolutions and products are computed in tiles, which need no copies of whole inputs."""


def workspace(text: str) -> int:
    """Estimate the most bytes that the operations of a program for CPUs allocate at once."""
    if not any(f" {opcode}(" in text for opcode in _WORKSPACES):
        return 0
    module = hlo.read(text)
    return most_at_once(list(_workspaces(module, module.entry)))


def most_at_once(sizes: Sequence[int]) -> int:
    """The most bytes of workspaces that are in memory at once, of operations in their order."""
    at_once = measured.IN_SUCCESSION_IN_TILES if _HAS_TILES else measured.IN_SUCCESSION
    largest = 0
    for k in range(len(sizes)):
        *window, own = sorted(sizes[k : k + at_once])
        # Larger ones are returned to the system at once.
        stays = sum(size for size in window if size < measured.MAPPED_SEPARATELY)
        largest = max(largest, own + stays)
    return largest


def _workspaces(module: hlo.Module, computation: str, *, by_ynnpack: bool = False) -> Iterator[int]:
    for instruction in module.computations[computation]:
        for called in instruction.called_computations:
            yield from _workspaces(module, called, by_ynnpack=by_ynnpack)
        if instruction.opcode == "fusion":
            fused = instruction.fused_computation
            by = bool(instruction.attribute('"kind":"(__ynn_fusion)"'))
            yield from _workspaces(module, fused, by_ynnpack=by)
        if instruction.opcode in _WORKSPACES:
            (lhs,), (rhs,) = module.operands(instruction)
            if instruction.opcode == "dot":
                size = _dot_workspace(instruction, lhs, rhs)
            elif by_ynnpack:
                size = _ynnpack_workspace(instruction, lhs, rhs)
            else:
                size = _eigen_workspace(instruction, lhs)
            if size:
                yield size


def _dot_workspace(dot: hlo.Instruction, lhs: hlo.Array, rhs: hlo.Array) -> int:
    """Packed operands, by measurements of 18 products, and of 9 in tiles."""
    batch, contracted = (
        [int(d) for d in dot.attribute(rf"lhs_{kind}_dims=\{{([\d,]*)\}}").split(",") if d]
        for kind in ("batch", "contracting")
    )
    return packed_bytes(lhs.shape, batch, contracted, lhs.bytes, rhs.bytes, dot.arrays[0].bytes)


def packed_bytes(
    shape: Sequence[int],
    batch: Sequence[int],
    contracted: Sequence[int],
    lhs: int,
    rhs: int,
    result: int,
) -> int:
    """Bytes of packed operands of a product, from the shape and axes of the left-hand side."""
    if _HAS_TILES:
        # In a batch, one right-hand side after the other is packed.
        packed = rhs // math.prod(shape[d] for d in batch) if batch else 0
    else:
        # A transposed left-hand side is packed, and so is the right-hand side of a batch.
        is_transposed = [*contracted] != [len(shape) - 1]
        packed = lhs + result if is_transposed else rhs if batch else 0
    return packed if packed >= measured.LEAST_PACKED else 0


def _ynnpack_workspace(convolution: hlo.Instruction, lhs: hlo.Array, rhs: hlo.Array) -> int:
    labels = convolution.attribute(r"dim_labels=(\w+)_")
    windows = hlo.window(convolution)
    padded = lhs.bytes
    for d, w in enumerate(windows):
        length = lhs.shape[labels.index(str(d))]
        padded_length = max((length - 1) * w.lhs_dilate + 1 + w.low + w.high, 1)
        padded = padded * padded_length // max(length, 1)
    if _HAS_TILES:
        # The kernel is packed. Images of few channels are copied.
        return rhs.bytes + (padded if lhs.shape[labels.index("f")] % 4 else 0)
    if rhs.bytes < measured.YNNPACK_LARGE_KERNEL or any(w.lhs_dilate > 1 for w in windows):
        return padded
    return 2 * padded + rhs.bytes


def _eigen_workspace(convolution: hlo.Instruction, lhs: hlo.Array) -> int:
    labels, out_labels = (
        convolution.attribute(pattern) for pattern in (r"dim_labels=(\w+)_", r"->(\w+)")
    )
    result = convolution.arrays[0]
    channels, features = lhs.shape[labels.index("f")], result.shape[out_labels.index("f")]
    windows = hlo.window(convolution)
    elements = math.prod(w.size for w in windows)
    groups = int(convolution.attribute(r"feature_group_count=(\d+)") or 1)
    is_dilated = any(w.lhs_dilate > 1 for w in windows)
    return eigen_bytes(lhs.bytes, channels, result.bytes, features, elements, groups, is_dilated)


def eigen_bytes(
    lhs: int, channels: int, result: int, features: int, elements: int, groups: int, dilated: bool
) -> int:
    """Matrices that Eigen makes of images, by measurements of 45 convolutions."""
    if dilated:
        # The product of each input with all kernel elements and features.
        return lhs // channels * elements * features
    # Otherwise Eigen packs a few blocks, up to 6 MB. Of groups, it packs all at the same time.
    patches = result // features * elements * channels // groups
    return groups * min(patches, measured.EIGEN_PACKED_OF_GROUP) if groups > 1 else 0
