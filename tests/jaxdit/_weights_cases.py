"""Small models of every kind, and their checkpoints."""

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxdit.models import DiTConfig, MMDiTConfig
from jaxdit.weights import (
    SaveFormat,
    abstract_params,
    save_params,
)

FLUX = MMDiTConfig(
    in_channels=6,
    text_channels=7,
    pooled_channels=5,
    width=64,
    num_heads=2,
    num_double_blocks=2,
    num_single_blocks=3,
    axes_dim=(8, 12, 12),
    guidance_embed=True,
    compute_dtype="float32",
)
DIT = DiTConfig(width=64, depth=3, num_heads=2, patch_size=2, num_classes=5, time_frequency_shift=1)
ODD = MMDiTConfig(
    in_channels=6,
    out_channels=4,
    text_channels=7,
    pooled_channels=5,
    width=24,
    num_heads=2,
    num_double_blocks=0,
    num_single_blocks=1,
    axes_dim=(0, 6, 6),
    mlp_ratio=2.5,
)
CONFIGS = {"flux": FLUX, "dit": DIT, "odd": ODD}
CASES = [
    ("flux", "diffusers"),
    ("flux", "original"),
    ("dit", "diffusers"),
    ("dit", "original"),
    ("odd", "original"),
]


def draw(config, dtype=np.float32):
    """Random parameters whose values a 16-bit float holds."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(ml_dtypes.bfloat16).astype(dtype),
        abstract_params(config),
    )


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def save_cases(root):
    """A folder of every case, below `root`, which is returned."""
    for name, layout in CASES:
        save_params(
            root / f"{name}_{layout}",
            draw(CONFIGS[name]),
            CONFIGS[name],
            SaveFormat(layout=layout, sample_size=8),
        )
    return root


def rewrite(source, target, change):
    """Copy a folder's one file with its tensors changed by `change(dict)`."""
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    change(tensors)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "diffusion_pytorch_model.safetensors")
    return target
