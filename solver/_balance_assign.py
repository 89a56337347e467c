"""Which bag a sequence goes to."""

import heapq

import numpy as np
from jaxtyping import Float, Int

from solver._bags import BagLayout
from solver._plan import BalanceProblem, total_of

_TERA = 1e12


def assign_to_bags(problem: BalanceProblem, layout: BagLayout) -> Int[np.ndarray, " n"]:
    """Choose a bag for every sequence; each replica balances the sequences at home on its devices.

    Decisions are made in TFLOP, so they depend on gamma and the width but not on the speed of a device.
    """
    flops = problem.cost.total(problem.lengths.astype(np.float64)) / problem.cost.seconds_per_flop
    weights = np.asarray(flops) / _TERA
    home_bag = layout.bag_of_device[problem.home]
    bag_of_sequence = np.empty(len(weights), np.int64)
    for replica in range(int(layout.replica[-1]) + 1):
        bags = np.flatnonzero(layout.replica == replica)
        mine = np.flatnonzero(layout.replica[home_bag] == replica)
        local = _published_greedy(weights[mine], problem.lengths[mine], layout.size[bags])
        bag_of_sequence[mine] = bags[local]
    return bag_of_sequence


def _published_greedy(
    weights: Float[np.ndarray, " n"], lengths: Int[np.ndarray, " n"], sizes: Int[np.ndarray, " bags"]
) -> Int[np.ndarray, " n"]:
    """KnapFormer's assignment: the heaviest sequence first, to the bag that is least full for its size.

    A bag qualifies when the sequence is no heavier than its fair share and no shorter than its size; when none
    does, all bags of the largest size do. Ties go to the first bag.

    Reference: KnapFormer, arXiv 2508.06001, section 3.2.
    """
    mean = total_of(weights) / int(sizes.sum())
    bag_of_sequence = np.zeros(len(weights), np.int64)
    if mean == 0:
        return bag_of_sequence
    size_list = sizes.tolist()
    heaps: dict[int, list[tuple[float, int]]] = {size: [] for size in size_list}
    for bag, size in enumerate(size_list):
        heaps[size].append((0.0, bag))
    largest = max(size_list)
    chosen = [0] * len(weights)
    weight_list, length_list = weights.tolist(), lengths.tolist()
    for index in np.argsort(-weights, kind="stable").tolist():
        weight, length = weight_list[index], length_list[index]
        best = largest
        if len(heaps) > 1:
            fits = [size for size in heaps if size * mean >= weight and length >= size]
            best = min(fits, key=lambda size: heaps[size][0]) if fits else largest
        fill, bag = heaps[best][0]
        chosen[index] = bag
        heapq.heapreplace(heaps[best], (fill + weight / (best * mean), bag))
    bag_of_sequence[:] = chosen
    return bag_of_sequence
