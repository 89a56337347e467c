"""Reports of dry runs as text and Markdown; everything shown comes from the report's numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_GB = 1e9
_NAMES = {
    "parameters": "parameters",
    "ema": "moving average of parameters",
    "optimizer": "optimiser",
    "inputs": "data",
    "gradients": "gradients",
    "kept": "kept for the backward pass",
    "whole_layers": "whole layers: parameters and gradients",
    "attention": "attention rows",
    "block": "activations of a block",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned as text too; the first is left-aligned."""
    rows = [list(row) for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = (
        "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    )
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def gigabytes(num_bytes: float) -> str:
    """Bytes in units of 10^9."""
    return f"{num_bytes / _GB:.2f}"


def fits_line(report: Mapping[str, Any]) -> str:
    """Whether it fits, and by how much."""
    memory = report["memory"]
    verdict = "fits" if memory["fits"] else "DOES NOT FIT"
    room = abs(memory["headroom_bytes"])
    pool = (
        ""
        if memory["fits_default_pool"] or not memory["fits"]
        else (", but not in the 75 % that JAX takes by default: set XLA_PYTHON_CLIENT_MEM_FRACTION")
    )
    return (
        f"{verdict}: {gigabytes(memory['peak_bytes'])} GB of {gigabytes(memory['gpu_bytes'])} GB,"
        f" {gigabytes(room)} GB {'free' if memory['fits'] else 'too much'}{pool}."
    )


def memory_table(report: Mapping[str, Any]) -> str:
    """Memory by hand and as compiled."""
    memory = report["memory"]
    by_hand = memory["by_hand"]
    rows = [
        [_NAMES.get(name, name), gigabytes(size)]
        for name, size in by_hand.items()
        if size and name != "total"
    ]
    rows.append(["sum", gigabytes(by_hand["total"])])
    rows.append(["compiled", gigabytes(memory["peak_bytes"])])
    return table(["by hand, a device", "GB"], rows)


def temporaries_table(report: Mapping[str, Any]) -> str:
    """What the compiler holds besides the arguments when it holds most."""
    rows = []
    for group in report["memory"]["temporaries"]:
        largest = ", ".join(f"{b['shape']}" for b in group["largest"][:3] if b["shape"])
        rows.append([group["what"], gigabytes(group["bytes"]), largest])
    return table(["temporaries at the peak, as compiled", "GB", "largest"], rows)


def collectives_table(report: Mapping[str, Any], *, most: int = 40) -> str:
    """Collectives by bytes; those of less than a megabyte in one line."""
    modelled = report["modelled"]["collectives"]
    listed = sorted(report["collectives"], key=lambda c: -c["count"] * c["bytes"])
    large = [c for c in listed if c["bytes"] >= 1 << 20][:most]
    rows = [
        [
            " ".join([c["kind"], c["phase"]]).strip(),
            f"{c['count']:g}",
            f"{c['bytes'] / 1e6:.1f}" + ("*" if c["is_upper_bound"] else ""),
            f"{c['inside_bytes'] / 1e6:.1f}",
            f"{c['across_bytes'] / 1e6:.1f}",
            str(c["devices"]),
            f"{c['under_flops'] / 1e9:,.0f}" if c["overlapped"] else "nothing",
            f"{modelled[c['name']]['seconds'] * 1e3:.1f}",
            f"{modelled[c['name']]['waiting_s'] * 1e3:.1f}",
            c["name"],
        ]
        for c in large
    ]
    header = [
        "collective",
        "runs",
        "MB",
        "MB sent inside",
        "MB across",
        "devices",
        "GFLOP under",
        "ms modelled",
    ]
    text = table([*header, "of it waited for", "name"], rows)
    if small := len(listed) - len(large):
        text += f"\n\nand {small} smaller ones."
    if any(c["is_upper_bound"] for c in large):
        text += "\n\n\\* the exchange's buffer: at most so much travels, which rows do is data."
    return text


def traffic_table(report: Mapping[str, Any]) -> str:
    """Bytes a device sends in one run of the program, by kind of collective."""
    kinds = report["traffic"]["by_kind"]
    rows = [
        [
            kind,
            f"{total['count']:g}",
            gigabytes(total["inside_bytes"]),
            gigabytes(total["across_bytes"]),
            _percent(total["overlapped_bytes"], total["inside_bytes"] + total["across_bytes"]),
        ]
        for kind, total in sorted(kinds.items())
    ]
    return table(
        ["collective", "runs", "GB inside machines", "GB across machines", "scheduled with compute under it"],
        rows,
    )


def _turn(report: Mapping[str, Any]) -> str:
    """What one run of the program is, for people."""
    return "step" if report["program"] == "training step" else "batch of samples"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def work_lines(report: Mapping[str, Any]) -> list[str]:
    """FLOPs, their modelled time, and what is not known."""
    work, modelled = report["work"], report["modelled"]
    flops = ", ".join(
        f"{count / 1e12:.1f} TFLOP in {dtype}" for dtype, count in work["flops_by_dtype"].items()
    )
    lines = [
        f"Matrix products of a device in one {_turn(report)}: {flops},"
        f" {modelled['flops_at_peak_s'] * 1e3:.0f} ms at peak (modelled).",
        f"Modelled {_turn(report)} {modelled['step_s'] * 1e3:.0f} ms: compute"
        f" {modelled['compute_s'] * 1e3:.0f} ms, waiting for collectives"
        f" {modelled['waiting_s'] * 1e3:.0f} ms. {modelled['note']}",
    ]
    if loops := work["data_dependent_loops"]:
        lines.append(
            f"{loops} loops turn as often as the data say: counted with {work['data_dependent_trips']:.2f} turns, the"
            " mean on the fullest device of the first step's plan."
        )
    if work["unknown_custom_calls"]:
        names = ", ".join(f"{name} ({count:g} runs)" for name, count in work["unknown_custom_calls"].items())
        lines.append(f"Kernels whose FLOPs are not known and not counted: {names}.")
    return lines


def nothing_under_line(report: Mapping[str, Any]) -> str:
    """Collectives that nothing is scheduled under."""
    names = report["traffic"]["nothing_under"]
    return (
        f"No matrix product is scheduled under: {', '.join(names)}."
        if names
        else "Every collective has compute under it."
    )


def report_markdown(report: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    """The page of a report.

    Args:
        report: from `build_report`.
        figures: file names of pictures by title.
    """
    settings = report["settings"]
    about = (
        f"{settings['parameters']:,} parameters, {settings['shards']} shards, remat {settings['remat']}, bags"
        f" {settings['bags']}; {settings['tokens']:,} tokens a micro-batch, {settings['rows_per_device']:,} rows a"
        " device."
    )
    if report["program"] != "training step":
        about += " The batch has the sizes of one of the training data's."
    parts = [
        f"# {report['config']}: {report['program']} on {report['topology']} {report['gpu']}",
        "Compiled without a GPU: an order of instructions and sizes of memory, scheduled and not measured.",
        about,
        fits_line(report),
        "## Memory",
        memory_table(report),
        temporaries_table(report),
        "## Work",
        *work_lines(report),
        "## Collectives",
        traffic_table(report),
        collectives_table(report),
        nothing_under_line(report),
        *(f"![{title}]({name})" for title, name in figures.items()),
    ]
    return "\n\n".join(parts) + "\n"


def compare_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Reports side by side."""
    rows = [
        ["memory, GB a device", *(gigabytes(r["memory"]["peak_bytes"]) for r in reports)],
        ["fits", *("yes" if r["memory"]["fits"] else "no" for r in reports)],
        ["sum by hand, GB", *(gigabytes(r["memory"]["by_hand"]["total"]) for r in reports)],
        ["kept for the backward pass, GB", *(gigabytes(r["memory"]["by_hand"]["kept"]) for r in reports)],
        [f"TFLOP a device and {_turn(reports[0])}", *(f"{r['work']['flops'] / 1e12:.3f}" for r in reports)],
        ["GB sent inside machines", *(gigabytes(r["traffic"]["inside_bytes"]) for r in reports)],
        ["GB sent across machines, at most", *(gigabytes(r["traffic"]["across_bytes"]) for r in reports)],
        ["by the first plan", *(gigabytes(r["traffic"]["planned_across_bytes"]) for r in reports)],
        ["collectives with nothing under", *(str(len(r["traffic"]["nothing_under"])) for r in reports)],
        [f"{_turn(reports[0])}, ms (modelled)", *(f"{r['modelled']['step_s'] * 1e3:.1f}" for r in reports)],
        ["of it waiting, ms (modelled)", *(f"{r['modelled']['waiting_s'] * 1e3:.1f}" for r in reports)],
    ]
    return table(["", *(r["label"] for r in reports)], rows)


def remat_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Rematerialisation policies side by side; recomputed are the FLOPs beyond those of the policy with fewest."""
    least = min(r["work"]["flops"] for r in reports)
    rows = [
        [
            r["settings"]["remat"],
            f"{r['memory']['peak_bytes'] / 1e6:,.0f}",
            f"{r['memory']['by_hand']['kept'] / 1e6:,.0f}",
            f"{r['work']['flops'] / 1e9:,.2f}",
            f"{(r['work']['flops'] - least) / 1e9:,.2f}",
        ]
        for r in reports
    ]
    return table(["train.remat", "MB a device", "MB kept", "GFLOP a device", "GFLOP recomputed"], rows)
