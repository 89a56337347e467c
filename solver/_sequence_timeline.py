"""Who is busy when: events of a layer on a device's three lanes, each begun when its lane and its causes are done."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["compute", "inside", "across"]
# Numbers of a transfer's events.
Transfer = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that a device or one of its links does.

    Attributes:
        lane: "compute", "inside" (links of the machine) or "across" (links to other machines).
        name: what it is.
        start_s, stop_s: seconds since the layer's begin.
        sent_bytes: that a device sends in it, mean over devices; 0 for compute.
    """

    lane: Lane
    name: str
    start_s: float
    stop_s: float
    sent_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferPart:
    """What a transfer does on one lane; bytes as of `TimelineEvent`."""

    lane: Lane
    seconds: float
    sent_bytes: float


@dataclass(slots=True)
class TimelineBuilder:
    """Events are added in the order of the program, in which each lane runs them.

    With `most_under_way` transfers are asynchronous collectives of a compiled program: each starts after all that is
    computed before it in the program; and where as many are under way already, the program waits for one of them
    first, and what it computes from there on does too.

    A time is a maximum of sums of durations, so no duration that shrinks makes the end later.

    Attributes:
        most_under_way: transfers that may be under way at a time; None for any number, each on its own.
        events: so far.
        free_s: when the last event of a lane ends.
        under_way: transfers that nothing has waited for yet.
    """

    most_under_way: int | None = None
    events: list[TimelineEvent] = field(default_factory=list)
    free_s: dict[Lane, float] = field(default_factory=dict)
    under_way: list[Transfer] = field(default_factory=list)

    def add(self, lane: Lane, name: str, seconds: float, after: Iterable[int] = ()) -> int:
        """Adds an event that starts when its lane is free and the events `after` have ended. Returns its number."""
        causes = set(after)
        self.under_way = [numbers for numbers in self.under_way if not causes.issuperset(numbers)]
        return self._add(TransferPart(lane, seconds, 0.0), name, max(map(self._stop_s, causes), default=0.0))

    def transfer(self, name: str, parts: Sequence[TransferPart], after: Iterable[int]) -> Transfer:
        """Adds a transfer's events, each of which starts when its lane is free; none if it has no parts."""
        if not parts:
            return ()
        causes = set(after)
        ready = max(self._program_s(causes), *map(self._stop_s, causes), 0.0)
        numbers = tuple(self._add(part, name, ready) for part in parts)
        self.under_way.append(numbers)
        return numbers

    def transfer_s(self, transfer: Transfer) -> float:
        """Seconds that a transfer lasts; its events run at once."""
        events = (self.events[number] for number in transfer)
        return max((event.stop_s - event.start_s for event in events), default=0.0)

    def _add(self, part: TransferPart, name: str, ready: float) -> int:
        start = max(ready, self.free_s.get(part.lane, 0.0))
        self.free_s[part.lane] = start + part.seconds
        self.events.append(TimelineEvent(part.lane, name, start, start + part.seconds, part.sent_bytes))
        return len(self.events) - 1

    def _program_s(self, causes: set[int]) -> float:
        """When the program comes to the start of a transfer that needs `causes`: after what it has to wait for."""
        if self.most_under_way is None:
            return 0.0
        waited = [numbers for numbers in self.under_way if causes.issuperset(numbers)]
        others = sorted((t for t in self.under_way if t not in waited), key=self._end_s)
        too_many = max(len(others) + 1 - self.most_under_way, 0)
        waited, self.under_way = [*waited, *others[:too_many]], others[too_many:]
        self.free_s["compute"] = max(self.free_s.get("compute", 0.0), *map(self._end_s, waited), 0.0)
        return self.free_s["compute"]

    def _stop_s(self, number: int) -> float:
        return self.events[number].stop_s

    def _end_s(self, transfer: Transfer) -> float:
        return max(map(self._stop_s, transfer))
