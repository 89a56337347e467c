"""Modelled latencies of sampling beside published ones: xDiT's seconds, SwiftFusion's speed-ups, and the planner's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments._pictures import write_figure

_BLUE, _GREY = "#0072B2", "#9AA0A6"
_MACHINE_COLOURS = {1: "#0072B2", 2: "#E69F00", 4: "#009E73"}


def save_latencies(path: Path, report: Mapping[str, Any], *, option: str = "--latencies") -> None:
    """Draw three panels.

    Args:
        path: file to write; the suffix gives the format.
        report: from `build_sampling_report`.
        option: what named the file, for messages.

    Raises:
        UserError: if the file cannot be written.
    """
    figure = Figure(figsize=(13, 4.4), dpi=150, layout="constrained")
    seconds, speedups, planned = figure.subplots(1, 3, width_ratios=(1.1, 1.25, 1))
    _published_seconds(seconds, report["latencies"])
    _published_speedups(speedups, report["published"])
    _planned(planned, report["planned_latencies"])
    for axes in (seconds, speedups, planned):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    write_figure(figure, path, option=option)


def _published_seconds(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [
        f"{row['algorithm']}, {row['gpus']} {row['gpu']}\n{row['model']}, {row['pixels']} px" for row in rows
    ]
    _pairs(axes, names, [row["published_s"] for row in rows], [row["modelled_s"] for row in rows])
    axes.set_xlabel("seconds a picture (modelled: the layers alone)", fontsize=8)
    axes.set_title("FLUX.1: xDiT as published, and modelled", fontsize=9, loc="left")


def _published_speedups(axes: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    names = [f"{cell['workload']}\n{cell['variant']}" for cell in cells]
    _pairs(axes, names, [cell["published"] for cell in cells], [cell["modelled"] for cell in cells])
    axes.axvline(1, color="black", linewidth=0.6, linestyle=":")
    axes.set_xlabel("times as fast as USP's best mesh, 8 A100 a machine", fontsize=8)
    axes.set_title("SwiftFusion as published, and modelled", fontsize=9, loc="left")


def _pairs(axes: Axes, names: list[str], published: list[float], modelled: list[float]) -> None:
    places = np.arange(len(names))
    axes.barh(places - 0.2, published, 0.38, color=_GREY, label="published")
    axes.barh(places + 0.2, modelled, 0.38, color=_BLUE, label="modelled")
    axes.set_yticks(places, names, fontsize=5.5)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def _planned(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for machines, colour in _MACHINE_COLOURS.items():
        mine = [row for row in rows if row["machines"] == machines]
        pixels = [row["pixels"] for row in mine]
        label = f"{machines} x 8 H100"
        axes.plot(
            pixels, [row["seconds"] for row in mine], color=colour, marker="o", markersize=3, label=label
        )
        axes.plot(pixels, [row["usp_seconds"] for row in mine], color=colour, linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_xticks([row["pixels"] for row in rows if row["machines"] == 1])
    axes.set_xlabel("pixels along an edge", fontsize=8)
    axes.set_ylabel("seconds, 28 steps, modelled", fontsize=8)
    axes.legend(frameon=False, fontsize=7)
    axes.set_title("FLUX.1-dev, planned (dashed: USP's best)", fontsize=9, loc="left")
