"""What no assignment to bags can beat."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from solver._bags import BagLayout
from solver._cost import CostModel
from solver._plan import BalanceProblem

FLOP_UNIT = 1e12  # FLOP in the unit of work


def work_of(problem: BalanceProblem) -> Float[np.ndarray, "rows n"]:
    """Work of every sequence by part, and in total, in TFLOP of a linear layer.

    The parts are those a static-shape step pads each to its fullest device: linear work, of text and of image
    tokens apart if there is text, and attention. Decisions are made in these, so they depend on gamma and the
    width but not on the speed of a device.
    """
    cost = CostModel(problem.cost.width, problem.cost.gamma)
    lengths, text_lengths = problem.lengths.astype(np.float64), problem.text_lengths
    kinds = [text_lengths, lengths - text_lengths] if text_lengths.any() else [lengths]
    work = np.empty((len(kinds) + 2, len(lengths)))
    for row, tokens in zip(work, kinds, strict=False):
        row[:] = cost.linear(tokens)
    work[-2], work[-1] = cost.attention(lengths), cost.total(lengths)
    return work / FLOP_UNIT


class LowerBounds(NamedTuple):
    """Work that no assignment to the bags of one replica undercuts, in the unit of `work_of`.

    Attributes:
        load: of the fullest device.
        step: of a static-shape step, padded to the most tokens of any kind.
        parts: of each part of the work, on the device with the most of it.
    """

    load: float
    step: float
    parts: list[float]


def lower_bounds(
    problem: BalanceProblem, layout: BagLayout, work: Float[np.ndarray, "rows n"]
) -> list[LowerBounds]:
    """Lower bounds of every replica, which keeps the sequences at home on its devices.

    A step is at least the sum of the least possible largest shares of its parts.
    """
    token = float(CostModel(problem.cost.width, problem.cost.gamma).linear(1)) / FLOP_UNIT
    replica_of_sequence = layout.replica[layout.bag_of_device[problem.home]]
    bounds = []
    for replica in range(int(layout.replica[-1]) + 1):
        mine = work[:, replica_of_sequence == replica]
        if not mine.size:
            bounds.append(LowerBounds(0.0, 0.0, [0.0] * (len(work) - 1)))
            continue
        linear = mine[:-2].sum(axis=0, keepdims=True)
        shares = _least_shares(np.concatenate([linear, mine]), layout.size[layout.replica == replica])
        most_linear, *parts, load = shares.tolist()
        whole_tokens = math.ceil(most_linear / token * (1 - 1e-12))  # may be a whole number, rounded up
        step = max(load, whole_tokens * token + parts[-1])
        bounds.append(LowerBounds(load, step, parts))
    return bounds


def _least_shares(
    work: Float[np.ndarray, "work n"], sizes: Int[np.ndarray, " bags"]
) -> Float[np.ndarray, " work"]:
    """Least possible largest share (work over size) of a bag: the mean, or what must meet in some bag.

    Of the k B + 1 largest among B bags, some k + 1 share a bag, and weigh at least as much as the k + 1
    smallest of these.
    """
    num_sequences, num_bags = work.shape[1], len(sizes)
    upto = np.zeros((len(work), num_sequences + 1))
    np.cumsum(-np.sort(-work, axis=1), axis=1, out=upto[:, 1:])
    together = np.arange(1, (num_sequences - 1) // num_bags + 2)  # k + 1
    last = (together - 1) * num_bags + 1
    crowded = (upto[:, last] - upto[:, last - together]).max(axis=1)
    return np.maximum(upto[:, -1] / int(sizes.sum()), crowded / int(sizes.max()))
