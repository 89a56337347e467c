"""FLUX.1's encoders for programs: settings, what is known before their weights are read, and encoding in batches."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from experiments._canvases import Canvases
from experiments._config import UserError
from experiments._disk import size_text
from experiments._platform import device_memory_bytes
from experiments.data import BadSampleError, DataError, MediaSource, digest_of
from jaxdit.encoders import TokenizerError
from jaxdit.pipelines import FluxEncoders, FluxFolder, encoder_bytes
from jaxdit.weights import WeightsError, checkpoint_digest

# Share of a device's memory that may be planned with.
_MEMORY_SHARE = 0.9
# Captions that are tokenised at once.
_CAPTIONS = 4096
_WEIGHTS = {
    "text_encoder": "CLIP's weights",
    "text_encoder_2": "T5's weights",
    "vae": "the autoencoder's weights",
}


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """How FLUX.1's encoders are used.

    Attributes:
        model: folder of the pipeline.
        text_tokens: tokens of every caption for T5; FLUX.1's by default, 512 (dev) or 256 (schnell).
        padding: whether the features of padding tokens are text rows too, as FLUX.1 was trained; else only a caption's
            own are kept.
        on_long: "error" or "truncate", for captions of more tokens.
        dtype: "bfloat16" or "float32", of products.
        text_dtype: to which T5's features are rounded.
        canvases: most sizes that the autoencoder is compiled for.

    Raises:
        ValueError: for other values.
    """

    model: str
    text_tokens: int | None = None
    padding: bool = True
    on_long: str = "error"
    dtype: str = "bfloat16"
    text_dtype: str = "bfloat16"
    canvases: int = 6

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32") or self.text_dtype not in ("bfloat16", "float32"):
            raise ValueError(
                f"flux_encoders: dtype and text_dtype must be bfloat16 or float32; got dtype={self.dtype!r},"
                f" text_dtype={self.text_dtype!r}."
            )
        if self.canvases < 1 or (self.text_tokens is not None and self.text_tokens < 1):
            raise ValueError(
                "flux_encoders: canvases and text_tokens must be at least 1; got"
                f" canvases={self.canvases}, text_tokens={self.text_tokens}."
            )

    def open(self) -> FluxFolder:
        """The pipeline's folder, checked; no tensor is read.

        Raises:
            DataError: for one that is no such pipeline.
        """
        try:
            return FluxFolder(
                self.model,
                compute_dtype=self.dtype,
                text_tokens=self.text_tokens,
                on_long=self.on_long,
                with_transformer=False,
            )
        except (ValueError, NotImplementedError, OSError) as error:
            raise DataError(f"flux_encoders.model: {error}") from error


def digests(folder: FluxFolder) -> dict[str, str]:
    """What tells the encoders of one pipeline from another's, by name.

    Raises:
        DataError: for files that cannot be read.
    """
    try:
        found = {title: checkpoint_digest(folder.path / name) for name, title in _WEIGHTS.items()}
        for name in ("tokenizer", "tokenizer_2"):
            files = sorted(path for path in (folder.path / name).iterdir() if path.is_file())
            found[f"the files of {name}"] = digest_of(
                part for path in files for part in (path.name, path.read_bytes())
            )
    except (OSError, WeightsError) as error:
        raise DataError(f"flux_encoders.model: {error}") from error
    return found


def text_rows(folder: FluxFolder, source: MediaSource, *, padding: bool) -> Int32[np.ndarray, " n"]:
    """Text rows of every sample.

    Raises:
        DataError: for captions with too many tokens, unless they are cut; names one.
    """
    counts = np.empty(len(source), np.int32)
    for start in range(0, len(source), _CAPTIONS):
        numbers = range(start, min(start + _CAPTIONS, len(source)))
        try:
            mask = folder.t5_tokenizer([source.caption(i) for i in numbers]).mask
        except TokenizerError as error:
            raise DataError(_long_caption(folder, source, numbers, error)) from error
        counts[numbers.start : numbers.stop] = mask.sum(1)
    return np.full_like(counts, folder.text_tokens) if padding else counts


def _long_caption(
    folder: FluxFolder, source: MediaSource, numbers: Iterable[int], error: TokenizerError
) -> str:
    """The error of a batch of captions, as that of the first sample that has it."""
    for i in numbers:
        try:
            folder.t5_tokenizer([source.caption(i)])
        except TokenizerError as found:
            return f"{source.name}, {source.sample_name(i)}: {found}"
    return str(error)


def latent_sizes(source: MediaSource, patch: int) -> np.ndarray:
    """Latent height and width of the pictures of a source, one for each frame."""
    return np.repeat(source.grids[:, 1:].astype(np.int64) * patch, source.grids[:, 0], axis=0)


def check_memory(
    folder: FluxFolder, canvases: Canvases, devices: Sequence[Any], *, captions: int, t5_degree: int
) -> None:
    """Refuses encoders that a device cannot hold, with the arithmetic.

    Args:
        folder, canvases: of the encoders.
        devices: of this process.
        captions: captions that a device encodes together.
        t5_degree: devices that share a copy of T5.

    Raises:
        UserError: with what takes less.
    """
    pixels = canvases.most_pixels(len(devices))
    needed = encoder_bytes(folder, latent_pixels=pixels, captions=captions, t5_degree=t5_degree)
    available = device_memory_bytes(devices)
    if needed > _MEMORY_SHARE * available:
        raise UserError(
            f"T5, CLIP and the autoencoder with what they compute take about {size_text(needed)} a device, of"
            f" {size_text(available)} at most {_MEMORY_SHARE:.0%} may be used. Divide T5 by --t5-shards all, or take"
            " smaller batches (--text-batch, --batch-pixels) or pictures (--max-tokens)."
        )


class Frame(NamedTuple):
    """A picture to encode: what to call it, and its pixels, or why there are none."""

    name: Any
    pixels: np.ndarray | BadSampleError


class Latents(NamedTuple):
    """Mean and log-variance of a picture's latents (c, h, w), float32, scaled as the transformer takes them."""

    mean: np.ndarray
    logvar: np.ndarray


class Text(NamedTuple):
    """T5's features (tokens, c) of a caption, in the dtype they are kept in, and CLIP's pooled vector (c)."""

    features: np.ndarray
    pooled: np.ndarray


class BatchEncoder:
    """Encodes pictures of one canvas together, and captions, on the devices of `encoders`.

    Launches a batch before it waits for the one before.

    Args:
        encoders: on one device, or several that share every batch.
        canvases: of the data.
        captions: captions that a device encodes together.
        padding: as `EncoderSettings`.
    """

    def __init__(self, encoders: FluxEncoders, canvases: Canvases, *, captions: int, padding: bool) -> None:
        self._encoders, self._canvases, self._padding = encoders, canvases, padding
        self._devices = encoders.mesh.devices.size
        self._captions = captions * self._devices
        self._factor = encoders.folder.configs.vae.factor

    def pictures(self, frames: Iterable[Frame]) -> Iterator[tuple[Any, Latents]]:
        """Latents by name, in no order; pictures without pixels are passed over."""
        for (names, sizes), found in _overlapped(self._launches(frames)):
            means, logvars = found
            for i, (name, (height, width)) in enumerate(zip(names, sizes, strict=True)):
                mean, logvar = (x[i, :height, :width].transpose(2, 0, 1) for x in (means, logvars))
                yield name, Latents(mean, logvar)

    def _launches(self, frames: Iterable[Frame]) -> Iterator[tuple[Any, Any]]:
        waiting: dict[tuple[int, int], list[Frame]] = collections.defaultdict(list)
        for frame in frames:
            if isinstance(frame.pixels, BadSampleError):
                continue
            height, width, _ = frame.pixels.shape
            canvas = self._canvases.of_size[height // self._factor, width // self._factor]
            group = waiting[canvas]
            group.append(frame)
            if len(group) == self._canvases.group(canvas, self._devices) * self._devices:
                yield self._launched(canvas, waiting.pop(canvas))
        for canvas, group in waiting.items():
            yield self._launched(canvas, group)

    def _launched(self, canvas: tuple[int, int], frames: Sequence[Frame]) -> tuple[Any, Any]:
        count, factor = self._canvases.group(canvas, self._devices) * self._devices, self._factor
        pixels = np.zeros((count, canvas[0] * factor, canvas[1] * factor, 3), np.uint8)
        sizes = np.ones((count, 2), np.int32)
        for i, frame in enumerate(frames):
            assert isinstance(frame.pixels, np.ndarray)
            height, width, _ = frame.pixels.shape
            pixels[i, :height, :width] = frame.pixels
            sizes[i] = height // factor, width // factor
        names = [frame.name for frame in frames]
        return (names, sizes[: len(frames)].tolist()), self._encoders.posterior(pixels, sizes)

    def texts(self, captions: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, Text]]:
        """Features of captions by name, in order."""
        for batch, (features, pooled) in _overlapped(self._text_launches(captions)):
            rows = self._encoders.folder.t5_tokenizer([caption for _, caption in batch]).mask.sum(1)
            for i, (name, _) in enumerate(batch):
                kept = features[i] if self._padding else features[i, : rows[i]]
                yield name, Text(np.array(kept), np.array(pooled[i]))

    def _text_launches(self, captions: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, Any]]:
        waiting = iter(captions)
        while batch := list(itertools.islice(waiting, self._captions)):
            filled = [caption for _, caption in batch] + [""] * (self._captions - len(batch))
            yield batch, self._encoders.text(filled)


def _overlapped(launches: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """What was launched, with results on the host; the next launch is under way meanwhile."""
    before = None
    for what, arrays in launches:
        if before is not None:
            yield before[0], jax.tree.map(np.asarray, tuple(before[1]))
        before = what, arrays
    if before is not None:
        yield before[0], jax.tree.map(np.asarray, tuple(before[1]))
