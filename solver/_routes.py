"""Index tables for moving rows between two layouts, as runs.

A *route* moves rows from layout A to layout B. It is a set of runs: rectangles of `heads` x `length` rows
that lie together in both layouts,

    A row of (h, j) = a_start + j * a_stride + h                                       (heads interleaved)
    B row of (h, j) = base + (k // per_group) * group + (k % per_group) * stride + j,  k = first + h

Runs are sorted by (source, destination), so the runs that leave a device in order fill its send buffer, and
the runs that reach a device in order fill its receive buffer. Rows that stay are runs of their own and enter
no buffer. Hosts build and ship runs, a few hundred integers a device; devices expand them to row indices
(`parallel.expand_route`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver._attention_layout import Placement

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint or overlapping intervals of sequences held by devices: arrays of shape (n,)."""

    sequence: Int
    start: Int
    stop: Int
    device: Int
    row: Int  # first row on the device

    @property
    def length(self) -> Int:
        return self.stop - self.start


def pack_intervals(sequence: Int, start: Int, stop: Int, device: Int, num_devices: int) -> Intervals:
    """Order intervals by (device, sequence, start) and lay their rows out one after another on each device."""
    keep = np.flatnonzero(stop > start)
    keep = keep[np.lexsort((start[keep], sequence[keep], device[keep]))]
    sequence, start, stop, device = sequence[keep], start[keep], stop[keep], device[keep]
    end = np.cumsum(stop - start)
    begin_of_device = np.concatenate([[0], end])[np.searchsorted(device, np.arange(num_devices))]
    return Intervals(sequence, start, stop, device, end - (stop - start) - begin_of_device[device])


@dataclass(frozen=True, slots=True)
class Route:
    """All runs of a move between two layouts, over all devices; arrays of shape (num_runs,) unless said otherwise.

    Attributes:
        source, target: devices; runs are sorted by (source, target) and then by sequence.
        a_start, in_image: first row of the run in A's stream, and whether that stream is the image stream (its rows
            follow the text rows when both are moved together).
        heads, length: the rectangle.
        b_fields: (num_runs, 5) base, first, per_group, group, stride.
        copy: which copy of its A rows this run makes; 0 unless a row goes to several devices.
        num_heads: a_stride, the rows of one A token.
        rows_in, rows_out: (num_devices,) rows used in A (tokens times heads) and in B.
        num_devices: devices of the exchange.
    """

    source: Int
    target: Int
    a_start: Int
    in_image: NDArray[np.bool_]
    heads: Int
    length: Int
    b_fields: Int
    copy: Int
    num_heads: int
    rows_in: Int
    rows_out: Int
    num_devices: int

    @property
    def rows(self) -> Int:
        return self.heads * self.length

    def sent(self) -> Int:
        """(num_devices, num_devices) rows that device s sends to device t; the diagonal (rows that stay) is zero."""
        flat = np.bincount(
            self.source * self.num_devices + self.target, weights=self.rows, minlength=self.num_devices**2
        )
        matrix = flat.reshape(self.num_devices, self.num_devices).astype(np.int64)
        np.fill_diagonal(matrix, 0)
        return matrix


def _overlaps(a: Intervals, b: Intervals) -> tuple[Int, Int]:
    """Index pairs (i, j) of intervals of `a` and `b` that overlap; `a` covers every token exactly once."""
    size = int(max(a.stop.max(initial=0), b.stop.max(initial=0))) + 1
    order = np.lexsort((a.start, a.sequence))
    begin = (a.sequence * size + a.start)[order]
    # a's intervals tile each sequence, so those meeting [start, stop) are consecutive in this order.
    first = np.searchsorted(begin, b.sequence * size + b.start, side="right") - 1
    last = np.searchsorted(begin, b.sequence * size + b.stop, side="left")
    count = last - first
    j = np.repeat(np.arange(len(count)), count)
    i = order[np.repeat(first, count) + np.arange(len(j)) - np.repeat(np.cumsum(count) - count, count)]
    return i, j


def token_route(a: Intervals, b: Intervals, *, num_devices: int) -> Route:
    """The route that moves one stream's tokens from layout `a` to layout `b`, both covering every token once."""
    i, j = _overlaps(a, b)
    low = np.maximum(a.start[i], b.start[j])
    length = np.minimum(a.stop[i], b.stop[j]) - low
    one = np.ones_like(low)
    fields = np.stack([b.row[j] + low - b.start[j], 0 * one, one, 0 * one, 0 * one], -1)
    return _sorted_route(
        source=a.device[i],
        target=b.device[j],
        a_start=a.row[i] + low - a.start[i],
        in_image=np.zeros(len(low), bool),
        heads=one,
        length=length,
        b_fields=fields,
        copy=0 * one,
        key=(b.start[j], a.sequence[i]),
        num_heads=1,
        rows_in=_rows_of(a, num_devices),
        rows_out=_rows_of(b, num_devices),
        num_devices=num_devices,
    )


@dataclass(frozen=True, slots=True)
class HeadItems:
    """Head slices seen as targets of a route: the token range each needs, in joint positions, and its placement."""

    sequence: Int
    head_start: Int
    head_stop: Int
    start: Int
    stop: Int
    device: Int
    copy: Int
    placement: Placement


def head_route(
    text: Intervals,
    image: Intervals,
    text_lengths: Int,
    items: HeadItems,
    *,
    num_heads: int,
    num_devices: int,
) -> Route:
    """The route from token layout ([text rows; image rows], each times heads) to the rows of attention items."""
    joint = Intervals(
        sequence=np.concatenate([text.sequence, image.sequence]),
        start=np.concatenate([text.start, image.start + text_lengths[image.sequence]]),
        stop=np.concatenate([text.stop, image.stop + text_lengths[image.sequence]]),
        device=np.concatenate([text.device, image.device]),
        row=np.concatenate([text.row, image.row]),
    )
    wanted = Intervals(items.sequence, items.start, items.stop, items.device, np.zeros_like(items.start))
    i, j = _overlaps(joint, wanted)
    low = np.maximum(joint.start[i], wanted.start[j])
    length = np.minimum(joint.stop[i], wanted.stop[j]) - low
    fields = items.placement.fields(j)
    fields[:, 0] += low - wanted.start[j]
    return _sorted_route(
        source=joint.device[i],
        target=items.device[j],
        a_start=(joint.row[i] + low - joint.start[i]) * num_heads + items.head_start[j],
        in_image=i >= len(text.sequence),
        heads=items.head_stop[j] - items.head_start[j],
        length=length,
        b_fields=fields,
        copy=items.copy[j],
        key=(low, items.head_start[j], joint.sequence[i]),
        num_heads=num_heads,
        rows_in=(_rows_of(text, num_devices) + _rows_of(image, num_devices)) * num_heads,
        rows_out=items.placement.rows_per_device,
        num_devices=num_devices,
    )


def _rows_of(intervals: Intervals, num_devices: int) -> Int:
    return np.bincount(intervals.device, weights=intervals.length, minlength=num_devices).astype(np.int64)


def _sorted_route(*, key: tuple[Int, ...], **fields) -> Route:
    order = np.lexsort((*key, fields["target"], fields["source"]))
    arrays = ("source", "target", "a_start", "in_image", "heads", "length", "b_fields", "copy")
    return Route(**{name: value[order] if name in arrays else value for name, value in fields.items()})


def round_of_pair(num_devices: int) -> Int:
    """(num_devices, num_devices) round in which device s sends to device t in the padded exchange; 0 on the diagonal.

    In each of the num_devices - 1 rounds every device sends to one other and receives from one other. With a power of
    two devices, round r pairs s with s XOR r, so that traffic inside bags of 2 fills one round, inside bags of 4
    three; otherwise round r sends s to (s + r) mod num_devices.
    """
    s, t = np.arange(num_devices)[:, None], np.arange(num_devices)[None, :]
    if num_devices & (num_devices - 1) == 0:
        return s ^ t
    return (t - s) % num_devices


def rows_of_rounds(rows: Int, round_of: Int) -> Int:
    """Rows that each round of the padded exchange has room for: those of its busiest pair; round 0 is a device itself.

    Args:
        rows: (num_devices, num_devices) rows that device s sends to device t.
        round_of: from `round_of_pair`.
    """
    most = np.zeros(len(rows), np.int64)
    np.maximum.at(most, round_of, rows)
    return most
