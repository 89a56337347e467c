"""Which samples form step t, without looking at the steps before it.

Steps come in windows of B. Source k gives every window the same number of samples (its token share of the
budget), so its position in its endless sequence of shuffled epochs is known for any window. Inside a source,
lengths are cut into classes that advance at the same pace: a class of c samples gives a window at most
ceil(c * samples per window / samples) of them. The worst case, every class giving its most and every sample
as long as its class allows, is packed once into B steps; the share of the budget that is used is the largest
for which that succeeds. Any real window is then dominated, sample by sample, by a packing that exists: no
window can fail, whatever the step, and nothing is ever dropped or carried over.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Int64

from experiments.data._packing import length_classes, pack, pack_balanced, window_steps
from experiments.data._types import Source

# Bisection steps for the usable share of the budget: a window has at most 2^14 sequences or so.
_BISECTIONS = 14


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """Samples drawn together: source, index in it, epoch and length of each, arrays (n,)."""

    source: Int64[np.ndarray, " n"]
    index: Int64[np.ndarray, " n"]
    epoch: Int64[np.ndarray, " n"]
    length: Int64[np.ndarray, " n"]

    def take(self, where: np.ndarray) -> Drawn:
        """The samples at some positions."""
        return Drawn(self.source[where], self.index[where], self.epoch[where], self.length[where])


@dataclasses.dataclass(frozen=True, slots=True)
class _Stream:
    """One source: its samples by length class, and the part of it (in epochs) that a window draws."""

    source: int
    lengths: Int64[np.ndarray, " n"]
    class_tops: Int64[np.ndarray, " m"]
    members: tuple[Int64[np.ndarray, " _"], ...]
    rate: Fraction

    def most(self) -> list[int]:
        """The most samples that each class gives to a window."""
        return [math.ceil(self.rate * len(m)) for m in self.members]

    def fewest(self) -> int:
        """The fewest samples that a window gets."""
        return sum(math.floor(self.rate * len(m)) for m in self.members)


def _make_stream(source: int, lengths: Int64[np.ndarray, " n"], *, samples: float | None) -> _Stream:
    """A source with classes that suit `samples` samples per window, or with a single class."""
    tops = lengths.max(keepdims=True)
    if samples is not None:
        tops = length_classes(lengths, rate=samples / len(lengths))
    slot = np.searchsorted(tops, lengths)
    order = np.argsort(slot, kind="stable")
    members = tuple(np.split(order, np.searchsorted(slot[order], np.arange(1, len(tops)))))
    return _Stream(source, lengths, tops, members, Fraction(0))


def _at_pace(stream: _Stream, samples: float) -> _Stream:
    """The source giving `samples` samples to a window, a whole number where it gives many."""
    whole = Fraction(math.floor(samples)) if samples >= 1 else Fraction(samples).limit_denominator(2**20)
    return dataclasses.replace(stream, rate=whole / len(stream.lengths))


class WindowPlan:
    """Deals samples of several sources to steps: `draw(step)`.

    A sample lies at most a window away from where a plain walk through the shuffled epochs would place it.

    Args:
      sources: where samples come from; each has at least one.
      weights: share of the tokens of each, summing to 1.
      token_budget: most tokens in a step.
      seed: of the shuffles.
      max_sequences: most sequences in a step.

    Raises:
      ValueError: the budget cannot give every step a sequence.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float],
        token_budget: int,
        seed: int,
        max_sequences: int,
    ):
        self._lengths = [s.image_lengths.astype(np.int64) + s.text_lengths for s in sources]
        self._weights = weights
        self._budget = token_budget
        self._seed = seed
        self._max_sequences = max_sequences
        per_token = sum(w / x.mean() for w, x in zip(weights, self._lengths, strict=True))
        self.window = window_steps(min(token_budget * per_token, max_sequences))
        self._streams, self._template = self._fit()
        tokens = sum(float(s.rate) * s.lengths.sum() for s in self._streams)
        self.expected_fill = tokens / (self.window * token_budget)
        # A window is wanted by consecutive steps, an epoch's shuffle by consecutive windows.
        self._window_steps = functools.lru_cache(maxsize=4)(self._plan_window)
        num_classes = sum(len(s.members) for s in self._streams)
        self._shuffled = functools.lru_cache(maxsize=2 * num_classes + 8)(self._shuffle)

    def draw(self, step: int) -> Drawn:
        """The samples of a step, in an order that depends on (seed, step) only."""
        return self._window_steps(step // self.window)[step % self.window]

    def _fit(self) -> tuple[list[_Stream], Int64[np.ndarray, " slots"]]:
        """The streams that use most of the budget, and the step of every worst-case slot of a window."""
        for classes in (True, False):  # one class per source gives every window the same number of samples
            best = self._bisect(
                [
                    _make_stream(k, x, samples=self._samples(k, 1.0) if classes else None)
                    for k, x in enumerate(self._lengths)
                ]
            )
            if best is not None and not classes:
                best = self._top_up(*best)
            if best is not None and sum(s.fewest() for s in best[0]) >= self.window:
                return best
        longest = max(int(x.max()) for x in self._lengths)
        raise ValueError(
            f"StepSampler: a step must hold at least one sequence; got token_budget={self._budget}, "
            f"max_sequences={self._max_sequences}, longest={longest}, weights={list(self._weights)}. "
            "Raise token_budget, or give the sources with short sequences more weight."
        )

    def _samples(self, source: int, share: float) -> float:
        """Samples of a source in a window that uses a share of the budget."""
        tokens = share * self.window * self._budget * self._weights[source]
        return tokens / float(self._lengths[source].mean())

    def _bisect(self, bare: list[_Stream]) -> tuple[list[_Stream], Int64[np.ndarray, " slots"]] | None:
        best, low, high = None, 0.0, 1.0
        for i in range(_BISECTIONS + 1):
            share = high if i == 0 else (low + high) / 2
            streams = [_at_pace(s, self._samples(s.source, share)) for s in bare]
            template = self._pack_worst(streams)
            if template is not None:
                best, low = (streams, template), share
                if i == 0:
                    break
            else:
                high = share
        return best

    def _top_up(
        self, streams: list[_Stream], template: Int64[np.ndarray, " slots"]
    ) -> tuple[list[_Stream], Int64[np.ndarray, " slots"]]:
        """One more sample per window from each source that has room, while windows have fewer than steps."""
        for k, stream in enumerate(streams):
            if sum(s.fewest() for s in streams) >= self.window:
                break
            more = dataclasses.replace(stream, rate=stream.rate + Fraction(1, len(stream.lengths)))
            trial = [*streams[:k], more, *streams[k + 1 :]]
            packed = self._pack_worst(trial)
            if packed is not None:
                streams, template = trial, packed
        return streams, template

    def _pack_worst(self, streams: list[_Stream]) -> Int64[np.ndarray, " slots"] | None:
        sizes = [np.repeat(s.class_tops, s.most()) for s in streams]
        return pack(
            np.concatenate(sizes),
            num_bins=self.window,
            capacity=self._budget,
            max_items=self._max_sequences,
        )

    def _shuffle(self, source: int, length_class: int, epoch: int) -> Int64[np.ndarray, " c"]:
        key = [self._seed % 2**63, 0, source, length_class, epoch]
        return np.random.default_rng(key).permutation(self._streams[source].members[length_class])

    def _draw_class(self, stream: _Stream, length_class: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """(index, epoch) of what a class gives to a window."""
        size = len(stream.members[length_class])
        pace = stream.rate * size
        position = np.arange(math.floor(window * pace), math.floor((window + 1) * pace))
        epoch = position // size
        index = np.empty(len(position), np.int64)
        for e in np.unique(epoch).tolist():
            where = epoch == e
            index[where] = self._shuffled(stream.source, length_class, e)[position[where] % size]
        return index, epoch

    def _plan_window(self, window: int) -> list[Drawn]:
        index, epoch, source, slot, first = [], [], [], [], 0
        for stream in self._streams:
            for c, most in enumerate(stream.most()):
                some, when = self._draw_class(stream, c, window)
                index.append(some)
                epoch.append(when)
                source.append(np.full(len(some), stream.source, np.int64))
                slot.append(first + np.arange(len(some)))
                first += most
        k, i = np.concatenate(source), np.concatenate(index)
        length = np.empty(len(i), np.int64)
        for stream in self._streams:
            length[k == stream.source] = stream.lengths[i[k == stream.source]]
        drawn = Drawn(k, i, np.concatenate(epoch), length)
        return self._deal(window, drawn, np.concatenate(slot))

    def _deal(self, window: int, drawn: Drawn, slot: Int64[np.ndarray, " n"]) -> list[Drawn]:
        """Samples of a window to its steps; both the steps and what is inside one are shuffled."""
        rng = np.random.default_rng([self._seed % 2**63, 1, window])
        shuffle = rng.permutation(len(slot))  # else equal lengths would be dealt source by source
        drawn, slot = drawn.take(shuffle), slot[shuffle]
        step = pack_balanced(
            drawn.length, num_bins=self.window, capacity=self._budget, max_items=self._max_sequences
        )
        if step is None:
            step = _fill_empty(self._template[slot], self.window)
        step = rng.permutation(self.window)[step]
        order = rng.permutation(len(step))
        order = order[np.argsort(step[order], kind="stable")]
        starts = np.searchsorted(step[order], np.arange(self.window + 1))
        return [drawn.take(order[a:b]) for a, b in itertools.pairwise(starts.tolist())]


def _fill_empty(step: Int64[np.ndarray, " n"], num_steps: int) -> Int64[np.ndarray, " n"]:
    """Gives each empty step a sample of the step that has most; there are no fewer samples than steps."""
    step = step.copy()
    counts = np.bincount(step, minlength=num_steps)
    for empty in np.flatnonzero(counts == 0):
        fullest = int(np.argmax(counts))
        step[np.flatnonzero(step == fullest)[0]] = empty
        counts[fullest] -= 1
        counts[empty] += 1
    return step
