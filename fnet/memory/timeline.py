"""Bytes alive at each instruction of a compiled program, and what is alive at the peak."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax

from fnet.memory import hlo
from fnet.memory.hlo import Array, Instruction, Module, Path

Leaf = tuple[str, Path]
"""One array of an instruction's result: the instruction's name, the path into its result."""


class Life(NamedTuple):
    """From when to when a value is alive.

    Attributes:
      first: number of the instruction that makes it.
      last: of the last one that reads it, which it is still alive for.
      value: where it was made, or where it can be found if it was made in several places.
    """

    first: int
    last: int
    value: Leaf


class Storage(NamedTuple):
    """Memory that holds one value after another.

    Attributes:
      kind: ``argument`` (with any output that takes its place), ``output`` or
        ``temporary``. The first two are there for as long as the program runs.
      bytes: that it takes.
      lives: of its values, the first born first.
      guests: of temporaries that use it while it would stand empty.
    """

    kind: str
    bytes: int
    lives: list[Life]
    guests: list[Life]


class Liveness:
    """When each value of a program is alive, and where.

    A value is what one instruction makes. Tuples, calls and loops that leave it
    unchanged pass it on without a copy. What a loop carries, what branches give,
    what is written in place and what is donated are several values, each alive for
    its own time, that one storage must hold. So XLA has it: ``HloDataflowAnalysis``,
    ``HloLiveRange`` and ``BufferAssigner`` in its source.

    Attributes:
      order: the program's instructions as they run.
      storages: the memory that it needs, without constants.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.order = list(module.schedule())
        self._time = {i.name: t for t, i in enumerate(self.order)}
        self._arrays = {i.name: hlo.arrays(i.result) for i in self.order}
        self._readers = Counter(operand for i in self.order for operand in i.operands)
        self._same_value = _Groups()
        self._same_storage = _Groups()
        self._made: dict[Leaf, Instruction] = {}
        self._passed_on: list[tuple[Leaf, Instruction]] = []
        self._sharing: list[tuple[Leaf, Leaf]] = []
        self._carried: list[tuple[Leaf, int]] = []
        inner = {computation for i in self.order for computation in i.runs}
        self._handed_in = {p.name for computation in inner for p in module.parameters(computation)}
        for i in self.order:
            self._follow(i)
        self._makers = {self._same_value.find(leaf): (i, leaf[1]) for leaf, i in self._made.items()}
        self._carriers: dict[Leaf, list[Instruction]] = defaultdict(list)
        for leaf, i in self._passed_on:
            self._carriers[self._same_value.find(leaf)].append(i)
        self.storages = self._assign(self._lives())

    def array(self, leaf: Leaf) -> Array:
        """What is found there."""
        return self._arrays[leaf[0]][leaf[1]]

    def maker(self, leaf: Leaf) -> tuple[Instruction, Path] | None:
        """What made the value found there, and which of its arrays that is.

        None for what a loop carries and what branches give: that has several makers.
        """
        return self._makers.get(self._same_value.find(leaf))

    def carriers(self, leaf: Leaf) -> list[Instruction]:
        """The instructions that pass on what is found there, in the order they run."""
        return self._carriers[self._same_value.find(leaf)]

    def _follow(self, i: Instruction) -> None:
        """Notes which values an instruction makes and which it passes on."""
        passed: list[tuple[Path, str, Path]] = []  # arrays under a path are another's under a path
        match i.opcode:
            case "get-tuple-element":
                passed = [((), i.operands[0], (i.element,))]
            case "tuple":
                passed = [((k,), operand, ()) for k, operand in enumerate(i.operands)]
            case "bitcast" | "opt-barrier" | "domain" | "add-dependency":
                passed = [((), i.operands[0], ())]
            case "async-update" | "recv-done":
                passed = [((), i.operands[0], ())]
            case "parameter" if i.name in self._handed_in:
                return
            case "while":
                self._follow_loop(i)
                return
            case "conditional":
                self._follow_branches(i)
                return
            case "call":
                (called,) = i.runs
                self._hand_in(called, i.operands)
                passed = [((), self._module.root(called).name, ())]
            case "async-start":
                (called,) = i.runs
                self._hand_in(called, i.operands)
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

    def _hand_in(self, computation: str, operands: Sequence[str]) -> None:
        for parameter, operand in zip(self._module.parameters(computation), operands, strict=True):
            for path in self._arrays[operand]:
                self._same_value.join((parameter.name, path), (operand, path))

    def _follow_loop(self, i: Instruction) -> None:
        condition, body = i.runs
        (tested,), (carried,) = map(self._module.parameters, i.runs)
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
        for branch, operand in zip(i.runs, i.operands[1:], strict=True):
            self._hand_in(branch, [operand] * len(self._module.parameters(branch)))
            root = self._module.root(branch).name
            self._sharing += [((root, path), (i.name, path)) for path in self._arrays[i.name]]

    def _lives(self) -> list[Life]:
        first: dict[Leaf, int] = {}
        last: dict[Leaf, int] = {}

        def alive(leaf: Leaf, t: int) -> None:
            value = self._same_value.find(leaf)
            first[value] = min(first.get(value, t), t)
            last[value] = max(last.get(value, t), t)

        for t, i in enumerate(self.order):
            for path in self._arrays[i.name]:
                alive((i.name, path), t)
            if i.opcode not in _PASSING_ON:
                for operand in i.operands:
                    for path in self._arrays[operand]:
                        alive((operand, path), t)
        for leaf, t in self._carried:
            alive(leaf, t)
        for leaf in self._arguments():
            alive(leaf, 0)
        for leaf in self._outputs():
            alive(leaf, len(self.order) - 1)
        made = {value: (i.name, path) for value, (i, path) in self._makers.items()}
        return [Life(first[value], last[value], made.get(value, value)) for value in first]

    def _arguments(self) -> list[Leaf]:
        parameters = self._module.parameters(self._module.entry)
        return [(p.name, path) for p in parameters for path in self._arrays[p.name]]

    def _outputs(self) -> list[Leaf]:
        root = self._module.root(self._module.entry).name
        return [(root, path) for path in self._arrays[root]]

    def _assign(self, lives: list[Life]) -> list[Storage]:
        """Puts values into storages, as XLA's buffer assignment does.

        First arguments, then outputs and temporaries, the largest first. A temporary
        goes into the smallest storage of an output or a donated argument that it fits
        into while nothing else is alive there, or else gets one of its own.
        """
        parameters = self._module.parameters(self._module.entry)
        donated = [(parameters[n].name, at) for n, at in self._module.donated.values()]
        outputs = self._outputs()
        renewed = [(outputs[0][0], path) for path in self._module.donated]
        self._sharing += zip(donated, renewed, strict=True)
        for a, b in self._sharing:
            self._same_storage.join(self._same_value.find(a), self._same_value.find(b))

        def storage_of(leaf: Leaf) -> Leaf:
            return self._same_storage.find(self._same_value.find(leaf))

        kinds = dict.fromkeys(map(storage_of, outputs), "output")
        kinds |= dict.fromkeys(map(storage_of, self._arguments()), "argument")
        constants = {storage_of(leaf) for leaf, i in self._made.items() if i.opcode == "constant"}
        together: dict[Leaf, list[Life]] = defaultdict(list)
        for life in lives:
            together[storage_of(life.value)].append(life)
        every: dict[Leaf, Storage] = {}
        for key, inside in together.items():
            size = max(self.array(life.value).bytes for life in inside)
            if key in kinds or (size and key not in constants):
                every[key] = Storage(kinds.get(key, "temporary"), size, sorted(inside), [])

        found = [storage for storage in every.values() if storage.kind == "argument"]
        rest = [storage for storage in every.values() if storage.kind != "argument"]
        hosts = [every[key] for key in dict.fromkeys(map(storage_of, donated))]
        hosts = [storage for storage in hosts if self._stands_empty(storage)]
        for storage in sorted(rest, key=lambda s: (-s.bytes, s.kind, s.lives[0].first)):
            host = self._room(hosts, storage) if storage.kind == "temporary" else None
            if host:
                host.guests.extend(storage.lives)
            else:
                found.append(storage)
            if storage.kind == "output":
                hosts.append(storage)
        self._reuse_operands([storage for storage in found if storage.kind == "temporary"])
        return found

    def _reuse_operands(self, temporaries: list[Storage]) -> None:
        """Ends what is written over one instruction earlier."""
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

    def _stands_empty(self, storage: Storage) -> bool:
        full = 0
        for life in storage.lives:
            if life.first > full:
                return True
            full = max(full, life.last)
        return full < len(self.order) - 1

    def _room(self, hosts: list[Storage], guest: Storage) -> Storage | None:
        for host in reversed(hosts):
            if host.bytes >= guest.bytes and not any(
                self._clash(a, b) for a in host.lives + host.guests for b in guest.lives
            ):
                return host
        return None

    def _clash(self, a: Life, b: Life) -> bool:
        if a.first > b.first:
            a, b = b, a
        if a.last != b.first or a.first == b.first:
            return a.last >= b.first
        # An instruction may write over the operand that it is the last to read.
        return not self._overwrites(a.value, b.value)

    def _overwrites(self, a: Leaf, b: Leaf) -> bool:
        """Whether the maker of ``b`` may write over ``a``: element for element, or to sort it."""
        if (made := self.maker(b)) is None or self.array(a) != self.array(b):
            return False
        i, path = made
        value = self._same_value.find(a)
        taken = [k for k, o in enumerate(i.operands) if self._same_value.find((o, ())) == value]
        if i.opcode == "sort":
            return taken == [path[0] if path else 0] and self._readers[i.operands[taken[0]]] == 1
        return any(self._module.is_elementwise(i, k) for k in taken)


# Instructions that do not read the arrays of what they take.
_PASSING_ON = {
    *("get-tuple-element", "tuple", "bitcast", "opt-barrier", "domain", "add-dependency"),
    *("while", "call"),
}


class _Groups:
    """Which leaves belong together: a union-find forest."""

    def __init__(self) -> None:
        self._parent: dict[Leaf, Leaf] = {}

    def find(self, leaf: Leaf) -> Leaf:
        while (parent := self._parent.get(leaf, leaf)) != leaf:
            self._parent[leaf] = self._parent.get(parent, parent)
            leaf = parent
        return leaf

    def join(self, a: Leaf, b: Leaf) -> None:
        self._parent[self.find(a)] = self.find(b)


class Buffer(NamedTuple):
    """An array that a compiled program holds.

    Attributes:
      bytes: that it takes.
      shape: of the array.
      dtype: NumPy's name of it.
      kind: ``argument`` (with any output that takes its place), ``output`` or ``temporary``.
      layer: the named scopes it was made under, ``stage0/conv``, or an argument's
        own name, ``state.params['stage0']['conv']['kernel']``; empty where there is neither.
      phase: ``forward``, ``backward``, ``optimizer`` or empty; see `layer_of`.
      instruction: that made it, as the compiled program names it.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    layer: str
    phase: str
    instruction: str


class Timeline(NamedTuple):
    """What is alive while a compiled program runs; see `timeline`.

    Attributes:
      live_bytes: at each instruction.
      instructions: their names, in the order they are scheduled; the bodies of
        loops and branches once each, before the instruction that runs them.
      peak_index: the first instruction with the most bytes alive.
      at_peak: everything alive there, the largest first.
    """

    live_bytes: list[int]
    instructions: list[str]
    peak_index: int
    at_peak: list[Buffer]

    @property
    def largest(self) -> list[Buffer]:
        """The ten largest buffers alive at the peak."""
        return self.at_peak[:10]


def timeline(compiled: jax.stages.Compiled) -> Timeline:
    """The bytes alive at each instruction of a compiled program, from its own schedule.

    Arguments and outputs count for the whole program: the first are there before
    it starts, the second are allocated then. An output in a donated argument's
    place counts once. A temporary is alive from the instruction that makes it to
    the last that reads it; in a loop, which comes once, for every round.

    What is alive is at most what the compiler assigns (`fnet.memory.peak`), which has
    gaps where nothing fits: train steps of dense, convolutional, scanned and
    reversible nets reach 0.99 to 1.00 of it on CPU and for an H100, a ResNet-50's
    0.99. Which temporary stands in for an output not yet made is XLA's choice among
    equals: where two or three arrays are all that a program holds, it may come out
    one of them off, either way.

    Args:
      compiled: ``jax.jit(f).lower(...).compile()``, or from `fnet.memory.target`.

    Returns:
      The curve, its peak, and what is alive there.

    Raises:
      ValueError: if the backend does not tell the order of instructions.
    """
    module = hlo.read(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    liveness = Liveness(module)
    change = [held] + [0] * len(liveness.order)
    for storage in liveness.storages:
        if storage.kind == "temporary":
            for first, last in _spans(storage):
                change[first] += storage.bytes
                change[last + 1] -= storage.bytes
    live_bytes = list(accumulate(change[:-1]))
    peak_index = live_bytes.index(max(live_bytes))
    names = _Names(module, liveness)
    at_peak = [
        names.buffer(storage, peak_index)
        for storage in liveness.storages
        if storage.kind != "temporary"
        or any(first <= peak_index <= last for first, last in _spans(storage))
    ]
    return Timeline(
        live_bytes,
        [i.name for i in liveness.order],
        peak_index,
        sorted(at_peak, key=lambda buffer: (-buffer.bytes, buffer.kind, buffer.instruction)),
    )


def layer_of(op_name: str) -> tuple[str, str]:
    """The layer and the phase of training that the name of an operation tells.

    XLA keeps for each instruction the name that JAX gave its operation: functions,
    transformations and named scopes from the outside in, then the primitive.

    - ``jit(step)/jvp(stage0)/conv/dot_general``: ``("stage0/conv", "forward")``.
    - ``jit(step)/transpose(jvp(stage0))/conv/dot_general``: ``("stage0/conv", "backward")``.
    - ``jit(step)/jvp(blocks)/while/body/closed_call/mlp/tanh``: ``("blocks/mlp", "forward")``.
    - ``jit(step)/optimizer/mul``: ``("optimizer", "optimizer")``.
    - ``jit(step)/dot_general``: ``("", "")``.
    - ``jit(step)/transpose(jvp(a))/b/(dot_general:reduce_sum)``: ``("a/b", "backward")``, what
      the names of several operations share that XLA made one of, as sums over devices.

    What is recomputed in the backward pass is ``backward``. A program without a
    derivative has no phases.

    Args:
      op_name: ``metadata={op_name="..."}`` of an instruction in ``compiled.as_text()``.

    Returns:
      The named scopes, joined by slashes, and ``forward``, ``backward``, ``optimizer`` (what
      runs under a scope of that name, as in `fnet.make_step`) or nothing.
    """
    name, merged, _ = _CONTROL_FLOW.sub("", op_name).partition("/(")
    *path, last = _SLASH.split(name)
    if merged or last.endswith(")"):  # no primitive: the name is a function's or a loop's
        path.append(last)
    scopes = [scope for part in path if (scope := _unwrapped(part))]
    if "optimizer" in scopes:
        phase = "optimizer"
    elif "transpose(" in op_name:
        phase = "backward"
    else:
        phase = "forward" if "jvp(" in op_name else ""
    return "/".join(scopes), phase


# A slash inside parentheses belongs to a scope's own name.
_SLASH = re.compile(r"/(?![^(]*\))")
_CONTROL_FLOW = re.compile(
    r"/(while/(body|cond)|cond/branch_\d+_fun|closed_call|eval_jaxpr|checkpoint"
    r"|rematted_computation|shard_map)(?=/|$)"
)
_WRAPPED = re.compile(r"(jit|jvp|transpose|vmap)\((.*)\)")


def _unwrapped(part: str) -> str:
    """The named scope in ``transpose(jvp(stage0))``; none in ``jit(relu)``."""
    while found := _WRAPPED.fullmatch(part):
        part = "" if found[1] == "jit" else found[2]
    return part


def _spans(storage: Storage) -> list[tuple[int, int]]:
    """From when to when anything in it is alive; no two overlap."""
    spans: list[tuple[int, int]] = []
    for first, last, _ in storage.lives:
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], last))
        else:
            spans.append((first, last))
    return spans


# Instructions whose result is what they take, moved: by which operand.
_MOVED = {"dynamic-update-slice": 1} | dict.fromkeys(
    ("copy", "copy-start", "bitcast", "bitcast-convert", "convert", "reshape", "transpose"), 0
)


class _Names:
    """Says which layer a buffer comes from."""

    def __init__(self, module: Module, liveness: Liveness) -> None:
        self._module = module
        self._liveness = liveness
        self._arguments = {i.name for i in module.parameters(module.entry)}

    def buffer(self, storage: Storage, t: int) -> Buffer:
        """What is in the storage when instruction ``t`` runs."""
        lives = storage.lives[:1]
        if storage.kind != "argument":
            # What is there now, then what was or will be: a loop's carry has no maker itself.
            newest = storage.lives[::-1]
            now = [life for life in newest if life.first <= t <= life.last]
            lives = now + [life for life in newest if life not in now]
        makers = [maker for life in lives if (maker := self._liveness.maker(life.value))]
        names = [self._of(*maker) for maker in makers]
        named = [name for name in names if name[0]] + [name for name in names if name[1]]
        array = self._liveness.array(lives[0].value)
        layer, phase = (named or [("", "")])[0]
        instruction = makers[0][0].name if makers else lives[0].value[0]
        return Buffer(
            storage.bytes, array.shape, array.dtype, storage.kind, layer, phase, instruction
        )

    def _of(self, i: Instruction, path: Path) -> tuple[str, str]:
        if i.name in self._arguments:
            return i.op_name or f"argument {i.number}", ""
        if i.opcode == "fusion" and (inside := self._module.results(i).get(path)):
            name = self._inside(i, inside)
        else:
            name = self._unless_moved(i, lambda operand: self._found_at((operand, ())))
        # A compiler's pass that replaces an instruction may leave its name to a reshape.
        same = [layer_of(x.op_name) for x in (i, *self._liveness.carriers((i.name, path)))]
        return next((named for named in (name, *same) if named[0]), name)

    def _inside(self, fusion: Instruction, i: Instruction) -> tuple[str, str]:
        if i.opcode == "parameter":
            return self._found_at((fusion.operands[i.number], ()))
        body = {x.name: x for x in self._module.computations[fusion.fused]}
        return self._unless_moved(i, lambda operand: self._inside(fusion, body[operand]))

    def _found_at(self, leaf: Leaf) -> tuple[str, str]:
        maker = self._liveness.maker(leaf)
        return self._of(*maker) if maker else ("", "")

    def _unless_moved(
        self, i: Instruction, name_of: Callable[[str], tuple[str, str]]
    ) -> tuple[str, str]:
        """An instruction's own layer, or of what it only moves that of the operand."""
        own = layer_of(i.op_name)
        # What a scan stacks carries the name of the scan; what is stacked has its own.
        if i.opcode in _MOVED and (not own[0] or i.opcode == "dynamic-update-slice"):
            moved = name_of(i.operands[_MOVED[i.opcode]])
            return moved if moved[0] else own
        return own
