"""Modelled steps of all plans as bars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments._pictures import write_figure

_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#5F6368"


def save_figure(path: Path, report: Mapping[str, Any], *, option: str = "--figure") -> None:
    """Draw a panel for each mix: a bar for each plan, compute and attention's traffic, and its speed-up.

    Args:
        path: file to write; the suffix gives the format.
        report: from `build_report`.
        option: what named the file, for messages.

    Raises:
        UserError: if the file cannot be written.
    """
    mixes, settings = report["mixes"], report["settings"]
    num_bars = max(len(mix["plans"]) for mix in mixes)
    figure = Figure(
        figsize=(1.2 + 3.6 * max(len(mixes), 1.6), 1.7 + 0.27 * num_bars), dpi=150, layout="constrained"
    )
    panels = figure.subplots(1, len(mixes), squeeze=False)[0]
    for axes, mix in zip(panels, mixes, strict=True):
        _draw_mix(axes, mix, settings["bags"])
    if report["published"] is not None:
        _mark_published(panels[[mix["mix"] for mix in mixes].index("joint")], report["published"]["rows"][0])
    drawn = dict(
        pair[::-1] for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    )
    figure.legend(
        drawn.values(), drawn.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    figure.suptitle(f"Modelled step, {settings['num_devices']} x {settings['gpu']}", fontsize=11)
    write_figure(figure, path, option=option)


def _draw_mix(axes: Axes, mix: Mapping[str, Any], chosen: str) -> None:
    plans = mix["plans"]
    places = range(len(plans))
    rest = [plan["step_s"] - plan["traffic_s"] for plan in plans]
    axes.barh(places, rest, color=_BLUE, label="compute and optimiser")
    axes.barh(
        places,
        [plan["traffic_s"] for plan in plans],
        left=rest,
        color=_ORANGE,
        label="attention's traffic, exposed",
    )
    for place, plan in zip(places, plans, strict=True):
        axes.annotate(
            f" {plan['speedup']:.2f}\N{MULTIPLICATION SIGN}", (plan["step_s"], place), fontsize=7, va="center"
        )
    axes.set_yticks(places, [plan["bags"] for plan in plans], fontsize=8)
    for tick, plan in zip(axes.get_yticklabels(), plans, strict=True):
        tick.set_fontweight("bold" if plan["bags"] == chosen else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(plan["step_s"] for plan in plans))
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(mix["mix"], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _mark_published(axes: Axes, row: Mapping[str, Any]) -> None:
    axes.set_xlim(right=max(axes.get_xlim()[1], 1.05 * row["step_before_s"]))
    for seconds, style, when in ((row["step_before_s"], "--", "before"), (row["step_s"], ":", "after")):
        axes.axvline(seconds, color=_GREY, linewidth=1, linestyle=style, label=f"published, {when}")
