"""The image autoencoder of latent diffusion: pixels to latents an eighth as high and wide, and back.

Pictures are (b, h, w, c), pixels in [-1, 1], of any height and width that `AutoencoderKLConfig.factor` divides. The
encoder and the decoder are chains: lists of layers, each called as `x = layer(x, rows)`, which a pipeline can cut
anywhere.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .._random import token_noise
from ._autoencoder_config import AutoencoderKLConfig, decoder_chain, encoder_chain
from ._autoencoder_layers import PictureLayer, make_layer
from ._picture_rows import WHOLE, PictureRows

__all__ = ["AutoencoderKL", "LatentPosterior", "run_chain"]

# Bounds of the encoder's log-variance.
_LOGVAR_RANGE = (-30.0, 20.0)


class LatentPosterior(NamedTuple):
    """The distribution of a picture's latents: normal, each value on its own.

    Attributes:
        mean, logvar: float32.
    """

    mean: Float[Array, "b h w c"]
    logvar: Float[Array, "b h w c"]

    def mode(self) -> Float[Array, "b h w c"]:
        """The mean."""
        return self.mean

    def sample(self, picture_ids: Int[Array, " b"] | None = None, *, key: Any) -> Float[Array, "b h w c"]:
        """Draws latents, of whole pictures (a global array).

        Args:
            picture_ids: non-negative ids, which choose a picture's noise wherever it lies in a batch; by default 0 ..
                b - 1.
            key: threefry key; one of its own, for `token_noise` of the same key and step 0 gives the same numbers.

        Raises:
            ValueError: if the key is of another kind.
        """
        batch, height, width, channels = self.mean.shape
        ids = jnp.arange(batch) if picture_ids is None else picture_ids
        pixels = height * width
        segment_ids = jnp.repeat(ids.astype(jnp.int32) + 1, pixels)
        places = jnp.tile(jnp.arange(pixels, dtype=jnp.int32), batch)
        noise = token_noise(0, segment_ids, places, channels, key=key)
        return self.mean + jnp.exp(0.5 * self.logvar) * noise.reshape(self.mean.shape)


class AutoencoderKL(nnx.Module):
    """The autoencoder that diffusers calls so, with its numbers and the names of its tensors.

    Args:
        config: shape and compute dtype.
        rngs: source of the initial parameters.

    Attributes:
        encoder, decoder: the chains, see `encoder_chain` and `decoder_chain`.

    Reference: Rombach et al., High-Resolution Image Synthesis with Latent Diffusion Models, 2022.
    """

    def __init__(self, config: AutoencoderKLConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.encoder = nnx.List([make_layer(spec, config, rngs=rngs) for spec in encoder_chain(config)])
        self.decoder = nnx.List([make_layer(spec, config, rngs=rngs) for spec in decoder_chain(config)])

    def encode(self, images: Float[Array, "b h w c"], *, rows: PictureRows = WHOLE) -> LatentPosterior:
        """Latents of pictures; not scaled, see `normalized`.

        Args:
            images: pixels in [-1, 1]; with `rows` this device's rows, per device.
            rows: how pictures are divided, see `encode_split`.

        Raises:
            ValueError: for other channels, or sizes that the factor does not divide.
        """
        factor = self.config.factor
        _check("encode", images, self.config.in_channels, factor, rows)
        moments = run_chain(self.encoder, images, rows).astype(jnp.float32)
        mean, logvar = jnp.split(moments, 2, axis=3)
        return LatentPosterior(mean, jnp.clip(logvar, *_LOGVAR_RANGE))

    def decode(
        self, latents: Float[Array, "b h w c"], *, rows: PictureRows = WHOLE
    ) -> Float[Array, "b h_out w_out c_out"]:
        """Pictures of latents.

        Args:
            latents: as `encode` gives them, not scaled; with `rows` this device's rows, per device.
            rows: how pictures are divided, see `decode_split`.

        Returns:
            Float32 pixels, about in [-1, 1].

        Raises:
            ValueError: for other channels.
        """
        _check("decode", latents, self.config.latent_channels, 1, rows)
        return run_chain(self.decoder, latents, rows).astype(jnp.float32)

    def normalized(self, latents: Float[Array, "*n c"]) -> Float[Array, "*n c"]:
        """Latents as diffusion models take them: shifted and scaled to about zero mean and unit variance."""
        return (latents - self.config.shift_factor) * self.config.scaling_factor

    def denormalized(self, latents: Float[Array, "*n c"]) -> Float[Array, "*n c"]:
        """What `decode` takes, of latents of a diffusion model; the inverse of `normalized`."""
        return latents / self.config.scaling_factor + self.config.shift_factor


def run_chain(
    layers: Iterable[PictureLayer], x: Float[Array, "b h w c"], rows: PictureRows = WHOLE
) -> Float[Array, "b h_out w_out c_out"]:
    """Runs layers of a chain, all or a part, one after the other."""
    for layer in layers:
        x = layer(x, rows)
    return x


def _check(name: str, x: Array, channels: int, unit: int, rows: PictureRows) -> None:
    _, height, width, found = x.shape
    if found != channels or not height or not width or height % unit or width % unit:
        raise ValueError(
            f"AutoencoderKL.{name}: pictures must be (batch, height, width, {channels}), height and width positive"
            f" multiples of {unit}; got {x.shape}. Resize or crop them, channels last."
        )
    if rows.axis_names and height != rows.rows_loc * unit:
        raise ValueError(
            f"AutoencoderKL.{name}: a device has ceil(height / devices) latent rows of {unit} rows each, with padding;"
            f" got {height} rows, height={rows.height}, devices={rows.num_devices}. Use {name}_split, or fill up the"
            f" picture to {rows.rows_loc * rows.num_devices * unit} rows."
        )
