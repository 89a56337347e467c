"""A picture of a plan: which device holds which sequences in home, token and attention layout."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from solver import BalancePlan

# Okabe and Ito's colours; they repeat after the longest sequences, which matter most.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def plot_plan(path: str | Path, plan: BalancePlan, *, title: str = "") -> None:
    """Draw the three layouts of a plan, devices as columns, each sequence in a colour of its own.

    Home and token layout show tokens; attention layout shows attention work in query-key pairs, in thousands.

    Args:
        path: file to write; the suffix gives the format.
        plan: the plan.
        title: above the panels.
    """
    lengths = np.asarray(plan.lengths, np.int64)
    rank = np.empty(len(lengths), np.int64)
    rank[np.argsort(-lengths, kind="stable")] = np.arange(len(lengths))
    colours = [_COLOURS[r % len(_COLOURS)] for r in rank]
    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    home, token, attention = figure.subplots(1, 3)
    sequences = np.arange(len(lengths))
    _stack(home, plan.num_devices, np.asarray(plan.home), sequences, lengths, colours)
    sequence, start, stop, device = np.asarray(plan.token_slices, np.int64).T
    _stack(token, plan.num_devices, device, sequence, stop - start, colours)
    sequence, first, last, start, stop, device = np.asarray(plan.head_slices, np.int64).T
    pairs = (last - first) * (stop - start) * lengths[sequence] / 1000
    _stack(attention, plan.num_devices, device, sequence, pairs, colours)
    for axes, name, unit in (
        (home, "home: as loaded", "tokens"),
        (token, "token layout: linear layers", "tokens"),
        (attention, "attention layout: items", "query-key pairs, thousands"),
    ):
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("device")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    token.set_ylim(home.get_ylim())
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _stack(axes: Axes, num_devices: int, device, sequence, heights, colours) -> None:
    """Bars of the devices, a part for each entry, in the order given."""
    order = np.argsort(device, kind="stable")
    device, sequence, heights = device[order], sequence[order], np.asarray(heights, np.float64)[order]
    level = np.bincount(device, weights=heights, minlength=num_devices)
    top = np.cumsum(heights) - np.repeat(np.cumsum(level) - level, np.bincount(device, minlength=num_devices))
    left, right, bottom = device - 0.4, device + 0.4, top - heights
    corners = np.stack([left, bottom, right, bottom, right, top, left, top], -1).reshape(-1, 4, 2)
    parts = PolyCollection(
        list(corners), facecolors=[colours[s] for s in sequence], edgecolors="white", linewidths=0.4
    )
    axes.add_collection(parts)
    axes.set_xlim(-0.9, num_devices - 0.1)
    axes.set_ylim(0, 1.05 * max(level.max(), 1e-9))
    axes.axhline(level.mean(), color="#5F6368", linewidth=0.8, linestyle="--")
    axes.annotate("mean", (-0.85, level.mean()), fontsize=7, color="#5F6368", va="bottom", ha="left")
