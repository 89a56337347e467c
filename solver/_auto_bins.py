"""Items in bins, moved and exchanged until every bin holds what it should of several resources."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from solver._compiled import HAS_NUMBA, compiled

_SAMPLED = 16  # members of the worst bin that an exchange tries
_LEAVING = 0.7  # what it costs an item to leave home, in squares of what a bin may be off
_PARTNERS = 8  # bins it tries to exchange with
_TRADED = 12  # items of a bin that are exchanged for one of another at most
_TRADE_PARTNERS = 3
_ROUNDING = 1e-9  # of a sum of squares
_GAIN = 0.005  # what an exchange must lower it by, of the worst bin's


@compiled
def totals(values: Float[np.ndarray, "resources n"]) -> Float[np.ndarray, " resources"]:
    """Sums in one order; NumPy's own differs from compiled code's."""
    total = np.zeros(len(values))
    for r in range(len(values)):
        for value in values[r]:
            total[r] += value
    return total


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


def _best_exchange_of_arrays(bins, mine, giver, partners, preferences, gain):
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
    best, found = -gain, (-1, -1, -1)
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
def _best_exchange_of_scalars(bins, mine, giver, partners, preferences, gain):
    values, excess, key = bins.values, bins.excess, bins.key
    num_resources = len(values)
    best, best_a, best_k, best_p = -gain, -1, -1, -1
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
def _exchange(bins: _Bins, given: int, giver: int, place: int, taker: int) -> None:
    """Exchange an item (-1 for nothing) for the one at a place of the taker (past its last, nothing); in place."""
    taken = bins.members[taker, place] if place < bins.num[taker] else -1
    if given >= 0:
        _move(bins, given, giver, taker)
    if taken >= 0:
        _move(bins, taken, taker, giver)


@compiled
def _trade_with_one(bins: _Bins, g: int, partners: Int[np.ndarray, " partners"]) -> int:
    """Trade with the first partner with which that helps; in place. Returns the partner, -1 for none."""
    for h in partners:
        if _trade(bins, g, h) or _trade(bins, h, g):
            return int(h)
    return -1


@compiled
def _sorted_bins(
    values: Float[np.ndarray, "resources n"],
    capacity: Float[np.ndarray, "resources bins"],
    where: Int[np.ndarray, " n"],
) -> tuple[Int[np.ndarray, " n"], _Bins]:
    """The order of items in the bins, and the bins."""
    num_resources, n = values.shape
    num_bins = capacity.shape[1]
    total = totals(values)
    key = 0
    for r in range(1, num_resources):
        if total[r] > total[key]:
            key = r
    order = np.argsort(values[key], kind="mergesort")
    count = np.zeros(num_bins, np.int64)
    excess = -capacity.copy()
    for i in range(n):
        count[where[i]] += 1
        for r in range(num_resources):
            excess[r, where[i]] += values[r, i]
    members = np.zeros((num_bins, 2 * int(count.max()) + 2 * _TRADED), np.int64)
    num = 0 * count
    for i in range(n):
        b = where[order[i]]
        members[b, num[b]] = i
        num[b] += 1
    return order, _Bins(values[:, order], key, excess, members, num)


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
    num_bins = capacity.shape[1]
    order, bins = _sorted_bins(values, capacity, where)
    preferences = Preferences(preferences.home[order], preferences.kind[order], preferences.allowed)
    stuck = np.zeros(num_bins, np.bool_)
    for turn in range(max_moves):
        g = _furthest_off(bins.excess, stuck)
        if g < 0:
            break
        partners = _complements(bins.excess, g)
        mine = bins.members[g, : bins.num[g]].copy()
        step = -(-len(mine) // _SAMPLED)
        if step > 1:
            mine = mine[turn % step :: step].copy()
        gain = _GAIN * (bins.excess[:, g] ** 2).sum()
        a, k, p = _best_exchange(bins, mine, g, partners, preferences, gain)
        if a >= 0:
            h = partners[p]
            _exchange(bins, mine[a] if a < len(mine) else -1, g, k, h)
            stuck[h] = False
        else:
            h = _trade_with_one(bins, g, partners[:_TRADE_PARTNERS]) if trades else -1
            stuck[g] = h < 0
            if h >= 0:
                stuck[h] = False
        if bins.num.max() + _TRADED >= bins.members.shape[1]:
            wider = np.concatenate((bins.members, 0 * bins.members), axis=1)
            bins = _Bins(bins.values, bins.key, bins.excess, wider, bins.num)
    for b in range(num_bins):
        where[order[bins.members[b, : bins.num[b]]]] = b
