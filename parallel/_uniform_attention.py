"""Attention of batches whose sequences all have one static length: no packing, no segments."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# What cuDNN's flash attention takes on every GPU since Ampere.
_CUDNN_DTYPES = frozenset({jnp.dtype("bfloat16"), jnp.dtype("float16")})
_CUDNN_MOST_HEAD_DIM = 128


def uniform_attention(
    q: Float[Array, "b l_q h d"],
    k: Float[Array, "b l_k h d"],
    v: Float[Array, "b l_k h d"],
    *,
    scale: float | None = None,
) -> Float[Array, "b l_q h d"]:
    """Softmax attention of every query over all keys of its sequence.

    Per device, no communication. On CUDA it is cuDNN's flash attention, O(b l h d) memory, where that applies:
    bfloat16 or float16, and d a multiple of 8 up to 128. Everywhere else it is plain XLA, which keeps (b, h, l_q, l_k)
    weights.
    What is not finite in one sequence does not reach another.

    Args:
        q, k, v: of one dtype; heads of queries and keys are the same.
        scale: factor on the logits; d ** -0.5 by default.

    Returns:
        Output in the queries' dtype.

    Raises:
        TypeError: for rows that are not floating point.
        ValueError: if dtypes differ.
    """
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"uniform_attention: q, k and v are floating point; got {q.dtype}. Cast them.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"uniform_attention: q, k and v have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}. Cast them."
        )
    xla = partial(jax.nn.dot_product_attention, scale=scale, implementation="xla")
    head_dim = q.shape[-1]
    if (
        q.dtype not in _CUDNN_DTYPES
        or head_dim % 8
        or head_dim > _CUDNN_MOST_HEAD_DIM
        or not q.size
        or not k.size
    ):
        return xla(q, k, v)
    return lax.platform_dependent(q, k, v, cuda=partial(_cudnn, scale=scale), default=xla)


def _cudnn(q: Array, k: Array, v: Array, *, scale: float | None) -> Array:
    try:
        return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn")
    except RuntimeError:
        # JAX is installed without CUDA's libraries: this branch is traced beside the other, and can never be run.
        return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="xla")
