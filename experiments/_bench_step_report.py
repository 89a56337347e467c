"""The step benchmark: what bags gain over no balancing, beside what J predicts; `_bench_auto` has what auto gains."""

from typing import Any

from experiments._bench_auto import auto_figures, auto_text
from experiments._bench_batches import MEAN_TEXT, SCALE, mean, scaled_joint, tail_step, uniform_index
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
from experiments._bench_step_measure import (
    Fit,
    Measured,
    StepSizes,
    fit_cost,
    fit_variants,
    measure,
    median_ratio,
)
from experiments.data import StepIndex
from solver import CostModel

BAGS = (None, "g1n8", "g2n4", "g4n2", "g8n1", "auto")
TARGET = 0.85


def bench_step(*, quick: bool) -> Section:
    """Measure and report."""
    sizes = (
        StepSizes((1, 0), batches=1, rounds=3, lending_rounds=1, scale=8 * SCALE) if quick else StepSizes()
    )
    bags = (None, "g8n1", "auto") if quick else BAGS
    program = make_program(*sizes.blocks)
    watch = Stopwatch.start(program)
    indices = [scaled_joint(step, sizes.scale) for step in range(sizes.batches)]
    tails = [tail_step(step, sizes.scale) for step in range(sizes.batches)]
    variants = [Variant(program, spec, indices) for spec in bags]
    of_tails = [Variant(program, spec, tails) for spec in bags]
    sequences = indices[0].num_sequences // NUM_DEVICES
    tiny = Variant(program, None, [uniform_index(1, sequences, num_devices=NUM_DEVICES)])
    uniform = fit_variants(program, sizes.scale)
    for variant in (*variants, *of_tails, tiny, *uniform):
        watch.compile(variant)
    measured = measure(watch, [*variants, *of_tails], (tiny, uniform), sizes)
    fit = fit_cost(uniform, measured)
    autos = {
        name: auto_figures(of_mix, measured, fit)
        for name, of_mix in (("joint", variants), ("tail", of_tails))
    }
    figures = {
        "variants": [_row(variants[0], variant, measured, fit) for variant in variants],
        "auto": autos,
        "gamma_fitted": fit.cost.gamma,
        "fixed_s": measured.fixed.middle,
        "fixed_fitted_s": fit.fixed_s,
        "largest_residual": fit.largest_residual,
        "blocks": sizes.blocks,
        "target": TARGET,
    }
    body = f"{_body(figures, sizes, indices[0])}\n\n{auto_text(autos, tails)}"
    return Section("step", "Training step, balanced and not", body, figures)


def _row(base: Variant, variant: Variant, measured: Measured, fit: Fit) -> dict[str, Any]:
    """A variant's figures; speed-ups are medians over rounds of the ratio on one batch."""
    own, none = measured.waiting[variant], measured.waiting[base]
    fixed = measured.fixed.middle
    batches = range(len(variant.plans))
    return {
        "bags": variant.name,
        "step_s": own,
        "speed_up": median_ratio(none, own),
        "speed_up_of_minima": min(none) / min(own),
        "speed_up_without_fixed": median_ratio([t - fixed for t in none], [t - fixed for t in own]),
        "lending_s": measured.lending[variant],
        "speed_up_lending": median_ratio(measured.lending[base], measured.lending[variant]),
        "static_step_cost": mean([plan.static_step_cost for plan in variant.plans]),
        "predicted": _predicted(base, variant, PLAN_COST),
        "predicted_fitted": _predicted(base, variant, fit.cost),
        "tokens": max(int(plan.tokens.max()) for plan in variant.plans),
        "tokens_of_program": variant.tokens,
        "linear_s": float(fit.cost.linear(variant.tokens)),
        "attention_s": mean([variant.most_attention_s(fit.cost, batch) for batch in batches]),
        "rows_sent_fraction": mean([plan.rows_sent_fraction for plan in variant.plans]),
    }


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
