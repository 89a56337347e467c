"""Block attention in plain JAX: a scan over blocks of keys, on any backend."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._block_attention import Attended, BlockMask
from parallel._check import integer
from parallel._online_softmax import Partial, row_products


class _KeyBlocks(NamedTuple):
    """Keys cut in blocks, along the leading axis.

    Attributes:
        k, v: (blocks, b, h_kv, block, d).
        places: (blocks, block), number of each key; those from l_k on fill the last block.
        ids, positions: as in `BlockMask`, (blocks, b, block) and (blocks, block).
    """

    k: Array
    v: Array
    places: Array
    ids: Array | None
    positions: Array | None


@dataclass(frozen=True, slots=True)
class XlaBlockAttention:
    """Block attention in plain JAX. Statistics, accumulators and results are float32; products take the inputs' dtype.

    Keeps O(l) memory, and one (b, h, l_q, block) array of logits at a time.

    Where a mask divides rows, products over rows meet rows of other segments with weight 0, and 0 * NaN is NaN. Rows
    that are not finite therefore enter such products as zeros, and mark the logits or weights of their own segment.

    Attributes:
        block: keys in a block.
    """

    block: int = 512

    def __post_init__(self) -> None:
        integer("XlaBlockAttention", "block", self.block, least=1, advice="Leave it out for the default.")

    def forward(self, q: Array, k: Array, v: Array, mask: BlockMask, scale: float) -> Partial:
        """As `BlockAttention.forward`."""
        heads = _by_key_head(q, k.shape[2])

        def visit(carry, keys):
            top, total, acc = carry
            keys, bad = _guarded(keys, mask)
            logits = _limited(_logits(heads, keys.k, scale), bad, mask, keys, k.shape[1])
            new_top = jnp.maximum(top, logits.max(axis=-1))
            # A row with nothing to attend yet has top = -inf; subtract 0 there instead of making NaN.
            shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
            weights = jnp.exp(logits - shift[..., None])
            keep = jnp.exp(top - shift)
            total = total * keep + weights.sum(axis=-1)
            acc = acc * keep[..., None] + _dot("bkgqc,bkcd->bkgqd", weights.astype(v.dtype), keys.v)
            return (new_top, total, acc), None

        zeros = jnp.zeros_like(heads, dtype=jnp.float32)
        carry = zeros[..., 0] - jnp.inf, zeros[..., 0], zeros
        (top, total, acc), _ = lax.scan(visit, carry, _key_blocks(k, v, mask, self.block))
        some = total != 0  # a NaN total is an answer too
        total = jnp.where(some, total, 1.0)
        out = jnp.where(some[..., None], acc / total[..., None], 0.0)
        lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
        return Partial(_by_row(out), _by_row(lse[..., None])[..., 0])

    def backward(
        self, q: Array, k: Array, v: Array, whole: Attended, mask: BlockMask, scale: float
    ) -> tuple[Array, Array, Array]:
        """As `BlockAttention.backward`."""
        out, lse, d_out = whole
        shift = row_products(d_out, out)
        lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
        if not mask.allows_all:
            bad = ~jnp.isfinite(d_out).all(-1) | ~jnp.isfinite(shift)
            lse, shift = jnp.where(bad, jnp.nan, lse), jnp.where(bad, 0.0, shift)
            q, d_out = _finite_rows(q), _finite_rows(d_out)
        heads, d_heads = (_by_key_head(x, k.shape[2]) for x in (q, d_out.astype(q.dtype)))
        lse, shift = (_by_key_head(x[..., None], k.shape[2]) for x in (lse, shift))

        def visit(dq, keys):
            keys, bad = _guarded(keys, mask)
            logits = _limited(_logits(heads, keys.k, scale), bad, mask, keys, k.shape[1])
            # No logit exceeds lse but by rounding, which is large where logits are. Off the mask, -inf - NaN is no
            # weight either.
            weights = jnp.where(jnp.isneginf(logits), 0.0, jnp.exp(jnp.minimum(logits - lse, 0.0)))
            d_weights = _dot("bkgqd,bkcd->bkgqc", d_heads, keys.v)
            # Masked, since zero times what a huge value of another segment overflows to is not zero.
            d_logits = jnp.where(jnp.isneginf(logits), 0.0, weights * (d_weights - shift) * scale)
            weights, d_logits = weights.astype(q.dtype), d_logits.astype(q.dtype)
            dk = _dot("bkgqc,bkgqd->bkcd", d_logits, heads)
            dv = _dot("bkgqc,bkgqd->bkcd", weights, d_heads)
            return dq + _dot("bkgqc,bkcd->bkgqd", d_logits, keys.k), (dk, dv)

        dq, (dk, dv) = lax.scan(
            visit, jnp.zeros_like(heads, dtype=jnp.float32), _key_blocks(k, v, mask, self.block)
        )
        return _by_row(dq), _joined(dk, k.shape[1]), _joined(dv, k.shape[1])


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _logits(heads: Array, k: Array, scale: float) -> Array:
    return _dot("bkgqd,bkcd->bkgqc", heads, k) * scale


def _by_key_head(x: Array, kv_heads: int) -> Array:
    """(b, l, h, d) to (b, h_kv, h / h_kv, l, d)."""
    b, length, heads, dim = x.shape
    return x.reshape(b, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def _by_row(x: Array) -> Array:
    """Back."""
    b, kv_heads, group, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, length, kv_heads * group, dim)


def _key_blocks(k: Array, v: Array, mask: BlockMask, block: int) -> _KeyBlocks:
    length = k.shape[1]
    block = max(min(block, length), 1)
    blocks = -(-length // block)
    rows = blocks * block

    def cut(x: Array, axis: int) -> Array:
        """Blocks first; filled up with zeros."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, rows - length)
        shape = (*x.shape[:axis], blocks, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), axis, 0)

    return _KeyBlocks(
        k=cut(k, 1).transpose(0, 1, 3, 2, 4),
        v=cut(v, 1).transpose(0, 1, 3, 2, 4),
        places=jnp.arange(rows, dtype=jnp.int32).reshape(blocks, block),
        ids=None if mask.kv_ids is None else cut(mask.kv_ids, 1),
        positions=None if mask.kv_positions is None else cut(mask.kv_positions, 0),
    )


def _joined(blocks: Array, length: int) -> Array:
    """(blocks, b, h_kv, block, d) to (b, l, h_kv, d)."""
    n, b, heads, block, dim = blocks.shape
    return blocks.transpose(1, 0, 3, 2, 4).reshape(b, n * block, heads, dim)[:, :length]


def _finite_rows(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x).all(-1, keepdims=True), x, jnp.zeros((), x.dtype))


def _guarded(keys: _KeyBlocks, mask: BlockMask) -> tuple[_KeyBlocks, Array | None]:
    """Keys whose rows are all finite, and (b, h_kv, block) which were not; as they are where nothing is masked."""
    if mask.allows_all:
        return keys, None
    bad = ~(jnp.isfinite(keys.k) & jnp.isfinite(keys.v)).all(-1)
    keys = keys._replace(
        **{
            name: jnp.where(bad[..., None], 0.0, x).astype(x.dtype)
            for name, x in (("k", keys.k), ("v", keys.v))
        }
    )
    return keys, bad


def _limited(logits: Array, bad: Array | None, mask: BlockMask, keys: _KeyBlocks, length: int) -> Array:
    """-inf where a query does not attend to a key, NaN where it attends to one that is not finite."""
    if bad is not None:
        logits = jnp.where(bad[:, :, None, None, :], jnp.nan, logits)
    if length % keys.places.shape[-1]:
        logits = jnp.where((keys.places < length)[None, None, None, None, :], logits, -jnp.inf)
    if mask.q_ids is not None and keys.ids is not None:
        same = (mask.q_ids[:, :, None] == keys.ids[:, None, :]) & (mask.q_ids > 0)[:, :, None]
        logits = jnp.where(same[:, None, None], logits, -jnp.inf)
    if mask.q_positions is not None and keys.positions is not None:
        not_behind = mask.q_positions[:, None] >= keys.positions[None, :]
        logits = jnp.where(not_behind[None, None, None], logits, -jnp.inf)
    return logits
