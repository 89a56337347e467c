"""Gradients of packed attention as two Triton kernels: one writes dq by query tiles, one dk and dv by key tiles.

Each output row is written by one program, which adds up in a fixed order: no atomics, and the same bits every time.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from parallel._pallas_forward import (
    LOG2_E,
    compiler_params,
    make_dot,
    program_visits,
    visit_tiles,
    whole_arrays,
)
from parallel._tiles import Tiles
from parallel._varying import varying_like


class GradientRows(NamedTuple):
    """What both kernels read: finite rows, and for each query row its log-sum-exp (base 2) and shift.

    `lse2` is +inf where a query attends to nothing and NaN where its gradients are. Weights are exp2(logits2 - lse2),
    and d logits are weights * (d_out . v - shift).
    """

    q: Float[Array, "rows_q d"]
    d_out: Float[Array, "rows_q d"]
    lse2: Float[Array, " rows_q"]
    shift: Float[Array, " rows_q"]
    q_ids: Int[Array, " rows_q"]
    k: Float[Array, "rows_k d"]
    v: Float[Array, "rows_k d"]
    k_ids: Int[Array, " rows_k"]


def _weights(logits, lse2, mask, scale):
    """No logit exceeds its lse but by rounding, which is large where logits are. (`minimum` would drop a NaN here.)"""
    exponents = logits * (scale * LOG2_E) - lse2
    weights = jnp.exp2(jnp.where(exponents > 0.0, 0.0, exponents))
    return weights if mask is None else jnp.where(mask, weights, 0.0)


def _d_logits(weights, d_weights, shift, mask):
    """But for the scale. Masked, since zero times what a huge value of another segment overflows to is not zero."""
    d_logits = weights * (d_weights - shift)
    return d_logits if mask is None else jnp.where(mask, d_logits, 0.0)


def _grad_queries(visits_ref, *refs, dot, tiles, scale):
    rows_ref, dq_ref = GradientRows(*refs[:-1]), refs[-1]
    rows = pl.ds(visits_ref[0, 0] * tiles.queries, tiles.queries)
    q, d_out, q_ids = rows_ref.q[rows, :], rows_ref.d_out[rows, :], rows_ref.q_ids[rows]
    lse2, shift = rows_ref.lse2[rows], rows_ref.shift[rows]

    def visit(tile, dq, *, masked):
        keys = pl.ds(tile * tiles.keys, tiles.keys)
        k = rows_ref.k[keys, :]
        mask = q_ids[:, None] == rows_ref.k_ids[keys][None, :] if masked else None
        weights = _weights(dot(q, k, contract=(1, 1)), lse2[:, None], mask, scale)
        d_weights = dot(d_out, rows_ref.v[keys, :], contract=(1, 1))
        d_logits = _d_logits(weights, d_weights, shift[:, None], mask)
        return dq + dot(d_logits.astype(k.dtype), k, contract=(1, 0))

    dq = visit_tiles(visits_ref, visit, jnp.zeros(q.shape, jnp.float32))
    dq_ref[rows, :] = (dq * scale).astype(dq_ref.dtype)


def _grad_keys(visits_ref, *refs, dot, tiles, scale):
    rows_ref, dk_ref, dv_ref = GradientRows(*refs[:-2]), *refs[-2:]
    keys = pl.ds(visits_ref[0, 0] * tiles.keys, tiles.keys)
    k, v, k_ids = rows_ref.k[keys, :], rows_ref.v[keys, :], rows_ref.k_ids[keys]

    def visit(tile, carry, *, masked):
        dk, dv = carry
        rows = pl.ds(tile * tiles.queries, tiles.queries)
        q, d_out = rows_ref.q[rows, :], rows_ref.d_out[rows, :]
        mask = k_ids[:, None] == rows_ref.q_ids[rows][None, :] if masked else None
        # Keys by queries: what multiplies q and d_out is then the left factor, which may stay in registers.
        weights = _weights(dot(k, q, contract=(1, 1)), rows_ref.lse2[rows][None, :], mask, scale)
        dv = dv + dot(weights.astype(d_out.dtype), d_out, contract=(1, 0))
        d_weights = dot(v, d_out, contract=(1, 1))
        d_logits = _d_logits(weights, d_weights, rows_ref.shift[rows][None, :], mask)
        return dk + dot(d_logits.astype(q.dtype), q, contract=(1, 0)), dv

    zero = jnp.zeros(k.shape, jnp.float32)
    dk, dv = visit_tiles(visits_ref, visit, (zero, zero))
    dk_ref[keys, :] = (dk * scale).astype(dk_ref.dtype)
    dv_ref[keys, :] = dv.astype(dv_ref.dtype)


def grad_queries_call(
    visits: Int[Array, "tiles 5"], rows: GradientRows, *, tiles: Tiles, scale: float, interpret: bool
) -> Float[Array, "rows_q d"]:
    """dq of rows that fill whole tiles; `visits` are by query tiles."""
    return pl.pallas_call(
        partial(_grad_queries, dot=make_dot(interpret), tiles=tiles, scale=scale),
        grid=visits.shape[:1],
        in_specs=[program_visits(visits), *whole_arrays(len(rows))],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.eval_shape(varying_like, rows.q, visits, rows),
        compiler_params=compiler_params(tiles),
        interpret=interpret,
        name="packed_attention_grad_queries",
    )(visits, *rows)


def grad_keys_call(
    visits: Int[Array, "tiles 5"], rows: GradientRows, *, tiles: Tiles, scale: float, interpret: bool
) -> tuple[Float[Array, "rows_k d"], Float[Array, "rows_k d"]]:
    """(dk, dv) of rows that fill whole tiles; `visits` are by key tiles."""
    out = [jax.eval_shape(varying_like, x, visits, *rows) for x in (rows.k, rows.v)]
    dk, dv = pl.pallas_call(
        partial(_grad_keys, dot=make_dot(interpret), tiles=tiles, scale=scale),
        grid=visits.shape[:1],
        in_specs=[program_visits(visits), *whole_arrays(len(rows))],
        out_specs=whole_arrays(len(out)),
        out_shape=out,
        compiler_params=compiler_params(tiles),
        interpret=interpret,
        name="packed_attention_grad_keys",
    )(visits, *rows)
    return dk, dv
