"""Keeping sequences near their home bags where that costs nothing."""

import heapq

import numpy as np
from jaxtyping import Int

from solver._balance_search import SequenceWork, load_of
from solver._plan import total_of

# Room between the mean and the fullest bag below which keeping sequences at home never works out.
_ROOM = 1.05


def keep_at_home(
    work: SequenceWork,
    bag_of_sequence: Int[np.ndarray, " n"],
    home: Int[np.ndarray, " n"],
    heaviest_first: Int[np.ndarray, " n"],
) -> Int[np.ndarray, " n"]:
    """An assignment with most sequences at home, if one as good as this is found; else this one.

    When a sequence that no bag can shorten decides the step, the other bags have room. As good: no more of
    the most linear work, attention, load, and, in bags of different sizes, no more rows sent.
    """
    shares = work.shares(bag_of_sequence)
    load, parts = load_of(shares), shares.max(axis=1)
    if load * int(work.sizes.sum()) < _ROOM * total_of(work.total):
        return bag_of_sequence
    found = _fill_homes(work, home, heaviest_first, (float(parts[0]), float(parts[1]), load))
    if found is None:
        return bag_of_sequence
    found_shares = work.shares(found)
    as_good = (
        load_of(found_shares) <= load
        and (found_shares.max(axis=1) <= parts).all()
        and work.rows_sent(found) <= work.rows_sent(bag_of_sequence)
    )
    return found if as_good else bag_of_sequence


def _fill_homes(
    work: SequenceWork,
    home: Int[np.ndarray, " n"],
    heaviest_first: Int[np.ndarray, " n"],
    caps: tuple[float, float, float],
) -> Int[np.ndarray, " n"] | None:
    """Heaviest first, each sequence home if it fits under the caps; then the rest to the bag of least load.

    The caps are on a device's linear work, attention and load. None if one fits nowhere.
    """
    sizes = work.sizes.tolist()
    linear_cap, attention_cap, load_cap = caps
    linear, attention = [0.0] * len(sizes), [0.0] * len(sizes)
    (linear_of, attention_of), homes = work.parts.tolist(), home.tolist()
    chosen, left = list(homes), []

    def fits(index: int, bag: int) -> bool:
        with_linear = linear[bag] + linear_of[index] / sizes[bag]
        with_attention = attention[bag] + attention_of[index] / sizes[bag]
        if (
            with_linear > linear_cap
            or with_attention > attention_cap
            or with_linear + with_attention > load_cap
        ):
            return False
        linear[bag], attention[bag] = with_linear, with_attention
        chosen[index] = bag
        return True

    for index in heaviest_first.tolist():
        if not fits(index, homes[index]):
            left.append(index)
    heap = [(linear[bag] + attention[bag], bag) for bag in range(len(sizes))]
    heapq.heapify(heap)
    for index in left:
        bag = heap[0][1]
        if not fits(index, bag):
            return None
        heapq.heapreplace(heap, (linear[bag] + attention[bag], bag))
    return np.array(chosen, np.int64)


def rename_bags(
    bag_of_sequence: Int[np.ndarray, " n"],
    home: Int[np.ndarray, " n"],
    lengths: Int[np.ndarray, " n"],
    sizes: Int[np.ndarray, " bags"],
) -> Int[np.ndarray, " n"]:
    """Permute bags of one size so that many tokens are in their home bag: the largest overlap first."""
    num_bags = len(sizes)
    same_size = np.flatnonzero(sizes[bag_of_sequence] == sizes[home])
    pairs, group = np.unique(bag_of_sequence[same_size] * num_bags + home[same_size], return_inverse=True)
    tokens = np.bincount(group, weights=lengths[same_size], minlength=len(pairs))
    name = [-1] * num_bags
    taken = [False] * num_bags
    for pair in pairs[np.argsort(-tokens, kind="stable")].tolist():
        bag, wanted = divmod(pair, num_bags)
        if name[bag] < 0 and not taken[wanted]:
            name[bag], taken[wanted] = wanted, True
    free: dict[int, list[int]] = {}
    for bag, size in reversed(list(enumerate(sizes.tolist()))):
        if not taken[bag]:
            free.setdefault(size, []).append(bag)
    for bag, size in enumerate(sizes.tolist()):
        if name[bag] < 0:
            name[bag] = free[size].pop()
    return np.array(name)[bag_of_sequence]
