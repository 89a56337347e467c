"""Runs that train adapters: nothing else changes, nothing else is saved, and shards give what copies give."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from experiments import evaluate, export, sample, train
from experiments._run import Run
from experiments._sampling import PictureSampler
from experiments._workdir import load_run
from jaxdit.models import MMDiTConfig, dit_config
from jaxdit.sampling import Request
from jaxdit.sampling.programs import make_evaluation, make_home, make_start
from jaxdit.weights import Lora, SaveFormat, abstract_params, load_lora, load_params, merge_lora, save_params
from tests.experiments._data_cases import save_image
from tests.experiments._program_cases import (
    arrays,
    bindings,
    checkpoints,
    losses,
    programs_shared,
    run,
    start_two,
)
from tests.processes import finish_together

CONFIG = MMDiTConfig(
    in_channels=16,
    text_channels=16,
    pooled_channels=16,
    width=64,
    num_heads=4,
    num_double_blocks=2,
    num_single_blocks=3,
    axes_dim=(4, 6, 6),
)
GIN = """
import experiments._components
train.model = @text_to_image()
train.objective = @flow_matching()
train.data = @synthetic()
train.optimizer = @adamw()
train.adapter = @lora()
train.init_from = '{weights}'
train.num_devices = 4
train.bags = 'g2n2'
train.steps = 3
train.block = 32
train.save_every = 3
train.lookahead = 4
train.remat = 'full'
synthetic.codes = 'g2b2i64f1s0,g2b1i128f1s0'
synthetic.channels = 16
synthetic.text_channels = 16
synthetic.pooled_channels = 16
synthetic.max_text = 12
text_to_image.width = 64
text_to_image.num_heads = 4
text_to_image.num_double_blocks = 2
text_to_image.num_single_blocks = 3
text_to_image.axes_dim = [4, 6, 6]
text_to_image.channels = 16
text_to_image.text_channels = 16
text_to_image.pooled_channels = 16
text_to_image.max_text = None
adamw.learning_rate = 0.01
lora.rank = 4
lora.alpha = 8.0
"""


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with programs_shared():
        yield


def random_params(config, size):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (size * rng.standard_normal(leaf.shape)).astype(np.float32), abstract_params(config)
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with weights and a config that fine-tunes them."""
    root = tmp_path_factory.mktemp("base")
    save_params(root / "weights", random_params(CONFIG, 0.1), CONFIG)
    (root / "lora.gin").write_text(GIN.format(weights=root / "weights"))
    return root


@pytest.fixture(scope="module")
def trained(base):
    assert run(train.main, "--config", base / "lora.gin", "--workdir", base / "run") == 0
    return base / "run"


def test_checkpoints_hold_adapters_alone(trained):
    names = {name.split(".", 1)[1] for name in arrays(trained, 3) if name.startswith(("params.", "ema."))}
    assert len(names) == 2 * (12 + 5)
    assert all(".adapter.parts." in name for name in names)
    about = json.loads((trained / "about.json").read_text())
    assert about["parameters"] > 200_000
    found = arrays(trained, 3)
    b = [value for name, value in found.items() if name.startswith("params.") and name.endswith(".b")]
    assert all(np.abs(value).max() > 1e-3 for value in b)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train__shards": 4}, marks=pytest.mark.full),
        pytest.param({"train__shards": 2, "train__bags": "g4n1"}, marks=pytest.mark.full),
        pytest.param({"train__num_devices": 1, "train__bags": "None"}, marks=pytest.mark.full),
    ],
)
def test_placement_does_not_matter(base, trained, tmp_path, changes):
    assert run(train.main, "--config", base / "lora.gin", "--workdir", tmp_path, *bindings(**changes)) == 0
    np.testing.assert_allclose(losses(tmp_path), losses(trained), rtol=1e-4)
    ours, theirs = arrays(tmp_path, 3), arrays(trained, 3)
    for name, value in theirs.items():
        if name.startswith("params."):
            assert np.abs(ours[name] - value).max() < 1e-3 * max(np.abs(value).max(), 0.01), name


def two_processes(*args, cache):
    """Trains in two processes with two devices each."""
    processes = finish_together(start_two("train", *args, cache=cache), timeout=240)
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr[-3000:]


@pytest.mark.full
def test_two_processes_do_what_one_does(base, trained, tmp_path):
    """Also over a checkpoint between; every process reads what is frozen, and holds a part of it."""
    arguments = ["--config", base / "lora.gin", "--workdir", tmp_path / "run", *bindings(train__shards=4)]
    two_processes(*arguments, *bindings(train__steps=2), cache=tmp_path / "cache")
    assert checkpoints(tmp_path / "run") == [2]
    two_processes(*arguments, cache=tmp_path / "cache")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(trained), rtol=1e-4)
    exported = []
    for workdir in (tmp_path / "run", trained):
        folder = tmp_path / f"adapters_{len(exported)}"
        assert run(export.main, "--workdir", workdir, "--out", folder) == 0
        exported.append(load_file(folder / "pytorch_lora_weights.safetensors"))
    assert exported[0].keys() == exported[1].keys()
    for name, value in exported[1].items():
        assert np.abs(exported[0][name] - value).max() < 1e-3 * max(np.abs(value).max(), 0.01), name


@pytest.mark.full
def test_going_on_loads_what_is_frozen_again(base, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    arguments = ["--config", base / "lora.gin", "--workdir", tmp_path / "run", *bindings(train__steps=6)]
    assert run(train.main, *arguments) == 0
    straight = ["--config", base / "lora.gin", "--workdir", tmp_path / "straight", *bindings(train__steps=6)]
    assert run(train.main, *straight) == 0
    assert losses(tmp_path / "run")[3:] == losses(tmp_path / "straight")[3:]


def test_exported_adapters_and_models(base, trained, tmp_path):
    lora = Lora(4, 8.0)
    assert run(export.main, "--workdir", trained, "--out", tmp_path / "adapters") == 0
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["pytorch_lora_weights.safetensors"]
    adapters = load_lora(tmp_path / "adapters", CONFIG, lora)
    saved = arrays(trained, 3)["ema.backbone.single_blocks.linear2.adapter.parts.proj_out.b"]
    np.testing.assert_array_equal(
        adapters["single_blocks"]["linear2"]["adapter"]["parts"]["proj_out"]["b"], saved
    )
    assert run(export.main, "--workdir", trained, "--out", tmp_path / "merged", "--merge") == 0
    whole = load_params(tmp_path / "merged", CONFIG)
    before = load_params(base / "weights", CONFIG)
    pair = adapters["double_blocks"]["txt"]["proj"]["adapter"]["parts"]["attn_to_add_out"]
    difference = (
        whole["double_blocks"]["txt"]["proj"]["kernel"] - before["double_blocks"]["txt"]["proj"]["kernel"]
    )
    np.testing.assert_allclose(difference, lora.scale * pair["a"] @ pair["b"], atol=1e-6)
    np.testing.assert_array_equal(whole["img_in"]["kernel"], before["img_in"]["kernel"])


@pytest.mark.full
def test_a_run_that_starts_from_adapters(base, trained, tmp_path, monkeypatch):
    assert run(export.main, "--workdir", trained, "--out", tmp_path / "adapters") == 0
    read = []
    monkeypatch.setattr(
        "experiments._pretrained.load_lora", lambda *args: (read.append(1), load_lora(*args))[1]
    )
    changes = bindings(
        lora__init_from=f"'{tmp_path / 'adapters'}'", train__steps=1, adamw__learning_rate=1e-30
    )
    assert run(train.main, "--config", base / "lora.gin", "--workdir", tmp_path / "run", *changes) == 0
    assert len(read) == 1
    found = arrays(tmp_path / "run", 1)
    for name, value in arrays(trained, 3).items():
        if name.startswith("ema."):
            np.testing.assert_array_equal(found[name.replace("ema.", "params.", 1)], value)


@pytest.mark.full
def test_frozen_parameters_in_half_precision(base, trained, tmp_path):
    changes = bindings(lora__frozen_dtype="'bfloat16'", lora__targets="['to_q', 'proj_out']")
    assert run(train.main, "--config", base / "lora.gin", "--workdir", tmp_path, *changes) == 0
    np.testing.assert_allclose(losses(tmp_path)[0], losses(trained)[0], rtol=2e-2)
    names = {name for name in arrays(tmp_path, 3) if name.startswith("params.")}
    assert len(names) == 2 * (1 + 2)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"train__init_from": "None"}, "give the model, train.init_from"),
        ({"text_to_image__max_text": 16}, "a text encoder trained along would stay untrained"),
        ({"lora__targets": "['to_z']"}, "got to_z. They are"),
        ({"lora__rank": 0}, "rank and alpha must be positive"),
        ({"lora__frozen_dtype": "'int8'"}, "frozen_dtype must be float32 or bfloat16"),
        ({"lora__init_from": "'nowhere'"}, "lora.init_from: nowhere does not exist"),
        ({"train__adapter": "@lora"}, "must be a configurable of its kind, called, such as @lora()"),
    ],
)
def test_what_is_refused(base, tmp_path, capfd, monkeypatch, changes, part):
    monkeypatch.setattr("experiments._loop.Trainer.train", None)
    arguments = ["--config", base / "lora.gin", "--workdir", tmp_path / "run", *bindings(**changes)]
    assert run(train.main, *arguments) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert part in lines[0]


def test_adapters_are_of_one_model(base, trained, tmp_path, capfd):
    """Other frozen weights, or another scale, would make something else of them."""
    shutil.copytree(trained, tmp_path / "run")
    other = jax.tree.map(lambda x: 2 * x, load_params(base / "weights", CONFIG))
    save_params(tmp_path / "other", other, CONFIG)
    for changes, part in (
        ({"train__init_from": f"'{tmp_path / 'other'}'"}, "other the weights at train.init_from"),
        ({"lora__alpha": 80.0}, "other lora.alpha / lora.rank"),
        ({"lora__targets": "['to_q']"}, "is of another model|other lora.targets"),
    ):
        arguments = [
            "--config",
            base / "lora.gin",
            "--workdir",
            tmp_path / "run",
            *bindings(train__steps=6, **changes),
        ]
        assert run(train.main, *arguments) == 2
        assert re.search(part, capfd.readouterr().err.splitlines()[-1])
    arguments = ["--workdir", tmp_path / "run", "--out", tmp_path / "a", *bindings(lora__alpha=80.0)]
    assert run(export.main, *arguments) == 2
    assert "other lora.alpha / lora.rank" in capfd.readouterr().err.splitlines()[-1]


def test_exporting_adapters_needs_no_base(base, trained, tmp_path, capfd):
    gone = bindings(train__init_from="'/nowhere'")
    assert run(export.main, "--workdir", trained, "--out", tmp_path / "a", *gone) == 0
    found = load_file(tmp_path / "a" / "pytorch_lora_weights.safetensors")
    assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in found
    assert run(export.main, "--workdir", trained, "--out", tmp_path / "b", "--merge", *gone) == 2
    assert "does not exist" in capfd.readouterr().err.splitlines()[-1]
    assert run(export.main, "--workdir", trained, "--out", tmp_path / "b", "--dtype", "bfloat16") == 2
    assert "adapters are written in float32" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("program", [sample, evaluate])
def test_rows_that_are_no_pixels_make_no_pictures(trained, capfd, program):
    """Refused before the base is looked for: it may be large."""
    arguments = ["--prompt", "a cat"] if program is sample else []
    gone = bindings(train__init_from="'/nowhere'")
    assert run(program.main, "--workdir", trained, *arguments, *gone) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert "cannot make pictures: its rows, of encoded or synthetic data, are no pixels" in error
    assert "experiments.export" in error


CLASSES = dit_config("DiT-S/8", channels=3, num_classes=2)
PIXELS = """
import experiments._components
train.model = @class_to_image()
train.objective = @diffusion()
train.data = @folder()
train.optimizer = @adamw()
train.sampler = @sampler()
train.adapter = @lora()
train.init_from = '{root}/weights.safetensors'
train.num_devices = 1
train.steps = 3
train.block = 32
train.ema_decay = 0.5
class_to_image.name = 'DiT-S/8'
class_to_image.channels = 3
class_to_image.num_classes = 2
diffusion.channels = 3
folder.root = '{root}/pictures'
folder.patch = 8
folder.token_budget = 64
folder.max_tokens = 16
folder.max_text = 0
folder.allow_uncaptioned = True
adamw.learning_rate = 0.03
lora.rank = 2
sampler.num_steps = 2
sampler.guidance_scale = 2.0
"""


@pytest.mark.full
def test_pictures_of_a_run_on_pixels_are_those_of_the_merged_model(tmp_path, monkeypatch):
    save_params(tmp_path / "base", random_params(CLASSES, 0.05), CLASSES, SaveFormat(layout="original"))
    shutil.move(tmp_path / "base" / "dit.safetensors", tmp_path / "weights.safetensors")
    for i in range(6):
        save_image(tmp_path / "pictures" / ("cats", "dogs")[i % 2] / f"{i}.png", 24, 16)
    (tmp_path / "classes.gin").write_text(PIXELS.format(root=tmp_path))
    workdir, out = tmp_path / "run", tmp_path / "a.png"
    assert run(train.main, "--config", tmp_path / "classes.gin", "--workdir", workdir) == 0
    assert run(sample.main, "--workdir", workdir, "--prompt", "1", "--size", "16x24", "--out", out) == 0

    opened = load_run(workdir, [])
    adapters = {name: value for name, value in arrays(workdir, 3).items() if name.startswith("ema.")}
    assert adapters
    for name, value in adapters.items():
        found = opened.params
        for part in name.split(".")[1:]:
            found = found[part]
        np.testing.assert_array_equal(found, value)
    before = load_params(tmp_path / "weights.safetensors", CLASSES)
    np.testing.assert_array_equal(opened.params["blocks"]["qkv"]["kernel"], before["blocks"]["qkv"]["kernel"])

    settings = opened.run.settings
    # Programs are shared by configs, and that of the plain model would be taken for that of the adapted one.
    for make in (make_start, make_evaluation, make_home):
        monkeypatch.setattr(f"jaxdit.sampling._engine.{make.__name__}", make)
    plain = Run.make(dataclasses.replace(settings, adapter=None), opened.run.mesh, None)
    merged = merge_lora(opened.params, CLASSES, settings.adapter.lora)
    request = Request("1", 16, 24)
    with Image.open(out) as picture:
        drawn = np.asarray(picture).astype(int)
    (expected,) = PictureSampler(plain)(merged, [request])
    assert np.abs(drawn - expected[0]).max() <= 1
    (without,) = PictureSampler(plain)(before, [request])
    assert np.abs(drawn - without[0]).max() > 10
