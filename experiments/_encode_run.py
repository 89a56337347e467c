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
from experiments._encoders import BatchEncoder, Frame, Latents, Text
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

    Batches go on over the ends of shards, so that they are full; a shard is written when all its samples are there.

    Args:
        root: of the cache.
        plan: of the cache.
        encoder: on this process's devices.
        tally: counts pictures that cannot be read.
    """

    def __init__(self, root: Path, plan: CachePlan, encoder: BatchEncoder, tally: BadTally) -> None:
        self._root, self._plan, self._encoder, self._tally = root, plan, encoder, tally
        self._bad: dict[int, str] = {}
        # Of samples whose shard is not complete yet: frames by number, features by shard and caption.
        self._latents: dict[int, dict[int, Latents]] = collections.defaultdict(dict)
        self._texts: dict[tuple[int, str], Text] = {}

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
            pictures = self._encoder.pictures(self._frames(shards, readers, progress))
            texts = self._encoder.texts(self._captions(shards))
            for shard in shards:
                samples, bad = self._complete(shard, pictures, texts)
                progress.samples += len(samples)
                bar.update(len(samples) + len(bad))
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
        ((_, text),) = self._encoder.texts([("", "")])
        with writing(self._root, _MAKE_ROOM):
            replace_file(self._root / EMPTY_FILE, save({"text": text.features, "pooled": text.pooled}))

    def _decoded(
        self, shards: Sequence[int], readers: ThreadPoolExecutor
    ) -> Iterator[tuple[int, np.ndarray | BadSampleError]]:
        """Samples with their frames, decoded ahead."""
        source, unit = self._plan.source, self._plan.folder.pixels_per_token**2
        waiting: collections.deque[tuple[int, Future[np.ndarray]]] = collections.deque()
        ahead = 0
        for number in (int(i) for shard in shards for i in self._plan.shards[shard]):
            ahead += int(source.image_lengths[number]) * unit
            waiting.append((number, readers.submit(source.frames, number)))
            while waiting and ahead > _AHEAD_PIXELS:
                first, frames = waiting.popleft()
                ahead -= int(source.image_lengths[first]) * unit
                yield first, _result(frames)
        for first, frames in waiting:
            yield first, _result(frames)

    def _frames(
        self, shards: Sequence[int], readers: ThreadPoolExecutor, progress: _Progress
    ) -> Iterator[Frame]:
        """Pictures by sample and frame; those that cannot be read are counted."""
        for number, clip in self._decoded(shards, readers):
            if isinstance(clip, BadSampleError):
                self._bad[number] = str(clip)
                self._tally.bad(self._plan.source.sample_name(number), clip)
                continue
            self._tally.good()
            for t, pixels in enumerate(clip):
                progress.pictures += 1
                progress.pixels += pixels.shape[0] * pixels.shape[1]
                yield Frame((number, t), pixels)

    def _captions(self, shards: Sequence[int]) -> Iterator[tuple[tuple[int, str], str]]:
        """Captions by shard, each once."""
        for shard in shards:
            for caption in dict.fromkeys(self._plan.source.caption(int(i)) for i in self._plan.shards[shard]):
                yield (shard, caption), caption

    def _complete(
        self, shard: int, pictures: Iterator[tuple[Any, Latents]], texts: Iterator[tuple[Any, Text]]
    ) -> tuple[list[CachedSample], list[tuple[str, str]]]:
        """The samples of a shard, and names of pictures that cannot be read, with reasons."""
        source, numbers = self._plan.source, self._plan.shards[shard].tolist()
        lacking = set(numbers)
        while lacking := {i for i in lacking if i not in self._bad and not self._has_all(i)}:
            found = next(pictures, None)
            if found is None:  # what is left cannot be read
                break
            (number, t), latents = found
            self._latents[number][t] = latents
        captions = {source.caption(i) for i in numbers}
        while not all((shard, caption) in self._texts for caption in captions):
            name, text = next(texts)
            self._texts[name] = text
        samples = [self._sample(shard, i) for i in numbers if i not in self._bad]
        for caption in captions:
            del self._texts[shard, caption]
        return samples, [(source.sample_name(i), self._bad[i]) for i in numbers if i in self._bad]

    def _has_all(self, number: int) -> bool:
        return number in self._latents and len(self._latents[number]) == self._plan.source.grids[number, 0]

    def _sample(self, shard: int, number: int) -> CachedSample:
        source, frames = self._plan.source, self._latents.pop(number)
        name, caption = source.sample_name(number), source.caption(number)
        text = self._texts[shard, caption]
        t, h, w = source.grids[number].tolist()
        tensors = {
            "latents": np.stack([frames[i].mean for i in range(t)], axis=1),
            "logvar": np.stack([frames[i].logvar for i in range(t)], axis=1),
            "text": text.features,
            "pooled": text.pooled,
        }
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
