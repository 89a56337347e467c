"""Reading the text of a compiled program (HLO): computations, their instructions in order, shapes, attributes.

Only the form that `compiled.as_text()` prints is read: operands by name, one instruction a line. If the header says
`is_scheduled=true`, the order of a computation's instructions is the order in which they are issued.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_DTYPE_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
    "s16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_NAME = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%[^\s,]+)"
)
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Element type and dimensions of an array on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes, without padding."""
        return -(-self.size * _DTYPE_BITS.get(self.dtype, 32) // 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name, opcode: as printed, without the percent sign.
        shapes: arrays of the result; those of a tuple one after another, nested ones flattened.
        operands: names.
        attributes: the rest of the line.
        parameter: number of a parameter, else -1.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    attributes: str
    parameter: int = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.num_bytes for shape in self.shapes)

    @cached_property
    def called(self) -> Mapping[str, tuple[str, ...]]:
        """Computations by the attribute that names them, such as `body` and `condition` of a loop."""
        return {name: tuple(_NAME.findall(names)) for name, names in _CALLED.findall(self.attributes)}

    @cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """What the backend says of the instruction; empty if it says nothing."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        start += len("backend_config=")
        text = self.attributes[start : _closing(self.attributes, start) + 1]
        try:
            found = json.loads(text)
        except ValueError:  # some backends print a text proto
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def op_name(self) -> str:
        """Where in the traced program the instruction comes from."""
        return self.attribute("op_name", '"', '"')

    def attribute(self, name: str, opening: str = "", closing: str = ",") -> str:
        """The text of an attribute between two marks; empty if there is none."""
        found = re.search(rf"\b{name}={re.escape(opening)}(.*?)(?:{re.escape(closing)}|$)", self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions in printed order, and the name of the one that is its result."""

    name: str
    instructions: tuple[Instruction, ...]
    root_name: str = ""

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return self.by_name[self.root_name]

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """Instructions that take each value as operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    def operand_shapes(self, instruction: Instruction) -> list[tuple[ArrayShape, ...]]:
        """Shapes of an instruction's operands."""
        return [self.by_name[name].shapes for name in instruction.operands if name in self.by_name]

    def operand_bytes(self, instruction: Instruction) -> int:
        """Bytes of an instruction's operands, each once."""
        names = dict.fromkeys(instruction.operands)
        return sum(self.by_name[name].num_bytes for name in names if name in self.by_name)


@dataclass(frozen=True)
class Module:
    """A compiled program of one device.

    Attributes:
        computations: by name.
        entry: name of the one that runs.
        num_devices: partitions times replicas.
        is_scheduled: whether instructions stand in the order in which they are issued.
    """

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int
    is_scheduled: bool

    def walk(self) -> Iterator[tuple[Computation, int, Instruction]]:
        """All instructions, with their computation and place in it."""
        for computation in self.computations.values():
            for index, instruction in enumerate(computation.instructions):
                yield computation, index, instruction


def parse_module(text: str) -> Module:
    """The module of an HLO text.

    Raises:
        ValueError: if the text has no entry computation.
    """
    header = text.partition("\n")[0]
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: list[Instruction] = []
    for line in text.splitlines()[1:]:
        if line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions), root)
        elif opened := _HEADER.match(line):
            name, instructions = opened[2], []
            entry = name if opened[1] else entry
        elif found := _INSTRUCTION.match(line):
            instructions.append(_instruction(found[2], found[3]))
            root = found[2] if found[1] else root
    if entry not in computations:
        raise ValueError("parse_module: the text must be an HLO module with an entry; got none.")
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    return Module(computations, entry, math.prod(counts), "is_scheduled=true" in header)


def _instruction(name: str, text: str) -> Instruction:
    text = _COMMENT.sub("", text) if "/*" in text else text
    # A tuple's shape has spaces; an array's has none.
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[end:].lstrip().partition("(")
    stop = _closing("(" + rest, 0) - 1
    shapes = tuple(
        ArrayShape(dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(text[:end])
    )
    operands = tuple(_NAME.findall(rest[:stop]))
    number = int(rest[:stop]) if opcode == "parameter" else -1
    return Instruction(name, opcode, shapes, operands, rest[stop + 1 :].lstrip(", "), number)


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`; quoted brackets do not count."""
    opening = text[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth, quoted = 0, False
    for i in range(start, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif c == opening:
            depth += 1
        elif c == closing:
            depth -= 1
            if not depth:
                return i
    raise ValueError(f"parse_module: a bracket must be closed; got {text[start : start + 40]!r}.")
