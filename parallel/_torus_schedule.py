"""Torus attention inside its custom gradient: what is pulled and pushed between machines, and what hides it.

N machines of R devices. A device starts with its part of the sequence, all heads; machine t shall compute the t-th of N
parts of the heads, and in it keys rotate among the R devices. With o_k = (t + k) mod N, everything of a machine's own
(k = 0) stays, the rest moves once:

    Pull Q,  k = 0 .. N-1   queries of o_{k+1} arrive (at last the keys of o_1)   | queries of o_k to own keys
    Pull KV, k = 1 .. N-1   keys of o_{k+1} arrive                                | all queries to the keys of o_k,
                                                                                  | at the last k all but its own
    Push O                  outputs go to the machines they are of                | own queries to the keys of o_{N-1}

A device trades with those of the same place on other machines only. One transfer between machines is in flight at a
time, since that is what a GPU's scheduler hides: a pull is one permute, the push is one exchange. Ulysses inside a
machine is around all this: its exchange works on another axis than pulls and pushes, so it can be done for all parts
before the first pull, and after the last push, instead of for each part when it arrives.

For the gradient queries and keys are kept as they were pulled:

    Pull dO, k = 0          cotangents of o_1 arrive                              | own queries and the keys of others
             k = 1 .. N-2   cotangents of o_{k+1} arrive, dQ of o_{k-1} leave     | queries of o_k and all keys
    Push dKV, k = N-1       dQ of o_{k-1}, then dKV of o_1, o_2, .. leave         | queries of o_k and keys of o_1, ..,
                                                                                  | o_{N-1}, then own
    Push dQ                 dQ of o_{N-1} leave                                   | own queries and own keys

One machine of R devices is ring attention: it is computed here too.

Reference: shared/ALGORITHMS.md section 2, after SwiftFusion, where each pulled part goes through the exchange of its
machine on arrival.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._block_attention import BlockAttention, once_differentiable
from parallel._online_softmax import Partial, merge, merge_over_axis
from parallel._ring_loop import Attended, Gradients, Keys, Queries, Ring, ring_backward, ring_forward
from parallel._routes import AxisName


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


class _Pulled(NamedTuple):
    """A device's parts by the machine that they are of, its own first, and the text's."""

    queries: tuple[Queries, ...]
    keys: tuple[Keys, ...]
    text: Queries | None
    text_keys: Keys | None


class _Saved(NamedTuple):
    """For the gradient: what was pulled, and (out, lse) of each part of the queries and of the text."""

    pulled: _Pulled
    results: tuple[Partial, ...]
    text: Partial | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_torus(torus: Torus, rows: Rows, ids: Ids) -> Outputs:
    """Attention of all queries to all keys and the text, by the schedule above; outputs in the queries' dtype.

    Per device. The gradient of the text's rows is this device's share; that of its output is the sum over the ring.
    """
    return _forward(torus, rows, ids)[0]


def _fwd(torus: Torus, rows: Rows, ids: Ids):
    return _forward(torus, rows, ids)


def _bwd(torus: Torus, saved: _Saved, cotangent: Outputs):
    return once_differentiable(partial(_backward, torus))(saved, cotangent), None


attend_torus.defvjp(_fwd, _bwd)


def _forward(torus: Torus, rows: Rows, ids: Ids) -> tuple[Outputs, _Saved]:
    machines = torus.machines
    dtype = rows.q.dtype
    text, text_keys = _text_rows(torus, rows, ids)
    of_part = _part_ids(torus, rows, ids)
    queries, keys = [of_part.queries(0, _pull(torus, rows.q, 0))], [of_part.keys(0, _pull(torus, rows.kv, 0))]
    source = rows.q, rows.kv
    sums = []
    for k in range(machines):  # Pull Q
        source, arrived = lax.optimization_barrier((source, queries[k].q))
        queries[k] = queries[k]._replace(q=arrived)
        q_next, kv_next = None, None
        if k + 1 < machines:
            q_next = _pull(torus, source[0], k + 1)
        elif machines > 1:
            kv_next = _pull(torus, source[1], 1)
        start = None if text_keys is None else torus.one.attend(queries[k], text_keys)
        total = ring_forward(torus.ring, queries[k], keys[0], start)
        total, q_next, kv_next = lax.optimization_barrier((total, q_next, kv_next))
        sums.append(total)
        if q_next is not None:
            queries.append(of_part.queries(k + 1, q_next))
        if kv_next is not None:
            keys.append(of_part.keys(1, kv_next))
    for k in range(1, machines):  # Pull KV
        last = k == machines - 1
        source, arrived = lax.optimization_barrier((source, keys[k].kv))
        keys[k] = keys[k]._replace(kv=arrived)
        kv_next = None if last else _pull(torus, source[1], k + 1)
        some = slice(1, None) if last else slice(None)
        total = ring_forward(torus.ring, _joined(queries[some]), keys[k], _joined_sums(sums[some]))
        total, kv_next = lax.optimization_barrier((total, kv_next))
        sums[some] = _parted(total, len(sums[some]))
        if kv_next is not None:
            keys.append(of_part.keys(k + 1, kv_next))
    pushed: list[Array] = []
    if machines > 1:  # Push O
        sums[1:], own = lax.optimization_barrier((sums[1:], queries[0].q))
        pushed = _push_all(torus, [total.out.astype(dtype) for total in sums[1:]])
        sums[0] = ring_forward(torus.ring, queries[0]._replace(q=own), keys[-1], sums[0])
    out = _assembled(torus, [sums[0].out.astype(dtype), *pushed])
    pulled = _Pulled(tuple(queries), tuple(keys), text, text_keys)
    of_text = _text_forward(torus, pulled)
    results = tuple(Partial(total.out.astype(dtype), total.lse) for total in sums)
    text_out = None if of_text is None else of_text.out
    return Outputs(out, text_out), _Saved(pulled, results, of_text)


def _backward(torus: Torus, saved: _Saved, cotangent: Outputs) -> Rows:
    pulled, results, _ = saved
    machines = torus.machines
    state = _Gradients.begin(torus, saved, cotangent)
    source, arrived = cotangent.out, _pull(torus, cotangent.out, 0)
    attended = []
    dq_pushed, dkv_pushed = [], []
    for k in range(machines):
        source, arrived = lax.optimization_barrier((source, arrived))
        following = _pull(torus, source, k + 1) if k + 1 < machines else None
        attended.append(Attended(*results[k], arrived))
        state.add_text_keys(k, attended[k])
        for j in (*range(1, machines), *([0] if k else [])):
            state.add(k, j, attended[k])
            if k == machines - 1 and j:
                # What follows waits, so that these gradients leave beside it.
                state.dkv[j], d_out = lax.optimization_barrier((state.dkv[j], attended[k].d_out))
                attended[k] = attended[k]._replace(d_out=d_out)
                dkv_pushed.append(_push(torus, state.dkv[j].astype(pulled.keys[j].kv.dtype), j))
        if k:
            dq_pushed.append(_push(torus, state.dq[k].astype(source.dtype), k))
        own = attended[0].d_out
        arrived, own, state.dq, state.dkv = lax.optimization_barrier((following, own, state.dq, state.dkv))
        attended[0] = attended[0]._replace(d_out=own)
    state.add(0, 0, attended[0])
    dq, dkv = state.dq[0].astype(source.dtype), state.dkv[0].astype(pulled.keys[0].kv.dtype)
    return Rows(
        _assembled(torus, [dq, *dq_pushed]), _assembled(torus, [dkv, *dkv_pushed]), *state.text_gradients()
    )


@dataclass(slots=True)
class _Gradients:
    """Sums of contributions, float32, by part; those of the text are this device's share.

    Attributes:
        dq, dkv: of the parts of queries and keys.
        text: of the text's queries and keys, or None.
    """

    torus: Torus
    pulled: _Pulled
    dq: list[Array]
    dkv: list[Array]
    text: Gradients | None = None

    @classmethod
    def begin(cls, torus: Torus, saved: _Saved, cotangent: Outputs) -> "_Gradients":
        """Zeros, and what the text's queries contribute."""
        pulled = saved.pulled
        dq = [jnp.zeros_like(part.q, dtype=jnp.float32) for part in pulled.queries]
        dkv = [jnp.zeros_like(part.kv, dtype=jnp.float32) for part in pulled.keys]
        state = cls(torus, pulled, dq, dkv)
        if saved.text is not None and cotangent.text is not None:
            d_out = lax.psum(cotangent.text, torus.ring_axis)
            state._add_text(Attended(*saved.text, d_out))
        return state

    def add(self, k: int, j: int, attended: Attended) -> None:
        """Part k of the queries and part j of the keys, of all devices of the ring."""
        here = ring_backward(self.torus.ring, self.pulled.queries[k], attended, self.pulled.keys[j])
        self.dq[k] += here.dq
        self.dkv[j] += here.dkv

    def add_text_keys(self, k: int, attended: Attended) -> None:
        """Part k of the queries and the text's keys."""
        if self.text is not None and self.pulled.text_keys is not None:
            here = self.torus.one.gradients(self.pulled.queries[k], attended, self.pulled.text_keys)
            self.dq[k] += here.dq
            self.text = self.text._replace(dkv=self.text.dkv + here.dkv)

    def _add_text(self, attended: Attended) -> None:
        text, text_keys = self.pulled.text, self.pulled.text_keys
        if text is None or text_keys is None:
            return
        # The text attends to itself on every device of the ring, but only once.
        own = self.torus.one.gradients(text, attended, text_keys)
        first = lax.axis_index(self.torus.ring_axis) == 0
        total = jax.tree.map(lambda x: jnp.where(first, x, 0.0), own)
        for j, keys in enumerate(self.pulled.keys):
            here = self.torus.one.gradients(text, attended, keys)
            total = total._replace(dq=total.dq + here.dq)
            self.dkv[j] += here.dkv
        self.text = total

    def text_gradients(self) -> tuple[Array | None, Array | None]:
        """Of the text's queries and keys, in their dtypes."""
        if self.text is None or self.pulled.text is None or self.pulled.text_keys is None:
            return None, None
        of_queries, of_keys = self.pulled.text.q, self.pulled.text_keys.kv
        return self.text.dq.astype(of_queries.dtype), self.text.dkv.astype(of_keys.dtype)


def _text_forward(torus: Torus, pulled: _Pulled) -> Partial | None:
    """The text attends to what keys each device has, and once to itself; the ring's parts merge."""
    if pulled.text is None or pulled.text_keys is None:
        return None
    first, *others = (torus.one.attend(pulled.text, keys) for keys in pulled.keys)
    for other in others:
        first = merge(first, other)
    if torus.ring.size > 1:
        first = merge_over_axis(first, torus.ring_axis)
    total = merge(first, torus.one.attend(pulled.text, pulled.text_keys))
    return Partial(total.out.astype(pulled.text.q.dtype), total.lse)


def _text_rows(torus: Torus, rows: Rows, ids: Ids) -> tuple[Queries | None, Keys | None]:
    if rows.text_q is None or rows.text_kv is None:
        return None, None
    length = rows.text_q.shape[1]
    places = jnp.arange(-length, 0, dtype=jnp.int32) if torus.causal else None
    return Queries(rows.text_q, ids.text, places), Keys(rows.text_kv, ids.text, places)


class _PartIds(NamedTuple):
    """Ids (N, b, l) of all machines and positions of the own one, from which a part's are taken."""

    torus: Torus
    q_ids: Array | None
    kv_ids: Array | None
    lengths: tuple[int, int]

    def queries(self, k: int, q: Array) -> Queries:
        """Queries of machine o_k."""
        return Queries(q, self._of(self.q_ids, k), self._places(k, self.lengths[0]))

    def keys(self, k: int, kv: Array) -> Keys:
        """Keys of machine o_k."""
        return Keys(kv, self._of(self.kv_ids, k), self._places(k, self.lengths[1]))

    def _machine(self, k: int) -> Array:
        return (lax.axis_index(self.torus.machine_axis) + k) % self.torus.machines

    def _of(self, ids: Array | None, k: int) -> Array | None:
        return None if ids is None else lax.dynamic_index_in_dim(ids, self._machine(k), keepdims=False)

    def _places(self, k: int, length: int) -> Array | None:
        if not self.torus.causal:
            return None
        before = self._machine(k) * self.torus.ring.size + lax.axis_index(self.torus.ring_axis)
        return (before * length + jnp.arange(length)).astype(jnp.int32)


def _part_ids(torus: Torus, rows: Rows, ids: Ids) -> _PartIds:
    def of_machines(x: Array | None) -> Array | None:
        return None if x is None else lax.all_gather(x, torus.machine_axis)

    q_ids, kv_ids = ids.q, ids.kv
    if torus.machines > 1:
        q_ids, kv_ids = of_machines(q_ids), of_machines(kv_ids)
    else:
        q_ids, kv_ids = (None if x is None else x[None] for x in (q_ids, kv_ids))
    return _PartIds(torus, q_ids, kv_ids, (rows.q.shape[1], rows.kv.shape[2]))


def _pull(torus: Torus, x: Array, k: int) -> Array:
    """From machine o_k its part of (..., l, N h, d) for this machine."""
    n = torus.machines
    if n == 1:
        return x
    # Machine s sends to s - k what that one computes.
    heads = x.shape[-2] // n
    target = (lax.axis_index(torus.machine_axis) - k) % n
    x = lax.dynamic_slice_in_dim(x, target * heads, heads, axis=x.ndim - 2)
    return lax.ppermute(x, torus.machine_axis, [(s, (s - k) % n) for s in range(n)]) if k else x


def _push(torus: Torus, x: Array, k: int) -> Array:
    """To machine o_k its rows; what comes here is of the heads of machine t - k."""
    n = torus.machines
    return lax.ppermute(x, torus.machine_axis, [(s, (s + k) % n) for s in range(n)])


def _push_all(torus: Torus, parts: list[Array]) -> list[Array]:
    """`_push` of the parts of k = 1 .. N - 1, in one exchange; nothing goes where the own part would."""
    n = torus.machines
    own = lax.axis_index(torus.machine_axis)
    stacked = jnp.stack([jnp.zeros_like(parts[0]), *parts])
    by_machine = jnp.take(stacked, (jnp.arange(n) - own) % n, axis=0)
    arrived = lax.all_to_all(by_machine, torus.machine_axis, split_axis=0, concat_axis=0, tiled=True)
    return [lax.dynamic_index_in_dim(arrived, (own - k) % n, keepdims=False) for k in range(1, n)]


def _assembled(torus: Torus, parts: list[Array]) -> Array:
    """Heads (..., l, N h, d) from parts by k: part j of the heads is that of k = t - j."""
    n = torus.machines
    if n == 1:
        return parts[0]
    of_head_part = (lax.axis_index(torus.machine_axis) - jnp.arange(n)) % n
    stacked = jnp.take(jnp.stack(parts, axis=-3), of_head_part, axis=-3)
    return stacked.reshape(*parts[0].shape[:-2], n * parts[0].shape[-2], parts[0].shape[-1])


def _joined(queries: list[Queries]) -> Queries:
    """All parts as one block of rows."""
    if len(queries) == 1:
        return queries[0]
    q, ids, positions = zip(*queries, strict=True)
    return Queries(
        jnp.concatenate(q, axis=1),
        None if ids[0] is None else jnp.concatenate(ids, axis=1),
        None if positions[0] is None else jnp.concatenate(positions),
    )


def _joined_sums(sums: list[Partial]) -> Partial:
    return sums[0] if len(sums) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *sums)


def _parted(total: Partial, parts: int) -> list[Partial]:
    return [Partial(*x) for x in zip(*(jnp.split(x, parts, axis=1) for x in total), strict=True)]
