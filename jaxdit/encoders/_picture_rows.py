"""Pictures whose rows are divided among devices: what layers need of rows that are elsewhere.

Device i of P has rows i n .. (i + 1) n - 1 of the picture, n = ceil(height / P); rows past the height, on the last
devices, are padding: zeros where a convolution reads them, as past any edge, and nothing to statistics and attention.
A layer that doubles or halves the picture keeps this division, counted in rows that are half or twice as high.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

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
        height: rows of the whole picture at its coarsest, in latent pixels.
    """

    axis_names: tuple[str, ...] = ()
    height: int = 0

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
        if not self.axis_names or self.height % self.num_devices == 0:
            return None
        first = lax.axis_index(self.axis_names) * rows
        return first + jnp.arange(rows) < self.height * (rows // self.rows_loc)

    def extended(
        self, x: Float[Array, "b h_loc w c"], *, above: int, below: int
    ) -> Float[Array, "b h_ext w c"]:
        """The rows with so many of the picture above and below them, zeros past its edges.

        Communication: above + below rows to neighbours, by a permute each way.
        """
        if not (above or below):
            return x
        real = self.is_real(x.shape[1])
        if real is not None:
            x = jnp.where(real[None, :, None, None], x, jnp.zeros((), x.dtype))
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
        batch, rows, _, channels = x.shape
        x = x.astype(jnp.float32)
        grouped = (batch, rows, num_groups, channels // num_groups)
        found = _Moments(jnp.mean(x, axis=2).reshape(grouped), jnp.var(x, axis=2).reshape(grouped)).merged(3)
        real = self.is_real(rows)
        found = found.merged(1, None if real is None else real / jnp.maximum(jnp.sum(real), 1))
        if self.num_devices == 1:
            return found
        everywhere = lax.all_gather(jnp.stack(found), self.axis_names)
        starts = np.arange(self.num_devices) * self.rows_loc
        counts = np.clip(self.height - starts, 0, self.rows_loc)
        return _Moments(everywhere[:, 0], everywhere[:, 1]).merged(0, counts / self.height)

    def attention(
        self, q: Float[Array, "b h_loc w c"], k: Float[Array, "b h_loc w c"], v: Float[Array, "b h_loc w c"]
    ) -> Float[Array, "b h_loc w c"]:
        """Softmax attention of all pixels to all, with one head of all channels; see `parallel.ring_attention`."""
        batch, rows, width, channels = q.shape
        tokens = [x.reshape(batch, rows * width, 1, channels) for x in (q, k, v)]
        real = self.is_real(rows)
        ids = None if real is None else jnp.tile(jnp.repeat(real, width).astype(jnp.int32)[None], (batch, 1))
        out = ring_attention(*tokens, axis_name=self.axis_names, segment_ids=ids)
        assert not isinstance(out, tuple)
        return out.reshape(q.shape)


WHOLE = PictureRows()
"""Pictures that are not divided."""
