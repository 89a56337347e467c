"""Sampling on several machines: the published speed-ups of SwiftFusion beside modelled ones, and the planner's choices.

"Published" are figures of arXiv 2601.20273, one sampling step on machines of 8 A100, over USP's best mesh.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from experiments._simulate_latency import latency_rows, planned_rows
from solver import (
    A100_MACHINE,
    H100_MACHINE,
    SequenceHardware,
    SequenceMesh,
    SequenceParallelPlan,
    SequenceShape,
    TimelineEvent,
    Topology,
    layer_timeline,
    sequence_plans,
)

SCHEMA = 2
DEVICES_PER_MACHINE = 8
# How far a modelled speed-up may be from the published one, of the published one.
TOLERANCE = 0.15
VARIANTS = ("TAS", "Torus on NCCL", "Torus one-sided")
# The published systems give transfers between machines and inside one a stream each: both may be under way.
PUBLISHED_HARDWARE = replace(A100_MACHINE, transfers_under_way=2)


@dataclass(frozen=True, slots=True)
class SamplingWorkload:
    """A model and a length, on so many machines.

    Attributes:
        name: for people.
        num_machines: of 8 GPUs each.
        num_heads, head_dim: of the model's attention.
        lengths: image (or video) tokens and text tokens.
        num_blocks: layers of the model.
        published: speed-ups over USP's best mesh, of `VARIANTS`.
    """

    name: str
    num_machines: int
    num_heads: int
    head_dim: int
    lengths: tuple[int, int]
    num_blocks: int
    published: tuple[float, float, float]

    @property
    def topology(self) -> Topology:
        """Its machines."""
        return Topology(self.num_machines, DEVICES_PER_MACHINE)

    @property
    def shape(self) -> SequenceShape:
        """Its sequence."""
        return SequenceShape(self.num_heads, self.head_dim, sum(self.lengths), 1)


def _flux(pixels: int, machines: int, published: tuple[float, float, float]) -> SamplingWorkload:
    image = (pixels // 16) ** 2
    return SamplingWorkload(
        f"Flux {pixels}^2, {machines} machines", machines, 24, 128, (image, 512), 19 + 38, published
    )


def _video(
    seconds: int, tokens: int, machines: int, published: tuple[float, float, float]
) -> SamplingWorkload:
    # About so many tokens with the text, of which CogVideoX has 226.
    name = f"CogVideoX {seconds} s, {machines} machines"
    return SamplingWorkload(name, machines, 48, 64, (tokens - 226, 226), 42, published)


WORKLOADS = (
    _flux(3072, 3, (1.11, 1.01, 1.11)),
    _flux(3072, 4, (1.64, 1.06, 1.77)),
    _flux(4096, 4, (1.62, 1.49, 1.61)),
    _video(20, 167_000, 3, (1.08, 1.26, 1.22)),
    _video(40, 330_000, 3, (1.06, 1.16, 1.17)),
)

# What is drawn: the largest published gain, with puts and gets.
FIGURE_WORKLOAD = WORKLOADS[1]
FIGURE_HARDWARE = replace(PUBLISHED_HARDWARE, one_sided=True)

_RING_HIDDEN = (
    "the model hides USP's ring under attention; a ring that does not overlap (`ring_overlaps`) would give the"
    " published figure, but then TAS would not lose at 2 machines, as it is known to"
)
# Why cells are missed, by workload and variant; a test holds this list to what is missed.
MISSES = {
    (WORKLOADS[0].name, VARIANTS[2]): (
        "Torus hides half of what TAS exposes, in the model; as published it gains nothing over TAS here, and 8 % at 4"
        " machines, where the model agrees"
    ),
    (WORKLOADS[1].name, VARIANTS[1]): (
        "published at 0.65 of TAS, where Flux 4096^2, with the same messages and more bytes in each, is at 0.92: no"
        " cost of a message or a byte gives both"
    ),
    (WORKLOADS[2].name, VARIANTS[0]): (
        "published as fast as Torus, which hides the all-to-all that TAS exposes; in the model that is two fifths of"
        " TAS"
    ),
    (WORKLOADS[3].name, VARIANTS[0]): _RING_HIDDEN,
    (WORKLOADS[3].name, VARIANTS[1]): _RING_HIDDEN,
}


def topology_aware_mesh(workload: SamplingWorkload) -> SequenceMesh:
    """SwiftFusion's fixed rule: Ulysses degree gcd(devices, heads), machines first, ring in what is left of them."""
    topology = workload.topology
    degree = math.gcd(topology.num_devices, workload.num_heads)
    across = math.gcd(topology.num_machines, degree)
    inside = degree // across
    return SequenceMesh(
        across, inside, topology.num_machines // across, topology.devices_per_machine // inside
    )


def variant_timelines(
    workload: SamplingWorkload, hardware: SequenceHardware = PUBLISHED_HARDWARE
) -> dict[str, tuple[TimelineEvent, ...]]:
    """A layer of each of the published variants."""
    mesh = topology_aware_mesh(workload)

    def timeline(head_groups: int | None, one_sided: bool) -> tuple[TimelineEvent, ...]:
        return layer_timeline(
            workload.topology, workload.shape, mesh, hardware, head_groups=head_groups, one_sided=one_sided
        )

    kinds = ((1, False), (None, False), (None, True))
    return {name: timeline(*kind) for name, kind in zip(VARIANTS, kinds, strict=True)}


def plans_of(workload: SamplingWorkload, hardware: SequenceHardware) -> list[SequenceParallelPlan]:
    """All plans of a workload, the fastest first."""
    return sequence_plans(
        workload.topology, workload.num_heads, workload.head_dim, workload.lengths, hardware=hardware
    )


def usp_plan(
    workload: SamplingWorkload, hardware: SequenceHardware = PUBLISHED_HARDWARE
) -> SequenceParallelPlan:
    """USP's best mesh."""
    plans = plans_of(workload, replace(hardware, one_sided=False))
    return next(plan for plan in plans if plan.layer_s == plan.usp_layer_s)


def published_table(hardware: SequenceHardware = PUBLISHED_HARDWARE) -> list[dict[str, Any]]:
    """A row for each cell: workload, variant, its published and modelled speed-up, whether they agree, or why not."""
    return [row for workload in WORKLOADS for row in _published_rows(workload, hardware)]


def _published_rows(workload: SamplingWorkload, hardware: SequenceHardware) -> Iterator[dict[str, Any]]:
    usp_s = usp_plan(workload, hardware).layer_s
    for (variant, timeline), published in zip(
        variant_timelines(workload, hardware).items(), workload.published, strict=True
    ):
        modelled = usp_s / max(event.stop_s for event in timeline)
        met = abs(modelled / published - 1) <= TOLERANCE
        yield {
            "workload": workload.name,
            "variant": variant,
            "published": published,
            "modelled": modelled,
            "met": met,
            "reason": None if met else MISSES.get((workload.name, variant), "not studied"),
        }


def build_sampling_report() -> dict[str, Any]:
    """The report; keys are the schema of the JSON output."""
    two = [_at_two(workload) for workload in WORKLOADS[1:3]]
    planned = [list(_plan_rows(*case)) for case in _cases()]
    return {
        "schema": SCHEMA,
        "modelled": True,
        "hardware": {"A100": asdict(A100_MACHINE), "H100": asdict(H100_MACHINE)},
        "published": published_table(PUBLISHED_HARDWARE),
        "two_machines": [
            {
                "workload": workload.name,
                "TAS": next(_published_rows(workload, PUBLISHED_HARDWARE))["modelled"],
            }
            for workload in two
        ],
        "plans": [row for rows in planned for row in rows],
        "summary": [_summary(rows) for rows in planned],
        "latencies": latency_rows(),
        "planned_latencies": planned_rows(),
    }


def _at_two(workload: SamplingWorkload) -> SamplingWorkload:
    return replace(workload, name=f"{workload.name.split(',')[0]}, 2 machines", num_machines=2)


def _cases() -> list[tuple[str, Sequence[SamplingWorkload], SequenceHardware]]:
    """GPUs, machines and transports that the planner is tried on."""
    two = list({workload.name: workload for workload in map(_at_two, WORKLOADS)}.values())
    # As XLA has it by default; with its option; and with puts and gets besides.
    runtimes = ((1, False), (2, False), (2, True))
    return [
        (name, workloads, replace(hardware, transfers_under_way=under_way, one_sided=one_sided))
        for name, hardware in (("A100", A100_MACHINE), ("H100", H100_MACHINE))
        for workloads in (WORKLOADS, two)
        for under_way, one_sided in runtimes
    ]


def _plan_rows(
    gpu: str, workloads: Sequence[SamplingWorkload], hardware: SequenceHardware
) -> Iterator[dict[str, Any]]:
    for workload in workloads:
        plan = plans_of(workload, hardware)[0]
        yield {
            "gpu": gpu,
            "workload": workload.name,
            "machines": workload.num_machines,
            "most_under_way": hardware.transfers_under_way,
            "puts_and_gets": hardware.one_sided,
            "algorithm": plan.algorithm,
            "mesh": asdict(plan.mesh),
            "head_groups": plan.head_groups,
            "one_sided": plan.one_sided,
            "transfers_under_way": plan.transfers_under_way,
            "layer_s": plan.layer_s,
            "usp_layer_s": plan.usp_layer_s,
            "step_s": plan.layer_s * workload.num_blocks,
            "speedup": plan.speedup,
            "across_bytes": plan.across_bytes,
            "inside_bytes": plan.inside_bytes,
        }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    speedups = [row["speedup"] for row in rows]
    return {
        "gpu": rows[0]["gpu"],
        "machines": sorted({row["machines"] for row in rows}),
        "most_under_way": rows[0]["most_under_way"],
        "puts_and_gets": rows[0]["puts_and_gets"],
        "mean": float(np.mean(speedups)),
        "max": max(speedups),
    }
