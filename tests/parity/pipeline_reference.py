"""The reference: diffusers' FluxPipeline. Needs the parity environment (`make parity`)."""

from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline

from tests.parity.pipeline import TEXT_TOKENS, PipelineCase, noise_of

__all__ = ["run_pipeline_reference"]


def run_pipeline_reference(case: PipelineCase, folder: Path) -> dict[str, np.ndarray]:
    """Pictures of a case by number, uint8 (height, width, 3), of the pipeline in a folder."""
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    results = {}
    for number, picture in enumerate(case.pictures):
        (image,) = pipe(
            prompt=picture.prompt,
            height=picture.height,
            width=picture.width,
            negative_prompt=picture.negative_prompt,
            true_cfg_scale=picture.true_cfg_scale,
            num_inference_steps=case.steps,
            guidance_scale=picture.guidance_scale,
            latents=torch.from_numpy(noise_of(case, number))[None],
            max_sequence_length=TEXT_TOKENS,
            output_type="np",
        ).images
        # safetensors writes a transposed array as if it were not.
        results[str(number)] = np.ascontiguousarray(np.round(255 * image).astype(np.uint8))
    return results
