"""Packed attention on NVIDIA GPUs: Pallas kernels for Triton, and what is prepared for them in plain JAX."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from parallel._packed_segments import PackedOutput, PackedSegments
from parallel._pallas_backward import GradientRows, grad_keys_call, grad_queries_call
from parallel._pallas_forward import LOG2_E, ForwardRows, forward_call
from parallel._tiles import TILE_TABLE, KernelTiles, tile_visits

_Rows = Array | jax.ShapeDtypeStruct

# Offsets into arrays are signed 32-bit numbers in the kernels; rows are padded to a tile.
_MOST_ELEMENTS = 2**31 - 2**16


def kernel_tiles(
    q: _Rows, k: _Rows, v: _Rows, scale: float, table: Mapping[tuple[int, str], KernelTiles] = TILE_TABLE
) -> KernelTiles | None:
    """The tiles of the GPU kernels for these rows; None where the kernels do not apply.

    They apply to q, k and v of one dtype (float32 or bfloat16) and one head size that the table lists (64 or 128), with
    at least one row and fewer than 2^31 - 2^16 elements each, and to a positive scale.
    """
    if not q.dtype == k.dtype == v.dtype or not q.shape[1] == k.shape[1] == v.shape[1]:
        return None
    if not all(0 < x.size < _MOST_ELEMENTS for x in (q, k, v)) or not scale > 0:
        return None
    return table.get((q.shape[1], q.dtype.name))


@dataclass(frozen=True, slots=True)
class PallasKernel:
    """Packed attention for NVIDIA GPUs, compiled by Triton.

    A program of the forward kernel owns a tile of query rows and visits the tiles of key rows that hold its segments:
    loop bounds are data. Weights are recomputed from `lse` in the gradient; nothing of size rows x rows exists, and
    every output row is written once, in a fixed order. Statistics and accumulators are float32; products take the
    inputs' dtype, and float32 ones are not rounded to less.

    Tiles are shared by segments, so their products meet rows of other segments with weight 0, and 0 * NaN is NaN. What
    is not finite is therefore replaced by zero beforehand, and marks its own segment's logits with NaN instead.

    Attributes:
        tiles: of the three kernels; from the table by default.
        interpret: run the kernels as plain JAX, on any platform: slow, for tests; inside `shard_map` with
            check_vma=False, since JAX's interpreter does not pass its check.
    """

    tiles: KernelTiles | None = None
    interpret: bool = False

    def forward(self, q: Array, k: Array, v: Array, segments: PackedSegments, scale: float) -> PackedOutput:
        """(rows_q, d), (rows_k, d), (rows_k, d) to output and lse.

        Raises:
            NotImplementedError: for rows to which the kernels do not apply.
        """
        tiles = self._tiles(q, k, v, scale).forward
        bad = ~(jnp.isfinite(k) & jnp.isfinite(v)).all(axis=1)
        k_bias = _padded(jnp.where(bad, jnp.nan, jnp.float32(0.0)), tiles.keys)
        rows = ForwardRows(
            q=_padded(q, tiles.queries),
            q_ids=_query_ids(segments, tiles.queries),
            k=_padded(_finite(k), tiles.keys),
            v=_padded(_finite(v), tiles.keys),
            k_ids=_key_ids(segments, tiles.keys),
            k_bias=k_bias,
            tile_bias=k_bias.reshape(-1, tiles.keys).sum(axis=1),
        )
        visits = _by_queries(segments, tiles.queries, tiles.keys)
        out, lse = forward_call(visits, rows, tiles=tiles, scale=scale, interpret=self.interpret)
        return PackedOutput(out[: q.shape[0]], lse[: q.shape[0]])

    def backward(
        self,
        inputs: tuple[Array, Array, Array],
        saved: PackedOutput,
        cotangent: PackedOutput,
        segments: PackedSegments,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        """Gradients of q, k, v in their dtypes.

        Raises:
            NotImplementedError: for rows to which the kernels do not apply.
        """
        q, k, v = inputs
        tiles = self._tiles(q, k, v, scale)
        by_queries, by_keys = tiles.grad_queries, tiles.grad_keys
        rows = _gradient_rows(
            inputs,
            saved,
            cotangent,
            segments,
            query_tile=max(by_queries.queries, by_keys.queries),
            key_tile=max(by_queries.keys, by_keys.keys),
        )
        visits = _by_queries(segments, by_queries.queries, by_queries.keys)
        dq = grad_queries_call(visits, rows, tiles=by_queries, scale=scale, interpret=self.interpret)
        visits = _by_keys(segments, by_keys.queries, by_keys.keys)
        dk, dv = grad_keys_call(visits, rows, tiles=by_keys, scale=scale, interpret=self.interpret)
        return dq[: q.shape[0]], dk[: k.shape[0]], dv[: k.shape[0]]

    def _tiles(self, q: Array, k: Array, v: Array, scale: float) -> KernelTiles:
        table = TILE_TABLE if self.tiles is None else {(q.shape[1], q.dtype.name): self.tiles}
        found = kernel_tiles(q, k, v, scale, table)
        if found is None:
            raise NotImplementedError(
                "PallasKernel: q, k and v have one dtype and one head size of"
                f" {sorted({size for size, _ in TILE_TABLE})}, and scale is positive; got {q.dtype}{list(q.shape)},"
                f" {k.dtype}{list(k.shape)}, {v.dtype}{list(v.shape)} and scale={scale}. Use XlaKernel."
            )
        return found


def _gradient_rows(
    inputs: tuple[Array, Array, Array],
    saved: PackedOutput,
    cotangent: PackedOutput,
    segments: PackedSegments,
    *,
    query_tile: int,
    key_tile: int,
) -> GradientRows:
    """What both kernels read, padded to whole tiles of either."""
    q, k, v = inputs
    # d logits = weights * (d_out . v - shift), shift = d_out . out - d lse: one number a row.
    product = cotangent.out.astype(jnp.float32) * saved.out.astype(jnp.float32)
    shift = product.sum(axis=1) - cotangent.lse
    bad = ~jnp.isfinite(cotangent.out).all(axis=1) | ~jnp.isfinite(shift)
    lse = jnp.where(jnp.isneginf(saved.lse), jnp.inf, saved.lse)
    return GradientRows(
        q=_padded(_finite(q), query_tile),
        d_out=_padded(_finite(cotangent.out), query_tile),
        lse2=_padded(jnp.where(bad, jnp.nan, lse * LOG2_E), query_tile),
        shift=_padded(jnp.where(bad, 0.0, shift), query_tile),
        q_ids=_query_ids(segments, query_tile),
        k=_padded(_finite(k), key_tile),
        v=_padded(_finite(v), key_tile),
        k_ids=_key_ids(segments, key_tile),
    )


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _padded(x: Array, tile: int) -> Array:
    """Rows up to a multiple of `tile`, by zeros: padding ids, finite values."""
    return jnp.pad(x, ((0, -x.shape[0] % tile), *((0, 0),) * (x.ndim - 1)))


def _query_ids(segments: PackedSegments, tile: int) -> Array:
    """Padding queries get an id that no key has."""
    ids = _padded(segments.query_ids, tile)
    return jnp.where(ids > 0, ids, -1)


def _key_ids(segments: PackedSegments, tile: int) -> Array:
    return jnp.maximum(_padded(segments.key_ids, tile), 0)


def _by_queries(segments: PackedSegments, query_tile: int, key_tile: int) -> Array:
    return tile_visits(
        segments.query_ids,
        segments.key_blocks,
        segments.key_ids,
        segments.query_blocks.shape[0],
        own_tile=query_tile,
        other_tile=key_tile,
    )


def _by_keys(segments: PackedSegments, query_tile: int, key_tile: int) -> Array:
    return tile_visits(
        segments.key_ids,
        segments.query_blocks,
        segments.query_ids,
        segments.key_blocks.shape[0],
        own_tile=key_tile,
        other_tile=query_tile,
    )
