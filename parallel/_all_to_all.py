"""The exchange of heads for sequence: every device of an axis gets the whole sequence of some of the heads.

Any number of heads: with P devices each computes ceil(h / P) of them. Missing heads are zeros and dropped again. Heads
of keys that several devices need are repeated, no more than needed.
"""

import itertools
import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._routes import AxisName


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How heads are dealt out: query heads [i q_loc, (i + 1) q_loc) to device i, and the key heads that they read.

    Attributes:
        heads, kv_heads: of the model; the latter divide the former.
        degree: devices.
    """

    heads: int
    kv_heads: int
    degree: int

    @property
    def q_loc(self) -> int:
        """Query heads of a device."""
        return -(-self.heads // self.degree)

    @property
    def group(self) -> int:
        """Query heads that share a key head on a device.

        A device's heads are cut in runs of w, w dividing their number. All runs start at multiples of w, so each lies
        in one group of g = heads / kv_heads if w divides g: the most is gcd(q_loc, g).
        """
        return math.gcd(self.q_loc, self.heads // self.kv_heads)

    @property
    def kv_loc(self) -> int:
        """Key heads of a device."""
        return self.q_loc // self.group

    def spread_queries(self, x: Array) -> Array:
        """(..., l, heads, d) to (..., l, degree q_loc, d): devices' heads one after another."""
        return _filled(x, self.degree * self.q_loc)

    def spread_keys(self, x: Array) -> Array:
        """(..., l, kv_heads, d) to (..., l, degree kv_loc, d): what each device reads, one after another."""
        per_kv_head = self.heads // self.kv_heads
        slots = [m * self.group // per_kv_head for m in range(self.degree * self.kv_loc)]
        copies = [slots.count(head) for head in range(self.kv_heads)]
        return _filled(_repeated(x, copies), len(slots))

    def cut(self, parts: int) -> list[tuple[slice, slice]]:
        """A device's query and key heads in parts that can be computed one after another."""
        edges = [i * self.kv_loc // parts for i in range(parts + 1)]
        return [(slice(a * self.group, b * self.group), slice(a, b)) for a, b in itertools.pairwise(edges)]


def _filled(x: Array, heads: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[-2] = (0, heads - x.shape[-2])
    return jnp.pad(x, widths) if widths[-2][1] else x


def _repeated(x: Array, copies: list[int]) -> Array:
    """Each head some times. Made of slices and broadcasts, whose gradient is sums: a gather's would be a scatter."""
    if set(copies) == {1}:
        return x
    *front, _, dim = x.shape
    if len(set(copies)) == 1:
        wide = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], copies[0], dim))
        return wide.reshape(*front, -1, dim)
    heads = [
        jnp.broadcast_to(x[..., i : i + 1, :], (*front, times, dim))
        for i, times in enumerate(copies)
        if times
    ]
    return jnp.concatenate(heads, axis=-2)


def to_heads(x: Array, axis_name: AxisName) -> Array:
    """(..., l_loc, P h_loc, d) to (..., P l_loc, h_loc, d): the sequence in the order of the axis.

    Communication per device: (P - 1) / P of x leave, as much arrives.
    """
    if lax.axis_size(axis_name) == 1:
        return x
    return lax.all_to_all(x, axis_name, split_axis=x.ndim - 2, concat_axis=x.ndim - 3, tiled=True)


def to_sequence(x: Array, axis_name: AxisName) -> Array:
    """Back."""
    if lax.axis_size(axis_name) == 1:
        return x
    return lax.all_to_all(x, axis_name, split_axis=x.ndim - 3, concat_axis=x.ndim - 2, tiled=True)


def rows_to_heads(q: Array, kv: Array, axis_name: AxisName) -> tuple[Array, Array]:
    """`to_heads` of q (b, l_q, P h_loc, d) and kv (2, b, l_k, P kv_loc, d): in one exchange if lengths are equal."""
    size = lax.axis_size(axis_name)
    if size == 1 or q.shape[1] != kv.shape[2] or q.dtype != kv.dtype:
        return to_heads(q, axis_name), to_heads(kv, axis_name)
    b, length, _, dim = q.shape
    parts = [x.reshape(b, length, size, -1, dim) for x in (q, *kv)]
    heads = [part.shape[3] for part in parts]
    moved = to_heads(jnp.concatenate(parts, axis=3).reshape(b, length, -1, dim), axis_name)
    q, k, v = jnp.split(moved, [heads[0], heads[0] + heads[1]], axis=2)
    return q, jnp.stack([k, v])


def own_heads(x: Array, axis_name: AxisName) -> Array:
    """(..., P h_loc, d), the same on all devices, to the device's own (..., h_loc, d)."""
    heads = x.shape[-2] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * heads, heads, axis=x.ndim - 2)


def all_heads(x: Array, axis_name: AxisName) -> Array:
    """(..., h_loc, d) of every device to (..., P h_loc, d), the same on all."""
    if lax.axis_size(axis_name) == 1:
        return x
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)


def all_rows(ids: Array | None, axis_name: AxisName) -> Array | None:
    """Segment ids (b, l_loc) of every device as (b, P l_loc)."""
    if ids is None or lax.axis_size(axis_name) == 1:
        return ids
    return lax.all_gather(ids, axis_name, axis=1, tiled=True)
