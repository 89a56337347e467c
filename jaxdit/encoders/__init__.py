"""Encoders: captions to text rows and pooled vectors, pixels to image rows or to latents and back."""

from ._autoencoder import AutoencoderKL as AutoencoderKL
from ._autoencoder import LatentPosterior as LatentPosterior
from ._autoencoder import run_chain as run_chain
from ._autoencoder_config import FLUX_VAE as FLUX_VAE
from ._autoencoder_config import SD_VAE as SD_VAE
from ._autoencoder_config import AutoencoderKLConfig as AutoencoderKLConfig
from ._autoencoder_config import decoder_chain as decoder_chain
from ._autoencoder_config import encoder_chain as encoder_chain
from ._autoencoder_split import decode_split as decode_split
from ._autoencoder_split import encode_split as encode_split
from ._patches import PixelPatches as PixelPatches
from ._patches import patch_grid as patch_grid
from ._patches import patch_positions as patch_positions
from ._patches import patchify as patchify
from ._patches import unpatchify as unpatchify
from ._picture_rows import PictureRows as PictureRows
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
    "FLUX_VAE",
    "SD_VAE",
    "TOKEN_BYTES",
    "AutoencoderKL",
    "AutoencoderKLConfig",
    "ByteTextEncoder",
    "Grid",
    "ImageEncoder",
    "LatentPosterior",
    "PictureRows",
    "PixelPatches",
    "PrecomputedText",
    "TextEncoder",
    "TextFeatures",
    "TextRows",
    "byte_tokens",
    "decode_split",
    "decoder_chain",
    "encode_split",
    "encoder_chain",
    "patch_grid",
    "patch_positions",
    "patchify",
    "run_chain",
    "unpatchify",
]
