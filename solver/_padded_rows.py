"""What a padded exchange makes of a plan's rows: every round sends as many as its busiest pair of devices."""

import numpy as np
from jaxtyping import Int

from solver._plan import BalancePlan
from solver._plan_measure import distinct_heads, divides_items
from solver._routes import round_of_pair, rows_of_rounds

# What takes time in padded exchanges beside rows moved, in such rows: a round of a route; and a row that the fullest
# device holds for attention beyond an even share, to which every device is padded. On 8 CPU devices a moved row of 32
# elements took 0.85 us, queries' own route of 7 rounds 1.6 ms, and a held row 1.65 us; whole blocks make two of one.
_ROWS_OF_A_ROUND = 256
_ROWS_OF_A_HELD_ROW = 4


def rows_between(plan: BalancePlan) -> Int[np.ndarray, "devices devices"]:
    """(token, head) rows that each device sends to each other one before attention."""
    shape = len(plan.lengths), plan.num_devices
    tokens = np.zeros(shape, np.int64)
    sequence, start, stop, device = np.asarray(plan.token_slices, np.int64).T
    np.add.at(tokens, (sequence, device), stop - start)
    sequence, first, last, _, _, device = np.asarray(plan.head_slices, np.int64).T
    heads = np.zeros(shape, np.int64)
    np.add.at(heads, (sequence, device), distinct_heads(sequence, first, last, device))
    rows = tokens.T @ heads
    np.fill_diagonal(rows, 0)
    return rows


def padded_rounds(plan: BalancePlan) -> Int[np.ndarray, " rounds"]:
    """Rows that every device sends in each round of a padded exchange."""
    return rows_of_rounds(rows_between(plan), round_of_pair(plan.num_devices))


def rows_beside(plan: BalancePlan, rounds: Int[np.ndarray, " rounds"]) -> float:
    """What else exchanges of these rounds cost a device, in rows moved: rounds, and rows held unevenly."""
    # Where items are divided, queries have a route of their own.
    routes = 2 if divides_items(plan.head_slices, plan.lengths) else 1
    held = int(plan.rows.max(initial=0)) - int(plan.tokens.sum()) * plan.num_heads / plan.num_devices
    return routes * _ROWS_OF_A_ROUND * int(np.count_nonzero(rounds)) + _ROWS_OF_A_HELD_ROW * held
