"""Pictures and clips from a trained run: any batch, any devices, the same picture."""

import dataclasses
import json
import os
import shutil

import av
import numpy as np
import pytest
from PIL import Image

from experiments import sample, train
from experiments._config import UserError
from experiments._sampling import PictureSampler, check_requests
from experiments._workdir import load_run
from jaxdit.sampling import Request
from tests.experiments._program_cases import bindings, programs_shared, rows, run, snapshot, trained_run

SEVEN = Request("a handwritten seven", 32, 48, seed=4, number=3)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with programs_shared():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_run(tmp_path_factory)


@pytest.fixture(scope="module")
def opened(trained):
    return load_run(trained, [])


def draw(trained, *args):
    return run(sample.main, "--workdir", trained, *args)


def grey_levels(a, b):
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def test_grids_and_validation_while_training(trained):
    assert [path.name for path in sorted((trained / "samples").iterdir())] == [
        "step_0000003.png",
        "step_0000006.png",
    ]
    found = ["validation_loss" in row for row in rows(trained)]
    assert found == [False, False, True, False, False, True]
    assert all(np.isfinite(row["validation_loss"]) for row in rows(trained)[2::3])


def test_a_picture_and_what_it_says_of_itself(trained, tmp_path):
    out = tmp_path / "new" / "seven.png"
    assert draw(trained, "--prompt", SEVEN.prompt, "--size", "32x48", "--seed", 5, "--out", out) == 0
    with Image.open(out) as picture:
        assert picture.size == (48, 32)
        assert picture.mode == "RGB"
        about = picture.text
    assert about["prompt"] == SEVEN.prompt
    assert about["seed"] == "5"
    assert about["step"] == "6"


def test_several_prompts_in_one_batch_without_the_data(trained, tmp_path, monkeypatch):
    def refuse(**kwargs):
        raise AssertionError("the training data was opened")

    monkeypatch.setattr("experiments._data_components.quickstart_sources", refuse)
    shutil.copytree(trained, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    arguments = ["--prompt", "A ginger cat!", "--prompt", "", "--prompt", "../x", "--size", "16x24"]
    assert draw(tmp_path / "run", *arguments) == 0
    after = snapshot(tmp_path / "run")
    assert {path: after[path] for path in before} == before
    assert sorted(path.name for path in after if path not in before) == [
        "a_ginger_cat_16x24_seed0_0.png",
        "empty_16x24_seed0_1.png",
        "x_16x24_seed0_2.png",
    ]


def test_prompts_of_sizes_of_their_own_and_a_sheet_of_all(trained, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a seven | 16x24\na | b\nrabbits | 2x8x16 \n")
    sheet = tmp_path / "sheet.png"
    shutil.copytree(trained, tmp_path / "run")
    arguments = ["--prompts", prompts, "--size", "8x8", "--sheet", sheet, "--batch", 2]
    assert draw(tmp_path / "run", *arguments, *bindings(sampler__num_steps=1)) == 0
    assert sorted(path.name for path in (tmp_path / "run" / "samples").iterdir() if "seed" in path.name) == [
        "a_b_8x8_seed0_1.png",
        "a_seven_16x24_seed0_0.png",
        "rabbits_2x8x16_seed0_2.gif",
    ]
    with Image.open(sheet) as picture:
        assert json.loads(picture.text["captions"]) == ["a seven", "a | b", "rabbits"]
    with Image.open(tmp_path / "run" / "samples" / "rabbits_2x8x16_seed0_2.gif") as clip:
        assert json.loads(clip.info["comment"])["prompt"] == "rabbits"


def test_nothing_but_an_empty_prompt(trained, tmp_path):
    arguments = ["--prompt", "", "--size", "16x24", *bindings(sampler__num_steps=1)]
    assert draw(trained, *arguments, "--out", tmp_path / "a.png") == 0


def test_clips(trained, tmp_path):
    for name in ("clip.gif", "clip.mp4"):
        out = tmp_path / name
        assert draw(trained, "--prompt", "a rabbit", "--size", "16x24", "--frames", 3, "--out", out) == 0
        with av.open(str(out)) as container:
            about = container.metadata.get("comment", "{}")
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert name.endswith("gif") or json.loads(about)["prompt"] == "a rabbit"
        assert [frame.shape for frame in frames] == [(16, 24, 3)] * 3


def test_the_same_seed_gives_the_same_picture_and_another_another(opened):
    one, again = (PictureSampler(opened.run)(opened.params, [SEVEN])[0] for _ in range(2))
    np.testing.assert_array_equal(one, again)
    other = PictureSampler(opened.run)(opened.params, [dataclasses.replace(SEVEN, seed=5)])[0]
    assert grey_levels(one, other) > 20


@pytest.fixture(scope="module")
def batch(opened):
    """Prompts, sizes and noises of all kinds in one batch; three differ in nothing but the prompt."""
    requests = [
        Request("a ginger cat", 64, 32, seed=4),
        Request("", 16, 16, frames=2, seed=4, number=1),
        SEVEN,
        dataclasses.replace(SEVEN, number=4),
        dataclasses.replace(SEVEN, prompt="a ginger cat"),
        dataclasses.replace(SEVEN, prompt=""),
    ]
    return PictureSampler(opened.run)(opened.params, requests)


def test_a_picture_does_not_depend_on_its_batch(opened, batch):
    (alone,) = PictureSampler(opened.run)(opened.params, [SEVEN])
    assert [picture.shape for picture in batch[:3]] == [(1, 64, 32, 3), (2, 16, 16, 3), (1, 32, 48, 3)]
    assert grey_levels(batch[2], alone) <= 1
    assert grey_levels(batch[3], alone) > 20


def test_a_prompt_matters(batch):
    assert grey_levels(batch[2], batch[4]) > 1
    assert grey_levels(batch[2], batch[5]) > 1


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.full)])
def test_a_picture_does_not_depend_on_the_devices(trained, opened, devices):
    (here,) = PictureSampler(opened.run)(opened.params, [SEVEN])
    elsewhere = load_run(trained, [], devices)
    assert elsewhere.run.mesh.devices.size == devices
    (there,) = PictureSampler(elsewhere.run)(elsewhere.params, [SEVEN])
    assert grey_levels(here, there) <= 1


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--prompt", "a " * 65], "at most 64 tokens (words, longer ones 8 bytes a token); got 65"),
        (["--prompt", "é" * 257], "at most 64 tokens (words, longer ones 8 bytes a token); got 65"),
        (["--prompt", "a", "--size", "32x41"], "width: a positive multiple of 8; got width=41. Try 40."),
        (["--prompt", "a", "--size", "0x8"], "height: a positive multiple of 8; got height=0. Try 8."),
        (["--prompt", "a", "--frames", "0"], "frames: at least 1; got frames=0"),
        (["--prompt", "a", "--set", "sampler.method=rk4"], "method must be one of euler, heun, dpm++2m"),
        (["--prompt", "a", "--set", "text_to_image.width=64"], "axes_dim"),
        (["--prompt", "a", "--set", "text_to_image.num_single_blocks=3"], "is of another model"),
        (["--prompt", "a", "--set", "sampler.steps=3"], "the closest known is 'sampler.num_steps'"),
    ],
)
def test_what_the_model_cannot_make_is_refused(trained, capfd, args, part):
    assert draw(trained, *args) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert part in errors[0]
    assert len(list((trained / "samples").iterdir())) == 2


def test_sampling_is_priced_without_optimiser_and_for_one_layer(opened, monkeypatch):
    run = opened.run
    model = run.settings.model
    picture = dataclasses.replace(SEVEN, height=640, width=640)
    layer = 80 * 80 * model.width * np.dtype(model.dtype).itemsize
    enough = run._state_bytes(1) + layer
    assert enough < run._state_bytes(5) + model.depth * layer
    monkeypatch.setattr("experiments._run.device_memory_bytes", lambda devices: enough)
    check_requests([picture], run)
    with pytest.raises(UserError, match=r"the inputs of one layer.* that the parameters leave"):
        check_requests([dataclasses.replace(picture, height=648)], run)


def test_a_file_that_cannot_be_written(trained, tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    arguments = ["--prompt", SEVEN.prompt, "--size", "32x48", "--out", tmp_path / "file" / "a.png"]
    assert draw(trained, *arguments) == 2
    assert "Choose another --out" in capfd.readouterr().err
    assert not os.path.isdir(tmp_path / "file")


CLASSES = """
import experiments._components
train.model = @class_to_image()
train.objective = @diffusion()
train.data = @folder()
train.optimizer = @adamw()
train.sampler = @sampler()
train.num_devices = 1
train.steps = 2
train.block = 32
class_to_image.name = 'DiT-S/8'
class_to_image.channels = 3
class_to_image.num_classes = 2
diffusion.channels = 3
folder.patch = 8
folder.token_budget = 64
folder.max_tokens = 16
folder.max_text = 0
folder.allow_uncaptioned = True
adamw.learning_rate = 1e-3
sampler.num_steps = 2
sampler.guidance_scale = 2.0
"""


@pytest.mark.full
def test_a_class_conditional_run_on_a_folder(tmp_path, monkeypatch, capfd):
    rng = np.random.default_rng(0)
    for i in range(6):
        folder = tmp_path / "pictures" / ("cats", "dogs")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 16, 3), np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "classes.gin").write_text(CLASSES)
    monkeypatch.chdir(tmp_path)
    prompts = bindings(train__sample_prompts="['1 | 16x24']")
    arguments = ["--config", "classes", *bindings(folder__root="pictures"), *prompts]
    assert run(train.main, *arguments) == 0
    assert (tmp_path / "runs" / "classes" / "samples" / "step_0000002.png").exists()
    # From another folder, and with the pictures gone.
    shutil.rmtree(tmp_path / "pictures")
    monkeypatch.chdir(tmp_path / "runs")
    assert run(sample.main, "--workdir", "classes", "--prompt", "1", "--size", "16x24", "--out", "a.png") == 0
    with Image.open(tmp_path / "runs" / "a.png") as picture:
        assert picture.size == (24, 16)
    for prompt in ("2", "a cat", "-1", ""):
        assert run(sample.main, "--workdir", "classes", "--prompt", prompt, "--size", "16x24") == 2
        assert "a class number below 2" in capfd.readouterr().err.splitlines()[-1]
