"""Estimate how long a compiled program takes on a device, without running it.

Each instruction of the compiled program takes at least as long as its FLOPs, its memory traffic and
its messages to other devices take at the device's highest rates. This is the roofline model
(Williams, Waterman and Patterson, CACM 2009), applied to every kernel.
XLA's own ``cost_analysis`` is empty for GPUs, and counts the body of a loop once.
"""

import copy
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from fnet import hlo
from fnet.hlo import Array, Instruction, Module
from fnet.memory.cost import instruction_flops
from fnet.memory.target import Peaks


class Estimate(NamedTuple):
    """Estimated cost of one run of a compiled program, per device.

    Attributes:
      seconds: Time at the device's highest rates. Real kernels are slower.
      flops: FLOPs of matrix products and convolutions by dtype, a key of `Peaks.flops`.
      bytes: Bytes that instructions read from and write to memory.
      link_bytes: Bytes that the device sends to others.
      share: Share of ``seconds`` that each resource limits: ``compute``, ``vector``, ``memory``,
        ``link`` (waiting for other devices or the host) and ``launch``.
    """

    seconds: float
    flops: dict[str, float]
    bytes: float
    link_bytes: float
    share: dict[str, float]

    @property
    def total_flops(self) -> float:
        """FLOPs of matrix products and convolutions of all dtypes."""
        return sum(self.flops.values())


def estimate(compiled: Any, peaks: Peaks) -> Estimate:
    """Estimate the time of one run of a compiled program from its instructions.

    Instructions run one after the other. Messages to other devices overlap with the instructions
    between their start and their end, as scheduled, and so do copies between the memories of the
    device and of the host. A loop counts all its iterations, but one if their number depends on
    values. A conditional counts its slowest branch. An instruction reads its operands from memory
    and writes its results there. `Peaks.cache` is for kernels that move few bytes.

    Args:
      compiled: The compiled program, ``jax.jit(f).lower(...).compile()``, or its text.
      peaks: Rates of the device, such as ``target.describe("h100").peaks``.

    Returns:
      Seconds, FLOPs and bytes of one device.

    Raises:
      ValueError: If the backend does not give the schedule of the program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.memory import roofline
      >>> from fnet.memory.target import Peaks
      >>> peaks = Peaks({"float32": 1e12}, 1e11, 1e11, 1e10, 1e9, 0.0)
      >>> f = jax.jit(lambda a, b: a @ b)
      >>> compiled = f.lower(jnp.zeros((512, 512)), jnp.zeros((512, 512))).compile()
      >>> e = roofline.estimate(compiled, peaks)
      >>> e.flops, e.bytes, f"{e.seconds:.6f} s"
      ({'float32': 268435456.0}, 3145728.0, '0.000268 s')

    References:
      Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
      multicore architectures", CACM 52(4), 2009.
    """
    text = compiled if isinstance(compiled, str) else hlo.unwrap(compiled).as_text() or ""
    header = text.partition("\n")[0]
    devices = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    run = _Run(hlo.read(text), peaks, math.prod(map(int, devices)))
    run.computation(run.module.entry)
    return Estimate(
        run.clock,
        dict(run.flops),
        run.bytes,
        run.link_bytes,
        {name: seconds / (run.clock or 1.0) for name, seconds in run.limited.items()},
    )


def utilization(flops: float, seconds: float, e: Estimate, peaks: Peaks) -> float:
    """Return the share of the device's peak that a number of FLOPs uses.

    With the FLOPs of a step without remat it is the model FLOPs utilization (MFU: Chowdhery et
    al., PaLM, 2022). The peak is of the dtype that most FLOPs of the program have.

    Example:
      >>> from fnet.memory.roofline import Estimate, utilization
      >>> from fnet.memory.target import Peaks
      >>> peaks = Peaks({"bfloat16": 1e12}, 1e11, 1e11, 1e10, 1e9, 0.0)
      >>> utilization(
      ...     4e11, 1.0, Estimate(1.0, {"bfloat16": 5e11}, 0.0, 0.0, {}), peaks
      ... )
      0.4
    """
    dtype = max(e.flops, key=lambda name: e.flops[name], default="bfloat16")
    return flops / (max(seconds, 1e-30) * _rate(peaks, dtype))


def _rate(peaks: Peaks, dtype: str) -> float:
    return peaks.flops.get(dtype) or max(peaks.flops.values())


class _Cost(NamedTuple):
    flops: float = 0.0
    dtype: str = ""
    vector: float = 0.0
    bytes: float = 0.0


# These give names to what exists, or wait.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
    *("send-done", "recv-done", "get-dimension-size"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
# float32 operations per result, relative to a multiply-add: special functions of a GPU have an
# eighth of its lanes (CUDA C++ programming guide, "Arithmetic Instructions").
_SPECIAL = {
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "erf"),
    *("power", "rsqrt", "sqrt", "cbrt", "sine", "cosine", "tan", "atan2", "divide"),
}
_SPECIAL_COST = 8.0
_COLLECTIVES = {
    "all-gather": lambda sent, received, n: received * (n - 1) / n,
    "all-reduce": lambda sent, received, n: 2 * sent * (n - 1) / n,
    "reduce-scatter": lambda sent, received, n: sent * (n - 1) / n,
    "all-to-all": lambda sent, received, n: sent * (n - 1) / n,
    "ragged-all-to-all": lambda sent, received, n: sent * (n - 1) / n,
    "collective-permute": lambda sent, received, n: sent,
    "collective-broadcast": lambda sent, received, n: received,
}
"""Bytes that each of n devices sends, with a ring."""
_HOST_SIZE = 8


class _Run:
    """The schedule of a program, followed by a clock of the device and clocks of its links."""

    def __init__(self, module: Module, peaks: Peaks, devices: int):
        self.module, self.peaks, self.devices = module, peaks, devices
        self.clock = self.link_clock = 0.0
        self._host_clocks = [0.0, 0.0]  # from the host, and to it
        self.flops: dict[str, float] = {}
        self.bytes = self.link_bytes = 0.0
        self.limited = dict.fromkeys(("compute", "vector", "memory", "link", "launch"), 0.0)
        self._repeats = 1
        self._ends: dict[str, float] = {}
        self._pending: list[float] = []

    def computation(self, name: str) -> None:
        for i in self.module.computations[name]:
            kind = i.opcode.removesuffix("-start").removesuffix("-done")
            if i.opcode in ("async-start", "async-done", "async-update") or kind in _COLLECTIVES:
                self._asynchronous(i, kind)
            elif i.opcode == "while":
                condition, body = i.called_computations
                self._loop(body, _trip_count(i, self.module, condition))
            elif i.opcode == "conditional":
                self._slowest(i.called_computations)
            elif i.opcode == "call":
                self.computation(i.called_computations[0])
            elif i.opcode == "fusion" and (messages := self._collectives(i.fused_computation)):
                self._tpu_messages(i, messages)
            elif i.opcode in ("copy-done", "fusion-done"):
                self._wait(self._ends.pop(i.operands[0], self.clock))
            elif i.opcode not in _FREE:
                arrays = [self._results(i), *self.module.operands(i)]
                on_host = [any("S(5)" in a.layout for a in each) for each in arrays]
                if any(on_host):
                    self._host_copy(i, on_host[0])
                else:
                    self._kernel(self._cost(i))

    def _results(self, i: Instruction) -> list[Array]:
        """Arrays that an instruction makes: a start of one also has its operands and a number."""
        if i.opcode == "copy-start":
            return i.arrays[:1]
        return i.arrays[-2:-1] if i.opcode == "fusion-start" else i.arrays

    def _host_copy(self, i: Instruction, is_to_host: bool) -> None:
        """Copy between the memories of device and host: both directions at once, as scheduled."""
        seconds = self._cost(i).bytes / self.peaks.host + self.peaks.launch
        end = max(self.clock, self._host_clocks[is_to_host]) + seconds
        self._ends[i.name] = self._host_clocks[is_to_host] = end
        if not i.opcode.endswith("-start"):
            self._wait(end)

    def _collectives(self, computation: str) -> list[Instruction]:
        return [i for i in self.module.computations[computation] if i.opcode in _COLLECTIVES]

    def _tpu_messages(self, fusion: Instruction, messages: list[Instruction]) -> None:
        """Follow a collective inside a fusion of a TPU: its start, its end, or all of it."""
        body = self.module.computations[fusion.fused_computation]
        markers = {b.attribute(r'custom_call_target="([^"]*)"') for b in body}
        if "AsyncCollectiveDone" in markers:
            self._wait(self._pending.pop(0) if self._pending else self.clock)
            return
        if any(b.opcode in ("dot", "convolution") for b in body):
            self._kernel(self._cost(fusion))  # computes while the message is on its way
            return
        for message in messages:
            end = self._message(message, message.opcode)
            if "AsyncCollectiveStart" in markers:
                self._pending.append(end)
            else:
                self._wait(end)

    def _kernel(self, cost: _Cost) -> None:
        p = self.peaks
        cache, cache_bandwidth = p.cache
        bandwidth = cache_bandwidth if cost.bytes < cache else p.bandwidth
        seconds = {
            "compute": cost.flops / _rate(p, cost.dtype) if cost.flops else 0.0,
            "vector": cost.vector / p.vector,
            "memory": cost.bytes / bandwidth,
        }
        limit = max(seconds, key=lambda name: seconds[name])
        self.clock += seconds[limit] + p.launch
        self.limited[limit] += seconds[limit] * self._repeats
        self.limited["launch"] += p.launch * self._repeats
        self.bytes += cost.bytes * self._repeats
        if cost.flops:
            total = self.flops.get(cost.dtype, 0.0) + cost.flops * self._repeats
            self.flops[cost.dtype] = total

    def _loop(self, body: str, trips: int) -> None:
        before, self._repeats = self._repeats, self._repeats * trips
        start = self.clock = max(self.clock, self.link_clock)
        self.computation(body)
        self.clock = start + (max(self.clock, self.link_clock) - start) * trips
        self.link_clock = self.clock
        self._repeats = before

    def _slowest(self, branches: Iterable[str]) -> None:
        ends = []
        for branch in branches:
            shared: dict[int, Any] = {id(self.module): self.module}
            other = copy.deepcopy(self, shared)
            other.computation(branch)
            ends.append(other)
        if ends:
            self.__dict__ = max(ends, key=lambda run: run.clock).__dict__

    def _asynchronous(self, i: Instruction, kind: str) -> None:
        if i.opcode == "async-start":  # a collective or a kernel, in a computation of its own
            (called,) = i.called_computations
            if not (messages := self._collectives(called)):
                self.computation(called)
                return
            self._ends[i.name] = self._message(messages[0], messages[0].opcode)
        elif i.opcode.endswith("-start"):
            self._ends[i.name] = self._message(i, kind)
        elif i.opcode.endswith(("-done", "-update")):
            self._wait(self._ends.get(i.operands[0], self.clock) if i.operands else self.clock)
            if i.opcode == "async-update":
                self._ends[i.name] = self.clock
        else:
            self._wait(self._message(i, kind))

    def _message(self, i: Instruction, kind: str) -> float:
        """Send what a collective sends, and return when it has arrived."""
        size = _group_size(i, self.devices)
        sent = sum(_size(a) for arrays in self.module.operands(i) for a in arrays)
        results = sum(map(_size, i.arrays))
        # The result of a start holds its operands, too.
        received = results - sent if i.opcode.endswith("-start") else results
        bytes_ = _COLLECTIVES[kind](sent, max(received, 0), size) if size > 1 else 0.0
        rate = self.peaks.link if size <= _HOST_SIZE else self.peaks.network
        self.link_bytes += bytes_ * self._repeats
        self.link_clock = max(self.clock, self.link_clock) + bytes_ / rate + self.peaks.launch
        return self.link_clock

    def _wait(self, until: float) -> None:
        waited = max(until - self.clock, 0.0)
        self.limited["link"] += waited * self._repeats
        self.clock += waited

    def _cost(self, i: Instruction) -> _Cost:
        if not i.opcode.startswith("fusion"):
            traffic = _traffic(i, self._results(i), self.module.operands(i))
            return _Cost(*self._compute(i), traffic)
        read = 0.0
        for parameter in self.module.parameters(i.fused_computation):
            if parameter.parameter_number < len(i.operands):
                operand = self.module.instructions[i.operands[parameter.parameter_number]]
                full = sum(a.bytes for a in operand.arrays)
                read += min(full, self._read(i.fused_computation, parameter.name, full))
        return _Cost(*self._compute(i), read + self._written(i))

    def _compute(self, i: Instruction) -> tuple[float, str, float]:
        """Return FLOPs of products with their dtype, and other operations."""
        if not i.opcode.startswith("fusion"):
            flops, dtype = instruction_flops(self.module, i)
            return flops, dtype, 0.0 if flops else _vector(i, self.module.operands(i))
        flops, dtype, vector = 0.0, "", 0.0
        for b in self.module.computations[i.fused_computation]:
            inner, inner_dtype, inner_vector = self._compute(b)
            flops, vector = flops + inner, vector + inner_vector
            dtype = inner_dtype if inner else dtype
        return flops, dtype, vector

    def _read(self, computation: str, name: str, full: float) -> float:
        """Bytes that a fusion reads of one operand: less than all if it only takes slices."""
        read = 0.0
        for b in self.module.computations[computation]:
            if name not in b.operands:
                continue
            if b.opcode == "bitcast":
                read += self._read(computation, b.name, full)
            elif b.opcode in _SLICES and b.operands[0] == name:
                read += sum(a.bytes for a in b.arrays)
            elif b.opcode not in ("dynamic-update-slice", "scatter") or b.operands[0] != name:
                return full
        return read

    def _written(self, i: Instruction) -> float:
        """Bytes that a fusion writes: an update in place writes the update alone."""
        by_name = self.module.instructions
        written = 0.0
        by_path = self.module.fusion_results(i).values()
        for array, result in zip(self._results(i), by_path, strict=False):
            while result.opcode in ("bitcast", "copy", "convert"):
                result = by_name[result.operands[0]]
            if result.opcode in ("dynamic-update-slice", "scatter"):
                update = by_name[result.operands[2 if result.opcode == "scatter" else 1]]
                written += min(array.bytes, sum(a.bytes for a in update.arrays))
            else:
                written += array.bytes
        return written


def _size(array: Array) -> float:
    """Bytes of an array in any memory, such as a TPU's on the chip, without padding."""
    bits = re.search(r"\d+", array.dtype)
    return math.prod(array.shape) * (int(bits[0]) if bits else 8) / 8


def _traffic(i: Instruction, results: list[Array], operands: list[list[Array]]) -> float:
    """Bytes that an instruction outside of fusions reads and writes."""
    written = sum(a.bytes for a in results)
    if i.opcode in _SLICES:
        return 2 * written
    if i.opcode == "dynamic-update-slice":
        return 2 * sum(a.bytes for a in operands[1])
    if i.opcode == "scatter":
        return 3 * sum(a.bytes for a in operands[-1]) + sum(a.bytes for a in operands[1])
    return written + sum(a.bytes for arrays in operands for a in arrays)


def _vector(i: Instruction, operands: list[list[Array]]) -> float:
    """Operations of an instruction that is not a matrix product or a convolution."""
    if i.opcode in ("reduce", "reduce-window", "sort", "scatter", "select-and-scatter"):
        size = sum(math.prod(a.shape) for a in (operands[0] if operands else i.arrays))
        if i.opcode == "sort":
            return size * math.log2(max(size, 2))
        window = [w.size for w in hlo.window(i)] if i.opcode == "reduce-window" else []
        return max(size, math.prod(window) * math.prod(i.arrays[0].shape) if window else 0)
    if i.opcode not in hlo.ELEMENTWISE:
        return 0.0
    elements = sum(math.prod(a.shape) for a in i.arrays)
    return elements * (_SPECIAL_COST if i.opcode in _SPECIAL else 1.0)


def _group_size(i: Instruction, devices: int) -> int:
    if i.opcode.startswith("collective-permute"):
        return 2
    # replica_groups=[2,4]<=[8], {{0,1,2,3},{4,5,6,7}} or mesh['a'=2,'b'=4] {'b'}
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", i.attributes):
        return int(iota[1])
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", i.attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        # A part of an axis is 'b':(2)4, of which the last number is the size.
        used = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes[2])
        return math.prod(int(part or sizes.get(axis, 1)) for axis, part in used)
    group = i.attribute(r"replica_groups=\{\{([\d,]*)\}")
    return len(re.findall(r"\d+", group)) or devices


def _trip_count(i: Instruction, module: Module, condition: str) -> int:
    """Number of iterations of a loop: known to XLA, or compared with a constant."""
    known = i.attribute(r'known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    constants = [
        int(number)
        for c in module.computations[condition]
        if c.opcode == "constant" and (number := c.attribute(r"^(\d+)\)"))
    ]
    return max([1, *constants])
