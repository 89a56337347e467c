"""How often each computation of a program runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from experiments.hlo._text import Instruction, Module

# Attributes that name what an instruction runs. `to_apply` of a reduction is arithmetic on two scalars.
_RUNS = ("calls", "body", "condition", "branch_computations", "called_computations")


@dataclass(frozen=True)
class Executions:
    """How often computations run in one run of the program.

    Attributes:
        of: runs of each computation.
        data_dependent: loops whose number of turns the program does not say, by the name of their body.
    """

    of: Mapping[str, float]
    data_dependent: Mapping[str, Instruction] = field(default_factory=dict)


def trip_count(loop: Instruction) -> int | None:
    """Turns of a `while`, if the compiler knows them."""
    known = loop.backend_config.get("known_trip_count")
    return None if known is None else int(known["n"])


def called_computations(instruction: Instruction) -> Iterator[str]:
    """Computations that an instruction runs once, or once a turn if it is a loop."""
    for attribute, names in instruction.called.items():
        if attribute in _RUNS or (attribute == "to_apply" and instruction.opcode == "call"):
            yield from names


def count_executions(module: Module, *, data_dependent_trips: float = 1.0) -> Executions:
    """Runs of every computation that can be reached from the entry.

    Every branch of a conditional counts as run: an upper bound.

    Args:
        module: the program.
        data_dependent_trips: turns, on average, of loops whose number of turns depends on data.
    """
    counts: dict[str, float] = dict.fromkeys(module.computations, 0.0)
    counts[module.entry] = 1.0
    unknown: dict[str, Instruction] = {}
    for name in _callers_first(module):
        for instruction in module.computations[name].instructions:
            trips = 1.0
            if instruction.opcode == "while":
                known = trip_count(instruction)
                trips = data_dependent_trips if known is None else known
                if known is None:
                    unknown[instruction.called["body"][0]] = instruction
            for called in called_computations(instruction):
                counts[called] += counts[name] * trips
    return Executions(counts, unknown)


def _callers_first(module: Module) -> list[str]:
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in done:
            return
        for instruction in module.computations[name].instructions:
            for called in called_computations(instruction):
                visit(called)
        done[name] = None

    visit(module.entry)
    return list(done)[::-1]
