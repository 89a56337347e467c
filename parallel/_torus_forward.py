"""Torus attention: pull queries, pull keys, push outputs. The schedule is in `_torus_schedule`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._online_softmax import Partial, merge, merge_over_axis
from parallel._ring_loop import Keys, Queries, ring_forward
from parallel._torus_parts import (
    Ids,
    Outputs,
    PartIds,
    Pulled,
    Rows,
    Saved,
    Torus,
    assembled,
    joined,
    part_ids,
    pull,
    push_all,
)


def torus_forward(torus: Torus, rows: Rows, ids: Ids) -> tuple[Outputs, Saved]:
    """Outputs, and what the gradient needs."""
    dtype = rows.q.dtype
    text, text_keys = _text_rows(torus, rows, ids)
    state = _Sums.begin(torus, rows, ids)
    for k in range(torus.machines):
        state.pull_queries(k, text_keys)
    for k in range(1, torus.machines):
        state.pull_keys(k)
    pulled = Pulled(tuple(state.queries), tuple(state.keys), text, text_keys)
    # One transfer at a time is hidden: the text's sums over the ring end before outputs leave.
    of_text = _text_forward(torus, pulled)
    state.sums, of_text = lax.optimization_barrier((state.sums, of_text))
    pushed = state.push_outputs(dtype)
    out = assembled(torus, [state.sums[0].out.astype(dtype), *pushed])
    results = tuple(Partial(total.out.astype(dtype), total.lse) for total in state.sums)
    return Outputs(out, None if of_text is None else of_text.out), Saved(pulled, results, of_text)


@dataclass(slots=True)
class _Sums:
    """The schedule's state: what has arrived, and a sum for each part of the queries.

    Barriers give the order: the next transfer leaves when the part at hand is here, and the part after it is used when
    the attention at hand is done. Left alone the compiler has everything arrive, and then attends.

    Attributes:
        source: own queries and keys, of which parts leave.
        queries, keys, sums: parts by k, as far as they are here.
    """

    torus: Torus
    of_part: PartIds
    source: tuple[Array, Array]
    queries: list[Queries]
    keys: list[Keys]
    sums: list[Partial]

    @classmethod
    def begin(cls, torus: Torus, rows: Rows, ids: Ids) -> "_Sums":
        """With own parts."""
        of_part = part_ids(torus, rows, ids)
        queries = [of_part.queries(0, pull(torus, rows.q, 0))]
        keys = [of_part.keys(0, pull(torus, rows.kv, 0))]
        return cls(torus, of_part, (rows.q, rows.kv), queries, keys, [])

    def pull_queries(self, k: int, text_keys: Keys | None) -> None:
        """Queries of o_k to own keys, and to the text's."""
        self.source, arrived = lax.optimization_barrier((self.source, self.queries[k].q))
        self.queries[k] = self.queries[k]._replace(q=arrived)
        last = k + 1 == self.torus.machines
        following = None if last else pull(self.torus, self.source[0], k + 1)
        following_keys = self._keys_of(1) if last else None
        start = None
        if text_keys is not None:
            start = self.torus.one.attend(self.queries[k], text_keys, at_same=False)
        total = ring_forward(self.torus.ring, self.queries[k], self.keys[0], start, at_same=k == 0)
        total, following, following_keys = lax.optimization_barrier((total, following, following_keys))
        self.sums.append(total)
        if following is not None:
            self.queries.append(self.of_part.queries(k + 1, following))
        if following_keys is not None:
            self.keys.append(self.of_part.keys(1, following_keys))

    def pull_keys(self, k: int) -> None:
        """All queries to the keys of o_k; at the last k all but own ones."""
        self.source, arrived = lax.optimization_barrier((self.source, self.keys[k].kv))
        self.keys[k] = self.keys[k]._replace(kv=arrived)
        following = self._keys_of(k + 1)
        some = slice(1 if following is None else 0, None)
        queries, sums = self.queries[some], self.sums[some]
        total = ring_forward(self.torus.ring, joined(queries), self.keys[k], _joined_sums(sums))
        self.sums[some], following = lax.optimization_barrier((_parted(total, len(sums)), following))
        if following is not None:
            self.keys.append(self.of_part.keys(k + 1, following))

    def push_outputs(self, dtype: jnp.dtype) -> list[Array]:
        """Outputs to where they belong, while own queries attend to the last keys."""
        if self.torus.machines == 1:
            return []
        self.sums[1:], own = lax.optimization_barrier((self.sums[1:], self.queries[0].q))
        pushed = push_all(self.torus, [total.out.astype(dtype) for total in self.sums[1:]])
        queries = self.queries[0]._replace(q=own)
        self.sums[0] = ring_forward(self.torus.ring, queries, self.keys[-1], self.sums[0], at_same=False)
        return pushed

    def _keys_of(self, k: int) -> Array | None:
        """Keys of o_k, if there is such a machine."""
        return pull(self.torus, self.source[1], k) if k < self.torus.machines else None


def _text_forward(torus: Torus, pulled: Pulled) -> Partial | None:
    """The text attends to what keys each device has, and once to itself; the ring's parts merge."""
    if pulled.text is None or pulled.text_keys is None:
        return None
    first, *others = (torus.one.attend(pulled.text, keys, at_same=False) for keys in pulled.keys)
    for other in others:
        first = merge(first, other)
    if torus.ring.size > 1:
        first = merge_over_axis(first, torus.ring_axis)
    total = merge(first, torus.one.attend(pulled.text, pulled.text_keys, at_same=True))
    return Partial(total.out.astype(pulled.text.q.dtype), total.lse)


def _text_rows(torus: Torus, rows: Rows, ids: Ids) -> tuple[Queries | None, Keys | None]:
    if rows.text_q is None or rows.text_kv is None:
        return None, None
    start = jnp.array([-rows.text_q.shape[1]], jnp.int32) if torus.causal else None
    return Queries(rows.text_q, ids.text, start), Keys(rows.text_kv, ids.text, start)


def _joined_sums(sums: list[Partial]) -> Partial:
    return sums[0] if len(sums) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *sums)


def _parted(total: Partial, parts: int) -> list[Partial]:
    return [Partial(*x) for x in zip(*(jnp.split(x, parts, axis=1) for x in total), strict=True)]
