"""A compiled program as its compiler prints it: instructions, their arrays, their order."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

Path = tuple[int, ...]
"""Where an array stands in a nested tuple; empty for a result that is one array."""


class Array(NamedTuple):
    """One array of an instruction's result.

    Attributes:
      bytes: that it takes in the device's main memory: with a TPU's padding to
        tiles, and 0 where it lives in another memory.
      shape: without padding.
      dtype: NumPy's name of it.
      layout: the order of its dimensions in memory and what else is printed with it.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    layout: str


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: unique in the module.
      opcode: ``fusion``, ``while``, ...
      result: the type of what it gives, as printed; read by `arrays`.
      operands: names of the instructions it takes.
      attributes: all that is printed behind the operands, metadata among it.
        For a parameter, its number comes first.
      is_root: whether its result is the computation's.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def number(self) -> int:
        """Of a parameter, its place among the arguments."""
        return int(self.attributes.partition(")")[0])

    @property
    def element(self) -> int:
        """Of a get-tuple-element, which element."""
        return int(self.attribute(r"index=(\d+)"))

    @property
    def op_name(self) -> str:
        """The JAX operation it comes from, with its named scopes, or nothing."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\", "")

    @property
    def fused(self) -> str:
        """Of a fusion, the computation that it does in one go."""
        return self.attribute(r"calls=%([^\s,)]+)")

    @property
    def runs(self) -> list[str]:
        """The computations that it runs instruction by instruction; a loop's condition first."""
        match self.opcode:
            case "while":
                return [self.attribute(rf"{part}=%([^\s,)]+)") for part in ("condition", "body")]
            case "conditional":
                branches = self.attribute(r"branch_computations=\{([^}]*)\}") or self.attribute(
                    r"(true_computation=%[^\s,)]+, false_computation=%[^\s,)]+)"
                )
                return re.findall(r"%([^\s,)]+)", branches)
            case "call":
                return [self.attribute(r"to_apply=%([^\s,)]+)")]
            case "async-start":
                return [self.attribute(r"calls=%([^\s,)]+)")]
        return []

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern found among the attributes, or nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


class Module(NamedTuple):
    """A scheduled program.

    Attributes:
      computations: their instructions, in the order they run.
      entry: the name of the computation that is run.
      donated: of each output that takes a parameter's memory, its path, and that
        parameter's number and the path in it.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    donated: dict[Path, tuple[int, Path]]

    def parameters(self, computation: str) -> list[Instruction]:
        """The computation's parameters by number."""
        found = (i for i in self.computations[computation] if i.opcode == "parameter")
        return sorted(found, key=lambda i: i.number)

    def root(self, computation: str) -> Instruction:
        """What gives the computation's result."""
        return next(i for i in self.computations[computation] if i.is_root)

    def schedule(self, computation: str | None = None) -> Iterator[Instruction]:
        """All instructions as they run; what an instruction runs comes before it, once."""
        for instruction in self.computations[computation or self.entry]:
            for computation in instruction.runs:
                yield from self.schedule(computation)
            yield instruction

    def results(self, fusion: Instruction) -> dict[Path, Instruction]:
        """What makes each array of a fusion's result, inside it."""
        body = {i.name: i for i in self.computations[fusion.fused]}
        root = self.root(fusion.fused)
        if root.opcode != "tuple":
            return {(): root}
        return {(k,): body[name] for k, name in enumerate(root.operands)}

    def in_place(self, instruction: Instruction) -> list[tuple[Path, int, Path]]:
        """Arrays of the result that are an operand's, changed: (path, operand, path in it)."""
        if instruction.opcode in _UPDATES:
            return [((), 0, ())]
        # output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {0})}
        said = instruction.attribute(r"output_to_operand_aliasing=\{(.*?\))\}")
        found = [
            (_path(path), int(operand), _path(at))
            for path, operand, at in re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}\)", said)
        ]
        if instruction.opcode != "fusion":
            return found
        body = {i.name: i for i in self.computations[instruction.fused]}
        for path, result in self.results(instruction).items():
            update = _behind_bitcasts(result, body)
            if update.opcode in _UPDATES:
                target = _behind_bitcasts(body[update.operands[0]], body)
                if target.opcode == "parameter":
                    found.append((path, target.number, ()))
        return found

    def is_elementwise(self, instruction: Instruction, operand: int) -> bool:
        """Whether each element of the result follows from the one in its place in that operand."""
        if instruction.opcode != "fusion":
            return instruction.opcode in _ELEMENTWISE
        touched = {self.parameters(instruction.fused)[operand].name}
        for i in self.computations[instruction.fused]:
            read = [k for k, name in enumerate(i.operands) if name in touched]
            if not read or (i.is_root and i.opcode == "tuple"):
                continue
            if i.opcode not in _ELEMENTWISE | {"copy"} and (
                i.opcode not in _UPDATES or read != [0]
            ):
                return False
            touched.add(i.name)
        return True


def read(text: str) -> Module:
    """Reads ``compiled.as_text()``.

    Raises:
      ValueError: if it is not the text of a program whose order is decided.
    """
    header, _, body = text.partition("\n")
    if "is_scheduled=true" not in header:
        raise ValueError(
            "the order of the program's instructions is not known: expected the text of a "
            f"compiled program (jax.jit(f).lower(...).compile()), got {header[:80]!r}"
        )
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    instructions: list[Instruction] = []
    for line in body.splitlines():
        if found := _INSTRUCTION.match(line):
            is_root, name, result, opcode, rest = found.groups()
            operands, _, attributes = rest.partition(")")
            if opcode in ("constant", "parameter"):
                operands, attributes = "", rest
            names = tuple(re.findall(r"%([^\s,()]+)", operands))
            instructions.append(Instruction(name, opcode, result, names, attributes, bool(is_root)))
        elif found := _COMPUTATION.match(line):
            instructions = computations[found[2]] = []
            entry = found[2] if found[1] else entry
    return Module(computations, entry, donated(header))


def donated(header: str) -> dict[Path, tuple[int, Path]]:
    """`Module.donated`, from the first line of a program's text."""
    # input_output_alias={ {0}: (0, {}, may-alias), {1}: (3, {}, may-alias) }
    aliases = re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}, (?:may|must)-alias\)", header)
    return {_path(output): (int(number), _path(path)) for output, number, path in aliases}


def arrays(result: str) -> dict[Path, Array]:
    """The arrays of a result's type, ``(f32[8,4]{1,0}, s32[])``, by their path."""
    found: dict[Path, Array] = {}
    path: list[int] = []
    for part in _PART.finditer(result):
        if part[0] == "(":
            path.append(0)
            continue
        if part[0] == ")":
            path.pop()
        else:
            found[tuple(path)] = _array(part[1], part[2], part[3] or "")
        if path:
            path[-1] += 1
    return found


_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"  (ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_PART = re.compile(r"\(|\)|([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_UPDATES = ("dynamic-update-slice", "scatter")
_ELEMENTWISE = {
    *("abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare"),
    *("complex", "convert", "cosine", "divide", "erf", "exponential", "exponential-minus-one"),
    *("floor", "imag", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum"),
    *("multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision"),
    *("remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left"),
    *("shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract"),
    *("tan", "tanh", "xor"),
}


def _array(kind: str, dimensions: str, layout: str) -> Array:
    shape = tuple(int(d.removeprefix("<=")) for d in dimensions.split(",") if d)
    width = re.search(r"\d+", kind)
    bits = int(width[0]) if width else 8 * (kind == "pred")
    order, _, placed = layout.partition(":")
    tile = re.search(r"T\(([\d,]+)\)", placed)
    space = re.search(r"S\((\d+)\)", placed)
    # Memory 1 is a TPU's scratchpad, but on a GPU a part of the main memory.
    if space and (tile or space[1] != "1"):
        bits = 0
    padded = list(shape)
    if tile:
        sides = _path(tile[1])
        padded = [shape[d] for d in reversed(_path(order))]
        padded = [1] * (len(sides) - len(padded)) + padded
        for k, side in enumerate(sides, start=len(padded) - len(sides)):
            padded[k] = -(-padded[k] // side) * side
    return Array(-(-math.prod(padded) * bits // 8), shape, _dtype(kind), layout)


def _dtype(kind: str) -> str:
    """NumPy's name for ``f32``, ``bf16``, ``s8``, ``f8e4m3fn``, ``pred``, ..."""
    if kind in ("pred", "bf16"):
        return {"pred": "bool", "bf16": "bfloat16"}[kind]
    letter = {"f": "float", "s": "int", "u": "uint", "c": "complex"}.get(kind[0], kind[0])
    return letter + re.sub(r"^(\d+)(?=\D)", r"\1_", kind[1:])


def _path(numbers: str) -> Path:
    return tuple(int(n) for n in numbers.split(",") if n.strip())


def _behind_bitcasts(instruction: Instruction, body: dict[str, Instruction]) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = body[instruction.operands[0]]
    return instruction
