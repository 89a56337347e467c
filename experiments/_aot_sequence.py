"""Sequence-parallel attention of the published sampling workloads, compiled for H100 that are not here.

Degrees are those that `solver.plan_sequence_parallel` would take for the algorithm: of its candidates of that name the
fastest. A length that the devices do not share evenly is filled up, with segment ids, as `parallel.pad_sequence` does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._aot_compiler import target_devices
from experiments._aot_gpus import Gpu, Machines
from experiments._sequence_bytes import MovedRows
from experiments._simulate_sampling import WORKLOADS
from parallel import (
    RING_AXES,
    ULYSSES_AXES,
    ReplicatedText,
    sequence_attention,
    sequence_mesh,
)
from solver import H100_MACHINE, SequenceMesh, SequenceParallelPlan, Topology, sequence_plans

_AXES = (*RING_AXES, *ULYSSES_AXES)
_BF16_BYTES, _INT32_BYTES = 2, 4
MACHINES = (Machines(1, 8), Machines(2, 8), Machines(4, 8))


@dataclass(frozen=True, slots=True)
class Workload:
    """A layer's attention.

    Attributes:
        name: for people.
        num_heads, head_dim: of the model.
        lengths: image (or video) tokens and text tokens.
        text_replicated: whether the text is whole on every device instead of a part of the sequence.
    """

    name: str
    num_heads: int
    head_dim: int
    lengths: tuple[int, int]
    text_replicated: bool = False

    @property
    def length(self) -> int:
        """Tokens that are shared among the devices."""
        return self.lengths[0] if self.text_replicated else sum(self.lengths)

    @property
    def text(self) -> int:
        """Tokens that every device has."""
        return self.lengths[1] if self.text_replicated else 0


def _published(index: int) -> Workload:
    of = WORKLOADS[index]
    return Workload(of.name.partition(",")[0], of.num_heads, of.head_dim, of.lengths)


FLUX_3072, FLUX_4096, VIDEO = (_published(i) for i in (1, 2, 3))
# On 32 devices as many tokens as they share evenly: kernels with segment ids take minutes to compile there.
VIDEO_EVEN = Workload(
    "CogVideoX 20 s, even", VIDEO.num_heads, VIDEO.head_dim, (VIDEO.lengths[0] + 8, VIDEO.lengths[1])
)
WHOLE_TEXT = Workload("Flux 3072^2, text whole", 24, 128, FLUX_3072.lengths, text_replicated=True)
HEADS_30 = Workload("30 heads", 30, 64, FLUX_3072.lengths)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A candidate of the planner, by the name it has there."""

    name: str
    head_groups: int = 1

    @property
    def title(self) -> str:
        """For people."""
        name = {"usp": "USP", "topology_aware": "topology-aware"}.get(self.name, self.name.title())
        return name if self.head_groups == 1 else f"{name}, {self.head_groups} groups"


ULYSSES, RING, USP = Algorithm("ulysses"), Algorithm("ring"), Algorithm("usp")
ULYSSES_IN_GROUPS, TOPOLOGY_AWARE = Algorithm("ulysses", 2), Algorithm("topology_aware")
TORUS = Algorithm("torus")


@dataclass(frozen=True, slots=True)
class Case:
    """A program: attention of a workload by an algorithm on machines, with or without its gradient."""

    algorithm: Algorithm
    machines: Machines
    workload: Workload
    gradient: bool

    @property
    def title(self) -> str:
        """For people."""
        direction = "with gradient" if self.gradient else "forward"
        return f"{self.algorithm.title}, {self.machines}, {self.workload.name}, {direction}"

    @property
    def padded_length(self) -> int:
        """Tokens of the sequence, filled up."""
        devices = self.machines.num_devices
        return -(-self.workload.length // devices) * devices

    @property
    def has_ids(self) -> bool:
        """Whether segment ids mark what was filled up."""
        return self.padded_length > self.workload.length

    @property
    def plan(self) -> SequenceParallelPlan:
        """The planner's fastest of the algorithm.

        Raises:
            LookupError: if it has none.
        """
        found = _plan(self)
        if found is None:
            raise LookupError(f"no {self.algorithm.title} of {self.workload.name} on {self.machines}")
        return found

    @property
    def is_possible(self) -> bool:
        """Whether the planner has such a candidate: Ulysses has none for more devices than heads."""
        return _plan(self) is not None

    @property
    def degrees(self) -> SequenceMesh:
        """Of the plan."""
        return self.plan.mesh

    @property
    def rows(self) -> MovedRows:
        """What it moves, by formula."""
        degrees, work = self.degrees, self.workload
        tokens = self.padded_length / degrees.num_devices
        heads = math.ceil(work.num_heads / degrees.ulysses_degree) * degrees.ulysses_degree
        return MovedRows(
            degrees,
            tokens * heads * work.head_dim * _BF16_BYTES,
            element_bytes=_BF16_BYTES,
            torus=self.algorithm == TORUS,
            gradient=self.gradient,
            ids_bytes=tokens * _INT32_BYTES if self.has_ids else 0.0,
        )


def _plan(case: Case) -> SequenceParallelPlan | None:
    wanted = case.algorithm.name, case.algorithm.head_groups
    plans = _plans(case.machines, case.workload)
    return next((plan for plan in plans if (plan.algorithm, plan.head_groups) == wanted), None)


@cache
def _plans(machines: Machines, work: Workload) -> list[SequenceParallelPlan]:
    topology = Topology(machines.count, machines.gpus)
    return sequence_plans(topology, work.num_heads, work.head_dim, work.lengths, hardware=H100_MACHINE)


def cases() -> list[Case]:
    """Every shape and every number of machines, forward and with gradient; and on 4 x 8 what is out of the ordinary."""
    algorithms = (ULYSSES, ULYSSES_IN_GROUPS, RING, USP, TOPOLOGY_AWARE, TORUS)
    one, two, four = MACHINES
    where = {FLUX_3072: MACHINES, FLUX_4096: (four,), VIDEO: (one, two), VIDEO_EVEN: (four,)}
    usual = [
        (algorithm, machines, workload)
        for workload, those in where.items()
        for machines in those
        for algorithm in algorithms
    ]
    odd = [(algorithm, four, HEADS_30) for algorithm in (USP, TORUS)]
    odd += [(algorithm, four, WHOLE_TEXT) for algorithm in (RING, USP, TORUS)]
    every = [Case(*case, gradient) for case in (*usual, *odd) for gradient in (False, True)]
    return [case for case in every if case.is_possible]


@dataclass(frozen=True, slots=True)
class CompiledCase:
    """Scheduled HLO of one device, of at most so many transfers under way, and bytes of its temporaries."""

    case: Case
    transfers_under_way: int
    text: str
    temp_bytes: int


def compile_case(case: Case, gpu: Gpu, *, in_flight: int = 1) -> CompiledCase:
    """Compile a case for GPUs of a kind, to have at most so many transfers under way at a time (XLA's default: 1).

    Raises:
        UserError: if this JAX cannot compile for them.
    """
    mesh = sequence_mesh(target_devices(gpu, case.machines), **case.plan.mesh_options)
    program = _program(case, mesh)
    options = {"xla_gpu_experimental_parallel_collective_overlap_limit": in_flight}
    compiled: Any = jax.jit(program, compiler_options=options).lower(*_arguments(case, mesh)).compile()
    return CompiledCase(case, in_flight, compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


def _arguments(case: Case, mesh: Mesh) -> list[Any]:
    """(q, k, v), (text q, k, v), segment ids, and cotangents: shapes, None for what the case lacks."""
    work = case.workload
    sharded, replicated = NamedSharding(mesh, P(None, _AXES)), NamedSharding(mesh, P())

    def rows(length: int, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        shape = (1, length, work.num_heads, work.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    own = rows(case.padded_length, sharded)
    text = rows(work.text, replicated) if work.text else None
    ids = jax.ShapeDtypeStruct((1, case.padded_length), jnp.int32, sharding=sharded) if case.has_ids else None
    return [(own,) * 3, None if text is None else (text,) * 3, ids, (own, text)]


def _program(case: Case, mesh: Mesh) -> Callable[..., Any]:
    rows, whole = P(None, _AXES), P()
    of_text = whole if case.workload.text else None
    attend: Any = jax.shard_map(
        partial(_attention, case),
        mesh=mesh,
        in_specs=(rows, of_text, rows if case.has_ids else None),
        out_specs=(rows, of_text),
        check_vma=False,
    )
    if not case.gradient:
        return lambda rows, text, ids, _: attend(rows, text, ids)

    def both(rows, text, ids, weights):
        # As in a model, where other layers run between: the gradient starts after, and from what was kept.
        outputs, pullback = lax.optimization_barrier(jax.vjp(lambda *x: attend(*x, ids), rows, text))
        return outputs, pullback(jax.tree.map(jnp.multiply, outputs, weights))

    return both


def _attention(case: Case, rows: Any, text: Any, ids: Any) -> tuple[Any, Any]:
    """One device's part: rows, and the text's or None."""
    options: dict[str, Any] = {
        "segment_ids": ids,
        "text": None if text is None else ReplicatedText(*text),
    }
    found: Any = sequence_attention(**case.plan.attention_options)(*rows, **options)
    return (found, None) if text is None else (found.out, found.text)
