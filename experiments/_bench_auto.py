"""The step benchmark: `auto` beside no balancing and equal bags, on the joint mix and on a long tail."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments._bench_batches import mean
from experiments._bench_report import Times, markdown_table, paragraph
from experiments._bench_step import BLOCK, NUM_DEVICES, NUM_HEADS, PLAN_COST, Variant
from experiments._bench_step_measure import Fit, Measured, median_ratio
from experiments.data import StepIndex
from solver import CostModel

# What auto may be slower than the fastest of the others.
MOST_SLOWER = 0.02


def auto_figures(variants: Sequence[Variant], measured: Measured, fit: Fit) -> list[dict[str, Any]]:
    """Figures of the variants of one mix, of which the last is auto; every ratio is over auto."""
    auto = variants[-1]
    return [
        {
            "bags": variant.name,
            "step_s": measured.waiting[variant],
            "lending_s": measured.lending[variant],
            "tokens_per_s": _tokens_per_s(variant, measured.waiting[variant]),
            "over_auto": median_ratio(measured.waiting[variant], measured.waiting[auto]),
            "over_auto_quartiles": _quartiles(measured.waiting[variant], measured.waiting[auto]),
            "cpu_s": measured.cpu[variant],
            "over_auto_cpu": median_ratio(measured.cpu[variant], measured.cpu[auto]),
            "over_auto_cpu_quartiles": _quartiles(measured.cpu[variant], measured.cpu[auto]),
            "over_auto_of_minima": min(measured.waiting[variant]) / min(measured.waiting[auto]),
            "over_auto_lending": median_ratio(measured.lending[variant], measured.lending[auto]),
            "predicted": _predicted(variant, PLAN_COST) / _predicted(auto, PLAN_COST),
            "predicted_fitted": _step_s(variant, fit, blocks=False) / _step_s(auto, fit, blocks=False),
            "predicted_by_blocks": _step_s(variant, fit, blocks=True) / _step_s(auto, fit, blocks=True),
            "static_step_cost": mean([plan.static_step_cost for plan in variant.plans]),
            "rows_sent_fraction": mean([plan.rows_sent_fraction for plan in variant.plans]),
            "slots_fraction": _slots_fraction(variant),
            **_padding(variant, fit.cost),
            "programs": 1,  # `Variant` refuses a batch that its program does not hold
        }
        for variant in variants
    ]


def _tokens_per_s(variant: Variant, step_s: Sequence[float]) -> float:
    """Tokens without padding; samples take the batches in turn."""
    tokens = [int(index.lengths.sum()) for index in variant.indices]
    return float(np.median([tokens[r % len(tokens)] / s for r, s in enumerate(step_s)]))


def _quartiles(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [float(x) for x in np.quantile(np.array(above) / np.array(below), (0.25, 0.75))]


def _predicted(variant: Variant, cost: CostModel) -> float:
    return sum(variant.static_cost_s(cost, batch) for batch in range(len(variant.plans)))


def _step_s(variant: Variant, fit: Fit, *, blocks: bool) -> float:
    """Seconds of a step by the fitted model, the part that balancing does not govern included.

    Args:
        variant: the variant.
        fit: the model.
        blocks: whether to count what the program computes, whole blocks of attention and padded rows, instead of what
            the plan says.
    """
    found = []
    for batch, pairs in enumerate(variant.block_pairs):
        own = variant.static_cost_s(fit.cost, batch)
        if blocks:
            own = float(fit.cost.linear(variant.tokens)) + _blocks_s(int(pairs.max()), fit.cost)
        found.append(fit.fixed_s + own)
    return mean(found)


def _blocks_s(pairs: int, cost: CostModel) -> float:
    """Seconds of so many block pairs of one head."""
    return float(cost.attention(1.0)) * pairs * BLOCK**2 / NUM_HEADS


def _slots_fraction(variant: Variant) -> float:
    """Rows that the padded exchanges of q, k, v and o move, over all rows of those four."""
    keys, queries = variant.capacity.key_route, variant.capacity.query_route
    slots = 2 * sum(keys.rounds) + 2 * sum((queries or keys).rounds)
    tokens = mean([float(plan.tokens.mean()) for plan in variant.plans])
    return slots / (4 * tokens * NUM_HEADS)


def _padding(variant: Variant, cost: CostModel) -> dict[str, float]:
    """What the program computes over what the batch needs, and what of attention's is whole blocks."""
    linear, attention, blocks, both = [], [], [], []
    for plan, pairs in zip(variant.plans, variant.block_pairs, strict=True):
        work = float(np.sum(plan.lengths.astype(float) ** 2)) * NUM_HEADS
        linear.append(variant.tokens * NUM_DEVICES / int(plan.tokens.sum()))
        blocks.append(float(pairs.sum()) * BLOCK**2 / work)
        attention.append(float(pairs.max()) * NUM_DEVICES * BLOCK**2 / work)
        computed = float(cost.linear(variant.tokens)) + _blocks_s(int(pairs.max()), cost)
        both.append(computed * NUM_DEVICES / float(np.sum(cost.total(plan.lengths.astype(float)))))
    names = ("linear_over_useful", "attention_over_useful", "blocks_over_useful", "computed_over_useful")
    return dict(zip(names, map(mean, (linear, attention, blocks, both)), strict=True))


def auto_text(mixes: Mapping[str, list[dict[str, Any]]], tails: Sequence[StepIndex]) -> str:
    """The part of the report on auto."""
    lengths = np.concatenate([index.lengths for index in tails])
    notes = [
        """*Over auto*: step of the variant over the step of `auto` on the same batch, above 1 where auto is faster:
        median over rounds, quartiles in brackets; *CPU seconds* compares what all threads of the process took
        together, which other load on the machine disturbs less. *Computed* is what the program computes over what the
        batch needs, by the fitted model; *linear* of it rows of the token layout over tokens, *attention* block pairs
        of the fullest device over the work of the mean, *blocks* the part of that which is the rounding of sequences to
        whole blocks.""",
        """*J predicts*: ratio of static step costs, with gamma 0.4; *fitted* with this machine's gamma and the fixed
        part of the step; *blocks* counts the rows and block pairs that the programs compute.""",
        """*Rows sent*: (token, head) rows that change device, over all. *Moved* is what the padded exchange that
        CPUs need makes of it, q, k, v and o together; GPUs send the rows alone.""",
        f"""The tail: 8 sequences a device, lognormal of median 2,000 and sigma 1.2, clipped to 64 .. 65,536, divided
        by 32 ({min(lengths)} to {max(lengths)} tokens; {", ".join(f"{int(i.lengths.sum()):,}" for i in tails)} in a
        batch). `auto` compares its plans with the speeds of virtual devices, as a run on CPUs does. One program each:
        how many a run needs is in [Compilations](#compilations).""",
    ]
    parts = ["### `auto`", paragraph(" ".join(_claim(name, rows) for name, rows in mixes.items()))]
    for name, rows in mixes.items():
        parts += [f"{name.capitalize()}:", _times_table(rows), _padding_table(rows)]
    return "\n\n".join([*parts, "\n".join(paragraph(text, bullet=True) for text in notes)])


def _claim(name: str, rows: list[dict[str, Any]]) -> str:
    best = min(rows[:-1], key=lambda row: row["over_auto_cpu"])
    return f"""On {name}, `auto` takes **{1 / best["over_auto"]:.3f}** of a step of the fastest of the others,
    {best["bags"]}, and **{1 / best["over_auto_cpu"]:.3f}** of its CPU seconds (wanted: at most {1 + MOST_SLOWER:.2f}; J
    predicts {1 / best["predicted"]:.3f}, the fitted model {1 / best["predicted_fitted"]:.3f}, and with whole blocks and
    padded rows {1 / best["predicted_by_blocks"]:.3f})."""


def _times_table(rows: list[dict[str, Any]]) -> str:
    header = (
        "bags",
        "step, s: median (minimum)",
        "tokens/s",
        "over auto",
        "of minima",
        "CPU seconds",
        "as it falls",
        "J predicts",
        "fitted",
        "blocks",
    )
    body = []
    for row in rows:
        body.append(
            (
                row["bags"],
                Times(tuple(row["step_s"])).text(),
                f"{row['tokens_per_s']:,.0f}",
                _with_quartiles(row["over_auto"], row["over_auto_quartiles"]),
                f"{row['over_auto_of_minima']:.3f}",
                _with_quartiles(row["over_auto_cpu"], row["over_auto_cpu_quartiles"]),
                f"{row['over_auto_lending']:.3f}",
                f"{row['predicted']:.3f}",
                f"{row['predicted_fitted']:.3f}",
                f"{row['predicted_by_blocks']:.3f}",
            )
        )
    return markdown_table(header, body)


def _with_quartiles(ratio: float, quartiles: Sequence[float]) -> str:
    return f"{ratio:.3f} ({quartiles[0]:.2f} .. {quartiles[1]:.2f})"


def _padding_table(rows: list[dict[str, Any]]) -> str:
    header = ("bags", "J", "rows sent", "moved", "computed", "linear", "attention", "blocks")
    body = [
        (
            row["bags"],
            f"{row['static_step_cost']:.3f}",
            f"{row['rows_sent_fraction']:.0%}",
            f"{row['slots_fraction']:.0%}",
            f"{row['computed_over_useful']:.3f}",
            f"{row['linear_over_useful']:.3f}",
            f"{row['attention_over_useful']:.3f}",
            f"{row['blocks_over_useful']:.3f}",
        )
        for row in rows
    ]
    return markdown_table(header, body)
