"""Text encoders: one trained on bytes together with the model, one for features made elsewhere."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from ..models import rows_of_sequences, sums_of_sequences
from ._protocol import TextFeatures, TextRows

__all__ = ["TOKEN_BYTES", "ByteTextEncoder", "PrecomputedText", "byte_tokens"]

NUM_BYTES = 256
TOKEN_BYTES = 8


def byte_tokens(caption: str) -> UInt8[np.ndarray, "n 8"]:
    """The tokens of `ByteTextEncoder`: the UTF-8 bytes of each word, eight a token, zeros after the last.

    Words end at white space; a longer one goes on in the next token, even in the middle of a character. Attention and
    linear layers then cost a row per word, not one per letter.
    """
    words = [word.encode(errors="surrogatepass") for word in caption.split()]
    pieces = [word[i : i + TOKEN_BYTES] for word in words for i in range(0, len(word), TOKEN_BYTES)]
    joined = b"".join(piece.ljust(TOKEN_BYTES, b"\0") for piece in pieces)
    return np.frombuffer(joined, np.uint8).reshape(-1, TOKEN_BYTES)


class ByteTextEncoder(nnx.Module):
    """Embeds the bytes of captions, trained with the model.

    A token's bytes, each with a table of its own, and its place in the caption add up to a vector; a feature is that
    vector plus a two-layer network of it, so that words which share letters still have features of their own. The
    pooled vector is a linear map of the features' sum over the root of their number: it has about unit variance at
    any length, where the mean of many would hide the one word in which two captions differ. A caption without bytes
    (also one dropped for guidance) has a learned vector of its own.

    Args:
        text_channels: channels of a feature row.
        pooled_channels: channels of a pooled vector.
        max_length: longest caption in tokens. A longer one gives NaN, not another place's vector: bound
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
        # About unit variance in the sum of a short word's bytes and its place.
        init = nnx.initializers.normal(0.4)
        table = (TOKEN_BYTES, NUM_BYTES, text_channels)
        self.byte_embedding = nnx.Param(init(rngs.params(), table, jnp.float32))
        self.place_embedding = nnx.Param(init(rngs.params(), (max_length, text_channels), jnp.float32))
        self.mix_in = nnx.Linear(text_channels, 2 * text_channels, param_dtype=jnp.float32, rngs=rngs)
        self.mix_out = nnx.Linear(2 * text_channels, text_channels, param_dtype=jnp.float32, rngs=rngs)
        self.pool = nnx.Linear(text_channels, pooled_channels, param_dtype=jnp.float32, rngs=rngs)
        self.pooled_empty = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (1, pooled_channels), jnp.float32)
        )

    def __call__(
        self, rows: TextRows, *, num_sequences: int, reduce: Callable[[Any], Any] | None = None
    ) -> TextFeatures:
        """Encodes rows; see `TextEncoder`. Float32 throughout.

        Raises:
            TypeError: if the tokens are not rows of eight integers.
        """
        tokens = rows.tokens
        if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape[1:] != (TOKEN_BYTES,):
            raise TypeError(
                f"ByteTextEncoder: tokens must be rows of {TOKEN_BYTES} integers, bytes 0 .. 255; got tokens of dtype "
                f"{tokens.dtype} and shape {tokens.shape}. Make them by byte_tokens; for features made elsewhere use "
                "PrecomputedText."
            )
        features = self._embed(tokens, rows.token_index)
        features = features + self.mix_out(nnx.silu(self.mix_in(features)))
        features = jnp.where(rows.segment_ids[:, None] > 0, features, 0.0)
        ones = (rows.segment_ids[:, None] > 0).astype(jnp.float32)
        sums = (
            sums_of_sequences(features, rows.segment_ids, num_sequences),
            sums_of_sequences(ones, rows.segment_ids, num_sequences),
        )
        totals, counts = sums if reduce is None else reduce(sums)
        pooled = self.pool(totals / jnp.sqrt(jnp.maximum(counts, 1.0)))
        return TextFeatures(features, jnp.where(counts > 0, pooled, self.pooled_empty[...]))

    def _embed(self, tokens: Int[Array, "n 8"], places: Int[Array, " n"]) -> Float[Array, "n c"]:
        # Tables are read like tables of sequences (0 is padding), for the float32, repeatable gradient.
        tokens = tokens.astype(jnp.int32)
        in_range = (places < self.max_length) & jnp.all((tokens >= 0) & (tokens < NUM_BYTES), axis=1)
        entries = jnp.where(tokens > 0, tokens + 1, 0)
        by_byte = sum(rows_of_sequences(self.byte_embedding[i], entries[:, i]) for i in range(TOKEN_BYTES))
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
