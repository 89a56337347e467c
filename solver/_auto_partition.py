"""Whole sequences to bins of given capacities in several resources at once."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from solver._compiled import HAS_NUMBA, compiled

# Bins as good as the best for an item: what they need may be less by so much of the item, and of what a bin may be off.
_OF_ITEM = 0.5
_OF_OFF = (2.4, 0.5)  # the more, the more stay at home; the second where the first leaves a bin far off
_FAR_OFF = 2.0
_SAMPLED = 48  # members of the worst bin that an exchange tries
_LEAVING = 0.3  # what it costs an item to leave home, in squares of what a bin may be off
_PARTNERS = 8  # bins it tries to exchange with
_TRADED = 12  # items of a bin that are exchanged for one of another at most
_TRADE_PARTNERS = 3
_ROUNDING = 1e-9  # of a sum of squares


@compiled
def _totals(values: Float[np.ndarray, "resources n"]) -> Float[np.ndarray, " resources"]:
    """Sums in one order; NumPy's own differs from compiled code's."""
    total = np.zeros(len(values))
    for r in range(len(values)):
        for value in values[r]:
            total[r] += value
    return total


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
    left = _totals(values)
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


class _Bins(NamedTuple):
    """Items in bins; all but `values` and `key` change in place.

    Attributes:
        values: what each item takes, in units of what a bin may be off; items by rising values of the key.
        key: the resource that items take most of.
        excess: what each bin holds beyond its capacity.
        members: items of each bin, rising; the first `num`.
        num: of each bin.
    """

    values: Float[np.ndarray, "resources n"]
    key: int
    excess: Float[np.ndarray, "resources bins"]
    members: Int[np.ndarray, "bins n"]
    num: Int[np.ndarray, " bins"]


@compiled
def _move(bins: _Bins, item: int, source: int, target: int) -> None:
    """Move an item; in place."""
    members = bins.members
    num = bins.num[source]
    at = np.searchsorted(members[source, :num], item)
    members[source, at : num - 1] = members[source, at + 1 : num].copy()
    bins.num[source] -= 1
    num = bins.num[target]
    at = np.searchsorted(members[target, :num], item)
    members[target, at + 1 : num + 1] = members[target, at:num].copy()
    members[target, at] = item
    bins.num[target] += 1
    for r in range(len(bins.values)):
        bins.excess[r, source] -= bins.values[r, item]
        bins.excess[r, target] += bins.values[r, item]


@compiled
def _price(preferences: Preferences, item: int, source: int, target: int) -> float:
    """What it costs to move an item, in squares of what a bin may be off."""
    if not preferences.allowed[preferences.kind[item], target]:
        return np.inf
    home = preferences.home[item]
    return _LEAVING if home == source else -_LEAVING if home == target else 0.0


def _best_exchange_of_arrays(bins, mine, giver, partners, preferences):
    """Which item of a bin to exchange for which of the others to lower the sum of squares most.

    Returns:
        Place in `mine`, place in the members of the partner, place in `partners`; one past the last stands for nothing,
        and -1 for no exchange that helps.
    """
    values, excess = bins.values, bins.excess
    lists = [bins.members[h, : bins.num[h]].tolist() for h in partners]
    num = np.array([len(items) + 1 for items in lists])
    place = np.repeat(np.arange(len(partners)), num)
    theirs = np.zeros((len(values), len(place)))
    leaving = np.zeros(len(place))
    first = 0
    for items, h in zip(lists, partners.tolist(), strict=True):
        theirs[:, first : first + len(items)] = values[:, items]
        leaving[first : first + len(items)] = [_price(preferences, item, h, giver) for item in items]
        first += len(items) + 1
    gap = excess[:, partners[place]] - excess[:, giver, None]
    best, found = -1e-9, (-1, -1, -1)
    for a in range(len(mine) + 1):
        my = values[:, mine[a]] if a < len(mine) else np.zeros(len(values))
        change = leaving.copy()
        if a < len(mine):
            change += np.array([_price(preferences, mine[a], giver, h) for h in partners])[place]
        for r in range(len(values)):
            given = my[r] - theirs[r]
            change += given * (given + gap[r])
        k = int(np.argmin(change))
        if change[k] < best:
            p = int(place[k])
            best, found = change[k], (a, k - int(num[:p].sum()), p)
    return found


@compiled
def _best_exchange_of_scalars(bins, mine, giver, partners, preferences):
    values, excess, key = bins.values, bins.excess, bins.key
    num_resources = len(values)
    best, best_a, best_k, best_p = -1e-9, -1, -1, -1
    gap = np.zeros(num_resources)
    for a in range(len(mine) + 1):
        for p in range(len(partners)):
            h = partners[p]
            toll = _price(preferences, mine[a], giver, h) if a < len(mine) else 0.0
            if toll == np.inf:
                continue
            least = toll - _LEAVING
            for r in range(num_resources):
                gap[r] = excess[r, h] - excess[r, giver]
                least -= 0.25 * gap[r] * gap[r]
            margin = _ROUNDING * (1.0 - least)
            # Best would be the item that takes this much of the key; from there both ways, while it could still be.
            wanted = (values[key, mine[a]] if a < len(mine) else 0.0) + 0.5 * gap[key]
            num = bins.num[h]
            low, high = 0, num
            while low < high:
                middle = (low + high) // 2
                if values[key, bins.members[h, middle]] < wanted:
                    low = middle + 1
                else:
                    high = middle
            up, down, k = low, low - 1, num  # first nothing
            while k >= 0:
                change = toll
                if k < num:
                    change = _price(preferences, bins.members[h, k], h, giver) + toll
                for r in range(num_resources):
                    given = values[r, mine[a]] if a < len(mine) else 0.0
                    if k < num:
                        given -= values[r, bins.members[h, k]]
                    change += given * (given + gap[r])
                if change < best or (change == best and a == best_a and p == best_p and k < best_k):
                    best, best_a, best_k, best_p = change, a, k, p
                k = -1
                if up < num:
                    off = values[key, bins.members[h, up]] - wanted
                    if off * off + least <= best + margin:
                        k = up
                        up += 1
                    else:
                        up = num
                if k < 0 and down >= 0:
                    off = values[key, bins.members[h, down]] - wanted
                    if off * off + least <= best + margin:
                        k = down
                        down -= 1
    return best_a, best_k, best_p


# The same sums in the same order; each is fast where the other is slow.
_best_exchange = _best_exchange_of_scalars if HAS_NUMBA else _best_exchange_of_arrays


@compiled
def _trade(bins: _Bins, giver: int, taker: int) -> bool:
    """Exchange one item of a bin for several of another, of about one size, if that helps; in place.

    What pairs of items cannot do: less of one resource for the same of another.

    Returns:
        Whether an exchange was made.
    """
    num_resources = len(bins.values)
    mine = bins.members[giver, : bins.num[giver]].copy()
    others = bins.members[taker, : bins.num[taker]].copy()
    mine_step, others_step = -(-len(mine) // _SAMPLED), -(-len(others) // _SAMPLED)
    upto = np.zeros((num_resources, len(others) + 1))
    for r in range(num_resources):
        upto[r, 1:] = np.cumsum(bins.values[r][others])
    best, best_mine, best_first, best_count = -1e-9, -1, 0, 0
    for count in range(2, min(_TRADED, len(others)) + 1):
        starts = np.arange(0, len(others) - count + 1, max(others_step, 1))
        for a in range(0, len(mine), max(mine_step, 1)):
            change = np.zeros(len(starts))
            for r in range(num_resources):
                given = bins.values[r, mine[a]] - (upto[r][starts + count] - upto[r][starts])
                change += given * (given - bins.excess[r, giver] + bins.excess[r, taker])
            k = np.argmin(change)
            if change[k] < best:
                best, best_mine, best_first, best_count = change[k], a, starts[k], count
    if best_mine < 0:
        return False
    _move(bins, mine[best_mine], giver, taker)
    for i in range(best_first, best_first + best_count):
        _move(bins, others[i], taker, giver)
    return True


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
    total = _totals(values)
    key = 0
    for r in range(1, num_resources):
        if total[r] > total[key]:
            key = r
    order = np.argsort(values[key], kind="mergesort")
    preferences = Preferences(preferences.home[order], preferences.kind[order], preferences.allowed)
    count = np.zeros(num_bins, np.int64)
    excess = -capacity.copy()
    for i in range(n):
        count[where[i]] += 1
        for r in range(num_resources):
            excess[r, where[i]] += values[r, i]
    members = np.zeros((num_bins, 2 * int(count.max()) + 2 * _TRADED), np.int64)
    bins = _Bins(values[:, order], key, excess, members, 0 * count)
    for i in range(n):
        b = where[order[i]]
        members[b, bins.num[b]] = i
        bins.num[b] += 1
    stuck = np.zeros(num_bins, np.bool_)
    for turn in range(max_moves):
        g = _furthest_off(excess, stuck)
        if g < 0:
            break
        partners = _complements(excess, g)
        mine = bins.members[g, : bins.num[g]].copy()
        step = -(-len(mine) // _SAMPLED)
        if step > 1:
            mine = mine[turn % step :: step].copy()
        a, k, p = _best_exchange(bins, mine, g, partners, preferences)
        if a < 0:
            traded = False
            for h in partners[:_TRADE_PARTNERS] if trades else partners[:0]:
                traded = _trade(bins, g, int(h)) or _trade(bins, int(h), g)
                if traded:
                    stuck[h] = False
                    break
            stuck[g] = not traded
        else:
            h = partners[p]
            given, taken = a < len(mine), k < bins.num[h]
            other = bins.members[h, min(k, bins.members.shape[1] - 1)]
            if given:
                _move(bins, mine[a], g, h)
            if taken:
                _move(bins, other, h, g)
            stuck[h] = False
        if bins.num.max() + _TRADED >= bins.members.shape[1]:
            wider = np.concatenate((bins.members, 0 * bins.members), axis=1)
            bins = _Bins(bins.values, key, excess, wider, bins.num)
    for b in range(num_bins):
        where[order[bins.members[b, : bins.num[b]]]] = b


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
