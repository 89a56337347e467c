"""Attention in a layout of its own: every (sequence, head) on the device that the plan gave it.

Tokens stay where the linear layers want them. Around every attention call, (token, head) rows of q, k and v
move to the devices of their work items, packed attention runs there, and the output rows move back. Data
parallelism (all items where the tokens are), Ulysses inside bags of any sizes at once, and heads dealt
unevenly are plans, not programs: one executable runs them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallel._exchange import exchange, exchange_together
from parallel._packed_attention import PackedKernel, PackedSegments, packed_attention
from parallel._routes import AxisName, Route, RouteSizes, expand_beside, expand_route, placed_rows, run_rows


@runtime_checkable
class AttentionSizes(Protocol):
    """What `expand_attention` reads of a capacity (`solver.StepCapacity` is one): static sizes on one device."""

    @property
    def num_heads(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def text(self) -> int: ...
    @property
    def image(self) -> int: ...
    @property
    def query_rows(self) -> int: ...
    @property
    def key_rows(self) -> int: ...
    @property
    def key_route(self) -> RouteSizes: ...
    @property
    def query_route(self) -> RouteSizes | None: ...


@runtime_checkable
class TokenSizes(Protocol):
    """What `expand_tokens` reads of a capacity (`solver.StepCapacity` is one): static sizes on one device."""

    @property
    def home_text(self) -> int: ...
    @property
    def home_image(self) -> int: ...
    @property
    def text(self) -> int: ...
    @property
    def image(self) -> int: ...
    @property
    def text_route(self) -> RouteSizes: ...
    @property
    def image_route(self) -> RouteSizes: ...


class TokenRoutes(NamedTuple):
    """Moves from home to token layout on one device, each with its `reversed`; made by `expand_tokens`."""

    text: Route
    image: Route


def expand_tokens(tables: Any, sizes: TokenSizes) -> TokenRoutes:
    """Turn one device's tables of text and image tokens into row indices.

    Per device: call inside `shard_map`, once a step; integers only, no communication.

    Args:
        tables: `solver.StepTables` of this device, without a device axis.
        sizes: the capacity they were padded for.

    Returns:
        The routes to give to `exchange`. A stream that the program has no rows for has a route of no rows.

    Raises:
        ValueError: as `expand_route`.
    """
    return TokenRoutes(
        text=expand_route(tables.text, sizes.text_route, rows_in=sizes.home_text, rows_out=sizes.text),
        image=expand_route(tables.image, sizes.image_route, rows_in=sizes.home_image, rows_out=sizes.image),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
@no_type_check  # JAX rebuilds pytrees with placeholders for leaves
class HeadGroup:
    """One device's part of the layout of one head group.

    Attributes:
        keys: token to attention layout for k and v, and for q as well if `queries` is None.
        queries: the queries' own route in programs that can run items divided by query range.
        segments: which attention rows attend to which.
    """

    keys: Route
    queries: Route | None
    segments: PackedSegments


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
@no_type_check
class AttentionLayout:
    """One device's part of a step's attention layout; made by `expand_attention`.

    Attributes:
        groups: the head groups, computed one after another; one but where the plan's attention is cut in several.
    """

    groups: tuple[HeadGroup, ...]


def expand_attention(tables: Any, sizes: AttentionSizes, *, num_heads: int) -> AttentionLayout:
    """Turn one device's attention tables into row indices and segment ids.

    Per device: call inside `shard_map`, once a step (not once a layer); integers only, no communication.

    Args:
        tables: `solver.StepTables` of this device, without a device axis.
        sizes: the capacity they were padded for.
        num_heads: attention heads of the model.

    Returns:
        The layout to close over in `balanced_attention`.

    Raises:
        ValueError: if the plan is for another number of heads, or the tables were padded for other sizes; and as
            `expand_route`.
    """
    return AttentionLayout(tuple(_expand_group(group, sizes, num_heads) for group in tables.attention))


def _expand_group(tables: Any, sizes: AttentionSizes, num_heads: int) -> HeadGroup:
    _check_sizes(tables, sizes, num_heads)
    queries, keys = _expand_routes(tables, sizes)
    return HeadGroup(
        keys=keys,
        queries=queries,
        segments=PackedSegments(
            query_ids=_item_ids(tables.query_items, sizes.query_rows),
            key_ids=_item_ids(tables.key_items, sizes.key_rows),
            key_blocks=tables.key_blocks,
            query_blocks=tables.query_blocks,
        ),
    )


def _expand_routes(tables: Any, sizes: AttentionSizes) -> tuple[Route | None, Route]:
    """Of queries, if they have one of their own, and of keys."""
    expand = partial(
        expand_beside, rows_in=(sizes.text + sizes.image) * sizes.num_heads, num_heads=sizes.num_heads
    )
    key_rounds = sizes.key_route.rounds
    if sizes.query_route is None:
        return None, expand(tables.keys, sizes.key_route, key_rounds, rows_out=sizes.key_rows)
    # A row of k and v together is as wide as two of q.
    together = tuple(q + 2 * kv for q, kv in zip(sizes.query_route.rounds, key_rounds, strict=True))
    return (
        expand(tables.queries, sizes.query_route, together, rows_out=sizes.query_rows),
        expand(tables.keys, sizes.key_route, together, rows_out=sizes.key_rows),
    )


def _check_sizes(tables: Any, sizes: AttentionSizes, num_heads: int) -> None:
    if num_heads != sizes.num_heads:
        raise ValueError(
            f"expand_attention: the model has the heads of the plan; got num_heads={num_heads} and a capacity for"
            f" {sizes.num_heads}. Balance with the model's num_heads."
        )
    for name, rows in (("key_blocks", sizes.query_rows), ("query_blocks", sizes.key_rows)):
        shape, want = getattr(tables, name).shape, (rows // sizes.block, 2)
        if shape != want:
            raise ValueError(
                f"expand_attention: tables of one device, padded for the sizes given; got {name} of shape {shape}"
                f" instead of {want}. Make the tables with the capacity of the program (solver.step_tables), and take"
                " the device's own inside shard_map: jax.tree.map(lambda x: x[0], tables)."
            )


def _item_ids(items: Int[Array, "items 7"], rows: int) -> Int[Array, " rows"]:
    """Number the device's (sequence, head) items from 1, and write each item's number on its rows."""
    heads, length = items[:, 5], items[:, 6]
    run, head, row = run_rows(heads, length, rows)
    where = jnp.where(row < 0, rows, placed_rows(items[:, :5], head, row, run))
    number = (jnp.cumsum(heads) - heads)[run] + head + 1
    return jnp.zeros(rows, jnp.int32).at[where].set(number, mode="drop")


def balanced_attention(
    q: Float[Array, "t_loc h d"],
    k: Float[Array, "t_loc h d"],
    v: Float[Array, "t_loc h d"],
    layout: AttentionLayout,
    *,
    axis_name: AxisName,
    scale: float | None = None,
    kernel: PackedKernel | None = None,
) -> Float[Array, "t_loc h d"]:
    """Attention of packed tokens, each (sequence, head) on the device its plan says.

    Per device: call inside `shard_map` over `axis_name`. Differentiable.

    Communication: q, k and v of the rows whose item runs elsewhere there in one exchange, and the output back in
    one; as many for the gradient, and all that for each head group. Of several groups, one's exchanges run under the
    attention of the others (where the compiler schedules collectives asynchronously).

    Args:
        q, k, v: token-layout rows of this device, [text rows; image rows]; of one shape and dtype.
        layout: from `expand_attention`.
        axis_name: mesh axis, or tuple of axes, of the plan's devices.
        scale: factor on the logits, a static number; d ** -0.5 by default.
        kernel: block computation of `packed_attention`.

    Returns:
        Attention output of the same rows; zero on padding rows.

    Raises:
        ValueError: if shapes or dtypes differ; as `packed_attention`; and as `exchange`.
    """
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "balanced_attention: q, k and v have one shape and dtype; got"
            f" {q.dtype}{list(q.shape)}, {k.dtype}{list(k.shape)} and {v.dtype}{list(v.shape)}."
            " Repeat heads that are shared, and cast."
        )
    rows = _Rows(*(x.reshape(-1, x.shape[2]) for x in (q, k, v)))
    moved = _to_items(rows, layout.groups[0], axis_name)
    total: Any = None
    for group, following in zip(layout.groups, (*layout.groups[1:], None), strict=True):
        # Barriers give the order that hides exchanges: the next group's rows travel under this one's attention, and
        # this one's outputs under the next one's. Left alone the compiler has all groups travel, and then attend.
        here, ahead = moved, None
        if following is not None:
            here, rows = lax.optimization_barrier((here, rows))
            ahead = _to_items(rows, following, axis_name)
        out = packed_attention(*here, group.segments, scale=scale, kernel=kernel).out
        if ahead is not None:
            moved, out = lax.optimization_barrier((ahead, out))
        if total is not None:
            total, out = lax.optimization_barrier((total, out))
        out = exchange(out, _home(group).reversed, axis_name=axis_name)
        # Every row is an output of one group, and zero in the others.
        total = out if total is None else total + out
    return total.reshape(q.shape)


class _Rows(NamedTuple):
    """(token, head) rows in one layout."""

    q: Float[Array, "rows d"]
    k: Float[Array, "rows d"]
    v: Float[Array, "rows d"]


def _home(group: HeadGroup) -> Route:
    """The route of queries, on which outputs go back."""
    return group.keys if group.queries is None else group.queries


def _to_items(rows: _Rows, group: HeadGroup, axis_name: AxisName) -> _Rows:
    # Joined by hand rather than as leaves: the parts are cut apart in attention layout for free.
    if group.queries is None:
        moved = exchange(jnp.concatenate(rows, -1), group.keys, axis_name=axis_name)
        return _Rows(*jnp.split(moved, 3, axis=-1))
    moves = (rows.q, group.queries), (jnp.concatenate([rows.k, rows.v], -1), group.keys)
    q, moved = exchange_together(moves, axis_name=axis_name)
    return _Rows(q, *jnp.split(moved, 2, axis=-1))


def make_balanced_attention(
    layout: AttentionLayout, *, axis_name: AxisName, kernel: PackedKernel | None = None
) -> Callable[[Array, Array, Array], Array]:
    """`balanced_attention` as a callable of (q, k, v), the form that models take.

    Args:
        layout: from `expand_attention`; close over it inside the same `shard_map`.
        axis_name: mesh axis, or tuple of axes, of the plan's devices.
        kernel: block computation of `packed_attention`.

    Returns:
        A function of this device's token-layout rows (t_loc, h, d) that returns rows of the same shape.
    """

    def attention(q: Array, k: Array, v: Array) -> Array:
        return balanced_attention(q, k, v, layout, axis_name=axis_name, kernel=kernel)

    return attention
