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

from experiments._aot_plans import Plans, placed, training_plans
from experiments._aot_sampled import SampledInputs, sampled_inputs, sampling_plans, traced_evaluation
from experiments._components import RunSettings
from experiments._config import load_config
from experiments._feed import Planner, home_rows
from experiments._run import make_program
from experiments._run_data import Data, open_data
from experiments._run_pipeline import backbone_params
from experiments._run_planner import make_planner
from experiments._workdir import checked_settings
from experiments.data import StepReader
from experiments.hlo import Buffer, parse_buffers
from jaxdit.training import StepInputs, TrainProgram, TrainState, make_train_step
from parallel import DATA_AXES

_LOG = logging.getLogger(__name__)

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True)
class Requested:
    """What a config asks for, found out without its devices.

    Attributes:
        name: of the config.
        settings, data, planner: of its run.
        plans: sizes and figures of its data.
        forward_only: whether its program is an evaluation in sampling, in the place of the training step.
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
        make_plans = sampling_plans if forward_only else training_plans
        plans = make_plans(settings, data, planner)
        return cls(name, settings, data, planner, plans, forward_only)

    def program(self, mesh: AnyMesh) -> TrainProgram:
        """What the run's programs share, on a mesh."""
        return make_program(self.settings, mesh)


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
    def sampled(self) -> SampledInputs:
        """The data of an evaluation in sampling."""
        requested = self.requested
        sources = requested.data.train.sources
        return sampled_inputs(requested.settings, self.program, requested.plans, sources)

    @cached_property
    def inputs(self) -> StepInputs:
        """The data of the training step: the shapes of one device's, on all."""
        settings, plans = self.requested.settings, self.requested.plans
        num_devices, micro = settings.num_devices, settings.micro_batches
        reader = StepReader(self.requested.data.train, local_devices=[0], num_devices=num_devices)
        rows = home_rows(reader.blank(0), plans.capacity)
        by_device, replicated = (NamedSharding(self.mesh, spec) for spec in (P(DATA_AXES), P()))

        def everywhere(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_devices, micro, *x.shape[1:]), x.dtype, sharding=by_device)

        counts = jax.ShapeDtypeStruct((micro, plans.capacity.sequences), np.int32, sharding=replicated)
        rows, tables = jax.tree.map(everywhere, (rows, plans.tables))
        digest = jax.ShapeDtypeStruct((num_devices, micro), np.int32, sharding=by_device)
        return StepInputs(rows, tables, num_image_tokens=counts, plan_digest=digest)

    def traced(self) -> Any:
        """The program before it is lowered: the training step, or an evaluation with the moving average."""
        if self.requested.forward_only:
            settings, plans = self.requested.settings, self.requested.plans
            params = backbone_params(settings, self.state.all_ema)
            return traced_evaluation(settings, self.program, plans, params, self.sampled)
        key = placed(
            jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")), NamedSharding(self.mesh, P())
        )
        capacity = self.requested.plans.capacity
        step: Any = make_train_step(self.program, capacity)
        return step.trace(self.state, self.inputs, key)


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
