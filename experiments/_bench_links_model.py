"""What bytes and the planner's model say of the programs of `bench_links`, and whether measured times rank alike."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from experiments._bench_links_measure import Machines
from experiments._bench_links_variants import Sizes, Variant
from experiments._bench_report import Times
from solver import Link, SequenceHardware, SequenceShape, layer_timeline

# Between processes of this computer: loopback of a few processes at a time, and a gloo call's meeting.
_MEMORY_BYTES_PER_S = 2e9
_CALL_S = 1e-3
# Predictions closer than this are equal.
_EQUAL = 1.01


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A pair that is measured the other way round than predicted, by more than the noise.

    Attributes:
        faster, slower: by prediction.
        predicted, measured: the slower one's number over the faster one's, of predictions and of medians.
    """

    faster: str
    slower: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of a predicted order with the measured one.

    Predictions within 1 % are equal; measured times are if their samples overlap, which is what noise means here.

    Attributes:
        tau: Kendall's tau-b: 1 if all pairs agree, -1 if none does; pairs that are equal on one side only count
            against either. NaN if all are equal on a side.
        ordered: pairs that neither side takes for equal.
        disagreeing: those of them that are measured the other way round.
        regret: the median of what is predicted to be fastest, over the least median.
    """

    tau: float
    ordered: int
    disagreeing: tuple[Disagreement, ...]
    regret: float


def agreement(predicted: Mapping[str, float], measured: Mapping[str, Times]) -> Agreement:
    """Compare the order of the same names by predictions and by measured times."""
    signs, disagreeing = [], []
    for pair in combinations(predicted, 2):
        fast, slow = sorted(pair, key=predicted.__getitem__)
        ratio = predicted[slow] / predicted[fast]
        expected, found = int(ratio > _EQUAL), _order(measured[fast], measured[slow])
        signs.append((expected, found))
        if expected and found < 0:
            medians = measured[slow].middle / measured[fast].middle
            disagreeing.append(Disagreement(fast, slow, ratio, medians))
    # Sums over pairs; each factor leaves out what is equal on its side.
    norm = math.sqrt(sum(x * x for x, _ in signs) * sum(y * y for _, y in signs))
    first = min(predicted, key=predicted.__getitem__)
    return Agreement(
        tau=sum(x * y for x, y in signs) / norm if norm else math.nan,
        ordered=sum(bool(x and y) for x, y in signs),
        disagreeing=tuple(disagreeing),
        regret=measured[first].middle / min(times.middle for times in measured.values()),
    )


def _order(a: Times, b: Times) -> int:
    """1 if all samples of `a` are less than those of `b`, -1 if more, else 0."""
    return (max(a.samples) < min(b.samples)) - (max(b.samples) < min(a.samples))


def emulated_hardware(machines: Machines, sizes: Sizes, rate_mbit: float) -> SequenceHardware:
    """The emulated machines for the planner: links of a known rate, two-sided; compute as measured apart.

    XLA on CPU runs collectives and compute in turn, so ring steps do not hide; the planner still hides Torus' pulls.
    """
    devices = machines.topology.devices_per_machine
    flops_per_s = sizes.attention_flops / machines.topology.num_devices / machines.compute_s
    across = rate_mbit * 1e6 / 8
    return SequenceHardware(
        flops_per_s=flops_per_s,
        linear=1.0,
        attention=1.0,
        attention_half_dim=0.0,
        processors=1,
        communication_processors=0,
        memory_bytes_per_s=_MEMORY_BYTES_PER_S,
        inside=Link(_MEMORY_BYTES_PER_S, 1, 1.0, 1.0, 1.0, _CALL_S, _CALL_S, 0.0),
        across=Link(across, devices, 1.0, 1.0, 1.0, _CALL_S, _CALL_S, 0.0),
        tile_rows=1,
        one_sided=False,
        ring_overlaps=False,
        element_bytes=4,
    )


def modelled_seconds(
    variant: Variant, machines: Machines, sizes: Sizes, rate_mbit: float, *, in_turn: bool = False
) -> float:
    """Of the attention of a layer and its transfers, forward: what is between the layer's linear parts.

    Args:
        variant: the algorithm.
        machines: where, with the time of their compute.
        sizes: of the attention.
        rate_mbit: of a link.
        in_turn: everything that the planner lists, one after another: nothing is hidden, as on CPU.
    """
    shape = SequenceShape(sizes.num_heads, sizes.head_dim, sizes.seq_len, sizes.batch)
    events = layer_timeline(
        machines.topology,
        shape,
        variant.mesh,
        emulated_hardware(machines, sizes, rate_mbit),
        head_groups=None if variant.is_torus else 1,
    )
    if in_turn:
        return sum(event.stop_s - event.start_s for event in events[1:-1])
    return events[-1].start_s - events[0].stop_s


def transfer_seconds(num_bytes: float, rate_mbit: float) -> float:
    """Bytes of a machine over the rate of its link."""
    return num_bytes * 8 / (rate_mbit * 1e6)
