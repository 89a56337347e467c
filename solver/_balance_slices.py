"""Slice tables of bags: tokens and heads of each sequence, cut in equal parts over the devices of its bag."""

import heapq
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from solver._bags import BagLayout
from solver._plan import BalanceProblem


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """One entry for every (device, sequence of its bag), by device, then sequence; part r of size of a
    sequence.

    Attributes:
        by_bag: sequences by bag, then number.
        sequence: the sequence of each part.
        device: its device.
        rank: which part of the sequence, from 0: the device's place in its bag.
        size: parts of the sequence: devices of its bag.
    """

    by_bag: Int[np.ndarray, " n"]
    sequence: Int[np.ndarray, " parts"]
    device: Int[np.ndarray, " parts"]
    rank: Int[np.ndarray, " parts"]
    size: Int[np.ndarray, " parts"]


def make_parts(bag_of_sequence: Int[np.ndarray, " n"], layout: BagLayout) -> Parts:
    """List the parts that bags cut their sequences in, already in the order of the slice tables."""
    by_bag = np.argsort(bag_of_sequence, kind="stable")
    in_bag = np.bincount(bag_of_sequence, minlength=len(layout.size))
    bag_of_device = layout.bag_of_device
    count = in_bag[bag_of_device]
    device = np.repeat(np.arange(len(count)), count)
    # Entry i of a device is entry i of its bag in by_bag.
    shift = (np.cumsum(in_bag) - in_bag)[bag_of_device] - (np.cumsum(count) - count)
    rank = np.arange(len(count)) - layout.first_device[bag_of_device]
    return Parts(
        by_bag=by_bag,
        sequence=by_bag[np.arange(len(device)) + shift[device]],
        device=device,
        rank=rank[device],
        size=layout.size[bag_of_device][device],
    )


def cut_tokens(
    problem: BalanceProblem, bag_of_sequence: Int[np.ndarray, " n"], layout: BagLayout, parts: Parts
) -> Int[np.ndarray, "token_slices 4"]:
    """Cut text and image tokens of every sequence in contiguous parts of floor or ceil size.

    The parts of ceil size of successive sequences go round the bag's devices: first all text remainders, then
    all image remainders from where those ended. A stretch of consecutive places around a circle covers every
    place equally often but for one, so a device's text, image and all tokens are each within one of the
    share.
    """
    text = problem.text_lengths
    image = problem.lengths - text
    size = layout.size[bag_of_sequence]
    offset = np.zeros(len(size), np.int64)
    pieces = []
    for tokens, origin in ((text, np.zeros_like(text)), (image, text)):
        if tokens.any():
            extra = tokens % size
            before, totals = _running(extra, bag_of_sequence, parts.by_bag, len(layout.size))
            start, num = _deal(tokens // size, extra, (offset + before) % size, parts)
            start += origin[parts.sequence]
            pieces.append((start, start + num))
            offset = totals[bag_of_sequence]
    table = np.empty((len(parts.sequence), len(pieces), 4), np.int32)
    table[:, :, 0], table[:, :, 3] = parts.sequence[:, None], parts.device[:, None]
    for place, (start, stop) in enumerate(pieces):
        table[:, place, 1], table[:, place, 2] = start, stop
    if len(pieces) == 2:  # the last part of the text and the first of the image are one run on one device
        joined = (table[:, 0, 2] == table[:, 1, 1]) & (table[:, 0, 1] < table[:, 0, 2])
        table[joined, 1, 1] = table[joined, 0, 1]
        table[joined, 0, 2] = table[joined, 0, 1]
    slices = table.reshape(-1, 4)
    return slices[slices[:, 1] < slices[:, 2]]


def _running(
    values: Int[np.ndarray, " n"], bag: Int[np.ndarray, " n"], by_bag: Int[np.ndarray, " n"], num_bags: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " bags"]]:
    """For every sequence the sum over the earlier ones of its bag, and the sum of every bag."""
    totals = np.bincount(bag, weights=values, minlength=num_bags).astype(np.int64)
    ordered = values[by_bag]
    before = np.empty_like(values)
    before[by_bag] = np.cumsum(ordered) - ordered
    return before - (np.cumsum(totals) - totals)[bag], totals


def _deal(
    whole: Int[np.ndarray, " n"], extra: Int[np.ndarray, " n"], first: Int[np.ndarray, " n"], parts: Parts
) -> tuple[Int[np.ndarray, " parts"], Int[np.ndarray, " parts"]]:
    """Start and number of every part's tokens: `whole` each, one more for `extra` parts round from `first`.

    The longer parts occupy places [first, first + extra) of a circle of size places, of which place r has
    before it those in [first, r) and those that wrapped round to [0, first + extra - size).
    """
    sequence, rank, size = parts.sequence, parts.rank, parts.size
    whole, first, end = whole[sequence], first[sequence], (first + extra)[sequence]
    wrapped_end = end - size
    longer_before = np.maximum(np.minimum(rank, end) - first, 0) + np.maximum(
        np.minimum(rank, wrapped_end), 0
    )
    longer = ((rank >= first) & (rank < end)) | (rank < wrapped_end)
    return rank * whole + longer_before, whole + longer


def cut_heads(problem: BalanceProblem, parts: Parts) -> Int[np.ndarray, "head_slices 6"]:
    """Deal the heads of every sequence to the devices of its bag.

    Evenly where the bag's size divides the heads. Otherwise the left-over heads go to the devices of the bag
    with the least attention work so far, long sequences first. In a bag of more devices than heads, the line
    of all (head, query) of a sequence is cut in equal contiguous parts.
    """
    length = problem.lengths[parts.sequence]
    whole, left_over = np.divmod(problem.num_heads, parts.size)
    table = np.zeros((len(length), 6), np.int32)
    table[:, 0], table[:, 5] = parts.sequence, parts.device
    table[:, 1] = parts.rank * whole
    table[:, 2] = table[:, 1] + whole
    table[:, 4] = length
    for size in np.unique(parts.size[(left_over > 0) & (whole > 0)]):
        mine = parts.size == size
        start, stop = _deal_unevenly(problem, int(size), parts, mine)
        table[mine, 1], table[mine, 2] = start, stop
    if (whole > 0).all():
        return table[table[:, 4] > 0]
    split = _split_by_query(problem, parts)
    pairs = np.stack([np.where((whole > 0)[:, None], table, split[:, 0]), split[:, 1]], axis=1)
    pairs[whole > 0, 1, 1:5] = 0
    pairs = pairs.reshape(-1, 6)
    return pairs[(pairs[:, 3] < pairs[:, 4]) & (pairs[:, 1] < pairs[:, 2])]


def _deal_unevenly(
    problem: BalanceProblem, size: int, parts: Parts, mine: Bool[np.ndarray, " parts"]
) -> tuple[Int[np.ndarray, " mine"], Int[np.ndarray, " mine"]]:
    """First and last head, half-open, of the parts in bags of a size that does not divide the heads."""
    sequence, rank = parts.sequence[mine], parts.rank[mine]
    first_device = (parts.device - parts.rank)[mine]
    first_parts = np.flatnonzero(rank == 0)
    members, bags = sequence[first_parts], first_device[first_parts]
    whole, left_over = divmod(problem.num_heads, size)
    heads = np.full((len(members), size), whole, np.int64)
    devices = {bag: [(0, place) for place in range(size)] for bag in bags.tolist()}  # heaps of (work, place)
    lengths = problem.lengths[members]
    for index in np.argsort(-lengths, kind="stable").tolist():
        heap, work = devices[int(bags[index])], int(lengths[index]) ** 2
        for least_work, place in [heapq.heappop(heap) for _ in range(left_over)]:
            heads[index, place] += 1
            heapq.heappush(heap, (least_work + work, place))
    stop = np.cumsum(heads, axis=1)
    row = np.empty(len(problem.lengths), np.int64)
    row[members] = np.arange(len(members))
    return (stop - heads)[row[sequence], rank], stop[row[sequence], rank]


def _split_by_query(problem: BalanceProblem, parts: Parts) -> Int[np.ndarray, "parts 2 6"]:
    """The at most two rectangles of every part when the line of (head, query) is cut evenly.

    A part is no longer than one head's queries when there are at least as many parts as heads, so it touches
    two heads at most; the second rectangle is empty when it touches one.
    """
    length = problem.lengths[parts.sequence]
    line = problem.num_heads * length
    start, stop = parts.rank * line // parts.size, (parts.rank + 1) * line // parts.size
    head = start // np.maximum(length, 1)
    table = np.empty((len(length), 2, 6), np.int64)
    table[:, :, 0], table[:, :, 5] = parts.sequence[:, None], parts.device[:, None]
    table[:, 0, 1:5] = np.stack(
        [head, head + 1, start - head * length, np.minimum(stop - head * length, length)], axis=1
    )
    table[:, 1, 1:5] = np.stack(
        [head + 1, head + 2, np.zeros_like(head), np.maximum(stop - (head + 1) * length, 0)], axis=1
    )
    return table
