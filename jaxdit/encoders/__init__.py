"""Encoders: captions to text rows and pooled vectors, pixels to image rows."""

from ._patches import PixelPatches as PixelPatches
from ._patches import patch_grid as patch_grid
from ._patches import patch_positions as patch_positions
from ._patches import patchify as patchify
from ._patches import unpatchify as unpatchify
from ._protocol import Grid as Grid
from ._protocol import ImageEncoder as ImageEncoder
from ._protocol import TextEncoder as TextEncoder
from ._protocol import TextFeatures as TextFeatures
from ._protocol import TextRows as TextRows
from ._text import TOKEN_BYTES as TOKEN_BYTES
from ._text import ByteTextEncoder as ByteTextEncoder
from ._text import PrecomputedText as PrecomputedText
from ._text import byte_tokens as byte_tokens

__all__ = [
    "TOKEN_BYTES",
    "ByteTextEncoder",
    "Grid",
    "ImageEncoder",
    "PixelPatches",
    "PrecomputedText",
    "TextEncoder",
    "TextFeatures",
    "TextRows",
    "byte_tokens",
    "patch_grid",
    "patch_positions",
    "patchify",
    "unpatchify",
]
