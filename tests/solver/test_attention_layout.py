"""Rows of attention items: no two share a row, the alignment rules, and block ranges that cover what is needed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from solver._attention_layout import block_ranges, copy_numbers, place_rows
from tests.oracles import placed_row

BLOCK = 32
SLICE = st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(1, 100), st.integers(1, 100))


def place(slices, block=BLOCK, num_devices=3, column=2):
    table = np.array(slices, np.int64).reshape(-1, 4)
    return place_rows(table[:, 0], table[:, 1], table[:, column], num_devices=num_devices, block=block)


def rows_of(placement, slices, column=2):
    """(device, slice, head) to its rows."""
    fields = placement.fields(np.arange(len(slices))).tolist()
    return {
        (s[0], i, h): [placed_row(fields[i], h, j) for j in range(s[column])]
        for i, s in enumerate(slices)
        for h in range(s[1])
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(SLICE, max_size=12), st.sampled_from([8, 16, 32, 40]))
def test_no_two_rows_share_a_place_and_items_obey_the_block(slices, block):
    placement = place(slices, block)
    taken = set()
    for (device, i, _), rows in rows_of(placement, slices).items():
        length = slices[i][2]
        assert rows == list(range(rows[0], rows[0] + length)), "contiguous"
        assert rows[0] % 8 == 0
        if length >= block:
            assert rows[0] % block == 0
        else:
            assert rows[0] // block == rows[-1] // block, "short items do not cross a block's edge"
        places = {(device, row) for row in range(rows[0], rows[0] - (-length // 8) * 8)}
        assert not places & taken
        taken |= places
        assert rows[-1] < placement.rows_per_device[device]
    assert not (placement.rows_per_device % block).any()
    with_items = {s[0] for s in slices}
    assert all((placement.rows_per_device[d] > 0) == (d in with_items) for d in range(3))


@settings(max_examples=40, deadline=None)
@given(st.lists(SLICE, max_size=12))
def test_a_block_holds_one_long_item_or_short_items_of_one_rounded_length(slices):
    kinds = {}
    for (device, i, h), rows in rows_of(place(slices), slices).items():
        length = slices[i][2]
        kind = (i, h) if length >= BLOCK else -(-length // 8)
        for block in {row // BLOCK for row in rows}:
            assert kinds.setdefault((device, block), kind) == kind


def test_rows_taken_are_the_least_for_whole_blocks():
    # 5 heads of 10 rows round to 16, two in a block; 2 heads of 33 rows take two blocks each.
    placement = place([(1, 5, 10, 1), (1, 2, 33, 1)])
    assert placement.rows_per_device.tolist() == [0, 3 * 32 + 4 * 32, 0]
    assert placement.base.tolist() == [4 * 32, 0], "long items come first"


@settings(max_examples=60, deadline=None)
@given(st.lists(SLICE, max_size=12))
def test_block_ranges_cover_every_needed_pair_and_long_items_nothing_else(slices):
    table = np.array(slices, np.int64).reshape(-1, 4)
    of, to = place(slices), place(slices, column=3)
    ranges = block_ranges(of, to, table[:, 0], table[:, 1], num_devices=3, block=BLOCK)
    assert [r.shape for r in ranges] == [(n // BLOCK, 2) for n in of.rows_per_device]
    keys = rows_of(to, slices, column=3)
    owners, needed = {}, {}
    for (device, i, h), rows in rows_of(of, slices).items():
        for block in {row // BLOCK for row in rows}:
            owners.setdefault((device, block), set()).add((i, h))
            needed.setdefault((device, block), set()).update(r // BLOCK for r in keys[device, i, h])
    for device, found in enumerate(ranges):
        for block, (start, stop) in enumerate(found.tolist()):
            wanted = needed.get((device, block), set())
            assert wanted <= set(range(start, stop))
            if not wanted:
                assert start == stop
            elif len(owners[device, block]) == 1 or of is to:
                # The hull of the needed blocks, whole blocks of the item's own rounded length.
                assert (start, stop) == (min(wanted), max(wanted) + 1)


def test_block_ranges_of_whole_items_visit_their_own_blocks_only():
    slices = [(0, 3, 70, 0), (0, 9, 5, 0), (2, 1, 32, 0)]
    table = np.array(slices)
    placement = place(slices)
    ranges = block_ranges(placement, placement, table[:, 0], table[:, 1], num_devices=3, block=BLOCK)
    assert ranges[0].tolist() == [[0, 3]] * 3 + [[3, 6]] * 3 + [[6, 9]] * 3 + [[9, 10], [10, 11], [11, 12]]
    assert ranges[1].shape == (0, 2)
    assert ranges[2].tolist() == [[0, 1]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 4)), max_size=12))
def test_copy_numbers_differ_where_heads_are_shared(slices):
    sequence, start, heads = np.array(slices, np.int64).reshape(-1, 3).T
    numbers = copy_numbers(sequence, start, start + heads)
    held, depth = {}, {}
    for number, s, first, count in zip(numbers.tolist(), sequence, start, heads, strict=True):
        for head in range(first, first + count):
            assert held.setdefault((s, head, number)) is None, "one copy of a head has one number"
            held[s, head, number] = True
            depth[s, head] = depth.get((s, head), 0) + 1
    for s in set(sequence.tolist()):
        # As many numbers as the most shared head has slices, no more.
        most = max(count for (of, _), count in depth.items() if of == s)
        assert set(numbers[sequence == s].tolist()) == set(range(most))
