"""One-sided kernels for NVIDIA GPUs of one machine, in Pallas for Mosaic GPU.

Puts are stores to peers' memory over NVLink. A kernel is one wave of blocks, which are all on the GPU together, so that
they may wait for one another. Semaphores only count up in a kernel, for many blocks wait for the same ones.

That semaphores are zero on all devices before any of them is counted up is the launcher's affair: XLA starts kernels
that address peers behind a barrier.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from parallel._one_sided_mosaic_attention import Attention, attend_tiles
from parallel._one_sided_order import (
    device_id,
    gives_room,
    needs_room,
    puts_keys,
    slot_at_hand,
    slot_of_arrival,
)
from parallel._online_softmax import Partial
from parallel._routes import AxisName

# A block is a warpgroup of 128 threads, which copy 16 bytes each, some times before they wait.
_THREADS, _VECTOR_BYTES, _COPIES = 128, 16, 4
# Of the boxes of rows in which keys are copied through shared memory, if more than one row.
_BOX_BYTES = 32 * 1024


class Blocks(NamedTuple):
    """Of a ring's kernel: those that put, and those that attend."""

    put: int
    attend: int

    @property
    def all(self) -> int:
        """Both."""
        return self.put + self.attend


def exchange(parts: Array, axis_name: AxisName, blocks: int) -> Array:
    """As `Puts.exchange`."""
    size, tile = lax.axis_size(axis_name), _COPIES * _THREADS * _VECTOR_BYTES // parts.dtype.itemsize
    flat = parts.reshape(size, -1)
    padded = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % tile)))
    moved = plgpu.kernel(
        partial(_exchange_kernel, axis_name, tile),
        out_type=jax.ShapeDtypeStruct(padded.shape, padded.dtype),
        grid=(blocks,),
        grid_names=("blocks",),
        scratch_types=[plgpu.SemaphoreType.REGULAR] * 2,
    )(padded)
    return moved[:, : flat.shape[1]].reshape(parts.shape)


def ring(q: Array, kv: Array, axis_name: AxisName, scale: float, blocks: Blocks) -> Partial:
    """As `Puts.ring`."""
    batch, length, heads, _ = q.shape
    steps = lax.axis_size(axis_name)
    out, lse, _ = plgpu.kernel(
        partial(_ring_kernel, axis_name, blocks, scale),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
            jax.ShapeDtypeStruct((2, *kv.shape), kv.dtype),
        ],
        grid=(blocks.all,),
        grid_names=("blocks",),
        scratch_types=[plgpu.SemaphoreType.REGULAR, *[plgpu.SemaphoreType.REGULAR((steps,))] * 2],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, kv)
    return Partial(out, lse.swapaxes(1, 2))


def _enter(axis_name: AxisName, peers: list[Any], entered) -> None:
    """Wait until the peers have entered the kernel, and their buffers are the kernel's."""

    @pl.when(lax.axis_index("blocks") == 0)
    def _signal():
        for peer in peers:
            pl.semaphore_signal(entered, device_id=device_id(axis_name, peer))

    pl.semaphore_wait(entered, len(peers), decrement=False)


def _exchange_kernel(axis_name: AxisName, tile: int, parts_ref, out_ref, entered, arrived) -> None:
    """Put the part for each peer where it belongs there; done when as many have come."""
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    blocks = lax.axis_size("blocks")
    peers = [lax.rem(here + k, size) for k in range(1, size)]
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=_VECTOR_BYTES // parts_ref.dtype.itemsize)

    def copy(peer: Any, target) -> None:
        @plgpu.nd_loop((parts_ref.shape[1] // tile,), collective_axes="blocks")
        def _copy(loop):
            rows = pl.ds(loop.index[0] * tile, tile)
            target[here, rows] = plgpu.load(parts_ref, (peer, rows), layout=layout)

    _enter(axis_name, peers, entered)
    for peer in peers:
        copy(peer, plgpu.remote_ref(out_ref, device_id(axis_name, peer)))
        pl.semaphore_signal(arrived, device_id=device_id(axis_name, peer))
    copy(here, out_ref)
    pl.semaphore_wait(arrived, len(peers) * blocks, decrement=False)


def _ring_kernel(
    axis_name: AxisName,
    blocks: Blocks,
    scale: float,
    q_ref,
    kv_ref,
    out_ref,
    lse_ref,
    slots_ref,
    entered,
    arrived,
    room,
) -> None:
    """Ring attention, see `_one_sided_order`: some blocks put, the others attend, and wait for the same keys.

    For each step `arrived` counts the blocks that have put their share, and `room` those here that need the step's keys
    no more. One number for all steps would not do: a fast block may be a step ahead of a slow one.
    """
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    following, before = (lax.rem(here + k, size) for k in (1, size - 1))
    _enter(axis_name, [following, before], entered)

    def keys_of(step: int):
        slot = slot_at_hand(step)
        if slot is None:
            return kv_ref
        pl.semaphore_wait(arrived.at[step - 1], blocks.put, decrement=False)
        return slots_ref.at[slot]

    def give_room(step: int) -> None:
        if gives_room(step, size):
            pl.semaphore_signal(room.at[step], device_id=device_id(axis_name, before))

    block = lax.axis_index("blocks")

    @pl.when(block < blocks.put)
    def _put():
        for step in range(size):
            if not puts_keys(step, size):
                break
            keys = keys_of(step)
            if needs_room(step):
                pl.semaphore_wait(room.at[step - 1], blocks.all, decrement=False)
            there = plgpu.remote_ref(slots_ref.at[slot_of_arrival(step)], device_id(axis_name, following))
            _put_keys(keys, there, block, blocks.put)
            pl.semaphore_signal(arrived.at[step], device_id=device_id(axis_name, following))
            give_room(step)

    @pl.when(block >= blocks.put)
    def _attend():
        attention = Attention(scale, block - blocks.put, blocks.attend)
        for step in range(size):
            attend_tiles(attention, q_ref, keys_of(step), Partial(out_ref, lse_ref), is_first=step == 0)
            give_room(step)


def _put_keys(keys, there, block: Any, blocks: int) -> None:
    """A block's share, through shared memory: what attention reads by the copy engine must be written by it."""
    parts, batch, length, heads, dim = keys.shape
    row_bytes = heads * dim * keys.dtype.itemsize
    rows = next(n for n in (64, 32, 16, 8, 4, 2, 1) if n == 1 or n * row_bytes <= _BOX_BYTES)
    boxes = parts * batch * (length // rows)

    def body(box_ref, arrived):
        @pl.loop(0, pl.cdiv(boxes - block, blocks))
        def _box(i):
            box = block + i * blocks
            rest, start = lax.div(box, length // rows), lax.rem(box, length // rows) * rows
            place = lax.div(rest, batch), lax.rem(rest, batch), pl.ds(start, rows)
            plgpu.copy_gmem_to_smem(keys.at[place], box_ref, arrived)
            plgpu.barrier_wait(arrived)
            plgpu.copy_smem_to_gmem(box_ref, there.at[place])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    pl.run_scoped(body, plgpu.SMEM((rows, heads, dim), keys.dtype), plgpu.Barrier())
