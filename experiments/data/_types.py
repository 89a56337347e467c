"""What flows through the data pipeline: sources of sequences, the index of a step, and its content."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32

# Captions are byte tokens, uint8 rows; a source with precomputed text features gives float32 rows instead.
TextRows = np.ndarray


class DataError(RuntimeError):
    """The data itself is unusable: an empty folder, missing captions, too many unreadable files."""


class BadSampleError(Exception):
    """One sample cannot be decoded; the reader counts it and keeps its place in the step."""


class EmptyCaption(NamedTuple):
    """Features of an empty text: what FLUX.1 and its like read where a caption is dropped.

    Attributes:
      text: float32 (rows, text_channels).
      pooled: float32 (pooled_channels,).
    """

    text: Float32[np.ndarray, "n_txt c_txt"]
    pooled: Float32[np.ndarray, " c_pool"]


@runtime_checkable
class Source(Protocol):
    """A random-access set of captioned image or video sequences whose sizes are known without decoding.

    Attributes:
      name: short name, used in logs and in the digest.
      patch: pixels per patch side; 0 where rows are not patches of pixels.
      channels: features of an image row.
      text_channels: features of a text row; 0 where text is byte tokens.
      pooled_channels: features of the per-sequence text vector; 0 where there is none.
      grids: patches (t, h, w) of every sample.
      image_lengths: image tokens of every sample. Equal to t * h * w, except for synthetic codes whose
        published formula gives counts that no rectangle has: there the last of the t * h * w are missing.
      text_lengths: text tokens of every sample.
      labels: class of every sample, at least 0; None where the samples have none.
      dropped_text_length: text tokens of a sample whose caption is dropped; more than 0 (those of an empty caption)
        only where the source is a `BatchSource`.
      digest: hash of names, sizes, captions and labels; equal on two processes (or before and after a resume)
        exactly when they see the same data.
    """

    name: str
    patch: int
    channels: int
    text_channels: int
    pooled_channels: int
    grids: Int32[np.ndarray, "n 3"]
    image_lengths: Int32[np.ndarray, " n"]
    text_lengths: Int32[np.ndarray, " n"]
    labels: Int32[np.ndarray, " n"] | None
    dropped_text_length: int
    digest: str

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def sample_name(self, index: int) -> str:
        """A stable, unique name of a sample, for messages and for splitting."""
        ...

    def split_name(self, index: int) -> str:
        """Samples that share this name are kept on one side of a validation split."""
        ...

    def text(self, index: int) -> TextRows:
        """Byte tokens, uint8 (text_length, 8), or features, float32 (text_length, text_channels)."""
        ...

    def pooled(self, index: int) -> Float32[np.ndarray, " c_pool"]:
        """The per-sequence text vector, (pooled_channels,)."""
        ...

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Image rows in [-1, 1], row-major over (t, h, w); inside a row: patch row, patch column, channel.

        Raises:
          BadSampleError: the sample cannot be decoded.
        """
        ...


class Wanted(NamedTuple):
    """A sample of a step that a reader asks for.

    Attributes:
      sample: its number in the source.
      is_dropped: whether its caption is dropped.
      device: its home device, counted among this process's.
      draw: (seed, step, sequence), which name what is random about it.
    """

    sample: int
    is_dropped: bool
    device: int
    draw: tuple[int, int, int]


class SampleRows(NamedTuple):
    """A sample as a step has it: image rows, text rows and the text vector, as in `Source`."""

    rows: Float32[np.ndarray, "n_img c_in"]
    text: TextRows
    pooled: Float32[np.ndarray, " c_pool"]


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that reads the samples of a step together, draws anew in each step, or has an empty caption."""

    def read_batch(self, wanted: Sequence[Wanted]) -> list[SampleRows | BadSampleError]:
        """The samples asked for, in that order; for each that cannot be read the reason."""
        ...


@runtime_checkable
class SteppedSource(Source, Protocol):
    """A source that says itself which samples form a step and on which rank each one starts."""

    samples_per_step: int
    num_ranks: int
    home_ranks: Int32[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepIndex:
    """The S sequences of one step. Depends on (seed, data, config, step) only, never on devices.

    Attributes:
      step: the global step.
      source: which source each sequence comes from.
      index: its sample in that source.
      epoch: how often the source had been read through before.
      grid: patches (t, h, w).
      image_lengths: image tokens.
      text_lengths: text tokens; those of the empty caption, or 0, where the caption is dropped.
      lengths: image + text tokens.
      dropped: True where the caption and the label are dropped (for classifier-free guidance).
      loss_weight: weight of the sequence's tokens in the loss.
      home_rank: rank each sequence starts on (synthetic codes), else None.
      num_ranks: number of those ranks, else 0.
    """

    step: int
    source: Int32[np.ndarray, " s"]
    index: Int32[np.ndarray, " s"]
    epoch: Int32[np.ndarray, " s"]
    grid: Int32[np.ndarray, "s 3"]
    image_lengths: Int32[np.ndarray, " s"]
    text_lengths: Int32[np.ndarray, " s"]
    lengths: Int32[np.ndarray, " s"]
    dropped: Bool[np.ndarray, " s"]
    loss_weight: Float32[np.ndarray, " s"]
    home_rank: Int32[np.ndarray, " s"] | None = None
    num_ranks: int = 0

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    def home(self, num_devices: int) -> Int32[np.ndarray, " s"]:
        """Device each sequence is loaded on: a contiguous deal, or the rank that the synthetic code names.

        Args:
          num_devices: D; ranks r of R are spread over them as r * D // R.

        Returns:
          Devices in [0, D), non-decreasing unless the ranks are not.
        """
        if num_devices < 1:
            raise ValueError(
                f"StepIndex.home: num_devices must be at least 1; got num_devices={num_devices}."
            )
        if self.home_rank is not None:
            return (self.home_rank.astype(np.int64) * num_devices // self.num_ranks).astype(np.int32)
        deal = np.arange(self.num_sequences, dtype=np.int64) * num_devices // max(self.num_sequences, 1)
        return deal.astype(np.int32)

    def home_tokens(self, num_devices: int) -> Int32[np.ndarray, "d 2"]:
        """(image, text) tokens on each device as loaded: what `collate_home` needs as capacity."""
        totals = np.zeros((num_devices, 2), np.int64)
        np.add.at(totals, self.home(num_devices), np.stack([self.image_lengths, self.text_lengths], axis=1))
        return totals.astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class StepData:
    """A step's index and the content of the sequences that live on this process's devices.

    Attributes:
      index: the whole step, all sequences.
      num_devices: D of the run.
      local_devices: global ids of this process's devices, in the order of the arrays `collate_home` makes.
      sequences: global sequence ids of the local sequences, ascending.
      rows: per local sequence, image rows (n_img, c_in); zeros for an unreadable one.
      text: per local sequence, byte tokens (n_txt, 8) or features (n_txt, c_txt).
      pooled: per local sequence, (c_pool,); that of the empty caption, or zeros, where the caption is dropped.
      loss_weight: per local sequence; 0 for an unreadable one.
      channels, text_channels, pooled_channels: as in `Source`; a process without a sequence needs them too.
      bad: names of the local samples that could not be read.
      labels: per local sequence, its class, dropped or not; None when any source of the run has none.
    """

    index: StepIndex
    num_devices: int
    local_devices: tuple[int, ...]
    sequences: Int32[np.ndarray, " l"]
    rows: tuple[np.ndarray, ...]
    text: tuple[TextRows, ...]
    pooled: tuple[np.ndarray, ...]
    loss_weight: Float32[np.ndarray, " l"]
    channels: int
    text_channels: int = 0
    pooled_channels: int = 0
    bad: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None
