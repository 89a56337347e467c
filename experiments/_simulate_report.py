"""The report of a simulation as plain numbers and texts: the JSON output, and what tables and figures are made from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments._simulate_model import FLUX, StepModel
from experiments._simulate_run import NONE, Comparison, Variant

SCHEMA = 1

# KnapFormer's joint run on 32 H100 (arXiv 2508.06001), a FLUX-shaped model: before balancing and after.
_PUBLISHED_STEP_S = (8.05, 3.44)
_PUBLISHED_HFU = (0.1269, 0.2974)
_PUBLISHED_TOKENS_PER_S = 107.5e3
# The bags of its twelve experiments that balance the joint mix best; which ones its run had is not known here.
_PUBLISHED_BAGS = "g8n4"


def build_report(model: StepModel, comparisons: Sequence[Comparison], chosen: Variant) -> dict[str, Any]:
    """The report; keys are the schema of the JSON output."""
    shape, machines = model.shape, model.machines
    mixes = [_mix(comparison, model) for comparison in comparisons]
    return {
        "schema": SCHEMA,
        "modelled": True,
        "settings": {
            "gpu": model.gpu.title,
            "topology": str(machines),
            "num_devices": machines.num_devices,
            "bags": chosen.name,
            "width": shape.width,
            "num_heads": shape.num_heads,
            "double_blocks": shape.double_blocks,
            "single_blocks": shape.single_blocks,
            "gamma": model.gamma,
            "remat": "full" if model.remat else "none",
            "linear_flops_per_s": model.flops_per_s,
            "peak_flops_per_s": model.gpu.flop_speed("bf16"),
            "inside_bytes_per_s": model.gpu.nvlink,
            "across_bytes_per_s": model.gpu.network,
        },
        "mixes": mixes,
        "published": next(
            (_beside_published(mix, model) for mix in mixes if _is_published(mix, model)), None
        ),
    }


def _mix(comparison: Comparison, model: StepModel) -> dict[str, Any]:
    workload = comparison.workload
    lengths = [batch.lengths for batch in workload.batches]
    return {
        "mix": workload.name,
        "source": workload.source,
        "text_apart": any(bool(batch.text_lengths.any()) for batch in workload.batches),
        "batches": len(lengths),
        "sequences": float(np.mean([len(of_batch) for of_batch in lengths])),
        "tokens": float(np.mean([of_batch.sum() for of_batch in lengths])),
        "longest": max(int(of_batch.max()) for of_batch in lengths),
        "hardware_flops": float(np.mean([model.hardware_flops(of_batch) for of_batch in lengths])),
        "plans": list(comparison.plans),
        "left_out": comparison.left_out,
    }


def _is_published(mix: Mapping[str, Any], model: StepModel) -> bool:
    where = (model.gpu.name, str(model.machines))
    is_its_step = mix["mix"] == "joint" and not mix["text_apart"]
    return is_its_step and where == ("h100", "4x8") and model.shape == FLUX and model.remat


def _beside_published(mix: Mapping[str, Any], model: StepModel) -> dict[str, Any]:
    """The published row, ours, and ours at the speed of linear layers that makes the unbalanced step the published."""
    plans = {plan["bags"]: plan for plan in mix["plans"]}
    before, after, free = plans[NONE.name], plans[_PUBLISHED_BAGS], plans["auto"]
    published_before, published_after = _PUBLISHED_STEP_S
    fitted = before["compute_s"] / (published_before - before["optimiser_s"])

    def fitted_step(plan: Mapping[str, Any]) -> float:
        return plan["compute_s"] / fitted + plan["traffic_s"] + plan["optimiser_s"]

    def row(source: str, bags: str | None, steps: tuple[float, float]) -> dict[str, Any]:
        per_step = mix["hardware_flops"] / model.peak_flops
        return {
            "source": source,
            "bags": bags,
            "step_before_s": steps[0],
            "step_s": steps[1],
            "speedup": steps[0] / steps[1],
            "hfu_before": per_step / steps[0],
            "hfu": per_step / steps[1],
            "tokens_per_s": mix["tokens"] / steps[1],
        }

    published = row("KnapFormer, published (measured)", None, (published_before, published_after))
    published |= {
        "hfu_before": _PUBLISHED_HFU[0],
        "hfu": _PUBLISHED_HFU[1],
        "tokens_per_s": _PUBLISHED_TOKENS_PER_S,
    }
    # Both published steps at once: a speed, and seconds that every step has and the model has not.
    fixed = before["optimiser_s"]
    shrunk = after["compute_s"] / before["compute_s"]
    extra = published_after - after["traffic_s"] - fixed - shrunk * (published_before - fixed)
    extra /= 1 - shrunk
    return {
        "rows": [
            published,
            row("modelled", _PUBLISHED_BAGS, (before["step_s"], after["step_s"])),
            row("modelled", "auto", (before["step_s"], free["step_s"])),
            row("modelled, speed fitted", _PUBLISHED_BAGS, (published_before, fitted_step(after))),
            row("modelled, speed fitted", "auto", (published_before, fitted_step(free))),
        ],
        "fitted_linear_flops_per_s": model.flops_per_s * fitted,
        "published_flops_per_device": _PUBLISHED_HFU[1] * published_after * model.gpu.flop_speed("bf16"),
        "flops_per_device": mix["hardware_flops"] / model.machines.num_devices,
        "fit_of_both": {
            "linear_flops_per_s": model.flops_per_s
            * before["compute_s"]
            / (published_before - fixed - extra),
            "extra_s": extra,
        },
    }
