"""Plots of a run: loss, learning rate, throughput; load per device before and after balancing; pictures.

Matplotlib's objects are used directly, without pyplot, whose global state and windows a program does not
want. Colours are from Okabe and Ito's set, which people with any colour vision can tell apart.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from experiments._pictures import SheetStyle as SheetStyle
from experiments._pictures import part_path
from experiments._pictures import save_clip as save_clip
from experiments._pictures import save_grid as save_grid
from experiments._pictures import save_image as save_image

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#5F6368"
_DPI = 150
# Beyond this many devices single bars are too thin to have gaps and edges.
_MAX_SEPARATE_BARS = 64
# A loss whose maximum is so many times its median is easier to read on a logarithmic axis.
_LOG_SCALE_FROM = 5

__all__ = [
    "DeviceLoads",
    "SheetStyle",
    "plot_loads",
    "plot_training",
    "save_clip",
    "save_grid",
    "save_image",
    "smoothed",
]


@dataclass(frozen=True, slots=True)
class DeviceLoads:
    """Work of each device, by kind and in one unit; both of shape (num_devices,)."""

    linear: np.ndarray
    attention: np.ndarray

    def __post_init__(self) -> None:
        shapes = np.shape(self.linear), np.shape(self.attention)
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or not shapes[0][0]:
            raise ValueError(
                "DeviceLoads: linear and attention must have one shape (num_devices,); got "
                f"{shapes[0]} and {shapes[1]}."
            )

    @property
    def total(self) -> np.ndarray:
        return np.asarray(self.linear, float) + np.asarray(self.attention, float)

    @property
    def max_over_mean(self) -> float:
        """1 when balanced perfectly; 1 when there is no work at all."""
        mean = self.total.mean()
        return float(self.total.max() / mean) if mean else 1.0


def smoothed(values: Sequence[float] | np.ndarray, half_life: float) -> np.ndarray:
    """Weighted mean around each entry; weights halve every `half_life` entries to either side.

    Both sides, so that a falling curve is not shown late; normalised, so that the ends are not drawn towards
    zero. NaNs and infinities are passed over.
    """
    values = np.asarray(values, np.float64)
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    decay = 0.5 ** (1 / half_life)
    total = _decayed(known, decay) + _decayed(known[::-1], decay)[::-1] - known
    weight = _decayed(finite, decay) + _decayed(finite[::-1], decay)[::-1] - finite
    return np.divide(total, weight, out=np.full(len(values), np.nan), where=weight > 0)


def _decayed(values: np.ndarray, decay: float) -> np.ndarray:
    """out[i] = values[i] + decay * out[i - 1]."""
    out = np.zeros(len(values))
    carry = 0.0
    for index, value in enumerate(values):
        carry = carry * decay + value
        out[index] = carry
    return out


def plot_training(path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = "") -> None:
    """Plots a run from its metrics: the loss, raw and smoothed, the learning rate, tokens per second.

    Args:
      path: file to write; the suffix gives the format.
      rows: as `read_metrics` returns them, with the columns "step" and "loss", and where available
        "validation_loss", "learning_rate", "tokens_per_s". A panel without data is left out.
      title: above the plots.

    Raises:
      ValueError: no row has a loss.
    """
    if not any("loss" in row for row in rows):
        raise ValueError("plot_training: rows must have a 'loss'; got none. Pass read_metrics(workdir).")
    panels = [("loss", _draw_loss, 2.0)]
    panels += [
        panel
        for panel in (("learning_rate", _draw_rate, 1.0), ("tokens_per_s", _draw_throughput, 1.0))
        if any(panel[0] in row for row in rows)
    ]
    heights = [height for _, _, height in panels]
    figure = Figure(figsize=(8, 1.1 + 1.45 * sum(heights)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for (_, draw, _), panel_axes in zip(panels, axes, strict=True):
        draw(panel_axes, rows)
        _tidy(panel_axes)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(axes)
    _save(figure, path, title)


def plot_loads(
    path: str | Path,
    before: DeviceLoads,
    after: DeviceLoads,
    *,
    title: str = "",
    machine_size: int | None = None,
) -> None:
    """Plots the load of each device before and after balancing, linear layers and attention stacked.

    In units of the mean, which a line marks: no plan can bring the highest bar below it.

    Args:
      path: file to write; the suffix gives the format.
      before: with the sequences where the loader left them.
      after: with the plan.
      title: above the plots.
      machine_size: devices per machine, to mark where one ends.
    """
    scale = 1 / (after.total.mean() or 1.0)
    width = min(14.0, 7.5 + 0.09 * (len(before.linear) + len(after.linear)))
    figure = Figure(figsize=(width, 3.9), dpi=_DPI, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for panel_axes, loads, when in zip(axes, (before, after), ("Before balancing", "After"), strict=True):
        _draw_bars(panel_axes, loads, scale)
        mean = loads.total.mean() * scale
        panel_axes.axhline(mean, color="black", linewidth=1.2, linestyle="--", label="mean")
        if machine_size:
            for edge in range(machine_size, len(loads.linear), machine_size):
                panel_axes.axvline(edge - 0.5, color=_GREY, linewidth=0.6, linestyle=(0, (1, 3)))
        ratio = f"{loads.max_over_mean:.2f} \N{MULTIPLICATION SIGN} mean"
        panel_axes.set_title(f"{when}: maximum {ratio}", fontsize=10)
        panel_axes.set_xlabel("device")
        panel_axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _tidy(panel_axes)
    highest = max(before.total.max(), after.total.max()) * scale
    axes[0].set_ylim(0, 1.06 * highest or 1)
    axes[0].set_ylabel("predicted load over the mean")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _save(figure, path, title)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have the column."""
    having = [row for row in rows if name in row]
    return np.array([row["step"] for row in having]), np.array([float(row[name]) for row in having])


def _draw_loss(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    steps, loss = _column(rows, "loss")
    finite = np.isfinite(loss)
    axes.plot(steps, np.where(finite, loss, np.nan), color=_BLUE, alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(steps, smoothed(loss, max(2.0, len(loss) / 200)), color=_BLUE, linewidth=1.8, label="smoothed")
    held_steps, held = _column(rows, "validation_loss")
    if len(held):
        axes.plot(held_steps, held, "o-", color=_ORANGE, markersize=3.5, linewidth=1.2, label="held out")
    if not finite.all():
        label = f"not finite ({np.count_nonzero(~finite)})"
        axes.plot(
            steps[~finite],
            np.full(np.count_nonzero(~finite), 0.97),
            "v",
            color=_RED,
            markersize=5,
            label=label,
            transform=axes.get_xaxis_transform(),
        )
    shown = np.concatenate([loss[finite], held[np.isfinite(held)]])
    if len(shown) and shown.min() > 0 and shown.max() > _LOG_SCALE_FROM * np.median(shown):
        axes.set_yscale("log")
        # A few lucky steps near zero would otherwise take half the height.
        axes.set_ylim(bottom=np.percentile(shown, 1) / 1.5)
    axes.set_ylabel("loss")
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, frameon=False, fontsize=9, ncols=4
    )


def _draw_rate(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    steps, rate = _column(rows, "learning_rate")
    axes.plot(steps, rate, color=_GREEN, linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylabel("learning rate")


def _draw_throughput(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    steps, tokens = _column(rows, "tokens_per_s")
    axes.plot(steps, tokens, color=_RED, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smoothed(tokens, max(2.0, len(tokens) / 200)), color=_RED, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("tokens / s")


def _draw_bars(axes: Axes, loads: DeviceLoads, scale: float) -> None:
    devices = np.arange(len(loads.linear))
    separate = len(devices) <= _MAX_SEPARATE_BARS
    style = {"width": 0.8, "edgecolor": "white", "linewidth": 0.4} if separate else {"width": 1.0}
    linear = np.asarray(loads.linear, float) * scale
    attention = np.asarray(loads.attention, float) * scale
    axes.bar(devices, linear, color=_BLUE, label="linear layers", **style)
    axes.bar(devices, attention, bottom=linear, color=_ORANGE, label="attention", **style)
    axes.set_xlim(-0.6, len(devices) - 0.4)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E5E8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=_GREY, labelcolor="black")


def _save(figure: Figure, path: str | Path, title: str) -> None:
    if title:
        figure.suptitle(title, fontsize=11)
    part = part_path(path)
    figure.savefig(part, facecolor="white")
    os.replace(part, path)
