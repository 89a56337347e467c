"""Attention over rows grouped by segment, at a cost of the sum of squared segment lengths.

Rows are (token, head) pairs of one head each; a segment is one head of one sequence, its rows contiguous.
Rows are cut in blocks of a static size, and each query block visits only the key blocks that hold its
segments: a range given as data, so one program runs any packing. Nothing of size rows x rows exists.

The work is the argument `kernel`: plain JAX here, Triton on NVIDIA GPUs, or one of your own with the same contract.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from parallel._check import static_scale
from parallel._packed_segments import PackedKernel, PackedOutput, PackedSegments
from parallel._pallas_attention import PallasKernel, kernel_tiles
from parallel._varying import varying_like


@dataclass(frozen=True, slots=True)
class XlaKernel:
    """Packed attention in plain JAX: a scan over query blocks, and in it a loop over the block's range of key blocks.

    Runs on any backend. Statistics and accumulators are float32; products take the inputs' dtype.

    Blocks are shared by segments, so their products meet rows of other segments with weight 0, and 0 * NaN is NaN.
    Rows that are not finite therefore enter products over rows as zeros, and mark their own segment's logits (forward)
    or weights (backward) with NaN instead.
    """

    def forward(self, q: Array, k: Array, v: Array, segments: PackedSegments, scale: float) -> PackedOutput:
        q_blocks, k_blocks, v_blocks, ids = _blocked(q, k, v, segments)
        block, dim = q_blocks.shape[1:]
        bad_values = _not_finite(v_blocks)
        zero = varying_like(jnp.zeros(block, jnp.float32), q, k, v, segments)
        zero_rows = varying_like(jnp.zeros((block, dim), jnp.float32), q, k, v, segments)

        def query_block(_, xs):
            q_b, q_ids, (start, stop) = xs

            def visit(j, carry):
                top, total, acc = carry
                k_b = _replace(bad_values[j], k_blocks[j], jnp.nan)
                mask = q_ids[:, None] == ids.keys[j][None, :]
                logits = jnp.where(mask, _logits(q_b, k_b, scale), -jnp.inf)
                new_top = jnp.maximum(top, logits.max(axis=1))
                # A row with nothing to attend yet has top = -inf; subtract 0 there instead of making NaN.
                shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
                weights = jnp.exp(logits - shift[:, None])
                keep = jnp.exp(top - shift)
                total = total * keep + weights.sum(axis=1)
                v_b = _replace(bad_values[j], v_blocks[j], 0.0)
                return new_top, total, acc * keep[:, None] + _dot(weights.astype(v.dtype), v_b)

            top, total, acc = lax.fori_loop(start, stop, visit, (zero - jnp.inf, zero, zero_rows))
            real = (total != 0) & (q_ids > 0)  # a NaN total is an answer too
            out = jnp.where(real[:, None], acc / jnp.where(real, total, 1.0)[:, None], 0.0)
            return None, (out.astype(q.dtype), jnp.where(real, top + jnp.log(total), -jnp.inf))

        _, (out, lse) = lax.scan(query_block, None, (q_blocks, ids.queries, segments.key_blocks))
        return PackedOutput(out.reshape(q.shape), lse.reshape(-1))

    def backward(
        self,
        inputs: tuple[Array, Array, Array],
        saved: PackedOutput,
        cotangent: PackedOutput,
        segments: PackedSegments,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        q, k, v = inputs
        q_blocks, k_blocks, v_blocks, ids = _blocked(q, k, v, segments)
        d_out = cotangent.out.reshape(q_blocks.shape)
        # d logits = weights * (d_out . v - shift), shift = d_out . out - d lse: one number a row.
        shift = jnp.einsum("rd,rd->r", cotangent.out, saved.out, preferred_element_type=jnp.float32)
        shift = (shift - cotangent.lse).reshape(ids.queries.shape)
        bad_cotangent = _not_finite(d_out) | ~jnp.isfinite(shift)
        lse = jnp.where(jnp.isneginf(saved.lse), jnp.inf, saved.lse).reshape(ids.queries.shape)
        lse = jnp.where(bad_cotangent, jnp.nan, lse)
        shift = jnp.where(bad_cotangent, 0.0, shift)
        bad_keys = _not_finite(k_blocks) | _not_finite(v_blocks)

        def zeros(shape):
            return varying_like(jnp.zeros(shape, jnp.float32), inputs, saved, cotangent, segments)

        def query_block(carry, xs):
            q_b, q_ids, do_b, shift_b, lse_b, (start, stop) = xs
            q_b, do_b = _replace(_not_finite(q_b), q_b, 0.0), _replace(_not_finite(do_b), do_b, 0.0)

            def visit(j, carry):
                dq_b, dk, dv = carry
                k_b, v_b = (_replace(bad_keys[j], x[j], 0.0) for x in (k_blocks, v_blocks))
                mask = q_ids[:, None] == ids.keys[j][None, :]
                # No logit exceeds lse but by rounding, which is large where logits are.
                log_weights = jnp.minimum(_logits(q_b, k_b, scale) - lse_b[:, None], 0.0)
                weights = jnp.where(mask, jnp.exp(log_weights), 0.0)
                # Masked, since zero times what a huge value of another sequence overflows to is not zero.
                d_logits = jnp.where(mask, weights * (_dot(do_b, v_b.T) - shift_b[:, None]) * scale, 0.0)
                d_logits = d_logits.astype(q.dtype)
                dv = dv.at[j].add(_dot(weights.astype(q.dtype).T, do_b))
                dk = dk.at[j].add(_dot(d_logits.T, q_b))
                return dq_b + _dot(d_logits, k_b), dk, dv

            dq_b, dk, dv = lax.fori_loop(start, stop, visit, (zeros(q_b.shape), *carry))
            return (dk, dv), dq_b.astype(q.dtype)

        blocks = q_blocks, ids.queries, d_out, shift, lse, segments.key_blocks
        (dk, dv), dq = lax.scan(query_block, (zeros(k_blocks.shape), zeros(v_blocks.shape)), blocks)
        return dq.reshape(q.shape), dk.reshape(k.shape).astype(k.dtype), dv.reshape(v.shape).astype(v.dtype)


class _Ids(NamedTuple):
    queries: Array
    keys: Array


def _not_finite(rows: Array) -> Array:
    return ~jnp.isfinite(rows).all(-1)


def _replace(bad: Array, rows: Array, value: float) -> Array:
    return jnp.where(bad[:, None], jnp.asarray(value, rows.dtype), rows)


def _dot(a: Array, b: Array) -> Array:
    return lax.dot(a, b, preferred_element_type=jnp.float32)


def _logits(q_b: Array, k_b: Array, scale: float) -> Array:
    return _dot(q_b, k_b.T) * scale


def _blocked(q, k, v, segments: PackedSegments):
    """Rows as (blocks, block, d). Padding queries get an id that no key has."""
    q_ids = segments.query_ids.reshape(segments.key_blocks.shape[0], -1)
    k_ids = segments.key_ids.reshape(segments.query_blocks.shape[0], -1)
    ids = _Ids(jnp.where(q_ids > 0, q_ids, -1), jnp.maximum(k_ids, 0))
    k_shape = (*k_ids.shape, k.shape[-1])
    return q.reshape(*q_ids.shape, q.shape[-1]), k.reshape(k_shape), v.reshape(k_shape), ids


@dataclass(frozen=True, slots=True)
class _PlatformKernel:
    """The kernel of the platform that the program is compiled for; the one place where that is chosen.

    Triton on CUDA for rows that `kernel_tiles` knows, plain JAX for other rows and on other platforms.
    """

    def forward(self, q: Array, k: Array, v: Array, segments: PackedSegments, scale: float) -> PackedOutput:
        xla, pallas = (partial(kernel.forward, scale=scale) for kernel in (XlaKernel(), PallasKernel()))
        if kernel_tiles(q, k, v, scale) is None:
            return xla(q, k, v, segments)
        return lax.platform_dependent(q, k, v, segments, cuda=pallas, default=xla)

    def backward(
        self,
        inputs: tuple[Array, Array, Array],
        saved: PackedOutput,
        cotangent: PackedOutput,
        segments: PackedSegments,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        xla, pallas = (partial(kernel.backward, scale=scale) for kernel in (XlaKernel(), PallasKernel()))
        args = inputs, saved, cotangent, segments
        if kernel_tiles(*inputs, scale) is None:
            return xla(*args)
        return lax.platform_dependent(*args, cuda=pallas, default=xla)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _packed(kernel: PackedKernel, scale: float, segments: PackedSegments, q, k, v) -> PackedOutput:
    return kernel.forward(q, k, v, segments, scale)


def _packed_fwd(kernel, scale, segments, q, k, v):
    result = _packed(
        kernel, scale, segments, q, k, v
    )  # not the kernel, which an outer derivative would enter
    return result, (segments, (q, k, v), result)


def _packed_bwd(kernel, scale, saved, cotangent):
    segments, inputs, result = saved
    return None, *_gradients(kernel, scale, inputs, result, cotangent, segments)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(kernel, scale, inputs, result, cotangent, segments):
    return kernel.backward(inputs, result, cotangent, segments, scale)


@_gradients.defjvp
def _refuse_second_derivatives(*_):
    raise NotImplementedError(
        "packed_attention: first derivatives only; got a derivative of its gradient. Write the attention in plain JAX."
    )


_packed.defvjp(_packed_fwd, _packed_bwd)


def packed_attention(
    q: Float[Array, "rows_q d"],
    k: Float[Array, "rows_k d"],
    v: Float[Array, "rows_k d"],
    segments: PackedSegments,
    *,
    scale: float | None = None,
    kernel: PackedKernel | None = None,
) -> PackedOutput:
    """Softmax attention of every query row over the key rows of its segment.

    Per device, no communication; computes on the block pairs that `segments` lists and keeps O(rows) memory, in the
    gradient too (custom VJP that recomputes the weights from `lse`). Both outputs are differentiable, once and in
    reverse mode.

    Args:
        q, k, v: rows of one head each; float32 or bfloat16.
        segments: segment ids and block ranges. Every key row of a query's segment must lie in the query block's range.
        scale: factor on the logits, a static number; d ** -0.5 by default.
        kernel: the computation; by default Triton on CUDA for one dtype, d of 64 or 128 and a positive scale, and plain
            JAX for all else.

    Returns:
        Output rows (zero where a query attends to nothing) and float32 log-sum-exp.

    Raises:
        TypeError: for rows that are neither float32 nor bfloat16, ids or blocks that are no signed integers, or a
            scale that is traced or no number.
        ValueError: if rows, ids and blocks disagree, or float32 cannot hold the scale.
        NotImplementedError: for a second derivative.
    """
    _check_rows(q, k, v)
    q, k, v, segments = jax.tree.map(jnp.asarray, (q, k, v, segments))  # NumPy's take no traced index
    _check_segments(q, k, segments)
    scale = static_scale("packed_attention", scale, q.shape[-1])
    return _packed(kernel or _PlatformKernel(), scale, segments, q, k, v)


def _check_rows(q: Any, k: Any, v: Any) -> None:
    if not {q.dtype, k.dtype, v.dtype} <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}:
        raise TypeError(
            "packed_attention: q, k and v must be float32 or bfloat16; got"
            f" {q.dtype}, {k.dtype} and {v.dtype}. Cast them."
        )
    if q.ndim != 2 or q.shape[1:] != k.shape[1:] or k.shape != v.shape:
        raise ValueError(
            "packed_attention: q, k and v are (rows, d) of one d, v with the rows of k; got"
            f" {q.shape}, {k.shape} and {v.shape}. A row is one token of one head."
        )


def _check_segments(q: Array, k: Array, segments: PackedSegments) -> None:
    integers = jax.tree.leaves(segments)
    if not all(jnp.issubdtype(x.dtype, jnp.signedinteger) for x in integers):  # bounds are subtracted
        raise TypeError(
            "packed_attention: segment ids and blocks must be signed integers; got"
            f" {', '.join(x.dtype.name for x in integers)}. Use int32."
        )
    for name, rows, ids, blocks in (
        ("q", q, segments.query_ids, segments.key_blocks),
        ("k", k, segments.key_ids, segments.query_blocks),
    ):
        if ids.shape != rows.shape[:1] or not blocks.shape[0] or rows.shape[0] % blocks.shape[0]:
            raise ValueError(
                f"packed_attention: {name} has one id a row and whole blocks; got rows={rows.shape[0]},"
                f" ids={ids.shape[0]}, blocks={blocks.shape[0]}. Pad the rows to a multiple of the block size."
            )
        if blocks.shape[1:] != (2,):
            raise ValueError(
                f"packed_attention: ranges of blocks have shape (blocks, 2); got {blocks.shape} for {name}."
                " Each is the first block and the one after the last."
            )
