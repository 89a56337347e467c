"""Sequences of any length over any number of devices: padded with rows that nothing attends to, and cut again."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from parallel._check import check_array, int32_ids, integer


class PaddedSequence(NamedTuple):
    """Rows whose length all devices of a sequence share evenly.

    Attributes:
        rows: as given, (b, length filled up, ...).
        segment_ids: for the attention, int32, 0 = padding; None if there is no padding and none were given, which
            also one of a pair (query ids, key ids) may be.
    """

    rows: Any
    segment_ids: Int[Array, "b l"] | None


def pad_sequence(rows: Any, *, degree: int, segment_ids: Any = None) -> PaddedSequence:
    """Fill sequences up with zeros to a multiple of the devices that share them; nothing is dropped.

    Global, no communication: call it before the rows are sharded. Of a length that divides nothing changes, and
    attention needs no mask. Where queries have one length and keys another, give attention both ids as a pair.

    Causal attention of rows to themselves needs no ids of mere padding: it is at the end, where no real row sees it.
    Leave them out, `segment_ids=None`, as long as the padding stays finite: beside ids GPUs compute the diagonal blocks
    in plain JAX. Packed rows need theirs.

    Args:
        rows: array or pytree of arrays (b, l, ...), all of one batch and length (tokens, positions, tables of RoPE,
            q, k, v); each is filled up alike.
        degree: devices that share a sequence: the product of the sizes of its axes.
        segment_ids: (b, l) ids of packed rows, signed integers; by default all of one segment.

    Returns:
        Rows and ids of max(ceil(l / degree), 1) * degree rows; `unpad_sequence` undoes it.

    Raises:
        TypeError: if `degree` is no integer, rows are no arrays, or ids no signed integers or of 64 bits.
        ValueError: for a degree under 1, no rows, rows and ids of several lengths, or ids past int32.

    Example:
        >>> padded = pad_sequence(jnp.ones((1, 5, 2)), degree=4)
        >>> padded.rows.shape, padded.segment_ids.tolist()
        ((1, 8, 2), [[1, 1, 1, 1, 1, 0, 0, 0]])
    """
    advice = "Give the devices of a sequence."
    degree = integer("pad_sequence", "degree", degree, least=1, advice=advice)
    leaves = _leaves("pad_sequence", rows)
    if segment_ids is not None:
        segment_ids = int32_ids("pad_sequence", "segment_ids", segment_ids)
        if segment_ids.ndim != 2:
            raise ValueError(
                f"pad_sequence: segment_ids are (batch, length); got {segment_ids.shape}. One id for each row."
            )
        leaves = [*leaves, segment_ids]
    shapes = {x.shape[:2] for x in leaves}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            "pad_sequence: rows and segment_ids are (batch, length, ...) of one batch and length; got"
            f" {sorted(shapes)}. Broadcast what all batch entries share."
        )
    batch, length = next(iter(shapes))
    padding = max(-(-length // degree), 1) * degree - length
    if not padding:
        return PaddedSequence(rows, segment_ids)
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids

    def fill(x: Any) -> Array:
        return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))

    return PaddedSequence(jax.tree.map(fill, rows), fill(ids))


def unpad_sequence(rows: Any, *, length: int) -> Any:
    """The first `length` rows of each array (b, l, ...).

    Raises:
        TypeError: if the length is no integer, or traced, or rows are no arrays.
        ValueError: if an array has fewer, or no length.

    Example:
        >>> unpad_sequence(jnp.ones((1, 8, 2)), length=5).shape
        (1, 5, 2)
    """
    advice = "Give that of the rows before pad_sequence, which programs know when they are traced."
    length = integer("unpad_sequence", "length", length, advice=advice)
    leaves = _leaves("unpad_sequence", rows)
    if any(x.ndim < 2 for x in leaves):
        raise ValueError(
            f"unpad_sequence: rows are (batch, length, ...); got {sorted({x.shape for x in leaves})}."
            " Give what pad_sequence returned."
        )
    shortest = min((x.shape[1] for x in leaves), default=length)
    if not 0 <= length <= shortest:
        raise ValueError(
            f"unpad_sequence: length is at most that of the rows; got length={length}, rows={shortest}. Give the length"
            " before pad_sequence, and whole rows (not a device's own)."
        )
    return jax.tree.map(lambda x: x[:, :length], rows)


def _leaves(caller: str, rows: Any) -> list[Any]:
    leaves = jax.tree.leaves(rows)
    for leaf in leaves:
        check_array(caller, "each leaf of rows", leaf, advice="A list is a pytree: make arrays of lists.")
    return leaves
