"""Finished latents to pixels."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, UInt8

from .._hosts import on_host
from ..encoders import AutoencoderKL, Grid, decode_split
from ..sampling import CanvasBuckets
from ._latents import latents_of_rows


class PictureDecoder:
    """An autoencoder whose decoder works on all devices, each with some rows of every frame.

    Args:
        model: with parameters on the mesh.
        mesh: of all devices.
        buckets: sizes in latent pixels that it is compiled for.
    """

    def __init__(self, model: AutoencoderKL, mesh: Mesh, buckets: CanvasBuckets) -> None:
        self._model, self._mesh, self._buckets = model, mesh, buckets

    def __call__(
        self, rows: Float[np.ndarray, "n c"], grid: Grid, *, patch: int, channels_last: bool
    ) -> UInt8[np.ndarray, "t h w 3"]:
        """Frames of rows of latents; one at a time, so that a clip takes no more memory than a picture."""
        latents = latents_of_rows(rows, grid, patch, channels_last=channels_last)
        return np.concatenate([self._frame(frame[None]) for frame in latents])

    def _frame(self, latents: Float[np.ndarray, "1 h w c"]) -> UInt8[np.ndarray, "1 h_out w_out 3"]:
        _, height, width, _ = latents.shape
        rows, columns = self._buckets.fit(height, width)
        canvas = np.pad(latents, ((0, 0), (0, rows - height), (0, columns - width), (0, 0)))
        pixels = decode_split(
            self._model,
            self._model.denormalized(jnp.asarray(canvas, jnp.float32)),
            mesh=self._mesh,
            axis_names=self._mesh.axis_names,
            size=(height, width),
        )
        factor = self._model.config.factor
        shown = on_host(jnp.clip(pixels / 2 + 0.5, 0, 1))[:, : factor * height, : factor * width]
        return np.round(255 * shown).astype(np.uint8)
