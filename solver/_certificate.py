"""How far a plan is from the best possible: what it has of everything, and the least that any plan could have."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from solver._plan import BalancePlan

_ROUNDING = 1e-9  # of sums of seconds


class Bound(NamedTuple):
    """A figure of a plan, and a bound that no plan under the same rules is below.

    Attributes:
        value: of the plan.
        least: the bound.
    """

    value: float
    least: float

    @property
    def gap(self) -> float:
        """`value` over `least`, less 1; 0 where both are 0, infinite where only the bound is."""
        if self.least > 0:
            return self.value / self.least - 1
        return 0.0 if self.value <= 0 else float("inf")


class Certificate(NamedTuple):
    """Figures of a plan beside bounds that hold for all plans of the same step.

    Attributes:
        text_tokens, image_tokens, attention_work: of the device with most; the least is the mean of the devices, in
            whole tokens.
        load: seconds of linear layers and attention of the device with most. With bags, the least of plans with these
            bags.
        step: seconds of a static-shape step, every device padded to the most tokens and the most attention; likewise.
        rows_sent, rows_across_machines: (token, head) rows that leave their device, or their machine. The least of
            plans whose devices have no more tokens and attention than this one's.
    """

    text_tokens: Bound
    image_tokens: Bound
    attention_work: Bound
    load: Bound
    step: Bound
    rows_sent: Bound
    rows_across_machines: Bound


def certificate_of(plan: "BalancePlan") -> Certificate:
    """The figures of a plan and their bounds; global, on the host."""
    tokens, attention_s = plan.tokens, plan.attention_work
    image = tokens - plan.text_tokens
    machines = plan.topology.machine_of(np.arange(plan.num_devices))
    num_machines = plan.topology.num_machines
    in_machine = [
        np.bincount(machines, weights=x, minlength=num_machines).max() for x in (tokens, attention_s)
    ]
    tokens_s = float(plan.cost.linear(int(tokens.max())))
    return Certificate(
        text_tokens=_mean_bound(plan.text_tokens),
        image_tokens=_mean_bound(image),
        attention_work=Bound(float(attention_s.max()), float(attention_s.mean()) * (1 - _ROUNDING)),
        load=Bound(float(plan.load.max()), plan.load_lower_bound),
        step=Bound(tokens_s + float(attention_s.max()), plan.step_lower_bound),
        rows_sent=Bound(
            int(plan.rows_sent.sum()), _least_rows(plan, int(tokens.max()), float(attention_s.max()))
        ),
        rows_across_machines=Bound(
            int(plan.rows_across_machines.sum()), _least_rows(plan, int(in_machine[0]), float(in_machine[1]))
        ),
    )


def _mean_bound(values: np.ndarray) -> Bound:
    return Bound(int(values.max()), -(-int(values.sum()) // len(values)))


def _least_rows(plan: "BalancePlan", most_tokens: int, most_attention_s: float) -> int:
    """Rows that leave a group of devices (one, or a machine), if none has more tokens and attention than these.

    A row of a head that one group has whole, with all its queries, need not leave it; of any other head at least one
    copy leaves wherever the token is. A group has room for only so many whole heads of a sequence and for so many of
    its tokens, and all groups together have a head whole once.
    """
    lengths = plan.lengths.astype(np.int64)
    heads = plan.num_heads
    attention_s = np.asarray(plan.cost.attention(lengths.astype(np.float64)))
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.floor(most_attention_s * (1 + _ROUNDING) * heads / attention_s)
    whole = np.where(attention_s > 0, np.minimum(whole, heads), heads).astype(np.int64)
    stay = np.minimum(lengths * whole, min(most_tokens, int(lengths.max(initial=0))) * heads)
    return int((lengths * heads - np.minimum(stay, lengths * heads)).sum())
