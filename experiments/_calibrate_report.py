"""A calibration as markdown for people."""

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from experiments._bench_report import markdown_table, paragraph
from experiments._calibrate_cases import Cases
from experiments._calibrate_check import Checked, check_figures, check_table
from experiments._calibrate_fit import Quality
from experiments._calibrate_program import Bench
from experiments._calibration import BlockShape, Calibration


def report(bench: Bench, cases: Cases, calibration: Calibration, checked: Sequence[Checked]) -> str:
    """Measurements, fits and, where there is one, the check."""
    parts = [f"## Calibration: {blocks_text(bench.shape)}", _measured(bench, cases, calibration)]
    parts.append(_fits(calibration))
    if checked:
        parts.append(check_text(checked))
    return "\n\n".join(parts)


def check_text(checked: Sequence[Checked]) -> str:
    """The error of the predictions, and every batch."""
    figures = check_figures(checked)
    summary = paragraph(
        f"""Mean absolute error of the predicted step time over {len(checked)} random batches:
        **{figures["mean_absolute_error"]:.1%}** (largest {figures["largest_absolute_error"]:.1%}); by the plans alone,
        without what programs and blocks pad, {figures["mean_absolute_error_of_plans"]:.1%}."""
    )
    return f"{summary}\n\n{check_table(checked)}"


def blocks_text(shape: BlockShape) -> str:
    """What was measured."""
    return f"width {shape.width}, {shape.num_heads} heads, {shape.dtype}, blocks of {shape.block} rows"


def devices_text(bench: Bench) -> str:
    """What it was measured on."""
    return f"{bench.num_devices} x {bench.mesh.devices.flat[0].device_kind}"


def _measured(bench: Bench, cases: Cases, calibration: Calibration) -> str:
    header = (
        "batch",
        "sequences a device",
        "tokens of each",
        "ms: median (least)",
        "two columns",
        "terms",
        "residual",
    )
    return markdown_table(header, list(_rows(bench, cases, calibration)))


def _rows(bench: Bench, cases: Cases, calibration: Calibration) -> Iterator[tuple[str, ...]]:
    two, terms = calibration.two_columns, calibration.terms
    for name in ("single", "packed", "exchanged"):
        for case in getattr(cases, name):
            length, by_terms = int(case.index.lengths[0]), terms.seconds(case.work)
            yield (
                name,
                str(case.index.num_sequences // bench.num_devices),
                str(length),
                f"{median(case.seconds) * 1e3:.2f} ({min(case.seconds) * 1e3:.2f})",
                f"{float(two.seconds(np.array(length))) * 1e3:.2f}" if name == "single" else "-",
                f"{by_terms * 1e3:.2f}",
                f"{by_terms / case.middle - 1:+.1%}",
            )


def _fits(calibration: Calibration) -> str:
    two, terms = calibration.two_columns, calibration.terms
    header = ("fit", "gamma", "s a FLOP", "launch", "exchange", "R^2", "residuals: mean (largest)")
    return markdown_table(
        header,
        [
            (
                "two columns",
                f"{two.gamma:.3g}",
                f"{two.seconds_per_flop:.3g}",
                "-",
                "-",
                *_quality(two.quality),
            ),
            (
                "terms",
                f"{terms.gamma:.3g}",
                f"{terms.linear_s_per_flop:.3g}",
                f"{terms.launch_s * 1e3:.3g} ms",
                _exchange(calibration),
                *_quality(terms.quality),
            ),
        ],
    )


def _quality(quality: Quality) -> tuple[str, str]:
    return f"{quality.r_squared:.4f}", f"{quality.mean_relative:.1%} ({quality.largest_relative:.1%})"


def _exchange(calibration: Calibration) -> str:
    per_byte = calibration.terms.exchange_s_per_byte
    if per_byte is None:
        return f"none: {calibration.no_exchange}"
    return f"{1e-9 / per_byte:.3g} GB/s" if per_byte else "no time"
