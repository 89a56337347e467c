"""A trace of a few training steps, for TensorBoard's profiler or Perfetto."""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import jax

_LOG = logging.getLogger(__name__)

# Steps of a process before its trace: they compile.
_WARM_UP = 2


@dataclass
class Profile:
    """Traces some steps of a run with jax.profiler. Use as a context manager: leaving it ends a trace under way.

    Attributes:
        steps: how many are still to be traced; 0 for none.
        folder: where the trace goes.
    """

    steps: int
    folder: Path
    _end: int | None = None

    def __enter__(self) -> "Profile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def before(self, done: int, left: int) -> None:
        """Call before each step; starts and ends the trace.

        Args:
            done: steps that this process has done.
            left: steps still to do. Where they would not suffice after a warm-up, the trace starts at once.
        """
        if self._end is not None and done >= self._end:
            self._finish()
        at_once = done == 0 and left < _WARM_UP + self.steps
        if self.steps and (done == _WARM_UP or at_once):
            jax.profiler.start_trace(str(self.folder))
            self._end, self.steps = done + self.steps, 0

    def _finish(self) -> None:
        if self._end is not None:
            self._end = None
            jax.profiler.stop_trace()
            _LOG.info("profile written to %s", self.folder)
