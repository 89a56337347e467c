"""The pipeline here on a case of `tests.parity.pipeline`."""

from pathlib import Path

import jax
import numpy as np

from jaxdit.pipelines import open_pipeline
from jaxdit.sampling import Engine, Request
from tests.parity.pipeline import TEXT_TOKENS, PipelineCase, noise_of

__all__ = ["pipeline_errors", "requests_of", "run_our_pipeline"]


def requests_of(case: PipelineCase) -> list[Request]:
    """The pictures of a case as requests."""
    return [
        Request(
            picture.prompt,
            picture.height,
            picture.width,
            steps=case.steps,
            guidance=None if case.kind == "schnell" else picture.guidance_scale,
            negative_prompt=picture.negative_prompt,
            true_guidance=picture.true_cfg_scale,
            noise=noise_of(case, number),
        )
        for number, picture in enumerate(case.pictures)
    ]


def run_our_pipeline(case: PipelineCase, folder: Path, devices: int = 1) -> dict[str, np.ndarray]:
    """Pictures of a case by number, uint8 (height, width, 3), all in one batch."""
    some = jax.devices()[:devices]
    options = {} if case.kind == "dit" else {"text_tokens": TEXT_TOKENS}
    pipeline = open_pipeline(folder, some, compute_dtype="float32", **options)
    samples = Engine(pipeline, some).generate(requests_of(case))
    return {str(number): sample.frames[0] for number, sample in enumerate(samples)}


def pipeline_errors(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, int]:
    """The largest difference of a pixel, in levels of 255, of each picture."""
    return {
        name: int(np.abs(ours[name].astype(int) - right.astype(int)).max())
        for name, right in reference.items()
    }
