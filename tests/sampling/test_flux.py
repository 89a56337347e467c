"""FLUX.1 pipelines: pictures against diffusers', recorded by `make parity`, and folders that are none."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdit.pipelines import FluxPipeline
from jaxdit.sampling import Engine, Request
from tests.parity.pipeline import PIPELINE_BOUND, PIPELINE_CASES, TEXT_TOKENS, write_pipeline
from tests.parity.pipeline_ours import requests_of

RECORDED = Path(__file__).parents[1] / "data" / "parity"
CASES = {case.name: case for case in PIPELINE_CASES if case.kind != "dit"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    for name, case in CASES.items():
        write_pipeline(case, root / name)
    return root


def opened(folder, devices=1, **options):
    options = {"text_tokens": TEXT_TOKENS, "compute_dtype": "float32", **options}
    return FluxPipeline(folder, jax.devices()[:devices], **options)


FULL = pytest.mark.full


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=FULL)], ids=["packed", "alone"])
@pytest.mark.parametrize("devices", [pytest.param(1, marks=FULL), 4])
@pytest.mark.parametrize("name", ["pipeline_dev", pytest.param("pipeline_schnell", marks=FULL)])
def test_pictures_are_those_of_diffusers(folders, name, devices, alone):
    case, recorded = CASES[name], load_file(RECORDED / f"{name}.safetensors")
    engine = Engine(opened(folders / name, devices), jax.devices()[:devices])
    requests = requests_of(case)
    batches = [[request] for request in requests] if alone else [requests]
    samples = [sample for batch in batches for sample in engine.generate(batch)]
    for number, sample in enumerate(samples):
        assert sample.error is None
        right = recorded[str(number)]
        (frame,) = sample.frames
        assert frame.shape == right.shape
        assert np.abs(frame.astype(int) - right.astype(int)).max() <= PIPELINE_BOUND


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"height": 18}, "height: a positive multiple of 4; got height=18. Try 16."),
        ({"width": 0}, "width: a positive multiple of 4; got width=0. Try 4."),
        ({"height": 4 << 20}, "at most 8,192 each"),
        ({"height": 8192, "width": 4096}, "at most 16,777,216 pixels"),
        ({"steps": 0}, "steps: 1 to 1000; got steps=0"),
        ({"guidance": float("nan")}, "guidance: finite"),
        ({"true_guidance": -1.0}, "true_guidance: finite and not negative"),
        ({"seed": -1}, "seed: 0 to"),
        ({"number": -1}, "number: 0 to"),
        ({"frames": 2}, "frames: this model makes pictures"),
        ({"frames": 0}, "frames: at least 1"),
        ({"prompt": "snow " * 40}, "at most max_length=24 tokens"),
        ({"prompt": "\ud800"}, "prompt: valid Unicode"),
        ({"noise": np.zeros((3, 64), np.float32)}, "noise: one row for each of 16 tokens"),
    ],
)
def test_requests_that_cannot_be_made(folders, change, part):
    pipeline = opened(folders / "pipeline_dev")
    with pytest.raises(ValueError, match=r"^.*") as error:
        pipeline.checked(Request(**{"prompt": "a cat", "height": 16, "width": 16, **change}))
    assert part in str(error.value)


def test_schnell_has_no_guidance(folders):
    pipeline = opened(folders / "pipeline_schnell")
    with pytest.raises(ValueError, match=r"no distilled guidance; got guidance=3\.5"):
        pipeline.checked(Request("a cat", 16, 16, guidance=3.5))
    assert pipeline.checked(Request("a cat", 16, 16)).steps == 4


def test_long_prompts_are_cut_where_that_is_asked_for(folders):
    pipeline = opened(folders / "pipeline_dev", on_long="truncate")
    assert pipeline.checked(Request("snow " * 40, 16, 16)).steps == 28


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        (lambda folder: (folder / "model_index.json").unlink(), "is no pipeline: it has no model_index.json"),
        (lambda folder: (folder / "model_index.json").write_text("{"), "cannot be read"),
        (
            lambda folder: _set(folder / "model_index.json", _class_name="StableDiffusionPipeline"),
            "FluxPipeline",
        ),
        (lambda folder: shutil.rmtree(folder / "vae"), "lacks vae"),
        (lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink(), "vae"),
        (lambda folder: _set(folder / "scheduler" / "scheduler_config.json", _class_name="PNDM"), "PNDM"),
        (
            lambda folder: _swap(folder / "text_encoder", folder / "text_encoder_2"),
            "must be a ClipTextConfig",
        ),
        (lambda folder: _swap(folder / "tokenizer", folder / "tokenizer_2"), "is not the tokenizer of"),
    ],
)
def test_folders_that_are_no_pipeline(folders, tmp_path, broken, part):
    shutil.copytree(folders / "pipeline_dev", tmp_path / "broken")
    broken(tmp_path / "broken")
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=r"^.*") as error:
        opened(tmp_path / "broken")
    assert part in str(error.value)


def _set(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _swap(first, second):
    first.rename(first.with_name("swapped"))
    second.rename(first)
    first.with_name("swapped").rename(second)
