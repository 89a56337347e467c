"""The step benchmark: what is timed in which order, and the cost model fitted to it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments._bench_batches import SCALE, uniform_index
from experiments._bench_report import Times
from experiments._bench_step import NUM_DEVICES, WIDTH, Stopwatch, Variant
from jaxdit.training import TrainProgram
from solver import CostModel

_LOG = logging.getLogger(__name__)

# Sequences per device and their length, in a program of as many tokens: multiples of the block, so that the attention
# they list is the attention they run.
_FIT_SHAPES = (((12, 256), (6, 512), (4, 768)), ((6, 256), (3, 512), (2, 768)))


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much is measured.

    Attributes:
        blocks: double-stream and single-stream blocks.
        batches: steps of each mix.
        rounds: rounds of all variants, each on one batch; at least one a batch.
        lending_rounds: rounds that also run batches with lending devices.
        scale: by which lengths are divided.
    """

    blocks: tuple[int, int] = (1, 1)
    batches: int = 3
    rounds: int = 9
    lending_rounds: int = 3
    scale: int = SCALE


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of a step: fixed + linear layers + attention, by least squares.

    Attributes:
        cost: seconds of all blocks, forward and backward, per token and attention on each of the devices.
        fixed_s: seconds whatever the tokens.
        largest_residual: relative, over the points.
    """

    cost: CostModel
    fixed_s: float
    largest_residual: float


@dataclass(frozen=True)
class Measured:
    """All samples.

    Attributes:
        waiting: seconds of each variant's step in each round, every device with the fullest one's attention.
        cpu: seconds of all threads in those steps.
        lending: seconds with attention as it falls, in fewer rounds.
        fixed: seconds of a step of one token a sequence.
        uniform: seconds of each batch of each program of the fit, in every third round.
    """

    waiting: dict[Variant, list[float]]
    cpu: dict[Variant, list[float]]
    lending: dict[Variant, list[float]]
    fixed: Times
    uniform: list[list[list[float]]]


def measure(
    watch: Stopwatch, variants: list[Variant], models: tuple[Variant, list[Variant]], sizes: StepSizes
) -> Measured:
    """All in turn in every round, so that other load on the machine meets all alike."""
    waiting: dict[Variant, list[float]] = {variant: [] for variant in variants}
    cpu: dict[Variant, list[float]] = {variant: [] for variant in variants}
    lending: dict[Variant, list[float]] = {variant: [] for variant in variants}
    tiny, uniform = models
    fixed: list[float] = []
    seconds: list[list[list[float]]] = [[[] for _ in variant.indices] for variant in uniform]
    for r in range(sizes.rounds):
        for variant in _rotated(variants, r):
            batch = r % sizes.batches
            found = watch.run(variant, variant.waiting[batch])
            waiting[variant].append(found.wall)
            cpu[variant].append(found.cpu)
            if r < sizes.lending_rounds:
                lending[variant].append(watch.run(variant, variant.lending[batch]).wall)
        fixed.append(watch.run(tiny, tiny.lending[0]).wall)
        for variant, samples in zip(uniform, seconds, strict=True):
            batch = r % len(samples)
            samples[batch].append(watch.run(variant, variant.lending[batch]).wall)
        last = ", ".join(f"{variant.name} {samples[-1]:.2f}" for variant, samples in waiting.items())
        _LOG.info("round %d of %d, seconds: %s", r + 1, sizes.rounds, last)
    return Measured(waiting, cpu, lending, Times(tuple(fixed)), seconds)


def _rotated(items: list[Variant], by: int) -> list[Variant]:
    by %= len(items)
    return items[by:] + items[:by]


def fit_variants(program: TrainProgram, scale: int) -> list[Variant]:
    """Programs for uniform batches, which keep all devices equally busy."""
    variants = []
    for shapes in _FIT_SHAPES:
        indices = [
            uniform_index(length * SCALE // scale, count, num_devices=NUM_DEVICES) for count, length in shapes
        ]
        variants.append(Variant(program, None, indices))
    return variants


def fit_cost(variants: list[Variant], measured: Measured) -> Fit:
    """Fit the cost model to steps of uniform batches and to the fixed part."""
    points, seconds = [(1.0, 0.0, 0.0)], [measured.fixed.middle]
    for variant, of_batches in zip(variants, measured.uniform, strict=True):
        for index, samples in zip(variant.indices, of_batches, strict=True):
            squares = float(np.sum(index.lengths.astype(float) ** 2)) / NUM_DEVICES
            points.append((1.0, 24.0 * WIDTH**2 * variant.tokens, 4.0 * WIDTH * squares))
            seconds.append(float(np.median(samples)))
    # Relative errors count alike.
    matrix = np.array(points) / np.array(seconds)[:, None]
    solution = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
    intercept, linear, attention = (float(x) for x in solution)
    residual = float(np.abs(matrix @ solution - 1.0).max())
    return Fit(CostModel(WIDTH, max(attention / linear, 0.0), linear), intercept, residual)


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of the ratio of two variants' steps on one batch."""
    return float(np.median(np.array(above) / np.array(below)))
