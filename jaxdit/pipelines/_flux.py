"""FLUX.1 from a pipeline's folder: transformer, T5 and CLIP with their tokenizers, autoencoder, scheduler."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, UInt8

from parallel import sequence_mesh

from ..encoders import (
    AutoencoderKL,
    AutoencoderKLConfig,
    ClipTextConfig,
    ClipTextEncoder,
    Grid,
    T5Config,
    T5Encoder,
    Tokenizer,
)
from ..models import MMDiT, MMDiTConfig
from ..sampling import (
    Backbone,
    CanvasBuckets,
    Conditions,
    Request,
    ShardedModule,
    TextDenoiser,
    check_request,
    with_defaults,
)
from ..schedulers import Scheduler, scheduler_from_config
from ..weights import check_checkpoint, load_params, read_config
from ._pictures import PictureDecoder
from ._text_program import TextProgram

PIPELINE_FILE = "model_index.json"
_PARTS = ("transformer", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae", "scheduler")
# Of latents, as many rows of which are a token.
_PATCH = 2
_DEV_STEPS, _SCHNELL_STEPS = 28, 4
_DEV_TOKENS, _SCHNELL_TOKENS = 512, 256
_DEV_GUIDANCE = 3.5
_MOST_PIXELS, _MOST_SIDE = 4096 * 4096, 8192
_DECODER_PROGRAMS = 6


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
        _check_folder(folder)

        def part(name: str, kind: type) -> Any:
            config = read_config(folder / name, compute_dtype=compute_dtype)
            if not isinstance(config, kind):
                raise ValueError(
                    f"{folder / name} must be a {kind.__name__} in FLUX.1's pipeline; got a {type(config).__name__}."
                    " Take all parts from one pipeline."
                )
            return config

        return cls(
            transformer=part("transformer", MMDiTConfig),
            clip=part("text_encoder", ClipTextConfig),
            t5=part("text_encoder_2", T5Config),
            vae=part("vae", AutoencoderKLConfig),
            scheduler=scheduler_from_config(folder / "scheduler", even_sigmas=True),
        )


def _check_folder(folder: Path) -> None:
    index = folder / PIPELINE_FILE
    if not index.is_file():
        raise ValueError(
            f"{folder} is no pipeline: it has no {PIPELINE_FILE}. Give the folder that holds transformer, vae and"
            f" so on."
        )
    try:
        name = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} cannot be read ({error}). Fetch it again.") from error
    if name != "FluxPipeline":
        raise ValueError(f"{folder} must be a FluxPipeline; got {name!r}. Others are not supported yet.")
    missing = [part for part in _PARTS if not (folder / part).is_dir()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}. Fetch the whole pipeline.")


class FluxPipeline:
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
        self._folder = Path(folder)
        self.configs = FluxConfigs.read(self._folder, compute_dtype)
        config = self.configs.transformer
        default_tokens = _DEV_TOKENS if config.guidance_embed else _SCHNELL_TOKENS
        self.text_tokens = default_tokens if text_tokens is None else text_tokens
        self._tokenizers = (
            Tokenizer(
                self._folder / "tokenizer", max_length=self.configs.clip.max_length, on_long="truncate"
            ),
            Tokenizer(self._folder / "tokenizer_2", max_length=self.text_tokens, on_long=on_long),
        )
        self._check_parts()
        devices = list(jax.devices() if devices is None else devices)
        self.mesh: Mesh = sequence_mesh(
            devices, ulysses_degree=len(devices), devices_per_machine=devices_per_machine
        )
        self._dtype = jnp.dtype(compute_dtype)
        self._shards = shards
        self.backbone = Backbone(self._module(MMDiT, config), TextDenoiser())
        self.scheduler = self.configs.scheduler
        self.channels = config.in_channels
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.largest_tokens = _MOST_PIXELS // self.pixels_per_token**2

    def _check_parts(self) -> None:
        configs = self.configs
        clip, t5 = self._tokenizers
        clip.check(configs.clip)
        t5.check(configs.t5)
        for name, config in (
            ("transformer", configs.transformer),
            ("text_encoder", configs.clip),
            ("text_encoder_2", configs.t5),
            ("vae", configs.vae),
        ):
            check_checkpoint(self._folder / name, config)
        model = configs.transformer
        wanted = {
            "text_channels": (model.text_channels, configs.t5.width, "T5's width"),
            "pooled_channels": (model.pooled_channels, configs.clip.width, "CLIP's width"),
            "in_channels": (
                model.in_channels,
                _PATCH**2 * configs.vae.latent_channels,
                "4 latents' channels",
            ),
        }
        for name, (have, need, what) in wanted.items():
            if have != need:
                raise ValueError(
                    f"{self._folder}: the transformer's {name} must be {what}, {need}; got {have}. Take all parts from"
                    " one pipeline."
                )

    def _module(self, kind: Any, config: Any) -> ShardedModule:
        module = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
        return ShardedModule(module, self._dtype, self._shards)

    @property
    def pixels_per_token(self) -> int:
        """Along an edge."""
        return _PATCH * self.configs.vae.factor

    @cached_property
    def _t5(self) -> TextProgram:
        weights = self._module(T5Encoder, self.configs.t5)
        params = self._load("text_encoder_2", self.configs.t5, weights)
        return TextProgram(weights, params, self.mesh, lambda t5, ids, scan: t5(ids, layer_scan=scan))

    @cached_property
    def _clip(self) -> TextProgram:
        weights = self._module(ClipTextEncoder, self.configs.clip)
        params = self._load("text_encoder", self.configs.clip, weights)
        return TextProgram(
            weights, params, self.mesh, lambda clip, ids, scan: clip(ids, layer_scan=scan).pooled
        )

    @cached_property
    def _decoder(self) -> PictureDecoder:
        config = self.configs.vae
        weights = ShardedModule(
            nnx.eval_shape(lambda: AutoencoderKL(config, rngs=nnx.Rngs(0))), jnp.float32, "one"
        )
        params = self._load("vae", config, weights, jnp.float32)
        side = _MOST_SIDE // config.factor
        buckets = CanvasBuckets(_DECODER_PROGRAMS, (side, side))
        return PictureDecoder(nnx.merge(nnx.graphdef(weights.module), params), self.mesh, buckets)

    def _load(self, name: str, config: Any, weights: ShardedModule, dtype: Any = None) -> Any:
        return load_params(
            self._folder / name, config, shardings=weights.shardings(self.mesh), dtype=dtype or self._dtype
        )

    def params(self, shardings: Any) -> Any:
        """The transformer's parameters."""
        config = self.configs.transformer
        return load_params(self._folder / "transformer", config, shardings=shardings, dtype=self._dtype)

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
        check_request(
            request,
            unit=self.pixels_per_token,
            most_pixels=_MOST_PIXELS,
            most_side=_MOST_SIDE,
            channels=self.channels,
        )
        if request.frames != 1:
            raise ValueError(f"frames: this model makes pictures; got frames={request.frames}. Give 1.")
        # Texts are tokenised here, so that one that is too long is refused before anything is computed.
        for tokenizer in self._tokenizers:
            tokenizer([request.prompt, request.negative_prompt or ""])
        return request

    def grid(self, request: Request) -> Grid:
        """See `Pipeline.grid`."""
        unit = self.pixels_per_token
        return Grid(request.frames, request.height // unit, request.width // unit)

    def is_guided(self, request: Request) -> bool:
        """See `Pipeline.is_guided`."""
        return request.true_guidance != 1

    def conditions(self, requests: Sequence[Request], *, is_guided: bool) -> Conditions:
        """See `Pipeline.conditions`: T5's features of all tokens, padding too, as FLUX.1 was trained."""
        texts = [request.prompt for request in requests]
        if is_guided:
            texts += [request.negative_prompt or "" for request in requests]
        clip, t5 = self._tokenizers
        text, pooled = self._t5(t5(texts).ids), self._clip(clip(texts).ids)
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
        return self._decoder(rows, grid, patch=_PATCH, channels_last=False)

    def about(self, request: Request) -> dict[str, Any]:
        """See `Pipeline.about`."""
        about = {
            "model": self._folder.name,
            "prompt": request.prompt,
            "seed": request.seed,
            "number": request.number,
            "steps": request.steps,
            "guidance": request.guidance,
        }
        if self.is_guided(request):
            about |= {
                "negative_prompt": request.negative_prompt or "",
                "true_guidance": request.true_guidance,
            }
        return about
