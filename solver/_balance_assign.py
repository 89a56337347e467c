"""Which bag a sequence goes to."""

import heapq
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from solver._bags import BagLayout
from solver._balance_home import keep_at_home, rename_bags
from solver._balance_search import SearchGoal, SequenceWork, load_of, reduce_step, step_of
from solver._plan import BalanceProblem, total_of

# Exchanges to try: in proportion to the sequences, as the rest of a plan's time is; more if text is a part of
# its own, which the greedy does not look at.
_TRIES, _SEQUENCES_PER_TRY, _MOST_TRIES = 4, 30, 128
_TEXT_FACTOR = 4


def assign_to_bags(
    problem: BalanceProblem,
    layout: BagLayout,
    work: Float[np.ndarray, "rows n"],
    *,
    targets: Sequence[list[float]],
) -> Int[np.ndarray, " n"]:
    """Choose a bag for every sequence; each replica balances the sequences at home on its devices.

    What is minimised is the step of a static-shape program, most tokens (of text and image each, as they are
    separate arrays) plus most attention, among assignments whose largest load is at most that of the
    published greedy. (The largest load alone is the wrong aim: on the published mixes its last 0.1 % costs up
    to 1 % of the step.)

    Args:
        problem: the sequences and devices.
        layout: the bags.
        work: parts of the work of every sequence, and their sum, as `work_of` gives them.
        targets: of each replica, largest share of every part of the work that no assignment undercuts.

    Returns:
        Bag of every sequence.
    """
    home_bag = layout.bag_of_device[problem.home]
    bag_of_sequence = np.empty(work.shape[1], np.int64)
    for replica, target in enumerate(targets):
        bags = np.flatnonzero(layout.replica == replica)
        mine = np.flatnonzero(layout.replica[home_bag] == replica)
        local = SequenceWork(work[:, mine], layout.size[bags])
        bag_of_sequence[mine] = bags[_assign(local, problem.lengths[mine], home_bag[mine] - bags[0], target)]
    return bag_of_sequence


def _assign(
    work: SequenceWork, lengths: Int[np.ndarray, " n"], home: Int[np.ndarray, " n"], targets: list[float]
) -> Int[np.ndarray, " n"]:
    """Bags of the sequences of one replica, numbered within it, as their home bags are."""
    if len(work.sizes) == 1 or not lengths.any():
        return home
    heaviest_first = np.argsort(-work.total, kind="stable")
    bag = _published_greedy(work, lengths, heaviest_first)
    shares = work.shares(bag)
    load_cap = load_of(shares)
    if work.sizes[0] != work.sizes[-1]:
        other = _least_share_greedy(work, heaviest_first)
        other_shares = work.shares(other)
        if load_of(other_shares) <= load_cap and step_of(other_shares) < step_of(shares):
            bag, shares = other, other_shares
    num_tries = min(_TRIES + len(lengths) // _SEQUENCES_PER_TRY, _MOST_TRIES)
    if len(targets) > 2:
        num_tries *= _TEXT_FACTOR
    bag = reduce_step(work, bag, SearchGoal(load_cap, targets, num_tries))
    return rename_bags(keep_at_home(work, bag, home, heaviest_first), home, lengths, work.sizes)


def _published_greedy(
    work: SequenceWork, lengths: Int[np.ndarray, " n"], heaviest_first: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """KnapFormer's assignment: the heaviest sequence first, to the bag that is least full for its size.

    A bag qualifies when the sequence is no heavier than its fair share and no shorter than its size; when
    none does, all bags of the largest size do. Ties go to the first bag.

    Reference: KnapFormer, arXiv 2508.06001, section 3.2.
    """
    mean = total_of(work.total) / int(work.sizes.sum())
    heaps = _heaps(work.sizes)
    largest = int(work.sizes[-1])
    weights, length_of = work.total.tolist(), lengths.tolist()
    chosen = [0] * len(weights)
    for index in heaviest_first.tolist():
        weight, size = weights[index], largest
        if len(heaps) > 1:
            fitting = (s for s in heaps if s * mean >= weight and length_of[index] >= s)
            size = min(fitting, key=lambda s: heaps[s][0], default=largest)
        fill, bag = heaps[size][0]
        heapq.heapreplace(heaps[size], (fill + weight / (size * mean), bag))
        chosen[index] = bag
    return np.array(chosen, np.int64)


def _least_share_greedy(work: SequenceWork, heaviest_first: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The heaviest sequence first, to the bag whose share is least with it; any size will do.

    Ties go to smaller bags, which send fewer rows, and then to the first.
    """
    heaps = _heaps(work.sizes)
    weights = work.total.tolist()
    chosen = [0] * len(weights)
    for index in heaviest_first.tolist():
        weight = weights[index]
        share, size = min((heap[0][0] + weight / size, size) for size, heap in heaps.items())
        chosen[index] = heaps[size][0][1]
        heapq.heapreplace(heaps[size], (share, chosen[index]))
    return np.array(chosen, np.int64)


def _heaps(sizes: Int[np.ndarray, " bags"]) -> dict[int, list[tuple[float, int]]]:
    """An empty heap of (share, bag) for every size, smallest first."""
    heaps: dict[int, list[tuple[float, int]]] = {}
    for bag, size in enumerate(sizes.tolist()):
        heaps.setdefault(size, []).append((0.0, bag))
    return heaps
