"""Dealing sequences to the steps of a window so that no step exceeds the token budget."""

from __future__ import annotations

import heapq
import math

import numpy as np
from jaxtyping import Int64

# Candidate ends of length classes.
_MAX_CUTS = 400

# No bin was found for an item.
UNPLACED = -1

# A group with more items per bin than this is even enough when only loads are; placing its items one by one
# among all bins would take most of the time.
_SPARSE = 4


def pack_spread(
    sizes: Int64[np.ndarray, " n"],
    groups: Int64[np.ndarray, " n"],
    *,
    num_bins: int,
    capacity: int,
    max_items: int,
) -> Int64[np.ndarray, " n"] | None:
    """Longest first into the bin with least of the item's group, among those the emptiest that takes it.

    Each group is spread evenly over the bins, and is in every bin when it has enough items. Of a group with
    many items per bin that holds for one of them; the others even out the loads at the end.

    Args:
      sizes: size of every item, at least 1.
      groups: group of every item, 0, 1, ...
      num_bins, capacity, max_items: bins, and what each may hold in total size and in items.

    Returns:
      The bin of every item, or None when this rule finds none for some item.
    """
    bin_of_item = np.full(len(sizes), UNPLACED, np.int64)
    loads, counts = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    group_loads = np.zeros((int(groups.max(initial=-1)) + 1, num_bins), np.int64)
    for item in _spread_first(sizes, groups, num_bins).tolist():
        # Group first, then load: loads are at most the capacity.
        rank = group_loads[groups[item]] * (capacity + 1) + loads
        rank[(loads + sizes[item] > capacity) | (counts >= max_items)] = np.iinfo(np.int64).max
        b = int(np.argmin(rank))
        if loads[b] + sizes[item] > capacity or counts[b] >= max_items:
            return None
        bin_of_item[item] = b
        for load in (loads, group_loads[groups[item]]):
            load[b] += sizes[item]
        counts[b] += 1
    return _level(sizes, bin_of_item, num_bins=num_bins, capacity=capacity, max_items=max_items)


def _spread_first(
    sizes: Int64[np.ndarray, " n"], groups: Int64[np.ndarray, " n"], num_bins: int
) -> Int64[np.ndarray, " m"]:
    """Items of sparse groups and one per bin, of all lengths, of the others; longest first."""
    order = np.argsort(-sizes, kind="stable")
    chosen = np.zeros(len(sizes), bool)
    for group in range(int(groups.max(initial=-1)) + 1):
        items = order[groups[order] == group]
        if len(items) > _SPARSE * num_bins:
            items = items[np.arange(num_bins) * len(items) // num_bins]
        chosen[items] = True
    return order[chosen[order]]


def pack_balanced(
    sizes: Int64[np.ndarray, " n"], *, num_bins: int, capacity: int, max_items: int
) -> Int64[np.ndarray, " n"] | None:
    """Longest first into the emptiest bin: even bins, the rule known as LPT.

    Args:
      sizes: size of every item.
      num_bins, capacity, max_items: bins, and what each may hold in total size and in items.

    Returns:
      The bin of every item, or None when some bin overflows.

    Reference: R. Graham, Bounds on multiprocessing timing anomalies, 1969.
    """
    nowhere = np.full(len(sizes), UNPLACED, np.int64)
    return _level(sizes, nowhere, num_bins=num_bins, capacity=capacity, max_items=max_items)


def _level(
    sizes: Int64[np.ndarray, " n"],
    bin_of_item: Int64[np.ndarray, " n"],
    *,
    num_bins: int,
    capacity: int,
    max_items: int,
) -> Int64[np.ndarray, " n"] | None:
    """Deals the items that have no bin yet, longest first into the emptiest bin."""
    bin_of_item = bin_of_item.copy()
    there = np.flatnonzero(bin_of_item != UNPLACED)
    counts = np.bincount(bin_of_item[there], minlength=num_bins).tolist()
    loads = np.bincount(bin_of_item[there], weights=sizes[there], minlength=num_bins).astype(np.int64)
    heap = [(load, b) for b, load in enumerate(loads.tolist()) if counts[b] < max_items]
    heapq.heapify(heap)
    order = np.argsort(-sizes, kind="stable")
    for item in order[bin_of_item[order] == UNPLACED].tolist():
        if not heap:
            return None
        load, b = heap[0]
        load += int(sizes[item])
        if load > capacity:  # every other bin is fuller
            return None
        bin_of_item[item] = b
        counts[b] += 1
        if counts[b] < max_items:
            heapq.heapreplace(heap, (load, b))
        else:
            heapq.heappop(heap)
    return bin_of_item


def pack_tight(
    sizes: Int64[np.ndarray, " n"], *, num_bins: int, capacity: int, max_items: int
) -> Int64[np.ndarray, " n"] | None:
    """Longest first into the fullest bin that still takes it (best fit decreasing); arguments as above."""
    bin_of_item = np.full(len(sizes), UNPLACED, np.int64)
    room = np.full(num_bins, capacity, np.int64)
    counts = np.zeros(num_bins, np.int64)
    for item in np.argsort(-sizes, kind="stable").tolist():
        left = room - sizes[item]
        left[(left < 0) | (counts >= max_items)] = capacity + 1
        b = int(np.argmin(left))
        if left[b] > capacity:
            return None
        bin_of_item[item] = b
        room[b] -= sizes[item]
        counts[b] += 1
    return bin_of_item


def pack(
    sizes: Int64[np.ndarray, " n"], *, num_bins: int, capacity: int, max_items: int
) -> Int64[np.ndarray, " n"] | None:
    """An even deal if one fits, else a tight one, else None."""
    if len(sizes) and (int(sizes.max()) > capacity or int(sizes.sum()) > capacity * num_bins):
        return None
    limits = {"num_bins": num_bins, "capacity": capacity, "max_items": max_items}
    even = pack_balanced(sizes, **limits)
    return even if even is not None else pack_tight(sizes, **limits)


def length_classes(
    lengths: Int64[np.ndarray, " n"], *, rate: float, base: float = 0.0
) -> Int64[np.ndarray, " m"]:
    """Cuts lengths into classes so that reserving the longest of a class for all of it wastes least.

    A window draws at most ceil(rate * c) of a class of c samples, whatever the shuffle. The classes are the
    intervals that minimise the sum of ceil(rate * c) * (longest + base), by dynamic programming over distinct lengths.

    Args:
      lengths: lengths of a source's samples.
      rate: the part of the source that one window draws.
      base: what a sample takes beyond these lengths.

    Returns:
      The longest length of each class, ascending; a sample belongs to the first one not below its length.
    """
    distinct, counts = np.unique(lengths, return_counts=True)
    if len(distinct) > _MAX_CUTS:  # keep the longest of each ratio class: the dynamic program is quadratic
        ratio = (distinct[-1] / distinct[0]) ** (1.0 / _MAX_CUTS)
        step = np.floor(np.log(distinct / distinct[0]) / np.log(ratio)).astype(np.int64)
        last = np.flatnonzero(np.diff(step, append=step[-1] + 1))
        counts = np.diff(np.cumsum(counts)[last], prepend=0)
        distinct = distinct[last]
    below = np.concatenate([[0], np.cumsum(counts)])
    best = np.zeros(len(distinct) + 1)
    start = np.zeros(len(distinct) + 1, np.int64)
    for stop in range(1, len(distinct) + 1):
        # The tiny term breaks ties towards fewer classes.
        cost = (
            best[:stop]
            + np.ceil(rate * (below[stop] - below[:stop]) - 1e-9) * (distinct[stop - 1] + base)
            + 1e-6
        )
        start[stop] = int(np.argmin(cost))
        best[stop] = cost[start[stop]]
    tops, stop = [], len(distinct)
    while stop > 0:
        tops.append(int(distinct[stop - 1]))
        stop = int(start[stop])
    return np.asarray(tops[::-1], np.int64)


def window_steps(mean_sequences: float) -> int:
    """Steps that are planned together: about 8,000 sequences, or 16 steps.

    More would fill steps by one or two per cent better, and mix a small source's epochs over more steps.
    """
    steps = 2 ** math.floor(math.log2(max(8_000 / max(mean_sequences, 1.0), 1.0)))
    return min(max(steps, 16), 512)
