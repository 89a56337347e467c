"""Reports of simulations as Markdown; everything shown comes from the report's numbers."""

from collections.abc import Iterable, Mapping
from typing import Any

from experiments._aot_text import table
from experiments._bench_report import paragraph


def report_markdown(report: Mapping[str, Any]) -> str:
    """The whole report."""
    parts = [_head(report["settings"])]
    for mix in report["mixes"]:
        parts += [
            _mix_head(mix),
            _plans_table(mix, report["settings"]),
            _times_table(mix, report["settings"]),
        ]
        parts += [f"Left out: {name}, {reason}." for name, reason in mix["left_out"].items()]
    if report["published"] is not None:
        parts += ["## Beside the published run", published_table(report), _published_text(report)]
    return "\n\n".join([*parts, _NOTES]) + "\n"


def _head(settings: Mapping[str, Any]) -> str:
    return paragraph(
        f"""{settings["num_devices"]} x {settings["gpu"]} ({settings["topology"]}), **modelled**: width
        {settings["width"]}, {settings["num_heads"]} heads, {settings["double_blocks"]} double and
        {settings["single_blocks"]} single blocks, gamma {settings["gamma"]:g}, linear layers at
        {settings["linear_flops_per_s"] / 1e12:.0f} TFLOP/s, {settings["inside_bytes_per_s"] / 1e9:g} GB/s inside and
        {settings["across_bytes_per_s"] / 1e9:g} GB/s across machines, rematerialisation: {settings["remat"]}."""
    )


def _mix_head(mix: Mapping[str, Any]) -> str:
    source = "" if mix["mix"] == "lengths" else f" `{mix['source']}`,"
    text = f"""{mix["batches"]} batch{"es" * (mix["batches"] > 1)},{source} {mix["sequences"]:,.0f} sequences and
        {mix["tokens"]:,.0f} tokens each, the longest of {mix["longest"]:,};
        {_amount(mix["hardware_flops"] / 1e15)} PFLOP a step{", text and image tokens apart" * mix["text_apart"]}."""
    return f"## {mix['mix']}\n\n{paragraph(text)}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _marked(plan: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    name = plan["bags"]
    label = f"{name} (full)" if name == f"g{settings['num_devices']}n1" else name
    return f"**{label}**" if name == settings["bags"] else label


def _plans_table(mix: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    rows = [
        [
            _marked(plan, settings),
            f"{plan['load']:.4f}",
            f"{plan['static_step_cost']:.3f}",
            f"{plan['static_step_cost_worst']:.3f}",
            f"{plan['tokens']:.3f}",
            f"{plan['attention']:.3f}",
            f"{plan['tokens_moved']:.0%}",
            f"{plan['rows_sent']:.1%}",
            f"{plan['rows_across_machines']:.1%}",
            f"{plan['plan_ms']:,.1f}",
        ]
        for plan in mix["plans"]
    ]
    header = (
        "plan",
        "load",
        "J",
        "J at most",
        "tokens",
        "attention",
        "moved",
        "rows sent",
        "across",
        "plan, ms",
    )
    return table(header, rows)


def _times_table(mix: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    rows = [
        [
            _marked(plan, settings),
            _seconds(plan["compute_s"]),
            _seconds(plan["traffic_s"]),
            f"{plan['sent_inside_bytes'] / 1e9:.1f}",
            f"{plan['sent_across_bytes'] / 1e9:.1f}",
            _seconds(plan["step_s"]),
            _seconds(plan["step_overlapped_s"]),
            f"{plan['tokens_per_s']:,.0f}",
            f"{plan['hfu']:.1%}",
            f"{plan['speedup']:.2f}",
            f"{plan['speedup_overlapped']:.2f}",
        ]
        for plan in mix["plans"]
    ]
    header = (
        "modelled",
        "compute, s",
        "traffic, s",
        "GB inside",
        "GB across",
        "step, s",
        "overlapped, s",
        "tokens/s",
        "HFU",
        "speed-up",
        "overlapped",
    )
    first = mix["plans"][0]
    others = paragraph(
        f"""Besides compute and traffic a step has {first["optimiser_s"] * 1e3:.1f} ms of optimiser, and
        {_seconds(first["parameters_s"])} s of gathers and reduce-scatters of sharded parameters under compute."""
    )
    return f"{table(header, rows)}\n\n{others}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def published_table(report: Mapping[str, Any]) -> str:
    """KnapFormer's row and ours."""
    rows = [
        [
            row["source"],
            row["bags"] or "",
            f"{row['step_before_s']:.2f}",
            f"{row['step_s']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['hfu_before']:.1%}",
            f"{row['hfu']:.1%}",
            f"{row['tokens_per_s'] / 1e3:.1f}",
        ]
        for row in report["published"]["rows"]
    ]
    header = (
        "joint, 32 H100",
        "bags",
        "step before, s",
        "after, s",
        "speed-up",
        "HFU before",
        "after",
        "K tokens/s",
    )
    return table(header, rows)


def _published_text(report: Mapping[str, Any]) -> str:
    published = report["published"]
    both = published["fit_of_both"]
    speed = report["settings"]["linear_flops_per_s"] / 1e12
    return paragraph(
        f"""Published HFU times step time is {published["published_flops_per_device"] / 1e12:,.0f} TFLOP a device and
        step; the FLOPs counted here are {published["flops_per_device"] / 1e12:,.0f}. *Speed fitted*: linear layers at
        {published["fitted_linear_flops_per_s"] / 1e12:.0f} TFLOP/s instead of {speed:.0f}, at which the unbalanced step
        takes the published time. Both published steps are met by {both["linear_flops_per_s"] / 1e12:.0f} TFLOP/s and
        {both["extra_s"]:.2f} s more in every step. Not in the model: moving data
        to where its tokens are computed, waiting for collectives and for slower GPUs, launches, kernels that small
        pieces leave inefficient, embeddings and final layers, data loading."""
    )


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(paragraph(text, bullet=True) for text in texts)


_NOTES = _lines(
    (
        """*load*, *tokens*, *attention*: the fullest device over the mean. *J*: a static-shape step, padded to the most
        tokens and the most attention, over the mean load. *moved*: tokens that leave the device they were loaded on.
        *rows sent*: (token, head) rows whose attention runs on another device, over all; *across*: on another
        machine; over 100 % where heads are fewer than a bag's devices, so that a head's keys go to several. *plan*:
        median on this machine's CPU.""",
        """*GB inside* and *across*: the most that a device sends for attention in a step. *step*: attention's traffic
        waits for compute and the other way round; *overlapped*: it runs under compute. Means over batches; throughput,
        HFU and speed-up (over none, which with dynamic shapes would take *load* instead of J) are of the mean
        *step*.""",
        """*HFU*: FLOPs of the true tokens, forward, forward again if rematerialised, and backward as two forwards, of
        24 l d^2 + 4 l^2 d a block, over step time and bfloat16 peak.""",
    )
)
