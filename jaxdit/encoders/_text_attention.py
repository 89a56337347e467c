"""What the published text encoders share: tables of tokens, and attention inside padded captions."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = ["attend", "check_tokens", "embed"]

# Scores that exist at once, in bytes; queries are taken in as many blocks as that needs.
_SCORE_BYTES = 128 << 20


def check_tokens(owner: str, ids: Array, mask: Array | None) -> None:
    """Refuse what are no tokens, or a mask that is none of theirs.

    Raises:
        TypeError: for ids that are no integers, or a mask that is not boolean.
        ValueError: for other shapes.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{owner}: ids must be integers; got dtype={ids.dtype}. Make them by Tokenizer.")
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(
            f"{owner}: ids must be (batch, length) with at least one token; got shape={ids.shape}. "
            "Make them by Tokenizer, which ends every caption with a token."
        )
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(
            f"{owner}: mask must be boolean, True = token; got dtype={mask.dtype}. Compare with 0."
        )
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"{owner}: mask must have the shape of ids; got mask {mask.shape}, ids {ids.shape}. Give both of a batch."
        )


def embed(table: Float[Array, "v d"], ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
    """Rows of a table in float32; NaN, not another token's row, for an id that it does not have."""
    found = table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return found.astype(jnp.float32)


def attend(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b l h d"],
    v: Float[Array, "b l h d"],
    *,
    scale: float,
    bias: Float[Array, "h distances"] | None = None,
    mask: Bool[Array, "b l"] | None = None,
    causal: bool = False,
) -> Float[Array, "b l h d"]:
    """Softmax attention inside each sequence, exact, at most 128 MiB of scores at a time.

    Scores and softmax are float32. A query none of whose keys is kept gets the mean of all values.

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: factor on products.
        bias: what is added to the score of query i and key j, in column l - 1 + j - i of 2 l - 1.
        mask: keys to keep; all by default.
        causal: whether keys behind the query are left out.

    Returns:
        The dtype of `v`.
    """
    batch, length, num_heads, _ = q.shape
    places = jnp.arange(length, dtype=jnp.int32)

    def row(query_and_place: tuple[Array, Array]) -> Array:
        query, place = query_and_place
        scores = scale * jnp.einsum("bhd,blhd->bhl", query, k, preferred_element_type=jnp.float32)
        if bias is not None:
            scores += lax.dynamic_slice_in_dim(bias, length - 1 - place, length, axis=1)[None]
        if mask is not None:
            scores = jnp.where(mask[:, None, :], scores, _LOWEST)
        if causal:
            scores = jnp.where((places <= place)[None, None, :], scores, _LOWEST)
        return jnp.einsum("bhl,blhd->bhd", jax.nn.softmax(scores).astype(v.dtype), v)

    block = _SCORE_BYTES // (4 * max(batch, 1) * num_heads * length)
    out = lax.map(row, (q.swapaxes(0, 1), places), batch_size=min(max(block, 1), length))
    return out.swapaxes(0, 1)


# Finite, so that rows without a key to keep are not NaN.
_LOWEST = jnp.finfo(jnp.float32).min
