"""Which samples form step t, without looking at the steps before it.

Steps come in windows of B. Source k gives every window the same number of samples (its token share of the
budget), so its position in its endless sequence of shuffled epochs is known for any window. Inside a source,
lengths are cut into classes that advance at the same pace: a class of c samples gives a window at most
ceil(c * samples per window / samples) of them. Captions are dropped at an even pace too: of n samples that
follow one another in a class, at least floor(n * dropout) have none. The worst case, every class giving its
most and every sample as long as its class allows, is packed once into B steps; the share of the budget that
is used is the largest for which that succeeds. Any real window is then dominated, sample by sample, by a
packing that exists: no window can fail, whatever the step, and nothing is ever dropped or carried over.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from experiments.data._packing import pack, pack_balanced, pack_spread, window_steps
from experiments.data._streams import Stream, expected_lengths, make_stream
from experiments.data._types import Source

# Bisection steps for the usable share of the budget: a window has at most 2^14 sequences or so.
_BISECTIONS = 14

# A window of steps that use this share of the budget is not worth packing tighter, and being even is worth a
# few per cent of the budget.
_FULL_ENOUGH = 0.95
_WORTH_OF_EVEN = 0.05

# Bin of every item, or None, as in `_packing`.
PackingRule = Callable[..., Int64[np.ndarray, " n"] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """Samples drawn together, arrays (n,): source, index in it, epoch, caption dropped or not, length."""

    source: Int64[np.ndarray, " n"]
    index: Int64[np.ndarray, " n"]
    epoch: Int64[np.ndarray, " n"]
    dropped: Bool[np.ndarray, " n"]
    length: Int64[np.ndarray, " n"]

    def take(self, where: np.ndarray) -> Drawn:
        """The samples at some positions."""
        return Drawn(*(getattr(self, field.name)[where] for field in dataclasses.fields(self)))


class _Fit(NamedTuple):
    """Sources at the pace that uses the budget best, and the step of every worst-case slot of a window."""

    streams: list[Stream]
    template: Int64[np.ndarray, " slots"]


class WindowPlan:
    """Deals samples of several sources to steps: `draw(step)`.

    A sample lies at most a window away from where a plain walk through the shuffled epochs would place it.

    Args:
      sources: where samples come from; each has at least one.
      weights: share of the tokens of each, summing to 1.
      token_budget: most tokens in a step.
      seed: of the shuffles.
      caption_dropout: share of the samples that are shown without their caption.
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
        caption_dropout: float,
        max_sequences: int,
    ):
        self._sources = sources
        self._dropout = caption_dropout
        self._means = [float(expected_lengths(s, caption_dropout).mean()) for s in sources]
        self._weights = weights
        self._budget = token_budget
        self._seed = seed
        self._max_sequences = max_sequences
        per_token = sum(w / mean for w, mean in zip(weights, self._means, strict=True))
        self.window = window_steps(min(token_budget * per_token, max_sequences))
        fit = self._fit()
        self._streams, self._template = fit
        self.expected_fill = self._fill(fit)
        # A window is wanted by consecutive steps, an epoch's shuffle by consecutive windows.
        self._window_steps = functools.lru_cache(maxsize=4)(self._plan_window)
        num_classes = sum(len(s.members) for s in self._streams)
        self._shuffled = functools.lru_cache(maxsize=2 * num_classes + 8)(self._shuffle)

    def draw(self, step: int) -> Drawn:
        """The samples of a step, in an order that depends on (seed, step) only."""
        return self._window_steps(step // self.window)[step % self.window]

    def _fit(self) -> _Fit:
        for classes in (True, False):  # one class per source gives every window the same number of samples
            fit = self._best(
                [
                    make_stream(
                        k,
                        source,
                        samples=self._samples(k, 1.0) if classes else None,
                        caption_dropout=self._dropout,
                    )
                    for k, source in enumerate(self._sources)
                ]
            )
            if fit is not None and not classes:
                fit = self._top_up(fit)
            if fit is not None and self._no_step_is_empty(fit):
                return fit
        longest = max(int((s.image_lengths + s.text_lengths).max()) for s in self._sources)
        raise ValueError(
            f"StepSampler: a step must hold at least one sequence; got token_budget={self._budget}, "
            f"max_sequences={self._max_sequences}, longest={longest}, weights={list(self._weights)}. "
            "Raise token_budget, or give the sources with short sequences more weight."
        )

    def _samples(self, source: int, share: float) -> float:
        """Samples of a source in a window that uses a share of the budget."""
        tokens = share * self.window * self._budget * self._weights[source]
        return tokens / self._means[source]

    def _fill(self, fit: _Fit) -> float:
        """The share of the budget that is used, on average."""
        tokens = sum(float(s.rate) * len(s.lengths) * self._means[s.source] for s in fit.streams)
        return tokens / (self.window * self._budget)

    def _no_step_is_empty(self, fit: _Fit) -> bool:
        return sum(s.fewest() for s in fit.streams) >= self.window

    def _best(self, streams: list[Stream]) -> _Fit | None:
        """An even packing if it is nearly as full as a tight one, whose last steps have all short samples."""
        even = self._bisect(streams, pack_balanced)
        if even is None or not self._no_step_is_empty(even):
            return self._bisect(streams, pack)
        if self._fill(even) > _FULL_ENOUGH:
            return even
        tight = self._bisect(streams, pack)
        return even if tight is None or self._fill(even) > self._fill(tight) - _WORTH_OF_EVEN else tight

    def _bisect(self, streams: list[Stream], rule: PackingRule) -> _Fit | None:
        best, low, high = None, 0.0, 1.0
        for i in range(_BISECTIONS + 1):
            share = high if i == 0 else (low + high) / 2
            trial = [s.at_pace(self._samples(s.source, share)) for s in streams]
            template = self._pack_worst(trial, rule)
            if template is not None:
                best, low = _Fit(trial, template), share
                if i == 0:
                    break
            else:
                high = share
        return best

    def _top_up(self, fit: _Fit) -> _Fit:
        """One more sample per window from each source that has room, while windows have fewer than steps."""
        for k, stream in enumerate(fit.streams):
            if self._no_step_is_empty(fit):
                break
            more = dataclasses.replace(stream, rate=stream.rate + Fraction(1, len(stream.lengths)))
            trial = [*fit.streams[:k], more, *fit.streams[k + 1 :]]
            template = self._pack_worst(trial, pack)
            if template is not None:
                fit = _Fit(trial, template)
        return fit

    def _pack_worst(self, streams: list[Stream], rule: PackingRule) -> Int64[np.ndarray, " slots"] | None:
        return rule(
            np.concatenate([s.worst_lengths() for s in streams]),
            num_bins=self.window,
            capacity=self._budget,
            max_items=self._max_sequences,
        )

    def _shuffle(self, source: int, length_class: int, epoch: int) -> Int64[np.ndarray, " c"]:
        key = [self._seed % 2**63, 0, source, length_class, epoch]
        return np.random.default_rng(key).permutation(self._streams[source].members[length_class])

    def _draw_class(self, stream: Stream, length_class: int, window: int) -> Drawn:
        """What a class gives to a window; those with captions come first, as in the worst case."""
        size = len(stream.members[length_class])
        pace = stream.rate * size
        position = np.arange(math.floor(window * pace), math.floor((window + 1) * pace))
        epoch = position // size
        index = np.empty(len(position), np.int64)
        for e in np.unique(epoch).tolist():
            where = epoch == e
            index[where] = self._shuffled(stream.source, length_class, e)[position[where] % size]
        dropped = stream.dropped(length_class, position, seed=self._seed)
        length = np.where(dropped, stream.bare_lengths[index], stream.lengths[index])
        drawn = Drawn(np.full(len(index), stream.source), index, epoch, dropped, length)
        return drawn.take(np.argsort(dropped, kind="stable"))

    def _plan_window(self, window: int) -> list[Drawn]:
        parts, slot, first = [], [], 0
        for stream in self._streams:
            for c, most in enumerate(stream.most()):
                parts.append(self._draw_class(stream, c, window))
                slot.append(first + np.arange(len(parts[-1].index)))
                first += most
        names = [field.name for field in dataclasses.fields(Drawn)]
        drawn = Drawn(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        return self._deal(window, drawn, np.concatenate(slot))

    def _deal(self, window: int, drawn: Drawn, slot: Int64[np.ndarray, " n"]) -> list[Drawn]:
        """Samples of a window to its steps; both the steps and what is inside one are shuffled."""
        rng = np.random.default_rng([self._seed % 2**63, 1, window])
        shuffle = rng.permutation(len(slot))  # else equal lengths would be dealt source by source
        drawn, slot = drawn.take(shuffle), slot[shuffle]
        limits = {"num_bins": self.window, "capacity": self._budget, "max_items": self._max_sequences}
        step = pack_spread(drawn.length, drawn.source, **limits)
        if step is None:
            step = pack_balanced(drawn.length, **limits)
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
