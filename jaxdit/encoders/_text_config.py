"""Shapes of the published text encoders, checked where they are made."""

from dataclasses import dataclass
from typing import Any

from ..models._config import check_positive

__all__ = ["CLIP_L", "T5_XXL", "ClipTextConfig", "T5Config"]

_COMPUTE_DTYPES = ("bfloat16", "float32")
_T5_ACTIVATIONS = ("gated-gelu", "relu")
_CLIP_ACTIVATIONS = ("quick_gelu", "gelu")


def _check_choice(owner: str, name: str, value: str, choices: tuple[str, ...], more: str) -> None:
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(choices)}; got {name}={value!r}. {more}")


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """Shape and compute dtype of a `T5Encoder`.

    Attributes:
        vocab_size: rows of the embedding table.
        width: channels of a token.
        head_dim: channels of a head; num_heads * head_dim need not be the width.
        num_heads: attention heads.
        mlp_width: hidden channels of an MLP.
        depth: layers.
        num_buckets: distances that the relative position bias tells apart, both directions together.
        max_distance: distance from which on all are alike.
        activation: "gated-gelu" (T5 v1.1) or "relu" (the first T5).
        norm_epsilon: added to mean squares.
        pad_id: token that fills captions up.
        eos_id: token that ends captions.
        compute_dtype: "bfloat16" or "float32", for matrix products. Not float16: activations of T5 overflow in it.

    Raises:
        ValueError: if a value is none of these.
    """

    vocab_size: int
    width: int
    head_dim: int
    num_heads: int
    mlp_width: int
    depth: int
    num_buckets: int = 32
    max_distance: int = 128
    activation: str = "gated-gelu"
    norm_epsilon: float = 1e-6
    pad_id: int = 0
    eos_id: int = 1
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = ("vocab_size", "width", "head_dim", "num_heads", "mlp_width", "depth")
        check_positive("T5Config", {name: getattr(self, name) for name in names})
        _check_choice("T5Config", "activation", self.activation, _T5_ACTIVATIONS, "T5 v1.1 has 'gated-gelu'.")
        _check_choice(
            "T5Config",
            "compute_dtype",
            self.compute_dtype,
            _COMPUTE_DTYPES,
            "In float16 the activations of T5 overflow.",
        )
        if self.num_buckets < 4 or self.num_buckets % 2 or self.max_distance <= self.num_buckets // 4:
            raise ValueError(
                "T5Config: num_buckets must be even and at least 4, and max_distance above a quarter of it; got "
                f"num_buckets={self.num_buckets}, max_distance={self.max_distance}. T5 has 32 and 128."
            )

    @property
    def dtype(self) -> Any:
        """The compute dtype as JAX takes it."""
        return self.compute_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTextConfig:
    """Shape and compute dtype of a `ClipTextEncoder`.

    Attributes:
        vocab_size: rows of the embedding table.
        width: channels of a token.
        num_heads: attention heads; `width / num_heads` channels each.
        mlp_width: hidden channels of an MLP.
        depth: layers.
        max_length: positions there are.
        activation: "quick_gelu" (OpenAI's models: x * sigmoid(1.702 x)) or "gelu".
        norm_epsilon: added to variances.
        eos_id: token that ends captions, at which features are pooled. 2 stands for the token with the highest id: the
            published config.json of OpenAI's models says 2, though the token is 49407.
        compute_dtype: "bfloat16" or "float32", for matrix products.

    Raises:
        ValueError: if a value is none of these.
    """

    vocab_size: int
    width: int
    num_heads: int
    mlp_width: int
    depth: int
    max_length: int = 77
    activation: str = "quick_gelu"
    norm_epsilon: float = 1e-5
    eos_id: int = 49407
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = ("vocab_size", "width", "num_heads", "mlp_width", "depth", "max_length")
        check_positive("ClipTextConfig", {name: getattr(self, name) for name in names})
        _check_choice(
            "ClipTextConfig", "activation", self.activation, _CLIP_ACTIVATIONS, "CLIP has 'quick_gelu'."
        )
        _check_choice(
            "ClipTextConfig", "compute_dtype", self.compute_dtype, _COMPUTE_DTYPES, "Use 'bfloat16' on GPUs."
        )
        if self.width % self.num_heads:
            raise ValueError(
                f"ClipTextConfig: num_heads must divide width; got width={self.width}, num_heads={self.num_heads}. "
                "CLIP-L has 768 and 12."
            )

    @property
    def dtype(self) -> Any:
        """The compute dtype as JAX takes it."""
        return self.compute_dtype


T5_XXL = T5Config(vocab_size=32_128, width=4096, head_dim=64, num_heads=64, mlp_width=10_240, depth=24)
"""FLUX.1's `text_encoder_2`, the encoder of T5 v1.1 XXL: 4,762,310,656 parameters."""

CLIP_L = ClipTextConfig(vocab_size=49_408, width=768, num_heads=12, mlp_width=3072, depth=12, eos_id=2)
"""FLUX.1's `text_encoder`, the text half of CLIP ViT-L/14: 123,060,480 parameters."""
