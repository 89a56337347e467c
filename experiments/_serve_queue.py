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


# How long a batch that is to stop may take to: about an evaluation.
_STOP_S = 5.0
_ENDING = "the server ends. Ask another, or later."


class QueueFullError(RuntimeError):
    """There is no room for more requests."""


class EndingError(RuntimeError):
    """The server ends, before a request was sampled."""


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
        self._running: list[Job] = []
        self._is_closed = self._is_stopped = False
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
            EndingError: if the queue is closed.
        """
        with self._changed:
            if self._is_closed:
                raise EndingError(_ENDING)
            self._drop_cancelled()
            if len(self._jobs) + len(jobs) > self.limits.waiting:
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

    def close(self, timeout_s: float) -> bool:
        """Refuse what waits and comes, and wait for the batch at hand.

        A batch that takes longer is stopped at its next evaluation; one that does not stop either is left behind. In
        any case all requests have an answer when this returns, after `timeout_s` and a few seconds at most.

        Args:
            timeout_s: that the batch may still take.

        Returns:
            Whether the thread has ended.
        """
        with self._changed:
            self._is_closed = True
            waiting = list(self._jobs)
            self._jobs.clear()
            self._watcher.waiting(0)
            self._changed.notify()
        self._fail(waiting, EndingError(_ENDING))
        self._thread.join(timeout_s)
        self._is_stopped = True
        self._thread.join(_STOP_S if self._thread.is_alive() else 0)
        with self._changed:
            running = list(self._running)
        self._fail(running, EndingError(_ENDING))
        return not self._thread.is_alive()

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
            batch = self._running = self._fitting()
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
                [job.request for job in batch], progress=lambda done, of: self._shall_stop(batch)
            )
            self._answer(batch, samples)
        except CancelledError as error:
            self._fail(batch, EndingError(_ENDING) if self._is_stopped else error)
        except Exception as error:  # whatever it is, the next batch may do
            _LOG.exception("a batch of %d requests failed", len(batch))
            self._fail(batch, error)
        finally:
            with self._changed:
                self._running = []
            self._watcher.ended(len(batch), time.monotonic() - started)

    def _shall_stop(self, batch: list[Job]) -> bool:
        return self._is_stopped or all(job.is_cancelled for job in batch)

    def _answer(self, batch: list[Job], samples: list[Sample]) -> None:
        with self._changed:
            for job, sample in zip(batch, samples, strict=True):
                if not job.done.done():
                    job.done.set_result(sample)

    def _fail(self, batch: list[Job], error: Exception) -> None:
        with self._changed:
            for job in batch:
                if not job.done.done():
                    job.done.set_exception(error)
