"""The reference: diffusers' models in torch, sequence by sequence. Needs the parity environment (`make parity`)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiTTransformer2DModel, FluxTransformer2DModel

from tests.parity.cases import Case, Sequence, draw_weight, sequences_of

__all__ = ["check_export", "reference_model", "run_reference", "run_reference_with_adapters"]

_CLASSES = {"flux": FluxTransformer2DModel, "dit": DiTTransformer2DModel}


def reference_model(case: Case) -> Any:
    """Diffusers' model of a case, with its weights, in evaluation mode."""
    model = _CLASSES[case.kind](**case.config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.from_numpy(draw_weight(name, tuple(value.shape))))
    return model


def run_reference(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """Outputs of all sequences and gradients of sum(output * cotangent).

    Returns:
        `out.i`, `grad.img.i`, for FLUX also `grad.txt.i`, `grad.pooled.i`, by sequence; `grad.param.NAME`, summed over
        sequences and, for DiT's embedders, over the copies in its blocks. Float32.
    """
    model = reference_model(case).to(dtype)
    results: dict[str, np.ndarray] = {}
    for i, sequence in enumerate(sequences_of(case)):
        inputs = {
            name: torch.tensor(getattr(sequence, name), dtype=dtype, requires_grad=True)
            for name in (("img", "txt", "pooled") if case.kind == "flux" else ("img",))
        }
        out = (_flux if case.kind == "flux" else _dit)(model, case, sequence, inputs)
        (out.float() * torch.from_numpy(sequence.cotangent)).sum().backward()
        results[f"out.{i}"] = out.detach().float().numpy()
        for name, value in inputs.items():
            if value.numel():
                results[f"grad.{name}.{i}"] = value.grad.float().numpy()
    for name, value in model.named_parameters():
        key = f"grad.param.{_first_copy(name)}"
        if value.grad is not None:
            results[key] = results.get(key, 0) + value.grad.float().numpy()
    return results


def run_reference_with_adapters(case: Case, file: Path) -> dict[str, np.ndarray]:
    """Outputs of all sequences, `out.i`, of the model with adapters that diffusers loads from a file."""
    model = reference_model(case)
    model.load_lora_adapter(file.parent, weight_name=file.name, prefix="transformer")
    results = {}
    for i, sequence in enumerate(sequences_of(case)):
        inputs = {name: torch.tensor(getattr(sequence, name)) for name in ("img", "txt", "pooled")}
        with torch.no_grad():
            results[f"out.{i}"] = _flux(model, case, sequence, inputs).numpy()
    return results


def _first_copy(name: str) -> str:
    """The name of the first block's copy of an embedder."""
    if ".norm1.emb." not in name:
        return name
    return "transformer_blocks.0.norm1.emb." + name.split(".norm1.emb.")[1]


def _flux(model: Any, case: Case, sequence: Sequence, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    dtype = inputs["img"].dtype
    guidance = torch.tensor([sequence.guidance], dtype=dtype) if case.config["guidance_embeds"] else None
    return model(
        hidden_states=inputs["img"][None],
        encoder_hidden_states=inputs["txt"][None],
        pooled_projections=inputs["pooled"][None],
        timestep=torch.tensor([sequence.time], dtype=dtype),
        img_ids=torch.from_numpy(sequence.positions).float(),
        txt_ids=torch.zeros(sequence.txt.shape[0], 3),
        guidance=guidance,
        return_dict=False,
    )[0][0]


def _dit(model: Any, case: Case, sequence: Sequence, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    patch = case.config["patch_size"]
    height, width = sequence.positions[-1, 1:] + 1
    # Rows are patches, row-major, channels last; an image is (1, c, h, w).
    image = inputs["img"].reshape(height, width, patch, patch, -1).permute(4, 0, 2, 1, 3)
    image = image.reshape(1, -1, height * patch, width * patch)
    step = torch.tensor([round(sequence.time * 1000)])
    out = model(image, timestep=step, class_labels=torch.tensor([sequence.label]), return_dict=False)[0][0]
    out = out.reshape(-1, height, patch, width, patch).permute(1, 3, 2, 4, 0)
    return out.reshape(height * width, -1)


def check_export(case: Case, folder: Path) -> None:
    """Load an exported folder with diffusers and compare every parameter to the bit.

    Raises:
        AssertionError: if one differs.
    """
    loaded = _CLASSES[case.kind].from_pretrained(folder).state_dict()
    for name, value in reference_model(case).state_dict().items():
        assert torch.equal(value, loaded[name]), f"{case.name}: {name} differs after export"
