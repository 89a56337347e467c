"""From the data loader to the devices: plans, tables and rows of the next step, made while this step runs."""

import contextlib
import logging
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from experiments.data import StepData, StepIndex, collate_home
from jaxdit.training import HomeRows, StepInputs
from parallel import DATA_AXES
from solver import (
    BagSpec,
    BalancePlan,
    CostModel,
    Links,
    StepCapacity,
    StepLayout,
    Topology,
    balance,
    capacity_for,
    step_needs,
    step_tables,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planner:
    """Makes the layouts of micro-batches; a pure function of lengths, so every process makes the same.

    Attributes:
        num_devices: devices of the mesh.
        num_heads: attention heads.
        bags: bag spec, or None to leave sequences at home.
        cost: cost model.
        topology: machines of the devices; one machine if None.
        links: speeds that `bags="auto"` compares plans by.
        max_rows: most rows of the attention layout that a device may have with `bags="auto"`, over the mean.
        block: attention block size in rows.
        head_groups: parts in which attention is computed.
        padded: whether the platform needs padded exchanges.
    """

    num_devices: int
    num_heads: int
    bags: BagSpec | str | None
    cost: CostModel
    topology: Topology | None = None
    links: Links = field(default_factory=Links)
    max_rows: float | None = None
    block: int = 128
    head_groups: int = 1
    padded: bool = True

    @property
    def devices_per_machine(self) -> int:
        """Devices between which nothing crosses machines."""
        return self.num_devices if self.topology is None else self.topology.devices_per_machine

    def layout(self, index: StepIndex) -> StepLayout:
        """The layouts of a micro-batch."""
        return StepLayout(self.plan(index, self.bags), self.block, self.head_groups)

    def plan(self, index: StepIndex, bags: BagSpec | str | None) -> BalancePlan:
        """A plan of a micro-batch under the given bags."""
        return self.plan_lengths(index.lengths, index.text_lengths, index.home(self.num_devices), bags)

    def plan_lengths(
        self, lengths: np.ndarray, text_lengths: np.ndarray, home: np.ndarray, bags: BagSpec | str | None
    ) -> BalancePlan:
        """A plan of sequences of so many tokens, of which so many are text, from the devices that they are on."""
        return balance(
            lengths,
            home,
            num_devices=self.num_devices,
            bags=bags,
            cost=self.cost,
            num_heads=self.num_heads,
            text_lengths=text_lengths,
            topology=self.topology,
            links=self.links,
            max_rows=self.max_rows if bags == "auto" else None,
        )

    def loads(self, indices: Iterable[StepIndex]) -> tuple[np.ndarray, np.ndarray]:
        """`StepStats.loads` of a step's micro-batches."""
        indices = list(indices)
        plans = ([self.plan(index, bags) for index in indices] for bags in (None, self.bags))
        before, after = map(_loads, plans)
        return before, after

    def needs(self, layout: StepLayout) -> StepCapacity:
        """What a program must hold to run the layout."""
        return step_needs(layout, padded=self.padded)


@dataclass(frozen=True)
class StepStats:
    """Figures of a step's plans, from the cost model; loads in its unit, per device, summed over micro-batches.

    Attributes:
        loads: seconds of (linear layers, attention) without balancing, and of the plan.
        static_cost_before, static_cost: J, the step's cost on a static-shape machine over the mean load.
        tokens, padded_tokens: tokens of the step, and rows of the token layout that hold none.
        computed_over_useful: J with what the program's sizes add: cost of all rows of a device's token layout and of
            the most attention of any, over the mean load.
        padded_attention_fraction: rows of the attention layout that hold no key, over all its rows; they take memory.
        sequences: sequences of the step.
        rows_sent_fraction: (token, head) rows that change device in an attention call, over all.
        bad: samples that could not be read by this process.
    """

    loads: tuple[Float[np.ndarray, "2 d"], Float[np.ndarray, "2 d"]]
    static_cost_before: float
    static_cost: float
    tokens: int
    padded_tokens: int
    computed_over_useful: float
    padded_attention_fraction: float
    sequences: int
    rows_sent_fraction: float
    bad: int

    @property
    def max_over_mean_before(self) -> float:
        """Load of the fullest device over the mean, without balancing."""
        return _max_over_mean(self.loads[0])

    @property
    def max_over_mean(self) -> float:
        """Load of the fullest device over the mean."""
        return _max_over_mean(self.loads[1])

    @property
    def padded_fraction(self) -> float:
        """Rows of the token layout that hold no token, over all its rows."""
        return self.padded_tokens / (self.padded_tokens + self.tokens)


def _max_over_mean(loads: Float[np.ndarray, "2 d"]) -> float:
    total = loads.sum(0)
    return float(total.max() / total.mean()) if total.any() else 1.0


def _loads(plans: list[BalancePlan]) -> Float[np.ndarray, "2 d"]:
    return np.sum([[plan.load - plan.attention_work, plan.attention_work] for plan in plans], axis=0)


@dataclass(frozen=True)
class PreparedStep:
    """A step ready to run: its inputs on the devices, the capacity they need, and its figures."""

    step: int
    inputs: StepInputs
    capacity: StepCapacity
    stats: StepStats


def plan_digest(plan: BalancePlan) -> int:
    """A number that two processes share exactly when their plans are the same."""
    digest = zlib.crc32(plan.head_slices.tobytes(), zlib.crc32(plan.token_slices.tobytes()))
    return digest - (1 << 31)


def size_capacity(planner: Planner, indices: Iterator[StepIndex]) -> StepCapacity:
    """The capacity that holds all the given micro-batches, with headroom."""
    return capacity_for(planner.needs(planner.layout(index)) for index in indices)


class StepAssembler:
    """Turns the data of a step's micro-batches into device arrays.

    Args:
        planner: makes the plans.
        mesh: from `parallel.data_mesh`.
        capacity: to start with; it grows when a step needs more, the same way on every process.
        upcoming: micro-batches from a step on; when the capacity must grow, it grows for all of them at once, so that
            programs are compiled rarely. None grows it for the step alone.
    """

    def __init__(
        self,
        planner: Planner,
        mesh: Mesh,
        capacity: StepCapacity,
        *,
        upcoming: Callable[[int], Iterable[StepIndex]] | None = None,
    ) -> None:
        self.planner, self.mesh, self.capacity = planner, mesh, capacity
        self._upcoming = upcoming
        self.local_devices, self._place, self._replicate = by_device_placer(mesh)

    def assemble(self, step: int, micro_batches: list[StepData]) -> PreparedStep:
        """Plan, lay out and place one step."""
        layouts = [self.planner.layout(data.index) for data in micro_batches]
        if not all(self.capacity.fits(self.planner.needs(layout)) for layout in layouts):
            self._grow(step, layouts)
        capacity = self.capacity
        rows = [home_rows(data, capacity) for data in micro_batches]
        tables = [step_tables(layout, capacity, self.local_devices) for layout in layouts]
        counts = np.zeros((len(layouts), capacity.sequences), np.int32)
        for i, data in enumerate(micro_batches):
            counts[i, : data.index.num_sequences] = data.index.image_lengths
        digest = np.tile([plan_digest(layout.plan) for layout in layouts], (len(self.local_devices), 1))

        def stack(parts: list[Any]) -> Any:
            return jax.tree.map(lambda *xs: self._place(np.stack(xs, 1)), *parts)

        inputs = StepInputs(
            rows=stack(rows),
            tables=stack(tables),
            num_image_tokens=self._replicate(counts),
            plan_digest=self._place(digest.astype(np.int32)),
        )
        return PreparedStep(step, inputs, capacity, self._stats(micro_batches, layouts))

    def _grow(self, step: int, layouts: list[StepLayout]) -> None:
        needs = [self.planner.needs(layout) for layout in layouts]
        if self._upcoming is not None:
            needs += [self.planner.needs(self.planner.layout(index)) for index in self._upcoming(step + 1)]
        self.capacity = capacity_for(needs, at_least=self.capacity)
        _LOG.info("step %d needs larger arrays: a larger program is compiled", step)

    def _stats(self, micro_batches: list[StepData], layouts: list[StepLayout]) -> StepStats:
        before = [self.planner.plan(data.index, None) for data in micro_batches]
        after = [layout.plan for layout in layouts]
        tokens = sum(int(plan.tokens.sum()) for plan in after)
        capacity, slots = self.capacity, len(after) * self.planner.num_devices
        rows = slots * (capacity.text + capacity.image)
        padded_s = len(after) * float(self.planner.cost.linear(capacity.text + capacity.image))
        computed_s = padded_s + sum(float(plan.attention_work.max()) for plan in after)
        useful_s = sum(float(plan.load.mean()) for plan in after)
        return StepStats(
            loads=(_loads(before), _loads(after)),
            static_cost_before=float(np.mean([plan.static_step_cost for plan in before])),
            static_cost=float(np.mean([plan.static_step_cost for plan in after])),
            tokens=tokens,
            padded_tokens=rows - tokens,
            computed_over_useful=computed_s / useful_s if useful_s else 1.0,
            padded_attention_fraction=1
            - sum(int(plan.rows.sum()) for plan in after) / max(slots * capacity.key_rows, 1),
            sequences=sum(data.index.num_sequences for data in micro_batches),
            rows_sent_fraction=float(np.mean([plan.rows_sent_fraction for plan in after])),
            bad=sum(len(data.bad) for data in micro_batches),
        )


def local_positions(mesh: Mesh) -> list[int]:
    """Mesh positions (row by row) of this process's devices."""
    process = jax.process_index()
    return [i for i, device in enumerate(mesh.devices.flat) if device.process_index == process]


def by_device_placer(
    mesh: Mesh,
) -> tuple[list[int], Callable[[np.ndarray], jax.Array], Callable[[np.ndarray], jax.Array]]:
    """This process's mesh positions; a function that makes a global array sharded by device from what this process has
    for them (leading axis); and one that makes a replicated array."""
    by_device = NamedSharding(mesh, P(DATA_AXES))
    replicated = NamedSharding(mesh, P())

    def place(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(by_device, x, (mesh.devices.size, *x.shape[1:]))

    def replicate(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(replicated, x, x.shape)

    return local_positions(mesh), place, replicate


def home_rows(data: StepData, capacity: StepCapacity) -> HomeRows:
    """The local sequences of a step as arrays of the capacity, leading axis this process's devices."""
    batch = collate_home(
        data,
        image_capacity=capacity.home_image,
        text_capacity=capacity.home_text,
        sequence_capacity=capacity.sequences,
    )
    return HomeRows(
        img=batch.img,
        img_segment_ids=batch.img_segment_ids,
        img_positions=batch.img_positions,
        img_token_index=batch.img_token_index,
        img_loss_weight=batch.img_loss_weight,
        txt=batch.txt,
        txt_segment_ids=batch.txt_segment_ids,
        txt_token_index=batch.txt_token_index,
        pooled=batch.pooled,
        labels=getattr(batch, "labels", None),
    )


@dataclass
class Ahead:
    """Runs a producer in a background thread, `depth` items ahead of the consumer; errors reach the consumer.

    Use as a context manager: leaving it stops the thread.
    """

    produce: Callable[[], Iterator[Any]]
    depth: int = 1
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Iterator[Any]:
        self._queue: queue.Queue = queue.Queue(maxsize=self.depth)
        self._thread = threading.Thread(target=self._run, name="step-ahead", daemon=True)
        self._thread.start()
        return self._items()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self.produce():
                self._put((item, None))
                if self._stop.is_set():
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.05)
                return

    def _items(self) -> Iterator[Any]:
        while True:
            item, error = self._queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
