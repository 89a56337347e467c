"""Sources of image and video files: rules, grids and reading; subclasses know where the files lie."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from experiments.data._bad import BadLimit
from experiments.data._decode import FrameChoice, media_size, open_media, read_frames
from experiments.data._index import MediaEntry, MediaFile
from experiments.data._rows import rows_from_frames, snap_grid
from experiments.data._table import SampleTable, TableSource, encode_captions
from experiments.data._types import BadSampleError, DataError

_logger = logging.getLogger(__name__)

# Names given in an error.
_LISTED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class MediaRules:
    """How files become sequences.

    Attributes:
      patch: pixels per patch side.
      max_tokens: most image tokens of a sequence; larger pictures are scaled down, never cropped.
      frame_stride: every how many frames of a clip are kept.
      max_frames: most frames that are kept.
      max_text: most caption tokens: words, those beyond eight bytes taking more than one; longer captions are cut,
        and the log says how many.
      allow_uncaptioned: whether files without a caption are used, with an empty one.
      bad_limit: how many files may have unreadable headers.
      index_folder: where sizes are remembered between runs; None reads all headers every time.
    """

    patch: int
    max_tokens: int
    frame_stride: int = 1
    max_frames: int = 16
    max_text: int = 512
    allow_uncaptioned: bool = False
    bad_limit: BadLimit = dataclasses.field(default_factory=BadLimit)
    index_folder: str | Path | None = None

    def __post_init__(self) -> None:
        if min(self.patch, self.frame_stride, self.max_frames) < 1 or self.max_text < 0:
            raise ValueError(
                f"MediaRules: patch, frame_stride and max_frames must be at least 1, max_text 0; got "
                f"patch={self.patch}, frame_stride={self.frame_stride}, max_frames={self.max_frames}, "
                f"max_text={self.max_text}."
            )
        if self.max_tokens < self.max_frames:
            raise ValueError(
                f"MediaRules: max_tokens must give each frame a token; got max_tokens={self.max_tokens}, "
                f"max_frames={self.max_frames}. Raise max_tokens or lower max_frames."
            )

    def folder(self) -> Path | None:
        """`index_folder` as a path."""
        return None if self.index_folder is None else Path(self.index_folder)

    def grid(self, entry: MediaEntry) -> tuple[int, int, int]:
        """Patches (t, h, w) of a file."""
        frames = min(self.max_frames, -(-entry.frames // self.frame_stride))
        most = self.max_tokens // frames
        return (frames, *snap_grid(entry.height, entry.width, patch=self.patch, max_patches=most))


class MediaSource(TableSource):
    """Image and video files, captioned, in their own aspect ratios; labelled where every one has a label.

    Args:
      name: of the source.
      files: what was indexed.
      rules: how files become sequences.

    Raises:
      DataError: no file, files without caption, or pictures smaller than a patch.
    """

    def __init__(self, name: str, *, files: Sequence[MediaFile], rules: MediaRules):
        entries = [entry for file in files for entry in file.entries]
        if not entries:
            raise DataError(
                f"{name}: there must be images or videos; got none that can be read. Check the path."
            )
        _check_sizes(name, entries, rules.patch)
        _check_captions(name, entries, rules.allow_uncaptioned)
        self._rules = rules
        self._paths = [file.path for file in files for _ in file.entries]
        self._entries = entries
        names = [entry.name for entry in entries]
        captions = encode_captions([e.caption or "" for e in entries], max_text=rules.max_text, name=name)
        grids = np.asarray([rules.grid(entry) for entry in entries], np.int32)
        table = SampleTable(names, names, grids, captions, _all_labels(name, entries))
        super().__init__(name, patch=rules.patch, table=table)

    def caption(self, index: int) -> str:
        """The caption as it was written."""
        return self._entries[index].caption or ""

    def file(self, index: int) -> Path:
        """The file that a sample lies in."""
        return self._paths[index]

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Decodes, resizes and cuts one file."""
        return rows_from_frames(self.frames(index), patch=self.patch)

    def frames(self, index: int) -> UInt8[np.ndarray, "t y x 3"]:
        """Decodes and resizes one file.

        Raises:
          BadSampleError: it cannot be decoded.
        """
        entry = self._entries[index]
        frames, h, w = self.grid(index)
        choice = FrameChoice(frames, self._rules.frame_stride, h * self.patch, w * self.patch)
        with open_media(self._paths[index], entry.offset, entry.size) as file:
            return read_frames(file, _suffix(entry.name), choice)


def scan_media(path: Path, entry: MediaEntry) -> MediaEntry:
    """Completes an entry with the size of its picture, or with the reason why there is none."""
    try:
        with open_media(path, entry.offset, entry.size) as file:
            size = media_size(file, _suffix(entry.name))
    except BadSampleError as error:
        return entry._replace(error=str(error))
    return entry._replace(frames=size.frames, height=size.height, width=size.width)


def _all_labels(name: str, entries: Sequence[MediaEntry]) -> Int32[np.ndarray, " n"] | None:
    """The labels, or None when one is missing, which the log says."""
    labels = [entry.label for entry in entries if entry.label is not None]
    if len(labels) == len(entries):
        return np.asarray(labels, np.int32)
    if labels:
        without = [entry.name for entry in entries if entry.label is None]
        _logger.warning("%s: no labels, since %d files have none: %s", name, len(without), _some(without))
    return None


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def _check_sizes(name: str, entries: Sequence[MediaEntry], patch: int) -> None:
    small = [entry.name for entry in entries if min(entry.height, entry.width) < patch]
    if small:
        raise DataError(
            f"{name}: pictures must be at least one patch of {patch} pixels wide and high; got {len(small)} "
            f"smaller: {_some(small)}. Use a smaller patch or remove them."
        )


def _check_captions(name: str, entries: Sequence[MediaEntry], allow_uncaptioned: bool) -> None:
    bare = [entry.name for entry in entries if not (entry.caption or "").strip()]
    if bare and not allow_uncaptioned:
        raise DataError(
            f"{name}: every file needs a caption; got {len(bare)} of {len(entries)} without: {_some(bare)}. "
            "Add captions or set allow_uncaptioned."
        )
