"""The collectives of a compiled program: kind, bytes, machines, and what is scheduled under each."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.hlo._cost import FREE, NO_WORK, Work, WorkCounter, add_work
from experiments.hlo._counts import Executions, called_computations
from experiments.hlo._groups import (
    Traffic,
    all_to_all_traffic,
    permute_pairs,
    permute_traffic,
    replica_groups,
    ring_traffic,
)
from experiments.hlo._text import Computation, Instruction, Module

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
    "all-to-all",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """A collective of the program.

    Attributes:
        kind: one of `KINDS`.
        name: of the instruction that starts it.
        computation: that it stands in.
        op_name: where in the traced program it comes from.
        phase: "forward" or "backward" if what is around it says so, else empty.
        executions: runs of it in one run of the program.
        is_innermost: whether it stands in a loop that runs no other loop with collectives: in a loop over layers, and
            not before or after one in a loop over micro-batches or over steps of a sampler.
        num_bytes: payload of one run on a device: the whole array, gathered or before it is scattered, or the operand.
        num_arrays: arrays that travel together.
        group_size: devices that take part together.
        traffic: bytes that a device sends in one run.
        expected: the same, with a ragged exchange as full as the caller says.
        is_upper_bound: whether the bytes are those of the buffer, of which the data decide how much travels.
        under: work scheduled between its start and its end, in one run; none if it is synchronous.
        num_under: instructions that do that work.
        is_matched: False if the end stands in another computation than the start: nothing is said of overlap then.
    """

    kind: str
    name: str
    computation: str
    op_name: str
    phase: str
    executions: float
    is_innermost: bool
    num_bytes: int
    num_arrays: int
    group_size: int
    traffic: Traffic
    expected: Traffic
    is_upper_bound: bool
    under: Work
    num_under: int
    is_matched: bool

    @property
    def is_overlapped(self) -> bool:
        """Whether a matrix product or kernel is scheduled between its start and its end."""
        return self.under.total_flops > 0 or bool(self.under.unknown)


def find_collectives(
    module: Module,
    executions: Executions,
    counter: WorkCounter,
    *,
    per_machine: int,
    ragged_shares: tuple[float, float] | None = None,
) -> list[Collective]:
    """All collectives that run, in order of the text.

    Args:
        module: a scheduled program.
        executions: how often its computations run.
        counter: of work.
        per_machine: devices of a machine; position d in the mesh is on machine d // per_machine.
        ragged_shares: of a ragged exchange's buffer, the parts that travel inside the machine and to others; unknown if
            None, and then all of it does, to all peers alike.

    Raises:
        ValueError: if the module is not scheduled.
    """
    if not module.is_scheduled:
        raise ValueError(
            "find_collectives: the program must be scheduled; got one that is not. Compile it first."
        )
    inside_async = {
        name for _, _, i in module.walk() if i.opcode == "async-start" for name in i.called.get("calls", ())
    }
    found = []
    innermost = _innermost_loops(module)
    for computation, index, instruction in module.walk():
        count = executions.of.get(computation.name, 0.0)
        if not count or computation.name in inside_async:
            continue
        inner = _collective_of(module, instruction)
        if inner is not None:
            span = _span(computation, index, instruction)
            place = _Place(computation, instruction, span, count, computation.name in innermost)
            collective = _describe(module, inner, place, counter, per_machine)
            if collective.is_upper_bound and ragged_shares is not None:
                parts = (collective.num_bytes * share for share in ragged_shares)
                collective = dataclasses.replace(collective, expected=Traffic(*parts))
            found.append(collective)
    return found


@dataclass(frozen=True)
class _Place:
    computation: Computation
    instruction: Instruction
    span: list[Instruction] | None
    executions: float
    is_innermost: bool


def _innermost_loops(module: Module) -> set[str]:
    """Computations that a loop runs and that hold collectives, but run no loop that holds some."""
    holding = {computation.name for computation, _, i in module.walk() if kind_of(i)}
    bodies = [name for _, _, i in module.walk() if i.opcode == "while" for name in i.called["body"]]
    below = {name: _reached(module, name) for name in bodies}
    with_collectives = {name for name in bodies if below[name] & holding}
    inner = [below[name] for name in with_collectives if not below[name] & with_collectives - {name}]
    return set().union(*inner)


def _reached(module: Module, name: str) -> set[str]:
    """A computation and all that it runs."""
    found, todo = {name}, [name]
    while todo:
        called = {c for i in module.computations[todo.pop()].instructions for c in called_computations(i)}
        todo += called - found
        found |= called
    return found


def _collective_of(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction runs or starts."""
    if kind_of(instruction):
        return instruction
    if instruction.opcode == "async-start":
        for name in instruction.called.get("calls", ()):
            for inner in module.computations[name].instructions:
                if kind_of(inner):
                    return inner
    return None


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction runs or starts, None for others."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def is_sync(instruction: Instruction) -> bool:
    """Whether the backend says that it waits for the collective where it starts it."""
    config = instruction.backend_config.get("collective_backend_config")
    return bool(isinstance(config, Mapping) and config.get("is_sync"))


def _span(computation: Computation, index: int, instruction: Instruction) -> list[Instruction] | None:
    """Instructions between start and end; none for a synchronous one, None if there is no end here."""
    if not instruction.opcode.endswith("-start") or is_sync(instruction):
        return []
    done = instruction.opcode.removesuffix("-start") + "-done"
    between: list[Instruction] = []
    last = instruction.name
    for later in computation.instructions[index + 1 :]:
        if last in later.operands and later.opcode == done:
            return between
        if last in later.operands and later.opcode == "async-update":
            last = later.name
        between.append(later)
    return None


def _works(instruction: Instruction) -> bool:
    return instruction.opcode not in FREE and not re.search(r"-(start|done|update)$", instruction.opcode)


def _describe(
    module: Module, inner: Instruction, place: _Place, counter: WorkCounter, per_machine: int
) -> Collective:
    kind = kind_of(inner)
    assert kind is not None
    owner = place.computation if inner is place.instruction else _owner(module, place.instruction)
    operand_bytes = _payload_operands(kind, owner, inner)
    traffic, group_size, num_bytes = _traffic(kind, inner, operand_bytes, module.num_devices, per_machine)
    working = [i for i in place.span or [] if _works(i)]
    return Collective(
        kind=kind,
        name=place.instruction.name,
        computation=place.computation.name,
        op_name=place.instruction.op_name or inner.op_name,
        phase=_phase(place.instruction.op_name or inner.op_name, place.computation, module),
        executions=place.executions,
        is_innermost=place.is_innermost,
        num_bytes=num_bytes,
        num_arrays=1 if kind == "ragged-all-to-all" else len(inner.operands),
        group_size=group_size,
        traffic=traffic,
        expected=traffic,
        is_upper_bound=kind == "ragged-all-to-all",
        under=add_work([(1.0, counter.of(place.computation, i)) for i in working]) if working else NO_WORK,
        num_under=len(working),
        is_matched=place.span is not None,
    )


def _phase(op_name: str, computation: Computation, module: Module) -> str:
    """From its own name; without one, from its neighbours in a loop's body, which is of one phase."""
    names = (
        [op_name]
        if op_name or computation.name == module.entry
        else [i.op_name for i in computation.instructions]
    )
    if any("transpose(" in name for name in names):
        return "backward"
    return "forward" if any("jvp(" in name for name in names) else ""


def _owner(module: Module, start: Instruction) -> Computation:
    return module.computations[start.called["calls"][0]]


def _payload_operands(kind: str, computation: Computation, instruction: Instruction) -> int:
    """Bytes of the operands that travel; a ragged exchange has its buffer first, offsets and sizes after."""
    names = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
    return sum(computation.by_name[name].num_bytes for name in names if name in computation.by_name)


def _traffic(
    kind: str, instruction: Instruction, operand_bytes: int, num_devices: int, per_machine: int
) -> tuple[Traffic, int, int]:
    if kind == "collective-permute":
        pairs = permute_pairs(instruction)
        return permute_traffic(operand_bytes, pairs, num_devices, per_machine), len(pairs), operand_bytes
    groups = replica_groups(instruction, num_devices)
    size = len(groups[0])
    where = (groups, num_devices, per_machine)
    if kind == "ragged-all-to-all":
        # The buffer holds no row that stays: all of it may leave, to any peer in equal parts for want of better.
        scale = size / (size - 1) if size > 1 else 0.0
        return all_to_all_traffic(operand_bytes * scale, *where), size, operand_bytes
    if kind == "all-to-all":
        return all_to_all_traffic(operand_bytes, *where), size, operand_bytes
    if kind == "all-gather":
        return ring_traffic(operand_bytes * size, *where), size, operand_bytes * size
    if kind == "all-reduce":
        # A reduce-scatter and an all-gather of the same array.
        return ring_traffic(2.0 * operand_bytes, *where), size, operand_bytes
    return ring_traffic(operand_bytes, *where), size, operand_bytes
