"""A ring of devices: each attends its queries to the keys of all, which pass from device to device.

With R devices, device i holds the keys of device i - s at step s; k and v are one array, so that a step is one permute,
and each step's permute is issued before the attention that hides it.

The gradient sends keys round again, and behind them the gradients of these keys, to which each device adds its part:

    own queries, first half   |  keys leave
    step 1 .. R - 1           |  keys go on; gradients of the keys of the step before go on
    own queries, second half  |  gradients of own keys come home

so nothing waits for the first or the last permute either.

Under a causal mask a device computes no block whose keys all come after its queries, in both directions; what moves is
the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from parallel._block_attention import Attended, BlockAttention, BlockMask, block_forward
from parallel._online_softmax import Partial, empty_partial, merge
from parallel._routes import AxisName


class Queries(NamedTuple):
    """Queries on a device, with the ids and positions of their rows where masks need them."""

    q: Float[Array, "b l_q h d"]
    ids: Int[Array, "b l_q"] | None = None
    positions: Int[Array, " l_q"] | None = None

    def rows(self, rows: slice) -> "Queries":
        """Some of them."""
        ids = None if self.ids is None else self.ids[:, rows]
        positions = None if self.positions is None else self.positions[rows]
        return Queries(self.q[:, rows], ids, positions)


class Keys(NamedTuple):
    """Keys and values on a device, stacked, with the ids and positions of their rows where masks need them."""

    kv: Float[Array, "2 b l_k h_kv d"]
    ids: Int[Array, "b l_k"] | None = None
    positions: Int[Array, " l_k"] | None = None


class Gradients(NamedTuple):
    """Contributions to the gradients of queries and keys, float32."""

    dq: Float[Array, "b l_q h d"]
    dkv: Float[Array, "2 b l_k h_kv d"]


@dataclass(frozen=True, slots=True)
class Ring:
    """Who passes keys on, and what each device computes.

    Attributes:
        axis_name: mesh axis or axes of the ring; none for a single device.
        block: attention of one device's queries to one device's keys.
        scale: factor on the logits.
    """

    axis_name: AxisName
    block: BlockAttention
    scale: float

    @property
    def size(self) -> int:
        """Devices."""
        return lax.axis_size(self.axis_name)

    def attend(self, queries: Queries, keys: Keys) -> Partial:
        """Of these queries to these keys, here; nothing is computed if all keys come after all queries."""
        (k, v), mask = keys.kv, mask_of(queries, keys)

        def compute() -> Partial:
            return block_forward(self.block, queries.q, k, v, mask, self.scale)

        return _if_any_attends(mask, compute, lambda: empty_partial(queries.q))

    def gradients(self, queries: Queries, attended: Attended, keys: Keys) -> Gradients:
        """What these queries and these keys contribute to each other's gradients."""
        (k, v), mask = keys.kv, mask_of(queries, keys)

        def compute() -> Gradients:
            dq, dk, dv = self.block.backward(queries.q, k, v, attended, mask, self.scale)
            return Gradients(dq.astype(jnp.float32), jnp.stack([dk, dv]).astype(jnp.float32))

        def nothing() -> Gradients:
            return Gradients(*(jnp.zeros_like(x, dtype=jnp.float32) for x in (queries.q, keys.kv)))

        return _if_any_attends(mask, compute, nothing)


def mask_of(queries: Queries, keys: Keys) -> BlockMask:
    """The mask between queries and keys."""
    return BlockMask(queries.ids, keys.ids, queries.positions, keys.positions)


_Result = TypeVar("_Result", Partial, Gradients)


def _if_any_attends(
    mask: BlockMask, compute: Callable[[], _Result], nothing: Callable[[], _Result]
) -> _Result:
    """A block's result, or `nothing` without computing it where every key comes after every query.

    No collective stands in a branch, for devices take different ones.
    """
    if mask.q_positions is None or mask.kv_positions is None:
        return compute()
    ends = jnp.iinfo(jnp.int32)
    last, first = mask.q_positions.max(initial=ends.min), mask.kv_positions.min(initial=ends.max)
    return lax.cond(last >= first, compute, nothing)


def ring_forward(ring: Ring, queries: Queries, keys: Keys, start: Partial | None = None) -> Partial:
    """Attention of each device's queries to the keys of all devices, and to what `start` has attended already.

    Communication per device: R - 1 permutes of k and v.
    """
    total = empty_partial(queries.q) if start is None else start
    if ring.size == 1:
        here = ring.attend(queries, keys)
        return here if start is None else merge(start, here)

    def step(carry, number):
        total, moving = carry
        total = merge(total, ring.attend(queries, _at_step(ring, moving, number)))
        ahead, _, total = _passed_on(ring, moving, beside=total)
        return (total, ahead), None

    steps = jnp.arange(ring.size - 1, dtype=jnp.int32)
    (total, moving), _ = lax.scan(step, (total, keys), steps)
    return merge(total, ring.attend(queries, _at_step(ring, moving, ring.size - 1)))


def ring_backward(
    ring: Ring, queries: Queries, attended: Attended, keys: Keys, *, last_is_free: bool = False
) -> Gradients:
    """Gradients of the device's queries, and of its keys from the queries of all devices.

    Communication per device, in R + 1 permutes (2 if R = 2): the gradients of k and v move R - 1 times, in float32, and
    k and v R times (1); the last, which brings them home, is the price of one loop body for all steps.

    Args:
        ring, queries, attended, keys: of this device.
        last_is_free: whether the last block is left to a transfer of the caller, and the last permute ends before it.
    """
    if ring.size == 1:
        return ring.gradients(queries, attended, keys)
    half = queries.q.shape[1] // 2
    first, second = slice(0, half), slice(half, None)

    own = ring.gradients(queries.rows(first), attended.rows(first), keys) if half else None
    moving, _, own = _passed_on(ring, keys, beside=own)
    others = ring.gradients(queries, attended, _at_step(ring, moving, 1))

    def step(carry, number):
        others, moving = carry
        here = ring.gradients(queries, attended, _at_step(ring, moving, number))
        ahead, (arrived,), here = _passed_on(ring, moving, others.dkv, beside=here)
        return (Gradients(others.dq + here.dq, arrived + here.dkv), ahead), None

    if ring.size > 2:
        ahead, _, others = _passed_on(ring, moving, beside=others)
        steps = jnp.arange(2, ring.size, dtype=jnp.int32)
        (others, _), _ = lax.scan(step, (others, ahead), steps)
    if last_is_free:
        (home,), (queries, attended) = _permuted(ring, [others.dkv], (queries, attended))
        rest = ring.gradients(queries.rows(second), attended.rows(second), keys)
    else:
        rest = ring.gradients(queries.rows(second), attended.rows(second), keys)
        (home,), rest = _permuted(ring, [others.dkv], rest)
    if own is None:
        return Gradients(others.dq + rest.dq, home + rest.dkv)
    dq = jnp.concatenate([own.dq, rest.dq], axis=1)
    return Gradients(others.dq + dq, home + (own.dkv + rest.dkv))


def _passed_on(ring: Ring, keys: Keys, *gradients: Array, beside: Any) -> tuple[Keys, list[Array], Any]:
    """The previous device's keys, its gradients of the keys of the step before, and `beside`, as in `_permuted`.

    In one permute: a device that may have only one transfer in flight hides that one, and waits for others. Positions
    stay: they are known from the step.
    """
    arrays, structure = jax.tree.flatten((keys.kv, keys.ids, gradients))
    arrays, beside = _permuted(ring, arrays, beside)
    kv, ids, moved = jax.tree.unflatten(structure, arrays)
    return Keys(kv, ids, keys.positions), list(moved), beside


def _permuted(ring: Ring, arrays: list[Array], beside: Any) -> tuple[list[Array], Any]:
    """To the next device, in one array: several kinds of numbers travel as the bits that they are, and stay exact.

    What arrives is used when `beside` is there too: left alone the compiler puts off, or does before, what hides it; a
    loop of one step (R = 2) is none when compiled, and gives no order either.
    """
    pairs = [(i, (i + 1) % ring.size) for i in range(ring.size)]
    if len(arrays) == 1:
        moved = lax.ppermute(arrays[0], ring.axis_name, pairs)
        moved, beside = lax.optimization_barrier((moved, beside))
        return [moved], beside
    bits = jnp.dtype(f"uint{8 * min(x.dtype.itemsize for x in arrays)}")
    parts = [lax.bitcast_convert_type(x, bits) for x in arrays]
    moved = lax.ppermute(jnp.concatenate([x.reshape(-1) for x in parts]), ring.axis_name, pairs)
    moved, beside = lax.optimization_barrier((moved, beside))
    edges = np.cumsum([x.size for x in parts])[:-1].tolist()
    unpacked = [
        lax.bitcast_convert_type(x.reshape(part.shape), of.dtype)
        for x, part, of in zip(jnp.split(moved, edges), parts, arrays, strict=True)
    ]
    return unpacked, beside


def _at_step(ring: Ring, keys: Keys, number: Array | int) -> Keys:
    """Keys with the positions of the device that they are of: a device's follow those of the one before."""
    if keys.positions is None:
        return keys
    index = lax.axis_index(ring.axis_name)
    owner = (index - number) % ring.size
    return keys._replace(positions=keys.positions + (owner - index) * keys.kv.shape[2])
