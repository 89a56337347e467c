"""A cache of encoded samples, as `python -m experiments.encode` makes it, as a source."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32

from experiments.data._cache_files import (
    CACHE_FILE,
    EMPTY_FILE,
    CacheInfo,
    ShardIndex,
    index_path,
    read_index,
    read_info,
    read_sample,
    shard_path,
)
from experiments.data._encoded import EncodedRules, read_empty_caption
from experiments.data._hash import digest_of
from experiments.data._latents import drawn_latents, rows_of_latents
from experiments.data._types import BadSampleError, DataError, SampleRows, Wanted

# Reading waits for storage more than it computes.
_THREADS = 8
_LISTED = 5


class EncodedCache:
    """Samples of a cache in the order of the data they were made of, so that a step has the same with it as without.

    Opening reads the indices and looks at the sizes of the shards; a sample's checksum is compared whenever it is read.

    Args:
      root: folder of the cache.
      rules: how samples become sequences; the patch must be the cache's.

    Raises:
      DataError: the cache is not whole, or a file of it is damaged.
    """

    def __init__(self, root: str | Path, *, rules: EncodedRules):
        self._root, self._rules = Path(root), rules
        self.name = f"cache {self._root.name}"
        info = read_info(self._root)
        self._layout = layout = info.layout
        if rules.patch != layout.patch:
            raise DataError(
                f"encoded.patch must be that of {self._root}, {layout.patch}; got patch={rules.patch}."
            )
        indices = _indices(self._root, info)
        numbers = np.concatenate([np.asarray(i.numbers, np.int64) for i in indices])
        order = np.argsort(numbers, kind="stable")
        if not len(order):
            raise DataError(f"{self.name}: there must be samples that can be read; got none.")
        names = [name for index in indices for name in index.names]
        self._names = [names[i] for i in order]
        sizes = [len(index.numbers) for index in indices]
        self._shards = np.repeat([index.shard for index in indices], sizes)[order]
        self._offsets = np.concatenate([np.asarray(i.offsets, np.int64) for i in indices])[order]
        self._checksums = np.concatenate([np.asarray(i.checksums, np.int64) for i in indices])[order]
        self._tokens = np.concatenate([np.asarray(i.tokens, np.int32) for i in indices])[order]
        grids = np.concatenate([np.asarray(i.grids, np.int32).reshape(-1, 3) for i in indices])
        self.patch = 0  # rows are no pixels
        self.latent_patch, self.channels_last = rules.patch, rules.channels_last
        self.channels = layout.latent_channels * layout.patch**2
        self.text_channels, self.pooled_channels = layout.text_channels, layout.pooled_channels
        self.grids = grids[order]
        self.image_lengths = self.grids.prod(axis=1, dtype=np.int64).astype(np.int32)
        self.text_lengths = np.minimum(self._tokens, rules.max_text)
        self.labels: Int32[np.ndarray, " n"] | None = None
        self.empty_caption = read_empty_caption(self._root / EMPTY_FILE, rules.max_text)
        self.dropped_text_length = len(self.empty_caption.text)
        self.digest = digest_of(
            [info.text(), repr(rules), self.grids.tobytes(), self._tokens.tobytes(), *self._names]
        )
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="encoded-cache")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._names)

    def sample_name(self, index: int) -> str:
        """The name in the data it was made of."""
        return self._names[index]

    def split_name(self, index: int) -> str:
        """The sample's name: samples are independent."""
        return self.sample_name(index)

    def text(self, index: int) -> Float32[np.ndarray, "n_txt c_txt"]:
        """Text features.

        Raises:
          BadSampleError: as `read`.
        """
        return self._tensors(index)["text"][: self._rules.max_text]

    def pooled(self, index: int) -> Float32[np.ndarray, " c_pool"]:
        """The pooled text vector.

        Raises:
          BadSampleError: as `read`.
        """
        return self._tensors(index)["pooled"]

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Rows of the latents' mean.

        Raises:
          BadSampleError: the sample cannot be read, is damaged, or has values that are not finite.
        """
        return self._rows(self._tensors(index)["latents"])

    def read_batch(self, wanted: Sequence[Wanted]) -> list[SampleRows | BadSampleError]:
        """See `BatchSource`: several at a time, latents drawn where the cache has their variance."""
        return list(self._pool.map(self._read_one, wanted))

    def _read_one(self, wanted: Wanted) -> SampleRows | BadSampleError:
        try:
            tensors = self._tensors(wanted.sample)
        except BadSampleError as error:
            return error
        latents = tensors["latents"]
        if "logvar" in tensors and self._rules.draw_latents:
            latents = drawn_latents(latents, tensors["logvar"], wanted.draw)
        text, pooled = tensors["text"][: self._rules.max_text], tensors["pooled"]
        if wanted.is_dropped:
            text, pooled = self.empty_caption
        return SampleRows(self._rows(latents), text, pooled)

    def _rows(self, latents: np.ndarray) -> Float32[np.ndarray, "n_img c_in"]:
        return rows_of_latents(latents, self._rules.patch, channels_last=self._rules.channels_last)

    def _tensors(self, index: int) -> dict[str, np.ndarray]:
        tensors = read_sample(
            self._root,
            int(self._shards[index]),
            self._layout,
            (int(self._offsets[index]), int(self._checksums[index])),
            (self.grids[index].tolist(), int(self._tokens[index])),
        )
        for name, values in tensors.items():
            if not np.isfinite(values).all():
                raise BadSampleError(f"{name} has values that are not finite")
        return tensors


def is_cache(root: str | Path) -> bool:
    """Whether a folder is a cache, begun or whole, and not one of single files."""
    return (Path(root) / CACHE_FILE).is_file()


def _indices(root: Path, info: CacheInfo) -> list[ShardIndex]:
    """The indices of all shards, whose files are there and of the right size."""
    shards = range(info.num_shards)
    missing = [shard for shard in shards if not index_path(root, shard).is_file()]
    if missing:
        raise DataError(
            f"{root}: the cache must be whole; got {len(missing)} of {info.num_shards} shards that are not there yet:"
            f" {_some(missing)}. Run experiments.encode again with the same arguments (all of its parts)."
        )
    with ThreadPoolExecutor(_THREADS) as pool:
        indices = list(pool.map(lambda shard: read_index(root, shard), shards))
        sizes = list(pool.map(lambda shard: _size(shard_path(root, shard)), shards))
    wrong = [i.shard for i, size in zip(indices, sizes, strict=True) if i.file_bytes != size]
    if wrong:
        raise DataError(
            f"{root}: shards must have the size that their index says; got {len(wrong)} that are cut off or missing:"
            f" {_some(wrong)}. Run experiments.encode again with the same arguments."
        )
    return indices


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _some(shards: Sequence[int]) -> str:
    return ", ".join(f"{shard:06d}" for shard in shards[:_LISTED]) + (
        ", ..." if len(shards) > _LISTED else ""
    )
