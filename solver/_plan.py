"""A balance plan: where every token and every (token, head) of a step goes, and what it costs each device."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from solver._certificate import Certificate, certificate_of
from solver._cost import CostModel
from solver._topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class BalanceProblem:
    """What a plan is made for: the sequences of a step, where the loader left them, and the devices.

    Attributes:
        lengths: tokens of each sequence, text and image together.
        text_lengths: how many of them are text.
        home: device of each sequence in the home layout.
        num_heads: attention heads.
        topology: the devices.
        cost: what tokens and attention cost.
    """

    lengths: Int[np.ndarray, " n"]
    text_lengths: Int[np.ndarray, " n"]
    home: Int[np.ndarray, " n"]
    num_heads: int
    topology: Topology
    cost: CostModel


@dataclass(frozen=True, slots=True, eq=False)
class BalancePlan:
    """Layouts of one step, as run-length slices, with their cost per device. Same input, same plan, everywhere.

    Sequences are numbered globally; inside a sequence text tokens come first. All ranges are half-open and no slice is
    empty. Slices are sorted by device, then sequence, then start.

    Attributes:
        lengths: tokens of each sequence, text and image together.
        text_lengths: how many of them are text.
        home: device of each sequence in the home layout.
        num_devices: devices.
        num_heads: attention heads.
        topology: machines the devices belong to.
        cost: cost model the seconds below follow from.
        token_slices: rows (sequence, start, stop, device), the token layout in joint positions: one row for
            every maximal run, so it may span text and image tokens.
        head_slices: rows (sequence, head_start, head_stop, query_start, query_stop, device), the attention
            layout: the device also holds keys and values of the whole sequence for these heads.
        tokens: tokens a device holds.
        text_tokens: how many of them are text.
        attention_work: seconds of attention a device runs.
        load: seconds of linear layers and attention a device runs.
        rows: (token, head) pairs whose keys a device holds in the attention layout.
        rows_sent: distinct (token, head, destination) with the token here and its attention on another device; counted
            once, although q, k and v all go and the output returns.
        rows_across_machines: those of `rows_sent` that leave the machine.
        load_lower_bound: seconds no plan under the same rules has on its fullest device.
        step_lower_bound: seconds no plan under the same rules has for the static-shape step.
    """

    lengths: Int[np.ndarray, " n"]
    text_lengths: Int[np.ndarray, " n"]
    home: Int[np.ndarray, " n"]
    num_devices: int
    num_heads: int
    topology: Topology
    cost: CostModel
    token_slices: Int[np.ndarray, "token_slices 4"]
    head_slices: Int[np.ndarray, "head_slices 6"]
    tokens: Int[np.ndarray, " devices"]
    text_tokens: Int[np.ndarray, " devices"]
    attention_work: Float[np.ndarray, " devices"]
    load: Float[np.ndarray, " devices"]
    rows: Int[np.ndarray, " devices"]
    rows_sent: Int[np.ndarray, " devices"]
    rows_across_machines: Int[np.ndarray, " devices"]
    load_lower_bound: float = field(kw_only=True)
    step_lower_bound: float = field(kw_only=True)

    @property
    def load_max_over_mean(self) -> float:
        """Load of the fullest device over the mean; 1 without any load."""
        return self._over_mean_load(float(self.load.max()))

    @property
    def static_step_cost(self) -> float:
        """J: what a static-shape step costs, every device padded to the most tokens and the most attention.

        Relative to the mean load, so 1 is a step without padding.
        """
        tokens_s = float(self.cost.linear(int(self.tokens.max())))
        return self._over_mean_load(tokens_s + float(self.attention_work.max()))

    @property
    def padded_step_cost(self) -> float:
        """Like `static_step_cost`, where text and image tokens are separate arrays, each padded to its most."""
        image_tokens = self.tokens - self.text_tokens
        tokens_s = float(self.cost.linear(int(self.text_tokens.max()) + int(image_tokens.max())))
        return self._over_mean_load(tokens_s + float(self.attention_work.max()))

    @property
    def load_lower_bound_over_mean(self) -> float:
        """The least `load_max_over_mean` any plan under the same rules could have."""
        return self._over_mean_load(self.load_lower_bound)

    @property
    def static_step_cost_lower_bound(self) -> float:
        """The least `static_step_cost` any plan under the same rules could have."""
        return self._over_mean_load(self.step_lower_bound)

    @property
    def certificate(self) -> Certificate:
        """Tokens, attention, step and traffic, each beside what no plan of this step can be below."""
        return certificate_of(self)

    @property
    def tokens_moved_fraction(self) -> float:
        """Tokens whose device in the token layout is not their home, over all tokens; 0 without tokens."""
        sequence, start, stop, device = self.token_slices.T
        total = int(self.tokens.sum())
        moved = int((stop - start)[device != self.home[sequence]].sum(dtype=np.int64))
        return moved / total if total else 0.0

    @property
    def rows_sent_fraction(self) -> float:
        """(token, head) rows that cross devices over all of them; 0 without tokens."""
        total = int(self.tokens.sum()) * self.num_heads
        return int(self.rows_sent.sum()) / total if total else 0.0

    def _over_mean_load(self, cost_s: float) -> float:
        mean_s = total_of(self.load) / self.num_devices
        return cost_s / mean_s if mean_s else 1.0


def total_of(values: Float[np.ndarray, " n"]) -> float:
    """Sum in index order: `np.sum` adds in an order that depends on the processor's vector width."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
