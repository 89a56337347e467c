"""How a batch is laid over the devices: a sequence-parallel plan for one request, a balanced one for several."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from parallel import sequence_attention, sequence_mesh
from solver import (
    A100_MACHINE,
    H100_MACHINE,
    CostModel,
    Links,
    RouteCapacity,
    SequenceHardware,
    SequenceParallelPlan,
    StepCapacity,
    StepLayout,
    Topology,
    balance,
    capacity_for,
    sequence_plans,
    step_needs,
)

from ._buckets import SizeBuckets
from ._packed_layout import PackedLayout
from ._program import Layout
from ._sequence_layout import SequenceLayout

# Linear layers reach about so much of what attention does, as `solver.balance` takes it by default.
_GAMMA = 0.4
_BLOCK = 128
# Programs for packed batches are made for so many times the image tokens of the batch at hand, and of so many batches
# drawn from the requests so far, of which as many are remembered: few are too small for what comes.
_HEADROOM = 1.4
_DRAWN = 24
_REMEMBERED = 256
# Entries of tables of runs: a few integers each.
_RUNS = 4


SequenceChooser = Callable[[Sequence[SequenceParallelPlan]], SequenceParallelPlan]
"""Chooses the plan of a single request from `solver.sequence_plans` of its length, which lists the fastest first."""


def fastest_plan(plans: Sequence[SequenceParallelPlan]) -> SequenceParallelPlan:
    """The first: the one that ends soonest by the planner's model."""
    return plans[0]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A batch's layout.

    Attributes:
        layout: static sizes, part of a program's key.
        tables: host arrays for this process's devices, or None.
        compiler_options: of the program.
        text: for people.
        outgrown: a layout in whose place this one is; no batch will have it again.
    """

    layout: Layout
    tables: Any
    compiler_options: dict[str, Any]
    text: str
    outgrown: Layout | None = None


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a batch's plan depends on.

    Attributes:
        image, text: tokens of each request, the latter (branches, requests).
        most_text: rows of text features, those past a caption's length included.
    """

    image: np.ndarray
    text: np.ndarray
    most_text: int

    @property
    def branches(self) -> int:
        """Of guidance."""
        return self.text.shape[0]


@dataclass
class BatchPlanner:
    """Makes plans; the same on every process.

    Attributes:
        devices: all there are.
        devices_per_machine: of each; a process's if None.
        num_heads, head_dim: of attention.
        buckets: sizes of programs for one request.
        hardware: for plans of one request; by the kind of device if None.
        choose: the plan of one request, asked once for each size, text and number of branches.
        padded: whether exchanges are padded, as on CPUs.
    """

    devices: list[Any]
    devices_per_machine: int | None
    num_heads: int
    head_dim: int
    buckets: SizeBuckets
    hardware: SequenceHardware | None = None
    choose: SequenceChooser = fastest_plan
    padded: bool = True
    chosen: dict[tuple[int, int, int], SequenceParallelPlan] = field(default_factory=dict)
    capacities: dict[tuple[int, int], StepCapacity] = field(default_factory=dict)
    seen: deque[tuple[int, int]] = field(default_factory=partial(deque, maxlen=_REMEMBERED))
    meshes: dict[Any, Mesh] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        """Machines and the devices of each."""
        per_machine = self.devices_per_machine or self._devices_of_a_process()
        return Topology(len(self.devices) // per_machine, per_machine)

    def _devices_of_a_process(self) -> int:
        counts = np.unique([device.process_index for device in self.devices], return_counts=True)[1]
        return int(counts[0])

    def plan(self, shape: BatchShape) -> BatchPlan:
        """One request over all devices, or several packed."""
        return self._sequence(shape) if len(shape.image) == 1 else self._packed(shape)

    def _sequence(self, shape: BatchShape) -> BatchPlan:
        size = self.buckets.fit(int(shape.image[0]))
        found = self._chosen(size, shape)
        mesh = self._mesh(**found.mesh_options)
        shared = found.mesh.num_devices
        image, text = -(-size // shared), -(-shape.most_text // shared)
        is_exact = image * shared == int(shape.image[0]) and bool((shape.text == text * shared).all())
        attend = _attention(**found.attention_options)
        layout = SequenceLayout(mesh, attend, image, text, 1, shape.branches, is_exact)
        return BatchPlan(layout, None, found.compiler_options, _text_of(found, size, shape))

    def _chosen(self, size: int, shape: BatchShape) -> SequenceParallelPlan:
        key = size, shape.most_text, shape.branches
        if key not in self.chosen:
            hardware = self.hardware or _hardware(self.devices[0].device_kind)
            plans = sequence_plans(
                self.topology,
                self.num_heads,
                self.head_dim,
                (size, shape.most_text),
                cfg=shape.branches == 2,
                # Programs here have XLA's collectives, and no puts and gets.
                hardware=replace(hardware, one_sided=False),
            )
            found = self.choose(plans)
            _check_chosen(found, self.topology, shape.branches)
            self.chosen[key] = found
        return self.chosen[key]

    def _mesh(self, **options: Any) -> Mesh:
        key = tuple(sorted(options.items()))
        if key not in self.meshes:
            self.meshes[key] = sequence_mesh(self.devices, **options)
        return self.meshes[key]

    def _packed(self, shape: BatchShape) -> BatchPlan:
        topology = self.topology
        mesh = self._mesh(ulysses_degree=len(self.devices), devices_per_machine=topology.devices_per_machine)
        requests = 1 << (len(shape.image) - 1).bit_length()
        steps = self._steps(shape, requests, 1.0)
        key = requests, shape.branches
        self.seen.extend(zip(shape.image.tolist(), shape.text.max(0).tolist(), strict=True))
        needs, had = step_needs(steps, padded=self.padded), self.capacities.get(key)
        have = had
        if had is None or not had.fits(needs):
            room = _roomy(capacity_for([needs, *self._likely(_full(shape, requests), requests)]))
            have = self.capacities[key] = room if had is None else had.grown(room)
        assert have is not None
        layout = PackedLayout(mesh, have, requests, shape.branches)
        outgrown = None if had in (None, have) else replace(layout, capacity=had)
        process = jax.process_index()
        local = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == process]
        return BatchPlan(layout, layout.tables(steps, local), {}, _text_of_packed(steps, shape), outgrown)

    def _likely(self, shape: BatchShape, requests: int) -> list[StepCapacity]:
        """What larger batches like this one need, and batches drawn from the requests so far."""
        rng = np.random.default_rng(len(self.seen))  # the same on every process
        drawn = np.array(self.seen)[rng.integers(len(self.seen), size=(_DRAWN, requests))]
        text = np.repeat(drawn[:, None, :, 1], shape.branches, axis=1)
        likely = [BatchShape(drawn[i, :, 0], text[i], shape.most_text) for i in range(_DRAWN)]
        layouts = [self._steps(each, requests, _HEADROOM) for each in (shape, *likely)]
        return [step_needs(layout, padded=self.padded) for layout in layouts]

    def _steps(self, shape: BatchShape, requests: int, factor: float) -> StepLayout:
        """A balanced plan of all branches' sequences, of so many times the image tokens."""
        missing = requests - len(shape.image)
        image = np.pad(np.ceil(factor * shape.image).astype(np.int64), (0, missing))
        text = np.pad(shape.text, ((0, 0), (0, missing))).reshape(-1)
        image_of_all = np.tile(image, shape.branches)
        plan = balance(
            image_of_all + text,
            np.tile(_homes(image, len(self.devices)), shape.branches),
            num_devices=len(self.devices),
            bags="auto",
            cost=CostModel(self.num_heads * self.head_dim, _GAMMA),
            num_heads=self.num_heads,
            text_lengths=text,
            topology=self.topology,
            links=Links(padded=self.padded),
        )
        return StepLayout(plan, _BLOCK)


def _check_chosen(plan: Any, topology: Topology, branches: int) -> None:
    """Refuse a plan for other devices or branches.

    Raises:
        TypeError: for what is no plan.
        ValueError: naming the rule.
    """
    if not isinstance(plan, SequenceParallelPlan):
        raise TypeError(
            f"Engine: choose must return a SequenceParallelPlan; got a {type(plan).__name__}. Return one of the plans"
            " that it is given."
        )
    halves = {"machines": (2, 1), "devices": (1, 2)}.get(plan.cfg, (1, 1))
    mesh = plan.mesh
    across = halves[0] * mesh.ulysses_across * mesh.ring_across
    inside = halves[1] * mesh.ulysses_inside * mesh.ring_inside
    if (across, inside) != (topology.num_machines, topology.devices_per_machine):
        raise ValueError(
            f"Engine: the chosen plan must be for the engine's machines x devices, {topology.num_machines} x"
            f" {topology.devices_per_machine}; got one for {across} x {inside}. Return one of the plans that choose is"
            " given."
        )
    if (branches == 2) == (plan.cfg == "none") or plan.one_sided:
        raise ValueError(
            f"Engine: the chosen plan must be for {branches} branches of guidance, two-sided; got cfg={plan.cfg!r},"
            f" one_sided={plan.one_sided}. Return one of the plans that choose is given."
        )


@cache
def _attention(**options: Any) -> Any:
    """`sequence_attention`, one for the same options: it is part of a program's key."""
    return sequence_attention(**options)


def _full(shape: BatchShape, requests: int) -> BatchShape:
    """A batch of so many requests: the missing ones are as the mean, with the longest text."""
    missing = requests - len(shape.image)
    image = np.pad(shape.image, (0, missing), constant_values=max(int(shape.image.mean()), 1))
    text = np.pad(shape.text, ((0, 0), (0, missing)), constant_values=int(shape.text.max()))
    return replace(shape, image=image, text=text)


def _roomy(capacity: StepCapacity) -> StepCapacity:
    """The capacity with as much room on the routes between home and token layout as any plan needs that fits.

    Rows take these once in an evaluation, and those of attention in every layer: room here costs next to nothing, and a
    plan that goes other ways than those before no program.
    """
    return replace(
        capacity,
        text_route=_route_of_any(capacity.text_route, capacity.home_text, capacity.text),
        image_route=_route_of_any(capacity.image_route, capacity.home_image, capacity.image),
    )


def _route_of_any(route: RouteCapacity, home: int, token: int) -> RouteCapacity:
    return replace(
        route,
        send=home,
        recv=token,
        rounds=(min(home, token),) * len(route.rounds),
        send_runs=_RUNS * route.send_runs,
        recv_runs=_RUNS * route.recv_runs,
        stay_runs=_RUNS * route.stay_runs,
    )


def _homes(lengths: np.ndarray, devices: int) -> np.ndarray:
    """Device at which each request's latents stay: the one with the fewest so far, the longest first."""
    home, load = np.zeros(len(lengths), np.int64), np.zeros(devices, np.int64)
    for request in np.argsort(-lengths, kind="stable"):
        home[request] = load.argmin()
        load[home[request]] += lengths[request]
    return home


def _hardware(kind: str) -> SequenceHardware:
    return A100_MACHINE if "A100" in kind else H100_MACHINE


def _text_of(plan: SequenceParallelPlan, size: int, shape: BatchShape) -> str:
    mesh = plan.mesh
    branches = {"none": "", "batched": ", both branches of guidance on all devices"}
    apart = f", branches of guidance on halves of the {plan.cfg}"
    return (
        f"one request of {shape.image[0]:,} image tokens (program for {size:,}): {plan.algorithm}, Ulysses"
        f" {mesh.ulysses_across} x {mesh.ulysses_inside}, ring {mesh.ring_across} x {mesh.ring_inside} (machines x"
        f" devices){branches.get(plan.cfg, apart)}"
    )


def _text_of_packed(steps: StepLayout, shape: BatchShape) -> str:
    plan = steps.plan
    return (
        f"{len(shape.image)} requests of {shape.image.min():,} to {shape.image.max():,} image tokens, packed: the"
        f" fullest device has {plan.load_max_over_mean:.3f} times the mean load,"
        f" {plan.rows_sent_fraction:.0%} of attention's rows change device"
    )
