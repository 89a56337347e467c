"""Cost of a sequence: linear layers grow with its tokens, attention with their square."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Num

_WIDEST = 1 << 20
_LARGEST_GAMMA = 1e6

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
        ValueError: a width or a time that is not positive, a negative or non-finite gamma.

    Reference: KnapFormer, arXiv 2508.06001, section 3.
    """

    width: int
    gamma: float
    seconds_per_flop: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.width <= _WIDEST:
            raise ValueError(
                f"CostModel: width in 1 .. {_WIDEST}; got width={self.width}. Give the model's width."
            )
        if not 0 <= self.gamma <= _LARGEST_GAMMA:
            raise ValueError(
                f"CostModel: gamma in 0 .. {_LARGEST_GAMMA:g}; got gamma={self.gamma}. "
                "0.4 suits an H100; fit it on the devices at hand."
            )
        if not (math.isfinite(self.seconds_per_flop) and self.seconds_per_flop > 0):
            raise ValueError(
                f"CostModel: seconds_per_flop finite and > 0; got seconds_per_flop={self.seconds_per_flop}. "
                "Leave it at 1 to count FLOP."
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
