"""Whether measured times of `bench_links` rank as predicted, and what topology-aware placement gains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from experiments._bench_links_measure import Machines, Measured
from experiments._bench_links_model import all_modelled, transfer_seconds
from experiments._bench_links_variants import DIRECTIONS, Sizes
from experiments._bench_report import Times

# Bytes over the rate; the planner's latency; its events one after another.
PREDICTIONS = ("bytes", "planner", "planner in turn")
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
            against either. None if all are equal on a side.
        ordered: pairs that neither side takes for equal.
        disagreeing: those of them that are measured the other way round.
        regret: the median of what is predicted to be fastest, the slowest of equals, over the least median.
    """

    tau: float | None
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
    least = min(predicted.values())
    first = [measured[name].middle for name, number in predicted.items() if number <= _EQUAL * least]
    return Agreement(
        tau=sum(x * y for x, y in signs) / norm if norm else None,
        ordered=sum(bool(x and y) for x, y in signs),
        disagreeing=tuple(disagreeing),
        regret=max(first) / min(times.middle for times in measured.values()),
    )


def _order(a: Times, b: Times) -> int:
    """1 if all samples of `a` are less than those of `b`, -1 if more, else 0."""
    return (max(a.samples) < min(b.samples)) - (max(b.samples) < min(a.samples))


@dataclass(frozen=True, slots=True)
class Ranking:
    """Agreement of orders on some machines at a rate.

    Attributes:
        agreements: by the name of the prediction, one of `PREDICTIONS`; the planner has none but forward.
    """

    name: str
    direction: str
    rate_mbit: float
    agreements: dict[str, Agreement]


@dataclass(frozen=True, slots=True)
class Gain:
    """USP's time over that of topology-aware placement.

    Attributes:
        measured: of medians.
        order: 1 if that is above 1 by more than the noise, -1 if below, else 0.
        transfers: of medians less those without a limit; None where a limit adds nothing.
        by_bytes: of the formula's bytes.
        with_compute: of bytes over rate, and the time without a limit on top.
    """

    name: str
    direction: str
    rate_mbit: float
    measured: float
    order: int
    transfers: float | None
    by_bytes: float
    with_compute: float


def rankings(machines: Machines, sizes: Sizes) -> list[Ranking]:
    """Of both directions at every rate."""
    found = []
    for direction in DIRECTIONS:
        programs = machines.programs_of(direction)
        num_bytes = {name: one.formula_bytes for name, one in programs.items()}
        for rate in machines.rates:
            predicted = [num_bytes]
            if direction == DIRECTIONS[0]:
                predicted += [all_modelled(machines, sizes, rate, in_turn=turn) for turn in (False, True)]
            seconds = {name: one.limited[rate] for name, one in programs.items()}
            agreements = {
                name: agreement(numbers, seconds)
                for name, numbers in zip(PREDICTIONS, predicted, strict=False)
            }
            found.append(Ranking(machines.name, direction, rate, agreements))
    return found


def gains(machines: Machines) -> list[Gain]:
    """Of both directions at every rate; none where one device a machine leaves nothing to place."""
    found = []
    for direction in DIRECTIONS:
        programs = machines.programs_of(direction)
        if "usp" not in programs:
            continue
        usp, aware = programs["usp"], programs["topology_aware"]
        for rate in machines.rates:
            moved = [one.limited[rate].middle - one.unlimited.middle for one in (usp, aware)]
            summed = [_bytes_and_compute(one, rate) for one in (usp, aware)]
            gain = Gain(
                name=machines.name,
                direction=direction,
                rate_mbit=rate,
                measured=usp.limited[rate].middle / aware.limited[rate].middle,
                order=_order(aware.limited[rate], usp.limited[rate]),
                transfers=moved[0] / moved[1] if moved[1] > 0 else None,
                by_bytes=usp.formula_bytes / aware.formula_bytes,
                with_compute=summed[0] / summed[1],
            )
            found.append(gain)
    return found


def _bytes_and_compute(one: Measured, rate_mbit: float) -> float:
    """Seconds: bytes over rate, on top of the time without a limit."""
    return one.unlimited.middle + transfer_seconds(one.formula_bytes, rate_mbit)
