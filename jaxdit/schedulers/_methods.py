"""How a sampler steps from noise to data: every method as a table of coefficients, one update for all.

An evaluation asks the model once. With rows x, the model's prediction p and one array m that is remembered, every
method here is

    x' = a x + b p + c m,        m' = d x + e p + f m,

with six numbers for each evaluation and sequence. They are made on the host in float64, what the model predicts
included, and are data to the program: one compiled evaluation serves all steps, all methods and all sizes.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from .._schedules import AnyArray
from ._times import NoiseLevels

__all__ = ["PREDICTIONS", "DPMSolver", "LinearForm", "Method", "SamplingTable", "euler", "heun"]


class SamplingTable(NamedTuple):
    """What a sampler does, evaluation by evaluation. Made by NumPy; inside a program its arrays are JAX's.

    Attributes:
        time: what the model is told, for each sequence.
        coefficients: ((a, b, c), (d, e, f)) of the module's equations, for each sequence.
        step: the step each evaluation belongs to, from 0.
    """

    time: Float[AnyArray, "e s"]
    coefficients: Float[AnyArray, "e s 2 3"]
    step: Int[AnyArray, " e"]


class LinearForm(NamedTuple):
    """`of_rows` * rows + `of_prediction` * prediction."""

    of_rows: np.ndarray
    of_prediction: np.ndarray

    def times(self, factor: np.ndarray) -> "LinearForm":
        """The form times a factor."""
        return LinearForm(factor * self.of_rows, factor * self.of_prediction)

    def plus_rows(self, factor: np.ndarray | float) -> "LinearForm":
        """The form with so many times the rows added."""
        return self._replace(of_rows=self.of_rows + factor)


# The data D behind rows x = s D + d E with noise E, from what a model predicts.
PREDICTIONS = MappingProxyType(
    {
        "velocity": lambda s, d: LinearForm(1 / (s + d), -d / (s + d)),  # E - D
        "epsilon": lambda s, d: LinearForm(1 / s, -d / s),  # E
        "sample": lambda s, d: LinearForm(np.zeros_like(s), np.ones_like(s)),  # D
        "v_prediction": lambda s, d: LinearForm(s / (s**2 + d**2), -d / (s**2 + d**2)),  # s E - d D
    }
)


@runtime_checkable
class Method(Protocol):
    """A way to step through noise levels, such as `euler`."""

    def __call__(self, levels: NoiseLevels, data: LinearForm) -> SamplingTable:
        """The table for these levels, where `data` is the data that the model's prediction stands for."""
        ...


def _coefficients(rows: LinearForm, memory: LinearForm, of_memory: np.ndarray | float = 0.0) -> np.ndarray:
    """Coefficients (.., s, 2, 3) of an update that keeps nothing of the old memory but what goes into the rows."""
    zero = np.zeros_like(rows.of_rows)
    update = np.stack([*rows, of_memory + zero], axis=-1)
    return np.stack([update, np.stack([*memory, zero], axis=-1)], axis=-2)


def _none_like(form: LinearForm) -> LinearForm:
    return LinearForm(np.zeros_like(form.of_rows), np.zeros_like(form.of_rows))


def euler(levels: NoiseLevels, data: LinearForm) -> SamplingTable:
    """Keeps predicted data and noise and mixes them anew: Euler of a flow, DDIM (eta 0) of a diffusion. First order.

    Reference: Song et al., arXiv 2010.02502, equation 12 with sigma 0.
    """
    return _multistep(levels, data, np.zeros_like(levels.signal))


@dataclass(frozen=True, slots=True)
class DPMSolver:
    """DPM-Solver++(2M), midpoint: the data changes linearly in log(signal / deviation). Second order, one evaluation.

    Attributes:
        lower_order_final: of fewer than 15 steps, whether the last is of first order. One that lands on data always is.
        euler_at_final: whether the last step is always of first order.

    Reference: Lu et al., arXiv 2211.01095, algorithm 2.
    """

    lower_order_final: bool = True
    euler_at_final: bool = False

    def __call__(self, levels: NoiseLevels, data: LinearForm) -> SamplingTable:
        """The table for these levels."""
        num_steps = len(levels.time)
        with np.errstate(divide="ignore", invalid="ignore"):  # pure noise and data are infinitely far away
            start = np.log(levels.signal) - np.log(levels.deviation)
            change = np.log(levels.next_signal) - np.log(levels.next_deviation) - start
            extrapolation = np.zeros_like(start)
            extrapolation[1:] = change[1:] / (2 * change[:-1])
        if self.euler_at_final or (self.lower_order_final and num_steps < 15):
            extrapolation[-1] = 0
        return _multistep(levels, data, np.where(levels.next_deviation > 0, extrapolation, 0.0))


def _multistep(levels: NoiseLevels, data: LinearForm, extrapolation: np.ndarray) -> SamplingTable:
    """x' = (d' / d) x + (s' - d' s / d) (D + k (D - D of the step before)), with k the extrapolation."""
    keep = levels.next_deviation / levels.deviation
    gain = levels.next_signal - keep * levels.signal
    rows = data.times(gain * (1 + extrapolation)).plus_rows(keep)
    return SamplingTable(levels.time, _coefficients(rows, data, -gain * extrapolation), np.arange(len(keep)))


def heun(levels: NoiseLevels, data: LinearForm) -> SamplingTable:
    """Predicts with the slope at a step's start, and corrects with the mean of the slopes at both ends. Second order.

    Two evaluations a step, for flows. The last step is an Euler step: the model is not asked at time 0, which training
    never shows it.

    Raises:
        ValueError: for levels of a diffusion.

    Reference: Karras et al., arXiv 2206.00364, algorithm 1, on flow time.
    """
    if not np.allclose(levels.signal + levels.deviation, 1):
        raise ValueError(
            "heun: it integrates over a flow's time, where signal + deviation is 1; got levels of a diffusion. Take"
            " DPMSolver() for second order."
        )
    # velocity = (x - D) / t
    slope = data.plus_rows(-1.0).times(-1 / levels.deviation)
    change = levels.next_deviation - levels.deviation
    predict = _coefficients(slope.times(change).plus_rows(1.0), slope.times(change / 2).plus_rows(1.0))
    correction = LinearForm(*(x[1:] for x in slope)).times(change[:-1] / 2)
    correct = _coefficients(correction, _none_like(correction), 1.0)

    def alternate(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        pairs = np.stack([first[:-1], second], axis=1)
        return np.concatenate([pairs.reshape(-1, *first.shape[1:]), first[-1:]])

    steps = np.arange(len(change))
    return SamplingTable(
        alternate(levels.time, levels.time[1:]), alternate(predict, correct), alternate(steps, steps[:-1])
    )
