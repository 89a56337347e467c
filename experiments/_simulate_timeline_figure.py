"""A layer of each sequence-parallel algorithm as lanes of compute and transfers."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments._pictures import write_figure
from experiments._simulate_sampling import SamplingWorkload, plans_of, usp_plan, variant_timelines
from solver import SequenceHardware, TimelineEvent

_LANES = ("compute", "inside", "across")
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#9AA0A6"
_COLOURS = {
    "attention": _BLUE,
    "linear layers": _GREY,
    "inside a machine": _GREEN,
    "across machines": _ORANGE,
}


def save_timelines(
    path: Path, workload: SamplingWorkload, hardware: SequenceHardware, *, option: str = "--figure"
) -> None:
    """Draw a panel for USP's best mesh, each published variant and the planner's choice, one scale for all.

    Args:
        path: file to write; the suffix gives the format.
        workload: of the layer.
        hardware: of the devices; the planner may use puts and gets if it has them.
        option: what named the file, for messages.

    Raises:
        UserError: if the file cannot be written.
    """
    panels = _panels(workload, hardware)
    figure = Figure(figsize=(9, 1.2 + 1.15 * len(panels)), dpi=150, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (title, timeline) in zip(axes, panels, strict=True):
        _draw(panel, title, timeline)
    axes[-1].set_xlabel("milliseconds", fontsize=8)
    handles = [Patch(color=colour, label=label) for label, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"One layer, modelled: {workload.name} of 8 GPUs", fontsize=11)
    write_figure(figure, path, option=option)


def _panels(
    workload: SamplingWorkload, hardware: SequenceHardware
) -> list[tuple[str, Sequence[TimelineEvent]]]:
    usp, best = usp_plan(workload, hardware), plans_of(workload, hardware)[0]
    name = best.algorithm.replace("_", " ")
    cut = f", {best.head_groups} groups of heads" if best.head_groups > 1 else ""
    return [
        ("USP's best mesh", usp.timeline),
        *variant_timelines(workload, hardware).items(),
        (f"planner: {name}{cut}{', puts' if best.one_sided else ''}", best.timeline),
    ]


def _draw(axes: Axes, title: str, timeline: Sequence[TimelineEvent]) -> None:
    for event in timeline:
        start, length = event.start_s * 1e3, (event.stop_s - event.start_s) * 1e3
        height = _LANES.index(event.lane)
        axes.broken_barh(
            [(start, length)],
            (height - 0.4, 0.8),
            facecolor=_COLOURS[_kind(event)],
            edgecolor="white",
            linewidth=0.4,
        )
    end = max(event.stop_s for event in timeline) * 1e3
    axes.axvline(end, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(_LANES)), _LANES, fontsize=7)
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(f"{title}: {end:.2f} ms", fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _kind(event: TimelineEvent) -> str:
    if event.lane == "compute":
        return "attention" if event.name.startswith("attention") else "linear layers"
    return "inside a machine" if event.lane == "inside" else "across machines"
