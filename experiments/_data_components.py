"""What a config can name for its data: the quickstart's, a folder or tar shards, encoded latents, synthetic rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gin

from experiments.data import (
    BadLimit,
    EncodedFolder,
    EncodedRules,
    ImageFolder,
    MediaRules,
    Source,
    SyntheticCodes,
    SyntheticRows,
    WebDatasetShards,
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
) -> DataSpec:
    """A tree of images and videos with captions beside them, or tar shards if `root` ends in .tar or is a pattern."""
    limit = BadLimit(fraction=max_bad_fraction)
    rules = MediaRules(
        patch=patch,
        max_tokens=max_tokens,
        frame_stride=frame_stride,
        max_frames=max_frames,
        max_text=max_text,
        allow_uncaptioned=allow_uncaptioned,
        bad_limit=limit,
        index_folder=index_folder,
    )
    shards = root.endswith(".tar") or any(mark in root for mark in "*?{[")

    def open_source() -> list[Source]:
        return [WebDatasetShards(root, rules=rules) if shards else ImageFolder(root, rules=rules)]

    return DataSpec(
        open=open_source,
        token_budget=token_budget,
        caption_dropout=caption_dropout,
        max_sequences=max_sequences,
        validation_fraction=validation_fraction,
        bad_limit=limit,
        patch=patch,
    )


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
) -> DataSpec:
    """A tree of `.safetensors` files with latents and text features (or a label) that were encoded beforehand.

    `channels_last` is the order inside a row: False for FLUX.1, True for a DiT.
    """
    limit = BadLimit(fraction=max_bad_fraction)
    rules = EncodedRules(patch=patch, channels_last=channels_last, max_text=max_text, bad_limit=limit)
    return DataSpec(
        open=lambda: [EncodedFolder(root, rules=rules)],
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
