"""One 32-bit fingerprint per array, the same however the array is sharded.

What a checkpoint reads back is checked against these: the storage format notices a missing or shortened file,
but not a changed byte in the data.

Word i of an array (its bits as an unsigned integer w_i; a 64-bit element is two words) contributes
w_i * (2 K i + 1) modulo 2^32, K odd. The factor is odd and so invertible: a change of one word changes the
sum. Factors of different i differ, so that swapped words do, too; and it is a sum, so it does not matter who
adds up which part.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

_SPREAD = 0x9E3779B1
_MODULUS = 2**32
_WORD_OF_ITEM_BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """The fingerprint of each global array.

    On CPUs NumPy reads the shards where they lie: one program over hundreds of shapes would compile for
    seconds (6.8 s for 240 arrays of 60 shapes, measured). On other devices one program sums on the devices,
    so that a number per array reaches the host and not the array. With several processes all of them have to
    call this.

    Args:
      arrays: name to array of a bool, integer or floating type of 8 to 64 bits.

    Returns:
      Name to fingerprint, in the order of `arrays`.
    """
    values = list(arrays.values())
    found = _on_host(values) if jax.default_backend() == "cpu" else _on_device(values)
    return dict(zip(arrays, found, strict=True))


def _on_host(values: Sequence[jax.Array]) -> list[int]:
    sums = np.array([_of_local_shards(value) for value in values], np.uint32)
    if jax.process_count() > 1:
        sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
    return [int(value) for value in sums]


def _of_local_shards(value: jax.Array) -> int:
    """The sum over this process's shards; of the copies of a shard on several devices the first counts."""
    total = 0
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            starts = [part.start or 0 for part in shard.index]
            total += _of_block(np.asarray(shard.data), value.shape, starts)
    return total % _MODULUS


def _of_block(block: np.ndarray, shape: Sequence[int], starts: Sequence[int]) -> int:
    """What the block at `starts` of an array of `shape` contributes."""
    # The last axis runs over the words of one element.
    words = np.ascontiguousarray(block).reshape(*block.shape, 1)
    words = words.view(_WORD_OF_ITEM_BYTES[block.dtype.itemsize]).astype(np.uint32)
    index = np.zeros(words.shape, np.uint32)
    stride = 1
    sizes = (*shape, words.shape[-1])
    for axis in reversed(range(words.ndim)):
        start = starts[axis] if axis < len(starts) else 0
        along = (np.arange(start, start + words.shape[axis], dtype=np.uint64) * stride).astype(np.uint32)
        index += along.reshape(-1, *[1] * (words.ndim - 1 - axis))
        stride = stride * sizes[axis] % _MODULUS
    factors = index * np.uint32(2 * _SPREAD % _MODULUS) + np.uint32(1)
    return int((words * factors).sum(dtype=np.uint32))


def _on_device(values: Sequence[jax.Array]) -> list[int]:
    # One program takes arrays of one set of devices only.
    groups: dict[frozenset[jax.Device], list[int]] = {}
    for position, value in enumerate(values):
        groups.setdefault(frozenset(value.sharding.device_set), []).append(position)
    found = [0] * len(values)
    for positions in groups.values():
        sums = jax.device_get(_device_sums([values[position] for position in positions]))
        for position, value in zip(positions, sums, strict=True):
            found[position] = int(value)
    return found


@jax.jit
def _device_sums(values: Sequence[jax.Array]) -> list[jax.Array]:
    return [_of_whole(value) for value in values]


def _of_whole(value: jax.Array) -> jax.Array:
    """`_of_block` of the whole array, as a traced computation."""
    if value.dtype == jnp.bool_:
        value = value.astype(jnp.uint8)
    item_bytes = value.dtype.itemsize
    words = jax.lax.bitcast_convert_type(value, _WORD_OF_ITEM_BYTES[item_bytes])
    words = words.reshape(*value.shape, item_bytes // 4 or 1).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index += along * np.uint32(stride)
        stride = stride * words.shape[axis] % _MODULUS
    factors = index * np.uint32(2 * _SPREAD % _MODULUS) + np.uint32(1)
    return jnp.sum(words * factors, dtype=jnp.uint32)
