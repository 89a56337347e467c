"""Ring attention: the sequence is divided, keys and values pass from device to device."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from parallel._block_attention import BlockAttention, BlockMask, diagonal_mask, local_attention
from parallel._routes import AxisName
from parallel._sequence_inputs import (
    Inputs,
    JointOutput,
    ReplicatedText,
    SegmentIds,
    check_inputs,
)
from parallel._torus_parts import Ids, Outputs, Rows, Torus
from parallel._torus_schedule import attend_torus


def ring_attention(
    q: Float[Array, "b l_loc h d"],
    k: Float[Array, "b k_loc h_kv d"],
    v: Float[Array, "b k_loc h_kv d"],
    *,
    axis_name: AxisName,
    segment_ids: SegmentIds | None = None,
    causal: bool = False,
    text: ReplicatedText | None = None,
    keys_replicated: bool = False,
    scale: float | None = None,
    block_attention: BlockAttention | None = None,
) -> Array | JointOutput:
    """Softmax attention of a sequence that is divided among the devices of an axis.

    Per device: call inside `shard_map`, q, k and v sharded along their length; check_vma=False saves an all-reduce of
    the text's output. Any number of heads.

    Communication of each of R devices: R - 1 permutes of k and v, (R - 1) 2 b k_loc h_kv d elements, each hidden
    by the attention to the keys that are there already; for the gradient R (1 if R = 2) of the same and R - 1 of the
    gradients of k and v in float32 (R = 2, where none are added before they move: as the kernel gives them). Ids of
    keys go with them, int32. Memory is O(l_loc), also for the gradient; partial results are float32.

    Text of a joint text and image attention is either a part of the sequence like any other,

        q = jnp.concatenate([text_q_loc, image_q_loc], axis=1)     # likewise k, v and segment ids

    with each device holding some of its tokens, or `text`: whole on every device. Replicated text enters the softmax
    once, its queries attend on each device to the keys that are there, and the parts merge: 2 all-reduces of
    b t h (d + 1) float32. Its gradient is each device's share, which `shard_map` adds up for arguments whose spec
    leaves the axis out.

    Args:
        q, k, v: this device's rows; heads of keys divide those of queries; lengths of queries and keys may differ.
        axis_name: mesh axis, or tuple of axes; a size of 1 computes attention locally.
        segment_ids: of the device's rows, (b, l_loc), or (query ids, key ids): rows attend to keys of their id. At
            most 0 = padding, whose output is zero. Of a pair None stands for rows that are all of segment 1.
            `pad_sequence` makes any length divisible with them.
        causal: queries attend to keys that are not behind them; tokens are numbered along the axis, those of the text
            before all others. A device skips the keys of others that are all behind its queries, which then hide no
            transfer: those at the axis' end have more work than those at its start. Fast kernels of GPUs take keys that
            all come before the queries, and without ids, in half precision, as many keys as queries at the same
            positions; what else a mask cuts is plain JAX there too.
        text: text that is the same on all devices.
        keys_replicated: k and v are short and the same on all devices (cross-attention): nothing moves. Their gradients
            are each device's share.
        scale: factor on the logits, a static number; d ** -0.5 by default.
        block_attention: what computes a block; by default the best kernel of the platform.

    Returns:
        Output of this device's rows in their dtype; with `text` a `JointOutput`.

    Raises:
        TypeError: for rows that are no floating point arrays of 16 or 32 bits, or of several dtypes, ids that are no
            signed integers or of 64 bits, a scale that is traced or no number, `causal` or `keys_replicated` that are
            traced or no bool, a `block_attention` that is none, or returns other than it should, an axis that is no
            name; of JAX's own, for forward-mode derivatives (`jax.jvp`, `jax.jacfwd`).
        ValueError: for an axis that is missing, not manual, or given twice; rows, ids or text divided over an
            explicit axis that is not manual; shapes that disagree or have a 0, those that a block returns included; ids
            past int32; a scale that float32 cannot hold; a text without ids beside rows that have them; replicated keys
            with `text` or `causal`.
        NotImplementedError: for a second derivative.

    Reference: Liu et al., Ring Attention with Blockwise Transformers, 2023. Here the gradient's first and last
    transfers hide under the two halves of the device's own block.
    """
    inputs = check_inputs(
        "ring_attention",
        {"axis_name": axis_name},
        (q, k, v),
        segment_ids=segment_ids,
        causal=causal,
        text=text,
        keys_replicated=keys_replicated,
        scale=scale,
        block_attention=block_attention,
    )
    if inputs.keys_replicated:
        return attend_replicated(inputs)
    torus = Torus((), axis_name, inputs.block, inputs.scale, inputs.causal)
    kv = jnp.stack([inputs.k, inputs.v])
    if not inputs.text_length or inputs.text is None:
        rows = Rows(inputs.q, kv)
    else:
        rows = Rows(inputs.q, kv, inputs.text.q, jnp.stack([inputs.text.k, inputs.text.v]))
    return inputs.result(*attend(torus, rows, ids_of(inputs)))


def ids_of(inputs: Inputs) -> Ids:
    """Segment ids of all rows."""
    return Ids(inputs.q_ids, inputs.kv_ids, None if inputs.text is None else inputs.text.segment_ids)


def attend(torus: Torus, rows: Rows, ids: Ids) -> Outputs:
    """Attention over machines and a ring; on a single device as one block, text and sequence together."""
    if torus.machines * torus.ring.size > 1:
        return attend_torus(torus, rows, ids)
    q, k, v = rows.q, *rows.kv
    q_ids, kv_ids = ids.q, ids.kv
    length = 0
    if rows.text_q is not None and rows.text_kv is not None:
        length = rows.text_q.shape[1]
        q, k, v = (
            jnp.concatenate(x, axis=1) for x in zip((rows.text_q, *rows.text_kv), (q, k, v), strict=True)
        )
        if ids.text is not None and q_ids is not None and kv_ids is not None:
            q_ids, kv_ids = (jnp.concatenate([ids.text, x], axis=1) for x in (q_ids, kv_ids))
    mask = _local_mask(q_ids, kv_ids, (q.shape[1], k.shape[1]), is_causal=torus.causal)
    out = local_attention(q, k, v, mask, scale=torus.scale, block_attention=torus.block)
    return Outputs(out[:, length:], out[:, :length] if length else None)


def _local_mask(
    q_ids: Array | None, kv_ids: Array | None, lengths: tuple[int, int], *, is_causal: bool
) -> BlockMask:
    if not is_causal:
        return BlockMask(q_ids, kv_ids)
    if lengths[0] == lengths[1]:
        return diagonal_mask(q_ids, kv_ids, lengths[0])
    q_places, kv_places = (jnp.arange(length, dtype=jnp.int32) for length in lengths)
    return BlockMask(q_ids, kv_ids, q_places, kv_places)


def attend_replicated(inputs: Inputs) -> Array:
    """Attention to keys that every device has: local, whatever the algorithm.

    Raises:
        ValueError: with text or a causal mask.
    """
    if inputs.causal or inputs.text is not None:
        raise ValueError(
            f"{inputs.name}: replicated keys are those of cross-attention; got causal={inputs.causal},"
            f" text={'no' if inputs.text is None else 'yes'}. Join the text to k and v, or shard k and v."
        )
    mask = BlockMask(inputs.q_ids, inputs.kv_ids)
    out = local_attention(
        inputs.q, inputs.k, inputs.v, mask, scale=inputs.scale, block_attention=inputs.block
    )
    return inputs.alone(out)
