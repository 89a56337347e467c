"""Held-out samples: a deterministic division of a source, and batches that cover the held-out part once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from experiments.data._hash import digest_of, name_uniform
from experiments.data._sampler import (
    checked_budget,
    sequence_limit,
    step_index,
    total_lengths,
    validated_shares,
)
from experiments.data._types import DataError, Source, StepIndex, SteppedSource, TextRows
from experiments.data._window import Drawn


class Subset:
    """Some samples of a source, in ascending order.

    Args:
      source: the whole.
      indices: which samples.
      suffix: appended to its name.
    """

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray, *, suffix: str):
        self._source = source
        self._indices = np.sort(np.asarray(indices, np.int64))
        self.name = f"{source.name}-{suffix}"
        self.patch = source.patch
        self.channels = source.channels
        self.text_channels = source.text_channels
        self.pooled_channels = source.pooled_channels
        self.grids = source.grids[self._indices]
        self.image_lengths = source.image_lengths[self._indices]
        self.text_lengths = source.text_lengths[self._indices]
        self.labels = None if source.labels is None else source.labels[self._indices]
        self.dropped_text_length = source.dropped_text_length
        self.digest = digest_of([source.digest, self._indices.tobytes()])

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._indices)

    @property
    def whole(self) -> Source:
        """The source that these are of."""
        return self._source

    def index_in_whole(self, index: int) -> int:
        """A sample's number there."""
        return int(self._indices[index])

    def sample_name(self, index: int) -> str:
        """The sample's name in the whole."""
        return self._source.sample_name(self.index_in_whole(index))

    def split_name(self, index: int) -> str:
        """What a split keeps together."""
        return self._source.split_name(self.index_in_whole(index))

    def text(self, index: int) -> TextRows:
        """Caption bytes or features."""
        return self._source.text(self.index_in_whole(index))

    def pooled(self, index: int) -> Float32[np.ndarray, " c_pool"]:
        """The per-sequence text vector."""
        return self._source.pooled(self.index_in_whole(index))

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Image rows."""
        return self._source.read(self.index_in_whole(index))


def split_source(
    source: Source, *, fraction: float | None = None, count: int | None = None, seed: int = 0
) -> tuple[Subset, Subset]:
    """Divides a source into (training, validation) parts without a common sample.

    A sample's side depends on the hash of its split name and, with `fraction`, on nothing else: adding data
    moves no old sample across. Samples that share a split name (one digit at several sizes) stay together.

    Args:
      source: what to divide.
      fraction: expected share of the split names that validates.
      count: instead, how many split names validate: those with the smallest hash.
      seed: of the hash.

    Raises:
      ValueError: not exactly one of fraction and count is given, or it is out of range.
      DataError: a part would be empty.
    """
    if (fraction is None) == (count is None):
        raise ValueError(
            f"split_source: exactly one of fraction and count must be given; got fraction={fraction}, "
            f"count={count}."
        )
    names = np.asarray([source.split_name(i) for i in range(len(source))])
    distinct, name_of_sample = np.unique(names, return_inverse=True)
    chance = np.asarray([name_uniform(seed, str(name)) for name in distinct])
    if count is not None:
        if not 0 < count < len(distinct):
            raise ValueError(
                f"split_source: count must be in 1..{len(distinct) - 1}, the names in '{source.name}' less "
                f"one; got count={count}."
            )
        held_out = np.zeros(len(distinct), bool)
        held_out[np.argsort(chance, kind="stable")[:count]] = True
    else:
        if not 0.0 < float(fraction or 0.0) < 1.0:
            raise ValueError(f"split_source: fraction must be between 0 and 1; got fraction={fraction}.")
        held_out = chance < fraction
    if held_out.all() or not held_out.any():
        raise DataError(
            f"split_source: both parts must have samples; got {int(held_out.sum())} of {len(distinct)} names "
            f"of '{source.name}' for validation with fraction={fraction}. Use count instead."
        )
    chosen = held_out[name_of_sample]
    return (
        Subset(source, np.flatnonzero(~chosen), suffix="train"),
        Subset(source, np.flatnonzero(chosen), suffix="validation"),
    )


class ValidationSampler:
    """Covers every sample of its sources exactly once, captions kept, in `num_steps` steps of unequal size.

    All processes walk the same `num_steps` steps, whether or not they have a sequence in each.

    Args:
      sources: what to cover.
      token_budget: most tokens in a step.
      max_sequences: most sequences in a step; None means as many as fit.

    Raises:
      ValueError: a bad argument, or a sequence longer than the budget.
      DataError: a source has no samples.
    """

    def __init__(self, sources: Sequence[Source], *, token_budget: int, max_sequences: int | None = None):
        self.sources = tuple(sources)
        self.seed = 0  # every validation sees the same latents
        if any(isinstance(s, SteppedSource) for s in self.sources):
            raise ValueError(
                "ValidationSampler: synthetic codes decide their own steps; got one as a source. Validate on "
                "another source, or on a StepSampler's step."
            )
        validated_shares(self.sources, None, 0.0)
        self.token_budget = checked_budget(self.sources, token_budget)
        self.max_sequences = sequence_limit(self.sources, token_budget, max_sequences)
        lengths = [total_lengths(s) for s in self.sources]
        self._all = Drawn(
            source=np.repeat(np.arange(len(lengths)), [len(x) for x in lengths]),
            index=np.concatenate([np.arange(len(x)) for x in lengths]),
            epoch=np.zeros(sum(len(x) for x in lengths), np.int64),
            dropped=np.zeros(sum(len(x) for x in lengths), bool),
            length=np.concatenate(lengths),
        )
        self._starts = _cut(self._all.length, budget=token_budget, max_items=self.max_sequences)
        self.digest = digest_of([*(s.digest for s in self.sources), repr((token_budget, self.max_sequences))])

    @property
    def num_steps(self) -> int:
        """Steps that cover everything."""
        return len(self._starts) - 1

    def step(self, t: int) -> StepIndex:
        """The sequences of step t in 0 .. num_steps - 1."""
        if not 0 <= t < self.num_steps:
            raise ValueError(
                f"ValidationSampler.step: t must be in 0..{self.num_steps - 1}; got t={t}. It is one pass."
            )
        drawn = self._all.take(np.arange(self._starts[t], self._starts[t + 1]))
        return step_index(self.sources, t, drawn)


def _cut(lengths: np.ndarray, *, budget: int, max_items: int) -> list[int]:
    """Boundaries of consecutive runs that stay within the budget."""
    starts, load = [0], 0
    for i, length in enumerate(lengths.tolist()):
        if i > starts[-1] and (load + length > budget or i - starts[-1] == max_items):
            starts.append(i)
            load = 0
        load += length
    return [*starts, len(lengths)]
