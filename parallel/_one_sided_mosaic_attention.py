"""Attention inside a one-sided kernel for NVIDIA GPUs: a warpgroup a block, tensor cores of Hopper."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from parallel._online_softmax import Partial

# Queries and keys of a tile: rows of a warpgroup's product, and as many keys.
QUERIES = KEYS = 64
_STAGES = 2  # of tiles of keys, of which one is used while the next is on its way
_LOG2_E = math.log2(math.e)


class Attention(NamedTuple):
    """Which tiles of queries a block of the kernel computes.

    Attributes:
        scale: factor on the logits.
        worker: number of the block among those that attend.
        workers: how many there are.
    """

    scale: float
    worker: Any
    workers: int


def attend_tiles(attention: Attention, q_ref, kv_ref, total: Partial, *, is_first: bool) -> None:
    """A block's tiles of queries attend to keys in GPU memory; `total`, there too, is begun or continued.

    Args:
        attention: the block's share.
        q_ref: (b, l_q, h, d).
        kv_ref: (2, b, l_k, h_kv, d).
        total: out (b, l_q, h, d) and lse (b, h, l_q), float32.
        is_first: whether nothing has been attended yet.
    """
    batch, length, heads, dim = q_ref.shape
    tiles = length // QUERIES
    items = batch * heads * tiles

    def body(q_tile, k_tiles, v_tiles, barriers):
        @pl.loop(0, pl.cdiv(items - attention.worker, attention.workers))
        def _item(i):
            item = attention.worker + i * attention.workers
            tile, rest = lax.rem(item, tiles), lax.div(item, tiles)
            head, b = lax.rem(rest, heads), lax.div(rest, heads)
            rows = pl.ds(tile * QUERIES, QUERIES)
            plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_tile, barriers[0])
            plgpu.barrier_wait(barriers[0])
            out, lse = total.out.at[b, rows, head], total.lse.at[b, head, rows]
            kv_head = lax.div(head, heads // kv_ref.shape[3])
            keys = [kv_ref.at[part, b, :, kv_head] for part in range(2)]
            state = _begin(dim) if is_first else _continue(out, lse)
            state = _attend(attention.scale, q_tile, keys, (k_tiles, v_tiles), barriers[1:], state)
            _finish(state, out, lse)

    def tile(*shape: int):
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, q_ref.dtype, transforms=transforms)

    tiles_of_keys = tile(_STAGES, KEYS, dim)
    barriers = (plgpu.Barrier(), plgpu.Barrier(num_barriers=_STAGES), plgpu.Barrier(num_barriers=_STAGES))
    pl.run_scoped(body, tile(QUERIES, dim), tiles_of_keys, tiles_of_keys, barriers)


class _State(NamedTuple):
    """Of an online softmax, in registers: out times total, total, and the largest logit so far, in powers of two."""

    acc: Any
    total: Any
    top: Any


def _of_rows(x: Any, shape: tuple[int, ...]) -> Any:
    return lax.broadcast_in_dim(x, shape, [0])


def _begin(dim: int) -> _State:
    rows = plgpu.Layout.WGMMA.reduce(1)
    return _State(
        plgpu.layout_cast(jnp.zeros((QUERIES, dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), rows),
        plgpu.layout_cast(jnp.full((QUERIES,), -jnp.inf, jnp.float32), rows),
    )


def _continue(out, lse) -> _State:
    """From a result: its out is that of one logit, lse."""
    rows = plgpu.Layout.WGMMA.reduce(1)
    return _State(
        plgpu.load(out, (), layout=plgpu.Layout.WGMMA, optimized=False),
        plgpu.layout_cast(jnp.ones((QUERIES,), jnp.float32), rows),
        plgpu.load(lse, (), layout=rows, optimized=False) * _LOG2_E,
    )


def _finish(state: _State, out, lse) -> None:
    out[...] = state.acc / _of_rows(state.total, state.acc.shape)
    lse[...] = (state.top + jnp.log2(state.total)) * (1 / _LOG2_E)


def _attend(scale: float, q_tile, keys, tiles, barriers, state: _State) -> _State:
    steps = keys[0].shape[0] // KEYS

    def fetch(step: Any) -> None:
        stage = lax.rem(step, jnp.int32(_STAGES))
        for source, target, barrier in zip(keys, tiles, barriers, strict=True):
            plgpu.copy_gmem_to_smem(source.at[pl.ds(step * KEYS, KEYS)], target.at[stage], barrier.at[stage])

    def visit(step: Any, state: _State) -> _State:
        stage = lax.rem(step, jnp.int32(_STAGES))
        # The stage of the next keys is that of the last ones, whose products are done.
        pl.when(step + 1 < steps)(lambda: fetch(step + 1))
        plgpu.barrier_wait(barriers[0].at[stage])

        def products(acc_ref):
            plgpu.wgmma(acc_ref, q_tile, plgpu.transpose_ref(tiles[0].at[stage], (1, 0)))
            return acc_ref[...]

        logits = pl.run_scoped(products, plgpu.ACC((QUERIES, KEYS), jnp.float32)) * (scale * _LOG2_E)
        top = jnp.maximum(state.top, logits.max(axis=1))
        keep = jnp.exp2(state.top - top)
        weights = jnp.exp2(logits - _of_rows(top, logits.shape))
        total = state.total * keep + weights.sum(axis=1)
        acc = state.acc * _of_rows(keep, state.acc.shape)
        plgpu.barrier_wait(barriers[1].at[stage])

        def sums(acc_ref):
            plgpu.wgmma(acc_ref, weights.astype(tiles[1].dtype), tiles[1].at[stage])

        acc = pl.run_state(sums)(plgpu.ACC.init(acc))
        return _State(acc, total, top)

    fetch(jnp.int32(0))
    return lax.fori_loop(0, steps, visit, state)
