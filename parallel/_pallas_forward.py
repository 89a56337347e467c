"""Forward pass of packed attention as one Triton kernel: a program per query tile, a loop over its key tiles."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from parallel._packed_segments import PackedOutput
from parallel._tiles import Tiles
from parallel._varying import varying_like

LOG2_E = math.log2(math.e)


class ForwardRows(NamedTuple):
    """What the kernel reads: any queries, finite keys and values, and marks of what was not finite.

    `k_bias` is 0, or NaN for a key whose k or v was not finite, and `tile_bias` is NaN for a tile of keys that has one.
    """

    q: Float[Array, "rows_q d"]
    q_ids: Int[Array, " rows_q"]
    k: Float[Array, "rows_k d"]
    v: Float[Array, "rows_k d"]
    k_ids: Int[Array, " rows_k"]
    k_bias: Float[Array, " rows_k"]
    tile_bias: Float[Array, " key_tiles"]


def make_dot(interpret: bool) -> Callable[..., Array]:
    """A product over axis `contract[i]` of each factor, in float32.

    float32 factors are split in three on tensor cores, which loses about as little as a float32 product does: on the
    ordinary cores the kernels would need more registers than there are. Interpreted, the product is exact.
    """
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3

    def dot(a: Array, b: Array, *, contract: tuple[int, int]) -> Array:
        precision = exact if a.dtype == jnp.float32 else None
        dims = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    return dot


def visit_tiles(visits_ref, visit, carry):
    """Run `visit(tile, carry, masked=...)` over a program's tiles: those of one segment, then the others."""
    start, stop, full_start, full_stop = (visits_ref[0, i] for i in range(1, 5))
    carry = lax.fori_loop(full_start, full_stop, partial(visit, masked=False), carry)
    num_full = full_stop - full_start

    def other(i, carry):
        tile = start + i
        return visit(jnp.where(tile < full_start, tile, tile + num_full), carry, masked=True)

    return lax.fori_loop(0, stop - start - num_full, other, carry)


def _forward(visits_ref, *refs, dot, tiles, scale):
    rows_ref, out_ref, lse_ref = ForwardRows(*refs[:-2]), *refs[-2:]
    rows = pl.ds(visits_ref[0, 0] * tiles.queries, tiles.queries)
    q, q_ids = rows_ref.q[rows, :], rows_ref.q_ids[rows]

    def visit(tile, carry, *, masked):
        top, total, acc = carry
        keys = pl.ds(tile * tiles.keys, tiles.keys)
        logits = dot(q, rows_ref.k[keys, :], contract=(1, 1))
        if masked:
            mask = q_ids[:, None] == rows_ref.k_ids[keys][None, :]
            logits = jnp.where(mask, logits + rows_ref.k_bias[keys][None, :], -jnp.inf)
        new_top = jnp.maximum(top, logits.max(axis=1))
        # A row with nothing to attend yet has top = -inf; subtract 0 there instead of making NaN.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        # Subtract before scaling: of huge logits the largest must give 0 exactly, also in a fused multiply-add.
        weights = jnp.exp2((logits - shift[:, None]) * (scale * LOG2_E))
        keep = jnp.exp2((top - shift) * (scale * LOG2_E))
        total = total * keep + weights.sum(axis=1)
        if not masked:
            total = total + rows_ref.tile_bias[tile]
        v = rows_ref.v[keys, :]
        return new_top, total, acc * keep[:, None] + dot(weights.astype(v.dtype), v, contract=(1, 0))

    zero = jnp.zeros(tiles.queries, jnp.float32)
    start = zero - jnp.inf, zero, jnp.zeros(q.shape, jnp.float32)
    top, total, acc = visit_tiles(visits_ref, visit, start)
    real = (total != 0.0) & (q_ids > 0)  # a NaN total is an answer too
    total = jnp.where(real, total, 1.0)
    out_ref[rows, :] = jnp.where(real[:, None], acc / total[:, None], 0.0).astype(out_ref.dtype)
    lse_ref[rows] = jnp.where(real, top * scale + jnp.log(total), -jnp.inf)


def whole_arrays(num_arrays: int) -> list[pl.BlockSpec]:
    """In main memory: programs load the rows that they need."""
    return [pl.BlockSpec(memory_space=pl.ANY)] * num_arrays


def program_visits(visits: Int[Array, "tiles 5"]) -> pl.BlockSpec:
    """Each program's own line."""
    return pl.BlockSpec((1, visits.shape[1]), lambda i: (i, 0))


def compiler_params(tiles: Tiles) -> plgpu.CompilerParams:
    """Of the Triton compiler."""
    return plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def forward_call(
    visits: Int[Array, "tiles 5"], rows: ForwardRows, *, tiles: Tiles, scale: float, interpret: bool
) -> PackedOutput:
    """Output and lse of rows that fill whole tiles; `visits` are by query tiles."""
    lse = rows.q[:, 0].astype(jnp.float32)
    out = [jax.eval_shape(varying_like, x, visits, rows) for x in (rows.q, lse)]
    return PackedOutput(
        *pl.pallas_call(
            partial(_forward, dot=make_dot(interpret), tiles=tiles, scale=scale),
            grid=visits.shape[:1],
            in_specs=[program_visits(visits), *whole_arrays(len(rows))],
            out_specs=whole_arrays(len(out)),
            out_shape=out,
            compiler_params=compiler_params(tiles),
            interpret=interpret,
            name="packed_attention_forward",
        )(visits, *rows)
    )
