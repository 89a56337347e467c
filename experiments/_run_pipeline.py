"""A run's own model as an engine samples it: captions of bytes or classes, rows of pixels."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, UInt8

from experiments._components import RunSettings
from experiments._config import UserError
from experiments._run import Run
from experiments.data import frames_from_rows
from jaxdit.encoders import TOKEN_BYTES, Grid, TextFeatures, TextRows, byte_tokens
from jaxdit.sampling import (
    Backbone,
    Conditions,
    Denoiser,
    LabelDenoiser,
    Request,
    ShardedModule,
    TextDenoiser,
    check_request,
    with_defaults,
)
from jaxdit.training import DiffusionLoss, SamplerSettings, TrainProgram

# Memory ends earlier.
_MOST_TOKENS = 1 << 20
# Text features have this many rows a caption, or four, sixteen ... times as many.
_LEAST_TEXT = 16
_RGB = 3


class RunPipeline:
    """The model of a run, see `jaxdit.sampling.Pipeline`.

    A request's guidance is classifier-free. A distilled guidance that the model was trained with is what it was.

    Args:
        run: the run.
        params: its parameters, on its mesh; they may be replaced between batches, with `Engine.forget_params`.
        settings: steps, guidance, method; the run's own by default.

    Attributes:
        trained: the parameters.
        step: that they are of, for a file's metadata; None says nothing.
    """

    def __init__(self, run: Run, params: Any = None, settings: SamplerSettings | None = None) -> None:
        model = run.settings.model
        self.trained = params
        self.step: int | None = None
        self._run, self._settings = run, settings or run.settings.sampler
        self.backbone = run_backbone(run.settings, run.program, sampling_shards(run))
        self.scheduler = run.settings.objective.scheduler(self._settings.method)
        self.channels, self.num_heads = model.channels, model.num_heads
        self.head_dim = model.width // model.num_heads
        self.largest_tokens = _MOST_TOKENS

    def params(self, shardings: Any) -> Any:
        """The backbone's."""
        return jax.device_put(backbone_params(self._run.settings, self.trained), shardings)

    def checked(self, request: Request) -> Request:
        """See `Pipeline.checked`.

        Raises:
            ValueError: for a run whose rows are no pixels, or a picture that is too large for a device.
        """
        run, patch = self._run, self._patch
        defaults = {"steps": self._settings.num_steps, "guidance": self._settings.guidance_scale}
        request = with_defaults(request, **defaults)
        check_request(
            request, unit=patch, most_pixels=_MOST_TOKENS * patch**2, most_side=None, channels=self.channels
        )
        if request.true_guidance != 1:
            raise ValueError(
                f"true_guidance: guidance of this model is classifier-free already; got {request.true_guidance}. Set"
                " guidance."
            )
        grid = self.grid(request)
        tokens = grid.t * grid.h * grid.w
        try:
            run.check_sample_rows(-(-tokens // run.planner.num_devices), f"the picture has {tokens:,} tokens")
        except UserError as error:
            raise ValueError(str(error)) from error
        self._check_text(request)
        return request

    @property
    def _patch(self) -> int:
        """Pixels along the edge of a token.

        Raises:
            ValueError: for a run whose rows are no pixels.
        """
        patch, model = self._run.settings.data.patch, self._run.settings.model
        if not patch:
            raise ValueError(
                "this run cannot make pictures: its rows, of encoded or synthetic data, are no pixels. Export its"
                " weights with experiments.export, and sample where the decoder of its latents is."
            )
        if patch**2 * _RGB != model.channels:
            raise ValueError(
                f"a patch of {patch} x {patch} pixels has {patch**2 * _RGB} channels, the model {model.channels}. Leave"
                " the data's patch as it was trained."
            )
        return patch

    def _check_text(self, request: Request) -> None:
        model = self._run.settings.model
        if model.uses_labels:
            prompt = request.prompt
            if not (prompt.isascii() and prompt.isdigit() and int(prompt) < model.num_classes):
                raise ValueError(
                    f"the prompt of this model is a class number below {model.num_classes}; got {prompt!r}."
                )
            if request.negative_prompt:
                raise ValueError(
                    "negative_prompt: this model takes class numbers; got"
                    f" {request.negative_prompt!r}. Leave it out."
                )
            return
        if model.max_text is None:
            raise ValueError(
                "this model takes precomputed text features; it cannot be prompted with text yet."
            )
        for text in (request.prompt, request.negative_prompt or ""):
            count = len(byte_tokens(text))
            if count > model.max_text:
                raise ValueError(
                    f"a prompt has at most {model.max_text} tokens (words, longer ones {TOKEN_BYTES} bytes a token);"
                    f" got {count}. Shorten it."
                )

    def grid(self, request: Request) -> Grid:
        """See `Pipeline.grid`."""
        patch = self._patch
        return Grid(request.frames, request.height // patch, request.width // patch)

    def is_guided(self, request: Request) -> bool:
        """See `Pipeline.is_guided`."""
        return request.guidance != 1

    def conditions(self, requests: Sequence[Request], *, is_guided: bool) -> Conditions:
        """See `Pipeline.conditions`; the branch without is what training without caption or class was."""
        scale = np.array([request.guidance for request in requests], np.float32)
        model = self._run.settings.model
        if model.uses_labels:
            classes = [[int(request.prompt) for request in requests], [model.num_classes] * len(requests)]
            labels = np.array(classes[: 1 + is_guided], np.int32)
            return Conditions(None, np.zeros_like(labels), None, labels, None, scale)
        texts = [[request.prompt for request in requests], [r.negative_prompt or "" for r in requests]]
        return self._text_conditions(texts[: 1 + is_guided], scale)

    def _text_conditions(self, texts: list[list[str]], scale: np.ndarray) -> Conditions:
        shape = len(texts), len(scale)
        tokens = [byte_tokens(text) for row in texts for text in row]
        lengths = np.array([len(x) for x in tokens], np.int32)
        size = _text_size(int(lengths.max()), self._run.settings.model.max_text or 0)
        padded = np.zeros((len(tokens), size, TOKEN_BYTES), np.int32)
        for row, found in zip(padded, tokens, strict=True):
            row[: len(found)] = found
        features, pooled = self._encode(self.trained["text_encoder"], padded, lengths)
        guidance = getattr(self._run.settings.objective, "guidance", None)
        return Conditions(
            text=features.reshape(*shape, size, -1),
            text_lengths=lengths.reshape(shape),
            pooled=pooled.reshape(*shape, -1),
            labels=None,
            embedded_guidance=None if guidance is None else np.full(shape, guidance, np.float32),
            scale=scale,
        )

    @cached_property
    def _encode(self) -> Any:
        """(captions, rows, channels) features and pooled vectors of padded tokens, replicated."""
        module: Any = self._run.program.module
        replicated = NamedSharding(self._run.mesh, P())
        return jax.jit(partial(_encoded, nnx.graphdef(module.text_encoder)), out_shardings=replicated)

    def decode(self, rows: Float[np.ndarray, "n c"], grid: Grid) -> UInt8[np.ndarray, "t h w 3"]:
        """See `Pipeline.decode`."""
        return frames_from_rows(rows, grid=grid, patch=self._patch)

    def about(self, request: Request) -> dict[str, Any]:
        """See `Pipeline.about`."""
        about = {
            "prompt": request.prompt,
            "seed": request.seed,
            "number": request.number,
            "steps": request.steps,
            "guidance": request.guidance,
        }
        if request.negative_prompt:
            about["negative_prompt"] = request.negative_prompt
        return about if self.step is None else {"step": self.step, **about}


def run_backbone(settings: RunSettings, program: TrainProgram, shards: str | tuple[str, ...]) -> Backbone:
    """The backbone of a run's program, its parameters divided as `ShardedModule` says."""
    module: Any = program.module
    for name in settings.model.backbone_path:
        module = getattr(module, name)
    objective = settings.objective
    denoiser: Denoiser = TextDenoiser()
    if isinstance(objective, DiffusionLoss):
        denoiser = LabelDenoiser(objective.channels)
    return Backbone(ShardedModule(module, program.dtype, shards), denoiser)


def sampling_shards(run: Run) -> str:
    """As many devices share parameters as do in training, or all."""
    machine = run.planner.devices_per_machine
    return {1: "one", machine: "machine"}.get(run.settings.shards, "all")


def backbone_params(settings: RunSettings, params: Any) -> Any:
    """Of all parameters of a run (or shapes in their places), the backbone's."""
    for name in settings.model.backbone_path:
        params = params.get(name, {})
    return params


def _encoded(graph: Any, params: Any, tokens: jax.Array, lengths: jax.Array) -> TextFeatures:
    """Features of padded captions, and pooled vectors; one sequence each."""
    captions, size, _ = tokens.shape
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (captions, size))
    numbers = jnp.arange(1, captions + 1, dtype=jnp.int32)[:, None]
    ids = jnp.where(place < lengths[:, None], numbers, 0)
    rows = TextRows(tokens.reshape(-1, TOKEN_BYTES), ids.reshape(-1), place.reshape(-1))
    return nnx.merge(graph, params)(rows, num_sequences=captions)


def _text_size(longest: int, most: int) -> int:
    """Rows of text features: few sizes, so that few programs are compiled."""
    size = _LEAST_TEXT
    while size < longest:
        size *= 4
    return min(size, most)
