"""Moving rows between two layouts of a mesh axis.

A layout says which rows each device holds. `solver` describes a move between layouts A and B as runs
(`solver.ExchangeTables`); `expand_route` turns them, on the device, into a `Route` of row indices, once a step; and
`exchange` applies it to any array whose leading axis is A's rows:

    A rows --gather--> send buffer --collective--> receive buffer --\\
       \\------------- rows that stay --------------------------------gather--> B rows

Both directions, and the gradients of both, are gathers: the expansion also gives the inverse indices, so nothing is
ever scattered in floating point. Rows that stay never enter the collective. On CUDA and TPU the collective is
`jax.lax.ragged_all_to_all`, which moves only the rows that must move; on other platforms an `all_to_all` padded to the
largest pair. The choice is made when the program is lowered.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

AxisName = Hashable | tuple[Hashable, ...]


class RouteSizes(Protocol):
    """What `expand_route` reads of a capacity (`solver.RouteCapacity` is one): static buffer sizes in rows."""

    @property
    def send(self) -> int: ...
    @property
    def recv(self) -> int: ...
    @property
    def pair(self) -> int: ...
    @property
    def copies(self) -> int: ...


class Tables(Protocol):
    """What `expand_route` reads of tables (`solver.ExchangeTables` is one), for one device: see there."""

    @property
    def send_runs(self) -> Any: ...
    @property
    def recv_runs(self) -> Any: ...
    @property
    def stay_runs(self) -> Any: ...
    @property
    def peers(self) -> Any: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Side:
    """One end of a route: how its rows enter the buffers, and where its rows come from when moved towards it.

    Indices past the end mean "no row" and read as zero.
    """

    to_ragged: Int[Array, " buffer"]  # row in each slot of this end's buffer, peers one after another
    to_padded: Int[Array, " peers_pair"]  # the same, each peer's rows padded to `pair` slots
    from_ragged: Int[Array, "rows copies"]  # position of each row in [rows that stay; buffer], per copy
    from_padded: Int[Array, "rows copies"]
    sizes: Int[Array, " peers"]  # rows that this end sends to each peer
    there: Int[Array, " peers"]  # where they start in the peer's buffer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """Row indices of a move between layouts A and B on one device; made by `expand_route`, used inside `shard_map`.

    `route.reversed` is the move from B to A. A row of A may have several copies in B (keys needed by several parts of
    a divided item); such a route cannot be reversed.
    """

    a: _Side
    b: _Side

    @property
    def copies(self) -> int:
        """The most copies that a row of A has in B."""
        return self.a.from_ragged.shape[1]

    @property
    def reversed(self) -> "Route":
        """The move from B to A.

        Raises:
            ValueError: if rows of A have several copies in B, so that no single row of B is the one to move back.
        """
        if self.copies != 1:
            raise ValueError(
                f"Route.reversed: a route is reversible if each row has one copy; got copies={self.copies}."
                " Move results back with the route of the queries."
            )
        return Route(a=self.b, b=self.a)


def _positions(rows: Int[Array, " runs"], size: int) -> tuple[Int[Array, " size"], Int[Array, " size"]]:
    """The run that each of `size` slots belongs to, and the slot's place in it; past the end, (runs, 0)."""
    stop = jnp.cumsum(rows)
    slot = jnp.arange(size, dtype=jnp.int32)
    run = jnp.searchsorted(stop, slot, side="right", method="scan_unrolled").astype(jnp.int32)
    return run, slot - jnp.append(stop - rows, 0)[run]


def placed_rows(
    fields: Int[Array, "runs 5"], head: Int[Array, " size"], row: Int[Array, " size"], run: Int[Array, " size"]
) -> Int[Array, " size"]:
    """B rows by the placement formula of `solver`: base + (k // per_group) * group + (k % per_group) * stride + row."""
    base, first, per_group, group, stride = fields[run].T
    k = first + head
    per_group = jnp.maximum(per_group, 1)
    return base + (k // per_group) * group + (k % per_group) * stride + row


def run_rows(
    heads: Int[Array, " runs"], length: Int[Array, " runs"], size: int
) -> tuple[Int[Array, " size"], Int[Array, " size"], Int[Array, " size"]]:
    """For each of `size` slots filled by runs of heads x length rows: its run (clipped), head, and row.

    Slots past the end have row -1.
    """
    num_runs = heads.shape[0]
    run, within = _positions(heads * length, size)
    valid = run < num_runs
    run = jnp.minimum(run, num_runs - 1)
    length = jnp.maximum(length, 1)[run]
    return run, jnp.where(valid, within // length, 0), jnp.where(valid, within % length, -1)


def expand_route(
    tables: Tables, sizes: RouteSizes, *, rows_in: int, rows_out: int, num_heads: int = 1
) -> Route:
    """Turn one device's run tables into row indices.

    Per device: call inside `shard_map`, once a step; integers only, no communication.

    Args:
        tables: this device's tables, without a device axis.
        sizes: static buffer sizes that the tables were padded for.
        rows_in: rows of layout A on a device (tokens times `num_heads`).
        rows_out: rows of layout B on a device.
        num_heads: A rows of one token.

    Returns:
        The route.
    """
    send, recv, stay = (jnp.asarray(t) for t in (tables.send_runs, tables.recv_runs, tables.stay_runs))
    sent, received, there, back = jnp.asarray(tables.peers)

    def a_rows(runs, run, head, row):
        return jnp.where(row < 0, rows_in, runs[run, 0] + row * num_heads + head)

    def b_rows(fields, run, head, row):
        return jnp.where(row < 0, rows_out, placed_rows(fields, head, row, run))

    run, head, row = run_rows(send[:, 1], send[:, 2], sizes.send)
    send_rows, send_copy = a_rows(send, run, head, row), send[run, 3]
    run, head, row = run_rows(recv[:, 5], recv[:, 6], sizes.recv)
    recv_rows = b_rows(recv[:, :5], run, head, row)
    # Every B row that stays has one slot, so rows_out slots are enough whatever the plan.
    run, head, row = run_rows(stay[:, 1], stay[:, 2], rows_out)
    stay_a, stay_b, stay_copy = a_rows(stay, run, head, row), b_rows(stay[:, 4:], run, head, row), stay[run, 3]

    a_side = _side(send_rows, sent, there, sizes.pair, rows_in, rows_out, (stay_a, stay_copy, stay_b), send_copy, sizes.copies)
    zeros = jnp.zeros_like
    b_side = _side(recv_rows, received, back, sizes.pair, rows_out, rows_in, (stay_b, zeros(stay_b), stay_a), zeros(recv_rows), 1)
    return Route(a=a_side, b=b_side)


def _side(buffer_rows, peer_rows, there, pair, rows, far_rows, stay, buffer_copy, copies) -> _Side:
    """Indices of one end, from the row in each slot of its buffer and the rows that stay (near, copy, far)."""
    num_peers, size = peer_rows.shape[0], buffer_rows.shape[0]
    start = jnp.cumsum(peer_rows) - peer_rows
    lane = jnp.arange(pair, dtype=jnp.int32)
    slot = jnp.where(lane < peer_rows[:, None], start[:, None] + lane, size)
    to_padded = jnp.append(buffer_rows, rows)[jnp.minimum(slot, size)].reshape(-1)
    peer, within = _positions(peer_rows, size)
    padded_slot = jnp.minimum(peer, num_peers) * pair + within
    none = far_rows + max(size, num_peers * pair)

    def origin(slots):
        near, copy, far = stay
        out = jnp.full((rows, copies), none, jnp.int32)
        out = out.at[near, copy].set(far, mode="drop")
        return out.at[buffer_rows, buffer_copy].set(far_rows + slots, mode="drop")

    return _Side(
        to_ragged=buffer_rows,
        to_padded=to_padded,
        from_ragged=origin(jnp.arange(size, dtype=jnp.int32)),
        from_padded=origin(padded_slot),
        sizes=peer_rows,
        there=there,
    )


def _take(x: Array, index: Int[Array, " n"]) -> Array:
    return x.at[index].get(mode="fill", fill_value=0)


def _padded_move(axis_name: AxisName, near: _Side, far: _Side, x: Array, *, total: bool) -> Array:
    num_peers = near.sizes.shape[0]
    buffer = _take(x, near.to_padded).reshape(num_peers, -1, *x.shape[1:])
    received = lax.all_to_all(buffer, axis_name, split_axis=0, concat_axis=0).reshape(-1, *x.shape[1:])
    return _collect(jnp.concatenate([x, received]), far.from_padded, total=total)


def _ragged_move(axis_name: AxisName, near: _Side, far: _Side, x: Array, *, total: bool) -> Array:
    buffer = _take(x, near.to_ragged)
    received = lax.ragged_all_to_all(
        buffer,
        jnp.zeros((far.to_ragged.shape[0], *x.shape[1:]), x.dtype),
        jnp.cumsum(near.sizes) - near.sizes,
        near.sizes,
        near.there,
        far.sizes,
        axis_name=axis_name,
    )
    return _collect(jnp.concatenate([x, received]), far.from_ragged, total=total)


def _collect(pool: Array, index: Int[Array, "rows copies"], *, total: bool) -> Array:
    if not total:
        return _take(pool, index[:, 0])
    return sum(_take(pool, index[:, c]) for c in range(index.shape[1]))


def _move(axis_name: AxisName, near: _Side, far: _Side, x: Array, *, total: bool) -> Array:
    """Rows of the far layout; `total` adds up the copies of a row instead of taking the first."""
    padded = partial(_padded_move, axis_name, total=total)
    ragged = partial(_ragged_move, axis_name, total=total)
    if near.sizes.shape[0] == 1:
        return _collect(x, far.from_ragged, total=total)
    return lax.platform_dependent(near, far, x, cuda=ragged, rocm=ragged, tpu=ragged, default=padded)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange_rows(axis_name: AxisName, route: Route, x: Array) -> Array:
    return _move(axis_name, route.a, route.b, x, total=False)


def _exchange_fwd(axis_name, route, x):
    return _exchange_rows(axis_name, route, x), route


def _exchange_bwd(axis_name, route, cotangent):
    return None, _move(axis_name, route.b, route.a, cotangent, total=True)


_exchange_rows.defvjp(_exchange_fwd, _exchange_bwd)


def exchange(rows: Any, route: Route, *, axis_name: AxisName) -> Any:
    """Move rows from layout A to layout B of a route.

    Per device: call inside `shard_map` over `axis_name`. Bit-exact; differentiable, the gradient being the reverse move
    (gradients of the copies of a row are added up).

    Communication: one collective per dtype, of the rows that change device (padded to the busiest pair where the
    platform has no ragged collective). Leaves of one dtype share a collective; no dtype is converted.

    Args:
        rows: a pytree of arrays with leading axis A's rows on this device.
        route: the route.
        axis_name: mesh axis, or tuple of axes, over which the route was made.

    Returns:
        The pytree with leading axis B's rows; rows of B that no row of A maps to are zero.

    Raises:
        ValueError: if a leaf's leading axis is not A's row count.
    """
    leaves, tree = jax.tree.flatten(rows)
    rows_in = route.a.from_ragged.shape[0]
    for leaf in leaves:
        if leaf.ndim < 1 or leaf.shape[0] != rows_in:
            raise ValueError(
                f"exchange: every leaf has the route's rows as its leading axis; got shape={leaf.shape}, rows={rows_in}."
                " Expand the route for these rows (expand_route, rows_in)."
            )
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(i)
    out: list[Any] = [None] * len(leaves)
    for members in groups.values():
        flat = [leaves[i].reshape(rows_in, -1) for i in members]
        joined = jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]
        if jnp.issubdtype(joined.dtype, jnp.inexact):
            moved = _exchange_rows(axis_name, route, joined)
        else:  # integers have no cotangent to move back
            moved = _move(axis_name, route.a, route.b, joined, total=False)
        edges = [sum(f.shape[1] for f in flat[:k]) for k in range(1, len(flat))]
        for i, part in zip(members, jnp.split(moved, edges, axis=1), strict=True):
            out[i] = part.reshape(part.shape[0], *leaves[i].shape[1:])
    return jax.tree.unflatten(tree, out)
