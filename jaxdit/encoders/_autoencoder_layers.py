"""Layers of an image autoencoder: each takes pictures (b, h, w, c) and how their rows are divided, and gives pictures.

Parameters are float32 and named as diffusers names them, but for q, k and v, which are one product. Convolutions run in
the compute dtype, norms and SiLU in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ._autoencoder_config import AutoencoderKLConfig, LayerKind, LayerSpec
from ._picture_rows import PictureRows

__all__ = ["PictureLayer", "make_layer"]

Picture = Float[Array, "b h w c"]
Output = Float[Array, "b h_out w_out c_out"]
# A layer of a chain: this device's rows of pictures, and how rows are divided.
PictureLayer = Callable[[Picture, PictureRows], Output]

_EPSILON = 1e-6


class Conv(nnx.Conv):
    """A square convolution that reads zeros past the picture's edges.

    Args:
        spec: channels.
        edge: of the kernel.
        past: rows and columns read past the first edge, and past the last.
        dtype: to compute in.
        stride: pixels from one output to the next.
        rngs: source of the initial parameters.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        edge: int = 3,
        past: tuple[int, int] = (1, 1),
        stride: int = 1,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        channels, shape = (spec.in_channels, spec.out_channels), (edge, edge)
        super().__init__(*channels, shape, stride, padding=((0, 0), past), dtype=dtype, rngs=rngs)
        self.past = past

    def __call__(self, x: Picture, rows: PictureRows) -> Output:
        above, below = self.past
        return super().__call__(rows.extended(x.astype(self.dtype), above=above, below=below))


class GroupNorm(nnx.Module):
    """GroupNorm over whole pictures, in float32."""

    def __init__(self, channels: int, num_groups: int) -> None:
        self.num_groups = num_groups
        self.scale = nnx.Param(jnp.ones((channels,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32))

    def __call__(self, x: Picture, rows: PictureRows) -> Picture:
        moments = rows.moments(x, self.num_groups)
        repeats = x.shape[3] // self.num_groups
        mean, variance = (jnp.repeat(m, repeats, axis=1)[:, None, None] for m in moments)
        factor = jax.lax.rsqrt(variance + _EPSILON) * self.scale[...][None, None, None]
        return (x.astype(jnp.float32) - mean) * factor + self.bias[...][None, None, None]


def _norm_and_silu(norm: GroupNorm, x: Picture, rows: PictureRows) -> Picture:
    return nnx.silu(norm(x, rows)).astype(x.dtype)


class Resnet(nnx.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), with a 1 x 1 convolution of x where channels change."""

    def __init__(self, spec: LayerSpec, num_groups: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        same = spec._replace(in_channels=spec.out_channels)
        self.norm1 = GroupNorm(spec.in_channels, num_groups)
        self.conv1 = Conv(spec, dtype=dtype, rngs=rngs)
        self.norm2 = GroupNorm(spec.out_channels, num_groups)
        self.conv2 = Conv(same, dtype=dtype, rngs=rngs)
        self.conv_shortcut = None if spec == same else Conv(spec, edge=1, past=(0, 0), dtype=dtype, rngs=rngs)

    def __call__(self, x: Picture, rows: PictureRows) -> Output:
        hidden = self.conv1(_norm_and_silu(self.norm1, x, rows), rows)
        hidden = self.conv2(_norm_and_silu(self.norm2, hidden, rows), rows)
        return (x if self.conv_shortcut is None else self.conv_shortcut(x, rows)) + hidden


class Attention(nnx.Module):
    """x + attention(norm(x)) of all pixels to all, one head."""

    def __init__(self, spec: LayerSpec, num_groups: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        channels = spec.in_channels
        self.group_norm = GroupNorm(channels, num_groups)
        self.to_qkv = nnx.Linear(channels, 3 * channels, dtype=dtype, rngs=rngs)
        self.to_out = nnx.Linear(channels, channels, dtype=dtype, rngs=rngs)

    def __call__(self, x: Picture, rows: PictureRows) -> Picture:
        normed = self.group_norm(x, rows).astype(x.dtype)
        q, k, v = jnp.split(self.to_qkv(normed), 3, axis=3)
        return x + self.to_out(rows.attention(q, k, v))


class Downsampler(nnx.Module):
    """A convolution with stride 2 that reads past the lower and the right edge only."""

    def __init__(self, spec: LayerSpec, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.conv = Conv(spec, past=(0, 1), stride=2, dtype=dtype, rngs=rngs)

    def __call__(self, x: Picture, rows: PictureRows) -> Output:
        return self.conv(x, rows)


class Upsampler(nnx.Module):
    """Each pixel four times, and a convolution."""

    def __init__(self, spec: LayerSpec, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.conv = Conv(spec, dtype=dtype, rngs=rngs)

    def __call__(self, x: Picture, rows: PictureRows) -> Output:
        return self.conv(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2), rows)


class Head(nnx.Module):
    """conv(silu(norm(x))), the last layer of both chains."""

    def __init__(self, spec: LayerSpec, num_groups: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.conv_norm_out = GroupNorm(spec.in_channels, num_groups)
        self.conv_out = Conv(spec, dtype=dtype, rngs=rngs)

    def __call__(self, x: Picture, rows: PictureRows) -> Output:
        return self.conv_out(_norm_and_silu(self.conv_norm_out, x, rows), rows)


def make_layer(spec: LayerSpec, config: AutoencoderKLConfig, *, rngs: nnx.Rngs) -> PictureLayer:
    """The layer of a chain's entry, newly initialised."""
    groups, dtype = config.norm_num_groups, config.compute_dtype
    match spec.kind:
        case LayerKind.CONV_1:
            return Conv(spec, edge=1, past=(0, 0), dtype=dtype, rngs=rngs)
        case LayerKind.CONV_3:
            return Conv(spec, dtype=dtype, rngs=rngs)
        case LayerKind.RESNET:
            return Resnet(spec, groups, dtype=dtype, rngs=rngs)
        case LayerKind.ATTENTION:
            return Attention(spec, groups, dtype=dtype, rngs=rngs)
        case LayerKind.DOWN:
            return Downsampler(spec, dtype=dtype, rngs=rngs)
        case LayerKind.UP:
            return Upsampler(spec, dtype=dtype, rngs=rngs)
        case LayerKind.HEAD:
            return Head(spec, groups, dtype=dtype, rngs=rngs)
