"""Figure of a calibration: measured against fitted block times, and the check of random batches."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments._calibrate_check import Checked, mean_absolute
from experiments._calibrate_fit import TermsFit, TwoColumnFit
from experiments._calibrate_program import Case
from experiments._pictures import part_path

# Of Okabe and Ito's set, as in `experiments._figures`.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#5F6368"


def plot_calibration(
    path: str | Path,
    single: Sequence[Case],
    fits: tuple[TwoColumnFit, TermsFit],
    checked: Sequence[Checked],
    *,
    title: str,
) -> None:
    """Draw a block's time over lengths with both fits, and what random batches took against the prediction.

    Args:
        path: file to write; the suffix gives the format.
        single: timed batches of one sequence a device.
        fits: both fits.
        checked: random batches; without any, residuals of the fits stand in their place.
        title: above the plots.
    """
    figure = Figure(figsize=(9.5, 3.9), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_lengths(left, single, fits)
    if checked:
        _draw_check(right, checked)
    else:
        _draw_residuals(right, single, fits)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=10)
    part = part_path(path)
    figure.savefig(part, facecolor="white", metadata={"Software": ""})
    os.replace(part, path)


def _draw_lengths(axes: Any, single: Sequence[Case], fits: tuple[TwoColumnFit, TermsFit]) -> None:
    two, terms = fits
    lengths = np.array([int(case.index.lengths[0]) for case in single])
    for length, case in zip(lengths, single, strict=True):
        axes.plot(
            [length] * len(case.seconds), np.array(case.seconds) * 1e3, ".", color=GREY, alpha=0.5, ms=4
        )
    axes.plot(
        lengths, [case.middle * 1e3 for case in single], "o", color="black", ms=5, label="measured, median"
    )
    x = np.geomspace(lengths[0], lengths[-1], 100)
    axes.plot(
        x,
        two.seconds(x) * 1e3,
        color=ORANGE,
        label=rf"$a\,l + b\,l^2$: $\gamma$ = {two.gamma:.3g}, $R^2$ = {two.quality.r_squared:.4f}",
    )
    axes.plot(
        lengths,
        [terms.seconds(case.work) * 1e3 for case in single],
        color=BLUE,
        linestyle="--",
        label=rf"terms: $\gamma$ = {terms.gamma:.3g}, $R^2$ = {terms.quality.r_squared:.4f}",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("ms a block, forward and backward")
    axes.legend(frameon=False, fontsize=8)


def _draw_check(axes: Any, checked: Sequence[Checked]) -> None:
    measured = np.array([c.measured_s for c in checked]) * 1e3
    predicted = np.array([c.predicted_s for c in checked]) * 1e3
    bags = np.array([c.bags or "none" for c in checked])
    for name, color in zip(dict.fromkeys(bags.tolist()), (BLUE, ORANGE, GREEN), strict=False):
        axes.plot(
            measured[bags == name], predicted[bags == name], "o", color=color, ms=4.5, label=f"bags {name}"
        )
    ends = np.array([0, 1.05 * max(measured.max(), predicted.max())])
    axes.plot(ends, ends, color="black", linewidth=0.9)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=GREY, alpha=0.15, linewidth=0, label="10 %")
    axes.set_xlim(0, ends[1])
    axes.set_ylim(0, ends[1])
    axes.set_xlabel("measured, ms a step")
    axes.set_ylabel("predicted, ms a step")
    error = mean_absolute([c.error for c in checked])
    axes.set_title(f"{len(checked)} random batches: mean absolute error {error:.1%}", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_residuals(axes: Any, single: Sequence[Case], fits: tuple[TwoColumnFit, TermsFit]) -> None:
    two, terms = fits
    lengths = np.array([int(case.index.lengths[0]) for case in single])
    middle = np.array([case.middle for case in single])
    axes.plot(lengths, two.seconds(lengths) / middle - 1, "o-", color=ORANGE, label=r"$a\,l + b\,l^2$")
    fitted = np.array([terms.seconds(case.work) for case in single])
    axes.plot(lengths, fitted / middle - 1, "o--", color=BLUE, label="terms")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("fitted over measured, less 1")
    axes.legend(frameon=False, fontsize=8)
