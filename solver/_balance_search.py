"""Local search on an assignment to bags: exchange sequences so that the fullest bags become less full.

A static-shape step costs, for each part of the work, what the fullest bag has of it. Lowering these maxima
directly gets stuck as soon as two bags are equally full, so what is lowered is the sum over parts and bags of
the squared excess over a target that no assignment can undercut; the cheapest step on the way is kept.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

# A step this close to its lower bound is as good as optimal: devices of one kind differ by more.
_CLOSE = 2e-4
# Exchanges that lower the excess by less than this part of it would let rounding decide.
_RESOLUTION = 1e-9
# An exchange must stay this far below the cap on the load, so that no order of summation puts it above.
_ROUNDING = 1e-12
# Exchanges looked at in one try: all if there are no more than these; more find little and cost time.
_ALL_EXCHANGES = 3072
# Otherwise about as many as these: for each sequence those with nearly its weight, at least so many, and moves
# to so many bags.
_EXCHANGES, _ALIKE, _MOVES = 1024, 8, 2


@dataclass(frozen=True, slots=True, eq=False)
class SequenceWork:
    """Work of the sequences of one replica, in one unit, and the sizes of its bags.

    Attributes:
        work: the parts that a static-shape step pads each to its fullest device, then their sum: linear work,
            of text and of image tokens apart if there is text, and attention.
        sizes: devices of each bag.
    """

    work: Float[np.ndarray, "rows n"]
    sizes: Int[np.ndarray, " bags"]

    @property
    def parts(self) -> Float[np.ndarray, "parts n"]:
        """Kinds of linear work, and attention."""
        return self.work[:-1]

    @property
    def total(self) -> Float[np.ndarray, " n"]:
        """Their sum."""
        return self.work[-1]

    def shares(self, bag_of_sequence: Int[np.ndarray, " n"]) -> Float[np.ndarray, "parts bags"]:
        """Parts of the work of every bag over its size: what each of its devices does."""
        num_bags = len(self.sizes)
        shares = np.empty((len(self.parts), num_bags))
        for share, part in zip(shares, self.parts, strict=True):
            share[:] = np.bincount(bag_of_sequence, weights=part, minlength=num_bags)
        return shares / self.sizes

    def rows_sent(self, bag_of_sequence: Int[np.ndarray, " n"]) -> float:
        """Rows that leave a device inside its bag, up to a factor: all but 1 / size of a sequence's."""
        linear = self.parts[:-1].sum(axis=0)
        return float(np.cumsum(linear * (1.0 - 1.0 / self.sizes[bag_of_sequence]))[-1])


def load_of(shares: Float[np.ndarray, "parts bags"]) -> float:
    """Load of the fullest device."""
    return float(shares.sum(axis=0).max())


def step_of(shares: Float[np.ndarray, "parts bags"]) -> float:
    """A static-shape step: every device is padded to the most tokens of each kind and to the most attention."""
    return sum(shares.max(axis=1).tolist())


class SearchGoal(NamedTuple):
    """Limits of the search, in the unit of the work.

    Attributes:
        load_cap: load that no exchange may exceed.
        targets: of every part of the work, a largest share that no assignment undercuts.
        num_tries: exchanges to try.
    """

    load_cap: float
    targets: list[float]
    num_tries: int


def reduce_step(
    work: SequenceWork, bag_of_sequence: Int[np.ndarray, " n"], goal: SearchGoal
) -> Int[np.ndarray, " n"]:
    """Exchange sequences between the bag with the most of some part of the work and others while that helps.

    Each try takes the best of many exchanges of one sequence for another, or for nothing.

    Args:
        work: the sequences and bags.
        bag_of_sequence: where to start.
        goal: what to reach and how long to try.

    Returns:
        An assignment whose step costs no more than the start's, with a load of at most the cap or the start's.
    """
    search = _start(work, bag_of_sequence, goal)
    best, failed = bag_of_sequence, 0
    least = step_of(search.above)
    for _ in range(goal.num_tries):
        if least <= _CLOSE * sum(goal.targets) or failed == len(goal.targets):
            break
        part = int(np.argsort(-search.above.max(axis=1), kind="stable")[failed])
        if not _exchange_once(search, int(search.above[part].argmax())):
            failed += 1
            continue
        failed = 0
        step = step_of(search.above)
        if step < least:
            best, least = search.bag[: len(bag_of_sequence)].copy(), step
    return best


class _Search(NamedTuple):
    """Where the search stands; `bag` and `above`, the bags' shares less the targets, are updated in place.

    A weightless sequence a bag follows the true ones: what is exchanged for it just moves.
    """

    work: Float[np.ndarray, "parts n"]
    total: Float[np.ndarray, " n"]
    heaviest_first: Int[np.ndarray, " n"]
    bag: Int[np.ndarray, " n"]
    above: Float[np.ndarray, "parts bags"]
    per_size: Float[np.ndarray, " bags"]
    cap_above: float


def _start(work: SequenceWork, bag_of_sequence: Int[np.ndarray, " n"], goal: SearchGoal) -> _Search:
    num_bags = len(work.sizes)
    padded = np.concatenate([work.work, np.zeros((len(work.work), num_bags))], axis=1)
    return _Search(
        work=padded[:-1],
        total=padded[-1],
        heaviest_first=np.argsort(-padded[-1], kind="stable"),
        bag=np.concatenate([bag_of_sequence, np.arange(num_bags)]),
        above=work.shares(bag_of_sequence) - np.array(goal.targets)[:, None],
        per_size=1.0 / work.sizes,
        cap_above=goal.load_cap * (1 - _ROUNDING) - sum(goal.targets),
    )


def _exchange_once(search: _Search, here: int) -> bool:
    """Make the exchange with bag `here` that lowers the excess most, in place; False if none does."""
    bag, above, per_size = search.bag, search.above, search.per_size
    mine = np.flatnonzero(bag == here)
    mine = mine[:: -(-len(mine) * _ALIKE // _EXCHANGES)]
    theirs = _candidates(search, here, mine)
    there = bag[theirs]
    # `take` rather than indexing: it leaves rows contiguous, and all that follows is three times as fast.
    moved = search.work.take(mine, axis=1)[:, :, None] - search.work.take(theirs, axis=1)
    after_here = above[:, here, None, None] - moved * per_size[here]
    after_there = above.take(there, axis=1) + moved * per_size[there]
    before = _excess(above)
    gain = (before[here] + before)[there] - (_excess(after_here) + _excess(after_there))
    gain[np.maximum(after_here.sum(axis=0), after_there.sum(axis=0)) > search.cap_above] = -np.inf
    own, other = divmod(int(gain.argmax()), gain.shape[1])
    if not gain[own, other] > _RESOLUTION * before[here]:
        return False
    sequence = theirs[min(own, len(theirs) - 1), other]
    partner = bag[sequence]
    above[:, here], above[:, partner] = after_here[:, own, other], after_there[:, own, other]
    bag[mine[own]], bag[sequence] = partner, here
    return True


def _excess(above: Float[np.ndarray, " parts *of"]) -> Float[np.ndarray, "*of"]:
    return np.square(np.maximum(above, 0.0)).sum(axis=0)


def _candidates(
    search: _Search, here: int, mine: Int[np.ndarray, " m"]
) -> Int[np.ndarray, "1 k"] | Int[np.ndarray, "m k"]:
    """Sequences of other bags to exchange for: all of them for each of mine, or if many, those most like it.

    Under a tight cap on the load only sequences of nearly equal weight can be exchanged.
    """
    bag, heaviest_first = search.bag, search.heaviest_first
    if len(mine) * len(bag) <= _ALL_EXCHANGES:
        return np.flatnonzero(bag != here)[None]
    others = heaviest_first[bag[heaviest_first] != here]
    centre = np.searchsorted(-search.total[others], -search.total[mine])
    span = max(_ALIKE, _EXCHANGES // len(mine))
    around = centre[:, None] + np.arange(-(span // 2), span - span // 2)
    alike = others[np.clip(around, 0, len(others) - 1)]
    load = search.above.sum(axis=0)
    load[here] = np.inf
    emptiest = np.argsort(load, kind="stable")[: min(_MOVES, len(load) - 1)]
    nothing = len(bag) - len(load) + emptiest
    return np.concatenate([alike, np.broadcast_to(nothing, (len(mine), len(nothing)))], axis=1)
