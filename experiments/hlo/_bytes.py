"""Bytes that an instruction reads and writes in its device's memory, if nothing stays in a cache between two of them.

A slice reads what it returns, not the array it is cut from, and an update in place writes what is new: in a loop over
layers anything else counts the whole stack at every turn.
"""

from experiments.hlo._text import Computation, Instruction, Module

_VIEWS = frozenset({"bitcast", "reshape", "copy", "convert", "transpose"})
_READS_PART = frozenset({"dynamic-slice", "slice", "gather"})
_UPDATE = "dynamic-update-slice"


def moved_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes read and written by one run of an instruction that is no loop, call or branch."""
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called["calls"][0]]
        return _fusion_reads(computation, instruction, inner) + _written(inner, inner.root)
    if instruction.opcode in _READS_PART:
        return 2.0 * instruction.num_bytes
    if instruction.opcode == _UPDATE:
        return 2.0 * _update_bytes(computation, instruction)
    return float(computation.operand_bytes(instruction) + instruction.num_bytes)


def _fusion_reads(computation: Computation, fusion: Instruction, inner: Computation) -> float:
    parameters = {i.name: int(i.parameter) for i in inner.instructions if i.opcode == "parameter"}
    total = 0.0
    for name, number in parameters.items():
        operand = computation.by_name.get(fusion.operands[number]) if number < len(fusion.operands) else None
        whole = inner.by_name[name].num_bytes if operand is None else operand.num_bytes
        total += min(_read(inner, name), whole)
    return total


def _read(inner: Computation, name: str) -> float:
    """Bytes of a value that its users in a fusion read."""
    whole = float(inner.by_name[name].num_bytes)
    total = 0.0
    for user in inner.users.get(name, ()):
        if user.opcode in _READS_PART and user.operands[0] == name:
            total += user.num_bytes
        elif user.opcode == _UPDATE and user.operands[0] == name:
            continue  # what is not updated stays where it is
        elif user.opcode in _VIEWS:
            total += _read(inner, user.name)
        else:
            return whole
    return min(total, whole)


def _written(inner: Computation, value: Instruction) -> float:
    if value.opcode == "tuple":
        return sum(_written(inner, inner.by_name[name]) for name in value.operands)
    source = value
    while source.opcode in _VIEWS and source.operands:
        source = inner.by_name[source.operands[0]]
    return _update_bytes(inner, source) if source.opcode == _UPDATE else float(value.num_bytes)


def _update_bytes(computation: Computation, update: Instruction) -> float:
    return float(computation.by_name[update.operands[1]].num_bytes)
