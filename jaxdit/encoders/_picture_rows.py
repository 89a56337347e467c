"""Pictures whose rows are divided among devices: what layers need of rows that are elsewhere.

Device i of P has rows i n .. (i + 1) n - 1 of the picture, n = ceil(height / P); rows past the height, on the last
devices, are padding: zeros where a convolution reads them, as past any edge, and nothing to statistics and attention.
A layer that doubles or halves the picture keeps this division, counted in rows that are half or twice as high.

A picture may also be smaller than the array it is in, by a size that is data: what is past it is padding in the same
way, so that one program serves all sizes up to its own.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from parallel import ring_attention

__all__ = ["WHOLE", "PictureRows"]


class _Moments(NamedTuple):
    """Mean and variance of parts of a picture; parts along an axis merge without loss of digits."""

    mean: Array
    variance: Array

    def merged(self, axis: int, weights: Array | np.ndarray | None = None) -> "_Moments":
        """Of all parts along an axis, these being shares of the whole: equal ones, or weights (n,) that add up to 1."""
        mean = _average(self.mean, axis, weights)
        between = jnp.square(self.mean - jnp.expand_dims(mean, axis))
        return _Moments(mean, _average(self.variance + between, axis, weights))


def _average(x: Array, axis: int, weights: Array | np.ndarray | None) -> Array:
    if weights is None:
        return jnp.mean(x, axis=axis)
    shape = [1] * x.ndim
    shape[axis] = -1
    return jnp.sum(x * weights.astype(np.float32).reshape(shape), axis=axis)


@dataclass(frozen=True, slots=True)
class PictureRows:
    """How the rows of pictures (b, h, w, c) are divided; by default not at all.

    Per device: with axes, methods are called inside `shard_map` over them.

    Attributes:
        axis_names: mesh axes whose devices share a picture, the outermost first.
        height: rows of the whole array at its coarsest, in latent pixels.
        size: (2,) rows and columns of the picture in the array's upper left corner, in latent pixels; int32, may be
            traced, the same on every device. None where the picture fills the array.
    """

    axis_names: tuple[str, ...] = ()
    height: int = 0
    size: Any = None

    @property
    def num_devices(self) -> int:
        """Devices that share a picture."""
        return math.prod(lax.axis_size(name) for name in self.axis_names)

    @property
    def rows_loc(self) -> int:
        """Latent rows of a device, with padding."""
        return -(-self.height // self.num_devices)

    def is_real(self, rows: int) -> Bool[Array, " h_loc"] | None:
        """Which of a device's rows, now so many, are the picture's; None if all are, on every device."""
        if self.size is None and self.height % self.num_devices == 0:
            return None
        first = lax.axis_index(self.axis_names) * rows
        height = self.height if self.size is None else self.size[0]
        return first + jnp.arange(rows) < height * (rows // self.rows_loc)

    def is_real_column(self, rows: int, width: int) -> Bool[Array, " w"] | None:
        """Which of so many columns, where a device has so many rows, are the picture's; None if all are."""
        if self.size is None:
            return None
        return jnp.arange(width) < self.size[1] * (rows // self.rows_loc)

    def _real_pixels(self, rows: int, width: int) -> Bool[Array, "h_or_1 w_or_1"] | None:
        """Both of these; an axis of size 1 stands for all."""
        by_row, by_column = self.is_real(rows), self.is_real_column(rows, width)
        if by_column is None:
            return None if by_row is None else by_row[:, None]
        return by_column[None] if by_row is None else by_row[:, None] & by_column[None]

    def extended(
        self, x: Float[Array, "b h_loc w c"], *, above: int, below: int
    ) -> Float[Array, "b h_ext w c"]:
        """The rows with so many of the picture above and below them, zeros past its edges.

        Communication: above + below rows to neighbours, by a permute each way.
        """
        if not (above or below):
            return x
        real = self._real_pixels(x.shape[1], x.shape[2])
        if real is not None:
            x = jnp.where(real[None, :, :, None], x, jnp.zeros((), x.dtype))
        if self.num_devices == 1:
            return jnp.pad(x, ((0, 0), (above, below), (0, 0), (0, 0)))
        # A permute gives zeros to the device that nobody sends to.
        down = [(i, i + 1) for i in range(self.num_devices - 1)]
        up = [(i + 1, i) for i in range(self.num_devices - 1)]
        parts = [lax.ppermute(x[:, -above:], self.axis_names, down)] if above else []
        parts.append(x)
        parts += [lax.ppermute(x[:, :below], self.axis_names, up)] if below else []
        return jnp.concatenate(parts, axis=1)

    def moments(self, x: Float[Array, "b h_loc w c"], num_groups: int) -> _Moments:
        """Float32 mean and variance (b, g) of each group of channels over the whole picture.

        Variances are taken about their own means, part by part: along a row, over a group's channels, over rows, over
        devices. No sum is so long, and no difference so small, that float32 would lose digits.

        Communication: 2 b g float32 of each device to all.
        """
        batch, rows, width, channels = x.shape
        x = x.astype(jnp.float32)
        grouped = (batch, rows, num_groups, channels // num_groups)
        column = self.is_real_column(rows, width)
        among = None if column is None else column[None, None, :, None]
        mean, variance = jnp.mean(x, axis=2, where=among), jnp.var(x, axis=2, where=among)
        found = _Moments(mean.reshape(grouped), variance.reshape(grouped)).merged(3)
        real = self.is_real(rows)
        found = found.merged(1, None if real is None else real / jnp.maximum(jnp.sum(real), 1))
        if self.num_devices == 1:
            return found
        everywhere = lax.all_gather(jnp.stack(found), self.axis_names)
        starts = np.arange(self.num_devices) * self.rows_loc
        height = self.height if self.size is None else self.size[0]
        counts = jnp.clip(height - starts, 0, self.rows_loc)
        return _Moments(everywhere[:, 0], everywhere[:, 1]).merged(0, counts / height)

    def attention(
        self, q: Float[Array, "b h_loc w c"], k: Float[Array, "b h_loc w c"], v: Float[Array, "b h_loc w c"]
    ) -> Float[Array, "b h_loc w c"]:
        """Softmax attention of all pixels to all, with one head of all channels; see `parallel.ring_attention`."""
        batch, rows, width, channels = q.shape
        tokens = [x.reshape(batch, rows * width, 1, channels) for x in (q, k, v)]
        real = self._real_pixels(rows, width)
        ids = None
        if real is not None:
            pixels = jnp.broadcast_to(real, (rows, width)).reshape(1, -1)
            ids = jnp.tile(pixels.astype(jnp.int32), (batch, 1))
        out = ring_attention(*tokens, axis_name=self.axis_names, segment_ids=ids)
        assert not isinstance(out, tuple)
        return out.reshape(q.shape)


WHOLE = PictureRows()
"""Pictures that are not divided."""
