"""Reader of compiled HLO: instructions, their arrays, and their schedule.

It reads the text ``compiled.as_text()``, which every backend gives. XLA's serialized buffer
assignment (``memory_analysis().serialized_buffer_assignment_proto``) cannot replace it: with jax
0.10 and 0.12 it is empty for GPUs and TPUs, and on CPU it has sizes and offsets but no lifetimes.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    import jax

Path = tuple[int, ...]
"""Position of an array in a nested tuple. Empty for a result that is a single array."""


class Array(NamedTuple):
    """One array of an instruction's result.

    ``bytes`` is its size in the device's main memory, with the padding of a TPU's tiles; 0 in
    another memory. ``layout`` is the order of dimensions, tiles and memory space, as printed.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    layout: str


class Instruction(NamedTuple):
    """One instruction of a computation.

    ``result`` is its type as printed, and ``operands`` are names. ``attributes`` is the text after
    the operands, including metadata; for a parameter it starts with the parameter's number.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        return list(arrays(self.result).values())

    @property
    def parameter_number(self) -> int:
        return int(self.attributes.partition(")")[0])

    @property
    def tuple_index(self) -> int:
        return int(self.attribute(r"index=(\d+)"))

    @property
    def op_name(self) -> str:
        """JAX operation the instruction comes from, with named scopes, or empty."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\", "")

    @property
    def fused_computation(self) -> str:
        return self.attribute(r"calls=%([^\s,)]+)")

    @property
    def called_computations(self) -> list[str]:
        """Computations that run as scheduled instructions. The condition of a loop is first."""
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
        """Return the first group of a pattern in the attributes, or empty."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


class Module(NamedTuple):
    """A scheduled HLO module: its instructions by computation, in scheduled order, and by name.

    ``donated`` has, for each output that lives in a parameter's buffer, by its path, the
    parameter's number and the path in the parameter.
    """

    computations: dict[str, list[Instruction]]
    instructions: dict[str, Instruction]
    entry: str
    donated: dict[Path, tuple[int, Path]]

    def parameters(self, computation: str) -> list[Instruction]:
        """Return the parameters of a computation, by number."""
        parameters = (i for i in self.computations[computation] if i.opcode == "parameter")
        return sorted(parameters, key=lambda i: i.parameter_number)

    def operands(self, instruction: Instruction) -> list[list[Array]]:
        return [self.instructions[name].arrays for name in instruction.operands]

    def root(self, computation: str) -> Instruction:
        return next(i for i in self.computations[computation] if i.is_root)

    def schedule(self, computation: str | None = None) -> Iterator[Instruction]:
        """Yield all instructions in scheduled order. A called computation comes before its call."""
        for instruction in self.computations[computation or self.entry]:
            for called in instruction.called_computations:
                yield from self.schedule(called)
            yield instruction

    def fusion_results(self, fusion: Instruction) -> dict[Path, Instruction]:
        """Return the instruction inside a fusion that makes each array of its result."""
        root = self.root(fusion.fused_computation)
        if root.opcode != "tuple":
            return {(): root}
        return {(k,): self.instructions[name] for k, name in enumerate(root.operands)}

    def in_place(self, instruction: Instruction) -> list[tuple[Path, int, Path]]:
        """Return the results that overwrite an operand: (path, operand, path in the operand)."""
        if instruction.opcode in _UPDATES:
            return [((), 0, ())]
        # output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {0})}
        printed = instruction.attribute(r"output_to_operand_aliasing=\{(.*?\))\}")
        aliases = [
            (_path(path), int(operand), _path(inner))
            for path, operand, inner in re.findall(
                r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}\)", printed
            )
        ]
        if instruction.opcode != "fusion":
            return aliases
        for path, result in self.fusion_results(instruction).items():
            update = self._skip_bitcasts(result)
            if update.opcode in _UPDATES:
                target = self._skip_bitcasts(self.instructions[update.operands[0]])
                if target.opcode == "parameter":
                    aliases.append((path, target.parameter_number, ()))
        return aliases

    def _skip_bitcasts(self, instruction: Instruction) -> Instruction:
        while instruction.opcode == "bitcast":
            instruction = self.instructions[instruction.operands[0]]
        return instruction

    def is_elementwise(self, instruction: Instruction, operand: int) -> bool:
        """Whether each element of the result depends on one element of that operand, in place."""
        if instruction.opcode != "fusion":
            return instruction.opcode in ELEMENTWISE
        computation = instruction.fused_computation
        dependent = {self.parameters(computation)[operand].name}
        for i in self.computations[computation]:
            read = [k for k, name in enumerate(i.operands) if name in dependent]
            if not read or (i.is_root and i.opcode == "tuple"):
                continue
            if i.opcode not in ELEMENTWISE | {"copy"} and (i.opcode not in _UPDATES or read != [0]):
                return False
            dependent.add(i.name)
        return True


def read(text: str) -> Module:
    """Parse ``compiled.as_text()``; ValueError for a program that is not compiled."""
    header, _, body = text.partition("\n")
    if "is_scheduled=true" not in header:
        raise ValueError(
            "the program has no schedule: expected the text of a compiled program "
            f"(jax.jit(f).lower(...).compile()), got {header[:80]!r}"
        )
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    instructions: list[Instruction] = []
    for line in body.splitlines():
        if match := _INSTRUCTION.match(line):
            is_root, name, result, opcode, rest = match.groups()
            operands, _, attributes = rest.partition(")")
            if opcode in ("constant", "parameter"):
                operands, attributes = "", rest
            names = tuple(re.findall(r"%([^\s,()]+)", operands)) if operands else ()
            instructions.append(Instruction(name, opcode, result, names, attributes, bool(is_root)))
        elif match := _COMPUTATION.match(line):
            instructions = computations[match[2]] = []
            entry = match[2] if match[1] else entry
    by_name = {i.name: i for body in computations.values() for i in body}
    return Module(computations, by_name, entry, donated(header))


def unwrap(compiled: Any) -> "jax.stages.Compiled":
    """Return JAX's compiled program, also of an `Executable` or of ``flax.nnx.jit``."""
    import jax

    program = getattr(compiled, "compiled", compiled)
    if hasattr(program, "as_text") and not hasattr(program, "compile"):
        return cast("jax.stages.Compiled", program)
    if hasattr(program, "compile"):
        call = ".compile()"
    elif isinstance(program, jax.stages.Traced):
        call = ".lower().compile()"
    elif hasattr(program, "lower") and not isinstance(program, str):
        call = ".lower(...).compile()"
    else:
        call = "jax.jit(f).lower(...).compile()"
    given = getattr(program, "__name__", type(program).__name__)
    raise TypeError(f"expected a compiled program, got {given}; call {call}")


def donated(header: str) -> dict[Path, tuple[int, Path]]:
    """Parse `Module.donated` from the first line of a program's text."""
    # input_output_alias={ {0}: (0, {}, may-alias), {1}: (3, {}, may-alias) }
    aliases = re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}, (?:may|must)-alias\)", header)
    return {_path(output): (int(number), _path(path)) for output, number, path in aliases}


class Window(NamedTuple):
    """One spatial dimension of a convolution's window: ``window={size=3x3 pad=1_1x1_1}``."""

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def window(instruction: Instruction) -> list[Window]:
    """Parse the window of a convolution or a reduction, by spatial dimension."""
    text = instruction.attribute(r"window=\{([^}]*)\}")
    fields = dict(part.split("=") for part in text.split())
    sizes = fields.get("size", "").split("x") if fields else []
    pads = fields["pad"].split("x") if "pad" in fields else ["0_0"] * len(sizes)
    windows = []
    for d, size in enumerate(sizes):
        values = {
            name: int(fields[name].split("x")[d])
            for name in ("stride", "lhs_dilate", "rhs_dilate")
            if name in fields
        }
        low, high = (int(n) for n in pads[d].split("_"))
        windows.append(Window(int(size), low=low, high=high, **values))
    return windows


@functools.lru_cache(maxsize=2**14)
def arrays(result: str) -> dict[Path, Array]:
    """Parse a result type such as ``(f32[8,4]{1,0}, s32[])`` into its arrays, by path."""
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
ELEMENTWISE = {
    *("abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare"),
    *("complex", "convert", "cosine", "divide", "erf", "exponential", "exponential-minus-one"),
    *("floor", "imag", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum"),
    *("multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision"),
    *("remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left"),
    *("shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract"),
    *("tan", "tanh", "xor"),
}


def _array(element_type: str, dimensions: str, layout: str) -> Array:
    shape = tuple(int(d.removeprefix("<=")) for d in dimensions.split(",") if d)
    width = re.search(r"\d+", element_type)
    bits = int(width[0]) if width else 8 * (element_type == "pred")
    minor_to_major, _, placement = layout.partition(":")
    tile = re.search(r"T\(([\d,]+)\)", placement)
    space = re.search(r"S\((\d+)\)", placement)
    # Memory space 1 is the scratchpad of a TPU, but a part of the main memory of a GPU.
    if space and (tile or space[1] != "1"):
        bits = 0
    padded = list(shape)
    if tile:
        sides = _path(tile[1])
        padded = [shape[d] for d in reversed(_path(minor_to_major))]
        padded = [1] * len(sides) + padded
        for k, side in enumerate(sides, start=len(padded) - len(sides)):
            padded[k] = -(-padded[k] // side) * side
    return Array(-(-math.prod(padded) * bits // 8), shape, _dtype(element_type), layout)


def _dtype(element_type: str) -> str:
    """NumPy's name of ``f32``, ``bf16``, ``s8``, ``f8e4m3fn``, ``pred``, ..."""
    if element_type in ("pred", "bf16"):
        return {"pred": "bool", "bf16": "bfloat16"}[element_type]
    letter = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
    name = letter.get(element_type[0], element_type[0])
    return name + re.sub(r"^(\d+)(?=\D)", r"\1_", element_type[1:])


def _path(numbers: str) -> Path:
    return tuple(int(n) for n in numbers.split(",") if n.strip())
