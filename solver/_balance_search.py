"""Local search on an assignment to bags: exchange sequences until a static-shape step cannot get cheaper."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

# Changes below this part of the step are not worth an exchange, and below rounding they would cycle.
_RESOLUTION = 1e-6
# An exchange must stay this far below the cap on the load, so that no order of summation puts it above.
_ROUNDING = 1e-12
# Exchanges looked at in one try, about: more find little and cost time in proportion.
_EXCHANGES = 512
_FEWEST_PARTNERS = 3


@dataclass(frozen=True, slots=True, eq=False)
class SequenceWork:
    """Work of the sequences of one replica, in one unit, and the sizes of its bags.

    Attributes:
        work: linear work, attention, and their sum.
        sizes: devices of each bag.
    """

    work: Float[np.ndarray, "3 n"]
    sizes: Int[np.ndarray, " bags"]

    @property
    def parts(self) -> Float[np.ndarray, "2 n"]:
        """Linear work and attention."""
        return self.work[:2]

    @property
    def total(self) -> Float[np.ndarray, " n"]:
        """Their sum."""
        return self.work[2]

    def shares(self, bag_of_sequence: Int[np.ndarray, " n"]) -> Float[np.ndarray, "2 bags"]:
        """Linear and attention work of every bag over its size: what each of its devices does."""
        num_bags = len(self.sizes)
        shares = np.empty((2, num_bags))
        for share, part in zip(shares, self.parts, strict=True):
            share[:] = np.bincount(bag_of_sequence, weights=part, minlength=num_bags)
        return shares / self.sizes

    def rows_sent(self, bag_of_sequence: Int[np.ndarray, " n"]) -> float:
        """Rows that leave a device inside its bag, up to a factor: all but 1 / size of a sequence's."""
        return float(np.cumsum(self.parts[0] * (1.0 - 1.0 / self.sizes[bag_of_sequence]))[-1])


def load_of(shares: Float[np.ndarray, "2 bags"]) -> float:
    """Load of the fullest device."""
    return float((shares[0] + shares[1]).max())


def step_of(shares: Float[np.ndarray, "2 bags"]) -> float:
    """A static-shape step: every device is padded to the most tokens and to the most attention."""
    return float(shares[0].max() + shares[1].max())


def reduce_step(
    work: SequenceWork,
    bag_of_sequence: Int[np.ndarray, " n"],
    *,
    load_cap: float,
    floor: float,
    num_tries: int,
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
        An assignment whose step costs no more than the start's and whose load is at most the cap or the
        start's.
    """
    num_bags = len(work.sizes)
    shares = work.shares(bag_of_sequence)
    # One weightless sequence a bag: what is exchanged for it just moves.
    padded = np.concatenate([work.parts, np.zeros((2, num_bags))], axis=1)
    bag = np.concatenate([bag_of_sequence, np.arange(num_bags)])
    state = _State(padded, bag, shares, 1.0 / work.sizes, load_cap * (1 - _ROUNDING))
    step, failed = step_of(shares), 0
    for _ in range(num_tries):
        if step <= floor or failed == 2:
            break
        lower = _exchange_once(state, int(shares[failed].argmax()), step * (1 - _RESOLUTION))
        failed = failed + 1 if lower is None else 0
        step = step if lower is None else lower
    return bag[: len(bag_of_sequence)]


class _State(NamedTuple):
    """Where the search stands; `bag` and `shares` are updated in place."""

    work: Float[np.ndarray, "2 n"]
    bag: Int[np.ndarray, " n"]
    shares: Float[np.ndarray, "2 bags"]
    per_size: Float[np.ndarray, " bags"]
    load_cap: float


def _exchange_once(state: _State, here: int, step_cap: float) -> float | None:
    """Make the best exchange with bag `here`; the step after it, or None if none is below the cap."""
    work, bag, shares, per_size, load_cap = state
    mine = np.flatnonzero(bag == here)
    theirs = _candidates(state, here, len(mine))
    there = bag[theirs]
    # `take` rather than indexing: it leaves rows contiguous, which makes all that follows three times as
    # fast.
    moved = work.take(mine, axis=1)[:, :, None] - work.take(theirs, axis=1)[:, None]
    after_here = shares[:, here, None, None] - moved * per_size[here]
    after_there = shares.take(there, axis=1)[:, None] + moved * per_size[there]
    most = _most_of_others(shares, here).take(there, axis=1)[:, None]
    most = np.maximum(np.maximum(after_here, after_there), most)
    step = most[0] + most[1]
    load = np.maximum(after_here[0] + after_here[1], after_there[0] + after_there[1])
    step[load > load_cap] = np.inf
    own, other = divmod(int(step.argmin()), len(theirs))
    if not step[own, other] < step_cap:
        return None
    partner = there[other]
    shares[:, here], shares[:, partner] = after_here[:, own, other], after_there[:, own, other]
    bag[mine[own]], bag[theirs[other]] = partner, here
    return float(step[own, other])


def _candidates(state: _State, here: int, num_mine: int) -> Int[np.ndarray, " k"]:
    """Sequences to exchange for: those of the bags of least load, of as many bags as keep exchanges few."""
    bag, num_bags = state.bag, len(state.per_size)
    num_partners = max(_FEWEST_PARTNERS, _EXCHANGES * num_bags // (num_mine * len(bag)))
    if num_partners >= num_bags - 1:
        return np.flatnonzero(bag != here)
    load = state.shares[0] + state.shares[1]
    load[here] = np.inf
    chosen = np.zeros(num_bags, bool)
    chosen[np.argsort(load, kind="stable")[:num_partners]] = True
    return np.flatnonzero(chosen[bag])


def _most_of_others(shares: Float[np.ndarray, "2 bags"], here: int) -> Float[np.ndarray, "2 bags"]:
    """For every bag, the largest share among the bags that are neither it nor `here`; 0 if there is none."""
    rest = shares.copy()
    rest[:, here] = 0.0
    rising = np.sort(rest, axis=1)
    return np.where(shares == rising[:, -1:], rising[:, -2:-1], rising[:, -1:])
