"""A picture of a plan: which device holds which sequences in home, token and attention layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from experiments._plan_traffic import Arcs, arcs_of, traffic
from solver import BalancePlan

# Okabe and Ito's colours; they repeat after the longest sequences, which matter most.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INSIDE, ACROSS = "#5F6368", "#D55E00"
# More arcs than these only blacken the strip.
MOST_ARCS = 1500
# More of them than these are drawn thinner.
_WIDE_ARCS = 150
# Beyond this many devices blocks are too thin to have edges.
_MOST_SEPARATE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Parts of one layout in the order in which a device holds them, arrays of one entry a part.

    Attributes:
        title: of the layout.
        unit: of the heights.
        device, sequence: of each part.
        heights: tokens, or query-key pairs of all heads.
    """

    title: str
    unit: str
    device: np.ndarray
    sequence: np.ndarray
    heights: np.ndarray


def layout_blocks(plan: BalancePlan) -> tuple[Blocks, Blocks, Blocks]:
    """The home, token and attention layouts of a plan."""
    lengths = np.asarray(plan.lengths, np.int64)
    home = Blocks("home: as loaded", "tokens", np.asarray(plan.home), np.arange(len(lengths)), lengths)
    sequence, start, stop, device = np.asarray(plan.token_slices, np.int64).T
    token = Blocks("token layout: linear layers", "tokens", device, sequence, stop - start)
    sequence, first, last, start, stop, device = np.asarray(plan.head_slices, np.int64).T
    pairs = (last - first) * (stop - start) * lengths[sequence]
    attention = Blocks("attention layout: items", "query-key pairs", device, sequence, pairs)
    return home, token, attention


def colours_of(plan: BalancePlan) -> list[str]:
    """A colour for every sequence; the longest differ."""
    lengths = np.asarray(plan.lengths, np.int64)
    rank = np.empty(len(lengths), np.int64)
    rank[np.argsort(-lengths, kind="stable")] = np.arange(len(lengths))
    return [COLOURS[r % len(COLOURS)] for r in rank]


def plot_plan(path: str | Path, plan: BalancePlan, *, title: str = "", arcs: bool = False) -> None:
    """Draw the three layouts of a plan, devices as columns, each sequence in a colour of its own.

    Home and token layout show tokens; attention layout shows attention work in query-key pairs.

    Args:
        path: file to write; the suffix gives the format.
        plan: the plan.
        title: above the panels.
        arcs: one layout above the other, and between them what devices send each other, inside machines and across.
    """
    if arcs:
        figure, panels, strips = _panels_with_strips(plan.num_devices)
        sent = traffic(plan)
        for axes, matrix, what in zip(
            strips, (sent.tokens, sent.rows), ("tokens", "(token, head) rows"), strict=True
        ):
            _draw_arcs(axes, arcs_of(matrix, plan.topology.devices_per_machine, most=MOST_ARCS), what)
    else:
        figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
        panels = list(figure.subplots(1, 3))
    _draw_layouts(panels, plan)
    if arcs:
        _mark_machines([*panels, *strips], plan)
        for axes in panels[:-1]:
            axes.set_xlabel("")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _draw_layouts(panels: Sequence[Axes], plan: BalancePlan) -> None:
    colours = colours_of(plan)
    for axes, blocks in zip(panels, layout_blocks(plan), strict=True):
        _stack(axes, plan.num_devices, blocks, colours)
        axes.set_title(blocks.title, fontsize=10)
        axes.set_xlabel("device")
        axes.set_ylabel(blocks.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(panels[0].get_ylim())


def _panels_with_strips(num_devices: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """A figure whose three panels have a strip between them."""
    width = min(16.0, 7.0 + 0.06 * num_devices)
    figure = Figure(figsize=(width, 9), dpi=150, layout="constrained")
    axes = figure.subplots(5, 1, sharex=True, height_ratios=[3, 1.3, 3, 1.3, 3])
    return figure, list(axes[::2]), list(axes[1::2])


def _draw_arcs(axes: Axes, arcs: Arcs, what: str) -> None:
    """Half an ellipse for every pair of devices, as thick as what they exchange and as high as they are apart."""
    angle = np.linspace(0, np.pi, 25)
    low, high = arcs.pairs.T
    centre, radius = (low + high) / 2, (high - low) / 2
    x = centre[:, None] - radius[:, None] * np.cos(angle)
    height = np.sqrt(radius / max(radius.max(initial=0.0), 1e-9))
    y = height[:, None] * np.sin(angle)
    share = arcs.amounts / max(int(arcs.amounts.max(initial=0)), 1)
    colours = np.where(arcs.across, ACROSS, INSIDE)
    widths = 0.25 + 2 * share * min(1.0, (_WIDE_ARCS / max(len(low), 1)) ** 0.5)
    lines = LineCollection(list(np.stack([x, y], -1)), colors=list(colours), linewidths=widths, alpha=0.6)
    axes.add_collection(lines)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)
    amount = EngFormatter(sep=" ", places=1)
    left_out = f"; the heaviest {len(low)} of {arcs.num_pairs} pairs" if len(low) < arcs.num_pairs else ""
    handles = [
        Line2D(
            [], [], color=INSIDE, label=f"{amount(arcs.total_inside)} {what} between devices of a machine"
        ),
        Line2D([], [], color=ACROSS, label=f"{amount(arcs.total_across)} between machines{left_out}"),
    ]
    axes.legend(handles=handles, fontsize=7, loc="upper left", ncols=2, frameon=False)
    axes.set_ylim(0, 1.4)  # room for the legend


def _mark_machines(panels: Sequence[Axes], plan: BalancePlan) -> None:
    size = plan.topology.devices_per_machine
    for axes in panels:
        for edge in range(size, plan.num_devices, size):
            axes.axvline(edge - 0.5, color=INSIDE, linewidth=0.6, linestyle=(0, (1, 3)))


def _stack(axes: Axes, num_devices: int, blocks: Blocks, colours: Sequence[str]) -> None:
    """Bars of the devices, a part for each entry, in the order given."""
    order = np.argsort(blocks.device, kind="stable")
    device, sequence = blocks.device[order], blocks.sequence[order]
    heights = np.asarray(blocks.heights, np.float64)[order]
    level = np.bincount(device, weights=heights, minlength=num_devices)
    top = np.cumsum(heights) - np.repeat(np.cumsum(level) - level, np.bincount(device, minlength=num_devices))
    left, right, bottom = device - 0.4, device + 0.4, top - heights
    corners = np.stack([left, bottom, right, bottom, right, top, left, top], -1).reshape(-1, 4, 2)
    parts = PolyCollection(
        list(corners),
        facecolors=[colours[s] for s in sequence],
        edgecolors="white",
        linewidths=0.4 if num_devices <= _MOST_SEPARATE else 0.0,
    )
    axes.add_collection(parts)
    axes.set_xlim(-0.9, num_devices - 0.1)
    axes.set_ylim(0, 1.05 * max(level.max(), 1e-9))
    axes.axhline(level.mean(), color="#5F6368", linewidth=0.8, linestyle="--")
    axes.annotate("mean", (-0.85, level.mean()), fontsize=7, color="#5F6368", va="bottom", ha="left")
