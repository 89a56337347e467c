"""The batches that calibration times: sequences of one length, the same tokens in short sequences, and exchanges."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments._bench_batches import make_index
from experiments._calibrate_program import Bench, Case
from experiments._feed import size_capacity
from experiments.data import StepIndex
from solver import StepCapacity

_LOG = logging.getLogger(__name__)

# Sequences a device in the packed batches.
_PARTS = 8
_LEAST_CHECKED = 8
# Of the lengths of checked sequences, before they are clipped: median over the tokens of a device, and spread.
_MEDIAN_SHARE, _SPREAD = 1 / 6, 0.8
# Tokens a device of the checked programs, over the longest measured length.
_SHARES = (0.3, 0.6, 1.0, 0.8)


@dataclass(frozen=True)
class Cases:
    """Batches of a calibration; the devices of one have the same tokens and the same attention.

    Attributes:
        single: one sequence a device of each length, nothing exchanged.
        packed: the tokens of some of these as short sequences, in the same programs.
        exchanged: some of `single` with every sequence's heads dealt over all devices; none on one device.
    """

    single: list[Case]
    packed: list[Case]
    exchanged: list[Case]

    @property
    def all(self) -> list[Case]:
        """In the order in which they are compiled: packed ones run in programs of `single`."""
        return [*self.single, *self.packed, *self.exchanged]


def calibration_cases(bench: Bench, lengths: Sequence[int]) -> Cases:
    """The batches for sorted lengths, at least two."""
    devices = range(bench.num_devices)
    some = [lengths[len(lengths) // 2], lengths[-1]]
    single, packed, exchanged = [], [], []
    for length in lengths:
        text = min(bench.shape.text, length // 2)
        whole = make_index(0, [length] * len(devices), [text] * len(devices), devices, num_ranks=len(devices))
        case = Case(bench, whole, None)
        if length in some and length >= 2 * _PARTS:
            parts = _in_parts(length, text, bench.num_devices)
            needs = [bench.needs(index, None) for index in (whole, parts)]
            case = Case(bench, whole, None, needs[0].grown(needs[1]))
            packed.append(Case(bench, parts, None, case.capacity, shares=case))
        single.append(case)
        if length in some and bench.num_devices > 1:
            exchanged.append(Case(bench, whole, f"g{bench.num_devices}n1"))
    return Cases(single, packed, exchanged)


def _in_parts(length: int, text: int, num_devices: int) -> StepIndex:
    """The text and image tokens of a sequence on each device, cut evenly into several sequences."""

    def cut(tokens: int) -> np.ndarray:
        return np.diff(np.arange(_PARTS + 1) * tokens // _PARTS)

    texts = np.tile(cut(text), num_devices)
    totals = np.tile(cut(length - text), num_devices) + texts
    return make_index(0, totals, texts, np.repeat(np.arange(num_devices), _PARTS), num_ranks=num_devices)


def random_cases(bench: Bench, longest: int, num: int, *, seed: int = 0) -> list[Case]:
    """Random batches, dealt over programs that differ in bags and tokens, sized as a run's is.

    Lengths are log-normal, so that a device often has one long sequence among short ones; sequences start on the
    devices in turn.

    Args:
        bench: the blocks.
        longest: most tokens of a sequence.
        num: batches.
        seed: of the draws.
    """
    devices = bench.num_devices
    all_bags = (None, f"g1n{devices}", f"g{devices}n1", "auto") if devices > 1 else (None,) * 4
    cases: list[Case] = []
    for p, (bags, share) in enumerate(zip(all_bags, _SHARES, strict=True)):
        rng = np.random.default_rng([seed, p])
        tokens = max(int(share * longest), 2 * _LEAST_CHECKED)
        here = num // len(all_bags) + (p < num % len(all_bags))
        indices = [_random_index(bench, tokens, rng, step) for step in range(here)]
        if not indices:
            continue
        capacity: StepCapacity = size_capacity(bench.planner(bags), iter(indices))
        first = Case(bench, indices[0], bags, capacity)
        cases += [first, *(Case(bench, index, bags, capacity, shares=first) for index in indices[1:])]
    return cases


def _random_index(bench: Bench, tokens: int, rng: np.random.Generator, step: int) -> StepIndex:
    """Sequences of `tokens` a device in all."""
    left, lengths = tokens * bench.num_devices, []
    while left:
        drawn = int(np.clip(rng.lognormal(np.log(tokens * _MEDIAN_SHARE), _SPREAD), _LEAST_CHECKED, tokens))
        drawn = left if left - drawn < _LEAST_CHECKED else drawn
        lengths.append(drawn)
        left -= drawn
    total = np.array(lengths)
    home = np.arange(len(total)) % bench.num_devices
    text = np.minimum(bench.shape.text, total // 2)
    return make_index(step, total, text, home, num_ranks=bench.num_devices)


def time_in_turn(cases: Sequence[Case], *, repeats: int) -> None:
    """Compile all, then time all in turn in every round, so that other load on the machine meets all alike.

    Batches of one program follow each other, after a call that is not timed: in training a program runs again and
    again, and its first call after another's finds memory and caches as that left them.
    """
    groups: dict[int, list[Case]] = {}
    for i, case in enumerate(cases):
        _LOG.info("batch %d of %d: %s", i + 1, len(cases), "placed" if case.shares else "compiling")
        case.prepare()
        groups.setdefault(id(case.shares or case), []).append(case)
    for r in range(repeats):
        _LOG.info("round %d of %d", r + 1, repeats)
        for group in list(groups.values())[:: 1 if r % 2 else -1]:
            group[0].prepare()
            for case in group:
                case.time()
