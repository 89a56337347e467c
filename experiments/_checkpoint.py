"""Checkpoints on Orbax: saved in the background, all or nothing, checked when they are read.

`WORKDIR/checkpoints/STEP` holds two Orbax items: `state`, a flat dict from the name of each array to the
array (any Orbax reads it without our code), and `meta`, a JSON document with the caller's dict, the shape,
type and fingerprint of each array, and a checksum of its own. Nothing is pickled. Orbax writes into a
temporary folder and renames it, so a folder with a number for a name is complete, whenever the process was
killed.
"""

import contextlib
import gc
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from experiments._config import UserError, one_line
from experiments._disk import check_writable, size_text
from experiments._fingerprint import fingerprints
from experiments._manifest import (
    FORMAT,
    check_same_model,
    crc32,
    make_manifest,
    named_abstract,
    named_arrays,
    state_bytes,
)
from experiments._rendezvous import PeerFailedError, Rendezvous

FOLDER = "checkpoints"
_TEMPORARY = "*.orbax-checkpoint-tmp*"
_REASON_LENGTH = 200
# The file system's refusals, as TensorStore words them in the ValueErrors it raises.
_REFUSALS = ("os_error_code", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "[Errno ")

logger = logging.getLogger(__name__)


class DamagedCheckpointError(UserError):
    """A checkpoint that cannot be read back as it was written."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint read back: the state with the structure and shardings asked for, and its dict."""

    step: int
    state: Any
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    With several processes every process makes the same calls in the same order. A reader beside a running
    training (sampling, evaluation) passes `read_only=True`, which never touches what the training is writing.
    Use it as a context manager, or call `close`: a save in the background needs the process to live on.

    Args:
      workdir: the run's folder; made if absent.
      keep: how many checkpoints stay; the oldest goes only after a newer one is complete.
      read_only: only look and restore.

    Raises:
      UserError: if the folder cannot be written to.
    """

    def __init__(self, workdir: str | Path, *, keep: int = 3, read_only: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: keep must be at least 1; got keep={keep}.")
        self.directory = Path(workdir).absolute() / FOLDER
        if not read_only:
            check_writable(self.directory)
            self._remove_leftovers()
        self._abandoned = _AbandonedTransfers()
        self._rendezvous = Rendezvous() if jax.process_count() > 1 and not read_only else None
        self._manager = None if read_only else self._make_manager(keep)
        # (step, bytes) of the save that may still be in progress.
        self._pending: tuple[int, int] | None = None
        self._saved: set[int] = set()

    def _make_manager(self, keep: int) -> ocp.CheckpointManager:
        barrier = ocp.AsyncOptions(barrier_sync_fn=self._rendezvous)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, async_options=barrier)
        return ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UserError as failure:
            if error is None:
                raise
            # The exception under way matters more than a save that failed as well.
            logger.error("%s", failure)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Starts saving; returns when the state may be overwritten, while the files are being written.

        Waits for the save before it, and raises here what went wrong with that one. After a failure the
        object is usable and the earlier checkpoints are as they were.

        Args:
          step: number of steps done; names the checkpoint.
          state: pytree of global `jax.Array`s, sharded in any way; no typed PRNG keys (save the seed).
          meta: what JSON can hold and return unchanged: position in the data, seed, fingerprint of the model.

        Returns:
          False if this object has saved or restored this step already (a run may be stopped right there).

        Raises:
          UserError: no space or no permission, or there are checkpoints of this or a later step which this
            object has neither written nor restored.
          TypeError: a leaf that is not an array, or meta that JSON cannot hold.
        """
        if step in self._saved:
            return False
        if self._manager is None:
            raise ValueError("Checkpoints.save: read_only must be False; got read_only=True.")
        arrays = named_arrays(state)
        self.wait()
        others = [found for found in self.steps() if found >= step and found not in self._saved]
        if others:
            # Saved beside them, this one would be taken for an old one and removed first.
            raise UserError(
                f"{self.directory} has checkpoints of another run from step {step} on: "
                f"{', '.join(map(str, others))}. Delete them, or choose another --workdir."
            )
        self._pending = (step, state_bytes(state))
        if self._rendezvous is not None:
            self._rendezvous.reset()
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(make_manifest(arrays, meta))
        )
        with self._explaining_refusals():
            self._manager.save(step, args=args, force=True)
        self._saved.add(step)
        return True

    def wait(self) -> None:
        """Returns when the last `save` is on disk.

        Raises:
          UserError: it could not be written; says why, how much it needs, and which checkpoint is the last.
        """
        if self._manager is not None:
            with self._explaining_refusals():
                self._manager.wait_until_finished()
        self._pending = None

    def close(self) -> None:
        """Waits as `wait` does and ends the threads; the object cannot be used afterwards."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
            self._abandoned.close()

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """The dict saved with a checkpoint (the newest one by default), without reading the state.

        Raises:
          UserError: there is no such checkpoint.
          DamagedCheckpointError: the document is not as it was written.
        """
        step = self._existing(step)
        try:
            return self._read_document(step)["meta"]
        except DamagedCheckpointError as damage:
            raise DamagedCheckpointError(f"{damage} {self._way_out(step)}") from damage

    def restore(self, abstract_state: Any, *, step: int | None = None, partial: bool = False) -> Restored:
        """Reads a checkpoint onto the current devices, however many it was saved from.

        Names, shapes and types are compared before anything is read, and the fingerprints after it.

        Args:
          abstract_state: pytree like the one saved, of `jax.ShapeDtypeStruct`s with the shardings wanted.
          step: which checkpoint; the newest by default.
          partial: `abstract_state` has some of the arrays only, under the same names (`{"ema": ...}`).

        Raises:
          UserError: there is none, or it is one of another model (the first differences are listed).
          DamagedCheckpointError: it does not read back as written; names the newest before it that does.
        """
        step = self._existing(step)
        wanted = named_abstract(abstract_state)
        try:
            document = self._read_document(step)
            check_same_model(self._path(step), document["arrays"], wanted, partial)
            arrays = self._read_arrays(step, document["arrays"], wanted, partial)
        except DamagedCheckpointError as damage:
            raise DamagedCheckpointError(f"{damage} {self._way_out(step, wanted, partial)}") from damage
        self._saved.add(step)
        leaves = [arrays[name] for name in wanted]
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return Restored(step=step, state=state, meta=document["meta"])

    def _path(self, step: int) -> str:
        return str(self.directory / str(step))

    def _remove_leftovers(self) -> None:
        """Of saves that were interrupted or failed; the first process does it while the others wait for it."""
        if jax.process_index() == 0:
            for leftover in self.directory.glob(_TEMPORARY):
                shutil.rmtree(leftover, ignore_errors=True)

    def _existing(self, step: int | None) -> int:
        found = self.steps()
        if step is None and found:
            return found[-1]
        if step is None or step not in found:
            which = "" if step is None else f" of step {step}"
            have = f"have steps {', '.join(map(str, found))}" if found else "there are none"
            raise UserError(f"no checkpoint{which} in {self.directory}: {have}.")
        return step

    def _read_document(self, step: int) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            with contextlib.closing(ocp.JsonCheckpointHandler()) as handler:
                document = handler.restore(self.directory / str(step) / "meta", args=ocp.args.JsonRestore())
            if document["crc32"] != crc32(document):
                raise ValueError("its meta document is not as it was written")
            return document

        document = self._reading(step, read)
        if document["format"] != FORMAT:
            raise UserError(
                f"checkpoint {self._path(step)} has format {document['format']}, this version reads "
                f"format {FORMAT}. Use the version that wrote it."
            )
        return document

    def _read_arrays(
        self, step: int, stored: dict[str, Any], wanted: dict[str, Any], partial: bool
    ) -> dict[str, jax.Array]:
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=partial)

        def read() -> dict[str, jax.Array]:
            with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
                return handler.restore(self.directory / str(step) / "state", args=args)

        arrays = self._reading(step, read)
        found = fingerprints(arrays)
        changed = [name for name in found if found[name] != stored[name]["fingerprint"]]
        if changed:
            raise self._damage(
                step, f"{len(changed)} arrays are not as they were written, first {changed[0]}"
            )
        return arrays

    def _way_out(self, step: int, wanted: dict[str, Any] | None = None, partial: bool = False) -> str:
        """What to do about a damaged checkpoint; the earlier one it names has been read on trial."""
        for earlier in reversed([found for found in self.steps() if found < step]):
            try:
                document = self._read_document(earlier)
                if wanted is not None:
                    check_same_model(self._path(earlier), document["arrays"], wanted, partial)
                    self._read_arrays(earlier, document["arrays"], wanted, partial)
            except UserError:
                continue
            return f"Delete that folder and run again to go on from step {earlier}, which is good."
        return "There is no good one before it: delete that folder to start over."

    def _reading(self, step: int, read: Callable[[], Any]) -> Any:
        """`read()`; if it fails on any process, a `DamagedCheckpointError` on every process.

        Orbax's handlers are used directly: around them its checkpointers have a barrier at which a process that
        failed would not arrive.
        """
        result = reason = None
        try:
            result = read()
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # a broken file surfaces as anything from KeyError to bare Exception
            text = one_line(str(error)).split(" See full TensorStore details")[0].rstrip(".")
            reason = text[:_REASON_LENGTH] or type(error).__name__
        if _on_all_processes(reason is None):
            return result
        self._abandoned.collect()
        raise self._damage(step, reason or "another process cannot read its part")

    def _damage(self, step: int, reason: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"checkpoint {self._path(step)} is damaged: {reason}.")

    @contextlib.contextmanager
    def _explaining_refusals(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, PeerFailedError) as error:
            if isinstance(error, ValueError) and not any(word in str(error) for word in _REFUSALS):
                raise
            step, num_bytes = self._pending or (-1, 0)
            reason = _system_reason(error)
        else:
            return
        self._abandoned.collect()
        self._pending = None
        self._saved.discard(step)
        # Orbax counts a save in before it is complete, and what it would have replaced out.
        if self._manager is not None:
            self._manager.reload()
        free = f"{size_text(shutil.disk_usage(self.directory).free)} free"
        self._remove_leftovers()
        last = self.latest()
        raise UserError(
            f"checkpoint of step {step} could not be written to {self.directory}: it needs up to "
            f"{size_text(num_bytes)}, {free} ({reason}). "
            f"{'No earlier checkpoint.' if last is None else f'The last good checkpoint is step {last}.'} "
            "Make room and run the same command again."
        )


def _on_all_processes(fine: bool) -> bool:
    """Whether all of them are fine; all have to ask."""
    if jax.process_count() == 1:
        return fine
    return bool(multihost_utils.process_allgather(np.array(fine)).all())


def _system_reason(error: Exception) -> str:
    """The operating system's reason, which TensorStore puts last, after several paths."""
    if isinstance(error, PeerFailedError):
        return "another process could not write its part"
    number = re.search(r"os_error_code='(\d+)'|\[Errno (\d+)\]", str(error))
    return os.strerror(int(number[1] or number[2])) if number else one_line(str(error))[:_REASON_LENGTH]


class _OrbaxErrors(logging.Filter):
    """Drops the tracebacks that Orbax's threads log for errors which it raises as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        from_orbax = "orbax" in (record.getMessage() if record.name == "asyncio" else record.pathname)
        return record.levelno < logging.ERROR or not from_orbax


_ORBAX_ERRORS = _OrbaxErrors()


class _AbandonedTransfers:
    """Keeps off stderr what a failed Orbax operation leaves there.

    It abandons its other transfers, and these report themselves when they end ("Event loop is closed", from
    TensorStore's threads) or are freed.
    """

    def __init__(self) -> None:
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_ORBAX_ERRORS)  # adding it again changes nothing
        self._next_hook = sys.unraisablehook
        self._collecting = False
        sys.unraisablehook = self._hook

    def close(self) -> None:
        if sys.unraisablehook == self._hook:
            sys.unraisablehook = self._next_hook

    def collect(self) -> None:
        """Frees them now."""
        self._collecting = True
        try:
            gc.collect()
        finally:
            self._collecting = False

    def _hook(self, unraisable: Any) -> None:
        if not self._collecting and str(unraisable.exc_value) != "Event loop is closed":
            self._next_hook(unraisable)
