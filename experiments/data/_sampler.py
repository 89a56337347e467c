"""The step sampler: random access to the sequences of any step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from experiments.data._hash import digest_of, hash_uniform
from experiments.data._streams import expected_lengths
from experiments.data._types import DataError, Source, StepIndex, SteppedSource
from experiments.data._window import Drawn, WindowPlan


class StepSampler:
    """Which sequences form step t: a pure function of (seed, data, arguments, t), for any t at once.

    A step holds whole sequences of all sources, at most `token_budget` tokens together, whatever the number
    of devices and processes. Every source is shuffled anew each epoch and loses or repeats nothing in one.
    Steps are nearly equally full, and each source is spread evenly over them: it is in every step when it has
    as many samples as steps. Captions are dropped at an even pace, so what they leave free is planned with.
    A `SteppedSource` (synthetic codes) decides its own steps and must be the only source.

    Args:
      sources: where sequences come from.
      weights: share of the *tokens* each source gets, dropped captions not counted, any positive scale; None
        gives every sample of every source the same chance. Small sources repeat more often, which
        `StepIndex.epoch` shows.
      token_budget: most tokens (image + text) in a step; None only with a `SteppedSource`.
      seed: of shuffles and caption dropout.
      caption_dropout: probability that a sequence is shown without its caption and label.
      max_sequences: most sequences in a step; None means as many as the budget takes.

    Raises:
      ValueError: a bad argument, or a budget that some sequence or every mixture exceeds.
      DataError: a source has no samples.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float] | None = None,
        token_budget: int | None = None,
        seed: int = 0,
        caption_dropout: float = 0.0,
        max_sequences: int | None = None,
    ):
        self.sources = tuple(sources)
        self.seed = seed
        self.caption_dropout = caption_dropout
        self._stepped = _sole_stepped_source(self.sources)
        shares = validated_shares(self.sources, weights, caption_dropout)
        if self._stepped is not None:
            self.token_budget, self.max_sequences = _stepped_limits(
                self._stepped, token_budget, max_sequences
            )
            self._plan = None
            self.expected_fill = 1.0
        else:
            self.token_budget = checked_budget(self.sources, token_budget)
            self.max_sequences = sequence_limit(
                self.sources, self.token_budget, max_sequences, caption_dropout=caption_dropout
            )
            self._plan = WindowPlan(
                self.sources,
                weights=shares,
                token_budget=self.token_budget,
                seed=seed,
                caption_dropout=caption_dropout,
                max_sequences=self.max_sequences,
            )
            self.expected_fill = self._plan.expected_fill
        limits = (shares, self.token_budget, seed, caption_dropout, self.max_sequences)
        self.digest = digest_of([s.digest for s in self.sources] + [repr(x) for x in limits])

    def step(self, t: int) -> StepIndex:
        """The sequences of step t >= 0."""
        if t < 0:
            raise ValueError(f"StepSampler.step: t must be at least 0; got t={t}.")
        drawn = self._plan.draw(t) if self._plan is not None else self._stepped_draw(t)
        return step_index(self.sources, t, drawn)

    def _stepped_draw(self, t: int) -> Drawn:
        source = self._stepped
        assert source is not None
        size = source.samples_per_step
        epoch, block = divmod(t, len(source) // size)
        index = block * size + np.arange(size)
        zeros = np.zeros(size, np.int64)
        dropped = hash_uniform(self.seed, zeros + epoch, index) < self.caption_dropout
        return Drawn(zeros, index, zeros + epoch, dropped, total_lengths(source)[index])


def step_index(sources: Sequence[Source], t: int, drawn: Drawn) -> StepIndex:
    """Looks up sizes of drawn samples: arrays over the S sequences of a step."""
    num = len(drawn.index)
    grid, image = np.zeros((num, 3), np.int32), np.zeros(num, np.int32)
    text, bare = np.zeros(num, np.int32), np.zeros(num, np.int32)
    for k, source in enumerate(sources):
        where = np.flatnonzero(drawn.source == k)
        index = drawn.index[where]
        grid[where] = source.grids[index]
        image[where] = source.image_lengths[index]
        text[where] = source.text_lengths[index]
        bare[where] = source.dropped_text_length
    text = np.where(drawn.dropped, bare, text).astype(np.int32)
    stepped = _sole_stepped_source(sources)
    return StepIndex(
        step=t,
        source=drawn.source.astype(np.int32),
        index=drawn.index.astype(np.int32),
        epoch=drawn.epoch.astype(np.int32),
        grid=grid,
        image_lengths=image,
        text_lengths=text,
        lengths=(image + text).astype(np.int32),
        dropped=drawn.dropped,
        loss_weight=np.ones(num, np.float32),
        home_rank=None if stepped is None else stepped.home_ranks[drawn.index].astype(np.int32),
        num_ranks=0 if stepped is None else stepped.num_ranks,
    )


def total_lengths(source: Source) -> Int[np.ndarray, " n"]:
    """Tokens of every sample, with its caption or without, whichever is more."""
    return source.image_lengths.astype(np.int64) + np.maximum(source.text_lengths, source.dropped_text_length)


def _sole_stepped_source(sources: Sequence[Source]) -> SteppedSource | None:
    stepped = [s for s in sources if isinstance(s, SteppedSource)]
    if stepped and len(sources) > 1:
        raise ValueError(
            f"StepSampler: a source that decides its own steps must be the only one; got sources="
            f"{[s.name for s in sources]}. Train on '{stepped[0].name}' alone."
        )
    return stepped[0] if stepped else None


def validated_shares(
    sources: Sequence[Source], weights: Sequence[float] | None, dropout: float
) -> list[float]:
    """Token shares summing to 1."""
    if not sources:
        raise ValueError("StepSampler: sources must not be empty. Name at least one source.")
    for source in sources:
        if len(source) == 0:
            raise DataError(f"StepSampler: every source must have samples; got '{source.name}' with none.")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"StepSampler: caption_dropout must be in [0, 1]; got caption_dropout={dropout}.")
    if weights is None:
        weights = [float(expected_lengths(s, dropout).sum()) for s in sources]
    if len(weights) != len(sources):
        raise ValueError(
            f"StepSampler: one weight per source; got {len(weights)} weights, {len(sources)} sources."
        )
    for source, weight in zip(sources, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"StepSampler: weights must be positive; got weight={weight} for source '{source.name}'. "
                "Leave the source out to use none of it."
            )
    return [float(w) / float(sum(weights)) for w in weights]


def _check_longest(source: Source, budget: int) -> None:
    lengths = total_lengths(source)
    longest = int(np.argmax(lengths))
    if lengths[longest] > budget:
        raise ValueError(
            f"StepSampler: every sequence must fit the step's token_budget={budget}; got {lengths[longest]} "
            f"tokens in '{source.sample_name(longest)}' of source '{source.name}' "
            f"({int((lengths > budget).sum())} such). Raise token_budget or lower the source's max_tokens."
        )


def checked_budget(sources: Sequence[Source], token_budget: int | None) -> int:
    if token_budget is None:
        raise ValueError("StepSampler: token_budget must be given; got None. Only synthetic codes need none.")
    for source in sources:
        _check_longest(source, token_budget)
    return token_budget


def sequence_limit(
    sources: Sequence[Source], budget: int, max_sequences: int | None, *, caption_dropout: float = 0.0
) -> int:
    """The most sequences of a step: as many of the shortest as fit, with the captions that are not dropped."""
    if max_sequences is not None and max_sequences < 1:
        raise ValueError(f"StepSampler: max_sequences must be at least 1; got max_sequences={max_sequences}.")
    shortest = min(float(expected_lengths(s, caption_dropout).min()) for s in sources)
    most = budget // max(math.ceil(shortest), 1)
    return most if max_sequences is None else min(most, max_sequences)


def _stepped_limits(
    source: SteppedSource, token_budget: int | None, max_sequences: int | None
) -> tuple[int, int]:
    """(token budget, sequences) of a step whose content the source decides."""
    size = source.samples_per_step
    largest = int(total_lengths(source).reshape(-1, size).sum(axis=1).max())
    if token_budget is not None and largest > token_budget:
        raise ValueError(
            f"StepSampler: steps of '{source.name}' must fit token_budget={token_budget}; got {largest}. "
            "Raise token_budget, leave it out, or use a code with fewer tokens."
        )
    if max_sequences is not None and size > max_sequences:
        raise ValueError(
            f"StepSampler: steps of '{source.name}' must fit max_sequences={max_sequences}; got {size} "
            "sequences. Raise max_sequences or leave it out."
        )
    return (largest if token_budget is None else token_budget), size
