"""Whole sequences to bins of given capacities in several resources at once."""

import numpy as np
from jaxtyping import Float, Int

from solver._auto_bins import Preferences, even_out, totals
from solver._compiled import compiled

# Bins as good as the best for an item: what they need may be less by so much of the item, and of what a bin may be off.
_OF_ITEM = 0.5
_OF_OFF = (4.0, 0.5)  # the more, the more stay at home; the second where the first leaves a bin far off
_FAR_OFF = 2.0


@compiled
def fill_greedily(
    values: Float[np.ndarray, "resources n"],
    capacity: Float[np.ndarray, "resources bins"],
    slack: Float[np.ndarray, " resources"],
    home: Int[np.ndarray, " n"],
) -> Int[np.ndarray, " n"]:
    """A bin for each item, largest first: of those that need what is special about the item its home, or the emptiest.

    Largest is longest, and the items that are left have the less attention for a token the later it is. So a bin that
    needs much attention for a token must get it early, while tokens can be had to the end: of attention (and of text)
    what counts is how much a bin needs beyond what comes with its tokens at the ratio of all items that are left.

    Args:
        values: what each item takes, in units in which the resources compare; the last but one is tokens.
        capacity: what each bin is to be filled with, in the same units.
        slack: what a bin may need less of than the best one, in the same units.
        home: preferred bin of each item; -1 for none.

    Returns:
        The bin of each item.
    """
    num_resources, n = values.shape
    main = num_resources - 2
    size = np.zeros(n)
    for r in range(num_resources):
        size = np.maximum(size, values[r])
    needed = capacity.copy()
    left = totals(values)
    # Tokens still to come whose home a bin is, in so far as those before stayed.
    to_come = np.zeros(capacity.shape[1])
    for i in range(n):
        if home[i] >= 0:
            to_come[home[i]] += values[main, i]
    stayed, gone = 0.0, 1e-300
    where = np.zeros(n, np.int64)
    for i in np.argsort(-size, kind="mergesort"):
        growth = np.zeros(capacity.shape[1])  # of the sum of squares of what is needed
        more = 0.0
        for r in range(num_resources):
            if r != main:
                ratio = left[r] / max(left[main], 1e-300)
                beyond = values[r, i] - ratio * values[main, i]
                growth += beyond * (beyond - 2 * (needed[r] - ratio * needed[main]))
                more += 2 * abs(beyond) * (_OF_ITEM * abs(beyond) + slack[r])
        most = growth.min() + more
        h = home[i]
        fits = h >= 0 and growth[h] <= most
        for r in range(num_resources):
            fits = fits and needed[r, h] >= values[r, i]
        if h >= 0:
            to_come[h] -= values[main, i]
        if fits:
            b = h
        else:
            free = needed[main] - to_come * (stayed / (stayed + gone))
            b = np.argmax(np.where(growth <= most, free, -np.inf))
        where[i] = b
        if b == h:
            stayed += values[main, i]
        else:
            gone += values[main, i]
        for r in range(num_resources):
            needed[r, b] -= values[r, i]
            left[r] -= values[r, i]
    return where


def partition(
    values: Int[np.ndarray, "resources n"],
    capacity: Float[np.ndarray, "resources bins"],
    unit: Float[np.ndarray, " resources"],
    off: Float[np.ndarray, " resources"],
    home: Int[np.ndarray, " n"],
    *,
    trades: bool,
) -> Int[np.ndarray, " n"]:
    """Items to bins, every resource of every bin at its capacity as nearly as can be.

    Args:
        values: what each item takes.
        capacity: what each bin is to be filled with.
        unit: an amount of each resource in which they compare.
        off: what a bin may be off, over the unit.
        home: preferred bin of each item; -1 for none.
        trades: whether to look for exchanges of one item for several, too.

    Returns:
        The bin of each item.
    """
    shares, room = values / unit[:, None], capacity / unit[:, None]
    num_bins = capacity.shape[1]
    if num_bins == 1:
        return np.zeros(values.shape[1], np.int64)
    values, capacity = shares / off[:, None], room / off[:, None]
    anywhere = Preferences(home, 0 * home, np.ones((1, num_bins), bool))
    least, chosen = np.inf, home
    for slack in _OF_OFF:
        where = fill_greedily(shares, room, slack * off, home)
        even_out(values, capacity, where, anywhere, 4 * num_bins + 64, trades)
        filled = np.stack([np.bincount(where, weights=v, minlength=num_bins) for v in values])
        furthest = float(np.abs(filled - capacity).max())
        if furthest < least:
            least, chosen = furthest, where
        if least <= _FAR_OFF:
            break
    return chosen
