"""Block attention by the packed kernels: the rows of each batch entry and key head are a group of packed rows."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array

from parallel._block_attention import Attended, BlockMask
from parallel._check import implementation, integer
from parallel._online_softmax import Partial
from parallel._packed_attention import XlaKernel
from parallel._packed_segments import PackedKernel, PackedOutput, PackedSegments

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PackedBlockAttention:
    """Block attention by a kernel of `packed_attention`, at the cost of the pairs of row blocks that share a segment.

    Segment ids may lie in any order; a block of queries visits the key blocks from the first to the last whose ids
    can be among its own, so ids in rising order cost least. No causal masks: packed segments know none.

    Attributes:
        kernel: `PallasKernel` on NVIDIA GPUs, or plain JAX.
        block: rows of a block; the kernels' tiles should divide it.
    """

    kernel: PackedKernel = field(default_factory=XlaKernel)
    block: int = 128

    def __post_init__(self) -> None:
        integer("PackedBlockAttention", "block", self.block, least=1, advice="Leave it out for the default.")
        rule, advice = "kernel is an object with forward and backward", "Give PallasKernel() or XlaKernel()."
        implementation("PackedBlockAttention", rule, self.kernel, PackedKernel, advice=advice)

    def forward(self, q: Array, k: Array, v: Array, mask: BlockMask, scale: float) -> Partial:
        """As `BlockAttention.forward`.

        Raises:
            NotImplementedError: for positions.
        """
        self._check(mask)
        segments = _segments(q.shape, k.shape, mask, self.block)
        rows = self._query_rows(q, k), self._key_rows(k), self._key_rows(v)
        out, lse = self.kernel.forward(*rows, segments, scale)
        return Partial(
            _query_tokens(out, q.shape, k.shape), _query_tokens(lse[:, None], q.shape, k.shape)[..., 0]
        )

    def backward(
        self, q: Array, k: Array, v: Array, whole: Attended, mask: BlockMask, scale: float
    ) -> tuple[Array, Array, Array]:
        """As `BlockAttention.backward`.

        Raises:
            NotImplementedError: for positions.
        """
        self._check(mask)
        segments = _segments(q.shape, k.shape, mask, self.block)
        rows = self._query_rows(q, k), self._key_rows(k), self._key_rows(v)
        lse_rows = self._query_rows(whole.lse[..., None], k)[:, 0]
        saved = PackedOutput(self._query_rows(whole.out.astype(q.dtype), k), lse_rows)
        cotangent = PackedOutput(self._query_rows(whole.d_out.astype(q.dtype), k), jnp.zeros_like(lse_rows))
        dq, dk, dv = self.kernel.backward(rows, saved, cotangent, segments, scale)
        return _query_tokens(dq, q.shape, k.shape), _key_tokens(dk, k.shape), _key_tokens(dv, k.shape)

    def row_shapes(self, *blocks: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of the packed rows of q, k and v."""
        rows = jax.eval_shape(lambda q, *kv: (self._query_rows(q, kv[0]), *map(self._key_rows, kv)), *blocks)
        return tuple(rows)

    def _check(self, mask: BlockMask) -> None:
        if mask.q_positions is not None:
            raise NotImplementedError(
                "PackedBlockAttention: packed kernels have no causal masks; got positions. Use XlaBlockAttention."
            )

    def _query_rows(self, x: Array, k: Array) -> Array:
        """(b, l, h, d) to rows: (b, h_kv) groups, in each h / h_kv heads of l tokens, filled up to whole blocks."""
        b, length, heads, dim = x.shape
        kv_heads = k.shape[2]
        grouped = x.reshape(b, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
        return _filled(grouped.reshape(b * kv_heads, -1, dim), self.block).reshape(-1, dim)

    def _key_rows(self, x: Array) -> Array:
        b, length, heads, dim = x.shape
        grouped = x.transpose(0, 2, 1, 3).reshape(b * heads, length, dim)
        return _filled(grouped, self.block).reshape(-1, dim)


def _filled(x: Array, block: int) -> Array:
    """(groups, rows, ...) with rows up to a multiple of the block, by zeros: padding ids."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2)))


def _query_tokens(rows: Array, shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> Array:
    b, length, heads, _ = shape
    kv_heads, dim = kv_shape[2], rows.shape[-1]
    group = heads // kv_heads
    rows = rows.reshape(b * kv_heads, -1, dim)[:, : group * length]
    return (
        rows.reshape(b, kv_heads, group, length, dim).transpose(0, 3, 1, 2, 4).reshape(b, length, heads, dim)
    )


def _key_tokens(rows: Array, shape: tuple[int, ...]) -> Array:
    b, length, heads, dim = shape
    rows = rows.reshape(b * heads, -1, dim)[:, :length]
    return rows.reshape(b, heads, length, dim).transpose(0, 2, 1, 3)


def _segments(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], mask: BlockMask, block: int
) -> PackedSegments:
    """Ids of a batch entry, for each of its key heads, and the ranges of blocks of the own group only."""
    (b, q_len, heads, _), (kv_len, kv_heads) = q_shape, kv_shape[1:3]
    q_ids = jnp.ones((b, q_len), jnp.int32) if mask.q_ids is None else mask.q_ids
    kv_ids = jnp.ones((b, kv_len), jnp.int32) if mask.kv_ids is None else mask.kv_ids
    q_ids = _filled(jnp.tile(q_ids, (1, heads // kv_heads)), block)
    kv_ids = _filled(kv_ids, block)
    # Ids that differ between groups let a kernel know blocks that need no mask. The ranges alone keep groups apart, so
    # where ids are too large to be told apart in 32 bits, groups may share them.
    largest = jnp.maximum(q_ids.max(), kv_ids.max())
    stride = jnp.where(largest < _INT32_MAX // (b * kv_heads) - 1, largest, 0)
    return PackedSegments(
        query_ids=_per_group(q_ids, stride, kv_heads),
        key_ids=_per_group(kv_ids, stride, kv_heads),
        key_blocks=_ranges(q_ids, kv_ids, kv_heads, block),
        query_blocks=_ranges(kv_ids, q_ids, kv_heads, block),
    )


def _per_group(ids: Array, stride: Array, kv_heads: int) -> Array:
    b = ids.shape[0]
    group = jnp.arange(b * kv_heads, dtype=jnp.int32).reshape(b, kv_heads, 1)
    return jnp.where(ids[:, None] > 0, ids[:, None] + group * stride, 0).reshape(-1)


def _ranges(own: Array, other: Array, kv_heads: int, block: int) -> Array:
    """For each own block, the half-open range of other blocks in its group whose ids overlap its ids."""
    b = own.shape[0]
    (low, high), (other_low, other_high) = _bounds(own, block), _bounds(other, block)
    blocks = other_low.shape[1]
    # A block of padding alone has low > high: it overlaps nothing.
    overlap = (low[:, :, None] <= other_high[:, None, :]) & (other_low[:, None, :] <= high[:, :, None])
    overlap &= (low <= high)[:, :, None] & (other_low <= other_high)[:, None, :]
    place = jnp.arange(blocks, dtype=jnp.int32)[None, None, :]
    start = jnp.where(overlap, place, _INT32_MAX).min(-1)
    stop = jnp.where(overlap, place + 1, 0).max(-1)
    first = (jnp.arange(b * kv_heads, dtype=jnp.int32) * blocks).reshape(b, kv_heads, 1, 1)
    some = (stop > 0)[:, None, :, None]
    ranges = jnp.where(some, jnp.stack([start, stop], -1)[:, None] + first, 0)
    return ranges.reshape(math.prod(ranges.shape[:3]), 2).astype(jnp.int32)


def _bounds(ids: Array, block: int) -> tuple[Array, Array]:
    """(b, blocks) least and largest id of a block's rows that are no padding."""
    blocks = ids.reshape(ids.shape[0], -1, block)
    real = blocks > 0
    return jnp.where(real, blocks, _INT32_MAX).min(-1), jnp.where(real, blocks, 0).max(-1)
