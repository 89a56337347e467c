"""Sources cut into length classes that advance at one pace, and the order in which they drop captions."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
from jaxtyping import Bool, Float64, Int64

from experiments.data._hash import hash_uniform
from experiments.data._packing import length_classes
from experiments.data._types import Source

# Caption dropout in whole parts of 2^-20: exact at any step.
_DROPOUT_BITS = 20


def expected_lengths(source: Source, caption_dropout: float) -> Float64[np.ndarray, " n"]:
    """Mean tokens of every sample when captions are dropped with some probability."""
    kept, bare = (1.0 - caption_dropout) * source.text_lengths, caption_dropout * source.dropped_text_length
    return source.image_lengths + kept + bare


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One source: its samples by length class, and the part of it (in epochs) that a window draws.

    Attributes:
      source: its number.
      lengths, bare_lengths: tokens of each sample with and without its caption.
      members: samples of each class.
      dropout: share of the samples that lose their caption, in parts of 2^-20.
      rate: epochs per window.
    """

    source: int
    lengths: Int64[np.ndarray, " n"]
    bare_lengths: Int64[np.ndarray, " n"]
    members: tuple[Int64[np.ndarray, " _"], ...]
    dropout: int
    rate: Fraction

    def most(self) -> list[int]:
        """The most samples that each class gives to a window."""
        return [math.ceil(self.rate * len(m)) for m in self.members]

    def fewest(self) -> int:
        """The fewest samples that a window gets."""
        return sum(math.floor(self.rate * len(m)) for m in self.members)

    def worst_lengths(self) -> Int64[np.ndarray, " slots"]:
        """The longest that a window can get: class by class, those with captions first.

        Of the `most` samples of a class, at least floor(most * dropout) have no caption: floor(x + y) is at
        least floor(x) + floor(y). A window that gets one sample less has no more captions for that.
        """
        worst = []
        for most, members in zip(self.most(), self.members, strict=True):
            dropped = most * self.dropout >> _DROPOUT_BITS
            longest = [self.lengths[members].max(), self.bare_lengths[members].max()]
            worst.append(np.repeat(longest, [most - dropped, dropped]))
        return np.concatenate(worst)

    def at_pace(self, samples: float) -> Stream:
        """The source giving `samples` samples to a window, a whole number where it gives many."""
        whole = Fraction(math.floor(samples)) if samples >= 1 else Fraction(samples).limit_denominator(2**20)
        return dataclasses.replace(self, rate=whole / len(self.lengths))

    def dropped(
        self, length_class: int, position: Int64[np.ndarray, " n"], *, seed: int
    ) -> Bool[np.ndarray, " n"]:
        """Whether the samples at some positions of a class's endless sequence lose their caption.

        Where floor(position * dropout + phase) goes up: at an even pace, of samples that the shuffles make
        random. Classes have phases of their own, else they would all drop captions in the same windows.
        """
        phase = hash_uniform(seed, np.asarray([self.source]), np.asarray([length_class]))
        before = position * self.dropout + int(phase[0] * 2**_DROPOUT_BITS)
        return (before + self.dropout >> _DROPOUT_BITS) > (before >> _DROPOUT_BITS)


def make_stream(number: int, source: Source, *, samples: float | None, caption_dropout: float) -> Stream:
    """A source with classes that suit `samples` samples per window, or with a single class; rate 0."""
    bare = source.image_lengths.astype(np.int64) + source.dropped_text_length
    # Planning counts on captions that are no shorter than what stands in their place.
    lengths = np.maximum(source.image_lengths.astype(np.int64) + source.text_lengths, bare)
    members = [np.arange(len(lengths))]
    if samples is not None:
        rate = samples / len(lengths)
        # By length with caption, then by length without; what the other length adds to the cost of a sample
        # is given relative to the one that is cut.
        if caption_dropout < 1.0:
            base = caption_dropout / (1.0 - caption_dropout) * float(bare.mean())
            members = [m for whole in members for m in _cut(whole, lengths, rate=rate, base=base)]
        if caption_dropout > 0.0:
            ratio = (1.0 - caption_dropout) / caption_dropout
            members = [
                m
                for whole in members
                for m in _cut(whole, bare, rate=rate, base=ratio * float(lengths[whole].max()))
            ]
    dropout = round(caption_dropout * 2**_DROPOUT_BITS)
    return Stream(number, lengths, bare, tuple(members), dropout, Fraction(0))


def _cut(
    members: Int64[np.ndarray, " c"], lengths: Int64[np.ndarray, " n"], *, rate: float, base: float
) -> list[Int64[np.ndarray, " _"]]:
    tops = length_classes(lengths[members], rate=rate, base=base)
    length_class = np.searchsorted(tops, lengths[members])
    order = np.argsort(length_class, kind="stable")
    return np.split(members[order], np.searchsorted(length_class[order], np.arange(1, len(tops))))
