"""Figures of a dry run: memory, the collectives of a step, and what they send."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_BARS = 24


def save_figures(report: Mapping[str, Any], folder: Path, stem: str) -> dict[str, str]:
    """Draw a report's figures; returns their file names by title."""
    import matplotlib

    matplotlib.use("Agg")
    drawings = {
        "Memory of a device": _memory,
        "Collectives": _collectives,
        "Traffic": _traffic,
    }
    names = {}
    for i, (title, draw) in enumerate(drawings.items()):
        figure = draw(report)
        name = f"{stem}_{('memory', 'collectives', 'traffic')[i]}.png"
        figure.suptitle(f"{title}: {report['config']}, {report['topology']} {report['gpu']}", fontsize=9)
        figure.savefig(folder / name, dpi=110, bbox_inches="tight", metadata={"Software": ""})
        names[title] = name
    return names


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.add_subplot()


# One colour and name for what a sum by hand and the compiler's buffers call differently.
_COMPILED_NAMES = {
    "kept for the backward pass": "kept",
    "whole layers: parameters and gradients": "whole_layers",
    "attention rows": "attention",
    "activations of a block, and the rest": "block",
}


def _memory(report: Mapping[str, Any]) -> Any:
    memory = report["memory"]
    by_hand = {name: size for name, size in memory["by_hand"].items() if name != "total"}
    compiled = {name: by_hand[name] for name in ("parameters", "ema", "optimizer", "inputs")}
    for group in memory["temporaries"]:
        compiled[_COMPILED_NAMES.get(group["what"], group["what"])] = group["bytes"]
    compiled["not attributed"] = max(memory["peak_bytes"] - sum(compiled.values()), 0)
    names = list(dict.fromkeys([*by_hand, *compiled]))
    figure, axes = _axes(2.4)
    left = [0.0, 0.0]
    for i, name in enumerate(names):
        sizes = [parts.get(name, 0) / 1e9 for parts in (by_hand, compiled)]
        label = f"{name.replace('_', ' ')}: {sizes[0]:.2f} and {sizes[1]:.2f} GB"
        axes.barh([0, 1], sizes, left=left, color=f"C{i % 10}", edgecolor="white", label=label)
        left = [x + size for x, size in zip(left, sizes, strict=True)]
    axes.axvline(memory["gpu_bytes"] / 1e9, color="black", linestyle="--", label="memory of the GPU")
    axes.set_yticks([0, 1], ["by hand", "compiled"])
    axes.set_xlabel("GB a device")
    axes.legend(fontsize=6, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    return figure


def _collectives(report: Mapping[str, Any]) -> Any:
    modelled = report["modelled"]["collectives"]
    large = [c for c in report["collectives"] if c["bytes"] >= 1 << 20]
    bars = sorted(large, key=lambda c: -modelled[c["name"]]["seconds"])[:_MOST_BARS]
    figure, axes = _axes(1 + 0.26 * len(bars))
    for i, collective in enumerate(reversed(bars)):
        times = modelled[collective["name"]]
        waiting = min(times["waiting_s"], times["seconds"])
        hidden = times["seconds"] - waiting
        axes.barh(i, hidden * 1e3, color="C2")
        axes.barh(i, waiting * 1e3, left=hidden * 1e3, color="C3")
    labels = [
        f"{' '.join([c['kind'], c['phase']]).strip()} x{c['count']:g}, {c['bytes'] / 1e6:.0f} MB"
        for c in reversed(bars)
    ]
    axes.set_yticks(range(len(bars)), labels, fontsize=6)
    axes.set_xlabel("ms in one run of the program, modelled: green with compute under it, red waited for")
    return figure


def _traffic(report: Mapping[str, Any]) -> Any:
    kinds = report["traffic"]["by_kind"]
    figure, axes = _axes(2.6)
    for i, (_, total) in enumerate(sorted(kinds.items())):
        axes.barh(
            i + 0.2,
            total["inside_bytes"] / 1e9,
            height=0.38,
            color="C0",
            label="inside machines" if i == 0 else None,
        )
        axes.barh(
            i - 0.2,
            total["across_bytes"] / 1e9,
            height=0.38,
            color="C1",
            label="across machines" if i == 0 else None,
        )
    axes.set_yticks(range(len(kinds)), sorted(kinds), fontsize=7)
    axes.set_xlabel("GB that a device sends in one run of the program (exchanges of attention: at most)")
    axes.legend(fontsize=7, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return figure
