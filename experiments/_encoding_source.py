"""Pictures and captions encoded while training runs: a source whose samples are encoded on their home devices.

Batches of steps are read in threads beside the one that trains. Programs of several devices that wait for one another,
launched from two threads, may wait for ever; so every device has its own copy of the encoders, and a thread that runs
programs of that device alone.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int32

from experiments._canvases import Canvases
from experiments._encoders import (
    BatchEncoder,
    EncoderSettings,
    Frame,
    Latents,
    Text,
    digests,
    latent_sizes,
    text_rows,
)
from experiments._platform import cpu_cores
from experiments.data import (
    BadSampleError,
    DataError,
    MediaSource,
    SampleRows,
    Wanted,
    digest_of,
    drawn_latents,
    rows_of_latents,
)
from jaxdit.pipelines import EncoderParams, FluxEncoders, FluxFolder, encoder_bytes
from jaxdit.weights import WeightsError
from parallel import sequence_mesh

# Latent pixels (of pictures smaller than that) and text rows that a device encodes together: a step has few samples a
# device, and what they do not fill is computed for nothing.
_GROUP_PIXELS = 64 * 64
_GROUP_ROWS = 1024
_PATCH = 2


class EncodingSource:
    """FLUX.1's latents and text features of pictures and captions, made whenever they are read.

    Args:
        pixels: pictures and captions, with a patch of as many pixels as a token has.
        settings: how they are encoded.
        draw_latents: whether latents are drawn anew in each step, or are the mean.

    Raises:
        DataError: for a folder that is no such pipeline, another patch, or captions that are too long.
    """

    def __init__(self, pixels: MediaSource, settings: EncoderSettings, *, draw_latents: bool) -> None:
        self._pixels, self._settings, self._draw = pixels, settings, draw_latents
        self._folder = folder = settings.open()
        if pixels.patch != folder.pixels_per_token:
            raise DataError(
                f"folder.patch must be the pixels of a token of {settings.model}, {folder.pixels_per_token}; got"
                f" patch={pixels.patch}."
            )
        self.name = f"{pixels.name}, encoded"
        self.patch = 0  # rows are no pixels
        self.latent_patch, self.channels_last = _PATCH, False
        configs = folder.configs
        self.channels = configs.vae.latent_channels * _PATCH**2
        self.text_channels, self.pooled_channels = configs.t5.width, configs.clip.width
        self.grids, self.image_lengths = pixels.grids, pixels.image_lengths
        self.labels: Int32[np.ndarray, " n"] | None = None
        self.text_lengths = text_rows(folder, pixels, padding=settings.padding)
        empty = folder.t5_tokenizer([""]).mask.sum()
        self.dropped_text_length = folder.text_tokens if settings.padding else int(empty)
        made_of = [f"{name}: {value}" for name, value in digests(folder).items()]
        self.digest = digest_of([pixels.digest, repr(settings), repr(draw_latents), *made_of])
        canvases = Canvases.plan(
            latent_sizes(pixels, _PATCH), most=settings.canvases, group_pixels=_GROUP_PIXELS
        )
        self._encoders = _DeviceEncoders(folder, canvases, settings)
        self._readers = ThreadPoolExecutor(cpu_cores(), thread_name_prefix="decode")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._pixels)

    @property
    def device_bytes(self) -> int:
        """Memory that the encoders take on a device, beside what trains there."""
        return self._encoders.num_bytes

    def sample_name(self, index: int) -> str:
        """The picture's name."""
        return self._pixels.sample_name(index)

    def split_name(self, index: int) -> str:
        """What a split keeps together."""
        return self._pixels.split_name(index)

    def text(self, index: int) -> Float32[np.ndarray, "n_txt c_txt"]:
        """Text features, encoded for this call."""
        return self._one(index).text

    def pooled(self, index: int) -> Float32[np.ndarray, " c_pool"]:
        """The pooled text vector, encoded for this call."""
        return self._one(index).pooled

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Latent rows, encoded for this call.

        Raises:
            BadSampleError: the picture cannot be decoded.
        """
        return self._one(index).rows

    def _one(self, index: int) -> SampleRows:
        (found,) = self.read_batch([Wanted(index, is_dropped=False, device=0, draw=(0, 0, 0))])
        if isinstance(found, BadSampleError):
            raise found
        return found

    def read_batch(self, wanted: Sequence[Wanted]) -> list[SampleRows | BadSampleError]:
        """See `BatchSource`: pictures are decoded in threads, and encoded on the home device of each."""
        clips = list(self._readers.map(self._decoded, (w.sample for w in wanted)))
        jobs: dict[int, Future[_Encoded]] = {}
        for device in sorted({w.device for w in wanted}):
            frames = [
                Frame((i, t), picture)
                for i, (w, clip) in enumerate(zip(wanted, clips, strict=True))
                if w.device == device and not isinstance(clip, BadSampleError)
                for t, picture in enumerate(clip)
            ]
            captions = [self._caption(w) for w in wanted if w.device == device]
            jobs[device] = self._encoders.submit(device, frames, captions)
        encoded = {device: job.result() for device, job in jobs.items()}
        return [
            clip if isinstance(clip, BadSampleError) else self._sample(w, i, len(clip), encoded[w.device])
            for i, (w, clip) in enumerate(zip(wanted, clips, strict=True))
        ]

    def _decoded(self, index: int) -> np.ndarray | BadSampleError:
        try:
            return self._pixels.frames(index)
        except BadSampleError as error:
            return error

    def _caption(self, wanted: Wanted) -> str:
        return "" if wanted.is_dropped else self._pixels.caption(wanted.sample)

    def _sample(self, wanted: Wanted, place: int, frames: int, encoded: "_Encoded") -> SampleRows:
        latents, text = encoded
        found = [latents[place, t] for t in range(frames)]
        mean = np.stack([frame.mean for frame in found], axis=1)
        if self._draw:
            mean = drawn_latents(mean, np.stack([frame.logvar for frame in found], axis=1), wanted.draw)
        features, pooled = text[self._caption(wanted)]
        rows = rows_of_latents(mean, _PATCH, channels_last=False)
        return SampleRows(rows, features.astype(np.float32), pooled)


_Encoded = tuple[dict[Any, Latents], dict[str, Text]]


class _DeviceEncoders:
    """A copy of the encoders, and a thread that runs them, for each device of this process that is asked for."""

    def __init__(self, folder: FluxFolder, canvases: Canvases, settings: EncoderSettings) -> None:
        self._folder, self._canvases, self._settings = folder, canvases, settings
        self._captions = max(1, _GROUP_ROWS // folder.text_tokens)
        self._lock = threading.Lock()
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._params: EncoderParams | None = None
        self._encoders: dict[int, BatchEncoder] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of one copy with what it computes."""
        return encoder_bytes(
            self._folder, latent_pixels=self._canvases.most_pixels(1), captions=self._captions
        )

    def submit(self, device: int, frames: Sequence[Frame], captions: Sequence[str]) -> Future[_Encoded]:
        """Latents by name and features by caption, made in the device's thread."""
        with self._lock:
            if device not in self._threads:
                self._threads[device] = ThreadPoolExecutor(1, thread_name_prefix=f"encode-{device}")
            return self._threads[device].submit(self._encoded, device, frames, captions)

    def _encoded(self, device: int, frames: Sequence[Frame], captions: Sequence[str]) -> _Encoded:
        encoder = self._encoder(device)
        distinct = dict.fromkeys(captions)
        return dict(encoder.pictures(frames)), dict(encoder.texts((x, x) for x in distinct))

    def _encoder(self, number: int) -> BatchEncoder:
        if number not in self._encoders:
            device = jax.local_devices()[number]
            mesh = sequence_mesh([device], ulysses_degree=1)
            with self._lock:  # read from the disk once; the others get a copy
                try:
                    params = None if self._params is None else jax.device_put(self._params, device)
                    encoders = FluxEncoders(
                        self._folder, mesh, text_dtype=self._settings.text_dtype, params=params
                    )
                except WeightsError as error:
                    raise DataError(f"flux_encoders.model: {error}") from error
                self._params = encoders.params
            self._encoders[number] = BatchEncoder(
                encoders, self._canvases, captions=self._captions, padding=self._settings.padding
            )
        return self._encoders[number]
