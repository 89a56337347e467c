"""A run put together from its settings: everything checked, sized and placed before the first step."""

import dataclasses
import json
import logging
import math
import os
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from experiments._components import AdapterSpec, ModelSpec, OptimizerSpec, RunSettings
from experiments._config import UserError, checking
from experiments._data_components import DataSpec
from experiments._disk import size_text
from experiments._feed import Planner, size_capacity
from experiments._platform import (
    compiler_options,
    device_memory_bytes,
    needs_padded_exchange,
    put_everywhere,
)
from experiments._run_data import Data
from experiments.data import Sampler
from jaxdit.models import scan_layers
from jaxdit.training import (
    DiffusionLoss,
    FlowMatching,
    Objective,
    SamplerSettings,
    TrainProgram,
    TrainState,
    bytes_per_device,
    merged,
)
from jaxdit.weights import add_lora, check_checkpoint, checkpoint_digest, load_lora, load_params
from solver import CostModel, RouteCapacity, StepCapacity, Topology, parse_bags

_LOG = logging.getLogger(__name__)

# Parameters, two moments, EMA, gradients: arrays of the parameters' size that a device holds during a step.
_COPIES = 5
_LARGEST_BLOCK = 4096
# Where Linux says how much memory a container may use: control groups of version 2, and of version 1.
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# Share of a device's memory that they may take; activations need the rest.
_MEMORY_SHARE = 0.8


def make_planner(settings: RunSettings, num_devices: int, *, padded: bool) -> Planner:
    """The planner of a run; `padded` as in `Planner`.

    Raises:
        UserError: for a malformed bag spec, or one that does not divide the devices.
    """
    with checking("train.bags"):
        bags = None if settings.bags is None else parse_bags(settings.bags)
        if bags is not None:
            bags.layout(num_devices)
    topology = None
    if settings.devices_per_machine is not None:
        if settings.devices_per_machine < 1 or num_devices % settings.devices_per_machine:
            raise UserError(
                "train.devices_per_machine must be at least 1 and divide the devices; got"
                f" devices_per_machine={settings.devices_per_machine} and {num_devices} devices."
            )
        topology = Topology(num_devices // settings.devices_per_machine, settings.devices_per_machine)
    with checking():
        cost = CostModel(width=settings.model.width, gamma=settings.gamma)
    if not 8 <= settings.block <= _LARGEST_BLOCK or settings.block % 8:
        raise UserError(
            f"train.block must be a multiple of 8 in [8, {_LARGEST_BLOCK}]; got block={settings.block}. Try 128."
        )
    return Planner(
        num_devices=num_devices,
        num_heads=settings.model.num_heads,
        bags=bags,
        cost=cost,
        topology=topology,
        block=settings.block,
        padded=padded,
    )


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
        planner = make_planner(settings, mesh.devices.size, padded=needs_padded_exchange(mesh))
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
        return 1 if self.settings.bags is None else max(parse_bags(self.settings.bags).sizes)

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

    def check_pretrained(self) -> None:
        """Refuse a checkpoint to start from that is not of this model; reads names and shapes alone.

        Raises:
            UserError: naming what differs.
        """
        path, model = self.settings.init_from, self.settings.model
        if path is None:
            return
        with checking("train.init_from"):
            check_checkpoint(path, model.config)
        adapter = self.settings.adapter
        if adapter is not None and adapter.init_from is not None:
            with checking("lora.init_from"):
                load_lora(adapter.init_from, model.config, adapter.lora)

    def init_state(self) -> TrainState:
        """A fresh state; backbone and adapters are those of `init_from` where it is set."""
        adapter, loaded = self.settings.adapter, self._pretrained()
        if adapter is not None and adapter.init_from is not None:
            with checking("lora.init_from"):
                found = load_lora(adapter.init_from, self.settings.model.config, adapter.lora)
            found = self._in_module(found)
            shardings = self.program.state_shardings().params
            loaded = merged(loaded, jax.tree.map(put_everywhere, found, shardings))
        return self.program.init_state(lambda: make_module(self.settings), loaded)

    def frozen(self) -> Any:
        """The parameters that are not trained, from where they came from."""
        return {} if self.settings.adapter is None else self._pretrained()

    def _pretrained(self) -> Any:
        """The backbone's parameters from `init_from`, in their place in the module; nothing without."""
        settings, program = self.settings, self.program
        path, model = settings.init_from, settings.model
        if path is None:
            return {}
        _LOG.info("loading %s", path)
        shardings = program.state_shardings()
        found = shardings.params if settings.adapter is None else shardings.frozen
        if self._adapter_key is not None:  # read now, while the files are there
            _LOG.info("digest of what is frozen: %s", self._adapter_key["base"])
        for name in model.backbone_path:
            found = found[name]
        with checking("train.init_from"):
            return self._in_module(
                load_params(path, model.config, shardings=found, dtype=program.frozen_dtype)
            )

    def _in_module(self, params: Any) -> Any:
        """The backbone's parameters as parameters of the module."""
        for name in reversed(self.settings.model.backbone_path):
            params = {name: params}
        return params

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
            "adapter": self._adapter_key,
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
            planner.padded,
            self.settings.micro_batches,
        ]

    @cached_property
    def _adapter_key(self) -> dict[str, Any] | None:
        """What adapters are of, and how they enter: other values would make another model of them."""
        if self.settings.adapter is None:
            return None
        assert self.settings.init_from is not None
        with checking("train.init_from"):
            return {"base": checkpoint_digest(self.settings.init_from), **self._adapter_settings}

    @property
    def _adapter_settings(self) -> dict[str, Any]:
        assert self.settings.adapter is not None
        lora = self.settings.adapter.lora
        return {"scale": lora.scale, "targets": sorted(lora.targets)}

    def check_same_adapter(
        self, meta: dict[str, Any], folder: os.PathLike[str], *, has_base: bool = True
    ) -> None:
        """Refuse adapters of another model, or that would enter it differently.

        Args:
            meta: what the checkpoint says of its run.
            folder: where it is, for the message.
            has_base: whether the model itself is used.

        Raises:
            UserError: naming what changed.
        """
        saved = meta.get("adapter")
        if saved is None or self.settings.adapter is None:
            return
        titles = {
            "scale": "lora.alpha / lora.rank",
            "targets": "lora.targets",
            "base": "the weights at train.init_from",
        }
        mine = (self._adapter_key if has_base else None) or self._adapter_settings
        changed = [titles[name] for name in mine if saved[name] != mine[name]]
        if changed:
            raise UserError(
                f"{folder} holds adapters that were trained with other {' and '.join(changed)}. Restore what it was, or"
                " choose another --workdir."
            )

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
        available = int(self._memory_bytes() - self._state_bytes(copies))
        if needed <= available or self.settings.allow_oversized:
            return
        layers = "one layer" if depth == 1 else f"{depth} layers"
        state = "the parameters leave" if copies == 1 else "parameters and optimiser leave"
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
        """Memory of a device; virtual ones share the host's."""
        return device_memory_bytes(self.mesh) or _host_memory_bytes() // len(self.mesh.local_devices)

    def _state_bytes(self, copies: int) -> int:
        """Bytes on a device of so many arrays like the trained parameters, and of frozen ones."""
        degree, program, state = self.mesh.shape["shard"], self.program, self.abstract_state
        trained = bytes_per_device(state.params, program.trained_axes, degree, copies=copies)
        return trained + bytes_per_device(state.frozen, program.frozen_axes, degree, copies=1)

    def _check_memory(self, copies: int) -> None:
        """Refuse parameters, optimiser and EMA that a device cannot hold, with the arithmetic."""
        degree = self.mesh.shape["shard"]
        needed, available = self._state_bytes(copies), self._memory_bytes()
        if needed <= _MEMORY_SHARE * available or self.settings.allow_oversized:
            return
        trained = f"{self.num_trained:,} parameters in float32, times {copies}"
        trained += " (parameters, two moments, EMA, gradients)" if copies == _COPIES else ""
        frozen = self.num_params - self.num_trained
        held = f"{frozen:,} frozen parameters in {self.program.frozen_dtype} and " if frozen else ""
        more = (
            "" if degree == self.mesh.devices.size else f" Raise train.shards (now {degree}) to shard them,"
        )
        raise UserError(
            f"{held}{trained}, over {degree}"
            f" shard{'s' * (degree > 1)} are {size_text(needed)} a device, of {size_text(available)} at most"
            f" {_MEMORY_SHARE:.0%} may be used.{more} use more devices, or set train.allow_oversized=True."
        )


def _capacity_from_json(saved: dict[str, Any]) -> StepCapacity:
    def route(value: dict[str, Any] | None) -> RouteCapacity | None:
        return None if value is None else RouteCapacity(**{**value, "rounds": tuple(value["rounds"])})

    routes = {name: route(value) for name, value in saved.items() if name.endswith("_route")}
    return StepCapacity(**{**saved, **routes})


def _host_memory_bytes() -> int:
    """Memory of this machine, or what a container leaves of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in _CONTAINER_LIMITS if path.is_file()]
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def check_settings(settings: RunSettings) -> None:
    """Refuse settings that no run can have; touches no device.

    Raises:
        UserError: naming the rule.
    """
    _check_parts(settings)
    if not 0 <= settings.seed < 1 << 63:
        raise UserError(f"train.seed must be in [0, 2^63); got seed={settings.seed}.")
    for name in _AT_LEAST_ONE:
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
    with checking("train.remat"):
        scan_layers(settings.remat)
    if settings.shards > 1 and settings.remat != "full":
        raise UserError(
            f"train.remat must be full with train.shards > 1; got remat={settings.remat!r}, shards={settings.shards}:"
            " sharded layers are gathered and computed again in the backward pass."
        )
    _check_objective(settings)
    _check_adapter(settings)


def _check_adapter(settings: RunSettings) -> None:
    """Refuse adapters of a model that is not there."""
    if settings.adapter is None:
        return
    if settings.init_from is None:
        raise UserError(
            "train.adapter trains small additions to a model that stays as it is: give the model, train.init_from."
        )
    if settings.model.max_text is not None:
        raise UserError(
            "train.adapter freezes everything else, and a text encoder trained along would stay untrained; got"
            f" text_to_image.max_text={settings.model.max_text}. Use text features, max_text=None."
        )
    with checking("lora"):
        nnx.eval_shape(lambda: make_module(settings))


def _check_parts(settings: RunSettings) -> None:
    """Refuse a part of a run that is something else, such as a reference without its parentheses."""
    parts = {
        "model": (ModelSpec, "@text_to_image()"),
        "objective": (Objective, "@flow_matching()"),
        "data": (DataSpec, "@quickstart()"),
        "optimizer": (OptimizerSpec, "@adamw()"),
        "sampler": (SamplerSettings, "@sampler()"),
    }
    if settings.adapter is not None:
        parts["adapter"] = (AdapterSpec, "@lora()")
    for name, (kind, example) in parts.items():
        value = getattr(settings, name)
        if not isinstance(value, kind):
            raise UserError(
                f"train.{name} must be a configurable of its kind, called, such as {example}; got {value!r:.100}."
            )
    prompts = settings.sample_prompts
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(f"train.sample_prompts must be a list of texts; got {prompts!r:.100}.")


_AT_LEAST_ONE = (
    "steps",
    "micro_batches",
    "save_every",
    "keep",
    "log_every",
    "lookahead",
    "num_devices",
    "shards",
)


def _check_objective(settings: RunSettings) -> None:
    """Refuse an objective that is not for the model."""
    model, objective = settings.model, settings.objective
    wanted = DiffusionLoss if model.uses_labels else FlowMatching
    if not isinstance(objective, wanted):
        raise UserError(
            "train.objective must be flow_matching for text_to_image and diffusion for class_to_image; got"
            f" {type(objective).__name__} for a model {'with' if model.uses_labels else 'without'} class labels."
        )
    if isinstance(objective, DiffusionLoss) and objective.channels != model.pixel_channels:
        raise UserError(
            f"diffusion.channels must be class_to_image.channels; got {objective.channels} and"
            f" {model.pixel_channels}."
        )
    if isinstance(objective, FlowMatching) and (objective.guidance is None) == model.guidance_embed:
        raise UserError(
            "flow_matching.guidance is for models with text_to_image.guidance_embed=True, and they need it; got"
            f" guidance={objective.guidance}, guidance_embed={model.guidance_embed}. FLUX.1-dev has 3.5 and True."
        )
