"""FLUX.1 from a pipeline's folder: transformer, T5 and CLIP with their tokenizers, autoencoder, scheduler."""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from ..encoders import ClipTextEncoder, Grid, T5Encoder
from ..models import MMDiT
from ..sampling import (
    Backbone,
    Conditions,
    Request,
    TextDenoiser,
    with_defaults,
)
from ._flux_folder import PATCH, FluxFolder
from ._folder import FolderPipeline
from ._pictures import PictureDecoder
from ._text_program import TextProgram, clip_pooled, t5_features

_DEV_STEPS, _SCHNELL_STEPS = 28, 4
_DEV_GUIDANCE = 3.5


class FluxPipeline(FolderPipeline):
    """FLUX.1 (dev and schnell) from diffusers' layout; see `Pipeline`.

    Everything is checked before the first tensor is read; parameters are read when they are first needed, straight into
    their shards.

    Args:
        folder: a pipeline's folder.
        devices: that hold the parameters; all by default.
        devices_per_machine: as `parallel.sequence_mesh`.
        compute_dtype: "bfloat16" or "float32", of parameters, products and activations.
        shards: as `ShardedModule`.
        text_tokens: tokens of every caption for T5; FLUX.1's by default: 512 (dev), 256 (schnell).
        on_long: as `Tokenizer`, for captions of more tokens.

    Raises:
        WeightsError, TokenizerError, ValueError: for a folder that is no such pipeline, or parts that do not belong
            together.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        devices: Sequence[Any] | None = None,
        *,
        devices_per_machine: int | None = None,
        compute_dtype: str = "bfloat16",
        shards: str = "all",
        text_tokens: int | None = None,
        on_long: str = "error",
    ) -> None:
        self._folder = FluxFolder(
            folder, compute_dtype=compute_dtype, text_tokens=text_tokens, on_long=on_long
        )
        self.configs, self.text_tokens = self._folder.configs, self._folder.text_tokens
        config = self.configs.transformer
        super().__init__(
            self._folder,
            devices,
            devices_per_machine,
            pixels_per_token=self._folder.pixels_per_token,
            channels=config.in_channels,
        )
        self._shards = shards
        self.backbone = Backbone(self._folder.module(MMDiT, config, shards), TextDenoiser())
        self.scheduler = self.configs.scheduler
        self.num_heads, self.head_dim = config.num_heads, config.head_dim

    @cached_property
    def _t5(self) -> TextProgram:
        folder, config = self._folder, self.configs.t5
        weights = folder.module(T5Encoder, config, self._shards)
        params = folder.load("text_encoder_2", config, weights.shardings(self.mesh))
        return TextProgram(weights, params, self.mesh, t5_features)

    @cached_property
    def _clip(self) -> TextProgram:
        folder, config = self._folder, self.configs.clip
        weights = folder.module(ClipTextEncoder, config, self._shards)
        params = folder.load("text_encoder", config, weights.shardings(self.mesh))
        return TextProgram(weights, params, self.mesh, clip_pooled)

    @cached_property
    def _decoder(self) -> PictureDecoder:
        return self._folder.decoder(self.configs.vae, self.mesh)

    def params(self, shardings: Any) -> Any:
        """The transformer's parameters."""
        return self._folder.load("transformer", self.configs.transformer, shardings)

    def checked(self, request: Request) -> Request:
        """See `Pipeline.checked`."""
        is_distilled = self.configs.transformer.guidance_embed
        request = with_defaults(
            request,
            steps=_DEV_STEPS if is_distilled else _SCHNELL_STEPS,
            guidance=_DEV_GUIDANCE if is_distilled else 1.0,
        )
        if not is_distilled and request.guidance != 1:
            raise ValueError(
                f"guidance: this model has no distilled guidance; got guidance={request.guidance}. Leave it out, or set"
                " true_guidance for classifier-free guidance."
            )
        self._check_picture(request)
        # Texts are tokenised here, so that one that is too long is refused before anything is computed.
        for tokenizer in (self._folder.clip_tokenizer, self._folder.t5_tokenizer):
            tokenizer([request.prompt, request.negative_prompt or ""])
        return request

    def is_guided(self, request: Request) -> bool:
        """See `Pipeline.is_guided`."""
        return request.true_guidance != 1

    def conditions(self, requests: Sequence[Request], *, is_guided: bool) -> Conditions:
        """See `Pipeline.conditions`: T5's features of all tokens, padding too, as FLUX.1 was trained."""
        texts = [request.prompt for request in requests]
        if is_guided:
            texts += [request.negative_prompt or "" for request in requests]
        clip_ids, t5_ids = self._folder.clip_tokenizer(texts).ids, self._folder.t5_tokenizer(texts).ids
        text, pooled = self._t5(t5_ids), self._clip(clip_ids)
        shape = 1 + is_guided, len(requests)
        guidance = np.array([request.guidance for request in requests], np.float32)
        is_distilled = self.configs.transformer.guidance_embed
        return Conditions(
            text=text.reshape(*shape, *text.shape[1:]),
            text_lengths=np.full(shape, self.text_tokens, np.int32),
            pooled=pooled.reshape(*shape, -1),
            labels=None,
            embedded_guidance=np.tile(guidance, (shape[0], 1)) if is_distilled else None,
            scale=np.array([request.true_guidance for request in requests], np.float32),
        )

    def decode(self, rows: Float[np.ndarray, "n c"], grid: Grid) -> UInt8[np.ndarray, "t h w 3"]:
        """See `Pipeline.decode`."""
        return self._decoder(rows, grid, patch=PATCH, channels_last=False)

    def about(self, request: Request) -> dict[str, Any]:
        """See `Pipeline.about`."""
        about = super().about(request)
        if self.is_guided(request):
            about |= {
                "negative_prompt": request.negative_prompt or "",
                "true_guidance": request.true_guidance,
            }
        return about
