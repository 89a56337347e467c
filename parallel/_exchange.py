"""Moving rows between two layouts of a mesh axis.

A layout says which rows each device holds. `solver` describes a move between layouts A and B as runs
(`solver.ExchangeTables`); `expand_route` turns them, on the device, into a `Route` of row indices, once a
step; and `exchange` applies it to any array whose leading axis is A's rows:

    A rows --gather--> send buffer --collective--> receive buffer --\\
       \\------------- rows that stay --------------------------------gather--> B rows

Both directions, and the gradients of both, are gathers: nothing is ever scattered in floating point. Rows that
stay never enter the collective. On CUDA and TPU the collective is `jax.lax.ragged_all_to_all`, which moves only
the rows that must move. On other platforms it is padded: one permute for each round that carries anything, each
as large as its busiest pair, or one `all_to_all` where that is cheaper. The choice of platform is made when the
program is lowered.

Moves by several routes share a collective (`exchange_together`): their buffers lie one after another, and a
device sends every peer one piece of each.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from parallel._routes import AxisName, Route, Side

_Routes = Sequence[Route]
_Places = tuple[Int[Array, " rows"], Int[Array, "sums copies"]]  # `from_...` and `sums_...` of a side
_Ends = tuple[Side, Side]  # near and far: rows leave one and arrive at the other


def _take(x: Array, index: Int[Array, " n"]) -> Array:
    return x.at[index].get(mode="fill", fill_value=0)


@dataclass(frozen=True)
class _Packed:
    """Buffers of several moves as one: their rows cut to one width, so that one collective carries all.

    Attributes:
        width: of the common rows, the largest that divides the widths of all.
        factors: common rows in a row of each buffer.
        sizes: rows of each buffer.
    """

    width: int
    factors: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[Array], sizes: Iterable[int]) -> "_Packed":
        width = math.gcd(*(x.shape[1] for x in rows))
        return cls(width, tuple(x.shape[1] // width for x in rows), tuple(sizes))

    @property
    def starts(self) -> list[int]:
        """Where each buffer starts, in common rows, and the sum."""
        starts = [0]
        for factor, size in zip(self.factors, self.sizes, strict=True):
            starts.append(starts[-1] + factor * size)
        return starts

    def join(self, buffers: Iterable[Array]) -> Array:
        return _joined([buffer.reshape(-1, self.width) for buffer in buffers])

    def split(self, joined: Array) -> list[Array]:
        parts = jnp.split(joined, self.starts[1:-1])
        return [part.reshape(-1, f * self.width) for part, f in zip(parts, self.factors, strict=True)]


def _joined(parts: list[Array], axis: int = 0) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _padded_send(routes: _Routes, axis_name: AxisName, transpose: bool, buffers: list[Array]) -> list[Array]:
    """The padded buffers as the peers receive them."""
    paddings = [route.padding for route in routes]
    if paddings[0].as_all_to_all:
        num_peers = paddings[0].num_peers
        packed = _Packed.of(buffers, (max(padding.rounds) for padding in paddings))
        parts = [buffer.reshape(num_peers, -1, packed.width) for buffer in buffers]
        received = lax.all_to_all(_joined(parts, 1), axis_name, split_axis=0, concat_axis=0)
        parts = jnp.split(received, packed.starts[1:-1], axis=1)
        return [part.reshape(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]
    backward = routes[0].is_reversed != transpose
    starts = [0] * len(buffers)
    arrived: list[list[Array]] = [[] for _ in buffers]
    for r, rows in enumerate(zip(*(padding.rounds for padding in paddings), strict=True), 1):
        if not any(rows):
            continue
        packed = _Packed.of(buffers, rows)
        slices = zip(buffers, starts, rows, strict=True)
        part = packed.join(lax.slice_in_dim(buffer, start, start + n) for buffer, start, n in slices)
        part = lax.ppermute(part, axis_name, paddings[0].pairs(-r if backward else r))
        for found, piece in zip(arrived, packed.split(part), strict=True):
            found.append(piece)
        starts = [start + n for start, n in zip(starts, rows, strict=True)]
    return [_joined(found) if found else buffer for found, buffer in zip(arrived, buffers, strict=True)]


def _padded_move(
    routes: _Routes, axis_name: AxisName, transpose: bool, ends: list[_Ends], rows: Sequence[Array]
) -> list[Array]:
    buffers = [_take(x, near.to_padded) for x, (near, _) in zip(rows, ends, strict=True)]
    received = _padded_send(routes, axis_name, transpose, buffers)
    places = [(far.from_padded, far.sums_padded) for _, far in ends]
    return [_arrived(*move) for move in zip(rows, received, places, strict=True)]


def _ragged_move(axis_name: AxisName, ends: list[_Ends], rows: Sequence[Array]) -> list[Array]:
    near_buffers = _Packed.of(rows, (near.to_ragged.shape[0] for near, _ in ends))
    far_buffers = _Packed.of(rows, (far.to_ragged.shape[0] for _, far in ends))

    def of_peers(values: Iterable[Array], packed: _Packed, *, are_places: bool) -> Int[Array, " updates"]:
        """Of every peer one value for each buffer, in common rows."""
        scaled = [v * factor for v, factor in zip(values, packed.factors, strict=True)]
        if are_places:
            scaled = [v + start for v, start in zip(scaled, packed.starts, strict=False)]
        return jnp.stack(scaled, -1).reshape(-1)

    received = lax.ragged_all_to_all(
        near_buffers.join(_take(x, near.to_ragged) for x, (near, _) in zip(rows, ends, strict=True)),
        jnp.zeros((far_buffers.starts[-1], far_buffers.width), rows[0].dtype),
        of_peers((jnp.cumsum(near.sizes) - near.sizes for near, _ in ends), near_buffers, are_places=True),
        of_peers((near.sizes for near, _ in ends), near_buffers, are_places=False),
        of_peers((near.there for near, _ in ends), far_buffers, are_places=True),
        of_peers((far.sizes for _, far in ends), far_buffers, are_places=False),
        axis_name=axis_name,
    )
    places = [(far.from_ragged, far.sums_ragged) for _, far in ends]
    return [_arrived(*move) for move in zip(rows, far_buffers.split(received), places, strict=True)]


def _arrived(stayed: Array, received: Array, places: _Places) -> Array:
    """The rows of the far layout."""
    index, sums = places
    parts = [stayed, received]
    if sums.shape[0]:
        in_buffer = jnp.where(sums < stayed.shape[0], received.shape[0], sums - stayed.shape[0])
        parts.append((_added_up(stayed, sums) + _added_up(received, in_buffer)).astype(stayed.dtype))
    return _take(jnp.concatenate(parts), index)


def _kept(rows: Array, far: Side) -> Array:
    """The rows of the far layout, on the only device there is."""
    if not far.sums_ragged.shape[0]:
        return _take(rows, far.from_ragged)
    nothing = jnp.zeros((far.to_ragged.shape[0], rows.shape[1]), rows.dtype)
    return _arrived(rows, nothing, (far.from_ragged, far.sums_ragged))


def _added_up(rows: Array, index: Int[Array, "sums copies"]) -> Array:
    # In half precision the rounding of each copy would stay in the total.
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    copies = (_take(rows, index[:, c]).astype(wide) for c in range(index.shape[1]))
    return sum(copies, jnp.zeros((), wide))


def _move(axis_name: AxisName, routes: _Routes, rows: Sequence[Array], *, transpose: bool) -> list[Array]:
    """Rows of the far layouts; transposed, rows of the near ones, copies of a row added up."""
    ends = [(route.b, route.a) if transpose else (route.a, route.b) for route in routes]
    num_far = [far.from_ragged.shape[0] for _, far in ends]
    # A stream that no step of the program has does not travel.
    travel = [i for i, x in enumerate(rows) if x.size and num_far[i]]
    out = [jnp.zeros((n, x.shape[1]), x.dtype) for n, x in zip(num_far, rows, strict=True)]
    if not travel:
        return out
    routes, ends, rows = [routes[i] for i in travel], [ends[i] for i in travel], [rows[i] for i in travel]
    ragged = partial(_ragged_move, axis_name)
    if routes[0].padding.num_peers == 1:
        moved = [_kept(x, far) for x, (_, far) in zip(rows, ends, strict=True)]
    elif not routes[0].padding.rounds:
        moved = ragged(ends, rows)
    else:
        padded = partial(_padded_move, routes, axis_name, transpose)
        moved = lax.platform_dependent(ends, rows, cuda=ragged, rocm=ragged, tpu=ragged, default=padded)
    for i, x in zip(travel, moved, strict=True):
        out[i] = x
    return out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange_rows(axis_name: AxisName, routes: _Routes, rows: Sequence[Array]) -> list[Array]:
    return _move(axis_name, routes, rows, transpose=False)


def _exchange_fwd(axis_name, routes, rows):
    return _exchange_rows(axis_name, routes, rows), routes


def _exchange_bwd(axis_name, routes, cotangents):
    return None, _move(axis_name, routes, cotangents, transpose=True)


_exchange_rows.defvjp(_exchange_fwd, _exchange_bwd)


def _check_devices(route: Route, axis_name: AxisName) -> None:
    num_peers = route.padding.num_peers
    # A plan for one device needs no axis: each device of a mesh may have one of its own.
    if num_peers > 1 and lax.axis_size(axis_name) != num_peers:
        raise ValueError(
            f"exchange: the plan's devices are those of axis_name; got a plan for {num_peers} devices and"
            f" axis_name={axis_name!r} of {lax.axis_size(axis_name)}. Plan with num_devices of the mesh."
        )


def _check_together(routes: _Routes, axis_name: AxisName) -> None:
    for route in routes:
        _check_devices(route, axis_name)
    form = {(route.is_reversed, len(r.rounds), r.as_all_to_all) for route in routes for r in [route.padding]}
    if len(form) > 1:
        raise ValueError(
            "exchange_together: routes of one direction, padded alike, share a collective; got (is_reversed, rounds,"
            f" as_all_to_all) of {sorted(form)}. Make them with expand_beside, of one capacity."
        )


def exchange(rows: Any, route: Route, *, axis_name: AxisName) -> Any:
    """Move rows from layout A to layout B of a route.

    Per device: call inside `shard_map` over `axis_name`. Bit-exact; differentiable, the gradient being the reverse move
    (gradients of the copies of a row are added up).

    Communication: one collective per dtype, of the rows that change device (padded to the busiest pair where the
    platform has no ragged collective). Leaves of one dtype share a collective; no dtype is converted.

    Args:
        rows: a pytree of arrays with leading axis A's rows on this device.
        route: the route, from `expand_route`, which has an example.
        axis_name: mesh axis, or tuple of axes, over which the route was made.

    Returns:
        The pytree with leading axis B's rows; rows of B that no row of A maps to are zero.

    Raises:
        ValueError: if a leaf's leading axis is not A's row count, or the route was made for another number of devices
            than `axis_name` has.
    """
    return exchange_together([(rows, route)], axis_name=axis_name)[0]


def exchange_together(moves: Sequence[tuple[Any, Route]], *, axis_name: AxisName) -> list[Any]:
    """Several exchanges that share their collectives: one per dtype, also in the gradient.

    Per device, and all else, as `exchange`; a row of the common buffer is as wide as the largest number that divides
    the widths of all. Routes are of one direction and one step, made with `expand_beside`.

    Args:
        moves: rows and route of each.
        axis_name: mesh axis, or tuple of axes, over which the routes were made.

    Returns:
        The rows of each in its route's layout B.

    Raises:
        ValueError: as `exchange`; or if the routes cannot share a collective: of other directions, or padded otherwise.
    """
    _check_together([route for _, route in moves], axis_name)
    parts = [_by_dtype(rows, route) for rows, route in moves]
    moved: list[dict[Any, Array]] = [{} for _ in moves]
    for dtype in dict.fromkeys(dtype for part in parts for dtype in part):
        having = [i for i, part in enumerate(parts) if dtype in part]
        routes, rows = [moves[i][1] for i in having], [_joined(parts[i][dtype], 1) for i in having]
        # Integers have no cotangent to move back.
        move = _exchange_rows if jnp.issubdtype(dtype, jnp.inexact) else partial(_move, transpose=False)
        for i, x in zip(having, move(axis_name, routes, rows), strict=True):
            moved[i][dtype] = x
    return [_unjoined(rows, found) for (rows, _), found in zip(moves, moved, strict=True)]


def _by_dtype(rows: Any, route: Route) -> dict[Any, list[Array]]:
    """The leaves of each dtype, as matrices."""
    rows_in = route.a.from_ragged.shape[0]
    found: dict[Any, list[Array]] = {}
    for leaf in jax.tree.leaves(rows):
        if leaf.ndim < 1 or leaf.shape[0] != rows_in:
            raise ValueError(
                f"exchange: every leaf has the route's rows as its leading axis; got shape={leaf.shape},"
                f" rows={rows_in}. Expand the route for these rows (expand_route, rows_in)."
            )
        found.setdefault(leaf.dtype, []).append(leaf.reshape(rows_in, math.prod(leaf.shape[1:])))
    return found


def _unjoined(rows: Any, found: dict[Any, Array]) -> Any:
    """`rows` with the values that lie side by side in `found`."""
    leaves, tree = jax.tree.flatten(rows)
    start = dict.fromkeys(found, 0)
    out = []
    for leaf in leaves:
        first, width = start[leaf.dtype], math.prod(leaf.shape[1:])
        part = lax.slice_in_dim(found[leaf.dtype], first, first + width, axis=1)
        out.append(part.reshape(part.shape[0], *leaf.shape[1:]))
        start[leaf.dtype] += width
    return jax.tree.unflatten(tree, out)
