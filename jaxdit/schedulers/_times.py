"""Which noise levels a sampler visits: times of a flow, and steps of a discrete diffusion. On the host, in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from .._schedules import DiffusionSchedule, TimeShift, shift_time

__all__ = [
    "DiffusionTimes",
    "FlowTimes",
    "KarrasTimes",
    "NoiseLevels",
    "NoiseTimes",
    "Spacing",
    "even_steps",
    "leading_steps",
    "trailing_steps",
    "without_last",
]


class NoiseLevels(NamedTuple):
    """The steps of a sampler: each takes rows signal * data + deviation * noise to the next pair.

    Attributes:
        time: what the model is told of a step's start, for each sequence.
        signal, deviation: factors of data and noise where it starts.
        next_signal, next_deviation: where it lands.
    """

    time: Float[np.ndarray, "k s"]
    signal: Float[np.ndarray, "k s"]
    deviation: Float[np.ndarray, "k s"]
    next_signal: Float[np.ndarray, "k s"]
    next_deviation: Float[np.ndarray, "k s"]


@runtime_checkable
class NoiseTimes(Protocol):
    """A choice of noise levels, such as `FlowTimes`."""

    def levels(self, num_steps: int, num_tokens: Int[np.ndarray, " s"]) -> NoiseLevels:
        """The levels of so many steps, for sequences with so many image tokens."""
        ...


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"sampler: num_steps must be at least 1; got num_steps={num_steps}. Try 28.")


def _consecutive(time: np.ndarray, signal: np.ndarray, deviation: np.ndarray) -> NoiseLevels:
    """Steps that start where the one before landed, from one more level than there are times."""
    return NoiseLevels(time, signal[:-1], deviation[:-1], signal[1:], deviation[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTimes:
    """Times of a flow, whose rows are (1 - t) data + t noise: evenly spaced, shifted towards noise, then 0.

    The defaults are what FLUX.1's pipelines sample with (and `shift=ResolutionShift()` for FLUX.1-dev).

    Attributes:
        shift: factor a in a t / (1 + (a - 1) t), or a shift by the number of image tokens; 1 for none.
        first: first time, unshifted.
        last: last time before 0, unshifted; None for first / num_steps.
        terminal: the last time before 0 after all: times t are stretched to 1 - c (1 - t); None for no stretching.
        whole_steps: the model is told times that are multiples of 1 / whole_steps, rounded down (diffusers sometimes
            takes one lower where a time is a whole step already); None for the times themselves.

    Raises:
        ValueError: for values outside these ranges.
    """

    shift: float | TimeShift = 1.0
    first: float = 1.0
    last: float | None = None
    terminal: float | None = None
    whole_steps: int | None = None

    def __post_init__(self) -> None:
        last = self.first if self.last is None else self.last
        if not 0 < last <= self.first <= 1:
            raise ValueError(
                f"FlowTimes: 0 < last <= first <= 1; got first={self.first}, last={self.last}. Leave out last for"
                " first / num_steps."
            )
        if not isinstance(self.shift, TimeShift) and not self.shift > 0:
            raise ValueError(
                f"FlowTimes: shift must be positive; got shift={self.shift}. 1 changes nothing, SD3 uses 3."
            )
        if self.terminal is not None and not 0 < self.terminal < 1:
            raise ValueError(f"FlowTimes: terminal must be in (0, 1); got terminal={self.terminal}.")

    def levels(self, num_steps: int, num_tokens: Int[np.ndarray, " s"]) -> NoiseLevels:
        """The levels of so many steps, for sequences with so many image tokens.

        Raises:
            ValueError: for less than one step, one step with `terminal`, or a shift that is not finite.
        """
        _check_num_steps(num_steps)
        last = self.first / num_steps if self.last is None else self.last
        even = np.linspace(self.first, last, num_steps)[:, None]
        even = np.broadcast_to(even, (num_steps, len(num_tokens)))
        times = np.asarray(shift_time(even, self._mu(num_tokens)))
        if self.terminal is not None:
            if num_steps == 1:
                raise ValueError(
                    "FlowTimes: terminal needs at least 2 steps, or 1 and terminal are the same time."
                )
            times = 1 - (1 - times) * (1 - self.terminal) / (1 - times[-1])
        told = times
        if self.whole_steps is not None:
            told = np.floor(times * self.whole_steps + 1e-6) / self.whole_steps
        times = np.concatenate([times, np.zeros_like(times[:1])])
        return _consecutive(told, 1 - times, times)

    def _mu(self, num_tokens: np.ndarray) -> np.ndarray:
        tokens = np.asarray(num_tokens)
        if not isinstance(self.shift, TimeShift):
            return np.full(tokens.shape, np.log(self.shift))
        with np.errstate(invalid="ignore", divide="ignore"):  # refused here
            mu = np.asarray(self.shift.mu(tokens), np.float64)
        if not np.all(np.isfinite(mu)):
            worst = tokens[~np.isfinite(mu)][0]
            raise ValueError(
                f"FlowTimes: the shift must be positive and finite; got shift={self.shift!r:.120} at {worst} tokens."
                " Give one whose line stays above 0."
            )
        return mu


Spacing = Callable[[int, int], Int[np.ndarray, " kept"]]
"""`spacing(num_train_steps, num_steps)`: the steps that a shortened sampler visits, falling."""


def _check_kept(name: str, num_train_steps: int, num_steps: int) -> None:
    if not 1 <= num_steps <= num_train_steps:
        raise ValueError(
            f"{name}: num_steps must be in 1 .. {num_train_steps}, the steps the model was trained on; got"
            f" num_steps={num_steps}."
        )


def even_steps(num_train_steps: int, num_steps: int) -> Int[np.ndarray, " kept"]:
    """From the last step to the first evenly, both kept ("linspace" in diffusers); one step is the last.

    Raises:
        ValueError: for a count outside 1 .. num_train_steps.

    Reference: Nichol & Dhariwal, arXiv 2102.09672, section 4.
    """
    _check_kept("even_steps", num_train_steps, num_steps)
    if num_steps == 1:
        return np.array([num_train_steps - 1])
    return np.round(np.linspace(0, num_train_steps - 1, num_steps)).astype(np.int64)[::-1]


def leading_steps(num_train_steps: int, num_steps: int) -> Int[np.ndarray, " kept"]:
    """Multiples of num_train_steps // num_steps from 0: the last step is not among them.

    Raises:
        ValueError: for a count outside 1 .. num_train_steps.

    Reference: Lin et al., arXiv 2305.08891, table 2.
    """
    _check_kept("leading_steps", num_train_steps, num_steps)
    return np.arange(num_steps)[::-1] * (num_train_steps // num_steps)


def trailing_steps(num_train_steps: int, num_steps: int) -> Int[np.ndarray, " kept"]:
    """Evenly from the last step; step 0 is not among them.

    Raises:
        ValueError: for a count outside 1 .. num_train_steps.

    Reference: Lin et al., arXiv 2305.08891, table 2.
    """
    _check_kept("trailing_steps", num_train_steps, num_steps)
    stride = num_train_steps / num_steps
    return np.round(num_train_steps - np.arange(num_steps) * stride).astype(np.int64) - 1


def without_last(spacing: Spacing) -> Spacing:
    """The first n steps of a spacing's n + 1: diffusers' multistep solvers leave out step 0 so."""
    return lambda num_train_steps, num_steps: spacing(num_train_steps, num_steps + 1)[:-1]


def _variance_preserving(
    time: np.ndarray, alphas: np.ndarray, next_alphas: np.ndarray, num: int
) -> NoiseLevels:
    levels = (time, alphas**0.5, (1 - alphas) ** 0.5, next_alphas**0.5, (1 - next_alphas) ** 0.5)
    return NoiseLevels(*(np.repeat(x[:, None], num, axis=1) for x in levels))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionTimes:
    """Steps of a discrete diffusion; the model is told step / T.

    Attributes:
        schedule: the diffusion the model was trained on, of T steps.
        spacing: which steps.
        offset: added to each.
        ends_clean: whether the last step lands on data; or else where step 0 would start.
        fixed_stride: whether steps land T // num_steps below their start, as diffusers' DDIM takes them, and not on the
            next step of the spacing. It is another place only where the spacing is not that even.
    """

    schedule: DiffusionSchedule
    spacing: Spacing = even_steps
    offset: int = 0
    ends_clean: bool = True
    fixed_stride: bool = False

    def levels(self, num_steps: int, num_tokens: Int[np.ndarray, " s"]) -> NoiseLevels:
        """The levels of so many steps, the same for all sequences.

        Raises:
            ValueError: if the steps do not fall or are not the schedule's.
        """
        _check_num_steps(num_steps)
        alphas, total = self.schedule.alphas_cumprod, self.schedule.num_steps
        steps = np.asarray(self.spacing(total, num_steps)) + self.offset
        if np.any(np.diff(steps) >= 0) or steps[0] >= total or steps[-1] < 0:
            raise ValueError(
                f"DiffusionTimes: steps must fall within 0 .. {total - 1}; got {len(steps)} from {steps[0]} to"
                f" {steps[-1]} with offset={self.offset}. Take fewer steps or another spacing."
            )
        landing = steps - total // num_steps if self.fixed_stride else np.append(steps[1:], -1)
        end = 1.0 if self.ends_clean else alphas[0]
        next_alphas = np.where(landing >= 0, alphas[np.maximum(landing, 0)], end)
        return _variance_preserving(steps / total, alphas[steps], next_alphas, len(num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class KarrasTimes:
    """Levels of a discrete diffusion whose noise-to-signal ratios are evenly spaced in their seventh root.

    Attributes:
        schedule: the diffusion the model was trained on, of T steps; the model is told the nearest step / T.
        ends_clean: whether the last step lands on data; or else where step 0 would start.

    Reference: Karras et al., arXiv 2206.00364, equation 5.
    """

    schedule: DiffusionSchedule
    ends_clean: bool = True

    def levels(self, num_steps: int, num_tokens: Int[np.ndarray, " s"]) -> NoiseLevels:
        """The levels of so many steps, the same for all sequences.

        Raises:
            ValueError: for less than one step.
        """
        _check_num_steps(num_steps)
        alphas, total = self.schedule.alphas_cumprod, self.schedule.num_steps
        ratios = ((1 - alphas) / alphas) ** 0.5
        ends = ratios[[-1, 0]] ** (1 / 7)
        chosen = (ends[0] + np.linspace(0, 1, num_steps) * (ends[1] - ends[0])) ** 7
        steps = np.round(np.interp(np.log(chosen), np.log(ratios), np.arange(total)))
        chosen_alphas = 1 / (1 + chosen**2)
        next_alphas = np.append(chosen_alphas[1:], 1.0 if self.ends_clean else alphas[0])
        return _variance_preserving(steps / total, chosen_alphas, next_alphas, len(num_tokens))
