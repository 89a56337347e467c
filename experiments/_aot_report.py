"""The report of a dry run as plain numbers and texts: the JSON file, and what every rendering is made from."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments._aot_gpus import DEFAULT_POOL, Gpu, Machines
from experiments._aot_memory import HandSum, shapes_of, temporaries_by_what
from experiments._aot_program import AbstractRun, Compiled, Requested
from experiments._aot_sampled import is_guided
from experiments.hlo import (
    Collective,
    Executions,
    Module,
    WorkCounter,
    attention_rules,
    collective_seconds,
    count_executions,
    find_collectives,
    model_step,
    parse_module,
    peak_buffers,
)

SCHEMA = 1
_LARGEST_TEMPORARIES = 6
# Collectives of fewer bytes are counted but not listed as having nothing under them: scalars, and index tables.
SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Analysis:
    """A compiled program, read.

    Attributes:
        module: its text.
        executions: how often its computations run.
        counter: of work.
        collectives: all of them.
        trips: turns, on average, of loops whose turns depend on data.
    """

    module: Module
    executions: Executions
    counter: WorkCounter
    collectives: Sequence[Collective]
    trips: float

    @classmethod
    def of(
        cls,
        text: str,
        *,
        per_machine: int,
        trips: float,
        block: int,
        shares: tuple[float, float] | None = None,
    ) -> "Analysis":
        """Read a scheduled HLO text; `block` is attention's, the others as in `find_collectives` and `WorkCounter`."""
        module = parse_module(text)
        executions = count_executions(module, data_dependent_trips=trips)
        counter = WorkCounter(module, data_dependent_trips=trips, rules=attention_rules(trips * block))
        collectives = find_collectives(
            module, executions, counter, per_machine=per_machine, ragged_shares=shares
        )
        return cls(module, executions, counter, collectives, trips)


@dataclass(frozen=True)
class Target:
    """What a program is compiled for."""

    gpu: Gpu
    machines: Machines


def build_report(run: AbstractRun, target: Target, compiled: Compiled, hand: HandSum) -> dict[str, Any]:
    """The report of a compiled program; keys are the schema of the JSON file."""
    plans, settings = run.requested.plans, run.requested.settings
    analysis = Analysis.of(
        compiled.text,
        per_machine=target.machines.gpus,
        trips=plans.block_visits,
        block=settings.block,
        shares=(plans.sent_fraction - plans.across_fraction, plans.across_fraction),
    )
    return {
        "schema": SCHEMA,
        "config": run.requested.name,
        "program": program_name(run.requested),
        "gpu": target.gpu.title,
        "topology": str(target.machines),
        "settings": {
            "num_devices": settings.num_devices,
            "shards": settings.shards,
            "remat": settings.remat,
            "bags": settings.bags,
            "micro_batches": settings.micro_batches,
            "head_groups": settings.head_groups,
            "parameters": _num_params(run),
            "tokens": plans.tokens,
            "rows_per_device": plans.capacity.text + plans.capacity.image,
        },
        "compiler": {
            "options": dict(run.program.compiler_options or {}),
            "traced_s": round(compiled.lower_s, 1),
            "compiled_s": round(compiled.compile_s, 1),
        },
        "memory": memory_report(run, target.gpu, compiled, analysis, hand),
        "work": work_report(analysis),
        "collectives": [collective_report(c) for c in analysis.collectives],
        "traffic": traffic_report(analysis.collectives),
        "modelled": modelled_report(analysis, target.gpu),
    }


def program_name(requested: Requested) -> str:
    """What is compiled."""
    if not requested.forward_only:
        return "training step"
    settings = requested.settings
    guidance = f", guidance {settings.sampler.guidance_scale:g}" if is_guided(settings) else ""
    return f"sampling, one evaluation{guidance}"


def _num_params(run: AbstractRun) -> int:
    import jax

    return sum(x.size for x in jax.tree.leaves(run.state.all_params))


def memory_report(
    run: AbstractRun, gpu: Gpu, compiled: Compiled, analysis: Analysis, hand: HandSum
) -> dict[str, Any]:
    """Bytes of a device, and whether they fit."""
    limit = gpu.memory_bytes
    temporaries = temporaries_by_what(peak_buffers(compiled.buffers), analysis.module, shapes_of(run))
    return {
        "gpu_bytes": limit,
        "pool_bytes": int(limit * DEFAULT_POOL),
        "peak_bytes": compiled.peak_bytes,
        "fits": compiled.peak_bytes <= limit,
        "fits_default_pool": compiled.peak_bytes <= limit * DEFAULT_POOL,
        "headroom_bytes": limit - compiled.peak_bytes,
        "arguments_bytes": compiled.argument_bytes,
        "outputs_bytes": compiled.output_bytes,
        "aliased_bytes": compiled.alias_bytes,
        "temporaries_bytes": compiled.temp_bytes,
        "temporaries": [
            {
                "what": what,
                "bytes": total,
                "largest": [
                    {"shape": _shape_text(b.shape), "bytes": b.num_bytes}
                    for b in members[:_LARGEST_TEMPORARIES]
                ],
            }
            for what, total, members in temporaries
        ],
        "by_hand": {**dataclasses.asdict(hand), "total": hand.total},
        "compiled_over_by_hand": compiled.peak_bytes / hand.total,
    }


def _shape_text(shape: Any) -> str:
    return "" if shape is None else f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


def work_report(analysis: Analysis) -> dict[str, Any]:
    """FLOPs and bytes of a device in one run."""
    work = analysis.counter.of_program()
    return {
        "flops": work.total_flops,
        "flops_by_dtype": dict(work.flops),
        "memory_traffic_bytes": work.num_bytes,
        "unknown_custom_calls": dict(work.unknown),
        "data_dependent_loops": len(analysis.executions.data_dependent),
        "data_dependent_trips": analysis.trips,
    }


def collective_report(collective: Collective) -> dict[str, Any]:
    """One collective; bytes are of one run on one device."""
    return {
        "kind": collective.kind,
        "name": collective.name,
        "where": collective.op_name,
        "phase": collective.phase,
        "computation": collective.computation,
        "count": collective.executions,
        "innermost": collective.is_innermost,
        "bytes": collective.num_bytes,
        "arrays": collective.num_arrays,
        "devices": collective.group_size,
        "inside_bytes": collective.traffic.inside,
        "across_bytes": collective.traffic.across,
        "is_upper_bound": collective.is_upper_bound,
        "planned_inside_bytes": collective.expected.inside,
        "planned_across_bytes": collective.expected.across,
        "overlapped": collective.is_overlapped,
        "matched": collective.is_matched,
        "under_instructions": collective.num_under,
        "under_flops": collective.under.total_flops,
        "under_bytes": collective.under.num_bytes,
    }


def traffic_report(collectives: Sequence[Collective]) -> dict[str, Any]:
    """Bytes that a device sends in one run of the program, by kind; and what has nothing under it.

    Ragged exchanges count as full, but in `planned_across_bytes`: as full as the first step's plan makes them.
    """
    kinds: dict[str, dict[str, float]] = {}
    for collective in collectives:
        total = kinds.setdefault(
            collective.kind, dict.fromkeys(("count", "inside_bytes", "across_bytes", "overlapped_bytes"), 0.0)
        )
        runs = collective.executions
        total["count"] += runs
        total["inside_bytes"] += runs * collective.traffic.inside
        total["across_bytes"] += runs * collective.traffic.across
        both = collective.traffic.inside + collective.traffic.across
        total["overlapped_bytes"] += runs * both * collective.is_overlapped
    return {
        "by_kind": kinds,
        "inside_bytes": sum(kind["inside_bytes"] for kind in kinds.values()),
        "across_bytes": sum(kind["across_bytes"] for kind in kinds.values()),
        "planned_across_bytes": sum(c.executions * c.expected.across for c in collectives),
        "nothing_under": nothing_under(collectives),
    }


def nothing_under(collectives: Iterable[Collective]) -> list[str]:
    """Names of collectives of a megabyte and more without a matrix product or kernel under them."""
    return [c.name for c in collectives if not c.is_overlapped and c.num_bytes >= SMALL_BYTES]


def modelled_report(analysis: Analysis, gpu: Gpu) -> dict[str, Any]:
    """Computed times; nothing in it is measured."""
    step = model_step(
        analysis.module, analysis.collectives, analysis.counter, gpu, data_dependent_trips=analysis.trips
    )
    flops = analysis.counter.of_program().flops
    return {
        "note": (
            "Computed from peak speeds, never measured: an instruction at the peak of its products or of its memory"
            " traffic (nothing stays in a cache: pessimistic for attention in plain XLA), a collective at its links'"
            " speed, no latencies, exchanges of attention as full as the first plan makes them."
        ),
        "step_s": step.total_s,
        "compute_s": step.compute_s,
        "waiting_s": sum(step.waiting_s.values()),
        "flops_at_peak_s": sum(count / gpu.flop_speed(dtype) for dtype, count in flops.items()),
        "collectives": {
            c.name: {
                "seconds": c.executions * collective_seconds(c, gpu),
                "waiting_s": step.waiting_s.get(c.name, 0.0),
            }
            for c in analysis.collectives
        },
    }


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """What docs/aot.json keeps of a program's report."""
    memory, traffic = report["memory"], report["traffic"]
    return {
        **{name: report[name] for name in ("config", "program", "gpu", "topology", "settings")},
        "fits": memory["fits"],
        "fits_default_pool": memory["fits_default_pool"],
        "peak_bytes": memory["peak_bytes"],
        "by_hand_bytes": memory["by_hand"]["total"],
        "flops": report["work"]["flops"],
        "collectives": traffic["by_kind"],
        "inside_bytes": traffic["inside_bytes"],
        "across_bytes": traffic["across_bytes"],
        "nothing_under": traffic["nothing_under"],
        "parameter_traffic_overlapped": parameter_overlap(report),
    }


def parameter_overlap(report: Mapping[str, Any]) -> dict[str, Any]:
    """Of gathers and reduce-scatters in loops over layers: how many there are, how many have compute under them."""
    found: dict[str, Any] = {}
    for kind in ("all-gather", "reduce-scatter"):
        members = [
            c
            for c in report["collectives"]
            if c["kind"] == kind and c["innermost"] and c["bytes"] >= SMALL_BYTES
        ]
        found[kind] = {"in_loops": len(members), "overlapped": sum(c["overlapped"] for c in members)}
    return found
