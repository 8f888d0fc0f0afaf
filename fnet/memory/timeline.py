"""Timeline of a compiled program: the bytes alive at each instruction, and the buffers at the peak.

XLA does not report when a buffer is alive, so `_Liveness` repeats its analysis on the scheduled
program: ``HloDataflowAnalysis``, ``HloLiveRange`` and ``BufferAssigner`` in XLA's sources. For an
H100 the peak equals the compiler's own ``peak_memory_in_bytes`` for stacks of convolutions and of
transformer blocks, and is within 1 % of it for a scan.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from fnet import hlo
from fnet.hlo import Array, Instruction, Module, Path

if TYPE_CHECKING:
    import jax


class Buffer(NamedTuple):
    """An array that a compiled program holds.

    Attributes:
      bytes: Its size.
      shape: Shape of the array.
      dtype: NumPy's name of the element type.
      kind: ``argument`` (including an output that reuses its buffer), ``output`` or ``temporary``.
      layer: Named scopes it was made under, ``stage0/conv``, or the name of an argument,
        ``state.params['stage0']['conv']['kernel']``. Empty without either.
      phase: ``forward``, ``backward``, ``optimizer`` or empty; see `layer_of`.
      instruction: Name of the HLO instruction that made it.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    layer: str
    phase: str
    instruction: str


class Timeline(NamedTuple):
    """Memory of a compiled program over time; see `timeline`.

    Attributes:
      live_bytes: Bytes alive at each instruction.
      instructions: Names of the instructions in scheduled order. The bodies of loops and branches
        appear once, before the instruction that runs them.
      peak_index: First instruction with the most bytes alive.
      at_peak: Buffers alive there, the largest first.
      peak_phase: Phase of training there, as in `Buffer`; empty if the program has none.
    """

    live_bytes: list[int]
    instructions: list[str]
    peak_index: int
    at_peak: list[Buffer]
    peak_phase: str

    @property
    def largest(self) -> list[Buffer]:
        """The ten largest buffers alive at the peak."""
        return self.at_peak[:10]


def timeline(compiled: "jax.stages.Compiled") -> Timeline:
    """Compute the bytes alive at each instruction of a compiled program.

    Arguments and outputs count for the whole program. An output in the buffer of a donated
    argument counts once. A temporary is alive from the instruction that makes it to its last
    reader. A loop body appears once and stands for all iterations.

    The peak is at most what the compiler assigns (`fnet.memory.peak`), up to a few buffers. The
    rest are gaps between buffers. Train steps of dense, convolutional, scanned and reversible
    networks reach 0.99 to 1.00 of it on CPU and for an H100. XLA may place a temporary in the
    buffer of an output that is not written yet. A program that holds only two or three arrays
    can therefore differ by one of them.

    Args:
      compiled: The compiled program: ``jax.jit(f).lower(...).compile()``, or from
        `fnet.memory.target`.

    Returns:
      The curve, its peak, and the buffers alive there.

    Raises:
      ValueError: If the backend does not give the schedule of the program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> def loss(w, x):
      ...     with jax.named_scope("hidden"):
      ...         h = jnp.tanh(x @ w)
      ...     return (h * h).sum()
      >>> args = jnp.zeros((8, 64)), jnp.zeros((32, 8))
      >>> curve = memory.timeline(jax.jit(jax.grad(loss)).lower(*args).compile())
      >>> max(curve.live_bytes) == curve.live_bytes[curve.peak_index]
      True
      >>> buffer = curve.largest[0]
      >>> buffer.layer, buffer.kind, buffer.shape, buffer.bytes
      ('hidden', 'temporary', (32, 64), 8192)
    """
    compiled = hlo.unwrap(compiled)
    module = hlo.read(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    liveness = _Liveness(module)
    change = [held] + [0] * len(liveness.order)
    for storage in liveness.storages:
        if storage.kind == "temporary":
            for first, last in _spans(storage):
                change[first] += storage.bytes
                change[last + 1] -= storage.bytes
    live_bytes = list(accumulate(change[:-1]))
    peak_index = live_bytes.index(max(live_bytes))
    labels = _Labels(module, liveness)
    phases = (layer_of(i.op_name)[1] for i in liveness.order[peak_index::-1])
    at_peak = [
        labels.buffer(storage, peak_index)
        for storage in liveness.storages
        if storage.kind != "temporary"
        or any(first <= peak_index <= last for first, last in _spans(storage))
    ]
    return Timeline(
        live_bytes,
        [i.name for i in liveness.order],
        peak_index,
        sorted(at_peak, key=lambda buffer: (-buffer.bytes, buffer.kind, buffer.instruction)),
        next(filter(None, phases), ""),
    )


def layer_of(op_name: str) -> tuple[str, str]:
    """Parse the layer and the phase of training from the name of an operation.

    XLA keeps JAX's name of each operation: functions, transformations and named scopes from the
    outside in, then the primitive.

    - ``jit(step)/jvp(stage0)/conv/dot_general``: ``("stage0/conv", "forward")``.
    - ``jit(step)/transpose(jvp(stage0))/conv/dot_general``: ``("stage0/conv", "backward")``.
    - ``jit(step)/jvp(blocks)/while/body/closed_call/mlp/tanh``: ``("blocks/mlp", "forward")``.
    - ``jit(step)/optimizer/mul``: ``("optimizer", "optimizer")``.
    - ``jit(step)/transpose(jvp(a))/b/(dot_general:reduce_sum)``: ``("a/b", "backward")``, merged.

    Rematerialized operations are ``backward``. A program without a derivative has no phases; what
    is under the scope ``optimizer``, as in `fnet.make_step`, has that phase.
    """
    name, merged, _ = _CONTROL_FLOW.sub("", op_name).partition("/(")
    *path, last = _SLASH.split(name)
    if merged or last.endswith(")"):  # ends with a function or a loop, not with a primitive
        path.append(last)
    scopes = [scope for part in path if (scope := _scope(part))]
    if "optimizer" in scopes:
        phase = "optimizer"
    elif "transpose(" in op_name:
        phase = "backward"
    else:
        phase = "forward" if "jvp(" in op_name else ""
    return "/".join(scopes), phase


# A slash inside parentheses belongs to the name of a scope.
_SLASH = re.compile(r"/(?![^(]*\))")
_CONTROL_FLOW = re.compile(
    r"/(while/(body|cond)|cond/branch_\d+_fun|closed_call|eval_jaxpr|checkpoint"
    r"|rematted_computation|shard_map)(?=/|$)"
)
_WRAPPED = re.compile(r"(jit|jvp|transpose|vmap)\((.*)\)")


def _scope(part: str) -> str:
    """The named scope in ``transpose(jvp(stage0))``; empty for ``jit(relu)``."""
    while match := _WRAPPED.fullmatch(part):
        part = "" if match[1] == "jit" else match[2]
    return part


# Liveness: which arrays are alive when, and which of them share a buffer.

_Leaf = tuple[str, Path]
"""One array of an instruction's result: the instruction's name and the path into its result."""


class _Life(NamedTuple):
    """Lifetime of a value, from the instruction that makes it through its last reader."""

    first: int
    last: int
    value: _Leaf


class _Storage(NamedTuple):
    """A buffer that holds one value after another.

    Attributes:
      kind: ``argument`` (including an output that reuses its buffer), ``output`` or ``temporary``.
        Arguments and outputs exist for the whole program.
      bytes: Its size.
      lives: Lifetimes of its values, the earliest first.
      guests: Lifetimes of temporaries that use the buffer while it is empty.
    """

    kind: str
    bytes: int
    lives: list[_Life]
    guests: list[_Life]


class _Liveness:
    """Lifetimes and buffers of all values of a program.

    A value is an array that one instruction makes. Tuples, calls and loops that do not change it
    pass it on without a copy. A loop carry, the result of branches, an array that is updated in
    place and a donated argument are several values, alive at different times, in one buffer.

    Attributes:
      order: Instructions in scheduled order.
      storages: Buffers of the program, without constants.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.order = list(module.schedule())
        self._time = {i.name: t for t, i in enumerate(self.order)}
        self._arrays = {i.name: hlo.arrays(i.result) for i in self.order}
        self._readers = Counter(operand for i in self.order for operand in i.operands)
        self._same_value = _Groups()
        self._same_storage = _Groups()
        self._made: dict[_Leaf, Instruction] = {}
        self._passed_on: list[tuple[_Leaf, Instruction]] = []
        self._sharing: list[tuple[_Leaf, _Leaf]] = []
        self._carried: list[tuple[_Leaf, int]] = []
        called = {computation for i in self.order for computation in i.called_computations}
        self._inner_parameters = {p.name for name in called for p in module.parameters(name)}
        for i in self.order:
            self._follow(i)
        self._makers = {self._same_value.find(leaf): (i, leaf[1]) for leaf, i in self._made.items()}
        self._carriers: dict[_Leaf, list[Instruction]] = defaultdict(list)
        for leaf, i in self._passed_on:
            self._carriers[self._same_value.find(leaf)].append(i)
        self.storages = self._assign(self._lives())

    def array(self, leaf: _Leaf) -> Array:
        return self._arrays[leaf[0]][leaf[1]]

    def maker(self, leaf: _Leaf) -> tuple[Instruction, Path] | None:
        """The instruction that makes the value at a leaf, and the path in its result.

        None for loop carries and results of branches, which have several makers.
        """
        return self._makers.get(self._same_value.find(leaf))

    def carriers(self, leaf: _Leaf) -> list[Instruction]:
        """The instructions that pass on the value at a leaf, in scheduled order."""
        return self._carriers[self._same_value.find(leaf)]

    def _follow(self, i: Instruction) -> None:
        # (path, operand, path in the operand): arrays of the result that are an operand's.
        passed: list[tuple[Path, str, Path]] = []
        match i.opcode:
            case "get-tuple-element":
                passed = [((), i.operands[0], (i.tuple_index,))]
            case "tuple":
                passed = [((k,), operand, ()) for k, operand in enumerate(i.operands)]
            case "bitcast" | "opt-barrier" | "domain" | "add-dependency":
                passed = [((), i.operands[0], ())]
            case "async-update" | "recv-done":
                passed = [((), i.operands[0], ())]
            case "parameter" if i.name in self._inner_parameters:
                return
            case "while":
                self._follow_loop(i)
                return
            case "conditional":
                self._follow_branches(i)
                return
            case "call":
                (called,) = i.called_computations
                self._pass_operands(called, i.operands)
                passed = [((), self._module.root(called).name, ())]
            case "async-start":
                (called,) = i.called_computations
                self._pass_operands(called, i.operands)
                passed = [((0, k), operand, ()) for k, operand in enumerate(i.operands)]
                passed.append(((1,), self._module.root(called).name, ()))
            case "copy-start":
                passed = [((1,), i.operands[0], ())]
            case "copy-done":
                passed = [((), i.operands[0], (0,))]
            case "all-gather-start" | "collective-permute-start" if len(i.operands) == 1:
                passed = [((0,), i.operands[0], ())]
            case opcode if opcode.endswith("-start") and (0, 0) in self._arrays[i.name]:
                passed = [((0, k), operand, ()) for k, operand in enumerate(i.operands)]
            case opcode if opcode.endswith("-done"):
                has_result = any(path[:1] == (1,) for path in self._arrays[i.operands[0]])
                passed = [((), i.operands[0], (1,) if has_result else ())]
        for at, source, inside in passed:
            for path in self._arrays[source]:
                if path[: len(inside)] == inside:
                    self._same_value.join((i.name, at + path[len(inside) :]), (source, path))
                    self._passed_on.append(((source, path), i))
        for path in self._arrays[i.name]:
            if not any(path[: len(at)] == at for at, _, _ in passed):
                self._made[i.name, path] = i
        for path, operand, at in self._module.in_place(i):
            self._sharing.append(((i.operands[operand], at), (i.name, path)))

    def _pass_operands(self, computation: str, operands: Sequence[str]) -> None:
        for parameter, operand in zip(self._module.parameters(computation), operands, strict=True):
            for path in self._arrays[operand]:
                self._same_value.join((parameter.name, path), (operand, path))

    def _follow_loop(self, i: Instruction) -> None:
        condition, body = i.called_computations
        (tested,), (carried,) = map(self._module.parameters, i.called_computations)
        begin = self._time[self._module.computations[condition][0].name]
        for path in self._arrays[i.name]:
            before, within, next_, after = (
                (name, path)
                for name in (i.operands[0], carried.name, self._module.root(body).name, i.name)
            )
            self._same_value.join((tested.name, path), within)
            if self._same_value.find(next_) == self._same_value.find(within):
                self._same_value.join(before, within)
                self._same_value.join(after, within)
            else:
                self._sharing += [(before, within), (within, next_), (next_, after)]
                self._carried.append((before, begin))

    def _follow_branches(self, i: Instruction) -> None:
        for branch, operand in zip(i.called_computations, i.operands[1:], strict=True):
            self._pass_operands(branch, [operand] * len(self._module.parameters(branch)))
            root = self._module.root(branch).name
            self._sharing += [((root, path), (i.name, path)) for path in self._arrays[i.name]]

    def _lives(self) -> list[_Life]:
        first: dict[_Leaf, int] = {}
        last: dict[_Leaf, int] = {}

        def mark_alive(leaf: _Leaf, t: int) -> None:
            value = self._same_value.find(leaf)
            first[value] = min(first.get(value, t), t)
            last[value] = max(last.get(value, t), t)

        for t, i in enumerate(self.order):
            for path in self._arrays[i.name]:
                mark_alive((i.name, path), t)
            if i.opcode not in _PASSES_ON:
                for operand in i.operands:
                    for path in self._arrays[operand]:
                        mark_alive((operand, path), t)
        for leaf, t in self._carried:
            mark_alive(leaf, t)
        for leaf in self._arguments():
            mark_alive(leaf, 0)
        for leaf in self._outputs():
            mark_alive(leaf, len(self.order) - 1)
        made = {value: (i.name, path) for value, (i, path) in self._makers.items()}
        return [_Life(first[value], last[value], made.get(value, value)) for value in first]

    def _arguments(self) -> list[_Leaf]:
        parameters = self._module.parameters(self._module.entry)
        return [(p.name, path) for p in parameters for path in self._arrays[p.name]]

    def _outputs(self) -> list[_Leaf]:
        root = self._module.root(self._module.entry).name
        return [(root, path) for path in self._arrays[root]]

    def _assign(self, lives: list[_Life]) -> list[_Storage]:
        """Assign values to buffers as XLA's ``BufferAssigner`` does.

        Arguments come first, then outputs and temporaries, the largest first. A temporary uses
        the smallest buffer of an output or a donated argument that it fits in while that buffer
        is empty. Otherwise it gets a buffer of its own.
        """
        parameters = self._module.parameters(self._module.entry)
        donated = [(parameters[n].name, at) for n, at in self._module.donated.values()]
        outputs = self._outputs()
        updated = [(outputs[0][0], path) for path in self._module.donated]
        self._sharing += zip(donated, updated, strict=True)
        for a, b in self._sharing:
            self._same_storage.join(self._same_value.find(a), self._same_value.find(b))

        def storage_of(leaf: _Leaf) -> _Leaf:
            return self._same_storage.find(self._same_value.find(leaf))

        kinds = dict.fromkeys(map(storage_of, outputs), "output")
        kinds |= dict.fromkeys(map(storage_of, self._arguments()), "argument")
        constants = {storage_of(leaf) for leaf, i in self._made.items() if i.opcode == "constant"}
        lives_by_storage: dict[_Leaf, list[_Life]] = defaultdict(list)
        for life in lives:
            lives_by_storage[storage_of(life.value)].append(life)
        storages: dict[_Leaf, _Storage] = {}
        for key, inside in lives_by_storage.items():
            size = max(self.array(life.value).bytes for life in inside)
            if key in kinds or (size and key not in constants):
                kind = kinds.get(key, "temporary")
                storages[key] = _Storage(kind, size, sorted(inside), [])

        assigned = [storage for storage in storages.values() if storage.kind == "argument"]
        rest = [storage for storage in storages.values() if storage.kind != "argument"]
        hosts = [storages[key] for key in dict.fromkeys(map(storage_of, donated))]
        for storage in sorted(rest, key=lambda s: (-s.bytes, s.kind, s.lives[0].first)):
            host = self._find_host(hosts, storage) if storage.kind == "temporary" else None
            if host:
                host.guests.extend(storage.lives)
            else:
                assigned.append(storage)
            if storage.kind == "output":
                hosts.append(storage)
        self._reuse_operands([storage for storage in assigned if storage.kind == "temporary"])
        return assigned

    def _reuse_operands(self, temporaries: list[_Storage]) -> None:
        """End the life of an operand before the instruction that overwrites it."""
        at = {storage.lives[0].value: storage for storage in temporaries}
        for value, storage in at.items():
            i = self.order[storage.lives[0].first]
            for operand in i.operands if value[0] == i.name else ():
                read = at.get((operand, ()))
                if (
                    read
                    and len(read.lives) == 1
                    and read.lives[0].last == storage.lives[0].first
                    and self._overwrites((operand, ()), value)
                ):
                    read.lives[0] = read.lives[0]._replace(last=storage.lives[0].first - 1)
                    break

    def _find_host(self, hosts: list[_Storage], guest: _Storage) -> _Storage | None:
        for host in reversed(hosts):
            if host.bytes >= guest.bytes and not any(
                self._clash(a, b) for a in host.lives + host.guests for b in guest.lives
            ):
                return host
        return None

    def _clash(self, a: _Life, b: _Life) -> bool:
        if a.first > b.first:
            a, b = b, a
        if a.last != b.first or a.first == b.first:
            return a.last >= b.first
        # An instruction may overwrite the operand that it is the last to read.
        return not self._overwrites(a.value, b.value)

    def _overwrites(self, a: _Leaf, b: _Leaf) -> bool:
        """Whether the maker of ``b`` may overwrite ``a``: it is elementwise, or a sort."""
        if (made := self.maker(b)) is None or self.array(a) != self.array(b):
            return False
        i, path = made
        value = self._same_value.find(a)
        read = [k for k, o in enumerate(i.operands) if self._same_value.find((o, ())) == value]
        if i.opcode == "sort":
            return read == [path[0] if path else 0] and self._readers[i.operands[read[0]]] == 1
        return any(self._module.is_elementwise(i, k) for k in read)


# Instructions that do not read the arrays of their operands.
_PASSES_ON = {
    *("get-tuple-element", "tuple", "bitcast", "opt-barrier", "domain", "add-dependency"),
    *("while", "call"),
}


class _Groups:
    def __init__(self) -> None:
        self._parent: dict[_Leaf, _Leaf] = {}

    def find(self, leaf: _Leaf) -> _Leaf:
        while (parent := self._parent.get(leaf, leaf)) != leaf:
            self._parent[leaf] = self._parent.get(parent, parent)
            leaf = parent
        return leaf

    def join(self, a: _Leaf, b: _Leaf) -> None:
        self._parent[self.find(a)] = self.find(b)


def _spans(storage: _Storage) -> list[tuple[int, int]]:
    """Merge the lifetimes of a buffer's values into spans that do not overlap."""
    spans: list[tuple[int, int]] = []
    for first, last, _ in storage.lives:
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], last))
        else:
            spans.append((first, last))
    return spans


# Instructions that only move an operand, and which operand that is.
_MOVED_OPERAND = {"dynamic-update-slice": 1} | dict.fromkeys(
    ("copy", "copy-start", "bitcast", "bitcast-convert", "convert", "reshape", "transpose"), 0
)


class _Labels:
    """Layer and phase of each buffer, from the names of the instructions that make it."""

    def __init__(self, module: Module, liveness: _Liveness) -> None:
        self._module = module
        self._liveness = liveness
        self._arguments = {i.name for i in module.parameters(module.entry)}

    def buffer(self, storage: _Storage, t: int) -> Buffer:
        lives = storage.lives[:1]
        if storage.kind != "argument":
            # A loop carry has no maker of its own, so earlier and later values count too.
            newest = storage.lives[::-1]
            now = [life for life in newest if life.first <= t <= life.last]
            lives = now + [life for life in newest if life not in now]
        makers = [maker for life in lives if (maker := self._liveness.maker(life.value))]
        labels = [self._made_by(*maker) for maker in makers]
        known = [label for label in labels if label[0]] + [label for label in labels if label[1]]
        layer, phase = (known or [("", "")])[0]
        array = self._liveness.array(lives[0].value)
        instruction = makers[0][0].name if makers else lives[0].value[0]
        return Buffer(
            storage.bytes, array.shape, array.dtype, storage.kind, layer, phase, instruction
        )

    def _made_by(self, i: Instruction, path: Path) -> tuple[str, str]:
        if i.name in self._arguments:
            return i.op_name or f"argument {i.parameter_number}", ""
        if i.opcode == "fusion" and (inner := self._module.fusion_results(i).get(path)):
            label = self._made_inside(i, inner)
        else:
            label = self._unless_moved(i, lambda operand: self._found_at((operand, ())))
        # An XLA pass that replaces an instruction may leave its name to a reshape.
        carriers = self._liveness.carriers((i.name, path))
        others = [layer_of(other.op_name) for other in (i, *carriers)]
        return next((known for known in (label, *others) if known[0]), label)

    def _made_inside(self, fusion: Instruction, i: Instruction) -> tuple[str, str]:
        if i.opcode == "parameter":
            return self._found_at((fusion.operands[i.parameter_number], ()))
        by_name = self._module.instructions
        return self._unless_moved(i, lambda operand: self._made_inside(fusion, by_name[operand]))

    def _found_at(self, leaf: _Leaf) -> tuple[str, str]:
        maker = self._liveness.maker(leaf)
        return self._made_by(*maker) if maker else ("", "")

    def _unless_moved(
        self, i: Instruction, label_of: Callable[[str], tuple[str, str]]
    ) -> tuple[str, str]:
        label = layer_of(i.op_name)
        # A stack over iterations carries the name of the scan. The stacked array has its own.
        if i.opcode in _MOVED_OPERAND and (not label[0] or i.opcode == "dynamic-update-slice"):
            moved = label_of(i.operands[_MOVED_OPERAND[i.opcode]])
            return moved if moved[0] else label
        return label
