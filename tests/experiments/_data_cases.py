"""Small made-up sources and media files for the data tests."""

from __future__ import annotations

import fractions
import io
import tarfile
from pathlib import Path

import av
import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from experiments.data import BadSampleError

CHANNELS = 3


class ListSource:
    """Sequences of given sizes whose rows hold the sample's number, so that a mix-up shows."""

    patch = 1
    channels = CHANNELS
    text_channels = 0
    pooled_channels = 0
    dropped_text_length = 0

    def __init__(self, name, image_lengths, text_lengths=None, bad=(), labels=None):
        self.name = name
        self.labels = None if labels is None else np.asarray(labels, np.int32)
        self.image_lengths = np.asarray(image_lengths, np.int32)
        num = len(self.image_lengths)
        self.text_lengths = (
            np.zeros(num, np.int32) if text_lengths is None else np.asarray(text_lengths, np.int32)
        )
        self.grids = np.stack([np.ones(num), np.ones(num), self.image_lengths], axis=1).astype(np.int32)
        self.digest = f"{name}-{self.image_lengths.tolist()}-{self.text_lengths.tolist()}"
        self.reads = []
        self._bad = set(bad)

    def __len__(self):
        return len(self.image_lengths)

    def sample_name(self, index):
        return f"{self.name}-{index}"

    split_name = sample_name

    def text(self, index):
        return np.full((int(self.text_lengths[index]), 8), index % 251, np.uint8)

    def pooled(self, index):
        return np.zeros(0, np.float32)

    def read(self, index):
        self.reads.append(index)
        if index in self._bad:
            raise BadSampleError("made up")
        length = int(self.image_lengths[index])
        return np.stack([np.full(length, index), np.arange(length), np.ones(length)], axis=1).astype(
            np.float32
        )


def gradient_image(height, width, *, seed=0):
    """A smooth picture that differs in every corner, (height, width, 3) uint8."""
    y, x = np.mgrid[0:height, 0:width]
    rng = np.random.default_rng(seed)
    offset = rng.integers(0, 40)
    planes = [y * 200 // max(height - 1, 1), x * 200 // max(width - 1, 1), np.full_like(x, offset)]
    return np.stack(planes, axis=2).astype(np.uint8)


def image_bytes(height, width, *, seed=0, form="PNG", **options):
    """An encoded picture."""
    buffer = io.BytesIO()
    Image.fromarray(gradient_image(height, width, seed=seed)).save(buffer, form, **options)
    return buffer.getvalue()


def save_image(path: Path, height, width, **options):
    """Writes a picture; the suffix gives the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(gradient_image(height, width)).save(path, **options)


def save_clip(path: Path, num_frames, height, width, *, codec="mpeg4"):
    """Writes a clip whose frame i has grey level 20 + 8 i, with a white top left corner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fractions.Fraction(10))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(num_frames):
            pixels = np.full((height, width, 3), 20 + 8 * i, np.uint8)
            pixels[: height // 4, : width // 4] = 255
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def save_tar(path: Path, members):
    """Writes (name, bytes) members in order."""
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))


def words_of(tokens):
    """The words of byte tokens, for words of less than eight bytes."""
    assert not tokens[:, -1].any()
    return [token.tobytes().rstrip(b"\0").decode() for token in tokens]


def save_encoded(path, *, height, width, tokens, frames=None, channels=4, text=6, pooled=5, seed=0, **others):
    """A file of one encoded sample; returns its latents."""
    rng = np.random.default_rng([seed, height, width, tokens])
    size = (channels, height, width) if frames is None else (channels, frames, height, width)
    tensors = {
        "latents": rng.standard_normal(size).astype(np.float32),
        "text": rng.standard_normal((tokens, text)).astype(np.float32),
        "pooled": rng.standard_normal(pooled).astype(np.float32),
        **others,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    return tensors
