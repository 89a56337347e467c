"""What parity with diffusers is checked on: model shapes, packed inputs and weights, made from seeds.

A case is a model of some shape with random weights, and a few sequences. The reference runs them one by one; the model
here runs them packed in one call, with padding between and behind.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["CASES", "Case", "Sequence", "draw_weight", "sequences_of"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the sequences it is run on.

    Attributes:
        name: of the case.
        kind: "flux" or "dit".
        config: keyword arguments of diffusers' class.
        sizes: (text tokens, height, width) in tokens for flux; (label, height, width) for DiT.
        recorded: whether the reference's results are stored for the tests that run without torch.
        guidance: distilled guidance of the sequences, in turn. Torch's exp gives 2 of the 128 frequencies one bit off;
            at 3.5 and 7 the product with them rounds to the same angle, at others it is up to 2e-4 off.
    """

    name: str
    kind: str
    config: dict[str, Any] = field(hash=False)
    sizes: tuple[tuple[int, int, int], ...]
    recorded: bool = False
    guidance: tuple[float, ...] = (3.5, 7.0)


_FLUX_SMALL = {
    "in_channels": 8,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": [4, 6, 6],
}
_FLUX_LARGER = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 96,
    "pooled_projection_dim": 48,
    "axes_dims_rope": [8, 28, 28],
}
_DIT_SMALL = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 5,
}
_DIT_LARGER = {
    "num_attention_heads": 6,
    "attention_head_dim": 64,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 4,
    "sample_size": 32,
    "patch_size": 4,
    "num_embeds_ada_norm": 100,
}
_TEXTS = ((0, 3, 5), (1, 4, 4), (77, 2, 7), (512, 6, 3))

CASES = (
    Case("flux_dev_small", "flux", {**_FLUX_SMALL, "guidance_embeds": True}, _TEXTS, recorded=True),
    Case("flux_schnell_small", "flux", {**_FLUX_SMALL, "guidance_embeds": False}, _TEXTS[1:3], recorded=True),
    Case(
        "flux_out_channels", "flux", {**_FLUX_SMALL, "guidance_embeds": False, "out_channels": 6}, _TEXTS[1:2]
    ),
    Case("flux_dev", "flux", {**_FLUX_LARGER, "guidance_embeds": True}, (*_TEXTS, (77, 32, 32))),
    Case(
        "flux_dev_guidance", "flux", {**_FLUX_SMALL, "guidance_embeds": True}, _TEXTS, guidance=(1, 2, 3, 4)
    ),
    Case("flux_schnell", "flux", {**_FLUX_LARGER, "guidance_embeds": False}, (*_TEXTS, (30, 24, 40))),
    Case("dit_small", "dit", _DIT_SMALL, ((3, 4, 4), (5, 4, 4)), recorded=True),
    Case("dit", "dit", _DIT_LARGER, ((42, 8, 8), (100, 8, 8))),
    Case("dit_patch_8", "dit", {**_DIT_LARGER, "patch_size": 8}, ((0, 4, 4),)),
)


def draw_weight(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A tensor's random values, float32, which depend on its name, shape and the seed alone.

    Weights keep the size of what they multiply; norms' scales are around 1. DiT's embedders, of which diffusers has a
    copy in every block, are the same in all.
    """
    kind = name.split(".emb.")[-1]
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
    values = rng.standard_normal(shape)
    if len(shape) == 1:
        is_norm = "norm" in name and name.endswith(".weight")
        return (1.0 * is_norm + 0.2 * values).astype(np.float32)
    return (0.7 * values / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


class Sequence(NamedTuple):
    """One sequence: image rows (tokens, channels), their positions, time, and text and guidance or a label."""

    img: np.ndarray
    positions: np.ndarray
    time: float
    txt: np.ndarray
    pooled: np.ndarray
    guidance: float
    label: int
    cotangent: np.ndarray


def sequences_of(case: Case, seed: int = 0) -> list[Sequence]:
    """The sequences of a case; times are steps of 1000, which both sides represent alike."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    config, is_flux = case.config, case.kind == "flux"
    patch = 1 if is_flux else config["patch_size"]
    channels = config["in_channels"] * patch**2
    out = (config.get("out_channels") or config["in_channels"]) * patch**2

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found = []
    for i, (first, height, width) in enumerate(case.sizes):
        rows, columns = np.divmod(np.arange(height * width, dtype=np.int32), width)
        found.append(
            Sequence(
                img=normal(height * width, channels),
                positions=np.stack([np.full_like(rows, i if is_flux else 0), rows, columns], axis=1),
                time=(125 + 250 * (i % 4)) / 1000,
                txt=normal(first if is_flux else 0, config.get("joint_attention_dim", 1)),
                pooled=normal(config.get("pooled_projection_dim", 1)),
                guidance=case.guidance[i % len(case.guidance)],
                label=0 if is_flux else first,
                cotangent=normal(height * width, out),
            )
        )
    return found
