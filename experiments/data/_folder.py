"""A tree of image and video files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.data._bad import BadTally
from experiments.data._captions import any_captions
from experiments.data._decode import MEDIA_SUFFIXES
from experiments.data._index import MediaEntry, MediaFile, index_files
from experiments.data._media import MediaRules, MediaSource, scan_media
from experiments.data._types import DataError

# (root, names of the media files below it) -> captions by name.
CaptionRule = Callable[[Path, Sequence[str]], Mapping[str, str]]


class ImageFolder(MediaSource):
    """Images and videos below a folder, at any depth; hidden files and linked folders are left out.

    When every file lies in a sub-folder, its label is the place of its top-level sub-folder among their
    sorted names; else there are no labels.

    Args:
      root: the folder.
      rules: how files become sequences.
      captions: where captions come from: `any_captions`, `sidecar_captions`, `metadata_captions` or your own.

    Raises:
      DataError: the folder is missing or empty, captions are missing, or too many files cannot be read.
    """

    def __init__(self, root: str | Path, *, rules: MediaRules, captions: CaptionRule = any_captions):
        root = Path(root)
        if not root.is_dir():
            raise DataError(f"ImageFolder: root must be a folder; got root={root}. Check the path.")
        names = _media_names(root)
        if not names:
            raise DataError(f"ImageFolder: root must contain images or videos; got none below root={root}.")
        title = f"folder {root.name}"

        def scan(path: Path) -> list[MediaEntry]:
            name = path.relative_to(root).as_posix()
            return [scan_media(path, MediaEntry(name, 0, -1, 0, 0, 0))]

        files = index_files(
            str(root.resolve()),
            [root / name for name in names],
            scan=scan,
            folder=rules.folder(),
            tally=BadTally(rules.bad_limit, title),
        )
        # Captions are read every time: they may change without the picture.
        found = captions(root, names)
        labels = _folder_labels(names)
        complete = [
            MediaFile(
                file.path,
                tuple(e._replace(caption=found.get(e.name), label=labels.get(e.name)) for e in file.entries),
            )
            for file in files
        ]
        super().__init__(title, files=complete, rules=rules)


def _folder_labels(names: Sequence[str]) -> dict[str, int]:
    """Labels by name, unreadable files included: they must not renumber the classes."""
    if not all("/" in name for name in names):
        return {}
    folders = [name.split("/", 1)[0] for name in names]
    label_of_folder = {folder: i for i, folder in enumerate(sorted(set(folders)))}
    return {name: label_of_folder[folder] for name, folder in zip(names, folders, strict=True)}


def _media_names(root: Path) -> list[str]:
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".")]
        for file in files:
            path = Path(folder, file)
            if not file.startswith(".") and path.suffix.lower() in MEDIA_SUFFIXES:
                names.append(path.relative_to(root).as_posix())
    return sorted(names)
