"""A class-conditional DiT from a pipeline's folder: transformer, autoencoder, scheduler, names of classes."""

import difflib
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from ..encoders import AutoencoderKLConfig, Grid
from ..models import DiT, DiTConfig
from ..sampling import Backbone, Conditions, LabelDenoiser, Request, with_defaults
from ..schedulers import scheduler_from_config
from ..weights import check_checkpoint
from ._folder import FolderPipeline, PipelineFolder, part_config, pipeline_index
from ._pictures import PictureDecoder

_STEPS, _GUIDANCE = 50, 4.0


class DiTPipeline(FolderPipeline):
    """DiT from diffusers' layout; see `Pipeline`. Its prompts are classes, by number or by name.

    It was trained on pictures of one size; others are made too, less well.

    Args:
        folder: a pipeline's folder.
        devices: that hold the parameters; all by default.
        devices_per_machine: as `parallel.sequence_mesh`.
        compute_dtype: "bfloat16" or "float32", of parameters, products and activations.
        shards: as `ShardedModule`.

    Raises:
        WeightsError, ValueError: for a folder that is no such pipeline, or parts that do not belong together.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        devices: Sequence[Any] | None = None,
        *,
        devices_per_machine: int | None = None,
        compute_dtype: str = "bfloat16",
        shards: str = "all",
    ) -> None:
        self._folder = PipelineFolder(folder, compute_dtype)
        path = self._folder.path
        index = pipeline_index(path, "DiTPipeline", ("transformer", "vae", "scheduler"))
        self.config: DiTConfig = part_config(path, "transformer", DiTConfig, compute_dtype=compute_dtype)
        self._vae: AutoencoderKLConfig = part_config(
            path, "vae", AutoencoderKLConfig, compute_dtype=compute_dtype
        )
        self.scheduler = scheduler_from_config(path / "scheduler")
        self._classes = _classes(index)
        self._check_parts()
        config = self.config
        denoiser = LabelDenoiser(config.channels if config.learn_sigma else None)
        self.backbone = Backbone(self._folder.module(DiT, config, shards), denoiser)
        self.num_heads, self.head_dim = config.num_heads, config.width // config.num_heads
        super().__init__(
            self._folder,
            devices,
            devices_per_machine,
            pixels_per_token=config.patch_size * self._vae.factor,
            channels=config.in_channels,
        )

    def _check_parts(self) -> None:
        path = self._folder.path
        check_checkpoint(path / "transformer", self.config)
        check_checkpoint(path / "vae", self._vae)
        if self.config.channels != self._vae.latent_channels:
            raise ValueError(
                f"{path}: the transformer's channels must be the latents', {self._vae.latent_channels}; got"
                f" {self.config.channels}. Take all parts from one pipeline."
            )

    @cached_property
    def _decoder(self) -> PictureDecoder:
        return self._folder.decoder(self._vae, self.mesh)

    def params(self, shardings: Any) -> Any:
        """The transformer's parameters."""
        return self._folder.load("transformer", self.config, shardings)

    def checked(self, request: Request) -> Request:
        """See `Pipeline.checked`."""
        request = with_defaults(request, steps=_STEPS, guidance=_GUIDANCE)
        self._check_picture(request)
        if request.true_guidance != 1:
            raise ValueError(
                f"true_guidance: guidance of this model is classifier-free already; got {request.true_guidance}. Set"
                " guidance."
            )
        if request.negative_prompt:
            raise ValueError(
                f"negative_prompt: this model takes classes; got {request.negative_prompt!r}. Leave it out."
            )
        self._class_of(request.prompt)
        return request

    def _class_of(self, prompt: str) -> int:
        """The number of a class.

        Raises:
            ValueError: if there is none such.
        """
        text = prompt.strip()
        if text.isascii() and text.isdigit() and int(text) < self.config.num_classes:
            return int(text)
        found = self._classes.get(text.lower())
        if found is None:
            near = difflib.get_close_matches(text.lower(), self._classes, 1)
            names = (
                f", or the name of one, such as {(near or list(self._classes))[0]!r}" if self._classes else ""
            )
            raise ValueError(
                f"prompt: the number of a class, below {self.config.num_classes}{names}; got {prompt!r:.100}."
            )
        return found

    def is_guided(self, request: Request) -> bool:
        """See `Pipeline.is_guided`."""
        return request.guidance != 1

    def conditions(self, requests: Sequence[Request], *, is_guided: bool) -> Conditions:
        """See `Pipeline.conditions`; the branch without has the class of none."""
        classes = [[self._class_of(request.prompt) for request in requests]]
        if is_guided:
            classes.append([self.config.num_classes] * len(requests))
        labels = np.array(classes, np.int32)
        scale = np.array([request.guidance for request in requests], np.float32)
        return Conditions(None, np.zeros_like(labels), None, labels, None, scale)

    def decode(self, rows: Float[np.ndarray, "n c"], grid: Grid) -> UInt8[np.ndarray, "t h w 3"]:
        """See `Pipeline.decode`."""
        return self._decoder(rows, grid, patch=self.config.patch_size, channels_last=True)


def _classes(index: dict[str, Any]) -> dict[str, int]:
    """Numbers by name: a class may have several names, with commas between."""
    named = index.get("id2label") or {}
    return {
        name.strip().lower(): int(number)
        for number, names in named.items()
        for name in str(names).split(",")
        if name.strip()
    }
