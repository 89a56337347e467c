"""A run put together from its settings: everything checked, sized and placed before the first step."""

import dataclasses
import json
import logging
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from experiments._checkpoint import Checkpoints
from experiments._components import ModelSpec, RunSettings
from experiments._config import UserError, checking
from experiments._disk import size_text
from experiments._feed import Planner, size_capacity
from experiments._platform import device_memory_bytes, needs_padded_exchange
from experiments.data import DataError, Sampler, Source, StepSampler, ValidationSampler, split_source
from jaxdit.training import TrainProgram, TrainState, bytes_per_device, module_params
from solver import CostModel, RouteCapacity, StepCapacity, Topology, parse_bags

_LOG = logging.getLogger(__name__)

# Parameters, two moments, EMA, gradients: arrays of the parameters' size that a device holds during a step.
_COPIES = 5
# Share of a device's memory that they may take; activations need the rest.
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Data:
    """The data of a run: what is trained on, and what is held out."""

    train: StepSampler
    validation: ValidationSampler | None


def open_data(settings: RunSettings) -> Data:
    """Open the sources, hold out validation data, and check that they fit the model.

    Raises:
        UserError: for data that is empty, lacks captions, or does not fit the model or the budget.
    """
    spec = settings.data
    try:
        with checking("data"):
            sources = spec.open()
            held_out: list[Source] = []
            if spec.validation_fraction:
                parts = [
                    split_source(source, fraction=spec.validation_fraction, seed=settings.seed)
                    for source in sources
                ]
                sources, held_out = [part[0] for part in parts], [part[1] for part in parts]
            train = StepSampler(
                sources,
                weights=spec.weights,
                token_budget=spec.token_budget,
                seed=settings.seed,
                caption_dropout=spec.caption_dropout,
                max_sequences=spec.max_sequences,
            )
            validation = None
            if held_out:
                validation = ValidationSampler(
                    held_out, token_budget=train.token_budget, max_sequences=train.max_sequences
                )
    except DataError as error:
        raise UserError(str(error)) from error
    _check_fits_model(sources, settings.model)
    return Data(train, validation)


def _check_fits_model(sources: list[Source], model: ModelSpec) -> None:
    for source in sources:
        if source.channels != model.channels:
            raise UserError(
                f"model.channels must be the data's {source.channels} channels per image row; got"
                f" channels={model.channels}. Change the model's channels, or the patch size."
            )
        have = (source.text_channels, source.pooled_channels)
        if not model.uses_labels and have != (model.text_channels, model.pooled_channels):
            raise UserError(
                f"the model's text must come as the data brings it; got data text_channels={have[0]},"
                f" pooled_channels={have[1]} and model {model.text_channels}, {model.pooled_channels} (0 = bytes)."
                " Set text_to_image.max_text for bytes, or None for precomputed features."
            )
        longest = int(source.text_lengths.max(initial=0))
        if model.max_text is not None and longest > model.max_text:
            raise UserError(
                f"text_to_image.max_text must hold the longest caption of {source.name}; got"
                f" max_text={model.max_text}, longest={longest}. Raise it."
            )


def make_planner(settings: RunSettings, mesh: Mesh) -> Planner:
    """The planner of a run.

    Raises:
        UserError: for a malformed bag spec, or one that does not divide the devices.
    """
    num_devices = mesh.devices.size
    with checking("train.bags"):
        bags = None if settings.bags is None else parse_bags(settings.bags)
        if bags is not None:
            bags.layout(num_devices)
    topology = None
    if settings.devices_per_machine is not None:
        if num_devices % settings.devices_per_machine:
            raise UserError(
                f"train.devices_per_machine must divide the devices; got {settings.devices_per_machine} and {num_devices}."
            )
        topology = Topology(num_devices // settings.devices_per_machine, settings.devices_per_machine)
    with checking():
        cost = CostModel(width=settings.model.width, gamma=settings.gamma)
    if settings.block < 8 or settings.block % 8:
        raise UserError(f"train.block must be a multiple of 8, at least 8; got block={settings.block}.")
    return Planner(
        num_devices=num_devices,
        num_heads=settings.model.num_heads,
        bags=bags,
        cost=cost,
        topology=topology,
        block=settings.block,
        padded=needs_padded_exchange(mesh),
    )


@dataclass(frozen=True)
class Run:
    """A checked run: its settings, mesh, data, planner and program.

    Attributes:
        settings, mesh, data, planner: what it was put together from.
        program: what the compiled programs share.
    """

    settings: RunSettings
    mesh: Mesh
    data: Data
    planner: Planner
    program: TrainProgram

    @classmethod
    def make(cls, settings: RunSettings, mesh: Mesh, data: Data) -> "Run":
        """Put a run together.

        Raises:
            UserError: for anything that would stop it later.
        """
        _check_settings(settings)
        with checking():
            module = nnx.eval_shape(lambda: settings.model.make(settings.seed))
            program = TrainProgram(
                module=module,
                objective=settings.objective,
                optimizer=settings.optimizer.make(settings.steps),
                mesh=mesh,
                num_heads=settings.model.num_heads,
                remat=settings.remat,
                dtype=settings.model.dtype,
                ema_decay=settings.ema_decay,
            )
        run = cls(settings, mesh, data, make_planner(settings, mesh), program)
        run._check_memory()
        return run

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        params = module_params(self.program.module)
        scalar = jax.ShapeDtypeStruct((), np.int32)
        state = TrainState(
            scalar, params, params, jax.eval_shape(self.program.optimizer.init, params), scalar
        )
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            self.program.state_shardings(),
        )

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.abstract_state.params))

    def init_state(self) -> TrainState:
        """A fresh state."""
        return self.program.init_state(lambda: self.settings.model.make(self.settings.seed))

    def initial_capacity(self, sampler: Sampler, count: int, start: int = 0) -> StepCapacity:
        """The capacity that holds `count` micro-batches from `start` on."""
        return size_capacity(self.planner, (sampler.step(start + i) for i in range(count)))

    def meta(self, step: int, capacity: StepCapacity) -> dict[str, Any]:
        """What a checkpoint says of the run beside its arrays."""
        return {
            "step": step,
            "position": step * self.settings.micro_batches,
            "seed": self.settings.seed,
            "data": self.data.train.digest,
            "layout": self._layout_key(),
            # A round trip, since JSON has lists where capacities have tuples.
            "capacity": json.loads(json.dumps(dataclasses.asdict(capacity))),
        }

    def saved_capacity(self, meta: dict[str, Any]) -> StepCapacity | None:
        """The capacity a checkpoint was made with, if this run lays tokens out alike: then resuming is bit-identical."""
        if meta["layout"] != self._layout_key():
            return None
        return _capacity_from_json(meta["capacity"])

    def _layout_key(self) -> list[Any]:
        planner = self.planner
        bags = None if self.settings.bags is None else str(self.settings.bags)
        return [
            planner.num_devices,
            planner.num_heads,
            bags,
            planner.block,
            planner.padded,
            self.settings.micro_batches,
        ]

    def check_same_data(self, meta: dict[str, Any], checkpoints: Checkpoints) -> None:
        """Refuse to resume on other data: the saved position would mean other sequences.

        Raises:
            UserError: if data, its settings or the seed changed.
        """
        if meta["data"] != self.data.train.digest:
            raise UserError(
                f"{checkpoints.directory} was trained on other data, data settings or seed: its position, step"
                f" {meta['step']}, means other sequences now. Restore them, or choose another --workdir."
            )

    def _check_memory(self) -> None:
        """Refuse parameters, optimiser and EMA that a device cannot hold, with the arithmetic."""
        degree = self.mesh.shape["shard"]
        params = self.abstract_state.params
        needed = bytes_per_device(params, self.program.axes, degree, copies=_COPIES)
        available = device_memory_bytes(self.mesh) or _host_memory_bytes() // len(self.mesh.local_devices)
        if needed <= _MEMORY_SHARE * available or self.settings.allow_oversized:
            return
        more = (
            "" if degree == self.mesh.devices.size else f" Raise train.shards (now {degree}) to shard them,"
        )
        raise UserError(
            f"{self.num_params:,} parameters in float32, times {_COPIES} (parameters, two moments, EMA, gradients), over"
            f" {degree} shard{'s' * (degree > 1)} are {size_text(needed)} a device, of {size_text(available)} at most"
            f" {_MEMORY_SHARE:.0%} may be used.{more} use more devices, or set train.allow_oversized=True."
        )


def _capacity_from_json(saved: dict[str, Any]) -> StepCapacity:
    def route(value: dict[str, Any] | None) -> RouteCapacity | None:
        return None if value is None else RouteCapacity(**{**value, "rounds": tuple(value["rounds"])})

    routes = {name: route(value) for name, value in saved.items() if name.endswith("_route")}
    return StepCapacity(**{**saved, **routes})


def _host_memory_bytes() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_settings(settings: RunSettings) -> None:
    for name in (
        "steps",
        "micro_batches",
        "save_every",
        "keep",
        "log_every",
        "lookahead",
        "num_devices",
        "shards",
    ):
        if getattr(settings, name) < 1:
            raise UserError(f"train.{name} must be at least 1; got {name}={getattr(settings, name)}.")
    for name in ("eval_every", "sample_every"):
        if getattr(settings, name) < 0:
            raise UserError(
                f"train.{name} must not be negative; got {name}={getattr(settings, name)}. 0 turns it off."
            )
    if settings.on_nonfinite not in ("skip", "stop"):
        raise UserError(f"train.on_nonfinite must be skip or stop; got {settings.on_nonfinite!r}.")
    if not 0 <= settings.ema_decay < 1:
        raise UserError(f"train.ema_decay must be in [0, 1); got ema_decay={settings.ema_decay}.")
    if settings.shards > 1 and settings.remat != "full":
        raise UserError(
            f"train.remat must be full with train.shards > 1; got remat={settings.remat!r}, shards={settings.shards}:"
            " sharded layers are gathered and computed again in the backward pass."
        )


def workdir_of(path: str | None) -> Path:
    """The run's folder, `runs/default` if not given."""
    return Path(path or "runs/default")
