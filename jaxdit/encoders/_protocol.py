"""What stands between raw captions and pictures and the rows of a model."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["Grid", "ImageEncoder", "TextEncoder", "TextFeatures", "TextRows"]


class TextRows(NamedTuple):
    """Packed caption tokens of all sequences at hand (per device inside shard_map).

    Attributes:
        tokens: bytes of words, see `byte_tokens`, or features computed elsewhere.
        segment_ids: sequence of each row plus one, 0 = padding.
        token_index: index of each row's token in its caption.
        pooled: pooled vector of each sequence, where it too was computed elsewhere.
    """

    tokens: Int[Array, "n 8"] | Float[Array, "n c_txt"]
    segment_ids: Int[Array, " n"]
    token_index: Int[Array, " n"]
    pooled: Float[Array, "s c_pool"] | None = None


class TextFeatures(NamedTuple):
    """Text as a model takes it: one row per token and one pooled vector per sequence."""

    features: Float[Array, "n c_txt"]
    pooled: Float[Array, "s c_pool"]


@runtime_checkable
class TextEncoder(Protocol):
    """Turns packed caption tokens into features.

    Attributes:
        frozen: whether its parameters, if any, stay out of training.
        text_channels: channels of a feature row.
        pooled_channels: channels of a pooled vector.
    """

    frozen: bool
    text_channels: int
    pooled_channels: int

    def __call__(
        self, rows: TextRows, *, num_sequences: int, reduce: Callable[[Any], Any] | None = None
    ) -> TextFeatures:
        """Encodes rows.

        Args:
            rows: packed tokens, a caption possibly spread over devices.
            num_sequences: S.
            reduce: adds per-sequence sums over the devices that share the captions, such as
                `lambda sums: jax.lax.psum(sums, axis_name)`; None where all rows are here.

        Returns:
            Features of the rows here (padding rows zero), pooled vectors of all sequences.
        """
        ...


class Grid(NamedTuple):
    """Tokens of a picture or clip along time, height and width."""

    t: int
    h: int
    w: int


@runtime_checkable
class ImageEncoder(Protocol):
    """Turns pixels into rows and back, on the host.

    Attributes:
        frozen: whether its parameters, if any, stay out of training.
        channels: channels of a row.
    """

    frozen: bool
    channels: int

    def encode(self, pixels: Float[np.ndarray, "t h w c"]) -> Float[np.ndarray, "n c_row"]:
        """Rows of a clip, row-major over (t, h, w)."""
        ...

    def decode(
        self, rows: Float[np.ndarray, "n c_row"], grid: tuple[int, int, int]
    ) -> Float[np.ndarray, "t h w c"]:
        """The clip of so many rows."""
        ...
