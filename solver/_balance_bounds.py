"""What no assignment to bags can beat."""

import numpy as np
from jaxtyping import Float, Int

from solver._bags import BagLayout
from solver._plan import BalanceProblem


def lower_bounds(problem: BalanceProblem, layout: BagLayout) -> tuple[float, float]:
    """Seconds below which no assignment to these bags has its fullest device's load, and its static-shape step.

    A replica keeps the sequences at home on its devices. The step is at least the linear layers of the least
    possible most tokens plus the least possible most attention.
    """
    cost, lengths = problem.cost, problem.lengths.astype(np.float64)
    replica_of_sequence = layout.replica[layout.bag_of_device[problem.home]]
    load = tokens = attention = 0.0
    for replica in range(int(layout.replica[-1]) + 1):
        sizes = layout.size[layout.replica == replica]
        longest_first = -np.sort(-lengths[replica_of_sequence == replica])
        load = max(load, least_share(np.asarray(cost.total(longest_first)), sizes))
        tokens = max(tokens, least_share(longest_first, sizes))
        attention = max(attention, least_share(np.asarray(cost.attention(longest_first)), sizes))
    step = float(cost.linear(np.ceil(tokens * (1 - 1e-12)))) + attention
    return load, max(load, step)


def least_share(falling: Float[np.ndarray, " n"], sizes: Int[np.ndarray, " bags"]) -> float:
    """Least possible largest share (sum over size) of a bag: the mean, or what must come together in some bag.

    Of the k B + 1 largest among B bags, some k + 1 share a bag, and weigh at least as much as the k + 1
    smallest of these.
    """
    if not len(falling):
        return 0.0
    total = np.concatenate([[0.0], np.cumsum(falling)])
    together = np.arange(1, (len(falling) - 1) // len(sizes) + 2)  # k + 1
    last = (together - 1) * len(sizes) + 1
    crowded = (total[last] - total[last - together]).max()
    return max(float(total[-1]) / int(sizes.sum()), float(crowded) / int(sizes.max()))
