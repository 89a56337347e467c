"""Pictures of sequence-parallel attention: what each device computes and receives, one panel for each variant."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import parallel
from experiments._pictures import write_figure
from experiments._sequence_figure_trace import Event, trace

# Okabe and Ito's colours, light enough for black letters.
_COLOURS = {"attention": "#A6D3F2", "inside": "#8FD6BD", "across": "#F5C35B"}
_LEGEND = {
    "attention": "attention of these devices' queries q to keys and values kv",
    "inside": "arrives from the same machine",
    "across": "arrives from another machine",
}
_MACHINES, _PER_MACHINE, _HEADS = 3, 2, 12
_AXES = {"machine": _MACHINES, "device": _PER_MACHINE}
_BOTH = ("machine", "device")
# A device's row: attention above, transfers below.
_ATTENTION, _TRANSFER, _ROW = (0.06, 0.56), (0.62, 0.96), 1.06
_SMALL, _DPI = 7.0, 150  # points
_WIDE, _GAP = 1.08, 0.003  # of the time axis: room for the last label; beside letters


@dataclass(frozen=True, slots=True)
class Panel:
    """One call to draw.

    Attributes:
        title: what it is.
        attention: of (q, k, v, block_attention=...).
    """

    title: str
    attention: Callable[..., Any]

    def events(self) -> list[Event]:
        """On 3 machines of 2 devices."""
        return trace(self.attention, _AXES, sharded=_BOTH, devices_per_machine=_PER_MACHINE, num_heads=_HEADS)


_ULYSSES = partial(parallel.ulysses_attention, axis_name=_BOTH)
# Files by name.
FIGURES: dict[str, tuple[Panel, ...]] = {
    "sequence_ulysses": (
        Panel("Ulysses over 6 devices", _ULYSSES),
        Panel("Ulysses over 6 devices, head_groups=2", partial(_ULYSSES, head_groups=2)),
    ),
    "sequence_ring": (Panel("Ring of 6 devices", partial(parallel.ring_attention, axis_name=_BOTH)),),
    "sequence_usp": (
        Panel(
            "USP, Placement.ULYSSES_INSIDE: Ulysses over 2 in a machine, ring over 3 machines",
            partial(parallel.usp_attention, ulysses_axis="device", ring_axis="machine"),
        ),
        Panel(
            "USP, Placement.ULYSSES_ACROSS: Ulysses over 3 machines, ring of 2 in a machine",
            partial(parallel.usp_attention, ulysses_axis="machine", ring_axis="device"),
        ),
    ),
    "sequence_torus": (
        Panel(
            "Torus over 3 machines, Ulysses over 2 in a machine",
            partial(parallel.torus_attention, machine_axis="machine", ulysses_axis="device"),
        ),
    ),
}


def save_sequence_figure(path: Path, panels: Sequence[Panel], *, option: str = "--out") -> None:
    """Draw panels with one scale of time.

    Args:
        path: file to write; the suffix gives the format.
        panels: from `FIGURES`.
        option: what named the file, for messages.

    Raises:
        UserError: if the file cannot be written.
    """
    rows = _MACHINES * _PER_MACHINE
    figure = Figure((9, 0.5 + len(panels) * (0.55 + 0.42 * rows)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    drawn = [(panel.title, panel.events()) for panel in panels]
    end = max(event.stop for _, events in drawn for event in events)
    for one, (title, events) in zip(axes, drawn, strict=True):
        _prepare(one, title, events, end)
    handles = [Patch(color=colour, label=_LEGEND[unit]) for unit, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.draw_without_rendering()  # now a label's width is known
    figure.set_layout_engine("none")
    for one, (_, events) in zip(axes, drawn, strict=True):
        _draw(one, events, end)
    # The same file from the same program.
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        write_figure(figure, path, option=option, metadata={"Date": None} if path.suffix == ".svg" else None)


def _prepare(axes: Axes, title: str, events: Sequence[Event], end: float) -> None:
    num = _MACHINES * _PER_MACHINE
    axes.set_xlim(0, _WIDE * end)
    axes.set_ylim(num * _ROW, 0)
    places = [device * _ROW + 0.5 for device in range(num)]
    names = [f"machine {d // _PER_MACHINE}\ndevice {d}" for d in range(num)]
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    away = sum(event.share for event in events) / _MACHINES / num
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(
        f"time, in proportion to work and bytes at made-up speeds; each machine sends {away:.2f} b L h d elements to"
        " others",
        fontsize=_SMALL + 0.5,
        loc="left",
    )
    for machine in range(1, _MACHINES):
        axes.axhline(machine * _PER_MACHINE * _ROW - 0.03, color="#9AA0A6", linewidth=0.6)


def _draw(axes: Axes, events: Sequence[Event], end: float) -> None:
    for event in events:
        attention = event.unit == "attention"
        low, high = (event.device * _ROW + y for y in (_ATTENTION if attention else _TRANSFER))
        axes.broken_barh(
            [(event.start, event.stop - event.start)],
            (low, high - low),
            facecolor=_COLOURS[event.unit],
            edgecolor="#5F6368",
            linewidth=0.5,
        )
        middle = (low + high) / 2
        if attention:
            _label_inside(axes, event, middle)
        else:
            _label_transfer(axes, event, middle, _next_start(event, events, end))


def _next_start(event: Event, events: Iterable[Event], end: float) -> float:
    """When the next transfer of the device begins."""
    later = [
        other.start
        for other in events
        if other.device == event.device and other.unit != "attention" and other.start > event.start
    ]
    return min(later, default=_WIDE * end)


def _label_inside(axes: Axes, event: Event, middle: float) -> None:
    queries, keys = (devices_text(event.owners[name]) for name in ("q", "kv"))
    place = (event.start + event.stop) / 2
    for text in (f"q {queries} to kv {keys}", f"q {queries}\nkv {keys}"):
        label = axes.text(place, middle, text, ha="center", va="center", fontsize=_SMALL, linespacing=0.9)
        if _width(axes, label) + _GAP <= event.stop - event.start:
            return
        label.remove()
    raise RuntimeError(f"save_sequence_figure: an attention is too short for its label; got {event}.")


def _label_transfer(axes: Axes, event: Event, middle: float, free_until: float) -> None:
    """In the bar, or behind it, where there is room."""
    what = ", ".join(name for name in ("q", "kv", "o") if name in event.owners)
    everyone = len(event.sources) == _MACHINES * _PER_MACHINE - 1
    sources = "all" if everyone else devices_text(event.sources)
    for text in (f"{what} from {sources}", f"{what} \u2190 {sources}", f"{what}\u2190{sources}", what):
        label = axes.text(0, middle, text, ha="left", va="center_baseline", fontsize=_SMALL)
        width = _width(axes, label)
        if width + _GAP <= event.stop - event.start:
            label.set_x((event.start + event.stop - width) / 2)
            return
        if event.stop + _GAP + width <= free_until:
            label.set_x(event.stop + _GAP)
            return
        label.remove()
    raise RuntimeError(f"save_sequence_figure: no room for the label of a transfer; got {event}.")


def _width(axes: Axes, label: Any) -> float:
    """Of a text, in units of time."""
    box = label.get_window_extent().transformed(axes.transData.inverted())
    return abs(box.x1 - box.x0)


def devices_text(devices: Iterable[int]) -> str:
    """Numbers, runs of three and more as first-last: "0-3, 5"."""
    ordered = sorted(devices)
    texts: list[str] = []
    start = 0
    for i, device in enumerate(ordered):
        if i + 1 < len(ordered) and ordered[i + 1] == device + 1:
            continue
        run = ordered[start : i + 1]
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
        start = i + 1
    return ", ".join(texts)
