"""A published pipeline's folder in diffusers' layout: what it says it is, and its parts."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from parallel import sequence_mesh

from ..encoders import AutoencoderKL, AutoencoderKLConfig, Grid
from ..sampling import CanvasBuckets, Request, ShardedModule, check_request
from ..weights import load_params, read_config
from ._pictures import PictureDecoder

PIPELINE_FILE = "model_index.json"
MOST_SIDE = 8192
MOST_PIXELS = 4096 * 4096
_DECODER_PROGRAMS = 6


def pipeline_index(
    folder: Path, kind: str | Sequence[str], parts: Sequence[str] | None = None
) -> dict[str, Any]:
    """What a folder's index says.

    Args:
        folder: a pipeline's folder.
        kind: class that it must be of, in diffusers, or several of which it must be one.
        parts: folders that must be there.

    Raises:
        ValueError: for a folder that is no such pipeline, or lacks a part.
    """
    index = folder / PIPELINE_FILE
    if not index.is_file():
        raise ValueError(
            f"{folder} is no pipeline: it has no {PIPELINE_FILE}. Give the folder that holds transformer, vae and"
            f" so on."
        )
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
        name = values["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} cannot be read ({error}). Fetch it again.") from error
    kinds = [kind] if isinstance(kind, str) else kind
    if name not in kinds:
        raise ValueError(
            f"{folder} must be a {' or '.join(kinds)}; got {name!r:.100}. Others are not supported yet."
        )
    missing = [part for part in parts or () if not (folder / part).is_dir()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}. Fetch the whole pipeline.")
    return values


def part_config(folder: Path, name: str, kind: type, *, compute_dtype: str) -> Any:
    """The config of a part.

    Raises:
        WeightsError, ValueError: if it cannot be read, or is of another model.
    """
    config = read_config(folder / name, compute_dtype=compute_dtype)
    if not isinstance(config, kind):
        raise ValueError(
            f"{folder / name} must be a {kind.__name__} in this pipeline; got a {type(config).__name__}."
            " Take all parts from one pipeline."
        )
    return config


class PipelineFolder:
    """Parts of a pipeline on a mesh, when they are asked for.

    Args:
        folder: a pipeline's folder.
        compute_dtype: "bfloat16" or "float32", of products and activations.

    Attributes:
        path: the folder.
        dtype: of products.
    """

    def __init__(self, folder: str | os.PathLike[str], compute_dtype: str) -> None:
        self.path, self.dtype = Path(folder), jnp.dtype(compute_dtype)

    def module(self, kind: Any, config: Any, shards: str, dtype: Any = None) -> ShardedModule:
        """A part's module; `shards` are devices that share a copy of its parameters, see `ShardedModule`."""
        module = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
        return ShardedModule(module, self.dtype if dtype is None else dtype, shards)

    def load(self, name: str, config: Any, shardings: Any, dtype: Any = None) -> Any:
        """A part's parameters.

        Args:
            name: of its folder.
            config: of its model.
            shardings: of the parameters, such as `ShardedModule.shardings(mesh)`.
            dtype: of the parameters; that of products by default.

        Raises:
            WeightsError: for values that are not finite, or that the dtype cannot hold.
        """
        return load_params(
            self.path / name, config, shardings=shardings, dtype=self.dtype if dtype is None else dtype
        )

    def decoder(self, config: AutoencoderKLConfig, mesh: Any) -> PictureDecoder:
        """The autoencoder's decoder, whose parameters are on every device."""
        weights = self.module(AutoencoderKL, config, "one", jnp.float32)
        params = self.load("vae", config, weights.shardings(mesh), jnp.float32)
        side = MOST_SIDE // config.factor
        buckets = CanvasBuckets(_DECODER_PROGRAMS, (side, side))
        return PictureDecoder(nnx.merge(nnx.graphdef(weights.module), params), mesh, buckets)


class FolderPipeline:
    """What pipelines of a folder have in common: the mesh of their parts, and pictures of one frame.

    Args:
        parts: of the pipeline.
        devices: that hold the parameters; all by default.
        devices_per_machine: as `parallel.sequence_mesh`.
        pixels_per_token: along an edge.
        channels: of a row of latents.
    """

    def __init__(
        self,
        parts: PipelineFolder,
        devices: Sequence[Any] | None,
        devices_per_machine: int | None,
        *,
        pixels_per_token: int,
        channels: int,
    ) -> None:
        devices = list(jax.devices() if devices is None else devices)
        self.mesh: Mesh = sequence_mesh(
            devices, ulysses_degree=len(devices), devices_per_machine=devices_per_machine
        )
        self.pixels_per_token, self.channels = pixels_per_token, channels
        self.largest_tokens = MOST_PIXELS // pixels_per_token**2
        self._name = parts.path.name

    def grid(self, request: Request) -> Grid:
        """See `Pipeline.grid`."""
        unit = self.pixels_per_token
        return Grid(request.frames, request.height // unit, request.width // unit)

    def about(self, request: Request) -> dict[str, Any]:
        """See `Pipeline.about`."""
        return {
            "model": self._name,
            "prompt": request.prompt,
            "seed": request.seed,
            "number": request.number,
            "steps": request.steps,
            "guidance": request.guidance,
        }

    def _check_picture(self, request: Request) -> None:
        """Refuse what is no picture of a size that can be made.

        Raises:
            ValueError: naming the rule, the value and the way out.
        """
        check_request(
            request,
            unit=self.pixels_per_token,
            most_pixels=MOST_PIXELS,
            most_side=MOST_SIDE,
            channels=self.channels,
        )
        if request.frames != 1:
            raise ValueError(f"frames: this model makes pictures; got frames={request.frames}. Give 1.")
