"""Where the captions of a folder come from: a text file beside each picture, or one metadata file."""

from __future__ import annotations

import csv
import json
import logging
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.data._types import DataError

_logger = logging.getLogger(__name__)

_METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
# Fields of a metadata row: the file's path below the folder, and its caption.
_FILE_FIELD = "file_name"
_TEXT_FIELD = "text"


def sidecar_captions(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Captions from `picture.txt` beside `picture.jpg`.

    Args:
      root: the folder.
      names: paths of the media files below it, with forward slashes.

    Returns:
      Captions by name; files without one are absent.
    """
    found = {}
    for name in names:
        sidecar = (root / name).with_suffix(".txt")
        try:
            if not stat.S_ISREG(sidecar.stat().st_mode):  # reading a pipe would wait for ever
                raise DataError(f"sidecar_captions: captions must be files; got {sidecar}. Remove it.")
            found[name] = sidecar.read_text(encoding="utf-8-sig").strip()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"sidecar_captions: captions must be UTF-8 text; got {sidecar}: {error}. Repair it."
            ) from error
    return found


def metadata_captions(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Captions from `metadata.jsonl` or `metadata.csv` in the folder, with fields `file_name` and `text`.

    Arguments and result as in `sidecar_captions`; rows about other files are counted in the log.

    Raises:
      DataError: both files exist, or a row is malformed.
    """
    paths = [root / name for name in _METADATA_NAMES if (root / name).is_file()]
    if len(paths) > 1:
        raise DataError(f"metadata_captions: there must be one metadata file; got two in {root}. Remove one.")
    rows = dict(_metadata_rows(paths[0])) if paths else {}
    wanted = set(names)
    strangers = [name for name in rows if name not in wanted]
    if strangers:
        _logger.warning(
            "%s has %d rows about files that are not there, such as %s",
            paths[0],
            len(strangers),
            strangers[0],
        )
    return {name: text for name, text in rows.items() if name in wanted}


def any_captions(root: Path, names: Sequence[str]) -> dict[str, str]:
    """The metadata file's captions and, for files it does not mention, those beside them."""
    listed = metadata_captions(root, names)
    return {**sidecar_captions(root, [name for name in names if name not in listed]), **listed}


def _metadata_rows(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows: Iterator[object]
            if path.suffix == ".jsonl":
                rows = (json.loads(line) for line in file if line.strip())
            else:
                rows = iter(csv.DictReader(file))
            for number, row in enumerate(rows, start=1):
                yield _checked_row(path, number, row)
        except (json.JSONDecodeError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"metadata_captions: {path} must be well formed; got {error}. Repair it."
            ) from error


def _checked_row(path: Path, number: int, row: object) -> tuple[str, str]:
    name, text = (row.get(_FILE_FIELD), row.get(_TEXT_FIELD)) if isinstance(row, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        raise DataError(
            f"metadata_captions: rows need strings '{_FILE_FIELD}' and '{_TEXT_FIELD}'; got row {number} "
            f"of {path} without. Repair it."
        )
    return Path(name).as_posix(), text
