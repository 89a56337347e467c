"""A ring of devices: each attends its queries to the keys of all, which pass from device to device.

With R devices, device i holds the keys of device i - s at step s; k and v are one array, so that a step is one permute,
and each step's permute is issued before the attention that hides it.

The gradient sends keys round again, and behind them the gradients of these keys, to which each device adds its part:

    own queries, first half   |  keys leave
    step 1 .. R - 1           |  keys go on; gradients of the keys of the step before go on
    own queries, second half  |  gradients of own keys come home

so nothing waits for the first or the last permute either.

Under a causal mask a device computes no block whose keys all come after its queries, in both directions, and those
whose keys all come before them without a mask, so that fast kernels take them; what moves is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from parallel._block_attention import (
    Attended,
    BlockAttention,
    BlockMask,
    block_backward,
    block_forward,
    diagonal_mask,
)
from parallel._online_softmax import Partial, empty_partial, merge
from parallel._routes import AxisName


class Queries(NamedTuple):
    """Queries on a device, with what masks need to know of their rows.

    Attributes:
        q: one run of rows of the sequence, or several of one length, one after another.
        ids: segment ids.
        positions: under a causal mask, where in the sequence each run starts.
    """

    q: Float[Array, "b l_q h d"]
    ids: Int[Array, "b l_q"] | None = None
    positions: Int[Array, " runs"] | None = None

    def rows(self, rows: slice) -> "Queries":
        """Some of them, wherever in the sequence."""
        return Queries(self.q[:, rows], None if self.ids is None else self.ids[:, rows])

    def run(self, number: Array) -> "Queries":
        """One run of several."""
        assert self.positions is not None
        rows = partial(_run_of, runs=len(self.positions), number=number)
        ids = None if self.ids is None else rows(self.ids)
        return Queries(rows(self.q), ids, lax.dynamic_slice_in_dim(self.positions, number, 1))


def _run_of(x: Array, runs: int, number: Array) -> Array:
    """Rows (b, l, ...) of one of several runs of one length."""
    length = x.shape[1] // runs
    return lax.dynamic_slice_in_dim(x, number * length, length, axis=1)


class Keys(NamedTuple):
    """Keys and values on a device, stacked: one run of rows, with what masks need to know of it, as in `Queries`."""

    kv: Float[Array, "2 b l_k h_kv d"]
    ids: Int[Array, "b l_k"] | None = None
    positions: Int[Array, " 1"] | None = None

    def rows(self, rows: slice) -> "Keys":
        """Some of them, wherever in the sequence."""
        return Keys(self.kv[:, :, rows], None if self.ids is None else self.ids[:, rows])


class Gradients(NamedTuple):
    """Contributions to the gradients of queries and keys, float32."""

    dq: Float[Array, "b l_q h d"]
    dkv: Float[Array, "2 b l_k h_kv d"]


_WHOLE = slice(0, None)


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

    def add(self, total: Partial, queries: Queries, keys: Keys, at_same: bool | None = None) -> Partial:
        """`total` merged with the attention of these queries to these keys.

        Args:
            total: what the queries have attended already.
            queries, keys: to attend.
            at_same: as of `_by_place`, of every run.
        """
        if queries.positions is None or len(queries.positions) == 1:
            return merge(total, self.attend(queries, keys, at_same))

        # A loop: written out, the program would grow with the square of the machines.
        def step(number: Array, total: Partial) -> Partial:
            run, rows = queries.run(number), partial(_run_of, runs=len(positions), number=number)
            merged = merge(Partial(*map(rows, total)), self.attend(run, keys, at_same))
            start = number * run.q.shape[1]
            updated = zip(total, merged, strict=True)
            return Partial(*(lax.dynamic_update_slice_in_dim(x, y, start, axis=1) for x, y in updated))

        positions = queries.positions
        return lax.fori_loop(0, len(positions), step, total)

    def attend(self, queries: Queries, keys: Keys, at_same: bool | None = None) -> Partial:
        """Of a run of queries to these keys, here; not computed if all keys come after it. `at_same` as in `add`."""
        k, v = keys.kv

        def under(mask: Callable[[Queries, Keys], BlockMask]) -> Partial:
            return block_forward(self.block, queries.q, k, v, mask(queries, keys), self.scale)

        def nothing() -> Partial:
            return empty_partial(queries.q)

        partly, wholly = (partial(under, mask) for mask in (_causal_mask, _mask_of_ids))
        return _by_place(queries, keys, at_same, (nothing, partly, wholly))

    def gradients(
        self,
        queries: Queries,
        attended: Attended,
        keys: Keys,
        rows: slice = _WHOLE,
        at_same: bool | None = None,
    ) -> Gradients:
        """What a run of queries, or some rows of it, and these keys contribute to each other's gradients."""
        some, of_some = queries.rows(rows), attended.rows(rows)

        def partly() -> Gradients:
            if _is_square(queries, keys):
                return self._diagonal_gradients(some, of_some, keys, rows.start)
            return self._contribution(some, of_some, keys, _causal_mask(queries, keys).of_queries(rows))

        def nothing() -> Gradients:
            return Gradients(*(jnp.zeros_like(x, dtype=jnp.float32) for x in (some.q, keys.kv)))

        def wholly() -> Gradients:
            return self._contribution(some, of_some, keys, _mask_of_ids(some, keys))

        return _by_place(queries, keys, at_same, (nothing, partly, wholly))

    def _diagonal_gradients(self, queries: Queries, attended: Attended, keys: Keys, start: int) -> Gradients:
        """Of rows from `start` on, where queries and keys of the block are at the same positions.

        No key after them takes part, and none before them needs a mask.
        """
        stop = start + queries.q.shape[1]
        own = keys.rows(slice(start, stop))
        dq, dkv = self._contribution(queries, attended, own, _causal_mask(queries, own))
        parts = [dkv, jnp.zeros_like(keys.kv[:, :, stop:], dtype=jnp.float32)]
        if start:
            before = keys.rows(slice(0, start))
            past = self._contribution(queries, attended, before, _mask_of_ids(queries, before))
            dq, parts = dq + past.dq, [past.dkv, *parts]
        return Gradients(dq, jnp.concatenate(parts, axis=2))

    def _contribution(self, queries: Queries, attended: Attended, keys: Keys, mask: BlockMask) -> Gradients:
        k, v = keys.kv
        dq, dk, dv = block_backward(self.block, queries.q, k, v, attended, mask, self.scale)
        return Gradients(dq.astype(jnp.float32), jnp.stack([dk, dv]).astype(jnp.float32))


def _mask_of_ids(queries: Queries, keys: Keys) -> BlockMask:
    """The mask between queries and keys that all come before them, or that no causal mask is between."""
    return BlockMask(queries.ids, keys.ids)


def _is_square(queries: Queries, keys: Keys) -> bool:
    return queries.q.shape[1] == keys.kv.shape[2]


def _causal_mask(queries: Queries, keys: Keys) -> BlockMask:
    """The mask between a run of queries and keys, of which some come after some of the queries.

    Runs of one length start at multiples of it, be they a device's rows or the text's, which ends at 0: two of them
    that overlap are one and the same, and its place does not matter.
    """
    if _is_square(queries, keys):
        return diagonal_mask(queries.ids, keys.ids, queries.q.shape[1])
    return BlockMask(
        queries.ids,
        keys.ids,
        q_positions=_places(queries.positions, queries.q.shape[1]),
        kv_positions=_places(keys.positions, keys.kv.shape[2]),
    )


def _places(start: Array | None, length: int) -> Array | None:
    return None if start is None else start + jnp.arange(length, dtype=jnp.int32)


_Result = TypeVar("_Result", Partial, Gradients)


def _by_place(
    queries: Queries, keys: Keys, at_same: bool | None, by_order: tuple[Callable[[], _Result], ...]
) -> _Result:
    """A block's result, by whether its queries come before all keys, among them, or after all of them.

    Without positions they attend to all. No collective stands in a branch, for devices take different ones.

    Args:
        queries, keys: of the block.
        at_same: whether they are the same part of the sequence, if that is known when the program is traced: with as
            many keys as queries it decides whether they are among each other, and spares the program branches.
        by_order: (nothing, partly, wholly).
    """
    nothing, partly, wholly = by_order
    if queries.positions is None or keys.positions is None:
        return wholly()
    known = at_same if _is_square(queries, keys) else None
    if known:
        return partly()
    first_q, first_k = lax.squeeze(queries.positions, (0,)), lax.squeeze(keys.positions, (0,))
    last_q, last_k = first_q + queries.q.shape[1] - 1, first_k + keys.kv.shape[2] - 1
    every = last_k <= first_q
    if known is not None:
        return lax.cond(every, wholly, nothing)
    some = first_k <= last_q
    return lax.switch(some.astype(jnp.int32) + every.astype(jnp.int32), (nothing, partly, wholly))


def ring_forward(
    ring: Ring, queries: Queries, keys: Keys, start: Partial | None = None, at_same: bool | None = None
) -> Partial:
    """Attention of each device's queries to the keys of all devices, and to what `start` has attended already.

    Communication per device: R - 1 permutes of k and v.

    Args:
        ring, queries, keys: of this device.
        start: what other keys gave.
        at_same: as of `_by_place`, of a device's own keys; None if that differs by run.
    """
    total = empty_partial(queries.q) if start is None else start
    if ring.size == 1:
        if start is None:
            return ring.attend(queries, keys, at_same)
        return ring.add(start, queries, keys, at_same)

    def step(carry, number):
        total, moving = carry
        total = ring.add(total, queries, _at_step(ring, moving, number), in_loop)
        ahead, _, total = _passed_on(ring, moving, beside=total)
        return (total, ahead), None

    # The loop has the step of own keys, and others.
    in_loop = None if at_same is not False else False
    steps = jnp.arange(ring.size - 1, dtype=jnp.int32)
    (total, moving), _ = lax.scan(step, (total, keys), steps)
    return ring.add(total, queries, _at_step(ring, moving, ring.size - 1), at_same=False)


def ring_backward(
    ring: Ring,
    queries: Queries,
    attended: Attended,
    keys: Keys,
    *,
    at_same: bool | None = None,
    last_is_free: bool = False,
) -> Gradients:
    """Gradients of the device's queries, and of its keys from the queries of all devices.

    Communication per device, in R + 1 permutes (2 if R = 2): the gradients of k and v move R - 1 times, in float32, and
    k and v R times (1); the last, which brings them home, is the price of one loop body for all steps.

    Args:
        ring, queries, attended, keys: of this device.
        at_same: as of `_by_place`, of a device's own keys.
        last_is_free: whether the last block is left to a transfer of the caller, and the last permute ends before it.
    """
    if ring.size == 1:
        return ring.gradients(queries, attended, keys, at_same=at_same)
    half = queries.q.shape[1] // 2
    first, second = slice(0, half), slice(half, None)

    own = ring.gradients(queries, attended, keys, first, at_same) if half else None
    moving, _, own = _passed_on(ring, keys, beside=own)
    others = ring.gradients(queries, attended, _at_step(ring, moving, 1), at_same=False)

    def step(carry, number):
        others, moving = carry
        here = ring.gradients(queries, attended, _at_step(ring, moving, number), at_same=False)
        ahead, (arrived,), here = _passed_on(ring, moving, others.dkv, beside=here)
        return (Gradients(others.dq + here.dq, arrived + here.dkv), ahead), None

    if ring.size > 2:
        ahead, _, others = _passed_on(ring, moving, beside=others)
        steps = jnp.arange(2, ring.size, dtype=jnp.int32)
        (others, _), _ = lax.scan(step, (others, ahead), steps)
    if last_is_free:
        (home,), (queries, attended) = _permuted(ring, [others.dkv], (queries, attended))
        rest = ring.gradients(queries, attended, keys, second, at_same)
    else:
        rest = ring.gradients(queries, attended, keys, second, at_same)
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
