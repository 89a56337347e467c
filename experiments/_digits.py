"""Which digit a picture shows: the judge of the quickstart's samples, trained on real handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image

from experiments.data import draw_digit, handwritten_digits

# The judge sees the convention of the data it was trained on: 8 x 8 cells of ink, 0..16.
_CELLS = 8
_FULL_INK = 16.0

# Canvas sides the training digits pass through, so that resampling is nothing new to the judge.
_SIDES = (16, 24, 32)


def digit_cells(image: UInt8[np.ndarray, "y x 3"]) -> Float64[np.ndarray, "8 8"]:
    """Undoes `draw_digit` for a picture of any size: grey, the centred square, averaged down to 8 x 8.

    Contrast is stretched so that the paper is 0 and the brightest cells are full ink, as in the real digits.
    """
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    grey = image[top : top + side, left : left + side].astype(np.float32).mean(axis=2)
    small = Image.fromarray(grey).resize((_CELLS, _CELLS), Image.Resampling.BOX)
    cells = np.asarray(small, np.float64)
    low, high = np.quantile(cells, 0.1), cells.max()
    if high - low < 1.0:  # less than a grey level: an empty picture stays empty
        return np.zeros((_CELLS, _CELLS))
    return np.clip((cells - low) / (high - low), 0.0, 1.0) * _FULL_INK


def _drawn_cells(
    digits: Float64[np.ndarray, "n 8 8"], *, height: int, width: int
) -> Float64[np.ndarray, "n 64"]:
    drawn = [digit_cells(draw_digit(d, height=height, width=width)) for d in digits]
    return np.stack(drawn).reshape(len(drawn), _CELLS * _CELLS)


class DigitClassifier:
    """A support vector machine (radial kernel) fitted to the training digits as they look when drawn.

    Deterministic; takes a second or two to build. `held_out_accuracy` is measured on digits that neither it
    nor any model has been trained on.
    """

    def __init__(self) -> None:
        from sklearn.svm import SVC  # slow to import, and only evaluation needs it

        train = handwritten_digits(held_out=False)
        cells = [_drawn_cells(train.images, height=side, width=side) for side in _SIDES]
        self._machine = SVC(C=10.0, gamma=0.0015)
        self._machine.fit(np.concatenate(cells), np.tile(train.labels, len(cells)))

    def classify(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> Int64[np.ndarray, " n"]:
        """The digit each RGB picture shows, whatever its size."""
        if len(images) == 0:
            return np.zeros(0, np.int64)
        cells = np.stack([digit_cells(image) for image in images]).reshape(len(images), -1)
        return self._machine.predict(cells).astype(np.int64)

    def held_out_accuracy(self, *, height: int = 32, width: int = 32) -> float:
        """Share of the held-out digits that is recognised after being drawn at a size."""
        held_out = handwritten_digits(held_out=True)
        guessed = self._machine.predict(_drawn_cells(held_out.images, height=height, width=width))
        return float(np.mean(guessed == held_out.labels))
