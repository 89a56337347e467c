"""From one vector per sequence to one per row, with a gradient that is exact and repeatable.

The gradient of a gather is a sum over the rows of each sequence. Left to autodiff it is a scatter-add in the
table's dtype: in bfloat16 the sum of a few thousand rows stops growing (measured: off by tens where terms are
of order one), and on GPUs its order, hence its last bits, changes from run to run. Two other forms add in
float32: a segment sum, and a product with the one-hot matrix of segment ids. Forward and backward of a norm,
modulate, gate on 2 CPU cores in float32, in milliseconds:

    rows x width, sequences   scatter-add   segment sum   one-hot
    2048 x 256, 32                   15.3          12.9       8.6
    4096 x 128, 64                   10.8           8.1      10.2
    4096 x 256, 256                  35.5          26.5      39.6
    8192 x 384, 64                   96.2          75.9      99.6

So the CPU takes the segment sum. Accelerators take the one-hot product: it is deterministic, runs on the
matrix units, and costs 2 n S d FLOP per vector where a block costs 24 n d^2: nothing for S well under d. (That
choice is by count and by what the compiled program contains; it has not been timed on a GPU.)
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["rows_of_sequences", "sums_of_sequences"]


def _gather(table: Array, segment_ids: Array) -> Array:
    with_padding = jnp.concatenate([jnp.zeros((1, table.shape[1]), table.dtype), table])
    return jnp.take(with_padding, segment_ids, axis=0, mode="clip")


def _one_hot_sum(rows: Array, segment_ids: Array, num_sequences: int) -> Array:
    ids = jnp.arange(1, num_sequences + 1, dtype=segment_ids.dtype)
    one_hot = (segment_ids[None, :] == ids[:, None]).astype(rows.dtype)
    # HIGHEST keeps float32 rows out of TF32; bfloat16 products with 0 and 1 are exact as they are.
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.matmul(one_hot, rows, precision=precision, preferred_element_type=jnp.float32)


def _segment_sum(rows: Array, segment_ids: Array, num_sequences: int) -> Array:
    sums = jax.ops.segment_sum(rows.astype(jnp.float32), segment_ids, num_segments=num_sequences + 1)
    return sums[1:]


def _sum(rows: Array, segment_ids: Array, num_sequences: int) -> Array:
    return jax.lax.platform_dependent(
        rows,
        segment_ids,
        cpu=partial(_segment_sum, num_sequences=num_sequences),
        default=partial(_one_hot_sum, num_sequences=num_sequences),
    )


def _varying_axes(x: Array) -> frozenset[str]:
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # its name before jax 0.10.2
        return aval.vma
    return aval.manual_axis_type.varying


def _vary_like(x: Array, other: Array) -> Array:
    """Marks x as varying over the mesh axes over which `other` does.

    Inside shard_map a table may be the same on all devices while segment ids differ. A custom gradient must
    have the type of its input; with this mark, which autodiff transposes to the sum over devices, it has.
    """
    missing = tuple(sorted(_varying_axes(other) - _varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def rows_of_sequences(table: Float[Array, "s d"], segment_ids: Int[Array, " n"]) -> Float[Array, "n d"]:
    """Row i of the result is `table[segment_ids[i] - 1]`, and zero where `segment_ids[i]` is 0 (padding).

    Args:
        table: one vector per sequence.
        segment_ids: sequence of each row plus one, 0 = padding, at most S.

    Returns:
        One vector per row, in the table's dtype. The gradient is summed in float32.
    """
    return _rows(_vary_like(table, segment_ids), _vary_like(segment_ids, table))


@jax.custom_vjp
def _rows(table: Array, segment_ids: Array) -> Array:
    return _gather(table, segment_ids)


def _rows_forward(table: Array, segment_ids: Array) -> tuple[Array, tuple[Array, Array]]:
    # An array without elements carries the table's static length to the backward pass.
    return _gather(table, segment_ids), (segment_ids, jnp.zeros((table.shape[0], 0)))


def _rows_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    segment_ids, length = residuals
    return _sum(g, segment_ids, length.shape[0]).astype(g.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def sums_of_sequences(
    rows: Float[Array, "n d"], segment_ids: Int[Array, " n"], num_sequences: int
) -> Float[Array, "s d"]:
    """Adds the rows of each sequence in float32; the transpose of `rows_of_sequences`.

    Args:
        rows: one vector per row; what is in padding rows must be finite, and is left out.
        segment_ids: sequence of each row plus one, 0 = padding, at most S.
        num_sequences: S.

    Returns:
        One float32 sum per sequence, zero for a sequence without rows.
    """
    return _sums(_vary_like(rows, segment_ids), _vary_like(segment_ids, rows), num_sequences)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sums(rows: Array, segment_ids: Array, num_sequences: int) -> Array:
    return _sum(rows, segment_ids, num_sequences)


def _sums_forward(rows: Array, segment_ids: Array, num_sequences: int) -> tuple[Array, tuple[Array, Array]]:
    # An array without elements carries the dtype to the backward pass.
    return _sum(rows, segment_ids, num_sequences), (segment_ids, jnp.zeros((0,), rows.dtype))


def _sums_backward(num_sequences: int, residuals: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    segment_ids, like = residuals
    return _gather(g, segment_ids).astype(like.dtype), None


_sums.defvjp(_sums_forward, _sums_backward)
