"""Class-conditional pipelines: pictures against diffusers', recorded by `make parity`, and what is refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdit.pipelines import DiTPipeline, FluxPipeline, open_pipeline
from jaxdit.sampling import Engine, Request
from tests.parity.pipeline import PIPELINE_BOUND, PIPELINE_CASES, write_pipeline
from tests.parity.pipeline_ours import requests_of

RECORDED = Path(__file__).parents[1] / "data" / "parity"
CASES = {case.name: case for case in PIPELINE_CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines") / "dit"
    write_pipeline(CASES["pipeline_dit"], folder)
    return folder


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 4])
def test_pictures_are_those_of_diffusers(folder, devices):
    recorded = load_file(RECORDED / "pipeline_dit.safetensors")
    pipeline = open_pipeline(folder, jax.devices()[:devices], compute_dtype="float32")
    assert isinstance(pipeline, DiTPipeline)
    engine = Engine(pipeline, jax.devices()[:devices])
    requests = requests_of(CASES["pipeline_dit"])
    for number, sample in enumerate(engine.generate(requests)):
        assert sample.error is None
        difference = np.abs(sample.frames[0].astype(int) - recorded[str(number)].astype(int))
        assert difference.max() <= PIPELINE_BOUND
    # Another size, and one alone.
    (sample,) = engine.generate([Request("vulpes VULPES", 12, 20, steps=2)])
    assert sample.frames.shape == (1, 12, 20, 3)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"prompt": "1000"}, "prompt: the number of a class, below 1000"),
        ({"prompt": "-1"}, "prompt: the number of a class"),
        ({"prompt": "red foxx"}, "or the name of one, such as 'red fox'; got 'red foxx'"),
        ({"negative_prompt": "grey"}, "negative_prompt: this model takes classes"),
        ({"true_guidance": 2.0}, "true_guidance: guidance of this model is classifier-free already"),
        ({"frames": 2}, "frames: this model makes pictures"),
        ({"height": 6}, "height: a positive multiple of 4"),
    ],
)
def test_requests_that_cannot_be_made(folder, change, part):
    pipeline = DiTPipeline(folder, jax.devices()[:1], compute_dtype="float32")
    with pytest.raises(ValueError, match=r"^.*") as error:
        pipeline.checked(Request(**{"prompt": "3", "height": 16, "width": 16, **change}))
    assert part in str(error.value)


def test_folders_of_other_pipelines(folder, tmp_path):
    with pytest.raises(ValueError, match="must be a FluxPipeline; got 'DiTPipeline'"):
        FluxPipeline(folder)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "PixArtAlphaPipeline"}))
    with pytest.raises(ValueError, match="must be a FluxPipeline or DiTPipeline; got 'PixArtAlphaPipeline'"):
        open_pipeline(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline"}))
    with pytest.raises(ValueError, match="lacks transformer, vae, scheduler"):
        open_pipeline(tmp_path)
