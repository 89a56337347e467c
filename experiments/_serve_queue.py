"""Requests that wait for the engine, and the thread that samples them in batches."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from jaxdit.sampling import CancelledError, Progress, Request, Sample

_LOG = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """There is no room for more requests."""


class SamplingEngine(Protocol):
    """What the queue needs of an engine."""

    def generate(self, requests: Sequence[Request], *, progress: Progress | None = None) -> list[Sample]: ...


class Watcher(Protocol):
    """Is told what the queue does, for metrics."""

    def waiting(self, count: int) -> None: ...
    def started(self, batch: int) -> None: ...
    def ended(self, batch: int, seconds: float) -> None: ...


@dataclass(eq=False)
class Job:
    """A request that waits or is sampled.

    Attributes:
        request: checked, defaults filled in.
        tokens: image tokens.
        done: gets the `Sample`, or what went wrong.
        entered_s: when it came, on the monotonic clock.
        is_cancelled: whether nobody waits for it any more.
    """

    request: Request
    tokens: int
    done: Future = field(default_factory=Future)
    entered_s: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many requests wait, and which are sampled together.

    Attributes:
        waiting: requests that may wait; more are refused.
        batch: most requests of a batch.
        batch_tokens: most image tokens of a batch of several.
        gather_s: seconds that a batch which has room waits for more requests.
    """

    waiting: int = 64
    batch: int = 8
    batch_tokens: int = 65_536
    gather_s: float = 0.02


class SamplingQueue:
    """Batches of requests for an engine, first come first served; one thread samples.

    A batch is the oldest request with those behind it that take as many steps, while they fit. A batch that nobody
    waits for any more is stopped between evaluations. What goes wrong in a batch goes to its requests, and the
    thread goes on.

    Args:
        engine: samples.
        limits: see above.
        watcher: is told.
    """

    def __init__(self, engine: SamplingEngine, limits: QueueLimits, watcher: Watcher) -> None:
        self._engine, self.limits, self._watcher = engine, limits, watcher
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being sampled."""
        return self._thread.is_alive() and not self._is_closed

    def put(self, jobs: Sequence[Job]) -> None:
        """Take requests, all or none.

        Raises:
            QueueFullError: if there is no room for them.
        """
        with self._changed:
            self._drop_cancelled()
            if self._is_closed or len(self._jobs) + len(jobs) > self.limits.waiting:
                raise QueueFullError(
                    f"{len(self._jobs)} requests wait, of {self.limits.waiting} at most. Try again later."
                )
            self._jobs.extend(jobs)
            self._changed.notify()
            self._watcher.waiting(len(self._jobs))

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            job.is_cancelled = True
            self._drop_cancelled()
            self._watcher.waiting(len(self._jobs))

    def close(self, timeout_s: float) -> None:
        """Refuse what waits and comes; the batch at hand may end."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._jobs)
            self._jobs.clear()
            self._changed.notify()
        for job in waiting:
            job.done.set_exception(QueueFullError("the server ends."))
        self._thread.join(timeout_s)

    def _drop_cancelled(self) -> None:
        self._jobs = deque(job for job in self._jobs if not job.is_cancelled)

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch is None:
                return
            self._sample(batch)

    def _next(self) -> list[Job] | None:
        with self._changed:
            while not self._jobs:
                if self._is_closed:
                    return None
                self._changed.wait()
            deadline = time.monotonic() + self.limits.gather_s
            while len(self._jobs) < self.limits.batch and not self._is_closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._drop_cancelled()
            batch = self._fitting()
            self._watcher.waiting(len(self._jobs))
            return batch

    def _fitting(self) -> list[Job]:
        """The oldest job and those of its steps that fit beside it; taken out of the queue."""
        batch: list[Job] = []
        rest: deque[Job] = deque()
        tokens = 0
        for job in self._jobs:
            fits = not batch or (
                len(batch) < self.limits.batch
                and tokens + job.tokens <= self.limits.batch_tokens
                and job.request.steps == batch[0].request.steps
            )
            if fits:
                batch.append(job)
                tokens += job.tokens
            else:
                rest.append(job)
        self._jobs = rest
        return batch

    def _sample(self, batch: list[Job]) -> None:
        if not batch:
            return
        started = time.monotonic()
        self._watcher.started(len(batch))
        try:
            samples = self._engine.generate(
                [job.request for job in batch],
                progress=lambda done, of: all(job.is_cancelled for job in batch),
            )
            for job, sample in zip(batch, samples, strict=True):
                job.done.set_result(sample)
        except CancelledError as error:
            self._fail(batch, error)
        except Exception as error:  # whatever it is, the next batch may do
            _LOG.exception("a batch of %d requests failed", len(batch))
            self._fail(batch, error)
        finally:
            self._watcher.ended(len(batch), time.monotonic() - started)

    def _fail(self, batch: list[Job], error: Exception) -> None:
        for job in batch:
            if not job.done.done():
                job.done.set_exception(error)
