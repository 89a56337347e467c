"""Where the rows of every attention work item lie on its device.

An item is one (sequence, head): its rows are contiguous, it is a sequence with one head. A device computes
attention block by block (`block` rows at a time), and a block that holds parts of several long items would
visit the keys of all of them. So rows are placed by two rules:

* an item of at least `block` rows starts on a block boundary and takes whole blocks;
* shorter items are rounded up to a multiple of `ROUND` rows, and items of the same rounded length share
  blocks without crossing a boundary, `block // rounded` of them in each.

The position of row j of the k-th head of a class is then an affine formula with one division,

    base + (k // per_group) * group + (k % per_group) * stride + j

with per_group = 1 and stride = group for long items, and group = block for short ones. A table of seven
integers per head slice (these five, heads and rows) describes all its rows, and the device expands it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUND = 8


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows of head slices on their devices, one entry per head slice (arrays of shape (num_slices,), int64)."""

    base: NDArray[np.int64]
    first: NDArray[np.int64]  # k of the slice's first head within its class
    per_group: NDArray[np.int64]
    group: NDArray[np.int64]
    stride: NDArray[np.int64]
    rows_per_device: NDArray[np.int64]  # (num_devices,), a multiple of the block

    def fields(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The five integers (base, first, per_group, group, stride) of the given slices: shape (n, 5)."""
        return np.stack(
            [
                self.base[index],
                self.first[index],
                self.per_group[index],
                self.group[index],
                self.stride[index],
            ],
            -1,
        )


def place_rows(
    device: NDArray[np.int64],
    heads: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    num_devices: int,
    block: int,
) -> Placement:
    """Place `heads[i]` items of `rows[i]` rows each on `device[i]`, in the order given within a class.

    Args:
        device: (n,) device of each head slice.
        heads: (n,) number of heads in the slice; each is an item.
        rows: (n,) rows of one item, at least 1.
        num_devices: number of devices.
        block: attention block size in rows; a multiple of 8.

    Returns:
        The placement; a device without items has no rows.
    """
    rounded = np.where(rows >= block, -(-rows // block) * block, -(-rows // ROUND) * ROUND)
    per_group = np.maximum(block // rounded, 1)
    group = np.maximum(rounded, block)
    # One class per (device, rounded length); classes of a device follow each other, longest first.
    order = np.lexsort((np.arange(len(rows)), -rounded, device))
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (np.diff(device[order]) != 0) | (np.diff(rounded[order]) != 0)
    class_of_sorted = np.cumsum(is_new) - 1
    heads_before = np.cumsum(heads[order]) - heads[order]
    starts = np.flatnonzero(is_new)
    class_heads = np.add.reduceat(heads[order], starts) if len(starts) else np.zeros(0, np.int64)
    first = heads_before - heads_before[starts][class_of_sorted]
    class_rows = -(-class_heads // per_group[order][starts]) * group[order][starts]
    class_device = device[order][starts]
    rows_per_device = np.bincount(class_device, weights=class_rows, minlength=num_devices).astype(np.int64)
    base_of_class = np.cumsum(class_rows) - class_rows
    device_base = np.cumsum(rows_per_device) - rows_per_device
    base_of_class -= device_base[class_device]

    inverse = np.empty(len(rows), np.int64)
    inverse[order] = np.arange(len(rows))
    return Placement(
        base=base_of_class[class_of_sorted][inverse],
        first=first[inverse],
        per_group=per_group,
        group=group,
        stride=rounded,
        rows_per_device=rows_per_device,
    )


def split_heads(
    slices: NDArray[np.int64], work: NDArray[np.int64], num_groups: int
) -> list[NDArray[np.int64]]:
    """Cut head slices into groups, so that every device has about as much of each slice, and of work, in every group.

    Heads that do not divide go to the groups there and back, those of the most work first.

    Args:
        slices: (n, 6) rows of `BalancePlan.head_slices`.
        work: (n,) attention work of one head of each.
        num_groups: groups to make.

    Returns:
        The slices of each group, in the order given; together they have the heads of `slices`, each once.
    """
    heads, device = slices[:, 2] - slices[:, 1], slices[:, 5]
    counts = np.repeat((heads // num_groups)[:, None], num_groups, axis=1)
    order = np.lexsort((-work, device))
    owner = np.repeat(order, heads[order] % num_groups)
    number = np.arange(len(owner)) - np.searchsorted(device[owner], device[owner])
    place = number % (2 * num_groups)
    np.add.at(counts, (owner, np.minimum(place, 2 * num_groups - 1 - place)), 1)
    stop = slices[:, 1:2] + np.cumsum(counts, axis=1)
    groups = []
    for g in range(num_groups):
        one = slices.copy()
        one[:, 1], one[:, 2] = stop[:, g] - counts[:, g], stop[:, g]
        groups.append(one[counts[:, g] > 0])
    return groups


def copy_numbers(
    sequence: NDArray[np.int64], head_start: NDArray[np.int64], head_stop: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Number head slices so that those which share a (sequence, head) differ, from 0 and as low as possible.

    Slices share heads where queries of an item are divided. All arrays have shape (n,).
    """
    order = np.lexsort((head_stop, head_start, sequence))
    sequence, head_start, head_stop = sequence[order], head_start[order], head_stop[order]
    place = np.arange(len(order))
    is_new = np.ones(len(order), bool)
    is_new[1:] = (np.diff(sequence) != 0) | (np.diff(head_start) != 0)
    number = place - np.maximum.accumulate(np.where(is_new, place, 0))
    # Right where slices share their first head or none. Elsewhere an earlier slice reaches past this one's first head.
    key = sequence * (int(head_stop.max(initial=0)) + 1)
    reach = np.maximum.accumulate(key + head_stop)
    overlaps = np.flatnonzero(is_new[1:] & (reach[:-1] > (key + head_start)[1:]))
    for wrong in np.unique(sequence[1:][overlaps]).tolist():
        mine = slice(*np.searchsorted(sequence, [wrong, wrong + 1]))
        number[mine] = _lowest_free(head_start[mine].tolist(), head_stop[mine].tolist())
    numbers = np.empty_like(number)
    numbers[order] = number
    return numbers


def _lowest_free(starts: list[int], stops: list[int]) -> list[int]:
    """Numbers of intervals sorted by start, such that those that meet differ."""
    busy_until: list[int] = []
    numbers = []
    for start, stop in zip(starts, stops, strict=True):
        number = next((i for i, end in enumerate(busy_until) if end <= start), len(busy_until))
        busy_until[number : number + 1] = [stop]
        numbers.append(number)
    return numbers


def block_ranges(
    of: Placement,
    to: Placement,
    device: NDArray[np.int64],
    heads: NDArray[np.int64],
    *,
    num_devices: int,
    block: int,
) -> list[NDArray[np.int32]]:
    """For each block of layout `of`, the half-open range of blocks of layout `to` that its items need.

    Both placements describe the same head slices (queries and keys of the same items). Returns one (blocks, 2) array
    per device; a block without items has an empty range. Items sharing a block make it visit the hull of their ranges.
    """
    slice_of_item = np.repeat(np.arange(len(heads)), heads)
    head_of_item = np.arange(len(slice_of_item)) - np.repeat(np.cumsum(heads) - heads, heads)

    def first_and_count(p: Placement) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        k = p.first[slice_of_item] + head_of_item
        start = p.base[slice_of_item] + (k // p.per_group[slice_of_item]) * p.group[slice_of_item]
        return start // block, p.group[slice_of_item] // block

    of_first, of_count = first_and_count(of)
    to_first, to_count = first_and_count(to)
    num_blocks = of.rows_per_device // block
    offset = np.cumsum(num_blocks) - num_blocks
    item = np.repeat(np.arange(len(of_first)), of_count)
    within = np.arange(len(item)) - np.repeat(np.cumsum(of_count) - of_count, of_count)
    where = offset[device[slice_of_item[item]]] + of_first[item] + within
    total = int(num_blocks.sum())
    low = np.full(total, np.iinfo(np.int32).max, np.int64)
    high = np.zeros(total, np.int64)
    np.minimum.at(low, where, to_first[item])
    np.maximum.at(high, where, to_first[item] + to_count[item])
    ranges = np.stack([np.minimum(low, high), high], -1).astype(np.int32)
    return np.split(ranges, np.cumsum(num_blocks)[:-1]) if num_devices else []
