"""Latents as rows of a model, and back, on the host."""

import numpy as np
from jaxtyping import Float

from ..encoders import Grid


def rows_of_latents(
    latents: Float[np.ndarray, "t h w c"], patch: int, *, channels_last: bool
) -> Float[np.ndarray, "n p"]:
    """Patches as rows, over (t, h, w).

    Args:
        latents: of each frame.
        patch: edge of a patch, which divides height and width.
        channels_last: order inside a row: (row, column, channel) as a DiT's, or (channel, row, column) as FLUX.1's.
    """
    t, h, w, c = latents.shape
    blocks = latents.reshape(t, h // patch, patch, w // patch, patch, c)
    order = (0, 1, 3, 2, 4, 5) if channels_last else (0, 1, 3, 5, 2, 4)
    return blocks.transpose(order).reshape(-1, patch * patch * c)


def latents_of_rows(
    rows: Float[np.ndarray, "n p"], grid: Grid, patch: int, *, channels_last: bool
) -> Float[np.ndarray, "t h w c"]:
    """The inverse of `rows_of_latents`."""
    t, h, w = grid
    c = rows.shape[1] // patch**2
    if channels_last:
        blocks = rows.reshape(t, h, w, patch, patch, c).transpose(0, 1, 3, 2, 4, 5)
    else:
        blocks = rows.reshape(t, h, w, c, patch, patch).transpose(0, 1, 4, 2, 5, 3)
    return np.ascontiguousarray(blocks).reshape(t, h * patch, w * patch, c)
