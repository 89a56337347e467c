"""Pixels to tokens and back: square patches of single frames, in NumPy, exact both ways.

Rows run over (t, h, w), w fastest; inside a row a patch runs over (h, w, channel), channel fastest. (FLUX.1's
own latent packing is channel-slowest; its weights want rows reordered so.)
"""

import numpy as np
from jaxtyping import Int, Num

from ._protocol import Grid

__all__ = ["PixelPatches", "patch_grid", "patch_positions", "patchify", "unpatchify"]


def patch_grid(shape: tuple[int, ...], patch_size: int) -> Grid:
    """Tokens along each axis of a clip.

    Args:
        shape: (t, h, w, c) of the clip.
        patch_size: edge of a patch.

    Returns:
        The grid.

    Raises:
        ValueError: if the shape has not four axes, or patches do not fill height and width.
    """
    if patch_size < 1:
        raise ValueError(f"patch_grid: patch_size must be at least 1; got patch_size={patch_size}. Use 2.")
    if len(shape) != 4:
        raise ValueError(f"patch_grid: shape must be (t, h, w, c); got shape={shape}. A picture has t = 1.")
    t, h, w, _ = shape
    if h % patch_size or w % patch_size:
        raise ValueError(
            f"patch_grid: height and width must be multiples of patch_size; got shape={shape}, "
            f"patch_size={patch_size}. Resize to {_nearest(h, patch_size)} x {_nearest(w, patch_size)}."
        )
    return Grid(t, h // patch_size, w // patch_size)


def _nearest(size: int, patch_size: int) -> int:
    return max(1, round(size / patch_size)) * patch_size


def patchify(pixels: Num[np.ndarray, "t h w c"], patch_size: int) -> Num[np.ndarray, "n p"]:
    """Cuts a clip into rows of patches.

    Args:
        pixels: frames; a picture is one frame.
        patch_size: edge of a patch, dividing height and width.

    Returns:
        t * h / p * w / p rows of p * p * c values.

    Raises:
        ValueError: as `patch_grid`.
    """
    t, h, w = patch_grid(pixels.shape, patch_size)
    blocks = pixels.reshape(t, h, patch_size, w, patch_size, pixels.shape[3])
    return blocks.transpose(0, 1, 3, 2, 4, 5).reshape(t * h * w, patch_size**2 * pixels.shape[3])


def unpatchify(
    rows: Num[np.ndarray, "n p"], grid: tuple[int, int, int], patch_size: int
) -> Num[np.ndarray, "t h w c"]:
    """Puts rows of patches back into a clip; the inverse of `patchify`.

    Args:
        rows: rows in the order of `patchify`.
        grid: tokens along each axis.
        patch_size: edge of a patch.

    Returns:
        The clip.

    Raises:
        ValueError: if the rows do not fill the grid, or are not patches of that size.
    """
    t, h, w = grid
    if rows.shape[0] != t * h * w or rows.shape[1] % patch_size**2:
        raise ValueError(
            "unpatchify: rows must be t * h * w patches of patch_size^2 * c values; got rows of shape "
            f"{rows.shape}, grid={tuple(grid)}, patch_size={patch_size}. Take the grid from patch_grid."
        )
    channels = rows.shape[1] // patch_size**2
    blocks = rows.reshape(t, h, w, patch_size, patch_size, channels).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(t, h * patch_size, w * patch_size, channels)


def patch_positions(grid: tuple[int, int, int]) -> Int[np.ndarray, "n 3"]:
    """(t, h, w) of each row of `patchify`, counted in tokens, int32."""
    return np.indices(grid, dtype=np.int32).reshape(3, -1).T.copy()


class PixelPatches:
    """The image encoder without parameters: a row is a patch of pixels.

    Args:
        patch_size: edge of a patch.
        pixel_channels: channels of a pixel.

    Raises:
        ValueError: if either is below 1.
    """

    def __init__(self, patch_size: int, *, pixel_channels: int = 3) -> None:
        if min(patch_size, pixel_channels) < 1:
            raise ValueError(
                "PixelPatches: patch_size and pixel_channels must be at least 1; got "
                f"patch_size={patch_size}, pixel_channels={pixel_channels}. Use 2 and 3."
            )
        self.frozen = True
        self.patch_size = patch_size
        self.channels = patch_size**2 * pixel_channels

    def encode(self, pixels: Num[np.ndarray, "t h w c"]) -> Num[np.ndarray, "n p"]:
        """Rows of a clip; see `patchify`."""
        return patchify(pixels, self.patch_size)

    def decode(self, rows: Num[np.ndarray, "n p"], grid: tuple[int, int, int]) -> Num[np.ndarray, "t h w c"]:
        """The clip of so many rows; see `unpatchify`."""
        return unpatchify(rows, grid, self.patch_size)
