"""Encoding the shards of a cache: pictures decoded in threads while devices work, shards written beside both."""

import collections
import contextlib
import fcntl
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from tqdm import tqdm

from experiments._config import UserError
from experiments._disk import check_writable, size_text, writing
from experiments._encode_plan import CachePlan
from experiments._encoders import BatchEncoder, Frame, Text
from experiments._platform import cpu_cores
from experiments.data import (
    EMPTY_FILE,
    BadSampleError,
    BadTally,
    CachedSample,
    is_finished,
    read_index,
    replace_file,
    write_shard,
)

_LOG = logging.getLogger(__name__)

# Pixels that are decoded ahead of the devices, at most: 3 bytes each.
_AHEAD_PIXELS = 128 << 20
# Names of unreadable pictures that are given at the end.
_LISTED = 20
# What a full disk needs beside the shards.
_MAKE_ROOM = "Make room, and run the same command again: it goes on from there."


@dataclass(frozen=True, slots=True)
class Worker:
    """Which shards are this process's: number, number + count, ... of the whole."""

    number: int
    count: int

    def shards(self, num_shards: int) -> list[int]:
        """Their numbers."""
        return list(range(self.number, num_shards, self.count))


@dataclass
class _Progress:
    """What was done."""

    bar: Any
    samples: int = 0
    pictures: int = 0
    pixels: int = 0
    started: float = field(default_factory=time.perf_counter)

    def report(self) -> str:
        """In a line."""
        took = time.perf_counter() - self.started
        return (
            f"encoded {self.samples:,} samples ({self.pictures:,} pictures, {self.pixels / 1e6:,.1f} megapixels) in"
            f" {took:,.1f} s: {self.samples / took:,.2f} samples/s, {self.pixels / 1e6 / took:,.2f} megapixels/s"
        )


def unfinished(root: Path, shards: Sequence[int]) -> list[int]:
    """Those of the shards that are not there yet, or not whole."""
    with ThreadPoolExecutor(8) as pool:
        finished = list(pool.map(lambda shard: is_finished(root, shard), shards))
    return [shard for shard, done in zip(shards, finished, strict=True) if not done]


def check_space(root: Path, plan: CachePlan, shards: Sequence[int]) -> None:
    """Refuses a disk that cannot hold the shards.

    Raises:
        UserError: with the arithmetic.
    """
    check_writable(root, option="--out")
    needed, free = sum(plan.shard_bytes(shard) for shard in shards), shutil.disk_usage(root).free
    if needed > free:
        raise UserError(
            f"not enough space for the cache: {len(shards):,} shards to make take {size_text(needed)},"
            f" {size_text(free)} are free in {root}. Make room, choose another --out, or store less (--no-padding,"
            " --latents bfloat16, --no-variance)."
        )


@contextlib.contextmanager
def only_worker(root: Path, worker: Worker) -> Iterator[None]:
    """Holds a worker's shards against another process with the same; released when the process ends, however it ends.

    Raises:
        UserError: if another process holds them.
    """
    check_writable(root, option="--out")
    with open(root / f".lock-{worker.number}-of-{worker.count}", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process encodes part {worker.number + 1} of {worker.count} of {root}. Wait for it, or give"
                " every process a --part of its own."
            ) from error
        except OSError as error:
            _LOG.warning("%s cannot be locked (%s): make sure that each part has one process", root, error)
        yield


class ShardEncoder:
    """Encodes shards of a plan.

    Args:
        root: of the cache.
        plan: of the cache.
        encoder: on this process's devices.
        tally: counts pictures that cannot be read.
    """

    def __init__(self, root: Path, plan: CachePlan, encoder: BatchEncoder, tally: BadTally) -> None:
        self._root, self._plan, self._encoder, self._tally = root, plan, encoder, tally

    def run(self, shards: Sequence[int], *, show: bool) -> str:
        """Makes shards; returns what was done, in a line.

        Raises:
            DataError: too many pictures cannot be read.
            UserError: the folder cannot be written to.
        """
        total = sum(len(self._plan.shards[shard]) for shard in shards)
        with contextlib.ExitStack() as stack:
            readers = stack.enter_context(ThreadPoolExecutor(cpu_cores(), thread_name_prefix="decode"))
            stack.callback(readers.shutdown, wait=False, cancel_futures=True)
            writer = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="write"))
            bar = stack.enter_context(tqdm(total=total, unit="sample", disable=not show))
            progress, written = _Progress(bar), None
            self._write_empty_caption()
            clips = self._decoded([int(i) for shard in shards for i in self._plan.shards[shard]], readers)
            for shard in shards:
                samples, bad = self._encoded(shard, clips, progress)
                self._wait(written)
                layout = self._plan.info.layout
                written = writer.submit(write_shard, self._root, shard, layout, samples, bad)
            self._wait(written)
            return progress.report()

    def _wait(self, written: Future[int] | None) -> None:
        if written is not None:
            with writing(self._root, _MAKE_ROOM):
                written.result()

    def _write_empty_caption(self) -> None:
        if (self._root / EMPTY_FILE).is_file():
            return
        text = self._encoder.text([""])[""]
        with writing(self._root, _MAKE_ROOM):
            replace_file(self._root / EMPTY_FILE, save({"text": text.features, "pooled": text.pooled}))

    def _decoded(
        self, numbers: Sequence[int], readers: ThreadPoolExecutor
    ) -> Iterator[tuple[int, np.ndarray | BadSampleError]]:
        """Samples with their frames, decoded ahead."""
        source, unit = self._plan.source, self._plan.folder.pixels_per_token**2
        waiting: collections.deque[tuple[int, Future[np.ndarray]]] = collections.deque()
        ahead, upcoming = 0, iter(numbers)
        for number in upcoming:
            ahead += int(source.image_lengths[number]) * unit
            waiting.append((number, readers.submit(source.frames, number)))
            while waiting and ahead > _AHEAD_PIXELS:
                first, frames = waiting.popleft()
                ahead -= int(source.image_lengths[first]) * unit
                yield first, _result(frames)
        for first, frames in waiting:
            yield first, _result(frames)

    def _encoded(
        self, shard: int, clips: Iterator[tuple[int, Any]], progress: _Progress
    ) -> tuple[list[CachedSample], list[tuple[str, str]]]:
        """The samples of a shard, and names of pictures that cannot be read, with reasons."""
        source, numbers = self._plan.source, self._plan.shards[shard].tolist()
        bad: dict[int, str] = {}
        text = self._encoder.text(source.caption(i) for i in numbers)

        def frames() -> Iterator[Frame]:
            for _ in numbers:
                number, clip = next(clips)
                if isinstance(clip, BadSampleError):
                    bad[number] = str(clip)
                    self._tally.bad(source.sample_name(number), clip)
                    continue
                self._tally.good()
                for t, pixels in enumerate(clip):
                    progress.pictures += 1
                    progress.pixels += pixels.shape[0] * pixels.shape[1]
                    yield Frame((number, t), pixels)

        found: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        for (number, t), latents in self._encoder.pictures(frames()):
            found[number][t] = latents
            if len(found[number]) == source.grids[number, 0]:
                progress.bar.update()
        progress.bar.update(len(bad))
        progress.samples += len(numbers) - len(bad)
        samples = [self._sample(i, found.pop(i), text[source.caption(i)]) for i in numbers if i not in bad]
        return samples, [(source.sample_name(i), reason) for i, reason in bad.items()]

    def _sample(self, number: int, frames: dict[int, Any], text: Text) -> CachedSample:
        source = self._plan.source
        t, h, w = source.grids[number].tolist()
        tensors = {
            "latents": np.stack([frames[i].mean for i in range(t)], axis=1),
            "logvar": np.stack([frames[i].logvar for i in range(t)], axis=1),
            "text": text.features,
            "pooled": text.pooled,
        }
        name, caption = source.sample_name(number), source.caption(number)
        return CachedSample(number, name, caption, (t, h, w), tensors)


def _result(frames: Future[np.ndarray]) -> np.ndarray | BadSampleError:
    try:
        return frames.result()
    except BadSampleError as error:
        return error


def report_whole(root: Path, num_shards: int) -> None:
    """Says whether the cache is whole now, and which pictures it could not read."""
    missing = unfinished(root, range(num_shards))
    if missing:
        _LOG.info("%s: %d of %d shards are still to be made by other parts", root, len(missing), num_shards)
        return
    indices = [read_index(root, shard) for shard in range(num_shards)]
    bad = [name for index in indices for name, _ in index.bad]
    num_bytes = sum(index.file_bytes for index in indices)
    _LOG.info(
        "%s is whole: %d samples in %d shards, %s",
        root,
        sum(len(index.numbers) for index in indices),
        num_shards,
        size_text(num_bytes),
    )
    if bad:
        told = ", ".join(bad[:_LISTED]) + (f" and {len(bad) - _LISTED} more" if len(bad) > _LISTED else "")
        _LOG.warning("%s lacks %d pictures that cannot be read: %s", root, len(bad), told)
