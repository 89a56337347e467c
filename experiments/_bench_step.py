"""Step time of a small MMDiT under several bag specs, on the recorded joint mix brought to 8 virtual devices.

A device of a mesh waits for the fullest one; virtual devices share the machine's cores, so a device without work lends
its share to the others. Linear layers are padded to a static size, so there every device does as much as the fullest.
Attention is not: its loops run over the block pairs there are. So each batch is measured in two forms:

* `waiting`: the tables are padded so that every device visits as many block pairs as the fullest (masked ones, which
  change no bit of the result). This is what devices of their own would take, and what J prices.
* `lending`: the tables as they are.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from experiments._bench_batches import RowWidths, random_data
from experiments._feed import Planner, PreparedStep, StepAssembler, size_capacity
from experiments._platform import compiler_options
from experiments._run_planner import CPU_LINKS
from experiments.data import StepIndex
from jaxdit.encoders import PrecomputedText
from jaxdit.models import MMDiT, MMDiTConfig
from jaxdit.training import FlowMatching, StepInputs, TextToImage, TrainProgram, TrainState, make_train_step
from parallel import data_mesh
from solver import AttentionTables, BalancePlan, CostModel, StepCapacity, StepTables

_LOG = logging.getLogger(__name__)

NUM_DEVICES = 8
WIDTH = 256
NUM_HEADS = 8
BLOCK = 64
WIDTHS = RowWidths()
# The plans' gamma: published for H100. Another changes assignments little, and J as the report says.
PLAN_COST = CostModel(width=WIDTH, gamma=0.4)


def make_program(num_double_blocks: int, num_single_blocks: int) -> TrainProgram:
    """The training program: AdamW in float32, parameters replicated over `NUM_DEVICES` devices."""
    config = MMDiTConfig(
        in_channels=WIDTHS.channels,
        text_channels=WIDTHS.text_channels,
        pooled_channels=WIDTHS.pooled_channels,
        width=WIDTH,
        num_heads=NUM_HEADS,
        num_double_blocks=num_double_blocks,
        num_single_blocks=num_single_blocks,
        axes_dim=(8, 12, 12),
        compute_dtype="float32",
    )
    mesh = data_mesh(jax.devices()[:NUM_DEVICES], shards=1)
    return TrainProgram(
        module=nnx.eval_shape(lambda: _make_module(config)),
        objective=FlowMatching(),
        optimizer=optax.adamw(1e-4),
        mesh=mesh,
        num_heads=NUM_HEADS,
        remat="none",
        compiler_options=compiler_options(mesh),
    )


def _make_module(config: MMDiTConfig) -> nnx.Module:
    text = PrecomputedText(text_channels=WIDTHS.text_channels, pooled_channels=WIDTHS.pooled_channels)
    return TextToImage(MMDiT(config, rngs=nnx.Rngs(0)), text)


def init_state(program: TrainProgram) -> TrainState:
    """A fresh state."""
    config = program.module.backbone.config
    return program.init_state(lambda: _make_module(config))


class Variant:
    """A way to lay out batches, with a program sized for them as a run's is (`solver.capacity_for`).

    Args:
        program: shared by all variants.
        bags: bag spec or "auto"; None leaves sequences where they were loaded.
        indices: the batches.
        capacity: of another variant, to run these batches in its program.
    """

    def __init__(
        self,
        program: TrainProgram,
        bags: str | None,
        indices: Sequence[StepIndex],
        capacity: StepCapacity | None = None,
    ) -> None:
        self.program, self.bags, self.indices = program, bags, list(indices)
        self.planner = Planner(
            num_devices=NUM_DEVICES,
            num_heads=NUM_HEADS,
            bags=bags,
            cost=PLAN_COST,
            links=CPU_LINKS,
            block=BLOCK,
        )
        self.capacity = size_capacity(self.planner, iter(self.indices)) if capacity is None else capacity
        self.step = make_train_step(program, self.capacity)

    @property
    def name(self) -> str:
        """Of the variant in reports."""
        return self.bags or "none"

    @cached_property
    def plans(self) -> list[BalancePlan]:
        """Plan of each batch."""
        return [self.planner.plan(index, self.bags) for index in self.indices]

    @cached_property
    def lending(self) -> list[StepInputs]:
        """Inputs of each batch."""
        assert isinstance(self.program.mesh, Mesh), "a program that runs has devices"
        assembler = StepAssembler(self.planner, self.program.mesh, self.capacity)
        items = [self._assemble(assembler, index) for index in self.indices]
        return [item.inputs for item in items]

    @cached_property
    def waiting(self) -> list[StepInputs]:
        """Inputs of each batch, every device with the block pairs of the fullest."""
        return [with_equal_attention(inputs) for inputs in self.lending]

    def _assemble(self, assembler: StepAssembler, index: StepIndex) -> PreparedStep:
        item = assembler.assemble(index.step, [random_data(index, WIDTHS, num_devices=NUM_DEVICES)])
        assert item.capacity == self.capacity, "a program is timed only on batches it holds"
        return item

    @property
    def tokens(self) -> int:
        """Tokens a device has room for: what its linear layers compute on."""
        return self.capacity.text + self.capacity.image

    @cached_property
    def block_pairs(self) -> list[NDArray[np.int64]]:
        """Block pairs that each device visits, of each batch."""
        found = []
        for inputs in self.lending:
            ranges = np.asarray(_only_group(inputs.tables).key_blocks)
            found.append((ranges[..., 1] - ranges[..., 0]).sum((1, 2)).astype(np.int64))
        return found

    def most_attention_s(self, cost: CostModel, batch: int) -> float:
        """Seconds of the most attention of any device, by a cost model that may not be the plan's."""
        work = self.plans[batch].attention_work
        return float(work.max() / work.sum() * np.sum(cost.attention(self.plans[batch].lengths)))

    def static_cost_s(self, cost: CostModel, batch: int) -> float:
        """What J is the ratio of: seconds of the most tokens plus the most attention of any device."""
        return float(cost.linear(int(self.plans[batch].tokens.max()))) + self.most_attention_s(cost, batch)


def with_equal_attention(inputs: StepInputs) -> StepInputs:
    """The inputs with key block ranges widened until every device visits as many block pairs as the fullest.

    What is added is masked by segment ids. The plain JAX kernel reads `key_blocks` in both directions, and
    `query_blocks` in neither.
    """
    group = _only_group(inputs.tables)
    blocks: Any = group.key_blocks  # on the devices
    ranges = np.array(blocks)
    num_key_blocks = group.query_blocks.shape[2]
    pairs = (ranges[..., 1] - ranges[..., 0]).sum(-1)
    missing = pairs.max(axis=0) - pairs  # of each micro-batch
    room = (num_key_blocks - ranges[..., 1])[..., ::-1]
    before = np.cumsum(room, axis=-1) - room
    added = np.clip(missing[..., None] - before, 0, room)
    assert np.array_equal(added.sum(-1), missing), "ranges up to the last key block must have room"
    ranges[..., 1] += added[..., ::-1]
    placed = jax.device_put(ranges, blocks.sharding)
    return inputs._replace(tables=inputs.tables._replace(attention=(group._replace(key_blocks=placed),)))


def _only_group(tables: StepTables) -> AttentionTables:
    (group,) = tables.attention
    return group


class StepTime(NamedTuple):
    """Seconds of a step: on the wall, and of all threads of this process, which other load disturbs less."""

    wall: float
    cpu: float


@dataclass
class Stopwatch:
    """Runs steps of any variant on one state, and times them."""

    state: TrainState
    key: Any

    @classmethod
    def start(cls, program: TrainProgram) -> "Stopwatch":
        """With a fresh state of the program."""
        return cls(init_state(program), jax.random.key(0, impl="threefry2x32"))

    def run(self, variant: Variant, inputs: StepInputs) -> StepTime:
        """Times of a step, from dispatch until its state is there."""
        started, cpu_started = time.perf_counter(), time.process_time()
        self.state, metrics = variant.step(self.state, inputs, self.key)
        jax.block_until_ready((self.state, metrics))
        found = StepTime(time.perf_counter() - started, time.process_time() - cpu_started)
        assert bool(metrics.finite), "the step was skipped"
        return found

    def compile(self, variant: Variant) -> None:
        """Compile a variant's program, and run it once."""
        seconds = self.run(variant, variant.lending[0]).wall
        _LOG.info("%s: compiled and run in %.1f s", variant.name, seconds)
