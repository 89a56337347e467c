"""The index of media files: sizes and captions read once, in threads, and kept in a file between runs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from experiments.data._bad import BadTally
from experiments.data._hash import digest_of
from experiments.data._types import DataError

_logger = logging.getLogger(__name__)

# Written into the file; another number makes old files be ignored.
_FORMAT = 2

# Reading headers waits for storage more than it computes.
_THREADS = 8


class MediaEntry(NamedTuple):
    """One image or clip.

    Attributes:
      name: unique in its source: a path below the root, or shard and member.
      offset, size: where its bytes lie in the file; a size of -1 means all of it.
      frames, height, width: of the whole file, upright; 0 frames when the header cannot be read.
      caption: None when there is none.
      error: why the header cannot be read, else empty.
      label: class, None when there is none.
    """

    name: str
    offset: int
    size: int
    frames: int
    height: int
    width: int
    caption: str | None = None
    error: str = ""
    label: int | None = None


class MediaFile(NamedTuple):
    """A file of the source and what it contains: itself, or the members of a shard."""

    path: Path
    entries: tuple[MediaEntry, ...]


class _Stamp(NamedTuple):
    """What changes when a file does."""

    size: int
    modified_ns: int


def index_files(
    key: str,
    paths: Sequence[Path],
    *,
    scan: Callable[[Path], list[MediaEntry]],
    folder: Path | None,
    tally: BadTally,
) -> list[MediaFile]:
    """Scans files, or takes over what an earlier run found in those whose path, size and time are unchanged.

    Args:
      key: what the source is (its root or pattern), which names the index file.
      paths: files to scan.
      scan: entries of one file.
      folder: where the index file is kept; None keeps none.
      tally: counts entries; files with an unreadable one are scanned again next time.

    Returns:
      The readable entries of each file, in the order of `paths`.

    Raises:
      DataError: too many entries are unreadable.
    """
    stamps = {str(path): _stamp(path) for path in paths}
    cache = None if folder is None else folder / f"index-{digest_of([key])}.json"
    known = {} if cache is None else _load(cache, stamps)
    todo = [path for path in paths if str(path) not in known]
    if todo:
        _logger.info("%s: reading the headers of %d of %d files", tally.where, len(todo), len(paths))
        with ThreadPoolExecutor(_THREADS) as pool:
            scanned = dict(zip(map(str, todo), pool.map(scan, todo), strict=True))
        if cache is not None:
            clean = {p: e for p, e in scanned.items() if not any(entry.error for entry in e)}
            _save(cache, {**known, **clean}, stamps)
        known.update(scanned)
    files = [MediaFile(path, tuple(known[str(path)])) for path in paths]
    tally.good(sum(not entry.error for file in files for entry in file.entries))
    for file in files:
        for entry in file.entries:
            if entry.error:
                tally.bad(entry.name, ValueError(entry.error))
    return [MediaFile(f.path, tuple(e for e in f.entries if not e.error)) for f in files]


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:  # a link to nowhere: scanning it will say so
        return _Stamp(-1, 0)
    return _Stamp(status.st_size, status.st_mtime_ns)


def _load(cache: Path, stamps: Mapping[str, _Stamp]) -> dict[str, list[MediaEntry]]:
    """What the index file says about unchanged files; a damaged index file is logged and made anew."""
    if not cache.exists():
        return {}
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return {}
        return {
            path: [MediaEntry(*entry) for entry in entries]
            for path, (stamp, entries) in content["files"].items()
            if path in stamps and _Stamp(*stamp) == stamps[path]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("the index file %s is damaged (%s) and is made anew", cache, error)
        return {}


def _save(cache: Path, known: Mapping[str, Sequence[MediaEntry]], stamps: Mapping[str, _Stamp]) -> None:
    """Replaces the index file in one move: other processes read the old one or the new one."""
    content = {"format": _FORMAT, "files": {path: (stamps[path], entries) for path, entries in known.items()}}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        partial.replace(cache)
    except OSError as error:
        raise DataError(
            f"index_files: index_folder must be a folder that can be written; got {cache.parent}: {error}. Choose"
            " another, or None to read all headers every time."
        ) from error
