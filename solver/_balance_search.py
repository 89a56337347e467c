"""Local search on an assignment to bags: exchange sequences until a static-shape step cannot get cheaper."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

# Changes below this part of the step are not worth an exchange, and below rounding they would cycle.
_RESOLUTION = 1e-6
# An exchange must stay this far below the cap on the load, so that no order of summation puts it above.
_ROUNDING = 1e-12
# Exchanges looked at in one step, about: more find little and cost time in proportion.
_EXCHANGES = 2048
_FEWEST_PARTNERS = 3


@dataclass(frozen=True, slots=True, eq=False)
class SequenceWork:
    """Linear work, attention and their sum of the sequences of one replica, in one unit, and its bags' sizes."""

    linear: Float[np.ndarray, " n"]
    attention: Float[np.ndarray, " n"]
    total: Float[np.ndarray, " n"]
    sizes: Int[np.ndarray, " bags"]

    def rows_sent(self, bag_of_sequence: Int[np.ndarray, " n"]) -> float:
        """Rows that Ulysses sends inside the bags, up to a constant factor: all but 1 / size of a sequence's."""
        return float(np.cumsum(self.linear * (1.0 - 1.0 / self.sizes[bag_of_sequence]))[-1])

    def shares(self, bag_of_sequence: Int[np.ndarray, " n"]) -> "BagShares":
        """Work of every bag over its size."""
        linear, attention = (
            np.bincount(bag_of_sequence, weights=work, minlength=len(self.sizes)) / self.sizes
            for work in (self.linear, self.attention)
        )
        return BagShares(linear, attention)


@dataclass(frozen=True, slots=True, eq=False)
class BagShares:
    """Linear and attention work of every bag over its size: what each of its devices does."""

    linear: Float[np.ndarray, " bags"]
    attention: Float[np.ndarray, " bags"]

    @property
    def load(self) -> float:
        """Of the fullest device."""
        return float((self.linear + self.attention).max())

    @property
    def step(self) -> float:
        """Of a static-shape step: every device is padded to the most tokens and to the most attention."""
        return float(self.linear.max() + self.attention.max())


def reduce_step(
    work: SequenceWork, bag_of_sequence: Int[np.ndarray, " n"], *, load_cap: float, floor: float, num_tries: int
) -> Int[np.ndarray, " n"]:
    """Exchange sequences between the bag of most linear or most attention work and others while that helps.

    Each try takes the best of all exchanges of one sequence for another, or for nothing, between that bag and
    those with the least load.

    Args:
        work: the sequences and bags.
        bag_of_sequence: where to start.
        load_cap: exchanges leave both bags with less load.
        floor: step cost at which to stop.
        num_tries: how many exchanges to try.

    Returns:
        An assignment whose step costs no more than the start's and whose load is at most the cap or the start's.
    """
    num_bags = len(work.sizes)
    # One weightless sequence a bag: what is exchanged for it just moves.
    nothing = np.zeros(num_bags)
    padded = SequenceWork(
        np.concatenate([work.linear, nothing]),
        np.concatenate([work.attention, nothing]),
        np.concatenate([work.total, nothing]),
        work.sizes,
    )
    bag = np.concatenate([bag_of_sequence, np.arange(num_bags)])
    shares = padded.shares(bag)
    failed = 0
    for _ in range(num_tries):
        if shares.step <= floor or failed == 2:
            break
        most = shares.linear if failed == 0 else shares.attention
        if _exchange_once(padded, bag, shares, int(most.argmax()), load_cap * (1 - _ROUNDING)):
            failed = 0
        else:
            failed += 1
    return bag[: len(bag_of_sequence)]


def _exchange_once(
    work: SequenceWork, bag: Int[np.ndarray, " n"], shares: BagShares, fullest: int, load_cap: float
) -> bool:
    """Make the best exchange with this bag, in place; False if none lowers the step."""
    mine = np.flatnonzero(bag == fullest)
    theirs = np.flatnonzero(_partners(shares, fullest, len(mine) * len(bag))[bag])
    partner = bag[theirs]
    pairs = _Pairs(mine, theirs, fullest, partner, 1.0 / work.sizes[fullest], 1.0 / work.sizes[partner])
    linear = _exchange(work.linear, shares.linear, pairs)
    attention = _exchange(work.attention, shares.attention, pairs)
    step = linear.most + attention.most
    load = np.maximum(linear.here + attention.here, linear.there + attention.there)
    step[load > load_cap] = np.inf
    best = int(step.argmin())
    if not step.flat[best] < shares.step * (1 - _RESOLUTION):
        return False
    own, other = divmod(best, len(theirs))
    there = int(partner[other])
    bag[mine[own]], bag[theirs[other]] = there, fullest
    for share, after in ((shares.linear, linear), (shares.attention, attention)):
        share[fullest], share[there] = after.here[own, other], after.there[own, other]
    return True


def _partners(shares: BagShares, fullest: int, num_exchanges: int) -> Bool[np.ndarray, " bags"]:
    """The bags of least load, as many as keep the exchanges looked at few."""
    num_bags = len(shares.linear)
    load = shares.linear + shares.attention
    load[fullest] = np.inf
    count = max(_FEWEST_PARTNERS, _EXCHANGES * num_bags // num_exchanges)
    chosen = np.zeros(num_bags, bool)
    chosen[np.argsort(load, kind="stable")[:count]] = True
    chosen[fullest] = False
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Exchanges looked at: each of `mine`, in bag `here`, for each of `theirs`, in bags `there`."""

    mine: Int[np.ndarray, " m"]
    theirs: Int[np.ndarray, " k"]
    here: int
    there: Int[np.ndarray, " k"]
    per_size_here: float
    per_size_there: Float[np.ndarray, " k"]


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """One kind of work after each exchange: share of this bag, of the other, and the most of any bag."""

    here: Float[np.ndarray, "m k"]
    there: Float[np.ndarray, "m k"]
    most: Float[np.ndarray, "m k"]


def _exchange(work: Float[np.ndarray, " n"], share: Float[np.ndarray, " bags"], pairs: _Pairs) -> _Outcome:
    moved = work[pairs.mine][:, None] - work[pairs.theirs]
    here = share[pairs.here] - moved * pairs.per_size_here
    there = share[pairs.there] + moved * pairs.per_size_there
    most = np.maximum(np.maximum(here, there), _most_of_others(share, pairs.here)[pairs.there])
    return _Outcome(here, there, most)


def _most_of_others(share: Float[np.ndarray, " bags"], here: int) -> Float[np.ndarray, " bags"]:
    """For every bag, the largest share among the bags that are neither it nor this one; 0 if there is none."""
    rest = share.copy()
    rest[here] = 0.0
    first = int(rest.argmax())
    most = np.full(len(rest), rest[first])
    rest[first] = 0.0
    most[first] = rest.max()
    return most
