"""Which device takes which share of a plan, where exchanges are padded: those that exchange much meet in one round.

A padded exchange sends every round as many rows as its busiest pair of devices, whatever the others send. Free
placement sends few rows between few pairs, which might lie in as many rounds. Any exchange of devices within a machine
leaves a plan's balance as it is, and costs moves from home, once a step.
"""

from itertools import combinations

import numpy as np
from jaxtyping import Int

from solver._padded_rows import rows_between
from solver._plan import BalancePlan, BalanceProblem
from solver._plan_measure import plan_from_slices
from solver._routes import round_of_pair, rows_of_rounds

_MOST_LOOKED_AT = 20_000_000  # entries of tables of rows between devices, in all exchanges that are tried


def relabel(problem: BalanceProblem, plan: BalancePlan) -> BalancePlan:
    """The plan with devices exchanged within their machines so that padded exchanges send less; global, on the host."""
    rows = rows_between(plan)
    device_of_share = np.argsort(_meet(rows, problem.topology.devices_per_machine))
    if np.array_equal(device_of_share, np.arange(len(rows))):
        return plan
    token_slices, head_slices = plan.token_slices.copy(), plan.head_slices.copy()
    for slices in (token_slices, head_slices):
        slices[:, -1] = device_of_share[slices[:, -1]]
    # The order that plans have: by device, sequence, and then from left to right.
    tokens = token_slices[np.lexsort((token_slices[:, 1], token_slices[:, 0], token_slices[:, 3]))]
    heads = head_slices[
        np.lexsort((head_slices[:, 3], head_slices[:, 1], head_slices[:, 0], head_slices[:, 5]))
    ]
    bounds = plan.load_lower_bound, plan.step_lower_bound
    return plan_from_slices(problem, tokens, heads, lower_bounds=bounds)


def _meet(rows: Int[np.ndarray, "devices devices"], devices_per_machine: int) -> Int[np.ndarray, " devices"]:
    """The share that each device takes: pairs that send most next to each other, then exchanges that send less."""
    n = len(rows)
    round_of = round_of_pair(n)
    machines = np.arange(n).reshape(-1, devices_per_machine)
    starts = [np.arange(n), np.concatenate([_paired(rows, machine.tolist()) for machine in machines])]
    costs = [int(rows_of_rounds(rows[np.ix_(start, start)], round_of).sum()) for start in starts]
    best, share = min(costs), starts[int(np.argmin(costs))]
    pairs = [pair for machine in machines.tolist() for pair in combinations(machine, 2)]
    for _ in range(_MOST_LOOKED_AT // max(len(pairs) * n * n, 1)):
        found = None
        for a, b in pairs:
            other = share.copy()
            other[a], other[b] = share[b], share[a]
            cost = int(rows_of_rounds(rows[np.ix_(other, other)], round_of).sum())
            if cost < best:
                best, found = cost, other
        if found is None:
            break
        share = found
    return share


def _paired(rows: Int[np.ndarray, "devices devices"], shares: list[int]) -> list[int]:
    """Shares in an order in which groups of 2, then 4, and so on, are those that send each other most."""
    groups = [[share] for share in shares]
    most = rows[np.ix_(shares, shares)]  # that a device of one group sends one of another
    while len(groups) > 1:
        sent = most + most.T
        np.fill_diagonal(sent, -1)
        pairs = []
        for _ in range(len(groups) // 2):
            a, b = np.unravel_index(int(sent.argmax()), sent.shape)
            pairs.append((int(a), int(b)))
            sent[[a, b]] = sent[:, [a, b]] = -2
        left = np.setdiff1d(np.arange(len(groups)), pairs).tolist()
        groups = [groups[a] + groups[b] for a, b in pairs] + [groups[i] for i in left]
        pairs += [(i, i) for i in left]
        first, second = np.array(pairs).T
        most = np.maximum.reduce([most[np.ix_(x, y)] for x in (first, second) for y in (first, second)])
    return groups[0]
