"""One-sided kernels as a simulator runs them, on CPU devices: Pallas' TPU interpret mode, with its race detector."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from parallel._block_attention import BlockAttention, BlockMask, block_forward
from parallel._one_sided_order import (
    device_id,
    gives_room,
    needs_room,
    puts_keys,
    slot_at_hand,
    slot_of_arrival,
)
from parallel._online_softmax import Partial, merge
from parallel._routes import AxisName

# Of the semaphore that kernels of this module share to begin together.
_COLLECTIVE_ID = 0


class Simulator(NamedTuple):
    """How puts are carried out: at once or when they are waited for, and whether races are looked for."""

    eager: bool
    detect_races: bool

    @property
    def options(self) -> dict[str, Any]:
        """Of `pallas_call`."""
        mode: Literal["eager", "on_wait"] = "eager" if self.eager else "on_wait"
        return {
            "interpret": pltpu.InterpretParams(dma_execution_mode=mode, detect_races=self.detect_races),
            "compiler_params": pltpu.CompilerParams(collective_id=_COLLECTIVE_ID, has_side_effects=True),
        }


def exchange(parts: Array, axis_name: AxisName, simulator: Simulator) -> Array:
    """As `Puts.exchange`."""
    size = lax.axis_size(axis_name)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_exchange_kernel, axis_name),
        out_shape=jax.ShapeDtypeStruct(parts.shape, parts.dtype),
        in_specs=[anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA((size,))] * 2,
        **simulator.options,
    )(parts)


def ring(
    q: Array, kv: Array, axis_name: AxisName, block: BlockAttention, scale: float, simulator: Simulator
) -> Partial:
    """As `Puts.ring`."""
    anywhere, near = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.VMEM))
    out, lse, _ = pl.pallas_call(
        partial(_ring_kernel, axis_name, block, scale),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
            jax.ShapeDtypeStruct((2, *kv.shape), kv.dtype),
        ],
        in_specs=[near, anywhere],
        out_specs=[near, near, anywhere],
        scratch_shapes=[
            pltpu.VMEM(kv.shape, kv.dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        **simulator.options,
    )(q, kv)
    return Partial(out, lse)


def _enter(axis_name: AxisName, peers: list[Any]) -> None:
    """Wait until the peers have entered the kernel, and their buffers are the kernel's."""
    entered = pltpu.get_barrier_semaphore()
    for peer in peers:
        pl.semaphore_signal(entered, 1, device_id=device_id(axis_name, peer))
    pl.semaphore_wait(entered, len(peers))


def _exchange_kernel(axis_name: AxisName, parts_ref, out_ref, sent, arrived) -> None:
    """Put the part for each peer where it belongs there; done when as many have come."""
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    peers = [(here + k) % size for k in range(1, size)]
    _enter(axis_name, peers)
    # At any time each device receives from one peer, the one that is k before it.
    puts = [
        pltpu.make_async_remote_copy(
            parts_ref.at[peer],
            out_ref.at[here],
            sent.at[k],
            arrived.at[k],
            device_id=device_id(axis_name, peer),
        )
        for k, peer in enumerate(peers, 1)
    ]
    for put in puts:
        put.start()
    pltpu.sync_copy(parts_ref.at[here], out_ref.at[here])
    for put in puts:
        put.wait()


def _ring_kernel(
    axis_name: AxisName,
    block: BlockAttention,
    scale: float,
    q_ref,
    kv_ref,
    out_ref,
    lse_ref,
    slots_ref,
    at_hand,
    sent,
    arrived,
    room,
) -> None:
    """Ring attention, see `_one_sided_order`. `arrived` has a semaphore a slot: keys of two steps may be under way."""
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    following, before = ((here + k) % size for k in (1, size - 1))
    _enter(axis_name, [following, before])

    def source(step: int):
        slot = slot_at_hand(step)
        return kv_ref if slot is None else slots_ref.at[slot]

    for step in range(size):
        put = None
        if puts_keys(step, size):
            if needs_room(step):
                pl.semaphore_wait(room, 1)
            slot = slot_of_arrival(step)
            put = pltpu.make_async_remote_copy(
                source(step),
                slots_ref.at[slot],
                sent,
                arrived.at[slot],
                device_id=device_id(axis_name, following),
            )
            put.start()
        pltpu.sync_copy(source(step), at_hand)
        k, v = at_hand[0], at_hand[1]
        part = block_forward(block, q_ref[...], k, v, BlockMask(), scale)
        if step:
            part = merge(Partial(out_ref[...], lse_ref[...]), part)
        out_ref[...], lse_ref[...] = part
        if put is not None:
            put.wait_send()
            if gives_room(step, size):
                pl.semaphore_signal(room, 1, device_id=device_id(axis_name, before))
            put.wait_recv()
