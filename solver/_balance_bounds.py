"""What no assignment to bags can beat."""

import math

import numpy as np
from jaxtyping import Float, Int

from solver._bags import BagLayout
from solver._cost import CostModel
from solver._plan import BalanceProblem

FLOP_UNIT = 1e12  # FLOP in the unit of work


def work_of(problem: BalanceProblem) -> Float[np.ndarray, "3 n"]:
    """Linear work, attention and their sum for every sequence, in TFLOP of a linear layer.

    Decisions are made in these, so they depend on gamma and the width but not on the speed of a device.
    """
    cost = CostModel(problem.cost.width, problem.cost.gamma)
    lengths = problem.lengths.astype(np.float64)
    work = np.empty((3, len(lengths)))
    work[0], work[1] = cost.linear(lengths), cost.attention(lengths)
    work[2] = work[0] + work[1]
    return work / FLOP_UNIT


def lower_bounds(
    problem: BalanceProblem, layout: BagLayout, work: Float[np.ndarray, "3 n"]
) -> Float[np.ndarray, "replicas 2"]:
    """Work below which no assignment to these bags has its fullest device's load, and its static-shape step.

    A replica keeps the sequences at home on its devices. The step is at least the linear layers of the least
    possible most tokens plus the least possible most attention. In the unit of `work`.
    """
    token = float(CostModel(problem.cost.width, problem.cost.gamma).linear(1)) / FLOP_UNIT
    replica_of_sequence = layout.replica[layout.bag_of_device[problem.home]]
    bounds = np.zeros((int(layout.replica[-1]) + 1, 2))
    for replica, bound in enumerate(bounds):
        mine = work[:, replica_of_sequence == replica]
        if mine.size:
            falling = mine[:, np.argsort(-mine[2], kind="stable")]
            linear, attention, load = _least_shares(falling, layout.size[layout.replica == replica]).tolist()
            whole_tokens = math.ceil(linear / token * (1 - 1e-12))  # a whole number may have been rounded up
            bound[:] = load, max(load, whole_tokens * token + attention)
    return bounds


def _least_shares(
    falling: Float[np.ndarray, "work n"], sizes: Int[np.ndarray, " bags"]
) -> Float[np.ndarray, " work"]:
    """Least possible largest share (sum over size) of a bag: the mean, or what must come together in some
    bag.

    Of the k B + 1 largest among B bags, some k + 1 share a bag, and weigh at least as much as the k + 1
    smallest of these.
    """
    num_sequences, num_bags = falling.shape[1], len(sizes)
    upto = np.zeros((len(falling), num_sequences + 1))
    np.cumsum(falling, axis=1, out=upto[:, 1:])
    together = np.arange(1, (num_sequences - 1) // num_bags + 2)  # k + 1
    last = (together - 1) * num_bags + 1
    crowded = (upto[:, last] - upto[:, last - together]).max(axis=1)
    return np.maximum(upto[:, -1] / int(sizes.sum()), crowded / int(sizes.max()))
