"""Latents encoded beforehand: rows of a model, and draws from their distribution, on the host."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Num

# Keeps these draws apart from others that a seed names.
_STREAM = 0x4C61


def rows_of_latents(
    latents: Num[np.ndarray, "c t h w"], patch: int, *, channels_last: bool
) -> Num[np.ndarray, "n p"]:
    """Patches as rows, row-major over (t, h, w).

    Args:
      latents: of each frame, height and width whole patches.
      patch: latent pixels per patch side.
      channels_last: order inside a row: (row, column, channel) as a DiT's, or (channel, row, column) as FLUX.1's.
    """
    c, t, h, w = latents.shape
    # (c, t, h/p, ph, w/p, pw) to (t, h/p, w/p, row)
    blocks = latents.reshape(c, t, h // patch, patch, w // patch, patch)
    order = (1, 2, 4, 3, 5, 0) if channels_last else (1, 2, 4, 0, 3, 5)
    rows = blocks.transpose(order).reshape(t * (h // patch) * (w // patch), patch * patch * c)
    return np.ascontiguousarray(rows)


def drawn_latents(
    mean: Float32[np.ndarray, "c t h w"], logvar: Float32[np.ndarray, "c t h w"], draw: tuple[int, int, int]
) -> Float32[np.ndarray, "c t h w"]:
    """Latents from their distribution, the same wherever they are drawn.

    Args:
      mean, logvar: of every value.
      draw: (seed, step, sequence).
    """
    seed, step, sequence = draw
    rng = np.random.default_rng([seed % 2**63, _STREAM, step, sequence])
    return mean + np.exp(np.float32(0.5) * logvar) * rng.standard_normal(mean.shape, np.float32)
