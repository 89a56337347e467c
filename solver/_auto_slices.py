"""Slice tables from pieces: what devices hold of sequences."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from solver._plan import BalanceProblem


class Pieces(NamedTuple):
    """Stretches [start, stop) of sequences on devices; arrays of shape (n,).

    Of tokens only their number counts; of attention they are stretches of the (head, query) line, which is
    `head * length + query`.
    """

    sequence: Int[np.ndarray, " n"]
    device: Int[np.ndarray, " n"]
    start: Int[np.ndarray, " n"]
    stop: Int[np.ndarray, " n"]


def _join(pieces: Sequence[Pieces]) -> Pieces:
    return Pieces(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))


def token_slices_of(text: Sequence[Pieces], image: Sequence[Pieces]) -> Int[np.ndarray, "slices 4"]:
    """The token layout: the pieces of a sequence one after another by device, text first."""
    joined = [_join(pieces) for pieces in (text, image)]
    kind = np.repeat([0, 1], [len(x.sequence) for x in joined])
    sequence, device, start, stop = _join(joined)
    order = np.lexsort((device, kind, sequence))
    sequence, device, count = sequence[order], device[order], (stop - start)[order]
    end = np.cumsum(count)
    is_first = np.ones(len(sequence), bool)
    is_first[1:] = sequence[1:] != sequence[:-1]
    first = np.flatnonzero(is_first)
    begin = end - count
    base = np.repeat(begin[first], np.diff(np.append(first, len(sequence))))
    # Neighbours on one device, the last of the text and the first of the image, are one run.
    is_new = is_first.copy()
    is_new[1:] |= device[1:] != device[:-1]
    new = np.flatnonzero(is_new)
    last = np.append(new[1:], len(sequence))[: len(new)] - 1
    table = np.stack([sequence[new], (begin - base)[new], (end - base)[last], device[new]], 1)
    return table[np.lexsort((table[:, 1], table[:, 0], table[:, 3]))].astype(np.int32)


def head_slices_of(problem: BalanceProblem, pieces: Sequence[Pieces]) -> Int[np.ndarray, "slices 6"]:
    """The attention layout: each stretch as its whole heads and a part of one before and after."""
    sequence, device, start, stop = _join(pieces)
    keep = stop > start
    sequence, device, start, stop = sequence[keep], device[keep], start[keep], stop[keep]
    length = problem.lengths[sequence]
    first_whole, last_whole = -(-start // length), stop // length
    in_one_head = last_whole < first_whole
    zero = np.zeros_like(length)
    tables = []
    for mask, head_start, head_stop, query_start, query_stop in (
        (in_one_head, last_whole, first_whole, start % length, stop % length),
        (~in_one_head & (start % length > 0), first_whole - 1, first_whole, start % length, length),
        (last_whole > first_whole, first_whole, last_whole, zero, length),
        (~in_one_head & (stop % length > 0), last_whole, last_whole + 1, zero, stop % length),
    ):
        columns = (sequence, head_start, head_stop, query_start, query_stop, device)
        tables.append(np.stack([column[mask] for column in columns], 1))
    table = np.concatenate(tables)
    return table[np.lexsort((table[:, 3], table[:, 1], table[:, 0], table[:, 5]))].astype(np.int32)
