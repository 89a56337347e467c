"""A run put together from its settings: everything checked, sized and placed before the first step."""

import dataclasses
import json
import logging
import math
import os
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from experiments._components import AdapterSpec, RunSettings
from experiments._config import UserError, checking
from experiments._disk import size_text
from experiments._feed import Planner, size_capacity
from experiments._platform import compiler_options, device_memory_bytes
from experiments._pretrained import Pretrained
from experiments._run_data import Data
from experiments._run_planner import planner_on, warn_of_differences
from experiments.data import Sampler
from jaxdit.training import TrainProgram, TrainState, bytes_per_device
from jaxdit.weights import add_lora
from solver import BagSpec, RouteCapacity, StepCapacity

_LOG = logging.getLogger(__name__)

# Parameters, two moments, EMA, gradients: arrays of the parameters' size that a device holds during a step.
_COPIES = 5
# Share of a device's memory that they may take; activations need the rest.
_MEMORY_SHARE = 0.8


def make_module(settings: RunSettings) -> nnx.Module:
    """The module of a run, with its adapters if it has some; traced, never run on one device alone."""
    module = settings.model.make(settings.seed)
    if settings.adapter is not None:
        backbone: Any = module
        for name in settings.model.backbone_path:
            backbone = getattr(backbone, name)
        add_lora(backbone, settings.model.config, settings.adapter.lora, rngs=nnx.Rngs(settings.seed))
    return module


def make_program(settings: RunSettings, mesh: Mesh | AbstractMesh) -> TrainProgram:
    """What the programs of a run share; an abstract mesh will do for tracing them.

    Raises:
        UserError: for a model whose sizes do not fit together.
    """
    adapter = settings.adapter
    with checking():
        return TrainProgram(
            module=nnx.eval_shape(lambda: make_module(settings)),
            objective=settings.objective,
            optimizer=settings.optimizer.make(settings.steps),
            mesh=mesh,
            num_heads=settings.model.num_heads,
            remat=settings.remat,
            dtype=settings.model.dtype,
            ema_decay=settings.ema_decay,
            compiler_options=compiler_options(mesh),
            trained=nnx.Param if adapter is None else nnx.LoRAParam,
            frozen_dtype=np.dtype(np.float32) if adapter is None else adapter.frozen_dtype,
        )


@dataclass(frozen=True)
class Run:
    """A checked run: its settings, mesh, data, planner and program.

    Attributes:
        settings, mesh, planner: what it was put together from.
        program: what the compiled programs share.
        data: None for a run that is opened for its pictures.
    """

    settings: RunSettings
    mesh: Mesh
    planner: Planner
    program: TrainProgram
    data: Data | None = None

    @classmethod
    def make(cls, settings: RunSettings, mesh: Mesh, data: Data | None) -> "Run":
        """Put a run together.

        Raises:
            UserError: for anything that would stop it later.
        """
        if data is None:  # the calibration is of the devices that trained, and pictures do not depend on it
            settings = dataclasses.replace(settings, calibration=None)
        else:
            warn_of_differences(settings, mesh)
        planner = planner_on(settings, mesh)
        run = cls(settings, mesh, planner, make_program(settings, mesh), data)
        run._check_memory(_COPIES if data else 1)
        if data is not None:
            run.check_rows(
                -(-data.longest // run.widest_bag), f"the longest sequence has {data.longest:,} tokens"
            )
            run._check_processes()
        return run

    @property
    def widest_bag(self) -> int:
        """Most devices that share a sequence."""
        bags = self.planner.bags
        if bags == "auto":
            return self.planner.num_devices
        return max(bags.sizes) if isinstance(bags, BagSpec) else 1

    @property
    def training_data(self) -> Data:
        """The data of a run that trains."""
        assert self.data is not None, "this run was opened for its pictures"
        return self.data

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self.program.abstract_state()

    @property
    def num_params(self) -> int:
        """Parameters of the model, trained or not."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.abstract_state.all_params))

    @property
    def num_trained(self) -> int:
        """Trained parameters of the model."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.abstract_state.params))

    @cached_property
    def pretrained(self) -> Pretrained:
        """Weights and adapters of others that the run starts from."""
        return Pretrained(self.settings, self.program)

    def init_state(self, adapters: Any = None) -> TrainState:
        """A fresh state; backbone and adapters are those of `init_from` where it is set.

        Args:
            adapters: what `Pretrained.check` gave.
        """
        return self.program.init_state(lambda: make_module(self.settings), self.pretrained.load(adapters))

    def initial_capacity(self, sampler: Sampler, count: int, start: int = 0) -> StepCapacity:
        """The capacity that holds `count` micro-batches from `start` on."""
        return size_capacity(self.planner, (sampler.step(start + i) for i in range(count)))

    def meta(self, step: int, capacity: StepCapacity, row: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of the run beside its arrays; `row` are the metrics of its last step."""
        return {
            # As text: it may hold NaN.
            "row": json.dumps(row),
            "step": step,
            "position": step * self.settings.micro_batches,
            "seed": self.settings.seed,
            "data": self.training_data.train.digest,
            "layout": self._layout_key(),
            "adapter": self.pretrained.key,
            # A round trip, since JSON has lists where capacities have tuples.
            "capacity": json.loads(json.dumps(dataclasses.asdict(capacity))),
        }

    def saved_capacity(self, meta: dict[str, Any]) -> StepCapacity | None:
        """The capacity of a checkpoint, if this run lays tokens out alike: then resuming is bit-identical.

        None too for one of a version of the program whose capacities have other sizes.
        """
        if meta["layout"] != self._layout_key():
            return None
        try:
            return _capacity_from_json(meta["capacity"])
        except (TypeError, KeyError):
            _LOG.warning(
                "the checkpoint's capacity is of another version: losses go on to rounding, not to the bit"
            )
            return None

    def _layout_key(self) -> list[Any]:
        planner = self.planner
        bags = None if self.settings.bags is None else str(self.settings.bags)
        return [
            planner.num_devices,
            planner.num_heads,
            bags,
            planner.block,
            planner.head_groups,
            planner.padded,
            self.settings.micro_batches,
        ]

    def check_same_data(self, meta: dict[str, Any], folder: os.PathLike[str]) -> None:
        """Refuse to go on from a checkpoint where its position would mean other sequences.

        Args:
            meta: what the checkpoint says of its run.
            folder: where it is, for the message.

        Raises:
            UserError: if the seed, the data, their settings or the number of micro-batches changed.
        """
        settings = self.settings
        if meta["seed"] != settings.seed:
            changed = f"with train.seed={meta['seed']}, now {settings.seed}"
        elif meta["position"] != meta["step"] * settings.micro_batches:
            before = meta["position"] / max(meta["step"], 1)
            changed = f"with train.micro_batches={before:.0f}, now {settings.micro_batches}"
        elif meta["data"] != self.training_data.train.digest:
            changed = "on other data, or with other settings of the data"
        else:
            return
        raise UserError(
            f"{folder} was trained {changed}: its position, step {meta['step']}, means other sequences now."
            " Restore what it was, or choose another --workdir."
        )

    def check_rows(self, rows: int, why: str) -> None:
        """Refuse rows that a device cannot train on even if nothing but the layers' inputs is kept.

        Args:
            rows: tokens on the fullest device.
            why: where they come from, for the message.

        Raises:
            UserError: with the arithmetic.
        """
        self._check_activations(rows, why, self.settings.model.depth, _COPIES)

    def check_sample_rows(self, rows: int, why: str) -> None:
        """Refuse rows that a device cannot sample: one layer's input is kept, beside the state if the run trains.

        Args:
            rows: tokens on the fullest device.
            why: where they come from, for the message.

        Raises:
            UserError: with the arithmetic.
        """
        self._check_activations(rows, why, 1, 1 if self.data is None else _COPIES - 1)

    def _check_activations(self, rows: int, why: str, depth: int, copies: int) -> None:
        """Refuse rows whose inputs of `depth` layers do not fit beside `copies` arrays like the parameters."""
        model = self.settings.model
        itemsize = np.dtype(model.dtype).itemsize
        needed = rows * model.width * itemsize * depth
        available = int(self._memory_bytes() - self._state_bytes(copies) - self._encoder_bytes)
        if needed <= available or self.settings.allow_oversized:
            return
        layers = "one layer" if depth == 1 else f"{depth} layers"
        state = "the parameters leave" if copies == 1 else "parameters and optimiser leave"
        state = f"encoders, {state}" if self._encoder_bytes else state
        raise UserError(
            f"{why}, {rows:,} of them on a device; the inputs of {layers}, {model.width} x {itemsize} bytes a token,"
            f" are {size_text(needed)}, of {size_text(max(available, 0))} that {state}. Use larger bags, more"
            " devices or more shards, or fewer tokens; train.allow_oversized=True tries it all the same."
        )

    def _check_processes(self) -> None:
        """Refuse processes that see other data or settings: they would run other programs and wait for ever."""
        if jax.process_count() == 1:
            return
        validation = self.training_data.validation
        plain = (int, float, str, tuple, AdapterSpec, type(None))
        settings = {f.name: getattr(self.settings, f.name) for f in dataclasses.fields(self.settings)}
        parts = {
            "training data": self.training_data.train.digest,
            "held-out data": "" if validation is None else validation.digest,
            "settings": repr([(name, value) for name, value in settings.items() if isinstance(value, plain)]),
            "model": repr(jax.tree.map(lambda x: (x.shape, str(x.dtype)), self.abstract_state.all_params)),
        }
        mine = np.array([zlib.crc32(text.encode()) for text in parts.values()], np.uint32)
        everybody = multihost_utils.process_allgather(mine)
        differ = [
            name for name, same in zip(parts, (everybody == everybody[0]).all(0), strict=True) if not same
        ]
        if differ:
            raise UserError(
                f"all processes must be given the same; their {' and '.join(differ)} differ. Give every process the"
                " same config, and the same files under the same names."
            )

    def _memory_bytes(self) -> int:
        """Memory of a device."""
        return device_memory_bytes(self.mesh.local_devices)

    def _state_bytes(self, copies: int) -> int:
        """Bytes on a device of so many arrays like the trained parameters, and of frozen ones."""
        degree, program, state = self.mesh.shape["shard"], self.program, self.abstract_state
        trained = bytes_per_device(state.params, program.trained_axes, degree, copies=copies)
        return trained + bytes_per_device(state.frozen, program.frozen_axes, degree, copies=1)

    @property
    def _encoder_bytes(self) -> int:
        """Bytes on a device of encoders that run beside the training."""
        return 0 if self.data is None else self.data.device_bytes

    def _check_memory(self, copies: int) -> None:
        """Refuse parameters, optimiser and EMA that a device cannot hold, with the arithmetic."""
        degree = self.mesh.shape["shard"]
        encoders = self._encoder_bytes
        needed, available = self._state_bytes(copies) + encoders, self._memory_bytes()
        if needed <= _MEMORY_SHARE * available or self.settings.allow_oversized:
            return
        trained = f"{self.num_trained:,} parameters in float32, times {copies}"
        trained += " (parameters, two moments, EMA, gradients)" if copies == _COPIES else ""
        frozen = self.num_params - self.num_trained
        held = f"{frozen:,} frozen parameters in {self.program.frozen_dtype} and " if frozen else ""
        more = (
            "" if degree == self.mesh.devices.size else f" Raise train.shards (now {degree}) to shard them,"
        )
        beside = ""
        if encoders:
            beside = f", with the frozen encoders' {size_text(encoders)} {size_text(needed)}"
            more = f" Encode beforehand with experiments.encode,{more.replace(' Raise', ' raise')}"
        raise UserError(
            f"{held}{trained}, over {degree}"
            f" shard{'s' * (degree > 1)} are {size_text(needed - encoders)} a device{beside}, of"
            f" {size_text(available)} at most {_MEMORY_SHARE:.0%} may be used.{more} use more devices, or set"
            " train.allow_oversized=True."
        )


def _capacity_from_json(saved: dict[str, Any]) -> StepCapacity:
    def route(value: dict[str, Any] | None) -> RouteCapacity | None:
        return None if value is None else RouteCapacity(**{**value, "rounds": tuple(value["rounds"])})

    routes = {name: route(value) for name, value in saved.items() if name.endswith("_route")}
    return StepCapacity(**{**saved, **routes})
