"""FLUX.1's folder in diffusers' layout: what is in it, checked, and its parts on a mesh when they are asked for."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..encoders import AutoencoderKLConfig, ClipTextConfig, T5Config, Tokenizer
from ..models import MMDiTConfig
from ..schedulers import Scheduler, scheduler_from_config
from ..weights import check_checkpoint
from ._folder import PipelineFolder, part_config, pipeline_index

# Of latents, as many rows of which are a token.
PATCH = 2
_PARTS = ("transformer", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae", "scheduler")
_DEV_TOKENS, _SCHNELL_TOKENS = 512, 256


@dataclass(frozen=True, slots=True)
class FluxConfigs:
    """What a folder's config files say."""

    transformer: MMDiTConfig
    clip: ClipTextConfig
    t5: T5Config
    vae: AutoencoderKLConfig
    scheduler: Scheduler

    @classmethod
    def read(cls, folder: Path, compute_dtype: str) -> "FluxConfigs":
        """Read and check all of them.

        Raises:
            WeightsError, ValueError: for a folder that is no such pipeline, or lacks a part.
        """
        pipeline_index(folder, "FluxPipeline", _PARTS)
        read = partial(part_config, folder, compute_dtype=compute_dtype)
        return cls(
            transformer=read("transformer", MMDiTConfig),
            clip=read("text_encoder", ClipTextConfig),
            t5=read("text_encoder_2", T5Config),
            vae=read("vae", AutoencoderKLConfig),
            scheduler=scheduler_from_config(folder / "scheduler", even_sigmas=True),
        )


class FluxFolder(PipelineFolder):
    """FLUX.1 (dev and schnell) in diffusers' layout.

    Configs, tokenizers, names and shapes of tensors are read and checked; tensors are read when a part is asked for.

    Args:
        folder: a pipeline's folder.
        compute_dtype: "bfloat16" or "float32", of products and activations.
        text_tokens: tokens of every caption for T5; FLUX.1's by default: 512 (dev), 256 (schnell).
        on_long: as `Tokenizer`, for T5; CLIP's captions are always cut, as FLUX.1's pipeline does.
        with_transformer: whether the transformer's weights must be there; its config is read in any case.

    Attributes:
        path: the folder.
        configs: of its parts.
        dtype: of products.
        text_tokens: tokens of every caption for T5.
        clip_tokenizer, t5_tokenizer: of the two text encoders.

    Raises:
        WeightsError, TokenizerError, ValueError: for a folder that is no such pipeline, or parts that do not belong
            together.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        compute_dtype: str = "bfloat16",
        text_tokens: int | None = None,
        on_long: str = "error",
        with_transformer: bool = True,
    ) -> None:
        super().__init__(folder, compute_dtype)
        self.configs = FluxConfigs.read(self.path, compute_dtype)
        default_tokens = _DEV_TOKENS if self.configs.transformer.guidance_embed else _SCHNELL_TOKENS
        self.text_tokens = default_tokens if text_tokens is None else text_tokens
        clip_length = self.configs.clip.max_length
        self.clip_tokenizer = Tokenizer(self.path / "tokenizer", max_length=clip_length, on_long="truncate")
        self.t5_tokenizer = Tokenizer(self.path / "tokenizer_2", max_length=self.text_tokens, on_long=on_long)
        self._check_parts(with_transformer)

    def _check_parts(self, with_transformer: bool) -> None:
        configs = self.configs
        self.clip_tokenizer.check(configs.clip)
        self.t5_tokenizer.check(configs.t5)
        weights: dict[str, Any] = {
            "text_encoder": configs.clip,
            "text_encoder_2": configs.t5,
            "vae": configs.vae,
        }
        if with_transformer:
            check_checkpoint(self.path / "transformer", configs.transformer)
        for name, config in weights.items():
            check_checkpoint(self.path / name, config)
        model, latents = configs.transformer, PATCH**2 * configs.vae.latent_channels
        wanted = {
            "text_channels": (model.text_channels, configs.t5.width, "T5's width"),
            "pooled_channels": (model.pooled_channels, configs.clip.width, "CLIP's width"),
            "in_channels": (model.in_channels, latents, "4 latents' channels"),
        }
        for name, (have, need, what) in wanted.items():
            if have != need:
                raise ValueError(
                    f"{self.path}: the transformer's {name} must be {what}, {need}; got {have}. Take all parts from"
                    " one pipeline."
                )

    @property
    def pixels_per_token(self) -> int:
        """Along an edge."""
        return PATCH * self.configs.vae.factor
