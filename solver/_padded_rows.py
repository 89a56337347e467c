"""What a padded exchange makes of a plan's rows: every round sends as many as its busiest pair of devices."""

import numpy as np
from jaxtyping import Int

from solver._plan import BalancePlan
from solver._plan_measure import distinct_heads
from solver._routes import round_of_pair, rows_of_rounds


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


def padded_rows(rows: Int[np.ndarray, "devices devices"]) -> int:
    """Rows that every device sends in a padded exchange."""
    return int(rows_of_rounds(rows, round_of_pair(len(rows))).sum())
