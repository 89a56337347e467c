"""Cost of a sequence: linear layers grow with its tokens, attention with their square."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Num

from solver._check import integer, number

_WIDEST = 1 << 20
_LARGEST_GAMMA = 1e6
# Of a FLOP: no sum of times is without bounds, or lost to rounding.
_LEAST_SECONDS, _MOST_SECONDS = 1e-30, 1e6
_ADVICE = {
    "gamma": "0.4 suits an H100; fit it on the devices at hand",
    "seconds_per_flop": "Leave it at 1 to count FLOP",
}

Tokens = int | float | Num[np.ndarray, "..."]
Cost = np.floating | float | Float[np.ndarray, "..."]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time of one transformer block on a sequence, forward: `24 l d^2 + gamma 4 l^2 d` FLOP times seconds.

    The first term is the linear layers (QKV, output, MLP, modulation), the second attention. Constants common
    to both (number of blocks, backward) cancel wherever plans are compared, so the default unit is one FLOP.

    Args:
        width: width d of the model.
        gamma: what a FLOP of attention costs relative to one of a linear layer; 0.385 and 0.49 were published
            for H100.
        seconds_per_flop: seconds for one FLOP of a linear layer; 1 counts in FLOP.

    Raises:
        TypeError: a width that is no integer, a gamma or a time that is no number.
        ValueError: a width that is not positive, a gamma or a time out of range.

    Example:
        In FLOP, a sequence of 4,608 tokens in FLUX.1: attention costs a fifth of the linear layers, and as much as they
        do where 0.4 * 4 l = 24 d.

        >>> cost = CostModel(width=3072, gamma=0.4)
        >>> float(cost.attention(4608) / cost.linear(4608))
        0.1
        >>> float(cost.total(46_080) / cost.linear(46_080))
        2.0

    Reference: KnapFormer, arXiv 2508.06001, section 3.
    """

    width: int
    gamma: float
    seconds_per_flop: float = 1.0

    def __post_init__(self) -> None:
        width = integer("CostModel", "width", self.width, most=_WIDEST, advice="Give the model's width.")
        object.__setattr__(self, "width", width)
        for name in ("gamma", "seconds_per_flop"):
            value = number("CostModel", name, getattr(self, name), advice=f"{_ADVICE[name]}.")
            object.__setattr__(self, name, value)
        if not 0 <= self.gamma <= _LARGEST_GAMMA:
            raise ValueError(
                f"CostModel: gamma in 0 .. {_LARGEST_GAMMA:g}; got gamma={self.gamma}. {_ADVICE['gamma']}."
            )
        if not _LEAST_SECONDS <= self.seconds_per_flop <= _MOST_SECONDS:
            raise ValueError(
                f"CostModel: seconds_per_flop in {_LEAST_SECONDS:g} .. {_MOST_SECONDS:g}; got"
                f" seconds_per_flop={self.seconds_per_flop}. {_ADVICE['seconds_per_flop']}."
            )

    def linear(self, tokens: Tokens) -> Cost:
        """Seconds of the linear layers for this many tokens, whichever sequences they belong to."""
        return 24.0 * tokens * float(self.width) ** 2 * self.seconds_per_flop

    def attention(self, length: Tokens) -> Cost:
        """Seconds of attention within a sequence of this length, all heads."""
        return self.gamma * (4.0 * length * length * self.width) * self.seconds_per_flop

    def total(self, length: Tokens) -> Cost:
        """Seconds of a block on a whole sequence: linear layers and attention."""
        return self.linear(length) + self.attention(length)
