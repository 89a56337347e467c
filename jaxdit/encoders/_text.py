"""Text encoders: one trained on bytes together with the model, one for features made elsewhere."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ..models import rows_of_sequences, sums_of_sequences
from ._protocol import TextFeatures, TextRows

__all__ = ["ByteTextEncoder", "PrecomputedText", "byte_tokens"]

NUM_BYTES = 256


def byte_tokens(caption: str) -> list[int]:
    """The UTF-8 bytes of a caption, the tokens of `ByteTextEncoder`."""
    return list(caption.encode("utf-8"))


class ByteTextEncoder(nnx.Module):
    """Embeds the bytes of captions, trained with the model.

    A feature is the byte's vector plus that of its place in the caption. The pooled vector is a linear map of
    the features' sum over the root of their number: it has unit variance at any length, where the mean of many
    would hide the few bytes in which two captions differ. A caption without bytes (also one dropped for
    guidance) has a learned vector of its own.

    Args:
        text_channels: channels of a feature row.
        pooled_channels: channels of a pooled vector.
        max_length: longest caption in bytes. A longer one gives NaN, not another place's vector: bound
            captions when they are read.
        rngs: source of the initial parameters.

    Raises:
        ValueError: if a size is below 1.
    """

    def __init__(
        self, *, text_channels: int, pooled_channels: int, max_length: int = 512, rngs: nnx.Rngs
    ) -> None:
        if min(text_channels, pooled_channels, max_length) < 1:
            raise ValueError(
                "ByteTextEncoder: sizes must be at least 1; got "
                f"text_channels={text_channels}, pooled_channels={pooled_channels}, max_length={max_length}. "
                "Use 256, 256 and 512."
            )
        self.frozen = False
        self.text_channels, self.pooled_channels, self.max_length = text_channels, pooled_channels, max_length
        # Unit variance in the sum: features enter the model's text projection as they are.
        init = nnx.initializers.normal(0.5**0.5)
        self.byte_embedding = nnx.Param(init(rngs.params(), (NUM_BYTES, text_channels), jnp.float32))
        self.place_embedding = nnx.Param(init(rngs.params(), (max_length, text_channels), jnp.float32))
        self.pool = nnx.Linear(text_channels, pooled_channels, param_dtype=jnp.float32, rngs=rngs)
        self.pooled_empty = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (1, pooled_channels), jnp.float32)
        )

    def __call__(
        self, rows: TextRows, *, num_sequences: int, reduce: Callable[[Any], Any] | None = None
    ) -> TextFeatures:
        """Encodes rows; see `TextEncoder`. Float32 throughout.

        Raises:
            TypeError: if the tokens are not integers.
        """
        if not jnp.issubdtype(rows.tokens.dtype, jnp.integer):
            raise TypeError(
                f"ByteTextEncoder: tokens must be integers, bytes 0 .. 255; got tokens of dtype "
                f"{rows.tokens.dtype}. For features made elsewhere use PrecomputedText."
            )
        features = self._embed(rows.tokens, rows.token_index)
        features = jnp.where(rows.segment_ids[:, None] > 0, features, 0.0)
        ones = (rows.segment_ids[:, None] > 0).astype(jnp.float32)
        sums = (
            sums_of_sequences(features, rows.segment_ids, num_sequences),
            sums_of_sequences(ones, rows.segment_ids, num_sequences),
        )
        totals, counts = sums if reduce is None else reduce(sums)
        pooled = self.pool(totals / jnp.sqrt(jnp.maximum(counts, 1.0)))
        return TextFeatures(features, jnp.where(counts > 0, pooled, self.pooled_empty[...]))

    def _embed(self, tokens: Int[Array, "n"], places: Int[Array, "n"]) -> Float[Array, "n c"]:
        # Both tables are read like tables of sequences (0 is padding), for the float32, repeatable gradient.
        in_range = (places < self.max_length) & (tokens >= 0) & (tokens < NUM_BYTES)
        by_byte = rows_of_sequences(self.byte_embedding[...], tokens.astype(jnp.int32) + 1)
        by_place = rows_of_sequences(self.place_embedding[...], places.astype(jnp.int32) + 1)
        return jnp.where(in_range[:, None], by_byte + by_place, jnp.nan)


class PrecomputedText:
    """The text encoder for features that were made before training: passes them through.

    Args:
        text_channels: channels of a feature row.
        pooled_channels: channels of a pooled vector.
    """

    def __init__(self, *, text_channels: int, pooled_channels: int) -> None:
        self.frozen = True
        self.text_channels, self.pooled_channels = text_channels, pooled_channels

    def __call__(
        self, rows: TextRows, *, num_sequences: int, reduce: Callable[[Any], Any] | None = None
    ) -> TextFeatures:
        """Returns the given features and pooled vectors; see `TextEncoder`. `reduce` has nothing to add here.

        Raises:
            ValueError: if the rows do not hold features and pooled vectors of the promised shapes.
        """
        pooled_shape = None if rows.pooled is None else rows.pooled.shape
        if rows.tokens.shape[1:] != (self.text_channels,) or rows.pooled is None:
            raise ValueError(
                f"PrecomputedText: rows must hold features of {self.text_channels} channels, and pooled vectors; "
                f"got tokens of shape {rows.tokens.shape}, pooled of shape {pooled_shape}. "
                "For token ids use ByteTextEncoder."
            )
        if pooled_shape != (num_sequences, self.pooled_channels):
            raise ValueError(
                f"PrecomputedText: pooled must have shape {(num_sequences, self.pooled_channels)}; got "
                f"{pooled_shape}. Give one vector per sequence."
            )
        return TextFeatures(jnp.where(rows.segment_ids[:, None] > 0, rows.tokens, 0.0), rows.pooled)
