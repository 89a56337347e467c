"""Whole sequences to bins of given capacities in several resources at once."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from solver._compiled import HAS_NUMBA, compiled

_SAMPLED = 48  # members of the worst bin that an exchange tries
_LEAVING = 1.0  # what it costs an item to leave home, in squares of what a bin may be off
_TRADED = 12  # items of a bin that are exchanged for one of another at most
_TRADE_PARTNERS = 3
_PARTNERS = 8  # bins it tries to exchange with


@compiled
def fill_greedily(
    values: Float[np.ndarray, "resources n"],
    capacity: Float[np.ndarray, "resources bins"],
    home: Int[np.ndarray, " n"],
) -> Int[np.ndarray, " n"]:
    """A bin for each item, largest first: its home while that has room, else where it evens out the resources most.

    Args:
        values: what each item takes, in units in which the resources compare.
        capacity: what each bin is to be filled with, in the same units.
        home: preferred bin of each item; -1 for none.

    Returns:
        The bin of each item.
    """
    num_resources, n = values.shape
    size = np.zeros(n)
    for r in range(num_resources):
        size = np.maximum(size, values[r])
    excess = -capacity.copy()
    where = np.zeros(n, np.int64)
    for i in np.argsort(-size, kind="mergesort"):
        b = home[i]
        fits = b >= 0
        if fits:
            for r in range(num_resources):
                if excess[r, b] + values[r, i] > 0:
                    fits = False
        if not fits:
            growth = np.zeros(capacity.shape[1])
            for r in range(num_resources):
                growth += values[r, i] * (2 * excess[r] + values[r, i])
            b = np.argmin(growth)
        where[i] = b
        for r in range(num_resources):
            excess[r, b] += values[r, i]
    return where


@compiled
def _trade(
    values: Float[np.ndarray, "resources n"],
    excess: Float[np.ndarray, "resources bins"],
    where: Int[np.ndarray, " n"],
    giver: int,
    taker: int,
) -> bool:
    """Exchange one item of a bin for several of another, of about one size, if that helps; in place.

    What pairs of items cannot do: less of one resource for the same of another.

    Returns:
        Whether an exchange was made.
    """
    num_resources = len(values)
    mine, others = np.flatnonzero(where == giver), np.flatnonzero(where == taker)
    others = others[np.argsort(values[-1][others], kind="mergesort")]
    mine_step, others_step = -(-len(mine) // _SAMPLED), -(-len(others) // _SAMPLED)
    upto = np.zeros((num_resources, len(others) + 1))
    for r in range(num_resources):
        upto[r, 1:] = np.cumsum(values[r][others])
    best, best_mine, best_first, best_count = -1e-9, -1, 0, 0
    for count in range(2, min(_TRADED, len(others)) + 1):
        starts = np.arange(0, len(others) - count + 1, max(others_step, 1))
        for a in range(0, len(mine), max(mine_step, 1)):
            change = np.zeros(len(starts))
            for r in range(num_resources):
                given = values[r, mine[a]] - (upto[r][starts + count] - upto[r][starts])
                change += given * (given - excess[r, giver] + excess[r, taker])
            k = np.argmin(change)
            if change[k] < best:
                best, best_mine, best_first, best_count = change[k], a, starts[k], count
    if best_mine < 0:
        return False
    for r in range(num_resources):
        given = values[r, mine[best_mine]] - (upto[r, best_first + best_count] - upto[r, best_first])
        excess[r, giver] -= given
        excess[r, taker] += given
    where[mine[best_mine]] = taker
    where[others[best_first : best_first + best_count]] = giver
    return True


def _best_exchange_of_arrays(my, their, gap, toll, their_place, leaving):
    """Which item of a bin to exchange for which of the others to lower the sum of squares most; -1, -1 for none."""
    best, best_mine, best_other = -1e-9, -1, -1
    for a in range(len(my)):
        change = leaving + toll[a][their_place]
        for r in range(len(their)):
            given = my[a, r] - their[r]
            change += given * (given + gap[r])
        k = int(np.argmin(change))
        if change[k] < best:
            best, best_mine, best_other = change[k], a, k
    return best_mine, best_other


@compiled
def _best_exchange_of_scalars(my, their, gap, toll, their_place, leaving):
    best, best_mine, best_other = -1e-9, -1, -1
    num_resources, num = their.shape
    for a in range(len(my)):
        for k in range(num):
            change = leaving[k] + toll[a, their_place[k]]
            for r in range(num_resources):
                given = my[a, r] - their[r, k]
                change += given * (given + gap[r, k])
            if change < best:
                best, best_mine, best_other = change, a, k
    return best_mine, best_other


# The same sums in the same order; each is fast where the other is slow.
_best_exchange = _best_exchange_of_scalars if HAS_NUMBA else _best_exchange_of_arrays


class Preferences(NamedTuple):
    """Where items may go, and would rather be.

    Attributes:
        home: preferred bin of each item; -1 for none.
        kind: of each item; kind 0 may go anywhere.
        allowed: bins that items of each kind may go to.
    """

    home: Int[np.ndarray, " n"]
    kind: Int[np.ndarray, " n"]
    allowed: Bool[np.ndarray, "kinds bins"]


@compiled
def _price(preferences: Preferences, item: int, source: int, target: int) -> float:
    """What it costs to move an item, in squares of what a bin may be off."""
    if not preferences.allowed[preferences.kind[item], target]:
        return np.inf
    home = preferences.home[item]
    return _LEAVING if home == source else -_LEAVING if home == target else 0.0


@compiled
def _furthest_off(excess: Float[np.ndarray, "resources bins"], stuck: Bool[np.ndarray, " bins"]) -> int:
    """The bin with the largest sum of squares among those that are off by more than 1 in something; -1 for none."""
    off = np.zeros(len(stuck))
    worst = np.zeros(len(stuck))
    for r in range(len(excess)):
        off += excess[r] * excess[r]
        worst = np.maximum(worst, np.abs(excess[r]))
    off[stuck | (worst <= 1.0)] = 0.0
    g = int(np.argmax(off))
    return g if off[g] > 0.0 else -1


@compiled
def _complements(excess: Float[np.ndarray, "resources bins"], g: int) -> Int[np.ndarray, " partners"]:
    """The bins that lack most of what bin g has too much of."""
    num_bins = excess.shape[1]
    match = np.zeros(num_bins)
    for r in range(len(excess)):
        match += excess[r, g] * excess[r]
    match[g] = np.inf
    return np.argsort(match, kind="mergesort")[: min(_PARTNERS, num_bins - 1)]


@compiled
def even_out(
    values: Float[np.ndarray, "resources n"],
    capacity: Float[np.ndarray, "resources bins"],
    where: Int[np.ndarray, " n"],
    preferences: Preferences,
    max_moves: int,
    trades: bool,
) -> None:
    """Move and exchange items until no bin is off its capacity by more than 1, or no exchange of the worst bins helps.

    Minimises the sum of squares over bins and resources. Each turn takes the bin that is furthest off and the best of
    its exchanges with the bins that complement it best.

    Args:
        values, capacity: in units of what a bin may be off.
        where: bin of each item; changed in place.
        preferences: of the items.
        max_moves: turns at most.
        trades: whether to exchange one item for several where no single exchange helps.
    """
    num_resources, n = values.shape
    num_bins = capacity.shape[1]
    excess = -capacity.copy()
    for i in range(n):
        for r in range(num_resources):
            excess[r, where[i]] += values[r, i]
    stuck = np.zeros(num_bins, np.bool_)
    for turn in range(max_moves):
        g = _furthest_off(excess, stuck)
        if g < 0:
            break
        partners = _complements(excess, g)
        place = np.full(num_bins, -1)
        for p in range(len(partners)):
            place[partners[p]] = p
        mine = np.flatnonzero(where == g)
        step = -(-len(mine) // _SAMPLED)
        if step > 1:
            mine = mine[turn % step :: step]
        others = np.flatnonzero(place[where] >= 0)
        # The last of each list is nothing: a move instead of an exchange.
        num_mine, num_others = len(mine), len(others)
        my = np.zeros((num_mine + 1, num_resources))
        toll = np.zeros((num_mine + 1, len(partners)))
        for a in range(num_mine):
            for r in range(num_resources):
                my[a, r] = values[r, mine[a]]
            for p in range(len(partners)):
                toll[a, p] = _price(preferences, mine[a], g, partners[p])
        their_place = np.concatenate((place[where[others]], np.arange(len(partners))))
        their_bin = partners[their_place]
        their = np.zeros((num_resources, len(their_bin)))
        gap = np.zeros((num_resources, len(their_bin)))
        for r in range(num_resources):
            their[r, :num_others] = values[r][others]
            gap[r] = excess[r][their_bin] - excess[r, g]
        leaving = np.zeros(len(their_bin))
        for k in range(num_others):
            leaving[k] = _price(preferences, others[k], their_bin[k], g)
        best_mine, best_other = _best_exchange(my, their, gap, toll, their_place, leaving)
        if best_other < 0:
            traded = False
            for h in partners[:_TRADE_PARTNERS] if trades else partners[:0]:
                traded = _trade(values, excess, where, g, int(h)) or _trade(values, excess, where, int(h), g)
                if traded:
                    stuck[h] = False
                    break
            stuck[g] = not traded
            continue
        h = their_bin[best_other]
        for r in range(num_resources):
            given = my[best_mine, r] - their[r, best_other]
            excess[r, g] -= given
            excess[r, h] += given
        if best_mine < num_mine:
            where[mine[best_mine]] = h
        if best_other < num_others:
            where[others[best_other]] = g
        stuck[h] = False


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
    unit = unit[:, None]
    where = fill_greedily(values / unit, capacity / unit, home)
    unit = unit * off[:, None]
    num_bins = capacity.shape[1]
    if num_bins > 1:
        anywhere = Preferences(home, 0 * home, np.ones((1, num_bins), bool))
        even_out(values / unit, capacity / unit, where, anywhere, 4 * num_bins + 64, trades)
    return where
