"""WebDataset tar shards, indexed by offset, so that any sample is one seek away."""

from __future__ import annotations

import dataclasses
import glob
import json
import re
import tarfile
from pathlib import Path

from experiments.data._bad import BadTally
from experiments.data._decode import MEDIA_SUFFIXES
from experiments.data._index import MediaEntry, index_files
from experiments.data._media import MediaRules, MediaSource, scan_media
from experiments.data._types import DataError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# A label + 1 must fit int32.
_MAX_LABEL = 2**31 - 2
_NOT_WHOLE = "not a whole, uncompressed tar file"
# Damaged shards named in a message.
_LISTED = 5
_MOST_SHARDS = 1_000_000
# Where a json member keeps the caption, in order of preference.
_JSON_FIELDS = ("caption", "text")


def expand_shards(pattern: str) -> list[Path]:
    """Files that a pattern names: wildcards, and ranges such as `shard-{0000..0127}.tar`.

    Raises:
      DataError: nothing matches, or a file of a range is missing.
    """
    match = _RANGE.search(pattern)
    if match is None:
        paths = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
        if not paths:
            raise DataError(f"WebDatasetShards: pattern must match files; got none for pattern='{pattern}'.")
        return paths
    first, last = match.groups()
    numbers = range(int(first), int(last) + 1)
    if len(numbers) > _MOST_SHARDS:
        raise DataError(
            f"WebDatasetShards: a range must name at most {_MOST_SHARDS:,} shards; got {len(numbers):,} for "
            f"pattern='{pattern}'."
        )
    names = [f"{pattern[: match.start()]}{n:0{len(first)}d}{pattern[match.end() :]}" for n in numbers]
    if not names:
        raise DataError(f"WebDatasetShards: a range must ascend; got pattern='{pattern}'.")
    return [path for name in names for path in expand_shards(name)]


class WebDatasetShards(MediaSource):
    """Tar shards whose members share a key up to the first dot: an image or video, a txt or json caption.

    Samples are labelled by a `cls` member with an integer, where every one has it.

    Args:
      pattern: paths with wildcards or ranges; shards are uncompressed.
      rules: how files become sequences.

    Raises:
      DataError: no shard or no sample, a shard that is damaged or cut off, captions are missing, a caption or label
        is malformed, or too many members cannot be read.
    """

    def __init__(self, pattern: str, *, rules: MediaRules):
        paths = expand_shards(pattern)
        title = f"shards {Path(pattern).name}"
        damaged: list[str] = []

        def scan(path: Path) -> list[MediaEntry]:
            entries = _scan_shard(path)
            damaged.extend(entry.name for entry in entries if (entry.error or "").startswith(_NOT_WHOLE))
            return entries

        files = index_files(
            str(Path(pattern).absolute()),
            paths,
            scan=scan,
            folder=rules.folder(),
            tally=BadTally(rules.bad_limit, title),
        )
        # One unreadable entry stands for all samples of a shard: shards are counted by themselves.
        if len(damaged) > rules.bad_limit.fraction * len(paths):
            raise DataError(
                f"{title}: at most {rules.bad_limit.fraction:.2%} of the shards may be damaged; got {len(damaged)} of"
                f" {len(paths)}: {', '.join(sorted(damaged)[:_LISTED])}. Copy them again, leave them out, or raise the"
                " limit."
            )
        super().__init__(title, files=files, rules=rules)


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """What the members of a shard hold, by key."""

    media: dict[str, MediaEntry] = dataclasses.field(default_factory=dict)
    captions: dict[str, str] = dataclasses.field(default_factory=dict)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)


def _scan_shard(path: Path) -> list[MediaEntry]:
    """One entry per key with an image or video, in the order of the shard."""
    found = _Found()
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                if member.isfile():
                    _add_member(path, shard, member, found)
            _check_end(path, shard.offset)
    except (tarfile.TarError, OSError, EOFError) as error:
        # What was read before the damage would be a silently smaller data set.
        return [MediaEntry(str(path), 0, 0, 0, 0, 0, None, f"{_NOT_WHOLE}: {error}")]
    return [
        scan_media(path, entry)._replace(caption=found.captions.get(key), label=found.labels.get(key))
        for key, entry in found.media.items()
    ]


def _check_end(path: Path, offset: int) -> None:
    """Raises TarError unless zeros follow the last member, two blocks at least.

    `tarfile` takes a damaged header, and the end of a file that was cut, for the end of the archive.
    """
    with path.open("rb") as file:
        file.seek(offset)
        zeros = 0
        while block := file.read(1 << 20):
            if any(block):
                raise tarfile.ReadError("no more members can be read, but it goes on")
            zeros += len(block)
    if zeros < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is cut off: the end mark is missing")


def _add_member(path: Path, shard: tarfile.TarFile, member: tarfile.TarInfo, found: _Found) -> None:
    folder, _, base = member.name.rpartition("/")
    stem, _, extension = base.partition(".")
    key, extension = f"{folder}/{stem}", extension.lower()
    name = f"{path.name}:{member.name}"
    if not stem:  # hidden files
        return
    if f".{extension}" in MEDIA_SUFFIXES:
        if key in found.media:
            raise DataError(
                f"WebDatasetShards: a key may have one image or video; got '{found.media[key].name}' and "
                f"'{name}'. Rename one."
            )
        found.media[key] = MediaEntry(name, member.offset_data, member.size, 0, 0, 0)
    elif extension in ("txt", "json"):
        raw = _member_bytes(shard, member)
        caption = _caption(name, extension, raw)
        if caption is not None and (extension == "txt" or key not in found.captions):
            found.captions[key] = caption
    elif extension == "cls":
        found.labels[key] = _label(name, _member_bytes(shard, member))


def _member_bytes(shard: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = shard.extractfile(member)
    if file is None:
        raise tarfile.TarError(f"member {member.name} has no content")
    with file:
        return file.read()


def _label(name: str, raw: bytes) -> int:
    text = raw.decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MAX_LABEL):
        raise DataError(
            f"WebDatasetShards: a cls member must hold an integer of at least 0; got '{text[:20]}' in "
            f"'{name}'. Repair it."
        )
    return int(text)


def _caption(name: str, extension: str, raw: bytes) -> str | None:
    try:
        text = raw.decode("utf-8-sig")
        if extension == "txt":
            return text.strip()
        content = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(
            f"WebDatasetShards: captions must be UTF-8 text or JSON; got '{name}': {error}. Repair it."
        ) from error
    fields = [content.get(f) for f in _JSON_FIELDS] if isinstance(content, dict) else []
    return next((f for f in fields if isinstance(f, str)), None)
