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
from experiments._run import make_planner, make_program
from experiments._run_data import Data, open_data
from experiments._workdir import checked_settings
from experiments.data import StepReader
from experiments.hlo import Buffer, parse_buffers
from jaxdit.training import (
    StepInputs,
    TrainProgram,
    TrainState,
    make_eval_step,
    make_train_step,
)
from parallel import DATA_AXES
from solver import BalancePlan, StepCapacity, step_tables

_LOG = logging.getLogger(__name__)

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True)
class Plans:
    """What the plans of the data say that the compiled program does not.

    Attributes:
        capacity: sizes of the step's arrays, as a run finds them.
        tables: one device's index tables of a micro-batch.
        block_visits: pairs of blocks that attention computes on the fullest device of that micro-batch, over its query
            blocks: the mean number of turns of attention's inner loop.
        sent_fraction: (token, head) rows that change device in an attention call, over the rows that there is room for.
        across_fraction: those that change machine.
        tokens: tokens of the micro-batch, over all devices.
    """

    capacity: StepCapacity
    tables: Any
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
    """

    name: str
    settings: RunSettings
    data: Data
    planner: Planner
    plans: Plans

    @classmethod
    def load(cls, config: str, bindings: list[str]) -> "Requested":
        """The run of a config.

        Raises:
            UserError: for anything that would stop it before its first step.
        """
        name = load_config(config, bindings).stem
        return cls.of_settings(name, checked_settings(bindings))

    @classmethod
    def of_settings(cls, name: str, settings: RunSettings) -> "Requested":
        """The run of settings that are checked."""
        data = open_data(settings)
        planner = make_planner(settings, settings.num_devices, padded=False)
        return cls(name, settings, data, planner, _plans(settings, data, planner))

    def program(self, mesh: AnyMesh) -> TrainProgram:
        """What the run's programs share, on a mesh."""
        return make_program(self.settings, mesh)


def _plans(settings: RunSettings, data: Data, planner: Planner) -> Plans:
    count = min(settings.lookahead, settings.steps) * settings.micro_batches
    capacity = size_capacity(planner, (data.train.step(t) for t in range(count)))
    layout = planner.layout(data.train.step(0))
    tables = step_tables(layout, capacity, list(range(settings.num_devices)))
    blocks = np.asarray(tables.key_blocks, np.int64)
    visits = (blocks[..., 1] - blocks[..., 0]).sum(-1)
    plan: BalancePlan = layout.plan
    return Plans(
        capacity=capacity,
        tables=jax.tree.map(lambda x: x[:1], tables),
        block_visits=float(visits.max() / blocks.shape[-2]),
        sent_fraction=float(plan.rows_sent.max() / capacity.key_route.send)
        if capacity.key_route.send
        else 0.0,
        across_fraction=(
            float(plan.rows_across_machines.max() / capacity.key_route.send)
            if capacity.key_route.send
            else 0.0
        ),
        tokens=int(plan.tokens.sum()),
    )


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
    def inputs(self) -> StepInputs:
        """The data of a step: the shapes of one device's, on all."""
        settings, plans = self.requested.settings, self.requested.plans
        num_devices, micro = settings.num_devices, settings.micro_batches
        reader = StepReader(self.requested.data.train, local_devices=[0], num_devices=num_devices)
        by_device, replicated = (NamedSharding(self.mesh, spec) for spec in (P(DATA_AXES), P()))

        def everywhere(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_devices, micro, *x.shape[1:]), x.dtype, sharding=by_device)

        counts = (micro, plans.capacity.sequences)
        return StepInputs(
            rows=jax.tree.map(everywhere, home_rows(reader.read(0), plans.capacity)),
            tables=jax.tree.map(everywhere, plans.tables),
            num_image_tokens=jax.ShapeDtypeStruct(counts, np.int32, sharding=replicated),
            plan_digest=jax.ShapeDtypeStruct((num_devices, micro), np.int32, sharding=by_device),
        )

    def lowered(self, *, forward_only: bool) -> Any:
        """The training step, or the evaluation step, before it is compiled."""
        replicated = NamedSharding(self.mesh, P())
        key = _placed(jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")), replicated)
        capacity = self.requested.plans.capacity
        index = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
        step: Any = (make_eval_step if forward_only else make_train_step)(self.program, capacity)
        if forward_only:
            return step.lower(self.state.all_params, self.inputs, index, key)
        return step.lower(self.state, self.inputs, key)


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


def compile_program(run: AbstractRun, *, forward_only: bool) -> Compiled:
    """Compile the training step, or the evaluation step, for the mesh."""
    started = time.perf_counter()
    lowered = run.lowered(forward_only=forward_only)
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
