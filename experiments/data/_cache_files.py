"""The files of a cache of encoded samples: shards of many samples, each with an index that has sizes and checksums.

    cache.json                how it was made; see `CacheInfo`
    empty_caption.safetensors the features of an empty caption
    shards/000017.safetensors samples one after the other: N.latents, N.logvar, N.text, N.pooled; captions in the header
    shards/000017.json        names, sizes and checksums of those samples; there only once the shard is whole

Files are written aside, flushed to the disk and renamed: nobody ever sees a part of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from experiments.data._types import BadSampleError, DataError

CACHE_FILE = "cache.json"
EMPTY_FILE = "empty_caption.safetensors"
SHARD_FOLDER = "shards"
_PART = ".part-"
_FORMAT = 1
_CHUNK = 8 << 20
_DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype(np.float16)),
}
CACHE_DTYPES = tuple(_DTYPES)


class _Part(NamedTuple):
    """A tensor of a sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype][1].itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a sample of a cache consists of.

    Attributes:
      latent_channels: channels of a latent pixel.
      patch: latent pixels per side of a token.
      latent_dtype: of latents, and of their log-variance.
      has_variance: whether there is one, so that latents can be drawn.
      text_channels, text_dtype: of a text row.
      pooled_channels: of the text vector, float32.
    """

    latent_channels: int
    patch: int
    latent_dtype: str
    has_variance: bool
    text_channels: int
    text_dtype: str
    pooled_channels: int

    def parts(self, grid: Sequence[int], tokens: int) -> list[_Part]:
        """The tensors of a sample of so many image tokens (t, h, w) and text rows, in the order of the file."""
        t, h, w = grid
        latents = (self.latent_channels, t, h * self.patch, w * self.patch)
        parts = [_Part("latents", self.latent_dtype, latents)]
        if self.has_variance:
            parts.append(_Part("logvar", self.latent_dtype, latents))
        parts.append(_Part("pooled", "float32", (self.pooled_channels,)))
        return [*parts, _Part("text", self.text_dtype, (tokens, self.text_channels))]

    def sample_bytes(self, grid: Sequence[int], tokens: int) -> int:
        """Bytes of a sample."""
        return sum(part.num_bytes for part in self.parts(grid, tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What `cache.json` says.

    Attributes:
      layout: of a sample.
      num_samples, num_shards: of the whole, unreadable pictures among the samples.
      made_of: by name, what it was made of: weights, settings, data. Caches with other values are never mixed.
    """

    layout: CacheLayout
    num_samples: int
    num_shards: int
    made_of: dict[str, Any]

    def text(self) -> str:
        """As in the file."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"


@dataclasses.dataclass(frozen=True, slots=True)
class CachedSample:
    """A sample to write; tensors by the names of `CacheLayout.parts`.

    Attributes:
      number: its place in the data it was made of.
      name, caption: of it.
      grid: image tokens (t, h, w).
      tensors: its values.
    """

    number: int
    name: str
    caption: str
    grid: tuple[int, int, int]
    tensors: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardIndex:
    """What the index of a shard says: of each sample its number, name, grid, text rows, place in the file, checksum.

    Attributes:
      shard: its number.
      file_bytes, digest: size and BLAKE2 digest of the shard's file.
      numbers, names, grids, tokens, offsets, checksums: of its samples; CRC-32 of all bytes of one.
      bad: names of pictures that could not be read, with reasons.
    """

    shard: int
    file_bytes: int
    digest: str
    numbers: list[int]
    names: list[str]
    grids: list[tuple[int, int, int]]
    tokens: list[int]
    offsets: list[int]
    checksums: list[int]
    bad: list[tuple[str, str]]


def shard_path(root: Path, shard: int) -> Path:
    """The file of a shard."""
    return root / SHARD_FOLDER / f"{shard:06d}.safetensors"


def index_path(root: Path, shard: int) -> Path:
    """The file of its index."""
    return shard_path(root, shard).with_suffix(".json")


def read_info(root: Path) -> CacheInfo:
    """What a cache says of itself.

    Raises:
      DataError: there is no cache, or its file is damaged or of another version.
    """
    path = root / CACHE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise DataError(f"{path} is of another version of this program. Encode the data anew.")
        return CacheInfo(**{**content, "layout": CacheLayout(**content["layout"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Encode the data anew into another folder."
        ) from error


def write_info(root: Path, info: CacheInfo) -> None:
    """Makes `cache.json` unless another process was faster; whoever calls this reads it again."""
    root.mkdir(parents=True, exist_ok=True)
    part = _part(root / CACHE_FILE)
    try:
        with _written(part) as file:
            file.write(info.text().encode())
        try:
            os.link(part, root / CACHE_FILE)
        except FileExistsError:
            pass
        except OSError:  # a file system without links: the last one stays, and the others see it
            os.replace(part, root / CACHE_FILE)
    finally:
        part.unlink(missing_ok=True)
    _flush_folder(root)


def is_finished(root: Path, shard: int) -> bool:
    """Whether a shard is there, with its index, of the right size."""
    try:
        return shard_path(root, shard).stat().st_size == read_index(root, shard).file_bytes
    except (OSError, DataError):
        return False


def read_index(root: Path, shard: int) -> ShardIndex:
    """The index of a shard.

    Raises:
      DataError: it is missing or damaged.
    """
    path = index_path(root, shard)
    try:
        checksum, _, text = path.read_bytes().partition(b"\n")
        if int(checksum) != zlib.crc32(text):
            raise ValueError("its checksum is another")
        content = json.loads(text)
        grids = [tuple(grid) for grid in content.pop("grids")]
        return ShardIndex(grids=grids, **content)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing. {_AGAIN}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}. {_AGAIN}") from error


_AGAIN = (
    "Run experiments.encode again with the same arguments, which makes what is missing or has another size."
)


def write_shard(
    root: Path,
    shard: int,
    layout: CacheLayout,
    samples: Sequence[CachedSample],
    bad: Sequence[tuple[str, str]],
) -> int:
    """Writes a shard and then its index, each in one move. Returns its bytes.

    Args:
      root: of the cache.
      shard: its number.
      layout: of a sample.
      samples: in the order of the file.
      bad: names and reasons of those that could not be read.
    """
    path = shard_path(root, shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{_PART}{path.stem}.*"):  # of a process that was killed
        left.unlink(missing_ok=True)
    header = _header(layout, samples)
    state, offset, offsets, checksums = hashlib.blake2b(digest_size=16), len(header), list[int](), list[int]()
    with _written(_part(path)) as file:
        file.write(header)
        state.update(header)
        for sample in samples:
            checksum, start = 0, offset
            for part in layout.parts(sample.grid, len(sample.tensors["text"])):
                data = _bytes_of(sample.tensors[part.name], part)
                file.write(data)
                state.update(data)
                checksum, offset = zlib.crc32(data, checksum), offset + len(data)
            offsets.append(start)
            checksums.append(checksum)
    os.replace(_part(path), path)
    index = ShardIndex(
        shard=shard,
        file_bytes=offset,
        digest=state.hexdigest(),
        numbers=[sample.number for sample in samples],
        names=[sample.name for sample in samples],
        grids=[sample.grid for sample in samples],
        tokens=[len(sample.tensors["text"]) for sample in samples],
        offsets=offsets,
        checksums=checksums,
        bad=list(bad),
    )
    _flush_folder(path.parent)
    text = json.dumps(dataclasses.asdict(index), separators=(",", ":")).encode()
    replace_file(index_path(root, shard), b"%d\n%s" % (zlib.crc32(text), text))
    return offset


def _bytes_of(values: np.ndarray, part: _Part) -> memoryview:
    """A tensor's bytes in the dtype of the file."""
    if values.shape != part.shape:
        raise ValueError(f"write_shard: {part.name} must have shape {part.shape}; got {values.shape}.")
    values = np.ascontiguousarray(values, _DTYPES[part.dtype][1])
    return values.reshape(-1).view(np.uint8).data


def _header(layout: CacheLayout, samples: Sequence[CachedSample]) -> bytes:
    """The header of a safetensors file, with its length before it."""
    content: dict[str, Any] = {
        "__metadata__": {
            "captions": json.dumps({s.number: s.caption for s in samples}, ensure_ascii=False),
        }
    }
    start = 0
    for sample in samples:
        for part in layout.parts(sample.grid, len(sample.tensors["text"])):
            content[f"{sample.number}.{part.name}"] = {
                "dtype": _DTYPES[part.dtype][0],
                "shape": list(part.shape),
                "data_offsets": [start, start + part.num_bytes],
            }
            start += part.num_bytes
    text = json.dumps(content, separators=(",", ":")).encode(errors="replace")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_sample(
    root: Path, shard: int, layout: CacheLayout, place: tuple[int, int], sizes: tuple[Sequence[int], int]
) -> dict[str, np.ndarray]:
    """The tensors of a sample, float32, after comparing their checksum: some 0.3 ms a megabyte, at every reading.

    Args:
      root, shard, layout: where it is.
      place: offset and checksum.
      sizes: grid and text rows.

    Raises:
      BadSampleError: it cannot be read, or is damaged; names the file.
    """
    path, (offset, checksum) = shard_path(root, shard), place
    num_bytes = layout.sample_bytes(*sizes)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(num_bytes)
    except OSError as error:
        raise BadSampleError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) != num_bytes or zlib.crc32(data) != checksum:
        raise BadSampleError(
            f"{path} is damaged at byte {offset:,}: its checksum is another. Remove the file and run"
            " experiments.encode again"
        )
    tensors, start = {}, 0
    for part in layout.parts(*sizes):
        values = np.frombuffer(data, _DTYPES[part.dtype][1], math.prod(part.shape), start)
        tensors[part.name] = values.reshape(part.shape).astype(np.float32)
        start += part.num_bytes
    return tensors


def verified(root: Path, shard: int) -> str:
    """What is wrong with a shard, after reading all of it; empty for nothing."""
    try:
        index = read_index(root, shard)
        state = hashlib.blake2b(digest_size=16)
        with shard_path(root, shard).open("rb") as file:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{shard_path(root, shard)} cannot be read: {error.strerror or error}."
    if state.hexdigest() != index.digest:
        return f"{shard_path(root, shard)} is damaged: its digest is another."
    return ""


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file in one move, on the disk when this returns."""
    with _written(_part(path)) as file:
        file.write(data)
    os.replace(_part(path), path)
    _flush_folder(path.parent)


def _part(path: Path) -> Path:
    return path.with_name(f"{_PART}{path.name}.{os.uname().nodename}.{os.getpid()}")


@contextlib.contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Renames in a folder are on the disk when this returns, where the system can say so."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
