"""Rotary position embedding over (t, h, w), as FLUX.1 applies it: pairs of neighbouring channels turn."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from ._angles import cos_sin

__all__ = ["RopeTable", "apply_rope", "rope_table"]


class RopeTable(NamedTuple):
    """Cosine and sine of every row's angles, one per pair of channels, in float32."""

    cos: Float[Array, "n half"]
    sin: Float[Array, "n half"]

    def rows(self, start: int, stop: int) -> "RopeTable":
        """The table of rows [start, stop)."""
        return RopeTable(self.cos[start:stop], self.sin[start:stop])


def rope_table(positions: Num[Array, "n axes"], *, axes_dim: tuple[int, ...], theta: float) -> RopeTable:
    """Computes the angles of packed rows: pair j of axis a turns by position_a * theta^(-2 j / axes_dim[a]).

    Args:
        positions: position of each row on each axis, int32 or float32.
        axes_dim: channels of a head given to each axis, all even.
        theta: base of the frequencies.

    Returns:
        The table, `sum(axes_dim) / 2` angles per row.

    Reference: FLUX.1; RoFormer (arXiv 2104.09864), equation 15.
    """
    omega = np.concatenate([theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim) for dim in axes_dim])
    axis_of_pair = np.repeat(np.arange(len(axes_dim)), [dim // 2 for dim in axes_dim])
    return RopeTable(*cos_sin(positions[:, axis_of_pair], omega))


def apply_rope(x: Float[Array, "n h d"], table: RopeTable) -> Float[Array, "n h d"]:
    """Turns channels (2j, 2j + 1) of every head of row i by angle j of that row, in float32.

    Args:
        x: rows of queries or keys.
        table: angles of the same rows.

    Returns:
        Turned rows in float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = table.cos[:, None, :], table.sin[:, None, :]
    return jnp.stack([cos * even - sin * odd, sin * even + cos * odd], axis=-1).reshape(x.shape)
