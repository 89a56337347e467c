"""Modelled time of a step: what a plan's fullest device computes, and what its busiest one sends."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from solver._check import instance, number
from solver._cost import CostModel
from solver._padded_rows import padded_rounds, rows_beside
from solver._plan import BalancePlan

# A step is a forward and a backward pass: compute counts three times, and what attention exchanges (queries, keys and
# values there, outputs back, and their gradients) twice.
_COMPUTE_PASSES = 3
_EXCHANGE_PASSES = 2
_TENSORS = 4
# Per second: no time is without bounds, or lost to rounding.
_SLOWEST, _FASTEST = 1.0, 1e24


class StepSeconds(NamedTuple):
    """Modelled seconds of one transformer block, forward and backward.

    Attributes:
        compute: of the fullest device, every device padded to the most text tokens, image tokens and attention.
        traffic: of the attention exchanges of the device that sends most.
    """

    compute: float
    traffic: float

    @property
    def exposed(self) -> float:
        """Where traffic waits for compute and compute for traffic."""
        return self.compute + self.traffic

    @property
    def overlapped(self) -> float:
        """Where the shorter of them runs under the longer."""
        return max(self.compute, self.traffic)


@dataclass(frozen=True, slots=True)
class Links:
    """Speeds that plans are compared by.

    Args:
        flops_per_s: of one device; used where the cost model counts in FLOP.
        inside_bytes_per_s, across_bytes_per_s: that one device sends inside its machine, and to other machines.
        element_bytes: of an element of q, k, v and o.
        padded: whether exchanges are padded (`solver.ExchangeTables` defines their rounds), as on CPUs: a device then
            sends in every round what the busiest pair does. Free placement puts such pairs into one round.

    Raises:
        TypeError: for a speed that is no number.
        ValueError: for a speed out of range.
    """

    flops_per_s: float = 400e12
    inside_bytes_per_s: float = 450e9
    across_bytes_per_s: float = 50e9
    element_bytes: int = 2
    padded: bool = False

    def __post_init__(self) -> None:
        instance("Links", "padded", self.padded, bool, advice="Exchanges are padded on CPUs.")
        advice = "Give what the machine does."
        for name in ("flops_per_s", "inside_bytes_per_s", "across_bytes_per_s", "element_bytes"):
            value = number("Links", name, getattr(self, name), advice=advice)
            if not _SLOWEST <= value <= _FASTEST:
                raise ValueError(
                    f"Links: {name} in {_SLOWEST:g} .. {_FASTEST:g}; got {name}={value}. {advice}"
                )

    def step_seconds(self, plan: BalancePlan) -> StepSeconds:
        """Modelled time of a block under a plan."""
        return self._seconds(plan, padded_rounds(plan) if self.padded else None)

    def price_s(self, plan: BalancePlan) -> float:
        """Seconds by which plans are compared: exposed, and with padded exchanges what else these take."""
        if not self.padded:
            return self.step_seconds(plan).exposed
        rounds = padded_rounds(plan)
        beside_s = rows_beside(plan, rounds) * self.row_seconds(plan.cost.width / plan.num_heads)
        return self._seconds(plan, rounds).exposed + beside_s

    def _seconds(self, plan: BalancePlan, rounds: np.ndarray | None) -> StepSeconds:
        """Of a block; `rounds` are those of padded exchanges."""
        across = plan.rows_across_machines
        sent_s = (plan.rows_sent - across) * self.row_seconds(plan.cost.width / plan.num_heads)
        sent_s = sent_s + across * self.row_seconds(plan.cost.width / plan.num_heads, across=True)
        traffic_s = float(sent_s.max())
        if rounds is not None and plan.rows_sent.any():
            traffic_s *= int(rounds.sum()) / int(plan.rows_sent.max())
        # Text and image tokens are arrays of their own, each padded to its most.
        tokens = int(plan.text_tokens.max()) + int((plan.tokens - plan.text_tokens).max())
        compute_s = self.compute_seconds(plan.cost, tokens, float(plan.attention_work.max()))
        return StepSeconds(compute_s, traffic_s)

    def compute_seconds(self, cost: CostModel, tokens: float, attention: float) -> float:
        """Seconds that a device computes for its tokens and its attention, this in the cost model's unit."""
        unit_s = 1 / self.flops_per_s if cost.seconds_per_flop == 1 else 1.0  # counted in FLOP, or in seconds
        return _COMPUTE_PASSES * (float(cost.linear(tokens)) + attention) * unit_s

    def row_seconds(self, head_dim: float, *, across: bool = False) -> float:
        """Seconds that a (token, head) row takes for all its exchanges in a step."""
        return self.row_bytes(head_dim) / (self.across_bytes_per_s if across else self.inside_bytes_per_s)

    def row_bytes(self, head_dim: float) -> float:
        """Bytes of a (token, head) row in all its exchanges in a step: q, k, v and o, and their gradients."""
        return head_dim * self.element_bytes * _TENSORS * _EXCHANGE_PASSES
