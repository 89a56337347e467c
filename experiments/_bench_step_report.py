"""The step benchmark: what is timed in which order, the cost model fitted to it, and the report."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments._bench_batches import MEAN_TEXT, SCALE, mean, scaled_joint, uniform_index
from experiments._bench_report import Section, Times, markdown_table, paragraph
from experiments._bench_step import (
    BLOCK,
    NUM_DEVICES,
    NUM_HEADS,
    PLAN_COST,
    WIDTH,
    Stopwatch,
    Variant,
    make_program,
)
from experiments.data import StepIndex
from jaxdit.training import TrainProgram
from solver import CostModel

_LOG = logging.getLogger(__name__)

BAGS = (None, "g1n8", "g2n4", "g4n2", "g8n1")
TARGET = 0.85
# Sequences per device and their length, in a program of as many tokens: multiples of the block, so that the attention
# they list is the attention they run.
_FIT_SHAPES = (((12, 256), (6, 512), (4, 768)), ((6, 256), (3, 512), (2, 768)))


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much is measured.

    Attributes:
        blocks: double-stream and single-stream blocks.
        batches: recorded steps used.
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
        lending: the same with attention as it falls, in fewer rounds.
        fixed: seconds of a step of one token a sequence.
        uniform: seconds of each batch of each program of the fit, in every third round.
    """

    waiting: dict[str, list[float]]
    lending: dict[str, list[float]]
    fixed: Times
    uniform: list[list[list[float]]]


def bench_step(*, quick: bool) -> Section:
    """Measure and report."""
    sizes = (
        StepSizes((1, 0), batches=1, rounds=3, lending_rounds=1, scale=8 * SCALE) if quick else StepSizes()
    )
    bags = (None, "g8n1") if quick else BAGS
    program = make_program(*sizes.blocks)
    watch = Stopwatch.start(program)
    indices = [scaled_joint(step, sizes.scale) for step in range(sizes.batches)]
    variants = {spec: Variant(program, spec, indices) for spec in bags}
    sequences = indices[0].num_sequences // NUM_DEVICES
    tiny = Variant(program, None, [uniform_index(1, sequences, num_devices=NUM_DEVICES)])
    uniform = _fit_variants(program, sizes.scale)
    for variant in (*variants.values(), tiny, *uniform):
        watch.compile(variant)
    measured = _measure(watch, list(variants.values()), (tiny, uniform), sizes)
    fit = _fit(uniform, measured)
    rows = [_row(variants[None], variant, measured, fit) for variant in variants.values()]
    figures = {
        "variants": rows,
        "gamma_fitted": fit.cost.gamma,
        "fixed_s": measured.fixed.middle,
        "fixed_fitted_s": fit.fixed_s,
        "largest_residual": fit.largest_residual,
        "blocks": sizes.blocks,
        "target": TARGET,
    }
    return Section("step", "Training step, balanced and not", _body(figures, sizes, indices[0]), figures)


def _measure(
    watch: Stopwatch, variants: list[Variant], models: tuple[Variant, list[Variant]], sizes: StepSizes
) -> Measured:
    """All in turn in every round, so that other load on the machine meets all alike."""
    waiting: dict[str, list[float]] = {variant.name: [] for variant in variants}
    lending: dict[str, list[float]] = {variant.name: [] for variant in variants}
    tiny, uniform = models
    fixed: list[float] = []
    seconds: list[list[list[float]]] = [[[] for _ in variant.indices] for variant in uniform]
    for r in range(sizes.rounds):
        for variant in _rotated(variants, r):
            batch = r % sizes.batches
            waiting[variant.name].append(watch.run(variant, variant.waiting[batch]))
            if r < sizes.lending_rounds:
                lending[variant.name].append(watch.run(variant, variant.lending[batch]))
        fixed.append(watch.run(tiny, tiny.lending[0]))
        for variant, samples in zip(uniform, seconds, strict=True):
            batch = r % len(samples)
            samples[batch].append(watch.run(variant, variant.lending[batch]))
        _LOG.info("round %d of %d: %s", r + 1, sizes.rounds, {k: round(v[-1], 2) for k, v in waiting.items()})
    return Measured(waiting, lending, Times(tuple(fixed)), seconds)


def _rotated(items: list[Variant], by: int) -> list[Variant]:
    by %= len(items)
    return items[by:] + items[:by]


def _fit_variants(program: TrainProgram, scale: int) -> list[Variant]:
    """Programs for uniform batches, which keep all devices equally busy."""
    variants = []
    for shapes in _FIT_SHAPES:
        indices = [
            uniform_index(length * SCALE // scale, count, num_devices=NUM_DEVICES) for count, length in shapes
        ]
        variants.append(Variant(program, None, indices))
    return variants


def _fit(variants: list[Variant], measured: Measured) -> Fit:
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


def _row(base: Variant, variant: Variant, measured: Measured, fit: Fit) -> dict[str, Any]:
    """A variant's figures; speed-ups are medians over rounds of the ratio on one batch."""
    own, none = measured.waiting[variant.name], measured.waiting[base.name]
    fixed = measured.fixed.middle
    batches = range(len(variant.plans))
    return {
        "bags": variant.name,
        "step_s": own,
        "speed_up": _median_ratio(none, own),
        "speed_up_of_minima": min(none) / min(own),
        "speed_up_without_fixed": _median_ratio([t - fixed for t in none], [t - fixed for t in own]),
        "lending_s": measured.lending[variant.name],
        "speed_up_lending": _median_ratio(measured.lending[base.name], measured.lending[variant.name]),
        "static_step_cost": mean([plan.static_step_cost for plan in variant.plans]),
        "predicted": _predicted(base, variant, PLAN_COST),
        "predicted_fitted": _predicted(base, variant, fit.cost),
        "tokens": max(int(plan.tokens.max()) for plan in variant.plans),
        "tokens_of_program": variant.tokens,
        "linear_s": float(fit.cost.linear(variant.tokens)),
        "attention_s": mean([variant.most_attention_s(fit.cost, batch) for batch in batches]),
        "rows_sent_fraction": mean([plan.rows_sent_fraction for plan in variant.plans]),
    }


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return float(np.median(np.array(above) / np.array(below)))


def _predicted(base: Variant, variant: Variant, cost: CostModel) -> float:
    batches = range(len(base.plans))
    return sum(base.static_cost_s(cost, b) for b in batches) / sum(
        variant.static_cost_s(cost, b) for b in batches
    )


def _body(figures: dict[str, Any], sizes: StepSizes, index: StepIndex) -> str:
    rows = figures["variants"]
    parts = [
        paragraph(_claim(rows[1:])),
        _speed_up_table(rows),
        "\n".join(paragraph(text, bullet=True) for text in _notes(figures, sizes)),
        "Where the time of a step goes, by the fitted cost model, seconds on this machine:",
        _time_table(rows, figures["fixed_s"]),
        paragraph(
            f"""The rest is the exchange of rows, what sequences shorter than a block of {BLOCK} rows
            waste, and what the model misses."""
        ),
        paragraph(
            f"""MMDiT of width {WIDTH}, {NUM_HEADS} heads, {sizes.blocks[0]} double-stream and
            {sizes.blocks[1]} single-stream blocks, float32, no rematerialisation, parameters replicated.
            The first {sizes.batches} recorded steps of the joint mix: 32 ranks, rank r at home on device
            r // 4, lengths divided by {sizes.scale} and rounded up ({index.num_sequences} sequences of
            {min(index.lengths)} to {max(index.lengths)} tokens, {int(index.lengths.sum()):,} in all;
            recorded lengths are totals, {MEAN_TEXT} tokens of each are taken as text). Every variant runs
            in a program of its own, sized for its batches as a run's is."""
        ),
    ]
    return "\n\n".join(parts)


def _claim(rows: list[dict[str, Any]]) -> str:
    """The least that any bag spec reaches, by each of the two predictions."""

    def least(speed_up: str, predicted: str) -> str:
        return f"{min(row[speed_up] / row[predicted] for row in rows):.0%}"

    falls, published = least("speed_up_lending", "predicted"), least("speed_up", "predicted")
    fitted = least("speed_up", "predicted_fitted")
    without_fixed = least("speed_up_without_fixed", "predicted_fitted")
    return f"""Balanced over not balanced, against what J predicts for the same batches (wanted: {TARGET:.0%}), least
    of all bag specs, with the published gamma: **{falls}** as the work falls, **{published}** where virtual devices
    wait for the fullest as devices of their own would. With the gamma fitted to this machine {fitted}, and
    {without_fixed} where the part of the step that balancing does not govern is taken off."""


def _notes(figures: dict[str, Any], sizes: StepSizes) -> list[str]:
    return [
        f"""*Speed-up*: median over {sizes.rounds} rounds of the ratio of two steps on one batch, all
        variants in turn in every round; in brackets, the ratio of minima. A step is forward, backward,
        sum of gradients, AdamW and EMA.""",
        f"""*J predicts*: ratio of the static step costs (most tokens, plus most attention, of any
        device). gamma, what a FLOP of attention costs relative to one of a linear layer, is 0.4
        (published for H100; also what the plans are made with) or {figures["gamma_fitted"]:.2f}, fitted
        to this machine and model: steps of equal sequences on all devices, as fixed + linear + attention,
        within {figures["largest_residual"]:.0%}.""",
        f"""*Without the fixed part*: the time of a step with one token a sequence,
        {figures["fixed_s"]:.2f} s here, taken off both: gradients, their sum and the optimiser on
        parameters replicated over {NUM_DEVICES} devices of one machine, and what is computed per
        sequence. Balancing has no part in it, and J does not price it.""",
        """*Devices that wait*: a device of its own waits for the fullest; virtual devices share the
        cores, so one without work lends its share. Padded linear layers leave nothing to lend, but
        attention loops over the block pairs that exist. For the table above every device therefore visits
        as many block pairs as the fullest (added ones are masked and change nothing), but for the
        column *as it falls*.""",
    ]


def _speed_up_table(rows: list[dict[str, Any]]) -> str:
    header = (
        "bags",
        "as it falls",
        "speed-up",
        "J predicts, gamma 0.4",
        "reached",
        "J predicts, gamma fitted",
        "reached",
        "without the fixed part",
        "of fitted J",
        "step, s: median (minimum)",
    )
    body = []
    for row in rows:
        fast, net = row["speed_up"], row["speed_up_without_fixed"]
        body.append(
            (
                row["bags"],
                f"{row['speed_up_lending']:.2f}",
                f"{fast:.2f} ({row['speed_up_of_minima']:.2f})",
                f"{row['predicted']:.2f}",
                f"{fast / row['predicted']:.0%}",
                f"{row['predicted_fitted']:.2f}",
                f"{fast / row['predicted_fitted']:.0%}",
                f"{net:.2f}",
                f"{net / row['predicted_fitted']:.0%}",
                Times(tuple(row["step_s"])).text(),
            )
        )
    return markdown_table(header, body)


def _time_table(rows: list[dict[str, Any]], fixed_s: float) -> str:
    header = (
        "bags",
        "tokens of the fullest device",
        "of the program",
        "linear",
        "attention",
        "fixed",
        "rest",
        "rows sent",
    )
    body = []
    for row in rows:
        step_s = Times(tuple(row["step_s"])).middle
        rest = step_s - row["linear_s"] - row["attention_s"] - fixed_s
        body.append(
            (
                row["bags"],
                row["tokens"],
                row["tokens_of_program"],
                f"{row['linear_s']:.2f}",
                f"{row['attention_s']:.2f}",
                f"{fixed_s:.2f}",
                f"{rest:.2f}",
                f"{row['rows_sent_fraction']:.0%}",
            )
        )
    return markdown_table(header, body)
