"""A modelled timeline of a scheduled program: peak speeds, one queue for compute and one for collectives.

Nothing here is measured. An instruction takes the longer of its FLOPs at the peak of its dtype and its bytes at the
memory's speed; a collective the longer of its bytes inside a machine and across machines, each at its link's speed;
launches and latencies take none. Collectives run one after the other, compute waits for one where its end is scheduled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from experiments.hlo._collectives import Collective
from experiments.hlo._cost import Work, WorkCounter
from experiments.hlo._counts import called_computations, trip_count
from experiments.hlo._text import Computation, Instruction, Module


class Speeds(Protocol):
    """Peak speeds of a GPU and its links, per second."""

    @property
    def memory_speed(self) -> float: ...
    @property
    def nvlink(self) -> float: ...
    @property
    def network(self) -> float: ...
    def flop_speed(self, dtype: str) -> float: ...


def work_seconds(work: Work, speeds: Speeds) -> float:
    """Modelled seconds of one instruction's work."""
    flops_s = sum(flops / speeds.flop_speed(dtype) for dtype, flops in work.flops.items())
    return max(flops_s, work.num_bytes / speeds.memory_speed)


def collective_seconds(collective: Collective, speeds: Speeds) -> float:
    """Modelled seconds of one run of a collective."""
    return max(collective.expected.inside / speeds.nvlink, collective.expected.across / speeds.network)


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """Modelled seconds of one run of a program.

    Attributes:
        total_s: of the run.
        compute_s: without waiting for any collective.
        waiting_s: for each collective by name, the seconds that compute waits for it, over all its runs.
    """

    total_s: float
    compute_s: float
    waiting_s: Mapping[str, float]


def model_step(
    module: Module,
    collectives: Iterable[Collective],
    counter: WorkCounter,
    speeds: Speeds,
    *,
    data_dependent_trips: float = 1.0,
) -> ModelledStep:
    """The modelled timeline of a program on one device."""
    seconds = {c.name: collective_seconds(c, speeds) for c in collectives}
    return _Simulator(module, seconds, counter, speeds, data_dependent_trips).run(module.entry)


class _Simulator:
    def __init__(
        self,
        module: Module,
        seconds: Mapping[str, float],
        counter: WorkCounter,
        speeds: Speeds,
        trips: float,
    ) -> None:
        self._module, self._seconds, self._counter = module, seconds, counter
        self._speeds, self._trips = speeds, trips
        self._parts: dict[str, ModelledStep] = {}

    def run(self, name: str) -> ModelledStep:
        """One run of a computation that starts with the links idle."""
        if name not in self._parts:
            self._parts[name] = self._simulate(self._module.computations[name])
        return self._parts[name]

    def _simulate(self, computation: Computation) -> ModelledStep:
        now = compute = link_free = 0.0
        ends: dict[str, tuple[str, float]] = {}  # by the name a later instruction may refer to
        waiting: dict[str, float] = {}
        for instruction in computation.instructions:
            if instruction.name in self._seconds:
                link_free = max(now, link_free) + self._seconds[instruction.name]
                ends[instruction.name] = (instruction.name, link_free)
                if instruction.opcode.endswith("-start"):
                    continue
            found = ends.get(instruction.operands[0]) if instruction.operands else None
            if instruction.name in ends:  # a synchronous collective
                found = ends[instruction.name]
            if found and (instruction.opcode.endswith("-done") or instruction.name in ends):
                waiting[found[0]] = waiting.get(found[0], 0.0) + max(found[1] - now, 0.0)
                now = max(now, found[1])
                continue
            if found and instruction.opcode.endswith("-update"):
                ends[instruction.name] = found
                continue
            part = self._part(computation, instruction)
            now, compute = now + part.total_s, compute + part.compute_s
            for name, more in part.waiting_s.items():
                waiting[name] = waiting.get(name, 0.0) + more
        return ModelledStep(max(now, link_free), compute, waiting)

    def _part(self, computation: Computation, instruction: Instruction) -> ModelledStep:
        if instruction.opcode not in ("while", "call", "conditional"):
            seconds = work_seconds(self._counter.of(computation, instruction), self._speeds)
            return ModelledStep(seconds, seconds, {})
        known = trip_count(instruction) if instruction.opcode == "while" else 1
        trips = self._trips if known is None else known
        parts = [self.run(name) for name in called_computations(instruction)]
        waiting: dict[str, float] = {}
        for part in parts:
            for name, more in part.waiting_s.items():
                waiting[name] = waiting.get(name, 0.0) + trips * more
        return ModelledStep(
            trips * sum(p.total_s for p in parts), trips * sum(p.compute_s for p in parts), waiting
        )
