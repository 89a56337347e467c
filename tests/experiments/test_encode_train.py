"""Training on encoded pictures: the same from a cache and with encoders beside the training, exact when resumed."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import export, train
from experiments._encoders import EncoderSettings
from experiments._encoding_source import EncodingSource
from experiments.data import BadSampleError, DataError, ImageFolder, MediaRules, Wanted
from jaxdit.weights import Lora, load_lora, load_params, read_config
from tests.experiments._encode_cases import (
    UNIT,
    encoded,
    encoders_shared,
    write_model,
    write_pictures,
)
from tests.experiments._program_cases import (
    arrays,
    bindings,
    interrupted,
    losses,
    programs_shared,
    rows,
    run,
    start_two,
)
from tests.parity.pipeline import TEXT_TOKENS
from tests.processes import finish_together

GIN = """
import experiments._components
train.model = @text_to_image()
train.objective = @flow_matching()
train.data = @encoded()
train.optimizer = @adamw()
train.init_from = '{model}/transformer'
train.adapter = @lora()
train.num_devices = 2
train.shards = 2
train.remat = 'full'
train.steps = 4
train.block = 32
train.save_every = 2
train.lookahead = 4
encoded.root = '{cache}'
encoded.token_budget = 500
encoded.caption_dropout = 0.3
folder.root = '{pictures}'
folder.token_budget = 500
folder.caption_dropout = 0.3
folder.patch = 4
folder.max_tokens = 128
folder.frame_stride = 2
folder.encoders = @flux_encoders()
flux_encoders.model = '{model}'
flux_encoders.text_tokens = {text_tokens}
flux_encoders.dtype = 'float32'
flux_encoders.text_dtype = 'float32'
flux_encoders.canvases = 1
text_to_image.width = 64
text_to_image.num_heads = 4
text_to_image.num_double_blocks = 1
text_to_image.num_single_blocks = 1
text_to_image.axes_dim = [4, 6, 6]
text_to_image.channels = 64
text_to_image.text_channels = 24
text_to_image.pooled_channels = 24
text_to_image.max_text = None
text_to_image.guidance_embed = True
flow_matching.guidance = 1.0
adamw.learning_rate = 3e-3
lora.rank = 4
"""
ON_THE_FLY = bindings(train__data="@folder()")


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with programs_shared(), encoders_shared():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a pipeline, pictures, their cache, and a config for both."""
    root = tmp_path_factory.mktemp("base")
    write_model(root / "model")
    write_pictures(root / "pictures")
    assert encoded(root / "model", root / "pictures", root / "cache") == 0
    paths = {name: root / name for name in ("model", "pictures", "cache")}
    (root / "tune.gin").write_text(GIN.format(**paths, text_tokens=TEXT_TOKENS))
    return root


def trained(base, workdir, *changes):
    assert run(train.main, "--config", base / "tune.gin", "--workdir", workdir, *changes) == 0
    return workdir


@pytest.fixture(scope="module")
def cached(base):
    return trained(base, base / "cached")


@pytest.fixture(scope="module")
def on_the_fly(base):
    return trained(base, base / "on_the_fly", *ON_THE_FLY)


def test_encoders_beside_the_training_give_what_the_cache_gives(cached, on_the_fly):
    """Balanced over two devices with sharded parameters; latents drawn anew in each step, captions dropped."""
    assert len(losses(cached)) == 4
    np.testing.assert_allclose(losses(on_the_fly), losses(cached), rtol=1e-5)
    assert [row["tokens"] for row in rows(on_the_fly)] == [row["tokens"] for row in rows(cached)]
    assert losses(cached)[-1] < losses(cached)[0]
    ours, theirs = arrays(on_the_fly, 4), arrays(cached, 4)
    for name, value in theirs.items():
        if name.startswith("params."):
            assert np.abs(ours[name] - value).max() < 1e-2 * max(np.abs(value).max(), 0.01), name


@pytest.mark.parametrize("kind", ["on_the_fly", pytest.param("cached", marks=pytest.mark.full)])
def test_resuming_is_exact(base, on_the_fly, cached, tmp_path, kind):
    whole = on_the_fly if kind == "on_the_fly" else cached
    workdir = interrupted(whole, tmp_path / "run", 2)
    trained(base, workdir, *(ON_THE_FLY if kind == "on_the_fly" else []))
    assert losses(workdir) == losses(whole)
    ours, theirs = arrays(workdir, 4), arrays(whole, 4)
    assert all(np.array_equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.full
@pytest.mark.parametrize("data", [[], ON_THE_FLY], ids=["cached", "on_the_fly"])
def test_placement_does_not_matter(base, cached, tmp_path, data):
    changes = bindings(train__num_devices=1, train__shards=1, train__bags="None")
    np.testing.assert_allclose(losses(trained(base, tmp_path, *changes, *data)), losses(cached), rtol=1e-4)


def test_adapters_of_a_folder_of_pictures(base, cached, tmp_path):
    """From pictures to a file of adapters, over two devices with shards."""
    assert run(export.main, "--workdir", cached, "--out", tmp_path / "lora") == 0
    config = read_config(base / "model" / "transformer")
    adapters = jax.tree.leaves(load_lora(tmp_path / "lora", config, Lora(4)))
    assert max(np.abs(leaf).max() for leaf in adapters) > 1e-3


@pytest.mark.full
def test_a_model_fine_tuned_on_a_folder_of_pictures(base, tmp_path):
    workdir = trained(base, tmp_path / "run", *bindings(train__adapter="None"))
    assert losses(workdir)[-1] < losses(workdir)[0]
    assert run(export.main, "--workdir", workdir, "--out", tmp_path / "model") == 0
    config = read_config(tmp_path / "model")
    assert config == read_config(base / "model" / "transformer")
    tuned, before = (
        load_params(path, config) for path in (tmp_path / "model", base / "model" / "transformer")
    )
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), tuned, before)
    assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"folder__patch": 8}, "folder.patch must be the pixels of a token"),
        ({"flux_encoders__model": "nowhere"}, "flux_encoders.model: nowhere is no pipeline"),
        ({"flux_encoders__text_tokens": 5}, "a caption must have at most max_length=5 tokens"),
        ({"flux_encoders__dtype": "float16"}, "dtype and text_dtype must be bfloat16 or float32"),
        ({"folder__encoders": "flux"}, "folder.encoders must be encoders, called, such as @flux_encoders()"),
        ({"text_to_image__text_channels": 32}, "the model's text must come as the data brings it"),
    ],
)
def test_settings_that_do_not_go_together(base, tmp_path, capfd, changes, part):
    arguments = [*ON_THE_FLY, *bindings(**changes)]
    assert run(train.main, "--config", base / "tune.gin", "--workdir", tmp_path / "run", *arguments) == 2
    assert part in capfd.readouterr().err


def test_the_encoders_memory_counts(base, tmp_path, capfd, monkeypatch):
    """Room for the state and not for both."""
    monkeypatch.setattr("experiments._run.device_memory_bytes", lambda devices: 1_500_000)
    assert run(train.main, "--config", base / "tune.gin", "--workdir", tmp_path, *ON_THE_FLY) == 2
    error = capfd.readouterr().err
    assert "with the frozen encoders'" in error
    assert "Encode beforehand with experiments.encode" in error


def test_a_damaged_cache_stops_the_run(base, tmp_path, capfd):
    """Where it is more than single samples: by the limit that unreadable files have."""
    cache = tmp_path / "cache"
    shutil.copytree(base / "cache", cache)
    for path in (cache / "shards").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    arguments = bindings(encoded__root=cache)
    assert run(train.main, "--config", base / "tune.gin", "--workdir", tmp_path / "run", *arguments) == 2
    assert "of the samples may be bad" in capfd.readouterr().err


def source_of(base, root, **changes):
    settings = {"text_tokens": TEXT_TOKENS, "dtype": "float32", "text_dtype": "float32", "canvases": 1}
    rules = MediaRules(patch=UNIT, max_tokens=128, frame_stride=2)
    pixels = ImageFolder(root, rules=rules)
    return EncodingSource(
        pixels, EncoderSettings(str(base / "model"), **{**settings, **changes}), draw_latents=True
    )


def test_samples_do_not_depend_on_where_they_are_encoded(base):
    source = source_of(base, base / "pictures")
    draws = [(0, 4, s) for s in range(4)]
    order = [3, 1, 0, 1]
    devices = {"together": [0, 0, 0, 0], "apart": [1, 0, 1, 0]}
    found = [
        source.read_batch(
            [Wanted(i, i == 3, d, draw) for i, d, draw in zip(order, places, draws, strict=True)]
        )
        for places in devices.values()
    ]
    for ours, theirs in zip(*found, strict=True):
        for mine, right in zip(ours, theirs, strict=True):
            assert np.abs(mine - right).max() < 1e-5 * np.abs(right).max()
    assert np.abs(found[0][1].rows - found[0][3].rows).max() > 1e-2
    (empty,) = source.read_batch([Wanted(1, True, 0, (0, 0, 0))])
    np.testing.assert_allclose(empty.text, found[0][0].text, atol=1e-6)


def test_pictures_that_cannot_be_read_are_named(base, tmp_path):
    pictures = shutil.copytree(base / "pictures", tmp_path / "pictures")
    source = source_of(base, pictures)
    content = (pictures / "cat.png").read_bytes()
    (pictures / "cat.png").write_bytes(content[: len(content) // 2])
    found = source.read_batch([Wanted(i, False, 0, (0, 0, i)) for i in range(2)])
    assert source.sample_name(0) == "cat.png"
    assert isinstance(found[0], BadSampleError)
    assert found[1].rows.shape == (source.image_lengths[1], 64)
    with pytest.raises(BadSampleError):
        source.read(0)


def test_weights_that_are_not_finite_are_named(base, tmp_path):
    model = shutil.copytree(base / "model", tmp_path / "model")
    path = model / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["encoder.conv_in.bias"][0] = np.nan
    save_file(tensors, path)
    source = source_of(base, base / "pictures")
    pixels = ImageFolder(base / "pictures", rules=MediaRules(patch=UNIT, max_tokens=128, frame_stride=2))
    settings = EncoderSettings(str(model), text_tokens=TEXT_TOKENS, dtype="float32")
    broken = EncodingSource(pixels, settings, draw_latents=False)
    assert broken.digest != source.digest
    with pytest.raises(DataError, match=r"encoder\.conv_in\.bias has values that are not finite"):
        broken.read(0)


@pytest.mark.full
def test_two_processes_encode_what_is_at_home_there(base, cached, tmp_path):
    arguments = ["--config", base / "tune.gin", "--workdir", tmp_path / "run", *ON_THE_FLY]
    processes = finish_together(start_two("train", *arguments, cache=tmp_path / "programs"), timeout=240)
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr[-3000:]
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(cached), rtol=1e-4)
