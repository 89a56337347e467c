"""The program of a config, with the sizes its planner finds for its data, compiled for GPUs that are not here."""

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._components import RunSettings
from experiments._config import load_config
from experiments._feed import Planner, home_rows, size_capacity
from experiments._run import make_program
from experiments._run_data import Data, open_data
from experiments._run_planner import make_planner
from experiments._workdir import checked_settings
from experiments.data import StepReader
from experiments.hlo import Buffer, parse_buffers
from jaxdit.training import (
    SampleInputs,
    StepInputs,
    TrainProgram,
    TrainState,
    make_sample_step,
    make_train_step,
    plan_without_text,
)
from parallel import DATA_AXES
from solver import StepCapacity, StepLayout, step_tables

_LOG = logging.getLogger(__name__)

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True)
class Plans:
    """What the plans of the data say that the compiled program does not.

    Attributes:
        capacity: sizes of the program's arrays, as a run finds them.
        tables: one device's index tables of a micro-batch; for sampling also those of the same without text, with
            which a guided sampler runs the model a second time.
        block_visits: pairs of blocks that attention computes on the fullest device of that micro-batch, over its query
            blocks: the mean number of turns of attention's inner loop.
        sent_fraction: (token, head) rows that change device in an attention call, over the rows that there is room for.
        across_fraction: those that change machine.
        tokens: tokens of the micro-batch, over all devices.
    """

    capacity: StepCapacity
    tables: tuple[Any, ...]
    block_visits: float
    sent_fraction: float
    across_fraction: float
    tokens: int


@dataclass(frozen=True)
class Requested:
    """What a config asks for, found out without its devices.

    Attributes:
        name: of the config.
        settings, data, planner: of its run.
        plans: sizes and figures of its data.
        forward_only: whether its program is that of sampling, in the place of the training step.
    """

    name: str
    settings: RunSettings
    data: Data
    planner: Planner
    plans: Plans
    forward_only: bool = False

    @classmethod
    def load(
        cls, config: str, bindings: list[str], *, of_a_machine: int | None = None, forward_only: bool = False
    ) -> "Requested":
        """The run of a config, on machines of so many devices where it leaves that open.

        Raises:
            UserError: for anything that would stop it before its first step.
        """
        name = load_config(config, bindings).stem
        settings = checked_settings(bindings)
        data = open_data(settings)
        planner = make_planner(settings, settings.num_devices, padded=False, of_a_machine=of_a_machine)
        plans = _plans(settings, data, planner, forward_only=forward_only)
        return cls(name, settings, data, planner, plans, forward_only)

    @property
    def is_guided(self) -> bool:
        """Whether the program runs the model twice a step, with the condition and without."""
        return self.forward_only and is_guided(self.settings)

    def program(self, mesh: AnyMesh) -> TrainProgram:
        """What the run's programs share, on a mesh."""
        return make_program(self.settings, mesh)


def is_guided(settings: RunSettings) -> bool:
    """Whether sampling is guided: by a second run of the model, without text or label."""
    return settings.sampler.guidance_scale != 1


def _plans(settings: RunSettings, data: Data, planner: Planner, *, forward_only: bool) -> Plans:
    count = min(settings.lookahead, settings.steps) * settings.micro_batches
    capacity = size_capacity(planner, (data.train.step(t) for t in range(count)))
    layout = planner.layout(data.train.step(0))
    layouts = [layout]
    if forward_only:
        layouts.append(StepLayout(plan_without_text(layout.plan), layout.block, layout.head_groups))
        # One capacity for both plans, as a sampler has it.
        capacity = capacity.grown(planner.needs(layouts[1]))
    tables = [step_tables(each, capacity, list(range(settings.num_devices))) for each in layouts]
    # Both branches of guidance run equally often.
    run = len(layouts) if is_guided(settings) else 1
    figures = np.mean([_figures(layouts[i], tables[i], capacity) for i in range(run)], 0)
    return Plans(
        capacity=capacity,
        tables=jax.tree.map(lambda x: x[:1], tuple(tables)),
        block_visits=float(figures[0]),
        sent_fraction=float(figures[1]),
        across_fraction=float(figures[2]),
        tokens=int(layout.plan.tokens.sum()),
    )


def _figures(layout: StepLayout, tables: Any, capacity: StepCapacity) -> list[float]:
    """Turns of attention's inner loop, and the parts of its exchanges' room that are sent and sent across machines."""
    blocks = np.concatenate([group.key_blocks for group in tables.attention], 1).astype(np.int64)
    visits = (blocks[..., 1] - blocks[..., 0]).sum(-1).max() / blocks.shape[-2]
    room, plan = capacity.key_route.send * layout.head_groups, layout.plan
    sent = [rows.max() / room if room else 0.0 for rows in (plan.rows_sent, plan.rows_across_machines)]
    return [float(visits), *map(float, sent)]


@dataclass(frozen=True)
class AbstractRun:
    """A requested run on a mesh of devices that need not be here: its program and its arguments, as shapes."""

    requested: Requested
    mesh: AnyMesh

    @cached_property
    def program(self) -> TrainProgram:
        """What the run's programs share."""
        return self.requested.program(self.mesh)

    @cached_property
    def state(self) -> TrainState:
        """The training state, with shardings."""
        return self.program.abstract_state()

    @cached_property
    def inputs(self) -> StepInputs | SampleInputs:
        """The data of the program: the shapes of one device's, on all."""
        settings, plans = self.requested.settings, self.requested.plans
        num_devices, micro = settings.num_devices, settings.micro_batches
        reader = StepReader(self.requested.data.train, local_devices=[0], num_devices=num_devices)
        rows = home_rows(reader.read(0), plans.capacity)
        by_device, replicated = (NamedSharding(self.mesh, spec) for spec in (P(DATA_AXES), P()))
        batches = () if self.requested.forward_only else (micro,)

        def everywhere(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_devices, *batches, *x.shape[1:]), x.dtype, sharding=by_device)

        counts = jax.ShapeDtypeStruct((*batches, plans.capacity.sequences), np.int32, sharding=replicated)
        rows, tables = jax.tree.map(everywhere, (rows, plans.tables))
        if self.requested.forward_only:
            sampler = settings.sampler
            table = settings.objective.scheduler(sampler.method).table(
                sampler.num_steps, np.zeros(plans.capacity.sequences, np.int32)
            )
            sampling = jax.tree.map(lambda x: _placed(x, replicated), table)
            return SampleInputs(
                rows, tables[0], tables[1], sampling, num_image_tokens=counts, noise_ids=counts
            )
        digest = jax.ShapeDtypeStruct((num_devices, micro), np.int32, sharding=by_device)
        return StepInputs(rows, tables[0], num_image_tokens=counts, plan_digest=digest)

    def traced(self) -> Any:
        """The program before it is lowered: the training step, or sampling with the moving average."""
        key = _placed(
            jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")), NamedSharding(self.mesh, P())
        )
        capacity = self.requested.plans.capacity
        if self.requested.forward_only:
            sample: Any = make_sample_step(
                self.program, capacity, guidance_scale=self.requested.settings.sampler.guidance_scale
            )
            return sample.trace(self.state.all_ema, self.inputs, key)
        step: Any = make_train_step(self.program, capacity)
        return step.trace(self.state, self.inputs, key)


def _placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def device_bytes(tree: Any) -> int:
    """Bytes of placed shapes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * _itemsize(x.dtype) for x in leaves)


def _itemsize(dtype: Any) -> int:
    return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        text: scheduled HLO of one device.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: of the compiler's memory analysis, per device.
        lower_s, compile_s: seconds that tracing and compiling took.
    """

    text: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    lower_s: float
    compile_s: float
    buffers: Sequence[Buffer] = ()

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that do not lie in them, and all temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def compile_program(run: AbstractRun) -> Compiled:
    """Compile a run's program for its mesh."""
    started = time.perf_counter()
    lowered = run.traced().lower()
    lowered_at = time.perf_counter()
    _LOG.info("traced in %.0f s, compiling", lowered_at - started)
    with tempfile.TemporaryDirectory() as dump:
        # Where temporaries lie and how long they live is only in the compiler's dump.
        compiled = lowered.compile({"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        buffers = _dumped_buffers(Path(dump))
    done = time.perf_counter()
    _LOG.info("compiled in %.0f s", done - lowered_at)
    memory = compiled.memory_analysis()
    return Compiled(
        text=compiled.as_text(),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        lower_s=lowered_at - started,
        compile_s=done - lowered_at,
        buffers=buffers,
    )


def _dumped_buffers(folder: Path) -> Sequence[Buffer]:
    # The program's own are the largest: constants are folded by small programs that leave a dump too.
    found = sorted(folder.glob("*buffer-assignment.txt"), key=lambda path: path.stat().st_size)
    if not found:
        return ()
    lifetimes = found[-1].with_name(found[-1].name.replace("buffer-assignment", "live-range"))
    return parse_buffers(found[-1].read_text(), lifetimes.read_text()) if lifetimes.is_file() else ()
