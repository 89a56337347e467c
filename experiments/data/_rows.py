"""Pixels to rows of patches and back, and the patch grid a picture of any size is snapped to."""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from jaxdit.encoders import patch_positions, patchify, unpatchify


def rows_from_frames(frames: UInt8[np.ndarray, "t y x c"], *, patch: int) -> Float32[np.ndarray, "n p"]:
    """Cuts frames into patch rows in [-1, 1]: row-major over (t, h, w), inside a row (y, x, channel).

    Args:
      frames: pixels 0..255, sides multiples of `patch`.
      patch: pixels per patch side.

    Returns:
      (t * h * w, patch * patch * c) float32.
    """
    return patchify(frames, patch).astype(np.float32) / np.float32(127.5) - np.float32(1.0)


def frames_from_rows(
    rows: Float32[np.ndarray, "n p"], *, grid: tuple[int, int, int], patch: int
) -> UInt8[np.ndarray, "t y x c"]:
    """Undoes `rows_from_frames`; values outside [-1, 1] saturate.

    Args:
      rows: (t * h * w, patch * patch * c).
      grid: patches (t, h, w).
      patch: pixels per patch side.
    """
    pixels = unpatchify(rows, grid, patch)
    return np.clip(np.rint((pixels + 1.0) * 127.5), 0, 255).astype(np.uint8)


def grid_positions(grid: tuple[int, int, int], count: int | None = None) -> Int32[np.ndarray, "n 3"]:
    """(t, h, w) of the first `count` tokens of a grid in row-major order (all of them by default)."""
    return patch_positions(grid)[:count]


@functools.lru_cache(maxsize=65_536)  # data sets have far fewer sizes than files
def snap_grid(height: int, width: int, *, patch: int, max_patches: int) -> tuple[int, int]:
    """Patch grid (h, w) for a picture: nearest multiples of the patch, scaled down to fit, never cropped.

    Without a scale-down each side moves by at most half a patch. With one, the scale is the largest whose
    snapped grid has at most `max_patches`, so the aspect ratio is kept to within half a patch per side.

    Args:
      height, width: pixels.
      patch: pixels per patch side.
      max_patches: most patches allowed.

    Raises:
      ValueError: a side is shorter than the patch, or no patch is allowed.
    """
    if min(height, width) < patch:
        raise ValueError(
            f"snap_grid: both sides must be at least patch={patch} pixels; got {height}x{width}. "
            "Use a smaller patch or remove the picture."
        )
    if max_patches < 1:
        raise ValueError(f"snap_grid: max_patches must be at least 1; got max_patches={max_patches}.")

    def snapped(scale: float) -> tuple[int, int]:
        return tuple(max(1, math.floor(side * scale / patch + 0.5)) for side in (height, width))  # type: ignore[return-value]

    if math.prod(snapped(1.0)) <= max_patches:
        return snapped(1.0)
    low, high = 0.0, 1.0  # snapped(low) fits, snapped(high) does not
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(snapped(middle)) <= max_patches else (low, middle)
    h, w = snapped(low)
    return h, w
