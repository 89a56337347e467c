"""What parity of autoencoders with diffusers is checked on, made from seeds, and the autoencoder here on it."""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxdit.encoders import AutoencoderKL
from jaxdit.weights import load_params, read_config
from jaxdit.weights._tables import table_for
from tests.parity.cases import draw_weight

__all__ = [
    "AUTOENCODER_BOUND",
    "AUTOENCODER_CASES",
    "AutoencoderCase",
    "autoencoder_errors",
    "pictures_of",
    "run_our_autoencoder",
    "write_autoencoder",
]

# Of `autoencoder_errors` in float32.
AUTOENCODER_BOUND = 1e-5


@dataclass(frozen=True, slots=True)
class AutoencoderCase:
    """An autoencoder with random weights, and the size of the pictures it is run on.

    Attributes:
        name: of the case.
        config: keyword arguments of diffusers' class, without the types of blocks.
        size: height and width of latents.
        recorded: whether the reference's results are stored for the tests that run without torch.
    """

    name: str
    config: dict[str, Any] = field(hash=False)
    size: tuple[int, int]
    recorded: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """All keyword arguments of diffusers' class."""
        count = len(self.config["block_out_channels"])
        blocks = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
        return {**self.config, **{name: [kind] * count for name, kind in blocks.items()}}

    @property
    def factor(self) -> int:
        """Pixels along the edge of a latent pixel."""
        return 2 ** (len(self.config["block_out_channels"]) - 1)


_FLUX = {
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_SMALL = {"block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4}
_LARGER = {"block_out_channels": [32, 64, 96, 96], "layers_per_block": 2, "norm_num_groups": 32}

AUTOENCODER_CASES = (
    AutoencoderCase("flux_vae_small", {**_FLUX, **_SMALL}, (5, 3), recorded=True),
    AutoencoderCase("sd_vae_small", {**_SMALL, "latent_channels": 4}, (3, 4), recorded=True),
    AutoencoderCase("flux_vae", {**_FLUX, **_LARGER}, (9, 12)),
    AutoencoderCase("sd_vae", {**_LARGER, "latent_channels": 4}, (8, 8)),
    AutoencoderCase(
        "vae_without_attention",
        {
            **_SMALL,
            "block_out_channels": [8],
            "latent_channels": 5,
            "in_channels": 1,
            "out_channels": 2,
            "mid_block_add_attention": False,
        },
        (6, 7),
    ),
)


def pictures_of(case: AutoencoderCase) -> dict[str, np.ndarray]:
    """Two images (b, h, w, c) in [-1, 1], and two unrelated latents."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    height, width = case.size
    shape = (2, case.factor * height, case.factor * width, case.config.get("in_channels", 3))
    latents = rng.standard_normal((2, height, width, case.config["latent_channels"]))
    return {"images": rng.uniform(-1, 1, shape).astype(np.float32), "latents": latents.astype(np.float32)}


def write_autoencoder(case: AutoencoderCase, folder: Path) -> None:
    """A diffusers folder with the weights of a case, made without diffusers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", **case.settings}))
    shapes = table_for(read_config(folder), "diffusers").shapes
    tensors = {name: draw_weight(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")


def run_our_autoencoder(
    case: AutoencoderCase, folder: Path, compute_dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """As `tests.parity.autoencoder_reference.run_autoencoder_reference`, from a diffusers folder on disk."""
    config: Any = read_config(folder, compute_dtype=compute_dtype)
    graph = nnx.graphdef(nnx.eval_shape(lambda: AutoencoderKL(config, rngs=nnx.Rngs(0))))

    @jax.jit
    def run(params: Any, pictures: Any) -> Any:
        model = nnx.merge(graph, params)
        found = model.encode(pictures["images"])
        return {"mean": found.mean, "logvar": found.logvar, "image": model.decode(pictures["latents"])}

    return jax.tree.map(np.asarray, run(load_params(folder, config), pictures_of(case)))


def autoencoder_errors(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, float]:
    """max|a - b| / max|b| of each result."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    return {
        name: float(np.abs(ours[name] - value).max() / np.abs(value).max())
        for name, value in reference.items()
    }
