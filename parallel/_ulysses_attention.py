"""Ulysses attention, which exchanges heads for sequence, and USP, which does so around a ring."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from parallel._all_to_all import HeadSplit, all_heads, all_rows, own_heads, rows_to_heads, to_sequence
from parallel._block_attention import BlockAttention
from parallel._check import integer
from parallel._ring_attention import attend, attend_replicated, ids_of
from parallel._routes import AxisName
from parallel._sequence_inputs import (
    Inputs,
    JointOutput,
    ReplicatedText,
    SegmentIds,
    check_inputs,
)
from parallel._torus_parts import Ids, Rows, Torus

_UNCUT = "1 exchanges all heads at once."


def ulysses_attention(
    q: Float[Array, "b l_loc h d"],
    k: Float[Array, "b k_loc h_kv d"],
    v: Float[Array, "b k_loc h_kv d"],
    *,
    axis_name: AxisName,
    segment_ids: SegmentIds | None = None,
    causal: bool = False,
    text: ReplicatedText | None = None,
    keys_replicated: bool = False,
    head_groups: int = 1,
    scale: float | None = None,
    block_attention: BlockAttention | None = None,
) -> Array | JointOutput:
    """Softmax attention of a sequence that is divided among P devices, each computing some heads of the whole.

    Per device: call inside `shard_map`, q, k and v sharded along their length. Any number of
    heads: each device computes ceil(h / P); missing ones are zeros that move and are computed. Key heads that several
    devices need are repeated, no more than needed.

    Communication per device: q, k and v there and the output back, (P - 1) / P b d (2 l_loc h' + 2 k_loc h_kv')
    elements in 2 all-to-alls (3 where lengths differ), with h' and h_kv' = P times a device's heads; as much for the
    gradient. Segment ids are gathered: int32, b l. A text's output is gathered, b t h d. Memory is O(l_loc).

    Args:
        q, k, v, segment_ids, text, keys_replicated, scale, block_attention: as `ring_attention`, text replicated or
            sharded as there.
        axis_name: mesh axis, or tuple of axes.
        causal: as `ring_attention`; the sequence is in the order of the axis.
        head_groups: parts of a device's heads whose exchanges run under one another's attention, instead of everything
            there before anything is computed. At most a device's key heads; without effect on replicated keys, for
            which nothing is exchanged.

    Returns:
        Output of this device's rows in their dtype; with `text` a `JointOutput`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `ring_attention`; also for head groups that are no integer, or
            not 1 to the number of a device's key heads.

    Reference: Jacobs et al., DeepSpeed Ulysses, 2023. Here any number of heads, and text.
    """
    inputs = check_inputs(
        "ulysses_attention",
        {"axis_name": axis_name},
        (q, k, v),
        segment_ids=segment_ids,
        causal=causal,
        text=text,
        keys_replicated=keys_replicated,
        scale=scale,
        block_attention=block_attention,
    )
    return attend_by_heads(inputs, Axes(ulysses=axis_name), head_groups)


def usp_attention(
    q: Float[Array, "b l_loc h d"],
    k: Float[Array, "b k_loc h_kv d"],
    v: Float[Array, "b k_loc h_kv d"],
    *,
    ulysses_axis: AxisName,
    ring_axis: AxisName,
    segment_ids: SegmentIds | None = None,
    causal: bool = False,
    text: ReplicatedText | None = None,
    keys_replicated: bool = False,
    head_groups: int = 1,
    scale: float | None = None,
    block_attention: BlockAttention | None = None,
) -> Array | JointOutput:
    """Softmax attention of a sequence divided among U x R devices: Ulysses over U, and ring attention over R inside.

    Per device: call inside `shard_map`, q, k and v sharded along their length over both axes.
    Which axis lies across machines is the mesh's affair (`sequence_mesh`).

    Communication per device: that of `ulysses_attention` on U devices, and that of `ring_attention` on R for the
    gathered rows, (R - 1) 2 b (U k_loc) h_kv / U d elements. Memory is O(l_loc).

    Args:
        q, k, v, segment_ids, text, keys_replicated, scale, block_attention: as `ring_attention`.
        ulysses_axis: mesh axis, or tuple of axes, that trades heads for sequence.
        ring_axis: mesh axis, or tuple of axes, that passes keys on.
        causal: as `ring_attention`; the sequence is in the order of (ring_axis, ulysses_axis), as in
            `PartitionSpec(None, (ring_axis, ulysses_axis))`. Without it any order will do.
        head_groups: as `ulysses_attention`.

    Returns:
        Output of this device's rows in their dtype; with `text` a `JointOutput`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `ulysses_attention`.

    Reference: Fang and Zhao, USP: A Unified Sequence Parallelism Approach, 2024.
    """
    inputs = check_inputs(
        "usp_attention",
        {"ulysses_axis": ulysses_axis, "ring_axis": ring_axis},
        (q, k, v),
        segment_ids=segment_ids,
        causal=causal,
        text=text,
        keys_replicated=keys_replicated,
        scale=scale,
        block_attention=block_attention,
    )
    return attend_by_heads(inputs, Axes(ulysses=ulysses_axis, ring=ring_axis), head_groups)


@dataclass(frozen=True, slots=True)
class Axes:
    """Mesh axes by what they do; () for none."""

    machine: AxisName = ()
    ulysses: AxisName = ()
    ring: AxisName = ()

    @property
    def heads(self) -> tuple:
        """Those that share heads, as heads are dealt out: to a machine's devices, and there to machines."""
        return tuple(
            one
            for axis in (self.ulysses, self.machine)
            for one in (axis if isinstance(axis, tuple) else (axis,))
        )


def attend_by_heads(inputs: Inputs, axes: Axes, head_groups: Any = 1) -> Array | JointOutput:
    """Ulysses over its axis, and inside it what the other axes do: pulls and pushes, and a ring.

    Raises:
        TypeError: for head groups that are no integer.
        ValueError: for replicated keys with text or a causal mask, and head groups that are too many, or none.
    """
    split = HeadSplit(inputs.q.shape[2], inputs.k.shape[2], lax.axis_size(axes.heads))
    head_groups = integer(inputs.name, "head_groups", head_groups, least=1, advice=_UNCUT)
    if inputs.keys_replicated:  # nothing is exchanged, in however many groups
        return attend_replicated(inputs)
    _check_groups(inputs.name, head_groups, split)
    torus = Torus(axes.machine, axes.ring, inputs.block, inputs.scale, inputs.causal)
    ids = ids_of(inputs)
    ids = Ids(all_rows(ids.q, axes.ulysses), all_rows(ids.kv, axes.ulysses), ids.text)
    rows = _spread_rows(inputs, split, axes.heads)
    out, text_out = _in_groups(torus, rows, ids, split.cut(head_groups), axes)
    if text_out is not None:
        text_out = all_heads(text_out, axes.heads)[:, :, : split.heads]
    return inputs.result(out[:, :, : split.heads], text_out)


def _spread_rows(inputs: Inputs, split: HeadSplit, axis_name: AxisName) -> Rows:
    """Rows with the heads of all devices one after another; the text's with the device's own."""
    q = split.spread_queries(inputs.q)
    kv = split.spread_keys(jnp.stack([inputs.k, inputs.v]))
    if inputs.text is None or not inputs.text_length:
        return Rows(q, kv)
    text_q = split.spread_queries(inputs.text.q)
    text_kv = split.spread_keys(jnp.stack([inputs.text.k, inputs.text.v]))
    return Rows(q, kv, own_heads(text_q, axis_name), own_heads(text_kv, axis_name))


def _in_groups(
    torus: Torus, rows: Rows, ids: Ids, groups: Sequence[tuple[slice, slice]], axes: Axes
) -> tuple[Array, Array | None]:
    """Attention of each group of the devices' heads; the next group's rows travel under it, and the last one's outputs.

    Barriers give that order, left alone the compiler has all groups travel, and then attend.
    """
    size = lax.axis_size(axes.heads)
    outs: list[Any] = []
    texts: list[Any] = []
    moved = rows_to_heads(*_of_group(rows, groups[0], size), axes.ulysses)
    for group, following in zip(groups, (*groups[1:], None), strict=True):
        here, ahead = moved, None
        if following is not None:
            here, rows = lax.optimization_barrier((here, rows))
            ahead = rows_to_heads(*_of_group(rows, following, size), axes.ulysses)
        text_q = None if rows.text_q is None else rows.text_q[..., group[0], :]
        text_kv = None if rows.text_kv is None else rows.text_kv[..., group[1], :]
        out, text = attend(torus, Rows(*here, text_q, text_kv), ids)
        if ahead is not None:
            moved, out = lax.optimization_barrier((ahead, out))
        if outs:
            outs[-1], out = lax.optimization_barrier((outs[-1], out))
        out = to_sequence(out, axes.ulysses)
        outs.append(out.reshape(*out.shape[:2], size, -1, out.shape[-1]))
        texts.append(text)
    out = jnp.concatenate(outs, axis=3)
    out = out.reshape(*out.shape[:2], -1, out.shape[-1])
    return out, None if texts[0] is None else jnp.concatenate(texts, axis=2)


def _of_group(rows: Rows, group: tuple[slice, slice], size: int) -> tuple[Array, Array]:
    """Those heads of every device, still one device after another."""

    def take(x: Array, heads: slice) -> Array:
        by_device = x.reshape(*x.shape[:-2], size, -1, x.shape[-1])[..., heads, :]
        return by_device.reshape(*x.shape[:-2], -1, x.shape[-1])

    return take(rows.q, group[0]), take(rows.kv, group[1])


def _check_groups(name: str, head_groups: int, split: HeadSplit) -> None:
    if head_groups > split.kv_loc:
        raise ValueError(
            f"{name}: head_groups is 1 to the key heads of a device; got head_groups={head_groups}, {split.kv_loc} key"
            f" heads a device ({split.kv_heads} over {split.degree}). Use fewer groups."
        )
