"""Shape of an MMDiT, checked where it is made, and FLUX.1's."""

from dataclasses import dataclass, replace
from typing import Any

from ._config import check_compute_dtype, check_heads, check_positive

__all__ = ["FLUX_DEV", "FLUX_SCHNELL", "MMDiTConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MMDiTConfig:
    """Shape and compute dtype of an `MMDiT`.

    Attributes:
        in_channels: channels of an image row (FLUX.1: 16 latent channels x 2 x 2 patch).
        out_channels: channels of an output row; None: as many as `in_channels`.
        text_channels: channels of a text row.
        pooled_channels: channels of the pooled text vector.
        width: channels of a token inside the network.
        num_heads: attention heads; `width / num_heads` channels each.
        num_double_blocks: blocks that keep image and text apart.
        num_single_blocks: blocks on the joint rows, after the double ones.
        mlp_ratio: hidden over outer channels of the MLPs.
        axes_dim: channels of a head that encode t, h and w.
        theta: base of the rotary frequencies.
        qkv_bias: whether double-stream q, k, v have a bias.
        guidance_embed: whether a distilled guidance scale is an input.
        time_channels: size of the sinusoidal embedding of time and guidance.
        compute_dtype: "bfloat16" or "float32", for matrix products and activations.

    Raises:
        ValueError: if sizes do not fit together.
    """

    in_channels: int
    text_channels: int
    pooled_channels: int
    width: int
    num_heads: int
    num_double_blocks: int
    num_single_blocks: int
    axes_dim: tuple[int, ...]
    out_channels: int | None = None
    mlp_ratio: float = 4.0
    theta: float = 10_000.0
    qkv_bias: bool = True
    guidance_embed: bool = False
    time_channels: int = 256
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = ("in_channels", "text_channels", "pooled_channels", "width", "num_heads", "time_channels")
        check_positive("MMDiTConfig", {name: getattr(self, name) for name in names})
        check_heads("MMDiTConfig", self.width, self.num_heads)
        check_compute_dtype("MMDiTConfig", self.compute_dtype)
        if self.out_channels is not None:
            check_positive("MMDiTConfig", {"out_channels": self.out_channels})
        if min(self.num_double_blocks, self.num_single_blocks) < 0 or self.depth == 0:
            raise ValueError(
                "MMDiTConfig: block counts must be non-negative and not both zero; got num_double_blocks="
                f"{self.num_double_blocks}, num_single_blocks={self.num_single_blocks}. FLUX.1 has 19 and 38."
            )
        if self.mlp_width < 1 or self.theta <= 0:
            raise ValueError(
                "MMDiTConfig: mlp_ratio * width must be at least 1 and theta positive; got "
                f"mlp_ratio={self.mlp_ratio}, theta={self.theta}. FLUX.1 has 4 and 10000."
            )
        if self.time_channels % 2:
            raise ValueError(
                f"MMDiTConfig: time_channels must be even; got time_channels={self.time_channels}. Use 256."
            )
        self._check_axes()

    def _check_axes(self) -> None:
        fits = len(self.axes_dim) == 3 and sum(self.axes_dim) == self.head_dim
        if not fits or any(dim % 2 or dim < 0 for dim in self.axes_dim):
            raise ValueError(
                "MMDiTConfig: axes_dim must be three even sizes that add up to width / num_heads = "
                f"{self.head_dim}; got axes_dim={self.axes_dim}. FLUX.1 has (16, 56, 56) for 128."
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.width // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Hidden channels of an MLP."""
        return int(self.width * self.mlp_ratio)

    @property
    def depth(self) -> int:
        """Blocks of both kinds."""
        return self.num_double_blocks + self.num_single_blocks

    @property
    def dtype(self) -> Any:
        """The compute dtype as JAX takes it."""
        return self.compute_dtype


FLUX_DEV = MMDiTConfig(
    in_channels=64,
    text_channels=4096,
    pooled_channels=768,
    width=3072,
    num_heads=24,
    num_double_blocks=19,
    num_single_blocks=38,
    axes_dim=(16, 56, 56),
    guidance_embed=True,
)
"""FLUX.1-dev: 11,901,408,320 parameters, guidance distilled into an input."""

FLUX_SCHNELL = replace(FLUX_DEV, guidance_embed=False)
"""FLUX.1-schnell: the same without guidance."""
