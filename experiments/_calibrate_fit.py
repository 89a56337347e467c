"""Fits of a transformer block's time to what it computes and sends; NumPy alone.

Two models of the seconds that a block takes, forward and backward, on one sequence of l tokens and width d:

* *two columns* (KnapFormer's): a l + b l^2 by plain least squares. With `solver.CostModel`'s FLOP, 24 l d^2 and 4 l^2 d
  forward and three times that with the backward pass, seconds per FLOP are a / (72 d^2) and gamma is 6 d b / a.
* *terms*: launch + linear FLOP, attention FLOP and exchanged bytes, each times a speed. Relative residuals are
  minimised, so that short steps count as much as long ones, and no term is below zero.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Num

# `solver.Links` counts compute three times: forward, and twice that backward.
PASSES = 3


class Work(NamedTuple):
    """What a block does in a step, forward and backward, on the device that the others wait for.

    Attributes:
        linear_flops: of linear layers on all rows of the program, padding included.
        attention_flops: of the block pairs that attention visits, masked entries included.
        exchange_bytes: of (token, head) rows that attention's exchanges send; padded where the exchange is.
    """

    linear_flops: float
    attention_flops: float
    exchange_bytes: float


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a fit meets its points.

    Attributes:
        r_squared: share of the variance of the seconds that the fit explains.
        mean_relative, largest_relative: of |fitted / measured - 1|.
    """

    r_squared: float
    mean_relative: float
    largest_relative: float


@dataclass(frozen=True, slots=True)
class TwoColumnFit:
    """KnapFormer's fit, a l + b l^2.

    Attributes:
        token_s, pair_s: a, seconds per token; b, seconds per squared token.
        gamma: what a FLOP of attention costs relative to one of a linear layer.
        seconds_per_flop: of a linear layer, as `solver.CostModel` takes it.
        quality: of the fit.
    """

    token_s: float
    pair_s: float
    gamma: float
    seconds_per_flop: float
    quality: Quality

    def seconds(self, lengths: Num[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Fitted seconds of a block, forward and backward, on a sequence of each length."""
        x = np.asarray(lengths, np.float64)
        return self.token_s * x + self.pair_s * x * x


@dataclass(frozen=True, slots=True)
class TermsFit:
    """Separate speeds of linear layers, attention, launches and exchange.

    Attributes:
        launch_s: seconds of a block whatever its work.
        linear_s_per_flop, attention_s_per_flop: seconds of a FLOP of either.
        exchange_s_per_byte: seconds of a byte that a device sends; None where nothing was exchanged.
        quality: of the fit.
    """

    launch_s: float
    linear_s_per_flop: float
    attention_s_per_flop: float
    exchange_s_per_byte: float | None
    quality: Quality

    @property
    def gamma(self) -> float:
        """What a FLOP of attention costs relative to one of a linear layer."""
        return self.attention_s_per_flop / self.linear_s_per_flop

    def seconds(self, work: Work) -> float:
        """Predicted seconds of a block, forward and backward."""
        return (
            self.launch_s
            + work.linear_flops * self.linear_s_per_flop
            + work.attention_flops * self.attention_s_per_flop
            + work.exchange_bytes * (self.exchange_s_per_byte or 0.0)
        )


def fit_two_columns(
    lengths: Num[np.ndarray, " n"], seconds: Float[np.ndarray, " n"], *, width: int
) -> TwoColumnFit:
    """Fit a l + b l^2 by least squares, neither below zero.

    Args:
        lengths: tokens of one sequence.
        seconds: of a block on it, forward and backward.
        width: of the model.

    Raises:
        ValueError: for fewer than two lengths, a time that is not positive and finite, or times that do not grow with
            the length.

    Reference: KnapFormer, arXiv 2508.06001, section 3.
    """
    x, y = np.asarray(lengths, np.float64), _checked(seconds)
    if len(np.unique(x)) < 2:
        raise ValueError(f"fit_two_columns: at least two lengths; got {len(np.unique(x))}. Measure more.")
    matrix = np.stack([x, x * x], axis=1)
    a, b = (float(c) for c in _non_negative(matrix, y))
    if not a > 0:
        raise ValueError(
            "fit_two_columns: seconds must have a part that grows with the length; got none. Measure shorter lengths"
            " too, more often, or on a quieter machine."
        )
    return TwoColumnFit(
        token_s=a,
        pair_s=b,
        gamma=6 * width * b / a,
        seconds_per_flop=a / (PASSES * 24 * float(width) ** 2),
        quality=quality_of(matrix @ [a, b], y),
    )


def fit_terms(works: Sequence[Work], seconds: Float[np.ndarray, " n"]) -> TermsFit:
    """Fit launch, linear, attention and, where anything was sent, exchange; relative residuals, none below zero.

    Args:
        works: what a block did in each measurement.
        seconds: of the block, forward and backward.

    Raises:
        ValueError: for fewer measurements than terms, a time that is not positive and finite, or times that do not grow
            with the linear layers' work.
    """
    y, columns = _checked(seconds), np.asarray(works, np.float64).reshape(-1, 3)
    sends = bool(columns[:, 2].any())
    matrix = np.column_stack([np.ones(len(columns)), columns[:, : 3 if sends else 2]])
    if len(matrix) < matrix.shape[1]:
        raise ValueError(
            f"fit_terms: at least as many measurements as terms; got {len(matrix)} and {matrix.shape[1]}. Measure more."
        )
    found = _non_negative(matrix / y[:, None], np.ones(len(y)))
    if not found[1] > 0:
        raise ValueError(
            "fit_terms: seconds must grow with the work of linear layers; got none of it. Measure longer lengths too,"
            " more often, or on a quieter machine."
        )
    launch, linear, attention = (float(c) for c in found[:3])
    return TermsFit(
        launch, linear, attention, float(found[3]) if sends else None, quality_of(matrix @ found, y)
    )


def quality_of(fitted: Float[np.ndarray, " n"], measured: Float[np.ndarray, " n"]) -> Quality:
    """How well fitted seconds meet measured ones; R^2 is 1 where the measured ones are all the same and met."""
    fitted, measured = np.asarray(fitted, np.float64), np.asarray(measured, np.float64)
    squares = float(np.sum((measured - fitted) ** 2))
    total = float(np.sum((measured - measured.mean()) ** 2))
    relative = np.abs(fitted / measured - 1)
    r_squared = 1 - squares / total if total else float(squares == 0)
    return Quality(r_squared, float(relative.mean()), float(relative.max()))


def _checked(seconds: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    y = np.asarray(seconds, np.float64)
    if not (len(y) and np.all(np.isfinite(y)) and np.all(y > 0)):
        raise ValueError("fit: every measurement must be positive and finite; got one that is not, or none.")
    return y


def _non_negative(matrix: Float[np.ndarray, "n k"], y: Float[np.ndarray, " n"]) -> Float[np.ndarray, " k"]:
    """Least squares with no coefficient below zero: the best of all sets of columns whose own solution has none."""
    scale = np.abs(matrix).max(axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    best, best_error = np.zeros(matrix.shape[1]), float(y @ y)
    for size in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), size):
            part = scaled[:, chosen]
            found = np.linalg.lstsq(part, y, rcond=None)[0]
            error = float(np.sum((part @ found - y) ** 2))
            if np.all(found >= 0) and error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[list(chosen)] = found
    return best / np.where(scale > 0, scale, 1.0)
