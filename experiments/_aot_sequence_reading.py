"""What a compiled case of sequence-parallel attention moves and hides, and what of that is not as it should be."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from experiments._aot_gpus import Gpu
from experiments._aot_sequence import MACHINES, TORUS, USP, VIDEO_EVEN, Case, CompiledCase
from experiments.hlo import (
    Collective,
    Traffic,
    WorkCounter,
    attention_rules,
    count_executions,
    find_collectives,
    parse_module,
)
from experiments.hlo._cost import FlopRule
from experiments.hlo._text import Computation, Instruction
from solver import H100_MACHINE

# Kinds that move rows; the others gather segment ids, or gather and add what belongs to a whole text.
_OF_ROWS = ("all-to-all", "collective-permute", "ragged-all-to-all", "collective-broadcast")


def _cudnn_forward(computation: Computation, instruction: Instruction) -> float:
    """Two products of queries (b, l, h, d) and keys."""
    queries, keys = (shapes[0] for shapes in computation.operand_shapes(instruction)[:2])
    return 4.0 * queries.size * keys.dims[1]


def _cudnn_backward(computation: Computation, instruction: Instruction) -> float:
    return 2.5 * _cudnn_forward(computation, instruction)


_CUDNN: Mapping[str, FlopRule] = {
    "__cudnn$fmhaSoftmax": _cudnn_forward,
    "__cudnn$fmhaSoftmaxBackward": _cudnn_backward,
}


@dataclass(frozen=True, slots=True)
class Reading:
    """A compiled case, read.

    Attributes:
        case, transfers_under_way, temp_bytes: of the compiled case.
        transfers: collectives that move rows.
        aside: all others.
        covered: of the modelled time of transfers between machines the part that has attention under it; 1 if none.
    """

    case: Case
    transfers_under_way: int
    temp_bytes: int
    transfers: tuple[Collective, ...]
    aside: tuple[Collective, ...]
    covered: float

    @property
    def across(self) -> list[Collective]:
        """Transfers between machines."""
        return [c for c in self.transfers if c.traffic.across]

    @property
    def inside(self) -> list[Collective]:
        """Transfers that stay inside machines."""
        return [c for c in self.transfers if not c.traffic.across]

    @property
    def sent(self) -> Traffic:
        """Bytes of rows that a device sends, mean over devices."""
        runs = [(c.executions, c.traffic) for c in self.transfers]
        return Traffic(sum(n * t.inside for n, t in runs), sum(n * t.across for n, t in runs))

    @property
    def wanted(self) -> Traffic:
        """The same by formula."""
        return self.case.rows.traffic

    @property
    def tensor_bytes(self) -> float:
        """Of one of a device's q, k, v and o."""
        return self.case.rows.tensor_bytes


def runs(collectives: Iterable[Collective], *, hidden: bool | None = None) -> int:
    """How often they run, of those that are hidden under attention or not if that is given."""
    return round(sum(c.executions for c in collectives if hidden is None or is_hidden(c) == hidden))


def is_hidden(collective: Collective) -> bool:
    """Whether attention is scheduled between start and end; kernels of another kind do not count."""
    return collective.is_matched and collective.under.total_flops > 0


def read_case(compiled: CompiledCase, gpu: Gpu) -> Reading:
    """Read a compiled case."""
    case = compiled.case
    module = parse_module(compiled.text)
    degrees = case.degrees
    keys = case.padded_length / degrees.num_devices
    keys *= degrees.ulysses_inside if case.algorithm == TORUS else degrees.ulysses_degree
    counter = WorkCounter(module, rules={**_CUDNN, **attention_rules(keys)})
    found = find_collectives(module, count_executions(module), counter, per_machine=case.machines.gpus)
    transfers = tuple(c for c in found if c.kind in _OF_ROWS)
    aside = tuple(c for c in found if c.kind not in _OF_ROWS)
    under_way = compiled.transfers_under_way
    return Reading(case, under_way, compiled.temp_bytes, transfers, aside, _covered(transfers, case, gpu))


def _covered(transfers: Iterable[Collective], case: Case, gpu: Gpu) -> float:
    """Modelled, nothing of it measured: links as their makers state them, attention as the planner takes it."""
    dim, card = case.workload.head_dim, H100_MACHINE
    speed = card.flops_per_s * card.attention * dim / (dim + card.attention_half_dim)
    needed = hidden = 0.0
    for c in transfers:
        if not c.traffic.across:
            continue
        # A permute's edge across machines carries the whole operand, however few edges cross.
        size = c.num_bytes if c.kind == "collective-permute" else c.traffic.across
        seconds = size / gpu.network
        needed += c.executions * seconds
        hidden += c.executions * min(seconds, c.under.total_flops / speed)
    return hidden / needed if needed else 1.0


# With one transfer under way the compiler gives the attention of Torus' first pull of cotangents to a step of the ring
# of two inside machines. Found by this check, and not as it should be.
_KNOWN_EXPOSED = {Case(TORUS, MACHINES[-1], VIDEO_EVEN, gradient=True): 1}


def allowed_exposed(reading: Reading) -> int:
    """Transfers between machines that the algorithm leaves exposed.

    Ulysses waits for its first exchange, and after attention for its last; uncut these are all it has. Where Ulysses
    stays inside machines, and in Torus, none.
    """
    if reading.transfers_under_way == 1 and reading.case in _KNOWN_EXPOSED:
        return _KNOWN_EXPOSED[reading.case]
    if reading.case.algorithm == TORUS or reading.case.degrees.ulysses_across == 1:
        return 0
    return 4 if reading.case.gradient else 2


def problems(reading: Reading, usp: Reading | None) -> list[str]:
    """What is not as it should be, in words; `usp` is the same case by USP, for Torus."""
    checks = (_exposed, _exposed_rings, _bytes, _gathers)
    found = [text for check in checks for text in check(reading)]
    if usp is not None and reading.temp_bytes > usp.temp_bytes + 4 * usp.tensor_bytes:
        found.append(
            f"temporaries are at most USP's and one buffer of each of q, k, v, o; got {reading.temp_bytes}, USP"
            f" {usp.temp_bytes}, a buffer {usp.tensor_bytes:.0f} bytes"
        )
    return [f"{reading.case.title}: {text}" for text in found]


def _exposed(reading: Reading) -> Iterable[str]:
    exposed, allowed = runs(reading.across, hidden=False), allowed_exposed(reading)
    if exposed != allowed:
        names = ", ".join(c.name for c in reading.across if not is_hidden(c))
        yield f"{allowed} transfers between machines are exposed; got {exposed}: {names}"


def _exposed_rings(reading: Reading) -> Iterable[str]:
    """Torus rings inside machines may be: one transfer at a time is hidden, and those across machines come first."""
    names = [c.name for c in reading.transfers if c.kind == "collective-permute" and not is_hidden(c)]
    if names and reading.case.algorithm != TORUS:
        yield f"every step of a ring runs under attention; got {', '.join(names)} exposed"


def _bytes(reading: Reading) -> Iterable[str]:
    sent, wanted = reading.sent, reading.wanted
    if abs(sent.inside - wanted.inside) > 0.5 or abs(sent.across - wanted.across) > 0.5:
        yield (
            f"a device sends {wanted.inside:.0f} bytes inside and {wanted.across:.0f} across machines by the formula;"
            f" got {sent.inside:.0f} and {sent.across:.0f}"
        )


def _gathers(reading: Reading) -> Iterable[str]:
    work = reading.case.workload
    ids = 4 * reading.case.padded_length if reading.case.has_ids else 0
    text = work.text * work.num_heads * work.head_dim * 2
    for c in reading.aside:
        if c.kind == "all-gather" and c.num_bytes > max(ids, text):
            yield f"nothing but segment ids and text is gathered; got {c.name}, {c.num_bytes} bytes"


def usp_of(readings: Iterable[Reading], reading: Reading) -> Reading | None:
    """Of a Torus case the USP case to compare with, None for others."""
    if reading.case.algorithm != TORUS:
        return None
    want = (USP, reading.case.machines, reading.case.workload, reading.case.gradient)
    cases = ((r, (r.case.algorithm, r.case.machines, r.case.workload, r.case.gradient)) for r in readings)
    return next((r for r, key in cases if key == want), None)
