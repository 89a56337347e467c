"""The reference: diffusers' FluxPipeline and DiTPipeline. Needs the parity environment (`make parity`)."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from diffusers import DiTPipeline, FluxPipeline

from jaxdit.encoders import Grid
from jaxdit.pipelines._latents import latents_of_rows
from tests.parity.pipeline import TEXT_TOKENS, UNIT, PipelineCase, noise_of

__all__ = ["run_pipeline_reference"]


def run_pipeline_reference(case: PipelineCase, folder: Path) -> dict[str, np.ndarray]:
    """Pictures of a case by number, uint8 (height, width, 3), of the pipeline in a folder."""
    run = _dit if case.kind == "dit" else _flux
    # safetensors writes a transposed array as if it were not.
    return {
        str(number): np.ascontiguousarray(np.round(255 * image).astype(np.uint8))
        for number, image in enumerate(run(case, folder))
    }


def _flux(case: PipelineCase, folder: Path) -> Iterator[np.ndarray]:
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
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
        yield image


def _dit(case: PipelineCase, folder: Path) -> Iterator[np.ndarray]:
    pipe = DiTPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for number, picture in enumerate(case.pictures):
        grid = Grid(1, picture.height // UNIT, picture.width // UNIT)
        latents = latents_of_rows(noise_of(case, number), grid, 2, channels_last=True)
        noise = torch.from_numpy(latents.transpose(0, 3, 1, 2).copy())
        name = picture.prompt.strip()
        label = int(name) if name.isdigit() else pipe.get_label_ids([name.lower()])[0]
        # It takes no noise from outside.
        with mock.patch("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda *_, x=noise, **__: x):
            (image,) = pipe(
                [label],
                guidance_scale=picture.guidance_scale,
                num_inference_steps=case.steps,
                output_type="np",
            ).images
        yield image
