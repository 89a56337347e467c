"""Synthetic sequences with the lengths of KnapFormer's data codes, to measure speed and compare figures."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64

from experiments.data._hash import digest_of, hash_uniform
from experiments.data._types import TextRows
from jaxdit.encoders import TOKEN_BYTES

_CODE = re.compile(r"g(\d+)b(\d+)i(\d+)f(\d+)s([01])")

# Pixels per token side: a VAE of 8 and patches of 2.
_PIXELS_PER_TOKEN = 16
# How many frames the VAE turns into one: 17 into 5.
_TIME_COMPRESSION = 3.4
# The aspect factor of a rank is uniform in this range.
_ASPECT_RANGE = (0.96, 1.04)

MAX_TEXT = 392

# The three mixes of KnapFormer's experiments, 32 ranks each.
MIXES = {
    "lowres": "g32b32i256f1s0",
    "mixres": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "joint": (
        "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,"
        "g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class DataCode:
    """One part `gXbYiZfWsV`: X ranks, each with Y samples of Z x Z pixels and W frames; s1 packs time."""

    num_ranks: int
    samples: int
    pixels: int
    frames: int
    compressed: bool

    def grid(self) -> tuple[int, int, int]:
        """Tokens (t, h, w) before the aspect factor."""
        time = max(int(self.frames / _TIME_COMPRESSION), 1) if self.compressed else self.frames
        side = self.pixels // _PIXELS_PER_TOKEN
        return time, side, side


def parse_codes(codes: str) -> tuple[DataCode, ...]:
    """Reads a comma-separated list of data codes.

    Raises:
      ValueError: a part is not of the form gXbYiZfWsV, or has no rank, sample, frame or token.
    """
    parsed = []
    for part in codes.split(","):
        match = _CODE.fullmatch(part.strip())
        numbers = [int(n) for n in match.groups()] if match else []
        if not numbers or min(numbers[:4]) < 1 or numbers[2] < _PIXELS_PER_TOKEN:
            raise ValueError(
                "parse_codes: each part must read gXbYiZfWsV (X ranks, Y samples, Z >= 16 pixels, W frames, "
                f"V 0 or 1); got part='{part}' of codes='{codes}'. For example 'g8b4i256f1s0,g4b1i512f85s1'."
            )
        ranks, samples, pixels, frames, compressed = numbers
        parsed.append(DataCode(ranks, samples, pixels, frames, bool(compressed)))
    return tuple(parsed)


@dataclasses.dataclass(frozen=True, slots=True)
class SyntheticRows:
    """What rows look like.

    Attributes:
      channels: features of an image row.
      text_channels: features of a text row; 0 makes text byte tokens.
      pooled_channels: features of the per-sequence text vector.
      max_text: text tokens are uniform in 0 .. max_text.
      num_classes: labels are uniform in 0 .. num_classes - 1; 0 gives none.
    """

    channels: int = 64
    text_channels: int = 0
    pooled_channels: int = 0
    max_text: int = MAX_TEXT
    num_classes: int = 0


class SyntheticCodes:
    """Pseudo-random sequences whose lengths follow data codes; a step is one batch of every rank.

    Image tokens of a sample: floor(pixels / 16)^2 times frames (s1: max(int(frames / 3.4), 1)), times one
    aspect factor per rank and step, uniform in [0.96, 1.04], truncated. Sequences of a rank start on it.

    Args:
      codes: such as "g8b4i256f1s0,g4b1i512f85s1".
      rows: widths of the rows and the longest text.
      num_ranks: ranks of the run, a multiple of the codes' total; None means exactly that total.
      num_steps: distinct steps, after which they repeat.
      seed: of lengths and content.

    Raises:
      ValueError: unknown syntax, or num_ranks that is no multiple.

    Reference: KnapFormer (arXiv 2508.06001), its simulator's data codes. Lengths have the same distribution,
    the draws are our own.
    """

    def __init__(
        self,
        codes: str,
        *,
        rows: SyntheticRows | None = None,
        num_ranks: int | None = None,
        num_steps: int = 256,
        seed: int = 0,
    ):
        parts = parse_codes(codes)
        rows = SyntheticRows() if rows is None else rows
        total = sum(p.num_ranks for p in parts)
        self.num_ranks = total if num_ranks is None else num_ranks
        if self.num_ranks < 1 or self.num_ranks % total or num_steps < 1:
            raise ValueError(
                f"SyntheticCodes: num_ranks must be a multiple of the codes' {total} ranks, num_steps "
                f"positive; got num_ranks={num_ranks}, num_steps={num_steps}, codes='{codes}'."
            )
        self.name = "synthetic"
        self.patch = 0
        self.channels = rows.channels
        self.text_channels = rows.text_channels
        self.pooled_channels = rows.pooled_channels
        self._seed = seed
        replicas = self.num_ranks // total
        part_of_rank = np.tile(np.repeat(np.arange(len(parts)), [p.num_ranks for p in parts]), replicas)
        rank = np.repeat(np.arange(self.num_ranks), [parts[p].samples for p in part_of_rank])
        self.samples_per_step = len(rank)
        self.home_ranks = np.tile(rank, num_steps).astype(np.int32)
        nominal = np.asarray([p.grid() for p in parts], np.int64)[part_of_rank[rank]]
        factor = np.random.default_rng([seed, 0]).uniform(*_ASPECT_RANGE, (num_steps, self.num_ranks))[
            :, rank
        ]
        self.grids, self.image_lengths = _stretch(np.tile(nominal, (num_steps, 1)), factor.reshape(-1))
        texts = np.random.default_rng([seed, 1]).integers(0, rows.max_text + 1, len(self.home_ranks))
        self.text_lengths = texts.astype(np.int32)
        self.dropped_text_length = 0
        self.labels = _labels(seed, len(self.home_ranks), rows.num_classes)
        self.digest = digest_of([codes, repr(rows), repr((self.num_ranks, num_steps, seed))])

    def __len__(self) -> int:
        """Samples of all distinct steps."""
        return len(self.home_ranks)

    def sample_name(self, index: int) -> str:
        """Step, rank and place in the step."""
        step, place = divmod(index, self.samples_per_step)
        return f"step-{step}-rank-{self.home_ranks[index]}-{place}"

    def split_name(self, index: int) -> str:
        """The sample's name: samples are independent."""
        return self.sample_name(index)

    def text(self, index: int) -> TextRows:
        """Random byte tokens or normal features."""
        rng, length = np.random.default_rng([self._seed, 2, index]), int(self.text_lengths[index])
        if self.text_channels:
            return rng.standard_normal((length, self.text_channels), np.float32)
        return rng.integers(0, 256, (length, TOKEN_BYTES), np.uint8)

    def pooled(self, index: int) -> Float32[np.ndarray, " c_pool"]:
        """Normal features."""
        return np.random.default_rng([self._seed, 3, index]).standard_normal(self.pooled_channels, np.float32)

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Uniform values in [-1, 1)."""
        rng = np.random.default_rng([self._seed, 4, index])
        shape = (int(self.image_lengths[index]), self.channels)
        return rng.random(shape, np.float32) * np.float32(2.0) - np.float32(1.0)


def _labels(seed: int, num: int, num_classes: int) -> Int32[np.ndarray, " n"] | None:
    if num_classes < 0:
        raise ValueError(f"SyntheticRows: num_classes must not be negative; got num_classes={num_classes}.")
    if not num_classes:
        return None
    chance = hash_uniform(seed, np.full(num, 5), np.arange(num))
    return np.floor(chance * num_classes).astype(np.int32)


def _stretch(
    nominal: Int64[np.ndarray, "n 3"], factor: Float64[np.ndarray, " n"]
) -> tuple[Int32[np.ndarray, "n 3"], Int32[np.ndarray, " n"]]:
    """(grids, tokens) after the aspect factor; the grid is the squarest of as many frames that holds them."""
    tokens = np.maximum((nominal.prod(axis=1) * factor).astype(np.int64), 1)
    time = nominal[:, 0]
    frame = -(-tokens // time)
    height = np.maximum(np.sqrt(frame).astype(np.int64), 1)
    width = -(-frame // height)
    return np.stack([time, height, width], axis=1).astype(np.int32), tokens.astype(np.int32)
