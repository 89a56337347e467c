"""Pixels and sizes of image and video files: Pillow for stills and animations, PyAV for video containers."""

from __future__ import annotations

import dataclasses
import io
import math
import stat
import struct
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from experiments.data._types import BadSampleError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"})
VIDEO_SUFFIXES = frozenset({".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".ogv"})
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES

# An open file, or the bytes of one that lies inside another.
MediaBytes = io.BufferedReader | io.BytesIO

# What the two decoders raise on damaged or truncated content, a decompression bomb included.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    MemoryError,
    Image.DecompressionBombError,
    av.error.FFmpegError,
    struct.error,
    zlib.error,
    RuntimeError,
)

_ORIENTATION_TAG = 0x0112
# EXIF orientations 5 to 8 swap the sides.
_SIDEWAYS = frozenset({5, 6, 7, 8})


@dataclasses.dataclass(frozen=True, slots=True)
class MediaSize:
    """Frames and upright size in pixels of a file as it is shown."""

    frames: int
    height: int
    width: int


@dataclasses.dataclass(frozen=True, slots=True)
class FrameChoice:
    """Which frames of a clip are read: `count`, every `stride`-th one from `start`, as width x height."""

    count: int
    stride: int
    height: int
    width: int
    start: int = 0

    def wanted(self) -> range:
        """The frame numbers."""
        return range(self.start, self.start + self.count * self.stride, self.stride)


def media_size(file: MediaBytes, suffix: str) -> MediaSize:
    """Size of an image or a video from its header (for a video also from its first frame).

    Args:
      file: opened at its start.
      suffix: lower-case file suffix, which chooses the decoder.

    Raises:
      BadSampleError: the header cannot be read.
    """
    try:
        size = _image_size(file) if suffix in IMAGE_SUFFIXES else _video_size(file)
    except _DECODE_ERRORS as error:
        raise BadSampleError(_reason(error)) from error
    if min(size.frames, size.height, size.width) < 1:
        raise BadSampleError(f"nothing to show: {size}")
    return size


def read_frames(file: MediaBytes, suffix: str, choice: FrameChoice) -> UInt8[np.ndarray, "t y x 3"]:
    """Chosen frames, upright, as RGB, resized with antialiasing.

    Raises:
      BadSampleError: a frame cannot be decoded.
    """
    read = _image_frames if suffix in IMAGE_SUFFIXES else _video_frames
    try:
        frames = read(file, choice)
    except _DECODE_ERRORS as error:
        raise BadSampleError(_reason(error)) from error
    if len(frames) < choice.count:
        raise BadSampleError(f"only {len(frames)} of {choice.count} frames can be decoded")
    return np.stack(frames)


def open_media(path: Path, offset: int = 0, size: int = -1) -> MediaBytes:
    """A file, or `size` >= 0 bytes at `offset` of one (a member of a tar shard), opened at its start.

    Raises:
      BadSampleError: it cannot be opened.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise BadSampleError("not a regular file")
        if size < 0:
            return path.open("rb")
        with path.open("rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size))
    except OSError as error:
        raise BadSampleError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _resized(image: Image.Image, choice: FrameChoice) -> UInt8[np.ndarray, "y x 3"]:
    size = (choice.width, choice.height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(image)


def _image_size(file: MediaBytes) -> MediaSize:
    with Image.open(file) as image:
        width, height = image.size
        if _orientation(image) in _SIDEWAYS:
            width, height = height, width
        return MediaSize(int(getattr(image, "n_frames", 1)), height, width)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation from what is before the pixels: a PNG would be decoded to look for a later one."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_ORIENTATION_TAG, 1))


def _as_rgb(image: Image.Image) -> Image.Image:
    """RGB; 16-bit grey is scaled, transparency is laid over white (plain conversion would do neither)."""
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.float64)
        image = Image.fromarray(np.clip(grey / 257.0, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        under = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(under, image)
    return image.convert("RGB")


def _image_frames(file: MediaBytes, choice: FrameChoice) -> list[np.ndarray]:
    frames = []
    with Image.open(file) as image:
        turned = _orientation(image) != 1
        for number in choice.wanted():
            if number:
                image.seek(number)
            upright = ImageOps.exif_transpose(image) if turned else image
            frames.append(_resized(_as_rgb(upright), choice))
    return frames


def _video_size(file: MediaBytes) -> MediaSize:
    with av.open(file) as container:
        stream = container.streams.video[0]
        frame = next(container.decode(stream), None)
        if frame is None:
            raise ValueError("no frame can be decoded")
        height, width = _shown_size(frame, stream)
        frames = stream.frames
    if frames <= 0:  # Matroska, WebM and transport streams do not say
        file.seek(0)
        frames = _count_frames(file)
    return MediaSize(frames, height, width)


def _count_frames(file: MediaBytes) -> int:
    with av.open(file) as container:
        return sum(1 for packet in container.demux(video=0) if packet.size)


def _shown_size(frame: Any, stream: Any) -> tuple[int, int]:
    """(height, width) after the pixel aspect ratio and the rotation in the container."""
    aspect = stream.sample_aspect_ratio or 1
    height, width = frame.height, max(1, math.floor(frame.width * float(aspect) + 0.5))
    return (width, height) if _quarter_turns(frame) % 2 else (height, width)


def _quarter_turns(frame: Any) -> int:
    """Counter-clockwise quarter turns that make a frame upright."""
    return round(frame.rotation / 90) % 4


def _video_frames(file: MediaBytes, choice: FrameChoice) -> list[np.ndarray]:
    wanted = choice.wanted()
    frames: list[np.ndarray] = []
    with av.open(file) as container:
        stream = container.streams.video[0]
        stream.thread_type = (
            "SLICE"  # frame threads outlive the container in some builds; readers are threads already
        )
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                upright = np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame))
                frames.append(_resized(Image.fromarray(np.ascontiguousarray(upright)), choice))
            if len(frames) == choice.count:
                break
    return frames
