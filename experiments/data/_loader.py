"""Steps in order, read ahead in threads by grain."""

from __future__ import annotations

from types import TracebackType
from typing import Any, SupportsIndex

import grain

from experiments.data._reader import StepReader
from experiments.data._types import StepData


class _Steps:
    """grain's random-access source: element i is step start + i."""

    def __init__(self, reader: StepReader, start_step: int, num_steps: int):
        self._reader = reader
        self._start_step = start_step
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, i: SupportsIndex) -> tuple[int, StepData]:
        step = self._start_step + int(i)
        return step, self._reader.read(step)


class StepLoader:
    """Iterator over (step, content); close it, or use it in a `with` statement, to end its threads.

    The position to save is the global step: a loader started there continues exactly, on any devices.
    """

    def __init__(self, reader: StepReader, *, start_step: int, num_steps: int, options: grain.ReadOptions):
        steps: Any = _Steps(reader, start_step, num_steps)
        self._iterator: Any = iter(grain.MapDataset.source(steps).to_iter_dataset(options))

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> tuple[int, StepData]:
        if self._iterator is None:
            raise ValueError("StepLoader: a closed loader cannot be read. Make a new one at the wanted step.")
        return next(self._iterator)

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading ahead; harmless when done twice."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def make_loader(
    reader: StepReader,
    *,
    start_step: int = 0,
    num_steps: int = 2**31 - 1,
    num_threads: int = 2,
    prefetch: int = 4,
) -> StepLoader:
    """Yields (t, content of step t) for t = start_step, start_step + 1, ... in order.

    Args:
      reader: reads one step.
      start_step: first step.
      num_steps: steps to yield.
      num_threads: threads that read steps ahead; 0 reads in the caller's thread.
      prefetch: steps read ahead.

    Raises:
      ValueError: a negative start, or threads without room to read ahead.
    """
    if start_step < 0 or num_threads < 0 or prefetch < 1:
        raise ValueError(
            f"make_loader: start_step and num_threads must not be negative, prefetch at least 1; got "
            f"start_step={start_step}, num_threads={num_threads}, prefetch={prefetch}."
        )
    options = grain.ReadOptions(
        num_threads=min(num_threads, prefetch), prefetch_buffer_size=prefetch if num_threads else 0
    )
    return StepLoader(reader, start_step=start_step, num_steps=num_steps, options=options)
