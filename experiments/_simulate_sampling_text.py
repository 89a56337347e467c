"""The report of sampling on several machines as Markdown."""

from collections.abc import Mapping
from typing import Any

from experiments._aot_text import table
from experiments._bench_report import paragraph
from experiments._simulate_sampling import TOLERANCE, VARIANTS


def sampling_markdown(report: Mapping[str, Any]) -> str:
    """The whole report."""
    cells = report["published"]
    missed = [cell for cell in cells if not cell["met"]]
    parts = [
        "## Speed-up over USP's best mesh, 8 A100 a machine, 400 Gb/s a machine: modelled / published",
        _published_table(cells),
        paragraph(
            f"""{len(cells) - len(missed)} of {len(cells)} cells are within {TOLERANCE:.0%}; the others are marked *.
            {_two_machines(report)}"""
        ),
        *(
            paragraph(f"{cell['workload']}, {cell['variant']}: {cell['reason']}.", bullet=True)
            for cell in missed
        ),
        "## What the planner takes",
        _plans_table(report["plans"]),
        "## Its speed-up over USP's best mesh",
        _summary_table(report["summary"]),
        paragraph(_NOTES),
        "## Seconds of a FLUX.1 picture: xDiT as published, and modelled",
        _latency_table(report["latencies"]),
        paragraph(_LATENCY_NOTES),
        "## FLUX.1-dev on machines of 8 H100: the planner's choice, seconds of 28 steps, modelled",
        _planned_table(report["planned_latencies"]),
    ]
    return "\n\n".join(parts) + "\n"


def _published_table(cells: list[Mapping[str, Any]]) -> str:
    rows = [
        [cells[first]["workload"], *(_cell(cell) for cell in cells[first : first + len(VARIANTS)])]
        for first in range(0, len(cells), len(VARIANTS))
    ]
    return table(("workload", *VARIANTS), rows)


def _cell(cell: Mapping[str, Any]) -> str:
    return f"{cell['modelled']:.2f} / {cell['published']:.2f}{'' if cell['met'] else ' *'}"


def _two_machines(report: Mapping[str, Any]) -> str:
    rows = report["two_machines"]
    return "TAS at 2 machines: " + ", ".join(f"{row['TAS']:.2f} ({row['workload']})" for row in rows) + "."


def _plans_table(plans: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            plan["gpu"],
            plan["workload"],
            _runtime(plan),
            plan["algorithm"] + (", puts" if plan["one_sided"] else ""),
            _degrees(plan["mesh"], "ulysses"),
            _degrees(plan["mesh"], "ring"),
            str(plan["head_groups"]),
            "any" if plan["one_sided"] else str(plan["transfers_under_way"]),
            f"{plan['usp_layer_s'] * 1e3:.2f}",
            f"{plan['layer_s'] * 1e3:.2f}",
            f"{plan['step_s']:.3f}",
            f"{plan['speedup']:.2f}",
        ]
        for plan in plans
    ]
    header = ("GPU", "workload", "may use", "algorithm", "Ulysses", "ring", "head groups", "under way")
    return table((*header, "USP layer, ms", "layer, ms", "step, s", "speed-up"), rows)


def _runtime(row: Mapping[str, Any]) -> str:
    """What transfers the planner may use, and how many of NCCL's may be under way at a time."""
    return f"NCCL, {row['most_under_way']} under way" + (", or puts" if row["puts_and_gets"] else "")


def _degrees(mesh: Mapping[str, int], kind: str) -> str:
    return f"{mesh[f'{kind}_across']} x {mesh[f'{kind}_inside']}"


def _summary_table(summary: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            row["gpu"],
            ", ".join(map(str, row["machines"])),
            _runtime(row),
            f"{row['mean']:.2f}",
            f"{row['max']:.2f}",
        ]
        for row in summary
    ]
    return table(("GPU", "machines", "may use", "mean", "max"), rows)


def _latency_table(rows: list[Mapping[str, Any]]) -> str:
    cells = [
        [
            f"{row['gpus']} {row['gpu']}",
            row["model"],
            f"{row['pixels']}",
            row["algorithm"],
            f"{row['published_s']:.2f}",
            f"{row['modelled_s']:.2f}",
        ]
        for row in rows
    ]
    return table(("GPUs", "model", "pixels", "algorithm", "published, s", "modelled, s"), cells)


def _planned_table(rows: list[Mapping[str, Any]]) -> str:
    machines = sorted({row["machines"] for row in rows})
    by_size: dict[int, list[str]] = {}
    for row in rows:
        by_size.setdefault(row["pixels"], []).append(
            f"{row['seconds']:.2f} ({row['algorithm'].replace('_', ' ')})"
        )
    return table(
        ("pixels", *(f"{count} x 8" for count in machines)),
        [[str(size), *cells] for size, cells in by_size.items()],
    )


_LATENCY_NOTES = """Published are whole pictures with torch.compile (xDiT, docs/performance/flux.md), text encoders
    and decoder included; modelled are the 57 layers in all steps, which is most of 28 steps at 1,024 pixels and little
    of 4. The model hides all ring steps."""
_NOTES = """*TAS*: Ulysses across machines first, ring inside. Degrees are machines x devices of each. *head groups*:
    pieces that Ulysses is cut into, so that one's exchange runs under another's attention. *under way*: transfers at a
    time; XLA's default is 1, more is an option of its compiler (`plan.compiler_options`), and the published systems,
    whose table is the first, have a stream for transfers between machines and one for those inside. *puts*: one-sided
    puts and gets instead of NCCL's calls. *step*: the layers alone, one branch of guidance. All is modelled, with one
    set of constants for a GPU (`--json` has them); nothing is fitted to a row, and USP is given NCCL."""
