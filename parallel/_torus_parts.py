"""The parts of rows that machines trade: whose they are, and how they get from one to another."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._block_attention import Attended, BlockAttention
from parallel._online_softmax import Partial
from parallel._ring_loop import Keys, Queries, Ring
from parallel._routes import AxisName
from parallel._varying import varying_like


@dataclass(frozen=True, slots=True)
class Torus:
    """The devices that share a sequence, and what they compute.

    Attributes:
        machine_axis, ring_axis: mesh axes; () for none.
        block: attention of one device's queries to one device's keys.
        scale: factor on the logits.
        causal: the sequence is in the order of (machine, ring), the text before it.
    """

    machine_axis: AxisName
    ring_axis: AxisName
    block: BlockAttention
    scale: float
    causal: bool = False

    @property
    def machines(self) -> int:
        """N."""
        return lax.axis_size(self.machine_axis)

    @property
    def ring(self) -> Ring:
        """Of the devices that rotate keys."""
        return Ring(self.ring_axis, self.block, self.scale)

    @property
    def one(self) -> Ring:
        """The device alone."""
        return Ring((), self.block, self.scale)


class Rows(NamedTuple):
    """What takes part, on one device. The text is that of all devices, in the heads that this one computes.

    Attributes:
        q: (b, l_q, N h, d), heads of the first machine first.
        kv: (2, b, l_k, N h_kv, d).
        text_q, text_kv: (b, t, h, d) and (2, b, t, h_kv, d), or None.
    """

    q: Array
    kv: Array
    text_q: Array | None = None
    text_kv: Array | None = None


class Ids(NamedTuple):
    """Segment ids (b, l) of queries, keys and text; all or none."""

    q: Array | None = None
    kv: Array | None = None
    text: Array | None = None


class Outputs(NamedTuple):
    """Of the rows of `q`, and of the text's queries."""

    out: Array
    text: Array | None


class Pulled(NamedTuple):
    """A device's parts by the machine that they are of, its own first, and the text's."""

    queries: tuple[Queries, ...]
    keys: tuple[Keys, ...]
    text: Queries | None
    text_keys: Keys | None


class Saved(NamedTuple):
    """For the gradient: what was pulled, and (out, lse) of each part of the queries and of the text."""

    pulled: Pulled
    results: tuple[Partial, ...]
    text: Partial | None


class PartIds(NamedTuple):
    """Ids (N, b, l) of all machines, and lengths of a device's queries and keys, from which a part's masks are made."""

    torus: Torus
    q_ids: Array | None
    kv_ids: Array | None
    lengths: tuple[int, int]

    def queries(self, k: int, q: Array) -> Queries:
        """Queries of machine o_k."""
        return Queries(q, self._of(self.q_ids, k), self._places(k, q, self.lengths[0]))

    def keys(self, k: int, kv: Array) -> Keys:
        """Keys of machine o_k."""
        return Keys(kv, self._of(self.kv_ids, k), self._places(k, kv, self.lengths[1]))

    def _machine(self, k: int) -> Array:
        return (lax.axis_index(self.torus.machine_axis) + k) % self.torus.machines

    def _of(self, ids: Array | None, k: int) -> Array | None:
        return None if ids is None else lax.dynamic_index_in_dim(ids, self._machine(k), keepdims=False)

    def _places(self, k: int, rows: Array, length: int) -> Array | None:
        if not self.torus.causal:
            return None
        before = self._machine(k) * self.torus.ring.size + lax.axis_index(self.torus.ring_axis)
        return varying_like((before * length).astype(jnp.int32)[None], rows)


def part_ids(torus: Torus, rows: Rows, ids: Ids) -> PartIds:
    """The ids of all machines, to take those of pulled parts from.

    Communication: an all-gather of the ids over machines, int32.
    """

    def of_machines(x: Array | None) -> Array | None:
        return None if x is None else lax.all_gather(x, torus.machine_axis)

    q_ids, kv_ids = ids.q, ids.kv
    if torus.machines > 1:
        q_ids, kv_ids = of_machines(q_ids), of_machines(kv_ids)
    else:
        q_ids, kv_ids = (None if x is None else x[None] for x in (q_ids, kv_ids))
    return PartIds(torus, q_ids, kv_ids, (rows.q.shape[1], rows.kv.shape[2]))


def pull(torus: Torus, x: Array, k: int) -> Array:
    """From machine o_k its part of (..., l, N h, d) for this machine."""
    n = torus.machines
    if n == 1:
        return x
    # Machine s sends to s - k what that one computes.
    heads = x.shape[-2] // n
    target = (lax.axis_index(torus.machine_axis) - k) % n
    x = lax.dynamic_slice_in_dim(x, target * heads, heads, axis=x.ndim - 2)
    return lax.ppermute(x, torus.machine_axis, [(s, (s - k) % n) for s in range(n)]) if k else x


def push(torus: Torus, x: Array, k: int) -> Array:
    """To machine o_k its rows; what comes here is of the heads of machine t - k."""
    n = torus.machines
    return lax.ppermute(x, torus.machine_axis, [(s, (s + k) % n) for s in range(n)])


def push_all(torus: Torus, parts: list[Array]) -> list[Array]:
    """`push` of the parts of k = 1 .. N - 1, in one exchange; nothing goes where the own part would."""
    n = torus.machines
    own = lax.axis_index(torus.machine_axis)
    stacked = jnp.stack([jnp.zeros_like(parts[0]), *parts])
    by_machine = jnp.take(stacked, (jnp.arange(n) - own) % n, axis=0)
    arrived = lax.all_to_all(by_machine, torus.machine_axis, split_axis=0, concat_axis=0, tiled=True)
    return [lax.dynamic_index_in_dim(arrived, (own - k) % n, keepdims=False) for k in range(1, n)]


def assembled(torus: Torus, parts: list[Array]) -> Array:
    """Heads (..., l, N h, d) from parts by k: part j of the heads is that of k = t - j."""
    n = torus.machines
    if n == 1:
        return parts[0]
    of_head_part = (lax.axis_index(torus.machine_axis) - jnp.arange(n)) % n
    stacked = jnp.take(jnp.stack(parts, axis=-3), of_head_part, axis=-3)
    return stacked.reshape(*parts[0].shape[:-2], n * parts[0].shape[-2], parts[0].shape[-1])


def joined(queries: list[Queries]) -> Queries:
    """All parts as one block of rows."""
    if len(queries) == 1:
        return queries[0]
    q, ids, positions = zip(*queries, strict=True)
    return Queries(
        jnp.concatenate(q, axis=1),
        None if ids[0] is None else jnp.concatenate(ids, axis=1),
        None if positions[0] is None else jnp.concatenate(positions),
    )


def joined_attended(parts: list[Attended]) -> Attended:
    """Results and cotangents of `joined` queries."""
    return (
        parts[0]
        if len(parts) == 1
        else Attended(*(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)))
    )
