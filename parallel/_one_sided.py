"""Sequence parallelism by one-sided puts instead of collectives. Experimental: nothing else here depends on it.

A device writes into its peers' memory and counts up their semaphores; nobody receives. The kernels exist twice, in one
order of events (`_one_sided_order`): `SimulatedPuts` runs on CPU devices, where values, gradients and races are tested;
`MosaicPuts` is for NVIDIA GPUs, and has been compiled for them, but not run.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from parallel._block_attention import (
    Attended,
    BlockAttention,
    BlockMask,
    local_attention,
    once_differentiable,
)
from parallel._check import array, integer
from parallel._one_sided_puts import Puts, check_puts
from parallel._ring_loop import Keys, Queries, Ring, ring_backward
from parallel._routes import AxisName
from parallel._sequence_inputs import check_axes, check_inputs


def one_sided_all_to_all(
    x: Float[Array, "..."], *, axis_name: AxisName, split_axis: int, concat_axis: int, puts: Puts
) -> Float[Array, "..."]:
    """`jax.lax.all_to_all(..., tiled=True)` by puts: the exchange of Ulysses attention. Experimental.

    Per device: call inside `shard_map(..., check_vma=False)`. Each device puts what is for peer p straight into p's
    buffer. No device puts before its peers have entered, none leaves before all has come: the kernel's only waits.
    Bit-exact; differentiable, the gradient being the exchange back, by puts too.

    Communication per device: (P - 1) / P of x. Memory: the result.

    Args:
        x: axis `split_axis` is P parts, one for each device of the axis.
        axis_name: mesh axis, or tuple of axes.
        split_axis, concat_axis: axes of x, not negative.
        puts: the kernels.

    Returns:
        The parts of all devices for this one, joined along `concat_axis`.

    Raises:
        TypeError: if x is no array, an axis of it no integer, or `puts` are no kernels.
        ValueError: if the devices do not divide the axis to split, or an axis is not one of x; for a mesh axis that is
            missing, not manual, or given twice.
        NotImplementedError: for what the kernels do not do.
    """
    caller = "one_sided_all_to_all"
    check_axes(caller, {"axis_name": axis_name})
    check_puts(caller, puts)
    x = array(caller, "x", x, advice="Exchange the leaves of a pytree one by one.")
    size = lax.axis_size(axis_name)
    for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis)):
        advice = f"Give one of the {x.ndim} axes of x."
        if not 0 <= integer(caller, name, axis, advice=advice) < x.ndim:
            raise ValueError(
                f"{caller}: {name} is an axis of x, counted from 0; got {name}={axis} for {x.shape}. {advice}"
            )
    if x.shape[split_axis] % size:
        raise ValueError(
            f"{caller}: the devices divide the axis to split; got {x.shape[split_axis]} of {x.shape} over"
            f" {size} devices. Pad it."
        )
    if size == 1:
        return x
    parts = jnp.stack(jnp.split(x, size, axis=split_axis))
    parts = _exchange(puts, axis_name, parts)
    return jnp.concatenate(list(parts), axis=concat_axis)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(puts: Puts, axis_name: AxisName, parts: Array) -> Array:
    return puts.exchange(parts, axis_name)


def _exchange_fwd(puts, axis_name, parts):
    return _exchange(puts, axis_name, parts), None


def _exchange_bwd(puts, axis_name, _, cotangents):
    # Device s' part p becomes device p's part s, and the other way about: the exchange is its own transpose.
    return (_exchange(puts, axis_name, cotangents),)


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


def one_sided_ring_attention(
    q: Float[Array, "b l_loc h d"],
    k: Float[Array, "b k_loc h_kv d"],
    v: Float[Array, "b k_loc h_kv d"],
    *,
    axis_name: AxisName,
    puts: Puts,
    scale: float | None = None,
    block_attention: BlockAttention | None = None,
) -> Float[Array, "b l_loc h d"]:
    """`ring_attention` whose forward pass is one kernel that attends while it puts keys on. Experimental.

    Per device: call inside `shard_map(..., check_vma=False)`, q, k and v sharded along their length. Every query
    attends to every key: no ids, no causal mask, no text.

    Communication per device: R - 1 puts of k and v, (R - 1) 2 b k_loc h_kv d elements; the gradient is that of
    `ring_attention`, by XLA's collectives. Memory: two buffers of k and v, of which one holds the keys at hand and the
    spare one those that arrive; partial results are float32.

    Args:
        q, k, v, scale: as `ring_attention`.
        axis_name: mesh axis, or tuple of axes.
        puts: the kernels, with their own attention.
        block_attention: what computes the gradient's blocks, and everything where the axis has one device.

    Returns:
        Output of this device's rows in their dtype.

    Raises:
        TypeError, ValueError: as `ring_attention`; TypeError for `puts` that are no kernels.
        NotImplementedError: for what the kernels do not do; for a second derivative.

    Reference: Liu et al., Ring Attention with Blockwise Transformers, 2023.
    """
    caller, axes = "one_sided_ring_attention", {"axis_name": axis_name}
    inputs = check_inputs(
        caller,
        axes,
        (q, k, v),
        segment_ids=None,
        causal=False,
        text=None,
        keys_replicated=False,
        scale=scale,
        block_attention=block_attention,
    )
    check_puts(caller, puts)
    if lax.axis_size(axis_name) == 1:
        out = local_attention(
            inputs.q, inputs.k, inputs.v, BlockMask(), scale=inputs.scale, block_attention=inputs.block
        )
        return inputs.alone(out)
    ring = Ring(axis_name, inputs.block, inputs.scale)
    return inputs.alone(_attend(puts, ring, inputs.q, jnp.stack([inputs.k, inputs.v])))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(puts: Puts, ring: Ring, q: Array, kv: Array) -> Array:
    return _attend_fwd(puts, ring, q, kv)[0]


def _attend_fwd(puts, ring, q, kv):
    attend = once_differentiable(partial(puts.ring, axis_name=ring.axis_name, scale=ring.scale))
    out, lse = attend(q, kv)
    out = out.astype(q.dtype)
    return out, (q, kv, out, lse)


def _attend_bwd(_, ring, saved, d_out):
    dq, dkv = once_differentiable(partial(_gradients, ring))(*saved, d_out)
    return dq, dkv


def _gradients(ring: Ring, q: Array, kv: Array, out: Array, lse: Array, d_out: Array) -> tuple[Array, Array]:
    dq, dkv = ring_backward(ring, Queries(q), Attended(out, lse, d_out), Keys(kv))
    return dq.astype(q.dtype), dkv.astype(kv.dtype)


_attend.defvjp(_attend_fwd, _attend_bwd)
