"""Counting what cannot be read, and stopping when it is too much."""

from __future__ import annotations

import dataclasses
import logging
import threading

from experiments.data._types import DataError

_logger = logging.getLogger(__name__)

# Names listed in the final error; the log has all of them.
_LISTED = 20


@dataclasses.dataclass(frozen=True, slots=True)
class BadLimit:
    """How much unreadable data a run puts up with.

    Attributes:
      fraction: the run stops when more than this fraction of what was read is bad ...
      count: ... and at least this many samples were, so that one bad file among the first few is no reason.
    """

    fraction: float = 0.01
    count: int = 10

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0 or self.count < 1:
            raise ValueError(
                f"BadLimit: fraction must be in [0, 1] and count at least 1; got fraction={self.fraction}, "
                f"count={self.count}."
            )


class BadTally:
    """Counts readable and unreadable samples; safe to use from several threads.

    Args:
      limit: when to stop.
      where: what is being read, for messages.
    """

    def __init__(self, limit: BadLimit, where: str):
        self._limit = limit
        self.where = where
        self._lock = threading.Lock()
        self._read = 0
        self._num_bad = 0
        self._names: dict[str, None] = {}

    @property
    def num_bad(self) -> int:
        """Unreadable samples met so far, repeats included."""
        return self._num_bad

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, each once, in the order met."""
        with self._lock:
            return tuple(self._names)

    def good(self, count: int = 1) -> None:
        """Counts samples that were read."""
        with self._lock:
            self._read += count

    def bad(self, name: str, reason: Exception) -> None:
        """Counts and logs a sample that was not.

        Raises:
          DataError: that makes it too many.
        """
        _logger.warning("%s: cannot read %s: %s", self.where, name, reason)
        with self._lock:
            self._read += 1
            self._num_bad += 1
            self._names[name] = None
        self.check()

    def check(self) -> None:
        """Raises DataError when the limit is passed."""
        with self._lock:
            bad, read, names = self._num_bad, self._read, list(self._names)
        if bad >= self._limit.count and bad > self._limit.fraction * read:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise DataError(
                f"{self.where}: at most {self._limit.fraction:.2%} of the samples may be bad; got {bad} "
                f"of {read}: {', '.join(names[:_LISTED])}{more}. Repair or remove them, or raise the limit."
            )
