"""Shape of an image autoencoder, checked where it is made, FLUX.1's and Stable Diffusion's; its chains of layers."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..models._config import check_compute_dtype, check_positive

__all__ = [
    "FLUX_VAE",
    "SD_VAE",
    "AutoencoderKLConfig",
    "LayerKind",
    "LayerSpec",
    "decoder_chain",
    "encoder_chain",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoencoderKLConfig:
    """Shape and compute dtype of an `AutoencoderKL`; names are those of diffusers' config.json.

    Attributes:
        latent_channels: channels of a latent pixel.
        block_out_channels: channels at each resolution, the finest first; each but the last is halved into the next.
        in_channels, out_channels: channels of pixels, going in and coming out.
        layers_per_block: residual blocks at each resolution of the encoder; the decoder has one more.
        norm_num_groups: groups of every GroupNorm.
        scaling_factor, shift_factor: the model's latents are (latents - shift_factor) * scaling_factor.
        use_quant_conv, use_post_quant_conv: whether a 1 x 1 convolution follows the encoder, or precedes the decoder.
        mid_block_add_attention: whether all pixels attend to one another at the coarsest resolution.
        compute_dtype: "bfloat16" or "float32", for convolutions and activations; statistics are float32.

    Raises:
        ValueError: if sizes do not fit together.
    """

    latent_channels: int
    block_out_channels: tuple[int, ...]
    in_channels: int = 3
    out_channels: int = 3
    layers_per_block: int = 2
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215
    shift_factor: float = 0.0
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        owner = "AutoencoderKLConfig"
        names = ("latent_channels", "in_channels", "out_channels", "layers_per_block", "norm_num_groups")
        check_positive(owner, {name: getattr(self, name) for name in names})
        check_compute_dtype(owner, self.compute_dtype)
        channels, groups = self.block_out_channels, self.norm_num_groups
        if not channels or any(size < 1 or size % groups for size in channels):
            raise ValueError(
                f"{owner}: block_out_channels must be one or more multiples of norm_num_groups; got "
                f"block_out_channels={channels}, norm_num_groups={groups}. FLUX.1 has (128, 256, 512, 512) and 32."
            )
        if not (
            math.isfinite(self.scaling_factor) and self.scaling_factor and math.isfinite(self.shift_factor)
        ):
            raise ValueError(
                f"{owner}: scaling_factor must be finite and not zero, shift_factor finite; got "
                f"scaling_factor={self.scaling_factor}, shift_factor={self.shift_factor}. Use 1.0 and 0.0 for neither."
            )

    @property
    def factor(self) -> int:
        """Pixels along the edge of a latent pixel."""
        return 2 ** (len(self.block_out_channels) - 1)


FLUX_VAE = AutoencoderKLConfig(
    latent_channels=16,
    block_out_channels=(128, 256, 512, 512),
    scaling_factor=0.3611,
    shift_factor=0.1159,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
"""FLUX.1's: 8 x 8 pixels to 16 channels."""

SD_VAE = AutoencoderKLConfig(latent_channels=4, block_out_channels=(128, 256, 512, 512))
"""Stable Diffusion's, also of the published DiT: 8 x 8 pixels to 4 channels."""


class LayerKind(Enum):
    """What a layer of a chain does; sizes of kernels in the names."""

    CONV_1 = "convolution 1 x 1"
    CONV_3 = "convolution 3 x 3"
    RESNET = "residual block"
    ATTENTION = "attention over the picture"
    DOWN = "convolution 3 x 3 with stride 2"
    UP = "nearest neighbours, twice the size, and a convolution 3 x 3"
    HEAD = "norm, SiLU and a convolution 3 x 3"


class LayerSpec(NamedTuple):
    """One layer of a chain: what it does, its name in diffusers' checkpoints, and its channels."""

    kind: LayerKind
    name: str
    in_channels: int
    out_channels: int


def encoder_chain(config: AutoencoderKLConfig) -> list[LayerSpec]:
    """The encoder's layers, from pixels to the mean and log-variance of latents."""
    channels, moments = config.block_out_channels, 2 * config.latent_channels
    chain = [LayerSpec(LayerKind.CONV_3, "encoder.conv_in", config.in_channels, channels[0])]
    for i, width in enumerate(channels):
        block = f"encoder.down_blocks.{i}"
        chain += _resnets(block, config.layers_per_block, chain[-1].out_channels, width)
        if i < len(channels) - 1:
            chain.append(LayerSpec(LayerKind.DOWN, f"{block}.downsamplers.0", width, width))
    chain += _mid_block("encoder.mid_block", config)
    chain.append(LayerSpec(LayerKind.HEAD, "encoder", channels[-1], moments))
    if config.use_quant_conv:
        chain.append(LayerSpec(LayerKind.CONV_1, "quant_conv", moments, moments))
    return chain


def decoder_chain(config: AutoencoderKLConfig) -> list[LayerSpec]:
    """The decoder's layers, from latents to pixels."""
    channels, latent = config.block_out_channels, config.latent_channels
    chain = []
    if config.use_post_quant_conv:
        chain.append(LayerSpec(LayerKind.CONV_1, "post_quant_conv", latent, latent))
    chain.append(LayerSpec(LayerKind.CONV_3, "decoder.conv_in", latent, channels[-1]))
    chain += _mid_block("decoder.mid_block", config)
    for i, width in enumerate(reversed(channels)):
        block = f"decoder.up_blocks.{i}"
        chain += _resnets(block, config.layers_per_block + 1, chain[-1].out_channels, width)
        if i < len(channels) - 1:
            chain.append(LayerSpec(LayerKind.UP, f"{block}.upsamplers.0", width, width))
    chain.append(LayerSpec(LayerKind.HEAD, "decoder", channels[0], config.out_channels))
    return chain


def _resnets(block: str, count: int, in_channels: int, width: int) -> list[LayerSpec]:
    sizes = [in_channels] + [width] * (count - 1)
    return [LayerSpec(LayerKind.RESNET, f"{block}.resnets.{j}", size, width) for j, size in enumerate(sizes)]


def _mid_block(block: str, config: AutoencoderKLConfig) -> list[LayerSpec]:
    width = config.block_out_channels[-1]
    first, second = _resnets(block, 2, width, width)
    attention = LayerSpec(LayerKind.ATTENTION, f"{block}.attentions.0", width, width)
    return [first, attention, second] if config.mid_block_add_attention else [first, second]
