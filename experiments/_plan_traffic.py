"""Which device sends how much to which under a plan."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from solver import BalancePlan

# Sequences whose (sequence, device) tables are in memory at once.
_CHUNK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Traffic of a step by sender and receiver; diagonals are 0.

    Attributes:
        tokens: that go from home to the token layout.
        rows: (token, head) rows that go from the token to the attention layout in every attention call.
    """

    tokens: Int[np.ndarray, "devices devices"]
    rows: Int[np.ndarray, "devices devices"]


@dataclass(frozen=True, slots=True, eq=False)
class Arcs:
    """Pairs of devices that exchange something, both directions together, the heaviest first.

    Attributes:
        pairs: the two devices, the lower first.
        amounts: what they exchange.
        across: whether they are on different machines.
        total_inside, total_across: over all pairs, those left out included.
        num_pairs: all pairs.
    """

    pairs: Int[np.ndarray, "n 2"]
    amounts: Int[np.ndarray, " n"]
    across: np.ndarray
    total_inside: int
    total_across: int
    num_pairs: int


def traffic(plan: BalancePlan) -> Traffic:
    """Who sends what to whom; global, on the host.

    The rows add up to `plan.rows_sent` for each sender.
    """
    num = plan.num_devices
    sequence, start, stop, device = np.asarray(plan.token_slices, np.int64).T
    tokens = np.zeros((num, num), np.int64)
    np.add.at(tokens, (np.asarray(plan.home)[sequence], device), stop - start)
    held_by, holder, heads = _heads_held(plan)
    rows = np.zeros((num, num))
    for first in range(0, len(plan.lengths), _CHUNK):
        num_here = min(_CHUNK, len(plan.lengths) - first)
        here, there = _within(sequence, first, num_here), _within(held_by, first, num_here)
        # Float products are fast, and exact below 2^53.
        sent = np.zeros((num, num_here))
        np.add.at(sent, (device[here], sequence[here] - first), (stop - start)[here])
        held = np.zeros((num_here, num))
        held[held_by[there] - first, holder[there]] = heads[there]
        rows += sent @ held
    found = Traffic(tokens, rows.astype(np.int64))
    np.fill_diagonal(found.tokens, 0)
    np.fill_diagonal(found.rows, 0)
    return found


def _within(sequence: Int[np.ndarray, " n"], first: int, count: int) -> np.ndarray:
    return (sequence >= first) & (sequence < first + count)


def _heads_held(plan: BalancePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sequence, device, heads): distinct heads of a sequence on a device, however their queries are divided."""
    sequence, start, stop, _, _, device = np.asarray(plan.head_slices, np.int64).T
    count = stop - start
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    item = (
        np.repeat(sequence * plan.num_devices + device, count) * plan.num_heads
        + np.repeat(start, count)
        + within
    )
    holding, heads = np.unique(np.unique(item) // plan.num_heads, return_counts=True)
    return holding // plan.num_devices, holding % plan.num_devices, heads


def arcs_of(sent: Int[np.ndarray, "devices devices"], devices_per_machine: int, *, most: int) -> Arcs:
    """The `most` heaviest pairs of devices of a traffic matrix."""
    low, high = np.triu_indices(len(sent), 1)
    amounts = (sent + sent.T)[low, high]
    used = np.flatnonzero(amounts)
    low, high, amounts = low[used], high[used], amounts[used]
    across = low // devices_per_machine != high // devices_per_machine
    order = np.argsort(-amounts, kind="stable")[:most]
    return Arcs(
        pairs=np.stack([low, high], -1)[order],
        amounts=amounts[order],
        across=across[order],
        total_inside=int(amounts[~across].sum()),
        total_across=int(amounts[across].sum()),
        num_pairs=len(used),
    )
