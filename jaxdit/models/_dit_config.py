"""Shape of a DiT, checked where it is made, and the published sizes."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._config import check_compute_dtype, check_heads, check_positive

__all__ = ["DIT_SIZES", "DiTConfig", "dit_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiTConfig:
    """Shape and compute dtype of a `DiT`.

    Attributes:
        width: channels of a token inside the network.
        depth: blocks.
        num_heads: attention heads; `width / num_heads` channels each.
        patch_size: edge of the square patch that is one token.
        channels: channels of the (latent) image.
        num_classes: classes; with `null_class` one more label, `num_classes`, stands for none.
        null_class: whether the table has the label that classifier-free guidance needs.
        learn_sigma: whether the output has a second half, for the variance.
        mlp_ratio: hidden over outer channels of the MLPs.
        time_channels: size of the sinusoidal embedding of time.
        time_frequency_shift: 0 as the original, or 1 as diffusers' DiT, whose embedding of time has other frequencies.
        mlp_norm_epsilon: of the norm before the MLP: 1e-6 in the original, 1e-5 in diffusers' DiT.
        compute_dtype: "bfloat16" or "float32", for matrix products and activations.

    Raises:
        ValueError: if sizes do not fit together.
    """

    width: int
    depth: int
    num_heads: int
    patch_size: int
    channels: int = 4
    num_classes: int = 1000
    null_class: bool = True
    learn_sigma: bool = True
    mlp_ratio: float = 4.0
    time_channels: int = 256
    time_frequency_shift: int = 0
    mlp_norm_epsilon: float = 1e-6
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = ("width", "depth", "num_heads", "patch_size", "channels", "num_classes", "time_channels")
        check_positive("DiTConfig", {name: getattr(self, name) for name in names})
        check_positive("DiTConfig", {"mlp_ratio * width": self.mlp_width})
        check_heads("DiTConfig", self.width, self.num_heads)
        check_compute_dtype("DiTConfig", self.compute_dtype)
        if self.width % 4:
            raise ValueError(
                "DiTConfig: width must be a multiple of 4 (sine and cosine of two axes); got "
                f"width={self.width}. Use {-(-self.width // 4) * 4}."
            )
        if self.time_channels % 2:
            raise ValueError(
                f"DiTConfig: time_channels must be even; got time_channels={self.time_channels}. Use 256."
            )
        if self.time_frequency_shift not in (0, 1) or not self.mlp_norm_epsilon > 0:
            raise ValueError(
                "DiTConfig: time_frequency_shift must be 0 or 1 and mlp_norm_epsilon positive; got "
                f"time_frequency_shift={self.time_frequency_shift}, mlp_norm_epsilon={self.mlp_norm_epsilon}. The "
                "original has 0 and 1e-6."
            )

    @property
    def in_channels(self) -> int:
        """Channels of an input row: pixels of a patch, row-major, channels last."""
        return self.patch_size**2 * self.channels

    @property
    def out_channels(self) -> int:
        """Channels of an output row; per pixel the prediction, then with `learn_sigma` the variance."""
        return self.in_channels * (2 if self.learn_sigma else 1)

    @property
    def mlp_width(self) -> int:
        """Hidden channels of an MLP."""
        return int(self.width * self.mlp_ratio)

    @property
    def dtype(self) -> Any:
        """The compute dtype as JAX takes it."""
        return self.compute_dtype


DIT_SIZES = MappingProxyType(
    {
        "S": {"depth": 12, "width": 384, "num_heads": 6},
        "B": {"depth": 12, "width": 768, "num_heads": 12},
        "L": {"depth": 24, "width": 1024, "num_heads": 16},
        "XL": {"depth": 28, "width": 1152, "num_heads": 16},
    }
)
"""Published sizes (arXiv 2212.09748, table 1), each with patch 2, 4 or 8."""

_PATCHES = (2, 4, 8)


def dit_config(name: str, **overrides: Any) -> DiTConfig:
    """The configuration of a published DiT.

    Args:
        name: "DiT-" S, B, L or XL, "/" and 2, 4 or 8, such as "DiT-XL/2".
        **overrides: fields of `DiTConfig` to set besides.

    Returns:
        The configuration.

    Raises:
        ValueError: for any other name.
    """
    names = {f"DiT-{size}/{patch}": (size, patch) for size in DIT_SIZES for patch in _PATCHES}
    if name not in names:
        raise ValueError(
            f"dit_config: name must be one of {', '.join(names)}; got name={name!r}. "
            "Make a DiTConfig for another shape."
        )
    size, patch = names[name]
    return DiTConfig(**{**DIT_SIZES[size], "patch_size": patch, **overrides})
