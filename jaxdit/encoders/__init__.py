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
from ._clip_text import ClipTextEncoder as ClipTextEncoder
from ._clip_text import ClipTextFeatures as ClipTextFeatures
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
from ._t5 import T5Encoder as T5Encoder
from ._text import TOKEN_BYTES as TOKEN_BYTES
from ._text import ByteTextEncoder as ByteTextEncoder
from ._text import PrecomputedText as PrecomputedText
from ._text import byte_tokens as byte_tokens
from ._text_config import CLIP_L as CLIP_L
from ._text_config import T5_XXL as T5_XXL
from ._text_config import ClipTextConfig as ClipTextConfig
from ._text_config import T5Config as T5Config
from ._tokenizer import Tokenizer as Tokenizer
from ._tokenizer import TokenizerError as TokenizerError
from ._tokenizer import Tokens as Tokens

__all__ = [
    "CLIP_L",
    "FLUX_VAE",
    "SD_VAE",
    "T5_XXL",
    "TOKEN_BYTES",
    "AutoencoderKL",
    "AutoencoderKLConfig",
    "ByteTextEncoder",
    "ClipTextConfig",
    "ClipTextEncoder",
    "ClipTextFeatures",
    "Grid",
    "ImageEncoder",
    "LatentPosterior",
    "PictureRows",
    "PixelPatches",
    "PrecomputedText",
    "T5Config",
    "T5Encoder",
    "TextEncoder",
    "TextFeatures",
    "TextRows",
    "Tokenizer",
    "TokenizerError",
    "Tokens",
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
