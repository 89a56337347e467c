"""Rotary position embedding over (t, h, w), as FLUX.1 applies it: pairs of neighbouring channels turn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

__all__ = ["RopeTable", "apply_rope", "rope_table"]


class RopeTable(NamedTuple):
    """Cosine and sine of every row's angles, one per pair of channels, in float32."""

    cos: Float[Array, "n half"]
    sin: Float[Array, "n half"]

    def rows(self, start: int, stop: int) -> "RopeTable":
        """The table of rows [start, stop)."""
        return RopeTable(self.cos[start:stop], self.sin[start:stop])


def _frequencies(axes_dim: tuple[int, ...], theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies of all pairs as a sum high + low, where high has 12 significant bits."""
    omega = np.concatenate([theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim) for dim in axes_dim])
    mantissa, exponent = np.frexp(omega)
    high = np.ldexp(np.round(mantissa * 4096) / 4096, exponent)
    return high.astype(np.float32), (omega - high).astype(np.float32)


def rope_table(positions: Num[Array, "n axes"], *, axes_dim: tuple[int, ...], theta: float) -> RopeTable:
    """Computes the angles of packed rows: pair j of axis a turns by position_a * theta^(-2 j / axes_dim[a]).

    The original computes angles in float64. Here the frequency is split in two float32 parts of which the
    first times an integer position below 4096 is exact, so cosine and sine of the sum are right to about
    2e-7 where a plain float32 product is off by up to 2e-4. Positions carry no gradient.

    Args:
        positions: position of each row on each axis, int32 or float32.
        axes_dim: channels of a head given to each axis, all even.
        theta: base of the frequencies.

    Returns:
        The table, `sum(axes_dim) / 2` angles per row.

    Reference: FLUX.1, `rope`; RoFormer (arXiv 2104.09864), equation 15.
    """
    high, low = _frequencies(axes_dim, theta)
    axis_of_pair = np.repeat(np.arange(len(axes_dim)), [dim // 2 for dim in axes_dim])
    positions = jax.lax.stop_gradient(positions.astype(jnp.float32))[:, axis_of_pair]
    coarse, fine = positions * high[None, :], positions * low[None, :]
    cos_coarse, sin_coarse, cos_fine, sin_fine = (
        jnp.cos(coarse),
        jnp.sin(coarse),
        jnp.cos(fine),
        jnp.sin(fine),
    )
    return RopeTable(
        cos=cos_coarse * cos_fine - sin_coarse * sin_fine, sin=sin_coarse * cos_fine + cos_coarse * sin_fine
    )


def apply_rope(x: Float[Array, "n h d"], table: RopeTable) -> Float[Array, "n h d"]:
    """Turns channels (2j, 2j + 1) of every head of row i by angle j of that row, in float32.

    Args:
        x: rows of queries or keys.
        table: angles of the same rows.

    Returns:
        Turned rows in float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = table.cos[:, None, :], table.sin[:, None, :]
    return jnp.stack([cos * even - sin * odd, sin * even + cos * odd], axis=-1).reshape(x.shape)
