"""A pipeline by what its folder says it is."""

import json
import os
from pathlib import Path
from typing import Any

from ..encoders import AutoencoderKLConfig
from ._dit import DiTPipeline
from ._flux import FluxPipeline
from ._folder import part_config, pipeline_index

_KINDS: dict[str, Any] = {"FluxPipeline": FluxPipeline, "DiTPipeline": DiTPipeline}


def open_pipeline(
    folder: str | os.PathLike[str], devices: Any = None, *, on_long: str = "error", **options: Any
) -> FluxPipeline | DiTPipeline:
    """The pipeline of a folder in diffusers' layout.

    Args:
        folder: the folder.
        devices: that hold the parameters; all by default.
        on_long: what becomes of captions that are too long, of a model that takes some.
        options: `devices_per_machine`, `compute_dtype` and `shards`, which all pipelines have.

    Raises:
        WeightsError, TokenizerError, ValueError: for a folder that is no such pipeline, or parts that do not belong
            together.
    """
    kind = _KINDS[pipeline_index(Path(folder), tuple(_KINDS))["_class_name"]]
    if kind is FluxPipeline:
        options["on_long"] = on_long
    return kind(folder, devices, **options)


_FLUX_SIDE = 1024


def default_size(folder: str | os.PathLike[str]) -> tuple[int, int]:
    """Height and width, in pixels, of pictures that a folder's model was trained for: of FLUX.1's many, 1024 x 1024.

    Raises:
        WeightsError, ValueError: for a folder that is no such pipeline.
    """
    path = Path(folder)
    if pipeline_index(path, tuple(_KINDS))["_class_name"] == "FluxPipeline":
        return _FLUX_SIDE, _FLUX_SIDE
    vae = part_config(path, "vae", AutoencoderKLConfig, compute_dtype="float32")
    config = json.loads((path / "transformer" / "config.json").read_text(encoding="utf-8"))
    side = int(config.get("sample_size", 32)) * vae.factor
    return side, side
