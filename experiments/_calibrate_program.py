"""The program that calibration times: the training step's forward and backward pass over a few blocks.

As in training, rows come in home layout with the tables of a plan, move to token layout, and attention runs in a layout
of its own; everything is one compiled program for one capacity. There is no optimiser and no sum of gradients, whose
time is not a block's: every device returns its own gradients.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments._bench_batches import RowWidths, random_data
from experiments._calibrate_fit import PASSES, Work
from experiments._calibration import DEFAULT_GAMMA, BlockShape
from experiments._feed import Planner, StepAssembler
from experiments._platform import compiler_options, needs_padded_exchange
from experiments._program import checking
from experiments.data import StepIndex
from jaxdit.encoders import PrecomputedText
from jaxdit.models import MMDiT, MMDiTConfig
from jaxdit.training import DeviceModel, FlowMatching, StepInputs, TextToImage, TrainProgram, input_specs
from parallel import DATA_AXES
from solver import CostModel, Links, RouteCapacity, StepCapacity, StepLayout

_WIDTHS = RowWidths()


def model_config(shape: BlockShape) -> MMDiTConfig:
    """The model whose blocks are timed.

    Raises:
        UserError: for sizes that do not fit together.
    """
    pairs = shape.head_dim // 2
    axes = (pairs // 8, (pairs - pairs // 8) // 2, pairs - pairs // 8 - (pairs - pairs // 8) // 2)
    with checking():
        return MMDiTConfig(
            in_channels=_WIDTHS.channels,
            text_channels=_WIDTHS.text_channels,
            pooled_channels=_WIDTHS.pooled_channels,
            width=shape.width,
            num_heads=shape.num_heads,
            num_double_blocks=shape.double_blocks,
            num_single_blocks=shape.single_blocks,
            axes_dim=tuple(2 * axis for axis in axes),
            compute_dtype=shape.dtype,
        )


@dataclass(frozen=True)
class Bench:
    """Blocks of a shape on a mesh: makes programs of them.

    Attributes:
        shape: of the blocks.
        mesh: from `parallel.data_mesh`, parameters replicated.
        cores: of the machine, where virtual devices share them; None where devices compute by themselves.
    """

    shape: BlockShape
    mesh: Mesh
    cores: int | None

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.mesh.devices.size

    @property
    def platform(self) -> str:
        """Of the devices, as JAX calls it."""
        return self.mesh.devices.flat[0].platform

    @property
    def padded(self) -> bool:
        """Whether the platform pads its exchanges."""
        return needs_padded_exchange(self.mesh)

    def planner(self, bags: str | None) -> Planner:
        """A planner with the given bags."""
        return Planner(
            num_devices=self.num_devices,
            num_heads=self.shape.num_heads,
            bags=bags,
            cost=CostModel(self.shape.width, DEFAULT_GAMMA),
            block=self.shape.block,
            padded=self.padded,
        )

    def needs(self, index: StepIndex, bags: str | None) -> StepCapacity:
        """Exact sizes of a batch's program."""
        planner = self.planner(bags)
        return planner.needs(planner.layout(index))

    def _module(self) -> nnx.Module:
        text = PrecomputedText(text_channels=_WIDTHS.text_channels, pooled_channels=_WIDTHS.pooled_channels)
        return TextToImage(MMDiT(model_config(self.shape), rngs=nnx.Rngs(0)), text)

    @cached_property
    def program(self) -> TrainProgram:
        """What the compiled programs share."""
        return TrainProgram(
            module=nnx.eval_shape(self._module),
            objective=FlowMatching(),
            optimizer=optax.identity(),
            mesh=self.mesh,
            num_heads=self.shape.num_heads,
            remat="none",
            compiler_options=compiler_options(self.mesh),
        )

    @cached_property
    def params(self) -> Any:
        """Parameters, replicated."""
        return self.program.init_state(self._module).params

    @cached_property
    def key(self) -> Any:
        """Key of noise and times."""
        return jax.random.key(0, impl="threefry2x32")

    def gradients(self, capacity: StepCapacity) -> Any:
        """A jitted function of (params, inputs, key): loss and gradients of every device, not added up."""
        program = self.program

        def device_gradients(params: Any, inputs: StepInputs, key: Any) -> Any:
            loss = DeviceModel(program, capacity).prepare(inputs, 0, jnp.zeros((), jnp.int32), key)
            (total, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return jax.tree.map(lambda x: x[None], (total, grads))

        return program.jit(
            jax.shard_map(
                device_gradients,
                mesh=self.mesh,
                in_specs=(P(), input_specs(), P()),
                out_specs=P(DATA_AXES),
                check_vma=False,  # as in training: custom gradients and integer tables defeat the checker
            )
        )


def sent_bytes(shape: BlockShape, rows: float) -> float:
    """Bytes of (token, head) rows that cross devices in a block, forward and backward, as `solver.Links` counts."""
    return rows * Links(element_bytes=shape.element_bytes).row_bytes(shape.head_dim)


def padded_rows(route: RouteCapacity, num_devices: int) -> int:
    """Rows of a padded exchange's buffer on every device, whatever the plan: the sum of its rounds."""
    return sum(route.rounds) if num_devices > 1 else 0


def busiest(work: Sequence[float], cores: int | None) -> float:
    """Work that the slowest device waits for, in units of a device among others as busy.

    Devices of their own wait for the fullest. Virtual devices share the machine's cores: one that waits lends its share
    to the others, until each that works has a core, so the step ends with the cores' work or the fullest device's.

    Args:
        work: of each device.
        cores: that the devices share; None for devices of their own.
    """
    if cores is None or cores >= len(work):
        return max(work)
    return max(float(np.mean(work)), max(work) * cores / len(work))


@dataclass
class Case:
    """One batch to time in a program of its own or a shared one.

    Attributes:
        bench: the blocks.
        index: the batch.
        bags: bag spec, None for sequences where they start.
        capacity: of the program; None for exactly what the batch needs.
        shares: the case in whose program this one runs; None for a program of its own.
        seconds: of a block in each round, measured so far.
    """

    bench: Bench
    index: StepIndex
    bags: str | None
    capacity: StepCapacity | None = None
    shares: "Case | None" = None
    seconds: list[float] = field(default_factory=list)

    @cached_property
    def layout(self) -> StepLayout:
        """The plan's layouts."""
        return self.bench.planner(self.bags).layout(self.index)

    @cached_property
    def sizes(self) -> StepCapacity:
        """The program's capacity."""
        return self.bench.needs(self.index, self.bags) if self.capacity is None else self.capacity

    @cached_property
    def work(self) -> Work:
        """What a block does in this batch."""
        shape, devices = self.bench.shape, self.bench.num_devices
        pairs = [int(np.diff(ranges).sum()) for ranges in self.layout.key_blocks]
        rows = (
            padded_rows(self.sizes.key_route, devices)
            if self.bench.padded
            else int(self.layout.plan.rows_sent.max())
        )
        return Work(
            linear_flops=PASSES * 24.0 * (self.sizes.text + self.sizes.image) * shape.width**2,
            attention_flops=PASSES * 4.0 * shape.block**2 * shape.head_dim * busiest(pairs, self.bench.cores),
            exchange_bytes=sent_bytes(shape, rows),
        )

    @cached_property
    def _inputs(self) -> StepInputs:
        assembler = StepAssembler(self.bench.planner(self.bags), self.bench.mesh, self.sizes)
        data = random_data(self.index, _WIDTHS, num_devices=self.bench.num_devices)
        inputs = assembler.assemble(0, [data]).inputs
        assert assembler.capacity == self.sizes, "a program is timed only on batches it holds"
        return jax.block_until_ready(inputs)

    def prepare(self) -> None:
        """Place the inputs, compile the program if it is not yet, and run it once."""
        self._call()

    @cached_property
    def _run(self) -> Any:
        if self.shares is None:
            return self.bench.gradients(self.sizes)
        assert self.shares.sizes == self.sizes, "one program has one capacity"
        return self.shares._run

    def time(self) -> None:
        """Run once more, and keep the seconds of a block."""
        started = time.perf_counter()
        self._call()
        self.seconds.append((time.perf_counter() - started) / self.bench.shape.num_blocks)

    def _call(self) -> None:
        jax.block_until_ready(self._run(self.bench.params, self._inputs, self.bench.key))

    @property
    def middle(self) -> float:
        """Median seconds of a block. Other load on the machine slows short and long batches alike, and so cancels from
        their ratios; the least of a few rounds would favour short ones, which fit between others' turns."""
        return median(self.seconds)
