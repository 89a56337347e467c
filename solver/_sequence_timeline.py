"""Who is busy when: events of a layer on a device's three lanes, each begun when its lane and its causes are done."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["compute", "inside", "across"]


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that a device or one of its links does.

    Attributes:
        lane: "compute", "inside" (links of the machine) or "across" (links to other machines).
        name: what it is.
        start_s, stop_s: seconds since the layer's begin.
        sent_bytes: that a device sends in it; 0 for compute.
    """

    lane: Lane
    name: str
    start_s: float
    stop_s: float
    sent_bytes: float = 0.0


@dataclass(slots=True)
class TimelineBuilder:
    """Events are added in the order in which each lane runs them.

    A time is a maximum of sums of durations, so no duration that shrinks makes the end later.

    Attributes:
        taken: share of the processors that a transfer takes from attention beside it.
        events: so far.
        free_s: when the last event of a lane ends.
    """

    taken: float
    events: list[TimelineEvent] = field(default_factory=list)
    free_s: dict[Lane, float] = field(default_factory=dict)

    def add(
        self, lane: Lane, name: str, seconds: float, after: Iterable[int] = (), sent_bytes: float = 0.0
    ) -> int:
        """Adds an event that starts when its lane is free and the events `after` have ended. Returns its number."""
        start = max((self.events[index].stop_s for index in after), default=0.0)
        start = max(start, self.free_s.get(lane, 0.0))
        self.free_s[lane] = start + seconds
        self.events.append(TimelineEvent(lane, name, start, start + seconds, sent_bytes))
        return len(self.events) - 1

    def beside(self, seconds: float, transfers: Iterable[int]) -> float:
        """Seconds of compute that runs beside transfers: slower while they last, by the processors they take."""
        lasting = sum(self.events[index].stop_s - self.events[index].start_s for index in transfers)
        return min(seconds + self.taken * lasting, seconds / (1 - self.taken))
