"""Attention in a layout of its own: every (sequence, head) on the device that the plan gave it.

Tokens stay where the linear layers want them. Around every attention call, (token, head) rows of q, k and v
move to the devices of their work items, packed attention runs there, and the output rows move back. Data
parallelism (all items where the tokens are), Ulysses inside bags of any sizes at once, and heads dealt
unevenly are plans, not programs: one executable runs them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from parallel._exchange import AxisName, Route, RouteSizes, exchange, expand_route, placed_rows, run_rows
from parallel._packed_attention import PackedKernel, PackedSegments, packed_attention


@runtime_checkable
class AttentionSizes(Protocol):
    """What `expand_attention` reads of a capacity (`solver.StepCapacity` is one): static sizes on one device."""

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
@no_type_check  # JAX rebuilds pytrees with placeholders for leaves
class AttentionLayout:
    """One device's part of a step's attention layout; made by `expand_attention`.

    Attributes:
        keys: token to attention layout for k and v, and for q as well if `queries` is None.
        queries: the queries' own route in programs that can run items divided by query range.
        segments: which attention rows attend to which.
    """

    keys: Route
    queries: Route | None
    segments: PackedSegments


def expand_attention(tables: Any, sizes: AttentionSizes, *, num_heads: int) -> AttentionLayout:
    """Turn one device's attention tables into row indices and segment ids.

    Per device: call inside `shard_map`, once a step (not once a layer); integers only, no communication.

    Args:
        tables: `solver.StepTables` of this device, without a device axis.
        sizes: the capacity they were padded for.
        num_heads: attention heads of the model.

    Returns:
        The layout to close over in `balanced_attention`.
    """
    rows_in = (sizes.text + sizes.image) * num_heads
    queries = None
    if sizes.query_route is not None:
        queries = expand_route(
            tables.queries, sizes.query_route, rows_in=rows_in, rows_out=sizes.query_rows, num_heads=num_heads
        )
    return AttentionLayout(
        keys=expand_route(
            tables.keys, sizes.key_route, rows_in=rows_in, rows_out=sizes.key_rows, num_heads=num_heads
        ),
        queries=queries,
        segments=PackedSegments(
            query_ids=_item_ids(tables.query_items, sizes.query_rows),
            key_ids=_item_ids(tables.key_items, sizes.key_rows),
            key_blocks=tables.key_blocks,
            query_blocks=tables.query_blocks,
        ),
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

    Communication: q, k and v of the rows whose item runs elsewhere there in one exchange (two if items can be divided),
    and the output back in one.

    Args:
        q, k, v: token-layout rows of this device, [text rows; image rows]; of one shape and dtype.
        layout: from `expand_attention`.
        axis_name: mesh axis, or tuple of axes, of the plan's devices.
        scale: factor on the logits, a static number; d ** -0.5 by default.
        kernel: block computation of `packed_attention`.

    Returns:
        Attention output of the same rows; zero on padding rows.

    Raises:
        ValueError: if shapes or dtypes differ; and as `packed_attention`.
    """
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "balanced_attention: q, k and v have one shape and dtype; got"
            f" {q.dtype}{list(q.shape)}, {k.dtype}{list(k.shape)} and {v.dtype}{list(v.shape)}."
            " Repeat heads that are shared, and cast."
        )
    num_rows, dim = q.shape[0] * q.shape[1], q.shape[2]
    q_rows, k_rows, v_rows = (x.reshape(num_rows, dim) for x in (q, k, v))
    if layout.queries is None:
        home = layout.keys
        # Joined by hand rather than as three leaves: the three parts are cut apart in attention layout for free.
        rows = exchange(jnp.concatenate([q_rows, k_rows, v_rows], -1), home, axis_name=axis_name)
        q_rows, k_rows, v_rows = jnp.split(rows, 3, axis=-1)
    else:
        home = layout.queries
        q_rows = exchange(q_rows, home, axis_name=axis_name)
        rows = exchange(jnp.concatenate([k_rows, v_rows], -1), layout.keys, axis_name=axis_name)
        k_rows, v_rows = jnp.split(rows, 2, axis=-1)
    out = packed_attention(q_rows, k_rows, v_rows, layout.segments, scale=scale, kernel=kernel).out
    return exchange(out, home.reversed, axis_name=axis_name).reshape(q.shape)


def make_balanced_attention(
    layout: AttentionLayout, *, axis_name: AxisName, kernel: PackedKernel | None = None
) -> Callable[[Array, Array, Array], Array]:
    """`balanced_attention` as a callable of (q, k, v), the form that models take."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        return balanced_attention(q, k, v, layout, axis_name=axis_name, kernel=kernel)

    return attention
