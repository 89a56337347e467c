"""The reference: diffusers' AutoencoderKL in torch. Needs the parity environment (`make parity`)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

from tests.parity.autoencoder import AutoencoderCase, pictures_of
from tests.parity.cases import draw_weight

__all__ = ["autoencoder_reference_model", "check_autoencoder_exports", "run_autoencoder_reference"]


def autoencoder_reference_model(case: AutoencoderCase) -> Any:
    """Diffusers' model of a case, with its weights, in evaluation mode."""
    model = AutoencoderKL(**case.settings).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.from_numpy(draw_weight(name, tuple(value.shape))))
    return model


def run_autoencoder_reference(
    case: AutoencoderCase, dtype: torch.dtype = torch.float32
) -> dict[str, np.ndarray]:
    """`mean` and `logvar` of the images' latents, and the `image` of the latents; float32, channels last."""
    model = autoencoder_reference_model(case).to(dtype)
    images, latents = (
        torch.from_numpy(pictures_of(case)[name]).permute(0, 3, 1, 2).to(dtype)
        for name in ("images", "latents")
    )
    with torch.no_grad():
        found = model.encode(images).latent_dist
        results = {"mean": found.mean, "logvar": found.logvar, "image": model.decode(latents).sample}
    return {name: np.ascontiguousarray(x.float().permute(0, 2, 3, 1).numpy()) for name, x in results.items()}


def check_autoencoder_exports(case: AutoencoderCase, folder: Path) -> None:
    """Load exports, below `folder` by their layouts, with diffusers and compare every parameter to the bit.

    Raises:
        AssertionError: if one differs.
    """
    loaded = {
        "diffusers": AutoencoderKL.from_pretrained(folder / "diffusers"),
        "diffusers_old": AutoencoderKL.from_pretrained(folder / "diffusers_old"),
        "original": AutoencoderKL.from_single_file(
            str(folder / "original" / "ae.safetensors"), config=str(folder / "diffusers")
        ),
    }
    for layout, model in loaded.items():
        found = model.state_dict()
        for name, value in autoencoder_reference_model(case).state_dict().items():
            assert torch.equal(value, found[name]), f"{case.name}: {name} differs after export as {layout}"
