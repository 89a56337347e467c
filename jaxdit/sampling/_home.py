"""Rows of latents where they stay between evaluations."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class HomeRows(NamedTuple):
    """What the rows of a device's latents are.

    Attributes:
        request: (n,) request of each row plus one, 0 is padding.
        token: (n,) index of the row in its picture.
    """

    request: Int[Array, " n"]
    token: Int[Array, " n"]


def positions(home: HomeRows, grids: Int[Array, "r 3"]) -> Int[Array, "n 3"]:
    """(t, h, w) of rows, counted in tokens; `grids` are the tokens of each request along (t, h, w)."""
    grid = jnp.maximum(grids, 1)[jnp.maximum(home.request - 1, 0)]
    height, width = grid[:, 1], grid[:, 2]
    t, inside = home.token // (height * width), home.token % (height * width)
    return jnp.stack([t, inside // width, inside % width], axis=1).astype(jnp.int32)
