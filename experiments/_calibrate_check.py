"""Predicted against measured time of random batches."""

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiments._bench_report import markdown_table
from experiments._calibrate_fit import Work
from experiments._calibrate_program import Case
from experiments._calibration import Calibration
from solver import BalancePlan, Links


@dataclass(frozen=True, slots=True)
class Checked:
    """A batch, in seconds of a step of all blocks, forward and backward.

    Attributes:
        bags: of its plan.
        sequences, tokens, longest: of the batch.
        program_tokens: rows of a device in its program, padding included.
        measured_s: median of all rounds.
        samples_s: every round.
        predicted_s: by the calibrated cost model and links from the program's rows, the attention of the fullest device
            and what it sends.
        planned_s: the same from the plan alone, as the planner compares plans: no padding of programs or blocks.
        work: of a block.
    """

    bags: str | None
    sequences: int
    tokens: int
    longest: int
    program_tokens: int
    measured_s: float
    samples_s: tuple[float, ...]
    predicted_s: float
    planned_s: float
    work: Work

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measured time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def planned_error(self) -> float:
        """Of the prediction from the plan alone."""
        return self.planned_s / self.measured_s - 1


def check_cases(calibration: Calibration, cases: Sequence[Case], default: Links) -> list[Checked]:
    """Predictions beside what was measured.

    Args:
        calibration: what predicts.
        cases: timed batches.
        default: speeds of what the calibration has not measured.
    """
    return [_checked(calibration, case, default) for case in cases]


def _checked(calibration: Calibration, case: Case, default: Links) -> Checked:
    index, sizes, blocks = case.index, case.sizes, case.bench.shape.num_blocks
    return Checked(
        bags=case.bags,
        sequences=index.num_sequences,
        tokens=int(index.lengths.sum()),
        longest=int(index.lengths.max()),
        program_tokens=sizes.text + sizes.image,
        measured_s=case.middle * blocks,
        samples_s=tuple(s * blocks for s in case.seconds),
        predicted_s=calibration.terms.seconds(case.work) * blocks,
        planned_s=planned_seconds(calibration, case.layout.plan, default) * blocks,
        work=case.work,
    )


def planned_seconds(calibration: Calibration, plan: BalancePlan, default: Links) -> float:
    """Seconds of a block by the plan alone: the launch, and `solver.Links.step_seconds` with the calibrated speeds."""
    cost = calibration.cost_model(plan.cost.width)
    unit = float(cost.attention(1.0)) / float(plan.cost.attention(1.0))
    priced = dataclasses.replace(plan, cost=cost, attention_work=plan.attention_work * unit)
    return calibration.terms.launch_s + calibration.links(default).step_seconds(priced).exposed


def check_figures(checked: Sequence[Checked]) -> dict[str, Any]:
    """The check as JSON values."""
    return {
        "mean_absolute_error": mean_absolute([c.error for c in checked]),
        "largest_absolute_error": max(abs(c.error) for c in checked),
        "mean_absolute_error_of_plans": mean_absolute([c.planned_error for c in checked]),
        "batches": [{**asdict(c), "work": c.work._asdict(), "error": c.error} for c in checked],
    }


def mean_absolute(errors: Sequence[float]) -> float:
    """Mean absolute value."""
    return float(np.mean(np.abs(errors)))


def check_table(checked: Sequence[Checked]) -> str:
    """Every batch as a row of markdown."""
    header = (
        "batch",
        "bags",
        "sequences",
        "tokens",
        "longest",
        "rows of a device",
        "measured, ms",
        "predicted, ms",
        "error",
        "by the plan alone, ms",
        "error",
    )
    rows = [
        (
            i,
            c.bags or "none",
            c.sequences,
            c.tokens,
            c.longest,
            c.program_tokens,
            f"{c.measured_s * 1e3:.1f}",
            f"{c.predicted_s * 1e3:.1f}",
            f"{c.error:+.1%}",
            f"{c.planned_s * 1e3:.1f}",
            f"{c.planned_error:+.1%}",
        )
        for i, c in enumerate(checked)
    ]
    return markdown_table(header, rows)
