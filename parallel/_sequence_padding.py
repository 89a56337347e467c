"""Sequences of any length over any number of devices: padded with rows that nothing attends to, and cut again."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class PaddedSequence(NamedTuple):
    """Rows whose length all devices of a sequence share evenly.

    Attributes:
        rows: as given, (b, length filled up, ...).
        segment_ids: for the attention, 0 = padding; None if there is no padding and none were given.
    """

    rows: Any
    segment_ids: Int[Array, "b l"] | None


def pad_sequence(rows: Any, *, degree: int, segment_ids: Any = None) -> PaddedSequence:
    """Fill sequences up with zeros to a multiple of the devices that share them; nothing is dropped.

    Global, no communication: call it before the rows are sharded. Of a length that divides nothing changes, and
    attention needs no mask.

    Args:
        rows: array or pytree of arrays (b, l, ...), all of one batch and length (tokens, positions, tables of RoPE,
            q, k, v); each is filled up alike.
        degree: devices that share a sequence: the product of the sizes of its axes.
        segment_ids: (b, l) ids of packed rows, by default all of one segment.

    Returns:
        Rows and ids of max(ceil(l / degree), 1) * degree rows; `unpad_sequence` undoes it.

    Raises:
        TypeError: if `degree` is no integer.
        ValueError: for a degree under 1, no rows, or rows and ids of several lengths.

    Example:
        >>> padded = pad_sequence(jnp.ones((1, 5, 2)), degree=4)
        >>> padded.rows.shape, padded.segment_ids.tolist()
        ((1, 8, 2), [[1, 1, 1, 1, 1, 0, 0, 0]])
    """
    _check_degree(degree)
    shapes = {x.shape[:2] for x in jax.tree.leaves((rows, segment_ids))}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            "pad_sequence: rows and segment_ids are (batch, length, ...) of one batch and length; got"
            f" {sorted(shapes)}. Broadcast what all batch entries share."
        )
    batch, length = next(iter(shapes))
    padding = max(-(-length // degree), 1) * degree - length
    if not padding:
        return PaddedSequence(rows, segment_ids)
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)

    def fill(x: Any) -> Array:
        return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))

    return PaddedSequence(jax.tree.map(fill, rows), fill(ids))


def unpad_sequence(rows: Any, *, length: int) -> Any:
    """The first `length` rows of each array (b, l, ...).

    Raises:
        ValueError: if an array has fewer.

    Example:
        >>> unpad_sequence(jnp.ones((1, 8, 2)), length=5).shape
        (1, 5, 2)
    """
    shortest = min((x.shape[1] for x in jax.tree.leaves(rows)), default=length)
    if not 0 <= length <= shortest:
        raise ValueError(
            f"unpad_sequence: length is at most that of the rows; got length={length}, rows={shortest}. Give the length"
            " before pad_sequence, and whole rows (not a device's own)."
        )
    return jax.tree.map(lambda x: x[:, :length], rows)


def _check_degree(degree: Any) -> None:
    if not isinstance(degree, (int, np.integer)) or isinstance(degree, bool):
        raise TypeError(f"pad_sequence: degree is an integer; got {type(degree).__name__}.")
    if degree < 1:
        raise ValueError(
            f"pad_sequence: degree is at least 1; got degree={degree}. Give the devices of a sequence."
        )
