"""The engine's programs under every algorithm: seconds, bytes and memory, all in one run."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments._bench_report import Times
from experiments._bench_sampling_model import BenchPipeline, BenchSizes, request_of
from experiments.hlo import (
    Traffic,
    WorkCounter,
    attention_rules,
    count_executions,
    find_collectives,
    parse_module,
)
from jaxdit.sampling import Engine, Request
from solver import Link, SequenceHardware, SequenceParallelPlan, Topology, sequence_plans

_LOG = logging.getLogger(__name__)

NUM_DEVICES = 8
TOPOLOGIES = (Topology(2, 4), Topology(1, 8))
# What moves rows; gathers of segment ids are apart.
_OF_ROWS = ("all-to-all", "collective-permute")
_WARM = 2


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A plan under which a picture was sampled.

    Attributes:
        plan: the plan.
        grid: height and width of the picture in tokens.
        times: seconds of an evaluation.
        traffic: bytes of rows that a device sends in one, of the compiled program.
        temp_bytes: temporaries of a device.
    """

    plan: SequenceParallelPlan
    grid: tuple[int, int]
    times: Times
    traffic: Traffic
    temp_bytes: int

    @property
    def text(self) -> str:
        """Algorithm and degrees, machines x devices."""
        mesh = self.plan.mesh
        ulysses = f"{mesh.ulysses_across} x {mesh.ulysses_inside}"
        return f"{self.plan.algorithm}, Ulysses {ulysses}, ring {mesh.ring_across} x {mesh.ring_inside}"


@dataclass(frozen=True, slots=True)
class Placed:
    """All that was measured on one arrangement of the devices.

    Attributes:
        topology: machines and devices of each.
        algorithms: for every picture.
        hardware: these devices, as the planner was told.
        chosen: for every grid, the planner's choice of the plans that were measured.
        branches: seconds of a guided evaluation with its branches on all devices, and on halves of them.
        packed, alone: seconds of an evaluation of the mixed batch, and of its pictures one after another.
    """

    topology: Topology
    algorithms: list[Algorithm]
    hardware: SequenceHardware
    chosen: dict[tuple[int, int], SequenceParallelPlan]
    branches: dict[str, Times]
    packed: Times
    alone: Times


def measure(sizes: BenchSizes, topology: Topology, say: Callable[[str], None]) -> Placed:
    """Measure all programs of an arrangement, in rounds that take them in turn."""
    pipeline = BenchPipeline(sizes)
    hardware = cpu_hardware(sizes)
    candidates = [
        (grid, plan) for grid in sizes.grids for plan in algorithms_of(sizes, topology, grid, hardware)
    ]
    engine_of = partial(_engine, pipeline, topology, hardware)
    say(f"{topology}: compiling {len(candidates)} programs")
    engines = [engine_of(choose=_always(plan)) for _, plan in candidates]
    compiled = [
        engine.compiled([request_of(grid)]) for engine, (grid, _) in zip(engines, candidates, strict=True)
    ]
    largest = sizes.grids[-1]
    runs: dict[Any, tuple[Engine, list[Request]]] = {
        i: (engine, [request_of(grid)])
        for i, (engine, (grid, _)) in enumerate(zip(engines, candidates, strict=True))
    }
    guided = [request_of(largest, guided=True)]
    for name in ("batched", "apart"):
        runs[name] = engine_of(choose=partial(_of_branches, name)), guided
    mixed = [request_of(grid, number=i) for i, grid in enumerate(sizes.mixed)]
    runs["packed"] = engine_of(), mixed
    singles = engine_of(programs=2 * len(mixed))
    for i, request in enumerate(mixed):
        runs[f"alone {i}"] = singles, [request]
    times = _interleaved(runs, sizes, say)
    alone = np.sum([times[f"alone {i}"].samples for i in range(len(mixed))], axis=0)
    return Placed(
        topology,
        [
            Algorithm(plan, grid, times[i], sent(program, topology), _temp_bytes(program))
            for i, ((grid, plan), program) in enumerate(zip(candidates, compiled, strict=True))
        ],
        hardware,
        {grid: min((p for g, p in candidates if g == grid), key=_in_turn) for grid in sizes.grids},
        {name: times[name] for name in ("batched", "apart")},
        times["packed"],
        Times(tuple(alone.tolist())),
    )


def algorithms_of(
    sizes: BenchSizes, topology: Topology, grid: tuple[int, int], hardware: SequenceHardware
) -> list[SequenceParallelPlan]:
    """The planner's best mesh of every algorithm, uncut: a CPU runs nothing under anything."""
    head_dim = sizes.width // sizes.num_heads
    lengths = (grid[0] * grid[1], sizes.text)
    found: dict[str, SequenceParallelPlan] = {}
    plans = sequence_plans(topology, sizes.num_heads, head_dim, lengths, hardware=hardware)
    for plan in sorted((plan for plan in plans if plan.head_groups == 1), key=_in_turn):
        found.setdefault(plan.algorithm, plan)
    return list(found.values())


def _in_turn(plan: SequenceParallelPlan) -> float:
    """Modelled seconds of all that a layer does, one after the other, as XLA on CPU runs it."""
    return sum(event.stop_s - event.start_s for event in plan.timeline)


def _always(plan: SequenceParallelPlan) -> Callable[[Sequence[SequenceParallelPlan]], SequenceParallelPlan]:
    return lambda plans: plan


def _of_branches(name: str, plans: Sequence[SequenceParallelPlan]) -> SequenceParallelPlan:
    """The best uncut plan with branches of guidance batched, or apart."""
    fitting = [
        plan for plan in plans if (plan.cfg == "batched") == (name == "batched") and plan.head_groups == 1
    ]
    return min(fitting, key=_in_turn)


def _engine(
    pipeline: BenchPipeline, topology: Topology, hardware: SequenceHardware, **options: Any
) -> Engine:
    return Engine(
        pipeline,
        jax.devices()[: topology.num_devices],
        devices_per_machine=topology.devices_per_machine,
        hardware=hardware,
        **options,
    )


def _interleaved(
    runs: dict[Any, tuple[Engine, list[Request]]], sizes: BenchSizes, say: Callable[[str], None]
) -> dict[Any, Times]:
    """Seconds of an evaluation of each, a sample a round; the round before the first compiles."""
    samples: dict[Any, list[float]] = {name: [] for name in runs}
    for index in range(sizes.rounds + 1):
        say(f"round {index} of {sizes.rounds}")
        for name, (engine, requests) in runs.items():
            seconds = evaluation_seconds(engine, requests)
            if index:
                samples[name].append(seconds)
    return {name: Times(tuple(found)) for name, found in samples.items()}


def evaluation_seconds(engine: Engine, requests: list[Request]) -> float:
    """Median time between evaluations of a batch, the first two left out."""
    clock: list[float] = []
    engine.generate(requests, progress=lambda *_: clock.append(time.perf_counter()))
    return float(np.median(np.diff(clock)[_WARM - 1 :]))


def sent(compiled: jax.stages.Compiled, topology: Topology) -> Traffic:
    """Bytes of rows that a device sends in an evaluation, mean over devices."""
    module = parse_module(compiled.as_text() or "")
    executions = count_executions(module, data_dependent_trips=1.0)
    counter = WorkCounter(module, data_dependent_trips=1.0, rules=attention_rules(1.0))
    found = find_collectives(module, executions, counter, per_machine=topology.devices_per_machine)
    rows = [c for c in found if c.kind in _OF_ROWS]
    inside, across = (
        sum(getattr(c.traffic, name) * c.executions for c in rows) for name in ("inside", "across")
    )
    return Traffic(inside, across)


def _temp_bytes(compiled: jax.stages.Compiled) -> int:
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


def cpu_hardware(sizes: BenchSizes) -> SequenceHardware:
    """Virtual devices of this computer for the planner, measured: what all have together, a part for each.

    All links are alike, for all are this computer's memory.
    """
    devices = jax.devices()[:NUM_DEVICES]
    mesh = Mesh(np.array(devices), ("x",))
    matmul_s = _seconds(jax.jit(lambda x: x @ x), jnp.ones((1024, 1024), jnp.float32))
    flops_per_s = 2 * 1024**3 / matmul_s / NUM_DEVICES
    attention_s = _attention_seconds(sizes)
    tokens, head_dim = sizes.grids[0][0] * sizes.grids[0][1], sizes.width // sizes.num_heads
    attention = 4 * tokens**2 * head_dim * sizes.num_heads / attention_s / NUM_DEVICES / flops_per_s

    def exchanged(rows: int) -> float:
        x = jnp.ones((NUM_DEVICES * NUM_DEVICES, rows, 64), jnp.float32)
        swap = partial(lax.all_to_all, axis_name="x", split_axis=0, concat_axis=0)
        return _seconds(jax.jit(jax.shard_map(swap, mesh=mesh, in_specs=P("x"), out_specs=P("x"))), x)

    call_s, large_s = exchanged(1), exchanged(1024)
    sent_bytes = 4 * 64 * 1024 * (NUM_DEVICES - 1)
    link = Link(sent_bytes / max(large_s - call_s, 1e-5), 1, 1.0, 1.0, 1.0, call_s, call_s, 0.0)
    return SequenceHardware(
        flops_per_s=flops_per_s,
        linear=1.0,
        attention=min(attention, 1.0),
        attention_half_dim=0.0,
        processors=1,
        communication_processors=0,
        memory_bytes_per_s=link.bytes_per_s,
        inside=link,
        across=link,
        tile_rows=1,
        one_sided=False,
        ring_overlaps=False,
        transfers_under_way=1,
        element_bytes=4,
    )


def _attention_seconds(sizes: BenchSizes) -> float:
    tokens = sizes.grids[0][0] * sizes.grids[0][1]
    shape = 1, tokens, sizes.num_heads, sizes.width // sizes.num_heads
    q = jnp.ones(shape, jnp.float32)
    return _seconds(jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x)), q)


def _seconds(program: Callable[..., Any], *args: Any) -> float:
    """Median of a few calls."""
    return float(np.median(list(_timed(program, *args))))


def _timed(program: Callable[..., Any], *args: Any) -> Iterator[float]:
    jax.block_until_ready(program(*args))
    for _ in range(7):
        started = time.perf_counter()
        jax.block_until_ready(program(*args))
        yield time.perf_counter() - started


def measure_all(sizes: BenchSizes) -> list[Placed]:
    """Of all arrangements."""
    return [measure(sizes, topology, _LOG.info) for topology in TOPOLOGIES]
