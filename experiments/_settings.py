"""Settings of a run that can be refused before anything is made of them."""

import numpy as np
from flax import nnx

from experiments._components import AdapterSpec, ModelSpec, OptimizerSpec, RunSettings
from experiments._config import UserError, checking
from experiments._data_components import DataSpec
from experiments._run import make_module
from jaxdit.models import scan_layers
from jaxdit.training import DiffusionLoss, FlowMatching, Objective, SamplerSettings


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
    with checking("train.sampler"):
        scheduler = settings.objective.scheduler(settings.sampler.method)
        scheduler.table(settings.sampler.num_steps, np.array([256]))
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
