"""What is checked before anything starts: one clear line on stderr each, exit code 2, and nothing is compiled."""

import jax
import numpy as np
import pytest
from PIL import Image

from experiments import _platform, _run, sample, train
from tests.experiments._program_cases import ROOT, TINY, bindings, run

SYNTHETIC = """
include 'tiny.gin'
train.data = @synthetic()
text_to_image.max_text = 400
synthetic.channels = 192
synthetic.num_steps = 2
synthetic.codes = 'g8b2i64f1s0'
"""
FOLDER = """
include 'tiny.gin'
train.data = @folder()
folder.token_budget = 2000
folder.max_tokens = 500
folder.patch = 8
"""
CLASSES = """
include 'tiny.gin'
train.data = @synthetic()
train.model = @class_to_image()
train.objective = @diffusion()
class_to_image.name = 'DiT-S/4'
class_to_image.channels = 3
class_to_image.num_classes = 10
diffusion.channels = 3
synthetic.codes = 'g8b2i64f1s0'
synthetic.channels = 48
synthetic.max_text = 0
synthetic.num_classes = 10
synthetic.num_steps = 2
"""


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a program was made before the config was refused")

    monkeypatch.setattr("experiments._loop.make_train_step", refuse)
    monkeypatch.setattr(_run.Run, "init_state", refuse)


@pytest.fixture
def refused(tmp_path, capfd, monkeypatch):
    """`refused(config text or path, *args)`: the one line with which training refuses to start."""
    monkeypatch.chdir(tmp_path)

    def start(config, *args):
        if "\n" in str(config):
            path = tmp_path / "case.gin"
            path.write_text(config.replace("tiny.gin", str(TINY)))
            config = path
        assert run(train.main, "--config", config, "--workdir", tmp_path / "run", *args) == 2
        out, err = capfd.readouterr()
        lines = err.splitlines()
        assert out == ""
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        assert "Traceback" not in err
        assert not (tmp_path / "run" / "config.gin").exists()
        return lines[0]

    return start


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train__stepz": 5}, ["'stepz'", "the closest known is 'train.steps'"]),
        ({"trian__steps": 5}, ["'trian'", "the closest known is 'train"]),
        ({"train__steps": "many"}, ["train.steps must be int", "'many'"]),
        ({"train__steps": "%gin.REQUIRED"}, ["train.steps"]),
        ({"train__bags": "g2m4"}, ["train.bags", "g2m4"]),
        ({"train__bags": "g0n4"}, ["train.bags", "sizes and numbers >= 1"]),
        ({"train__bags": "g3n1"}, ["train.bags", "multiple of the 3", "num_devices=4"]),
        ({"train__bags": "g16n1"}, ["train.bags", "multiple of the 16"]),
        ({"train__num_devices": 0}, ["train.num_devices must be at least 1"]),
        ({"train__num_devices": 16, "train__bags": "g1n16"}, ["at most the 8 cpu devices", "num_devices=16"]),
        ({"train__shards": 3, "train__remat": "full"}, ["shards must divide the devices", "shards=3"]),
        ({"train__shards": 4}, ["train.remat must be full"]),
        ({"train__remat": "some"}, ["remat", "some"]),
        ({"train__devices_per_machine": 3}, ["devices_per_machine must be at least 1 and divide", "=3"]),
        ({"train__devices_per_machine": 0}, ["devices_per_machine must be at least 1 and divide", "=0"]),
        ({"train__devices_per_machine": -4}, ["devices_per_machine must be at least 1 and divide", "=-4"]),
        ({"train__head_groups": 0}, ["train.head_groups must be in [1, ", "head_groups=0"]),
        ({"train__block": 12}, ["train.block must be a multiple of 8", "block=12"]),
        ({"train__steps": 0}, ["train.steps must be at least 1"]),
        ({"train__eval_every": -1}, ["train.eval_every must not be negative"]),
        ({"train__ema_decay": 1.0}, ["train.ema_decay must be in [0, 1)"]),
        ({"train__on_nonfinite": "ignore"}, ["train.on_nonfinite must be skip or stop"]),
        ({"train__objective": "@diffusion()"}, ["train.objective must be flow_matching for text_to_image"]),
        ({"text_to_image__num_heads": 3}, ["width / num_heads", "num_heads=3"]),
        ({"text_to_image__axes_dim": "[4, 6, 8]"}, ["axes_dim", "add up to"]),
        ({"text_to_image__axes_dim": 4}, ["text_to_image.axes_dim must be a list; got 4"]),
        (
            {"text_to_image__channels": 100},
            ["model.channels must be the data's 192 channels", "channels=100"],
        ),
        ({"quickstart__patch": 4}, ["model.channels must be the data's 48 channels", "patch"]),
        ({"text_to_image__max_text": 8}, ["max_text must hold the longest caption", "max_text=8"]),
        ({"text_to_image__guidance_embed": True}, ["flow_matching.guidance", "guidance=None"]),
        ({"flow_matching__guidance": 3.5}, ["flow_matching.guidance", "guidance_embed=False"]),
        ({"text_to_image__compute_dtype": "float16"}, ["compute_dtype", "float16"]),
        ({"quickstart__token_budget": 300}, ["every sequence must fit", "token_budget=300"]),
        ({"quickstart__weights": "[1.0]"}, ["one weight per source"]),
        ({"quickstart__caption_dropout": 1.5}, ["caption_dropout must be in [0, 1]"]),
        ({"adamw__decay": "step"}, ["adamw: decay must be one of", "'step'"]),
        ({"adamw__learning_rate": 0}, ["adamw: learning_rate must be positive", "learning_rate=0"]),
        ({"adamw__warmup_steps": -5}, ["warmup_steps in [0, 2^31)", "warmup_steps=-5"]),
        ({"adamw__clip_norm": 0.0}, ["clip_norm positive or None", "clip_norm=0.0"]),
        ({"adamw__b2": 1.0}, ["adamw: b1 and b2 must be in [0, 1)", "b2=1.0"]),
        ({"flow_matching__time_std": 0.0}, ["time_std must be positive; got time_std=0.0"]),
        ({"flow_matching__prediction": "noise"}, ["prediction must be 'velocity' or 'sample'", "'noise'"]),
        (
            {"flow_matching__shift": "@square_root_shift()", "square_root_shift__base_factor": 0.0},
            ["base_tokens and base_factor must be positive", "base_factor=0.0"],
        ),
        ({"sampler__method": "rk4"}, ["sampler: method must be one of", "'rk4'"]),
        ({"sampler__num_steps": 0}, ["num_steps must be at least 1"]),
        ({"adamw__learning_rate": "1e39"}, ["adamw.learning_rate must be a finite number", "1e+39"]),
        ({"flow_matching__time_mean": "1e400"}, ["flow_matching.time_mean must be a finite number", "inf"]),
        ({"train__sample_prompts": "a digit | 16x16"}, ["train.sample_prompts must be a list"]),
        ({"train__sample_prompts": "['a | 16x16', 5]"}, ["train.sample_prompts must be a list of texts"]),
        (
            {"train__sample_prompts": "['a | 400000x400000']"},
            ["at most 67,108,864 pixels; got 400000 x 400000"],
        ),
        ({"train__sample_prompts": "['\\ud800 | 16x16']"}, ["prompt: valid Unicode", "ud800"]),
        ({"train__model": "@text_to_image"}, ["train.model must be a configurable of its kind, called"]),
        ({"train__data": "@sampler()"}, ["train.data must be a configurable of its kind"]),
        ({"train__optimizer": "None"}, ["train.optimizer must be a configurable of its kind", "got None"]),
        ({"train__sampler": 7}, ["train.sampler must be a configurable of its kind", "got 7"]),
        ({"flow_matching__shift": 5}, ["shift", "5"]),
        ({"train__seed": 1 << 63}, ["train.seed must be in [0, 2^63)"]),
        ({"train__seed": -1}, ["train.seed must be in [0, 2^63)"]),
        ({"train__block": 1_000_000_000_000}, ["train.block must be a multiple of 8 in [8, 4096]"]),
        ({"quickstart__patch": 0}, ["quickstart: patch must be at least 1", "patch=0"]),
        ({"quickstart__token_budget": 10**12}, ["token_budget in [1, 2^31)"]),
        (
            {"folder__root": "/data"},
            ["--set folder.root=/data: nothing in this run uses folder", "@folder()"],
        ),
        ({"train__sample_prompts": "['a seven']"}, ["'caption | HEIGHTxWIDTH'", "'a seven'"]),
        ({"train__sample_prompts": "['a seven | 10']"}, ["HEIGHTxWIDTH", "'10'"]),
        ({"train__sample_prompts": "['a seven | 12x16']"}, ["height: a positive multiple of 8", "height=12"]),
        ({"train__sample_prompts": f"['{'a ' * 65} | 16x16']"}, ["at most 64 tokens", "got 65"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_settings(refused, changes, parts):
    line = refused(TINY, *bindings(**changes))
    assert all(part in line for part in parts), line


def test_config_files(refused, tmp_path):
    assert "Shipped configs: " in refused(tmp_path / "absent.gin")
    assert "quickstart.gin" in refused("quikstart")
    (tmp_path / "broken.gin").write_text("train.steps = [1,\n")
    assert "bracket" in refused(tmp_path / "broken.gin")
    line = refused("import experiments._components\ntrain.num_devices = 8\n")
    assert "train.model" in line
    assert "must be set" in line


def test_required_parameters_of_what_a_config_names(refused):
    line = refused("import experiments._components\ntrain.model = @text_to_image()\ntrain.num_devices = 8\n")
    assert "must be set" in line


@pytest.fixture
def pictures(tmp_path):
    root = tmp_path / "pictures"
    root.mkdir()
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (64, 48, 3), np.uint8)
        Image.fromarray(pixels).save(root / f"{i}.png")
        (root / f"{i}.txt").write_text("a picture of noise")
    return root


def test_data_folders(refused, pictures, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "must contain images or videos" in refused(FOLDER, *bindings(folder__root=tmp_path / "empty"))
    assert "must be a folder" in refused(FOLDER, *bindings(folder__root=tmp_path / "absent"))
    assert "absent" in refused(FOLDER, *bindings(folder__root=tmp_path / "absent" / "*.tar"))
    (pictures / "2.txt").unlink()
    line = refused(FOLDER, *bindings(folder__root=pictures))
    assert "caption" in line
    assert "2.png" in line


def test_files_that_cannot_be_read(refused, pictures):
    for i in range(4, 16):
        (pictures / f"{i}.png").write_bytes(b"no picture")
        (pictures / f"{i}.txt").write_text("a picture")
    assert "may be bad" in refused(FOLDER, *bindings(folder__root=pictures))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"synthetic__codes": "g8b2"}, ["gXbYiZfWsV", "g8b2"]),
        ({"synthetic__num_ranks": 12}, ["num_ranks must be a multiple"]),
        ({"synthetic__text_channels": 16}, ["text must come as the data brings it", "text_channels=16"]),
        ({"train__sample_prompts": "['a | 16x16']"}, ["cannot make pictures"]),
        # 4,096 frames of 1,024 x 1,024 tokens, on a device alone and shared by a bag of four.
        (
            {"synthetic__codes": "g8b1i16384f4096s0", "train__bags": None},
            ["the longest sequence has", "2 layers"],
        ),
        ({"synthetic__codes": "g8b1i16384f8192s0", "train__bags": "g4n1"}, ["the longest sequence has"]),
    ],
)
def test_synthetic_data(refused, changes, parts):
    line = refused(SYNTHETIC, *bindings(**changes))
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"synthetic__num_classes": 0}, ["needs a label for every sample"]),
        ({"synthetic__num_classes": 11}, ["num_classes must be above every label", "num_classes=10"]),
        ({"synthetic__max_text": 10}, ["has no place for text"]),
        ({"train__objective": "@flow_matching()"}, ["diffusion for class_to_image"]),
        ({"diffusion__channels": 4}, ["diffusion.channels must be class_to_image.channels"]),
        ({"sampler__method": "heun"}, ["train.sampler: heun: ", "got levels of a diffusion", "DPMSolver"]),
        ({"class_to_image__name": "DiT-S/3"}, ["DiT-S/3", "DiT-XL/2"]),
        ({"class_to_image__name": "DiT-S/8"}, ["channels per image row", "channels=192"]),
    ],
)
def test_class_conditional_models(refused, changes, parts):
    line = refused(CLASSES, *bindings(**changes))
    assert all(part in line for part in parts), line


def test_a_model_that_is_too_large_to_be_replicated(refused):
    sizes = {"width": 16384, "num_heads": 128, "axes_dim": "[16, 56, 56]", "num_single_blocks": 60}
    line = refused(TINY, *bindings(**{f"text_to_image__{name}": value for name, value in sizes.items()}))
    for part in (
        "parameters in float32, times 5",
        "a device",
        "Raise train.shards (now 1)",
        "allow_oversized",
    ):
        assert part in line
    sharded = refused(
        TINY,
        *bindings(**{f"text_to_image__{name}": value for name, value in sizes.items()}),
        *bindings(train__shards=4, train__remat="full"),
    )
    assert "over 4 shards" in sharded
    assert "Raise train.shards" not in sharded


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--coordinator", "localhost:1234"], "go together"),
        (["--num-processes", 2], "go together"),
        (["--coordinator", "host", "--num-processes", 2, "--process-id", 0], "HOST:PORT"),
        (["--coordinator", "host:1", "--num-processes", 2, "--process-id", 2], "--process-id must be in"),
        (["--coordinator", "host:1", "--num-processes", 3, "--process-id", 0], "multiple of the processes"),
        (["--profile", -1], "--profile"),
        (["--heartbeat", 0], "--heartbeat"),
    ],
)
def test_arguments(refused, args, part):
    assert part in refused(TINY, *args)


def test_unknown_arguments_are_an_error_of_two():
    with pytest.raises(SystemExit) as error:
        train.main(["--config", str(TINY), "--stepz", "3"])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--prompt", "a", "--size", "32"], "HEIGHTxWIDTH"),
        (["--prompt", "a", "--size", "4x32x32"], "--frames"),
        (["--prompt", "a", "--out", "a.jpg"], "must end in .png"),
        (["--prompt", "a", "--frames", 4, "--out", "a.png"], "must end in .gif or .mp4"),
        (["--prompt", "a", "--prompt", "b", "--out", "a.png"], "--out names one file"),
        (["--prompt", "a", "--devices", 0], "--devices must be at least 1"),
        (["--prompt", "a"], "no config.gin"),
    ],
)
def test_sampling(tmp_path, capfd, args, part):
    if "--devices" in args:
        (tmp_path / "config.gin").write_text((TINY).read_text())
    assert run(sample.main, "--workdir", tmp_path, *args) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert part in lines[0]


def test_sampling_a_run_without_a_checkpoint(tmp_path, capfd):
    (tmp_path / "config.gin").write_text(TINY.read_text())
    assert run(sample.main, "--workdir", tmp_path, "--prompt", "a") == 2
    assert "no checkpoint in" in capfd.readouterr().err.splitlines()[-1]


def test_devices_in_use_are_left_alone():
    before = jax.device_count()
    _platform.prepare_platform(before + 8, _platform.ProcessSettings())
    assert jax.device_count() == before


def test_the_config_of_the_tests_is_found_from_anywhere():
    assert TINY == ROOT / "tests" / "data" / "tiny.gin"
    assert TINY.is_file()
