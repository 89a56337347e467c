"""A model's shape as diffusers, or for a text encoder transformers, writes it: config.json."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..encoders import AutoencoderKLConfig, ClipTextConfig, T5Config
from ..models import DiTConfig, MMDiTConfig
from . import _autoencoder, _text
from ._files import WeightsError

__all__ = ["CONFIG_NAME", "config_json", "read_config"]

CONFIG_NAME = "config.json"
_PIPELINE_NAME = "model_index.json"
BackboneConfig = MMDiTConfig | DiTConfig
SavedConfig = BackboneConfig | AutoencoderKLConfig
ModelConfig = SavedConfig | T5Config | ClipTextConfig

_FLUX_CLASS = "FluxTransformer2DModel"
_DIT_CLASS = "DiTTransformer2DModel"
# What diffusers takes where config.json says nothing.
_FLUX_DEFAULTS = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": None,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": [16, 56, 56],
}
_DIT_DEFAULTS = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": None,
    "num_layers": 28,
    "dropout": 0.0,
    "norm_num_groups": 32,
    "attention_bias": True,
    "sample_size": 32,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "upcast_attention": False,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-5,
}
# The one value of each that this model computes.
_FLUX_FIXED = {"patch_size": 1}
_DIT_FIXED = {
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}
# Values without a meaning in this model.
_DIT_IGNORED = ("dropout", "norm_num_groups", "sample_size", "upcast_attention")


def read_config(path: str | os.PathLike[str], *, compute_dtype: str = "bfloat16") -> ModelConfig:
    """The model of a config.json: of a transformer in diffusers' layout, or a text encoder in transformers'.

    A DiT of diffusers differs from the original in two numbers, which the config returned here follows: the frequencies
    of the time embedding (`time_frequency_shift` 1) and the epsilon of the norm before the MLP.

    Args:
        path: the folder, or the file.
        compute_dtype: of the config returned; the file has none.

    Raises:
        WeightsError: for another class of model, or one whose computation differs.
    """
    path, values = _read_json(Path(path))
    # transformers has a list of classes that the weights are of.
    name = values.get("_class_name", values.get("architectures"))
    try:
        if name == _FLUX_CLASS:
            return _flux(_checked(path, values, _FLUX_DEFAULTS, _FLUX_FIXED), compute_dtype)
        # Older files have the class of all transformers on images.
        if name == _DIT_CLASS or (
            name == "Transformer2DModel" and values.get("norm_type") == "ada_norm_zero"
        ):
            return _dit(_checked(path, values, _DIT_DEFAULTS, _DIT_FIXED), compute_dtype)
        if name == [_text.T5_CLASS]:
            return _text.t5(_known(path, values, _text.T5_DEFAULTS), compute_dtype)
        if name == [_text.CLIP_CLASS]:
            return _text.clip(_known(path, values, _text.CLIP_DEFAULTS), compute_dtype)
        if name == _autoencoder.CLASS:
            set_here = {k: v for k, v in values.items() if v is not None and k not in _autoencoder.IGNORED}
            found = _checked(path, set_here, _autoencoder.DEFAULTS, _autoencoder.FIXED)
            return _autoencoder.config_of(found, compute_dtype)
    except (TypeError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path}: {error}") from error
    raise WeightsError(
        f"{path}: _class_name must be {_FLUX_CLASS}, {_DIT_CLASS} or {_autoencoder.CLASS}, or architectures "
        f"[{_text.T5_CLASS}] or [{_text.CLIP_CLASS}]; got {name!r:.100}."
    )


def _read_json(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file, and what it holds."""
    if (path / _PIPELINE_NAME).is_file() and not (path / CONFIG_NAME).exists():
        raise WeightsError(
            f"{path} is a pipeline of several models and has no {CONFIG_NAME}. Give the folder of one of them: "
            "transformer, text_encoder, text_encoder_2 or vae."
        )
    path = path / CONFIG_NAME if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path} cannot be read as a model's config ({error}). A folder in diffusers' layout has a config.json."
        ) from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} must hold a JSON object; got {type(values).__name__}.")
    return path, values


def _known(path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that have defaults; transformers writes out many more that these encoders do not depend on."""
    return _checked(path, {name: value for name, value in values.items() if name in defaults}, defaults, {})


def check_config(path: str | os.PathLike[str], config: ModelConfig) -> None:
    """Refuse a model that is not the one of a config.json; shapes alone do not tell, for example, numbers of heads.

    Raises:
        WeightsError: with the settings that differ.
    """
    stored = read_config(path, compute_dtype=config.compute_dtype)
    if isinstance(config, MMDiTConfig) and config.out_channels == config.in_channels:
        config = replace(config, out_channels=None)
    if type(stored) is not type(config):
        raise WeightsError(
            f"{path} is of a {type(stored).__name__}, the model is of a {type(config).__name__}."
        )
    differ = [
        f"{field.name}={getattr(stored, field.name)!r} there, {getattr(config, field.name)!r} here"
        for field in fields(stored)
        if getattr(stored, field.name) != getattr(config, field.name)
    ]
    if differ:
        raise WeightsError(f"{path} has a config.json of another model: {'; '.join(differ)}.")


def _checked(
    path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    # Options that are off, or left to a default, are written out by some versions.
    unknown = {
        name: value
        for name, value in values.items()
        if name not in defaults and not name.startswith("_") and value is not None and value is not False
    }
    if unknown:
        raise WeightsError(f"{path} has settings that this model does not know: {unknown}.")
    found = {**defaults, **{name: value for name, value in values.items() if name in defaults}}
    for name, value in found.items():
        _check_type(path, name, value, defaults[name])
    for name, value in fixed.items():
        if found[name] != value:
            raise WeightsError(f"{path}: {name} must be {value!r}; got {found[name]!r}.")
    return found


def _check_type(path: Path, name: str, value: Any, default: Any) -> None:
    """Refuse a value of another kind than the default's; JSON's true is no 1, and 2.0 no number of layers."""
    if isinstance(default, list):
        fits = isinstance(value, list) and all(type(x) is type(default[0]) for x in value)
        kind = "a list of whole numbers" if type(default[0]) is int else "a list of texts"
    elif default is None or type(default) is int:
        fits = type(value) is int or (value is None and default is None)
        kind = "a whole number"
    elif type(default) is float:
        fits = type(value) in (int, float) and math.isfinite(value)
        kind = "a number"
    else:
        fits = type(value) is type(default)
        kind = "true or false" if type(default) is bool else "a text"
    if not fits:
        raise WeightsError(
            f"{path}: {name} must be {kind}; got {value!r:.100}. Save the config again with diffusers."
        )


def _flux(values: Mapping[str, Any], compute_dtype: str) -> MMDiTConfig:
    return MMDiTConfig(
        in_channels=values["in_channels"],
        out_channels=None if values["out_channels"] == values["in_channels"] else values["out_channels"],
        text_channels=values["joint_attention_dim"],
        pooled_channels=values["pooled_projection_dim"],
        width=values["num_attention_heads"] * values["attention_head_dim"],
        num_heads=values["num_attention_heads"],
        num_double_blocks=values["num_layers"],
        num_single_blocks=values["num_single_layers"],
        axes_dim=tuple(values["axes_dims_rope"]),
        guidance_embed=values["guidance_embeds"],
        compute_dtype=compute_dtype,
    )


def _dit(values: Mapping[str, Any], compute_dtype: str) -> DiTConfig:
    channels = values["in_channels"]
    out_channels = channels if values["out_channels"] is None else values["out_channels"]
    if out_channels not in (channels, 2 * channels):
        raise ValueError(
            f"out_channels must be in_channels or twice as many; got {out_channels} and in_channels={channels}."
        )
    return DiTConfig(
        width=values["num_attention_heads"] * values["attention_head_dim"],
        depth=values["num_layers"],
        num_heads=values["num_attention_heads"],
        patch_size=values["patch_size"],
        channels=channels,
        num_classes=values["num_embeds_ada_norm"],
        learn_sigma=out_channels != channels,
        time_frequency_shift=1,
        mlp_norm_epsilon=values["norm_eps"],
        compute_dtype=compute_dtype,
    )


def config_json(config: SavedConfig, *, sample_size: int) -> str:
    """The text of config.json with which diffusers makes this model.

    Args:
        config: of the model.
        sample_size: edge of the latent images a DiT is for, in latent pixels; others have none.

    Raises:
        WeightsError: for a model that diffusers cannot express.
    """
    if isinstance(config, MMDiTConfig):
        return json.dumps(_flux_values(config), indent=2) + "\n"
    if isinstance(config, AutoencoderKLConfig):
        return json.dumps(_autoencoder.values_of(config), indent=2) + "\n"
    check_sample_size(sample_size, config)
    return json.dumps(_dit_values(config, sample_size), indent=2) + "\n"


def check_sample_size(sample_size: int, config: DiTConfig) -> None:
    """Refuse images that patches do not divide.

    Raises:
        WeightsError: naming the rule.
    """
    if sample_size < 1 or sample_size % config.patch_size:
        raise WeightsError(
            f"sample_size must be a multiple of the patch, {config.patch_size}; got {sample_size}."
        )


def _refuse_others(fixed: Mapping[str, tuple[Any, Any]]) -> None:
    differ = [
        f"{name}={found!r}, there {wanted!r}" for name, (found, wanted) in fixed.items() if found != wanted
    ]
    if differ:
        raise WeightsError(
            f"diffusers has no setting for {'; '.join(differ)}. Save in the original layout, which has no config."
        )


def _flux_values(config: MMDiTConfig) -> dict[str, Any]:
    _refuse_others(
        {
            "mlp_ratio": (config.mlp_ratio, 4.0),
            "theta": (config.theta, 10_000.0),
            "qkv_bias": (config.qkv_bias, True),
            "time_channels": (config.time_channels, 256),
        }
    )
    return {
        "_class_name": _FLUX_CLASS,
        "patch_size": 1,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "num_layers": config.num_double_blocks,
        "num_single_layers": config.num_single_blocks,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.text_channels,
        "pooled_projection_dim": config.pooled_channels,
        "guidance_embeds": config.guidance_embed,
        "axes_dims_rope": list(config.axes_dim),
    }


def _dit_values(config: DiTConfig, sample_size: int) -> dict[str, Any]:
    _refuse_others(
        {
            "mlp_ratio": (config.mlp_ratio, 4.0),
            "null_class": (config.null_class, True),
            "time_channels": (config.time_channels, 256),
            "time_frequency_shift": (config.time_frequency_shift, 1),
        }
    )
    return {
        "_class_name": _DIT_CLASS,
        **_DIT_DEFAULTS,
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.width // config.num_heads,
        "in_channels": config.channels,
        "out_channels": config.channels * (2 if config.learn_sigma else 1),
        "num_layers": config.depth,
        "sample_size": sample_size,
        "patch_size": config.patch_size,
        "num_embeds_ada_norm": config.num_classes,
        "norm_eps": config.mlp_norm_epsilon,
    }
