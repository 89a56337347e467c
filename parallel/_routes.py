"""Routes: which rows a device sends, receives and keeps in a move between two layouts of a mesh axis.

`solver` describes a move as runs (`solver.ExchangeTables`); `expand_route` turns them into a `Route` of row
indices, on the device and once a step. The expansion also gives the inverse indices, so that both directions,
and the gradients of both, are gathers.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

AxisName = Hashable | tuple[Hashable, ...]


@runtime_checkable
class RouteSizes(Protocol):
    """What `expand_route` reads of a capacity (`solver.RouteCapacity` is one): static sizes of a device's buffers, in
    rows, and of its tables, in runs."""

    @property
    def send(self) -> int: ...
    @property
    def recv(self) -> int: ...
    @property
    def rounds(self) -> tuple[int, ...]: ...
    @property
    def send_runs(self) -> int: ...
    @property
    def recv_runs(self) -> int: ...
    @property
    def stay_runs(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def copied(self) -> int: ...


@runtime_checkable
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


# A permute of its own costs about as much as moving this many rows more in an all_to_all: 125 against 130 us for 4 KiB
# a device, and 0.3 ms for 256 KiB, on 8 CPU devices and 2 cores.
_ROWS_OF_A_ROUND = 256
_NOWHERE = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Padding:
    """Static form of the padded exchange: how many rows each round moves, and where its slots lie.

    Attributes:
        num_peers: devices of the exchange.
        rounds: rows of rounds 1 .. num_peers - 1; empty if the program has no padded exchange.
        as_all_to_all: whether all rounds are one `all_to_all`, each as large as the largest.
    """

    num_peers: int
    rounds: tuple[int, ...]
    as_all_to_all: bool

    @classmethod
    def of(cls, num_peers: int, rounds: tuple[int, ...], together: tuple[int, ...]) -> "Padding":
        """The cheaper form where rounds carry `together` rows: these, and those of routes that share the collective."""
        used = [rows for rows in together if rows]
        separate = sum(used) + _ROWS_OF_A_ROUND * (len(used) - 1)
        return cls(num_peers, rounds, len(used) > 1 and separate > num_peers * max(used))

    @property
    def size(self) -> int:
        """Slots of the padded buffer."""
        return self.num_peers * max(self.rounds) if self.as_all_to_all else sum(self.rounds)

    def first_slot(self, round_of_peer: Int[Array, " peers"]) -> Int[Array, " peers"]:
        """Where each peer's rows start in the padded buffer."""
        if self.as_all_to_all:
            return jnp.arange(self.num_peers, dtype=jnp.int32) * max(self.rounds)
        starts = [0]
        for rows in self.rounds:
            starts.append(starts[-1] + rows)
        # Round 0 is the device itself, which sends nothing.
        return jnp.asarray([0, *starts[:-1]], jnp.int32)[round_of_peer]

    def pairs(self, r: int) -> list[tuple[int, int]]:
        """Who sends to whom in round `r`; in round -r they send back."""
        n = self.num_peers
        power_of_two = n & (n - 1) == 0
        return [(s, s ^ abs(r) if power_of_two else (s + r) % n) for s in range(n)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
@no_type_check  # JAX rebuilds pytrees with placeholders for leaves
class Side:
    """One end of a route: how its rows enter the buffers, and where its rows come from when moved towards it.

    Rows come from a pool: those that stay, the buffer, and the sums of rows that have several copies at the other end
    (of which there are few). Indices past the end mean "no row" and read as zero.
    """

    to_ragged: Int[Array, " buffer"]  # row in each slot of this end's buffer, peers one after another
    to_padded: Int[Array, " padded"]  # row in each slot of the padded buffer
    from_ragged: Int[Array, " rows"]  # place of each row in [rows that stay; buffer; sums]
    from_padded: Int[Array, " rows"]
    sums_ragged: Int[Array, "sums copies"]  # places of what is added up, in [rows that stay; buffer]
    sums_padded: Int[Array, "sums copies"]
    sizes: Int[Array, " peers"]  # rows that this end sends to each peer
    there: Int[Array, " peers"]  # where they start in the peer's buffer


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["padding", "is_reversed"])
@dataclass(frozen=True)
@no_type_check  # JAX rebuilds pytrees with placeholders for leaves
class Route:
    """Row indices of a move between layouts A and B on one device; made by `expand_route`, used inside `shard_map`.

    `route.reversed` is the move from B to A. A row of A may have several copies in B (keys needed by several parts of
    a divided item); such a route cannot be reversed.
    """

    a: Side
    b: Side
    padding: Padding
    is_reversed: bool = False

    @property
    def copies(self) -> int:
        """The most copies that a row of A has in B."""
        return self.a.sums_ragged.shape[1]

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
        return Route(a=self.b, b=self.a, padding=self.padding, is_reversed=not self.is_reversed)


def _positions(rows: Int[Array, " runs"], size: int) -> tuple[Int[Array, " size"], Int[Array, " size"]]:
    """The run that each of `size` slots belongs to, and the slot's place in it; past the end, (runs, 0)."""
    stop = jnp.cumsum(rows)
    start = stop - rows
    slot = jnp.arange(size, dtype=jnp.int32)
    # Runs that start at or before a slot, less one: cheaper than a binary search for every slot.
    started = jnp.cumsum(jnp.zeros(size, jnp.int32).at[start].add(1, mode="drop"))
    run = jnp.where(slot < stop[-1], started - 1, rows.shape[0])
    return run, slot - jnp.append(start, 0)[run]


def placed_rows(
    fields: Int[Array, "runs 5"],
    head: Int[Array, " size"],
    row: Int[Array, " size"],
    run: Int[Array, " size"],
) -> Int[Array, " size"]:
    """B rows by the placement formula of `solver`: base + (k // per_group) * group + (k % per_group) * stride + row."""
    base, first, per_group, group, stride = fields[run].T
    whole, rest = _divmod(first + head, jnp.maximum(per_group, 1))
    return base + whole * group + rest * stride + row


def _divmod(a: Int[Array, " n"], b: Int[Array, " n"]) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Of numbers that are not negative: `//` and `%` would round towards minus infinity, at several times the cost."""
    whole = lax.div(a, b)
    return whole, a - whole * b


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
    head, row = _divmod(within, jnp.maximum(length, 1)[run])
    return run, jnp.where(valid, head, 0), jnp.where(valid, row, -1)


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

    Raises:
        ValueError: for tables that still have their device axis, or that were padded for other sizes.

    Example:
        One device, on which two sequences stay where they are; rows past the end are zero:

        >>> import solver
        >>> from parallel import exchange
        >>> plan = solver.balance([2, 1], [0, 0], num_devices=1, bags=None, num_heads=1)
        >>> layout = solver.StepLayout(plan, block=8)
        >>> capacity = solver.capacity_for([solver.step_needs(layout)])
        >>> tables = jax.tree.map(lambda x: x[0], solver.step_tables(layout, capacity))
        >>> capacity.home_image, capacity.image
        (4, 8)
        >>> route = expand_route(tables.image, capacity.image_route, rows_in=4, rows_out=8)
        >>> moved = exchange(jnp.array([3.0, 4.0, 5.0, 9.0]), route, axis_name="data")
        >>> moved.tolist()
        [3.0, 4.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        >>> exchange(moved, route.reversed, axis_name="data").tolist()
        [3.0, 4.0, 5.0, 0.0]
    """
    return expand_beside(tables, sizes, sizes.rounds, rows_in=rows_in, rows_out=rows_out, num_heads=num_heads)


def expand_beside(
    tables: Tables,
    sizes: RouteSizes,
    together: tuple[int, ...],
    *,
    rows_in: int,
    rows_out: int,
    num_heads: int,
) -> Route:
    """`expand_route` for one of several routes that share a collective, which carries `together` rows in each round."""
    _check_tables(tables, sizes)
    send, recv, stay = (jnp.asarray(t) for t in (tables.send_runs, tables.recv_runs, tables.stay_runs))
    sent, received, there, back, round_to, round_from = jnp.asarray(tables.peers)
    padding = Padding.of(sent.shape[0], tuple(sizes.rounds), tuple(together))

    def a_rows(runs, run, head, row):
        return jnp.where(row < 0, rows_in, runs[run, 0] + row * num_heads + head)

    def b_rows(fields, run, head, row):
        return jnp.where(row < 0, rows_out, placed_rows(fields, head, row, run))

    run, head, row = run_rows(send[:, 1], send[:, 2], sizes.send)
    leaving = _Slots(a_rows(send, run, head, row), send[run, 3], sent, padding.first_slot(round_to))
    run, head, row = run_rows(recv[:, 5], recv[:, 6], sizes.recv)
    arriving_rows = b_rows(recv[:, :5], run, head, row)
    arriving = _Slots(arriving_rows, jnp.zeros_like(arriving_rows), received, padding.first_slot(round_from))
    # Every B row that stays has one slot, so rows_out slots are enough whatever the plan.
    run, head, row = run_rows(stay[:, 1], stay[:, 2], rows_out)
    stay_a, stay_b, copy = a_rows(stay, run, head, row), b_rows(stay[:, 4:], run, head, row), stay[run, 3]

    def side(slots: _Slots, stays: Array, far_rows: int, copied: int, there: Array) -> Side:
        """`stays`: places of near rows that stay, per copy, among the far rows."""
        rows, buffer = stays.shape[0], slots.rows.shape[0]
        ragged, padded = (
            stays.at[slots.rows, slots.copy].set(far_rows + slot, mode="drop")
            for slot in (jnp.arange(buffer, dtype=jnp.int32), slots.padded())
        )
        from_ragged, sums_ragged = _summed(ragged, copied, far_rows + buffer)
        from_padded, sums_padded = _summed(padded, copied, far_rows + padding.size)
        return Side(
            to_ragged=slots.rows,
            to_padded=jnp.full(padding.size, rows, jnp.int32).at[slots.padded()].set(slots.rows, mode="drop"),
            from_ragged=from_ragged,
            from_padded=from_padded,
            sums_ragged=sums_ragged,
            sums_padded=sums_padded,
            sizes=slots.peer_rows,
            there=there,
        )

    stays_of_a = (
        jnp.full((rows_in, sizes.copies), _NOWHERE, jnp.int32).at[stay_a, copy].set(stay_b, mode="drop")
    )
    stays_of_b = jnp.full((rows_out, 1), _NOWHERE, jnp.int32).at[stay_b, 0].set(stay_a, mode="drop")
    return Route(
        a=side(leaving, stays_of_a, rows_out, sizes.copied, there),
        b=side(arriving, stays_of_b, rows_in, 0, back),
        padding=padding,
    )


def _summed(
    places: Int[Array, "rows copies"], copied: int, pool: int
) -> tuple[Int[Array, " rows"], Int[Array, "copied copies"]]:
    """One place of each row, past the `pool` for those with another copy than the first, and the places of those."""
    sums = jnp.full((copied, places.shape[1]), _NOWHERE, jnp.int32)
    if not copied:
        return places[:, 0], sums
    several = (places[:, 1:] != _NOWHERE).any(1)
    sum_of_row = jnp.cumsum(several.astype(jnp.int32)) - 1
    sums = sums.at[jnp.where(several, sum_of_row, copied)].set(places, mode="drop")
    return jnp.where(several, pool + sum_of_row, places[:, 0]), sums


def _check_tables(tables: Tables, sizes: RouteSizes) -> None:
    if jnp.ndim(tables.peers) != 2:
        raise ValueError(
            f"expand_route: tables of one device; got peers of shape {jnp.shape(tables.peers)}."
            " Take the device's own inside shard_map: jax.tree.map(lambda x: x[0], tables)."
        )
    for name in ("send_runs", "recv_runs", "stay_runs"):
        have, want = jnp.shape(getattr(tables, name))[0], max(getattr(sizes, name), 1)
        if have != want:
            raise ValueError(
                f"expand_route: tables are padded for the sizes given; got {have} {name} and sizes.{name}={want}."
                " Make the tables with the capacity of the program (solver.step_tables)."
            )


@dataclass(frozen=True)
class _Slots:
    """A buffer's slots, peers one after another: the row in each, its copy, rows per peer, peers' padded starts."""

    rows: Int[Array, " size"]
    copy: Int[Array, " size"]
    peer_rows: Int[Array, " peers"]
    first_padded: Int[Array, " peers"]

    def padded(self) -> Int[Array, " size"]:
        """Each slot's place in the padded buffer; past its end for unused slots."""
        peer, within = _positions(self.peer_rows, self.rows.shape[0])
        past_end = jnp.iinfo(jnp.int32).max // 2
        return jnp.append(self.first_padded, past_end)[peer] + within
