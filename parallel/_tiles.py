"""Tiles of the GPU kernels: their sizes, and which tiles each tile visits, as data.

A kernel's tile is a number of rows that suits the hardware; a block is a number of rows that suits the plan. Neither
has to divide the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one kernel cuts its work: rows of a query tile and of a key tile, and how the compiler lays it out.

    Attributes:
        queries, keys: rows of a tile; powers of 2, at least 16.
        num_warps: warps of 32 threads that share a tile.
        num_stages: tiles in flight between main and shared memory.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class KernelTiles:
    """The tiles of the forward kernel, of the one for dq, and of the one for dk and dv."""

    forward: Tiles
    grad_queries: Tiles
    grad_keys: Tiles


# By head size and dtype. Compiled for H100 (227 KiB of shared memory and 65,536 registers a multiprocessor, at most 255
# a thread) none spills a register; `experiments._kernel_report` compiles them all and says what they take.
#
# bfloat16: 128 rows in a tile that stays, since each such tile reads all keys (or queries) of its segment through L2;
# 64 rows in a tile that passes, for fewer registers and less waste at segment ends. Eight warps are two warpgroups,
# each of 64 rows, the least that wgmma takes. For head size 64 two programs of the forward kernel fit a multiprocessor:
# one's exponentials run beside the other's products.
# The forward kernel and the one for dq have equal tiles: a step that recomputes the former makes their visits once.
#
# float32: every factor is three tf32 ones, so tiles are as small as it takes to fit. Under 64 rows wgmma is not used.
TILE_TABLE: Mapping[tuple[int, str], KernelTiles] = MappingProxyType(
    {
        (64, "bfloat16"): KernelTiles(
            forward=Tiles(queries=128, keys=64, num_warps=8, num_stages=3),
            grad_queries=Tiles(queries=128, keys=64, num_warps=8, num_stages=3),
            grad_keys=Tiles(queries=64, keys=128, num_warps=8, num_stages=3),
        ),
        (128, "bfloat16"): KernelTiles(
            forward=Tiles(queries=128, keys=64, num_warps=8, num_stages=3),
            grad_queries=Tiles(queries=128, keys=64, num_warps=8, num_stages=3),
            grad_keys=Tiles(queries=64, keys=128, num_warps=8, num_stages=3),
        ),
        (64, "float32"): KernelTiles(
            forward=Tiles(queries=64, keys=32, num_warps=4, num_stages=2),
            grad_queries=Tiles(queries=64, keys=32, num_warps=4, num_stages=2),
            grad_keys=Tiles(queries=32, keys=32, num_warps=4, num_stages=2),
        ),
        (128, "float32"): KernelTiles(
            forward=Tiles(queries=32, keys=32, num_warps=8, num_stages=2),
            grad_queries=Tiles(queries=32, keys=32, num_warps=8, num_stages=2),
            grad_keys=Tiles(queries=16, keys=16, num_warps=4, num_stages=2),
        ),
    }
)


def tile_visits(
    own_ids: Int[Array, " own_rows"],
    own_blocks: Int[Array, "own_blocks 2"],
    other_ids: Int[Array, " other_rows"],
    num_other_blocks: int,
    *,
    own_tile: int,
    other_tile: int,
) -> Int[Array, "tiles 5"]:
    """Per program of a kernel that owns one tile: which tile, and which of the other side's tiles it visits.

    Integers only: O(rows) work, and one comparison for each pair of tiles.

    Args:
        own_ids, other_ids: segment of each row; at most 0 = padding. The last tile may be cut short.
        own_blocks: for each block of own rows, the half-open range of other blocks that hold its segments.
        num_other_blocks: blocks of the other side.
        own_tile, other_tile: rows of a tile on each side.

    Returns:
        (own tile, start, stop, full_start, full_stop) per program: it visits tiles start .. stop, of which those in
        full_start .. full_stop need no mask, since they and the own tile hold nothing but one and the same segment.
        Longest visits first: what is left at the end of the grid, when the GPU runs dry, is short.
    """
    start, stop = _visited(
        own_ids.shape[0], own_blocks, other_ids.shape[0] // num_other_blocks, own_tile, other_tile
    )
    full_start, full_stop = _full(_only_segment(own_ids, own_tile), _only_segment(other_ids, other_tile))
    full_start = jnp.clip(full_start, start, stop)
    full_stop = jnp.clip(full_stop, full_start, stop)
    order = jnp.argsort(start - stop, stable=True)
    visits = jnp.stack([start, stop, full_start, full_stop], axis=1)[order]
    return jnp.concatenate([order[:, None], visits], axis=1).astype(jnp.int32)


def _visited(
    num_rows: int, blocks: Int[Array, "own_blocks 2"], other_block: int, own_tile: int, other_tile: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """The other tiles that the blocks under each own tile reach; (0, 0) where they reach none."""
    num_blocks = blocks.shape[0]
    block = num_rows // num_blocks
    first_row = np.arange(-(-num_rows // own_tile)) * own_tile
    first = first_row // block
    last = np.minimum((first_row + own_tile - 1) // block, num_blocks - 1)
    under = np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])
    starts, stops = blocks[under, 0], blocks[under, 1]
    some = stops > starts
    start = jnp.where(some, starts, jnp.iinfo(jnp.int32).max).min(axis=1)
    stop = jnp.where(some, stops, 0).max(axis=1)
    start = jnp.minimum(start, stop)
    return start * other_block // other_tile, -(-stop * other_block // other_tile)


def _only_segment(ids: Int[Array, " rows"], tile: int) -> Int[Array, " tiles"]:
    """The segment that all of a tile's rows belong to; 0 where there are several or padding."""
    tiles = jnp.pad(ids, (0, -ids.shape[0] % tile)).reshape(-1, tile)
    least, most = tiles.min(axis=1), tiles.max(axis=1)
    return jnp.where((least == most) & (least > 0), least, 0)


def _full(
    own: Int[Array, " tiles"], other: Int[Array, " other_tiles"]
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """The half-open range of other tiles that hold only the segment that an own tile holds only; else (0, 0).

    A segment's rows are contiguous, so these tiles are too; where they are not, none of them is taken for full.
    """
    same = (own[:, None] == other[None, :]) & (own[:, None] > 0)
    tile = jnp.arange(other.shape[0])[None, :]
    first = jnp.where(same, tile, other.shape[0]).min(axis=1)
    stop = jnp.where(same, tile + 1, 0).max(axis=1)
    whole = stop - first == same.sum(axis=1)
    return jnp.where(whole, first, 0), jnp.where(whole, stop, 0)
