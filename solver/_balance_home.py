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
    the most of any part of the work, of load, and, in bags of different sizes, of rows sent.
    """
    shares = work.shares(bag_of_sequence)
    load, parts = load_of(shares), shares.max(axis=1)
    if load * int(work.sizes.sum()) < _ROOM * total_of(work.total):
        return bag_of_sequence
    found = _fill_homes(work, home, heaviest_first, parts.tolist(), load)
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
    caps: list[float],
    load_cap: float,
) -> Int[np.ndarray, " n"] | None:
    """Heaviest first, each sequence home if it fits under the caps; then the rest to the bag of least load.

    The caps are on a device's share of each part of the work, and on its load. None if one fits nowhere.
    """
    sizes = work.sizes.tolist()
    held = [[0.0] * len(caps) for _ in sizes]
    parts_of, homes = work.parts.T.tolist(), home.tolist()
    chosen, left = list(homes), []

    def fits(index: int, bag: int) -> bool:
        size = sizes[bag]
        shares = [share + part / size for share, part in zip(held[bag], parts_of[index], strict=True)]
        if sum(shares) > load_cap or any(share > cap for share, cap in zip(shares, caps, strict=True)):
            return False
        held[bag] = shares
        chosen[index] = bag
        return True

    for index in heaviest_first.tolist():
        if not fits(index, homes[index]):
            left.append(index)
    heap = [(sum(shares), bag) for bag, shares in enumerate(held)]
    heapq.heapify(heap)
    for index in left:
        bag = heap[0][1]
        if not fits(index, bag):
            return None
        heapq.heapreplace(heap, (sum(held[bag]), bag))
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
