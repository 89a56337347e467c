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
    bin_of_item = np.full(len(sizes), UNPLACED, np.int64)
    counts = [0] * num_bins
    heap = [(0, b) for b in range(num_bins)]
    for item in np.argsort(-sizes, kind="stable").tolist():
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


def length_classes(lengths: Int64[np.ndarray, " n"], *, rate: float) -> Int64[np.ndarray, " m"]:
    """Cuts lengths into classes so that reserving the longest of a class for all of it wastes least.

    A window draws at most ceil(rate * c) of a class of c samples, whatever the shuffle. The classes are the
    intervals that minimise the sum of ceil(rate * c) * longest, by dynamic programming over distinct lengths.

    Args:
      lengths: lengths of a source's samples.
      rate: the part of the source that one window draws.

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
        cost = best[:stop] + np.ceil(rate * (below[stop] - below[:stop]) - 1e-9) * distinct[stop - 1] + 1e-6
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
