"""Weights out of a run and into another: exported folders, and runs that start from them."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments import export, train
from experiments._workdir import load_run
from jaxdit.weights import load_params, read_config
from tests.experiments._program_cases import (
    ROOT,
    TINY,
    arrays,
    bindings,
    programs_shared,
    run,
    snapshot,
    trained_run,
)

# A step that changes no parameter, so that what a run started from can be read from its checkpoint.
STILL = bindings(
    train__steps=1,
    train__num_devices=1,
    train__bags="None",
    train__sample_prompts="[]",
    adamw__learning_rate=1e-30,
)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with programs_shared():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_run(tmp_path_factory)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "weights"
    before = snapshot(trained)
    assert run(export.main, "--workdir", trained, "--out", folder) == 0
    assert snapshot(trained) == before
    return folder


def test_exported_weights_are_those_of_the_run(trained, exported):
    opened = load_run(trained, [])
    config = opened.run.settings.model.config
    assert read_config(exported, compute_dtype="float32") == config
    jax.tree.map(np.testing.assert_array_equal, load_params(exported, config), opened.params["backbone"])


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["--layout", "original"], ["flux1.safetensors"]),
        (["--dtype", "bfloat16"], ["config.json", "diffusion_pytorch_model.safetensors"]),
    ],
)
def test_layouts_and_dtypes(trained, tmp_path, arguments, files):
    assert run(export.main, "--workdir", trained, "--out", tmp_path / "a", *arguments) == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == files
    dtypes = {str(value.dtype) for value in load_file(tmp_path / "a" / files[-1]).values()}
    assert dtypes == {"bfloat16" if "bfloat16" in arguments else "float32"}


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_run_that_starts_from_a_checkpoint(trained, exported, tmp_path, devices):
    expected = arrays(trained, 6)
    changes = [*STILL, *bindings(train__init_from=f"'{exported}'", train__ema_decay=0.0)]
    if devices > 1:
        changes += bindings(train__num_devices=devices, train__shards=devices, train__remat="'full'")
    assert run(train.main, "--config", TINY, "--workdir", tmp_path / "run", *changes) == 0
    found = arrays(tmp_path / "run", 1)
    backbone = [name for name in expected if name.startswith("ema.backbone.")]
    assert len(backbone) > 20
    for name in backbone:
        np.testing.assert_array_equal(found[name.replace("ema.", "params.", 1)], expected[name])
        np.testing.assert_array_equal(found[name], expected[name])
    # The text encoder is no part of the checkpoint: it starts as ever.
    name = next(name for name in expected if name.startswith("params.text_encoder."))
    assert not np.array_equal(found[name], expected[name])


@pytest.mark.full
def test_the_checkpoint_is_not_needed_to_go_on(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "weights")
    arguments = ["--config", TINY, "--workdir", tmp_path / "run", *STILL]
    arguments += bindings(train__init_from=f"'{tmp_path / 'weights'}'")
    assert run(train.main, *arguments) == 0
    shutil.rmtree(tmp_path / "weights")
    assert run(train.main, *arguments, *bindings(train__steps=2)) == 0


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train__init_from": "'nowhere'"}, ["train.init_from: nowhere does not exist"]),
        ({"text_to_image__num_single_blocks": 2}, ["num_single_blocks=1 there, 2 here"]),
        (
            {"text_to_image__num_heads": 1, "text_to_image__axes_dim": "[8, 12, 12]"},
            ["num_heads=2 there, 1 here"],
        ),
    ],
)
def test_checkpoints_of_another_model(exported, tmp_path, capfd, monkeypatch, changes, parts):
    monkeypatch.setattr("experiments._loop.Trainer.train", None)
    changes = {"train__init_from": f"'{exported}'", **changes}
    arguments = ["--config", TINY, "--workdir", tmp_path / "run", *STILL, *bindings(**changes)]
    assert run(train.main, *arguments) == 2
    line = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(line) == 1
    assert all(part in line[0] for part in parts), line
    assert not (tmp_path / "run" / "config.gin").exists()


def test_the_command(trained, tmp_path):
    """In a process of its own, which has imported nothing else."""
    command = [
        sys.executable,
        "-m",
        "experiments.export",
        "--workdir",
        str(trained),
        "--out",
        str(tmp_path / "a"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "config.json").exists()


def test_what_export_refuses(trained, exported, tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    for arguments, part in (
        (["--workdir", trained, "--out", exported], "is there already and not empty"),
        (["--workdir", tmp_path, "--out", tmp_path / "a"], "no config.gin"),
        (["--workdir", trained, "--out", tmp_path / "file" / "a"], "Choose another --out"),
        (
            ["--workdir", trained, "--out", tmp_path / "a", "--max-file-gb", "0"],
            "--max-file-gb must be positive",
        ),
    ):
        assert run(export.main, *arguments) == 2
        assert part in capfd.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_importing_a_folder_needs_no_device():
    """Names and shapes are checked without JAX's backend."""
    code = (
        "import jaxdit.weights, jax._src.xla_bridge as bridge; from jaxdit.models import FLUX_DEV;"
        " jaxdit.weights.abstract_params(FLUX_DEV); assert not bridge._backends"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_config_of_an_export_is_json(exported):
    values = json.loads((exported / "config.json").read_text())
    assert values["_class_name"] == "FluxTransformer2DModel"
    assert values["num_layers"] == 1
