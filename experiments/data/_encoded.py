"""Samples that were encoded beforehand: latents of images and clips with text features or a class, in safetensors."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open

from experiments.data._bad import BadLimit, BadTally
from experiments.data._cache_files import EMPTY_FILE
from experiments.data._hash import digest_of
from experiments.data._latents import rows_of_latents
from experiments.data._types import BadSampleError, DataError, EmptyCaption, SampleRows, Wanted

# Reading headers waits for storage more than it computes.
_THREADS = 8
_LISTED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedRules:
    """How files become sequences.

    Attributes:
      patch: latent pixels per patch side.
      channels_last: order inside a row: (row, column, channel) as a DiT's, or (channel, row, column) as FLUX.1's.
      max_text: most text tokens that are kept.
      draw_latents: whether latents are drawn anew in each step where their variance is known (in a cache), or are the
        mean.
      bad_limit: how many files may have unreadable headers.
    """

    patch: int = 2
    channels_last: bool = False
    max_text: int = 512
    draw_latents: bool = True
    bad_limit: BadLimit = dataclasses.field(default_factory=BadLimit)

    def __post_init__(self) -> None:
        if self.patch < 1 or self.max_text < 0:
            raise ValueError(
                f"EncodedRules: patch must be at least 1, max_text at least 0; got patch={self.patch}, "
                f"max_text={self.max_text}. FLUX.1 has 2 and 512."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    """What a file says of its sample without its values."""

    name: str
    latents: tuple[int, int, int, int]
    text: tuple[int, int]
    pooled: int
    label: int | None
    size: int
    shapes: str = ""
    error: str = ""


class _Beside(threading.local):
    """Features that a thread's last `read` found beside the latents: asked for next, they need no second opening."""

    def __init__(self) -> None:
        self._index, self._features = -1, dict[str, np.ndarray]()

    def keep(self, index: int, features: dict[str, np.ndarray]) -> None:
        """In the place of those of the sample before."""
        self._index, self._features = index, features

    def take(self, index: int, name: str) -> np.ndarray | None:
        """A feature of a sample, once; None if it is not there."""
        return self._features.pop(name, None) if index == self._index else None


class EncodedFolder:
    """One sample a file, `.safetensors`, at any depth below a folder.

    Tensors of a file, of any float dtype: `latents` (channels, height, width) or (channels, frames, height, width),
    scaled as the model takes them; `text` (tokens, features) and `pooled` (features), or `label`, one integer.
    `empty_caption.safetensors` in the folder itself, with `text` and `pooled` alone, stands for dropped captions.

    Args:
      root: the folder.
      rules: how files become sequences.

    Raises:
      DataError: the folder is missing or empty, files differ in their features, sizes that patches do not divide, or
        too many files cannot be read.
    """

    def __init__(self, root: str | Path, *, rules: EncodedRules):
        root = Path(root)
        if not root.is_dir():
            raise DataError(f"EncodedFolder: root must be a folder; got root={root}. Check the path.")
        empty = root / EMPTY_FILE
        paths = (path for path in root.rglob("*.safetensors") if path != empty)
        names = sorted(path.relative_to(root).as_posix() for path in paths)
        if not names:
            raise DataError(
                f"EncodedFolder: root must contain .safetensors files; got none below root={root}."
            )
        self.name, self._root, self._rules = f"folder {root.name}", root, rules
        # Rows are no pixels: nothing can be drawn from them without the decoder.
        self.patch = 0
        self.latent_patch, self.channels_last = rules.patch, rules.channels_last
        self._headers = headers = _readable(root, names, BadTally(rules.bad_limit, self.name))
        _check(self.name, headers, rules.patch)
        first = headers[0]
        self.channels = first.latents[0] * rules.patch**2
        self.text_channels, self.pooled_channels = first.text[1], first.pooled
        grids = [(t, h // rules.patch, w // rules.patch) for _, t, h, w in (x.latents for x in headers)]
        self.grids = np.asarray(grids, np.int32)
        self.image_lengths = self.grids.prod(axis=1, dtype=np.int64).astype(np.int32)
        self.text_lengths = np.asarray([min(x.text[0], rules.max_text) for x in headers], np.int32)
        labels = [x.label for x in headers if x.label is not None]
        self.labels = np.asarray(labels, np.int32) if labels else None
        self.empty_caption = read_empty_caption(empty, rules.max_text) if empty.is_file() else None
        self._check_empty_caption()
        self.dropped_text_length = 0 if self.empty_caption is None else len(self.empty_caption.text)
        parts = [] if self.empty_caption is None else [x.tobytes() for x in self.empty_caption]
        self.digest = digest_of([repr(rules), *(repr(header) for header in headers), *parts])
        self._beside = _Beside()

    def read_batch(self, wanted: Sequence[Wanted]) -> list[SampleRows | BadSampleError]:
        """See `BatchSource`: one after the other, with the features of the empty caption if there are some."""
        return [self._read_one(one) for one in wanted]

    def _read_one(self, wanted: Wanted) -> SampleRows | BadSampleError:
        try:
            rows = self.read(wanted.sample)
        except BadSampleError as error:
            return error
        text, pooled = self.text(wanted.sample), self.pooled(wanted.sample)
        if wanted.is_dropped:
            text, pooled = self.empty_caption or EmptyCaption(text[:0], np.zeros_like(pooled))
        return SampleRows(rows, text, pooled)

    def _check_empty_caption(self) -> None:
        if self.empty_caption is None:
            return
        found = (self.empty_caption.text.shape[1], len(self.empty_caption.pooled))
        if found != (self.text_channels, self.pooled_channels):
            raise DataError(
                f"{self._root / EMPTY_FILE} must have features like the samples, {self.text_channels} of text and"
                f" {self.pooled_channels} pooled; got {found[0]} and {found[1]}. Encode both alike."
            )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._headers)

    def sample_name(self, index: int) -> str:
        """The path below the folder."""
        return self._headers[index].name

    def split_name(self, index: int) -> str:
        """The sample's name: samples are independent."""
        return self.sample_name(index)

    def text(self, index: int) -> Float32[np.ndarray, "n_txt c_txt"]:
        """Text features; an unreadable file has zeros."""
        length = int(self.text_lengths[index])
        if not length:
            return np.zeros((0, self.text_channels), np.float32)
        return self._tensor(index, "text", (length, self.text_channels))

    def pooled(self, index: int) -> Float32[np.ndarray, " c_pool"]:
        """The pooled text vector; an unreadable file has zeros."""
        if not self.pooled_channels:
            return np.zeros(0, np.float32)
        return self._tensor(index, "pooled", (self.pooled_channels,))

    def _tensor(self, index: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        kept = self._beside.take(index, name)
        if kept is not None:
            return kept[: shape[0]]
        try:
            with safe_open(self._root / self.sample_name(index), framework="np") as file:
                found = np.asarray(file.get_slice(name)[: shape[0]], np.float32)
        except (SafetensorError, OSError):
            return np.zeros(shape, np.float32)  # `read` reports the file
        return found if found.shape == shape else np.zeros(shape, np.float32)

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Latent rows, row-major over (t, h, w).

        Raises:
          BadSampleError: the file cannot be read, is not what it was, or has values that are not finite.
        """
        header = self._headers[index]
        self._beside.keep(-1, {})
        try:
            with safe_open(self._root / header.name, framework="np") as file:
                if _shapes_text(file) != header.shapes:
                    raise BadSampleError(
                        f"holds {_shapes_text(file)} now, {header.shapes} when the run began"
                    )
                tensors = {
                    key: np.asarray(file.get_tensor(key), np.float32)
                    for key in file.keys()  # noqa: SIM118 (no mapping)
                    if key in _FEATURES
                }
        except (SafetensorError, OSError) as error:
            raise BadSampleError(str(error)) from error
        for key, values in tensors.items():
            if not np.isfinite(values).all():
                raise BadSampleError(f"{key} has values that are not finite")
        latents = tensors.pop("latents")
        self._beside.keep(index, tensors)
        return rows_of_latents(
            latents.reshape(header.latents), self._rules.patch, channels_last=self._rules.channels_last
        )


def read_empty_caption(path: Path, max_text: int) -> EmptyCaption:
    """The features of an empty caption.

    Args:
      path: a file with `text` and `pooled`.
      max_text: most text rows.

    Raises:
      DataError: it cannot be read, or is something else.
    """
    try:
        with safe_open(path, framework="np") as file:
            text, pooled = (np.asarray(file.get_tensor(name), np.float32) for name in ("text", "pooled"))
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} must hold text and pooled, the features of an empty caption; got {error}. Encode it again."
        ) from error
    if text.ndim != 2 or pooled.ndim != 1 or not (np.isfinite(text).all() and np.isfinite(pooled).all()):
        raise DataError(
            f"{path} must hold text (tokens, features) and pooled (features), finite; got shapes {text.shape} and"
            f" {pooled.shape}. Encode it again."
        )
    return EmptyCaption(text[:max_text], pooled)


_FEATURES = ("latents", "text", "pooled")
_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I8", "I16", "I32", "I64", "U8", "U16", "U32")


def _shapes_text(file: Any) -> str:
    """Names, dtypes and shapes of a file's tensors."""
    parts = {key: file.get_slice(key) for key in sorted(file.keys())}
    return ", ".join(f"{key} {part.get_dtype()}{part.get_shape()}" for key, part in parts.items())


def _readable(root: Path, names: Sequence[str], tally: BadTally) -> list[_Header]:
    with ThreadPoolExecutor(_THREADS) as pool:
        headers = list(pool.map(lambda name: _header(root, name), names))
    good = [header for header in headers if not header.error]
    tally.good(len(good))
    for header in headers:
        if header.error:
            tally.bad(header.name, ValueError(header.error))
    if not good:
        raise DataError(
            f"{tally.where}: there must be files that can be read; got {len(names)}, none of which can."
        )
    return good


def _header(root: Path, name: str) -> _Header:
    empty = _Header(name, (0, 0, 0, 0), (0, 0), 0, None, 0)
    try:
        size = os.path.getsize(root / name)
        with safe_open(root / name, framework="np") as file:
            text = _shapes_text(file)
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            shapes = {key: tuple(part.get_shape()) for key, part in parts.items()}
            dtypes = {key: part.get_dtype() for key, part in parts.items()}
            has_label = shapes.get("label") in ((), (1,)) and dtypes["label"] in _INTEGERS
            label = int(np.asarray(file.get_tensor("label")).reshape(())) if has_label else None
    except (SafetensorError, OSError, ValueError) as error:
        return dataclasses.replace(empty, error=str(error) or type(error).__name__)
    latents, features = shapes.get("latents", ()), shapes.get("text", (0, 0))
    if len(latents) == 3:
        latents = (latents[0], 1, *latents[1:])
    pooled = shapes.get("pooled", (0,))
    fits = len(latents) == 4 and min(latents) > 0 and len(features) == 2 and len(pooled) == 1
    fits &= all(dtypes[key] in _FLOATS for key in _FEATURES if key in dtypes)
    fits &= "label" not in shapes or (label is not None and 0 <= label < 1 << 31)
    if not fits:
        return dataclasses.replace(
            empty,
            error="latents must be (channels, height, width) or (channels, frames, height, width), text (tokens,"
            f" features), pooled (features), all float, and label an integer from 0; got {text}, label={label}",
        )
    return _Header(name, latents, features, pooled[0], label, size, text)


def _check(name: str, headers: Sequence[_Header], patch: int) -> None:
    uneven = [x.name for x in headers if x.latents[2] % patch or x.latents[3] % patch]
    if uneven:
        raise DataError(
            f"{name}: latents must be whole patches of {patch} x {patch} high and wide; got {len(uneven)} that are not:"
            f" {_some(uneven)}. Encode pictures of other sizes, or use another patch."
        )
    kinds: dict[Any, list[str]] = {}
    for x in headers:
        features = (x.latents[0], x.text[1], x.pooled, x.label is not None)
        kinds.setdefault(features, []).append(x.name)
    if len(kinds) > 1:
        told = "; ".join(
            f"{latent} latent, {text} text, {pooled} pooled, {'a' if labelled else 'no'} label: {_some(names)}"
            for (latent, text, pooled, labelled), names in kinds.items()
        )
        raise DataError(f"{name}: all files must have the same features; got {told}.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
