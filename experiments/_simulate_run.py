"""Plans of a workload side by side: no balancing, every equal bag spec, all devices as one bag, and free placement."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments._program import UserError, checking
from experiments._simulate_batches import Batch, Workload
from experiments._simulate_model import StepModel
from solver import BagSpec, BalancePlan, balance, parse_bags

# A plan cut finer takes gigabytes and says nothing new: (sequence, device) pairs, at most.
_MOST_PIECES = 4_000_000
_WARM_UP_BELOW = 50_000


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to plan.

    Attributes:
        name: a bag spec, "none" or "auto".
        bags: as `solver.balance` takes it.
    """

    name: str
    bags: BagSpec | str | None

    def plan(self, batch: Batch, model: StepModel) -> BalancePlan:
        """Plan a batch."""
        return balance(
            batch.lengths,
            batch.home,
            num_devices=model.machines.num_devices,
            bags=self.bags,
            cost=model.cost,
            num_heads=model.shape.num_heads,
            text_lengths=batch.text_lengths if batch.text_lengths.any() else None,
            topology=model.topology,
            links=model.links,
        )

    def pieces(self, batch: Batch) -> int:
        """(sequence, device) pairs of a plan, at most; 0 for "auto", which cuts few sequences."""
        if not isinstance(self.bags, BagSpec):
            return 0
        return len(batch.lengths) * max(self.bags.sizes)


NONE, AUTO = Variant("none", None), Variant("auto", "auto")


def variant(text: str, num_devices: int) -> Variant:
    """A variant by what a command line calls it: none, auto, full (one bag of all devices) or a bag spec.

    Raises:
        UserError: for another text, or bags that the devices are not a multiple of.
    """
    for known in (NONE, AUTO):
        if text == known.name:
            return known
    if text == "full":
        return _with_bags(BagSpec(((num_devices, 1),)))
    with checking("--bags takes none, auto, full or a bag spec"):
        spec = parse_bags(text)
        spec.layout(num_devices)
    return _with_bags(spec)


def _with_bags(spec: BagSpec) -> Variant:
    return Variant(str(spec), spec)


def variants_for(num_devices: int, chosen: Variant) -> list[Variant]:
    """No balancing, equal bags of every size that divides the devices, free placement, and the chosen one."""
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    specs = [BagSpec(((size, num_devices // size),)) for size in sizes]
    listed = [NONE, *map(_with_bags, specs), AUTO]
    return listed if chosen in listed else [*listed[:-1], chosen, AUTO]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A workload under every variant.

    Attributes:
        workload: the batches.
        plans: figures of each variant, means over batches, by the names of the JSON report.
        left_out: variants that were not planned, with the reason.
    """

    workload: Workload
    plans: Sequence[dict[str, Any]]
    left_out: dict[str, str]


def compare(workload: Workload, model: StepModel, variants: Sequence[Variant]) -> Comparison:
    """Plan every batch with every variant; the first of them is what speed-ups are over."""
    plans: list[dict[str, Any]] = []
    left_out = {}
    for entry in variants:
        pieces = max(entry.pieces(batch) for batch in workload.batches)
        if pieces > _MOST_PIECES:
            left_out[entry.name] = f"up to {pieces:,} pieces of sequences"
            continue
        plans.append(_figures(entry, workload, model))
    for figures in plans:
        figures["speedup"] = plans[0]["step_s"] / figures["step_s"]
        figures["speedup_overlapped"] = plans[0]["step_overlapped_s"] / figures["step_overlapped_s"]
    return Comparison(workload, plans, left_out)


def check_plannable(workload: Workload, model: StepModel, chosen: Variant) -> None:
    """Refuse what cannot be planned: attention that would never end, or a chosen plan that would be left out.

    Raises:
        UserError: naming the limit.
    """
    pieces = max(chosen.pieces(batch) for batch in workload.batches)
    if pieces > _MOST_PIECES:
        raise UserError(
            f"--bags {chosen.name}: at most {_MOST_PIECES:,} pieces of sequences (sequences times devices of a bag);"
            f" got {pieces:,}. Take smaller bags or fewer devices."
        )
    with checking("--lengths" if workload.name == "lengths" else "--mix"):
        for batch in workload.batches:
            NONE.plan(batch, model)


def _figures(entry: Variant, workload: Workload, model: StepModel) -> dict[str, Any]:
    batches = workload.batches
    if entry.pieces(batches[0]) < _WARM_UP_BELOW:
        entry.plan(batches[0], model)  # the first plans of a process load or compile the planner's loops
    each = []
    for batch in batches:
        plan, plan_ms = _timed(partial(entry.plan, batch, model))
        each.append({**plan_figures(plan, model), "plan_ms": plan_ms})
    mean = {name: float(np.mean([figures[name] for figures in each])) for name in each[0]}
    tokens = sum(batch.num_tokens for batch in batches)
    flops = sum(model.hardware_flops(batch.lengths) for batch in batches)
    total_s = mean["step_s"] * len(batches)
    return {
        "bags": entry.name,
        **mean,
        "plan_ms": float(np.median([figures["plan_ms"] for figures in each])),
        "load_worst": max(figures["load"] for figures in each),
        "static_step_cost_worst": max(figures["static_step_cost"] for figures in each),
        "step_worst_s": max(figures["step_s"] for figures in each),
        "tokens_per_s": tokens / total_s,
        "hfu": flops / (total_s * model.peak_flops),
    }


def plan_figures(plan: BalancePlan, model: StepModel) -> dict[str, float]:
    """Figures of one plan.

    `load`, `tokens`, `attention` and `rows` are of the fullest device over the mean; `static_step_cost` is J, text and
    image tokens padded apart where they are told apart. Fractions of rows are of all (token, head) rows; bytes are
    those that the busiest device sends in a step, for all blocks and passes.
    """
    seconds = model.seconds(plan)
    all_rows = int(plan.tokens.sum()) * plan.num_heads
    row_bytes = model.exchanged_bytes_per_row
    inside = plan.rows_sent - plan.rows_across_machines
    return {
        "load": plan.load_max_over_mean,
        "static_step_cost": plan.padded_step_cost,
        "tokens": _over_mean(plan.tokens),
        "attention": _over_mean(plan.attention_work),
        "rows": _over_mean(plan.rows),
        "tokens_moved": plan.tokens_moved_fraction,
        "rows_sent": plan.rows_sent_fraction,
        "rows_across_machines": int(plan.rows_across_machines.sum()) / all_rows,
        "sent_inside_bytes": int(inside.max()) * row_bytes,
        "sent_across_bytes": int(plan.rows_across_machines.max()) * row_bytes,
        "compute_s": seconds.compute,
        "traffic_s": seconds.traffic,
        "parameters_s": seconds.parameters,
        "optimiser_s": seconds.optimiser,
        "step_s": seconds.exposed,
        "step_overlapped_s": seconds.overlapped,
    }


def _over_mean(values: np.ndarray) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def _timed(call: Callable[[], BalancePlan]) -> tuple[BalancePlan, float]:
    """What a call returns, and its milliseconds."""
    start = time.perf_counter()
    plan = call()
    return plan, (time.perf_counter() - start) * 1e3
