"""What a run reports while it goes: metrics.jsonl, TensorBoard events, and a line for the person watching."""

import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments._config import UserError

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "events"
# Where a number that JSON cannot hold is kept, so that a row reads back as it was written.
NON_FINITE = "non_finite"

logger = logging.getLogger(__name__)


def _is_first_process() -> bool:
    import jax  # asking the process number starts the backend: not at import

    return jax.process_index() == 0


class MetricsWriter:
    """Appends one JSON object per step to `WORKDIR/metrics.jsonl` and the same numbers to TensorBoard events.

    A row is handed to the operating system at once, so it survives the end of the process; `flush` also makes
    it survive the end of the machine. Call it when a checkpoint is saved. Rows from `start_step` on, left by a
    run that was interrupted after its last checkpoint, are removed first, in one atomic step: the file has
    each step once. With several processes only the first writes.

    Args:
      workdir: the run's folder; made if absent.
      start_step: the first step that this run will do.
      flush_s: seconds between flushes of the TensorBoard events.
      enabled: whether to write; by default on the first process only.

    Raises:
      UserError: the file cannot be written, or holds a line that is no JSON object before its last.
    """

    def __init__(
        self, workdir: str | Path, start_step: int = 0, *, flush_s: float = 10.0, enabled: bool | None = None
    ) -> None:
        self._last_step = start_step - 1
        self._path = Path(workdir) / METRICS_FILE
        self._file: TextIO | None = None
        if not (_is_first_process() if enabled is None else enabled):
            return
        with self._refusals_explained():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_rows_from(self._path, start_step)
            self._events = _Events(self._path.parent / EVENTS_FOLDER, start_step, flush_s)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(
        self, step: int, values: Mapping[str, Any], images: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Writes the row of one step.

        NaN and infinities are null in the row and named under "non_finite", since JSON has none.

        Args:
          step: greater than that of the row before.
          values: numbers (of Python, NumPy or JAX) or one-dimensional sequences of them; sequences go to the
            JSON only.
          images: uint8 RGB of shape (height, width, 3), to TensorBoard only.

        Raises:
          ValueError: the step has been written, or a value is no number or sequence of numbers.
        """
        if step <= self._last_step:
            raise ValueError(
                f"MetricsWriter.write: step must be greater than {self._last_step}; got step={step}. "
                "Put all values of a step into one call."
            )
        row = _row(step, values)
        self._last_step = step
        if self._file is None:
            return
        with self._refusals_explained():
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            numbers = {name: float(values[name]) for name in values if not isinstance(row[name], list)}
            self._events.write(step, numbers, images or {})

    def flush(self) -> None:
        """Returns when everything written so far is on the disk."""
        if self._file is not None:
            with self._refusals_explained():
                os.fsync(self._file.fileno())
                self._events.flush()

    def close(self) -> None:
        """Writes what is still buffered and closes the files."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with self._refusals_explained():
            try:
                file.close()
            finally:
                self._events.close()

    @contextmanager
    def _refusals_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write {self._path} and the events beside it: {error.strerror}. Make room or choose "
                "another --workdir; what has been saved before is as it was."
            ) from error


class _Events:
    """TensorBoard's event file.

    tensorboardX's own SummaryWriter writes from a thread; when the disk is full that thread ends, and the
    training would wait for it for ever once ten events are queued.
    """

    def __init__(self, folder: Path, start_step: int, flush_s: float) -> None:
        folder.mkdir(exist_ok=True)
        # TensorBoard wants "tfevents" and the time; process and step keep a resumed run in the same second apart.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{start_step}"
        self._writer = RecordWriter(str(folder / name))
        self._flush_s, self._flushed_s = flush_s, time.monotonic()
        self._write(file_version="brain.Event:2")
        if start_step:
            # TensorBoard hides events of these steps that an earlier run has left.
            self._write(step=start_step, session_log=SessionLog(status=SessionLog.START))
        self.flush()

    def write(self, step: int, numbers: Mapping[str, float], images: Mapping[str, np.ndarray]) -> None:
        content = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        )
        for name, image in images.items():
            content.MergeFrom(summary.image(name, image, dataformats="HWC"))
        self._write(step=step, summary=content)
        if time.monotonic() >= self._flushed_s + self._flush_s:
            self.flush()

    def _write(self, **fields: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def flush(self) -> None:
        self._writer.flush()
        self._flushed_s = time.monotonic()

    def close(self) -> None:
        self._writer.close()


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The rows of a run so far, with NaN and infinities in their places; a half-written last row is left out.

    Raises:
      UserError: there is no file, or a line before the last is no JSON object.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.is_file():
        raise UserError(f"no {METRICS_FILE} in {workdir}. Is it the workdir of a run?")
    rows = _parse(path)
    for row in rows:
        for name, text in row.pop(NON_FINITE, {}).items():
            row[name] = [float(item) for item in text] if isinstance(text, list) else float(text)
    return rows


def _parse(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row.get("step"), int):
                raise ValueError("no step")
        except (ValueError, AttributeError) as error:
            # A process killed while writing leaves a last line without its end, a power cut one of NULs.
            if number < len(lines) and line.strip("\0"):
                raise UserError(
                    f"{path}:{number}: not a row of metrics. Repair or remove the file."
                ) from error
            continue
        rows.append(row)
    return rows


def _drop_rows_from(path: Path, start_step: int) -> None:
    if not path.exists():
        return
    rows = _parse(path)
    kept = [row for row in rows if row["step"] < start_step]
    if len(kept) < len(rows):
        logger.info("%s: dropped %d rows from step %d on", path, len(rows) - len(kept), start_step)
    replacement = path.with_suffix(".tmp")
    with open(replacement, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(replacement, path)


def _row(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step}
    non_finite = {}
    for name, value in values.items():
        if name in ("step", NON_FINITE):
            raise ValueError(f"MetricsWriter.write: {name!r} is a column of its own. Rename the value.")
        plain = _plain(name, value)
        row[name] = _finite(plain)
        if row[name] != plain:
            non_finite[name] = [str(item) for item in plain] if isinstance(plain, list) else str(plain)
    return {**row, NON_FINITE: non_finite} if non_finite else row


def _plain(name: str, value: Any) -> Any:
    """A number or list of numbers as Python has them."""
    array = np.asarray(value)
    if array.dtype.kind == "V":  # bfloat16 and its kin
        array = array.astype(np.float64)
    if array.ndim > 1 or array.dtype.kind not in "biuf":
        raise ValueError(
            f"MetricsWriter.write: values must be real numbers or sequences of them; got {name} of "
            f"{type(value).__name__} with shape {array.shape}. Reduce or convert it first."
        )
    return array.tolist()


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the person watching sees of a step.

    Attributes:
      loss: of the step.
      tokens_per_s: tokens of the step, padding not counted, over `step_s`.
      step_s: seconds from the end of the step before.
      load_before: the fullest device's load over the mean, before balancing.
      load_after: the same after it.
      padded_fraction: part of all rows that are padding.
      computed_over_useful: what a device computes, padding and waiting included, over the mean load.
      compilations: of the step so far in this process.
    """

    loss: float
    tokens_per_s: float
    step_s: float
    load_before: float
    load_after: float
    padded_fraction: float
    computed_over_useful: float
    compilations: int

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, {_count_text(self.tokens_per_s)} tokens/s, {self.step_s:.3g} s/step, "
            f"load max/mean {self.load_before:.2f} -> {self.load_after:.2f}, "
            f"padded {100 * self.padded_fraction:.1f} %, computed/useful {self.computed_over_useful:.3f}, "
            f"compiled {self.compilations}"
        )


def _count_text(count: float) -> str:
    for unit in ("", "k", "M"):
        if abs(count) < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}G"


class Progress:
    """A bar on a terminal, a log line now and then elsewhere; silent on all processes but the first.

    While the bar is shown, log records are printed above it. Use as a context manager.

    Args:
      total_steps: of the whole run, also when it is resumed.
      start_step: steps done before.
      log_every: without a terminal, a line every so many steps, for the first and for the last.
      stream: stderr by default.
      enabled: whether to show anything; by default on the first process only.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        log_every: int = 50,
        stream: TextIO | None = None,
        enabled: bool | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._total, self._start, self._log_every = total_steps, start_step, log_every
        self._enabled = _is_first_process() if enabled is None else enabled
        self._bar: tqdm | None = None
        self._stack = ExitStack()
        # Steps done and the time after the first step, which compiles: its pace says nothing about the rest.
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> "Progress":
        if self._enabled and self._stream.isatty():
            self._bar = self._stack.enter_context(
                tqdm(
                    total=self._total, initial=self._start, file=self._stream, unit="step", dynamic_ncols=True
                )
            )
            self._stack.enter_context(logging_redirect_tqdm())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._bar = None

    def update(self, steps_done: int, report: StepReport) -> None:
        """Shows that `steps_done` steps of the run are done, and the report of the last."""
        if not self._enabled:
            return
        self._first = self._first or (steps_done, time.monotonic())
        if self._bar is not None:
            self._bar.set_postfix_str(str(report), refresh=False)
            self._bar.update(steps_done - self._bar.n)
            return
        if steps_done in (self._start + 1, self._total) or steps_done % self._log_every == 0:
            logger.info("step %d of %d: %s%s", steps_done, self._total, report, self._remaining(steps_done))

    def _remaining(self, steps_done: int) -> str:
        assert self._first is not None
        first, first_s = self._first
        left = self._total - steps_done
        if steps_done == first or not left:
            return ""
        left_s = (time.monotonic() - first_s) / (steps_done - first) * left
        return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"
