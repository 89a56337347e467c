"""What a config can name for its data: the quickstart's, a folder or tar shards, encoded latents, synthetic rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gin

from experiments._encoders import EncoderSettings
from experiments.data import (
    BadLimit,
    EncodedCache,
    EncodedFolder,
    EncodedRules,
    ImageFolder,
    MediaRules,
    MediaSource,
    Source,
    SyntheticCodes,
    SyntheticRows,
    WebDatasetShards,
    is_cache,
    quickstart_sources,
)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Data to open, and how steps are cut from it.

    Attributes:
        open: makes the sources.
        token_budget: most tokens of a micro-batch, all devices together; None where the source decides.
        weights: share of tokens per source; None gives every sample the same chance.
        caption_dropout: probability of training a sequence without its caption.
        max_sequences: most sequences of a micro-batch.
        validation_fraction: share of samples held out.
        bad_limit: when unreadable files stop the run.
        patch: pixels per patch side; 0 where rows are not pixels.
    """

    open: Callable[[], list[Source]]
    token_budget: int | None = None
    weights: tuple[float, ...] | None = None
    caption_dropout: float = 0.0
    max_sequences: int | None = None
    validation_fraction: float = 0.0
    bad_limit: BadLimit | None = None
    patch: int = 0


@gin.configurable(module="data")
def quickstart(
    token_budget: int = gin.REQUIRED,
    patch: int = 4,
    weights: Sequence[float] | None = None,
    caption_dropout: float = 0.1,
    validation_fraction: float = 0.02,
    max_sequences: int | None = None,
) -> DataSpec:
    """Small digits, large digits, photographs and clips from Python packages; `weights` in this order."""
    if patch < 1 or not 1 <= token_budget < 1 << 31:
        raise ValueError(
            f"quickstart: patch must be at least 1, token_budget in [1, 2^31); got patch={patch}, "
            f"token_budget={token_budget}. Try 8 and 2600."
        )
    return DataSpec(
        open=lambda: quickstart_sources(patch=patch),
        token_budget=token_budget,
        weights=None if weights is None else tuple(weights),
        caption_dropout=caption_dropout,
        max_sequences=max_sequences,
        validation_fraction=validation_fraction,
        patch=patch,
    )


@gin.configurable(module="data")
def flux_encoders(
    model: str = gin.REQUIRED,
    text_tokens: int | None = None,
    padding: bool = True,
    on_long: str = "error",
    dtype: str = "bfloat16",
    text_dtype: str = "bfloat16",
    canvases: int = 6,
) -> EncoderSettings:
    """FLUX.1's encoders, from a pipeline's folder; see `EncoderSettings`."""
    return EncoderSettings(model, text_tokens, padding, on_long, dtype, text_dtype, canvases)


@gin.configurable(module="data")
def folder(
    root: str = gin.REQUIRED,
    token_budget: int = gin.REQUIRED,
    max_tokens: int = gin.REQUIRED,
    patch: int = 16,
    frame_stride: int = 1,
    max_frames: int = 16,
    max_text: int = 512,
    allow_uncaptioned: bool = False,
    caption_dropout: float = 0.1,
    validation_fraction: float = 0.0,
    max_sequences: int | None = None,
    max_bad_fraction: float = 0.01,
    index_folder: str | None = None,
    encoders: EncoderSettings | None = None,
    draw_latents: bool = True,
) -> DataSpec:
    """A tree of images and videos with captions beside them, or tar shards if `root` ends in .tar or is a pattern.

    With `encoders` (from `flux_encoders`) pixels and captions are encoded while training runs; latents are drawn anew
    in each step unless `draw_latents` is False, and `max_text` has no meaning.
    """
    limit = BadLimit(fraction=max_bad_fraction)
    if encoders is not None and not isinstance(encoders, EncoderSettings):
        raise TypeError(
            f"folder.encoders must be encoders, called, such as @flux_encoders(); got {encoders!r:.100}."
        )
    rules = MediaRules(
        patch=patch,
        max_tokens=max_tokens,
        frame_stride=frame_stride,
        max_frames=max_frames,
        max_text=max_text if encoders is None else WHOLE_CAPTIONS,
        allow_uncaptioned=allow_uncaptioned,
        bad_limit=limit,
        index_folder=index_folder,
    )

    def open_source() -> list[Source]:
        pixels = open_media_source(root, rules)
        if encoders is None:
            return [pixels]
        from experiments._encoding_source import EncodingSource

        return [EncodingSource(pixels, encoders, draw_latents=draw_latents)]

    return DataSpec(
        open=open_source,
        token_budget=token_budget,
        caption_dropout=caption_dropout,
        max_sequences=max_sequences,
        validation_fraction=validation_fraction,
        bad_limit=limit,
        patch=patch if encoders is None else 0,
    )


# A caption's words are counted by those who train their text encoder along; other encoders have tokens of their own.
WHOLE_CAPTIONS = 1 << 30


def open_media_source(root: str, rules: MediaRules) -> MediaSource:
    """A folder of images and videos, or tar shards if the name ends in .tar or is a pattern."""
    is_shards = root.endswith(".tar") or any(mark in root for mark in "*?{[")
    return WebDatasetShards(root, rules=rules) if is_shards else ImageFolder(root, rules=rules)


@gin.configurable(module="data")
def encoded(
    root: str = gin.REQUIRED,
    token_budget: int = gin.REQUIRED,
    patch: int = 2,
    channels_last: bool = False,
    max_text: int = 512,
    caption_dropout: float = 0.1,
    validation_fraction: float = 0.0,
    max_sequences: int | None = None,
    max_bad_fraction: float = 0.01,
    draw_latents: bool = True,
) -> DataSpec:
    """Samples that were encoded beforehand: a cache of `experiments.encode`, or a tree of single `.safetensors` files.

    Latents of a cache are drawn anew in each step where it has their variance, unless `draw_latents` is False.
    `channels_last` is the order inside a row: False for FLUX.1, True for a DiT.
    """
    limit = BadLimit(fraction=max_bad_fraction)
    rules = EncodedRules(
        patch=patch,
        channels_last=channels_last,
        max_text=max_text,
        draw_latents=draw_latents,
        bad_limit=limit,
    )

    def open_source() -> list[Source]:
        if is_cache(root):
            return [EncodedCache(root, rules=rules)]
        return [EncodedFolder(root, rules=rules)]

    return DataSpec(
        open=open_source,
        token_budget=token_budget,
        caption_dropout=caption_dropout,
        max_sequences=max_sequences,
        validation_fraction=validation_fraction,
        bad_limit=limit,
    )


@gin.configurable(module="data")
def synthetic(
    codes: str = gin.REQUIRED,
    channels: int = 64,
    text_channels: int = 0,
    pooled_channels: int = 0,
    max_text: int = 392,
    num_classes: int = 0,
    num_ranks: int | None = None,
    num_steps: int = 256,
    caption_dropout: float = 0.0,
) -> DataSpec:
    """Pseudo-random rows with the lengths of KnapFormer's data codes, to measure speed.

    For a class-conditional model set `num_classes`, and `max_text` to 0.
    """
    rows = SyntheticRows(
        channels=channels,
        text_channels=text_channels,
        pooled_channels=pooled_channels,
        max_text=max_text,
        num_classes=num_classes,
    )
    return DataSpec(
        open=lambda: [SyntheticCodes(codes, rows=rows, num_ranks=num_ranks, num_steps=num_steps)],
        caption_dropout=caption_dropout,
    )
