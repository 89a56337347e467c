"""`experiments.encode`: what the encoders give, in parts, after a kill, and never two things mixed."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from experiments import encode
from experiments.data import (
    EncodedCache,
    ImageFolder,
    MediaRules,
    is_finished,
    read_index,
    rows_of_latents,
)
from jaxdit.encoders import AutoencoderKL, ClipTextEncoder, T5Encoder, Tokenizer
from jaxdit.weights import load_params, read_config
from tests.experiments._data_cases import save_tar
from tests.experiments._encode_cases import (
    PICTURES,
    RULES,
    UNIT,
    arguments,
    assert_same,
    encoded,
    encoders_shared,
    samples_of,
    write_model,
    write_pictures,
)
from tests.experiments._program_cases import ROOT, programs_shared, run, snapshot, start_two
from tests.parity.pipeline import TEXT_TOKENS
from tests.processes import finish_together


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with programs_shared(), encoders_shared():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def cache(model, pictures, tmp_path_factory):
    root = tmp_path_factory.mktemp("caches") / "whole"
    assert encoded(model, pictures, root) == 0
    return root


def part(kind, folder):
    config = read_config(folder, compute_dtype="float32")
    module = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(module), load_params(folder, config))


def test_a_cache_holds_what_the_encoders_give(model, pictures, cache):
    """Each picture encoded alone, in its own size; a clip frame by frame; captions padded, as FLUX.1 was trained."""
    vae = part(AutoencoderKL, model / "vae")
    t5, clip = part(T5Encoder, model / "text_encoder_2"), part(ClipTextEncoder, model / "text_encoder")
    rules = MediaRules(patch=UNIT, max_tokens=128, frame_stride=2)
    source = ImageFolder(pictures, rules=rules)
    names = ["cat.png", "clip.mp4"]
    ids = [
        Tokenizer(model / name, max_length=n) for name, n in (("tokenizer_2", TEXT_TOKENS), ("tokenizer", 16))
    ]
    texts = ["a cat", "a dog", ""]
    features = np.asarray(jax.jit(lambda t5, ids: t5(ids))(t5, jnp.asarray(ids[0](texts).ids)))
    pooled = np.asarray(jax.jit(lambda clip, ids: clip(ids).pooled)(clip, jnp.asarray(ids[1](texts).ids)))
    encode_picture = jax.jit(lambda vae, x: vae.encode(x))
    found, empty = samples_of(cache), load_file(cache / "empty_caption.safetensors")
    assert len(found) == len(PICTURES) + 1
    for i, name in enumerate(names):
        (index,) = (k for k in range(len(source)) if source.sample_name(k) == name)
        frames = source.frames(index)
        assert len(frames) == (3 if name == "clip.mp4" else 1)
        latents = encode_picture(vae, jnp.asarray(frames / np.float32(127.5) - 1))
        mean = np.asarray(vae.normalized(latents.mean)).transpose(3, 0, 1, 2)
        rows, text, vector = found[name]
        for mine, right in ((rows, rows_of_latents(mean, 2, channels_last=False)), (text, features[i])):
            assert mine.shape == right.shape
            assert np.abs(mine - right).max() < 1e-5 * np.abs(right).max()
        np.testing.assert_allclose(vector, pooled[i], atol=1e-5)
    np.testing.assert_allclose(empty["text"], features[2], atol=1e-5)
    np.testing.assert_allclose(empty["pooled"], pooled[2], atol=1e-5)


def test_samples_are_those_of_the_folder(pictures, cache):
    """In its order, with its sizes, so that steps are the same; captions for people."""
    source = ImageFolder(pictures, rules=MediaRules(patch=UNIT, max_tokens=128, frame_stride=2))
    mine = EncodedCache(cache, rules=RULES)
    assert [mine.sample_name(i) for i in range(len(mine))] == [
        source.sample_name(i) for i in range(len(source))
    ]
    np.testing.assert_array_equal(mine.grids, source.grids)
    assert "deep/dogs.png" in [mine.sample_name(i) for i in range(len(mine))]
    texts = b"".join(path.read_bytes() for path in (cache / "shards").glob("*.safetensors"))
    assert b"a cat in the snow" in texts


def test_the_same_again_does_nothing(model, pictures, cache, caplog):
    caplog.set_level("INFO")
    before = snapshot(cache / "shards")
    assert encoded(model, pictures, cache) == 0
    assert snapshot(cache / "shards") == before
    assert "is whole: 6 samples in" in caplog.text
    assert "samples/s" not in caplog.text


def test_parts_make_the_whole(model, pictures, cache, tmp_path, caplog):
    caplog.set_level("INFO")
    assert encoded(model, pictures, tmp_path, part="2/2") == 0
    assert "are still to be made by other parts" in caplog.text
    with pytest.raises(Exception, match="shards that are not there yet"):
        EncodedCache(tmp_path, rules=RULES)
    before = snapshot(tmp_path / "shards")
    assert encoded(model, pictures, tmp_path, part="1/2") == 0
    assert "samples/s" in caplog.text
    assert before.items() <= snapshot(tmp_path / "shards").items()
    assert_same(samples_of(tmp_path), samples_of(cache))


def test_a_missing_or_cut_shard_is_made_again(model, pictures, cache, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(cache, root)
    first, second = sorted((root / "shards").glob("*.safetensors"))[:2]
    first.unlink()
    os.truncate(second, 100)
    before = snapshot(root / "shards")
    assert encoded(model, pictures, root) == 0
    changed = {path for path, time in snapshot(root / "shards").items() if before.get(path) != time}
    assert changed == {path.with_suffix(end) for path in (first, second) for end in (".json", ".safetensors")}
    assert_same(samples_of(root), samples_of(cache), tolerance=0)


def test_verification(cache, tmp_path, caplog, capfd):
    caplog.set_level("INFO")
    assert run(encode.main, "--out", cache, "--verify") == 0
    assert "are as they were written" in caplog.text
    root = tmp_path / "copy"
    shutil.copytree(cache, root)
    path = sorted((root / "shards").glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert run(encode.main, "--out", root, "--verify") == 2
    assert f"{path.name} is damaged" in caplog.text
    assert "Remove the damaged files and run experiments.encode again" in capfd.readouterr().err
    assert run(encode.main, "--out", tmp_path / "nowhere", "--verify") == 2


def change_weights(model, pictures):
    path = model / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def change_caption(model, pictures):
    (pictures / "cat.txt").write_text("another cat")


def change_picture(model, pictures):
    with (pictures / "cat.png").open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize(
    ("change", "options", "part"),
    [
        (change_weights, {}, "was made of something else: the autoencoder's weights. Restore"),
        (change_caption, {}, "was made of something else: data. Restore"),
        (change_picture, {}, "was made of something else: data. Restore"),
        (None, {"dtype": "bfloat16"}, "--dtype float32, now bfloat16"),
        (None, {"text_tokens": 16}, "--text-tokens 24, now 16"),
        (None, {"text": "bfloat16"}, "text_dtype float32, now bfloat16"),
        (None, {"max_tokens": 100}, "--max-tokens 128, now 100"),
        (None, {"no_variance": True}, "has_variance True, now False"),
        (None, {"no_padding": True}, "--no-padding False, now True"),
    ],
)
def test_what_was_made_of_something_else_is_refused(
    model, pictures, cache, tmp_path, capfd, change, options, part
):
    if change is not None:
        model, pictures = (shutil.copytree(path, tmp_path / path.name) for path in (model, pictures))
        change(model, pictures)
    before = snapshot(cache / "shards")
    assert encoded(model, pictures, cache, **options) == 2
    assert part in capfd.readouterr().err
    assert snapshot(cache / "shards") == before


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"model": "nowhere"}, "nowhere is no pipeline"),
        ({"data": "nowhere"}, "root must be a folder"),
        ({"part": "3/2"}, "--part is I/N"),
        ({"part": "1"}, "--part is I/N"),
        ({"devices": 0}, "--devices must be at least 1"),
        ({"devices": 99}, "--devices must be at most the 8 cpu devices there are"),
        ({"text_batch": 0}, "--text-batch must be at least 1"),
        ({"shard_mb": 0}, "--shard-mb must be at least 0.001"),
        ({"canvases": 0}, "canvases and text_tokens must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must give each frame a token"),
        ({"model": None}, "--model and --data must be given"),
        ({"text_tokens": 5}, "deep/dogs.png: Tokenizer: a caption must have at most max_length=5 tokens"),
    ],
)
def test_what_cannot_be_done_is_refused(model, pictures, tmp_path, capfd, options, part):
    given = {"model": model, "data": pictures, "out": tmp_path / "out", **options}
    assert run(encode.main, *arguments(**given)) == 2
    assert part in capfd.readouterr().err
    assert not list(tmp_path.glob("out/shards/*"))


def test_a_folder_of_something_else(model, pictures, tmp_path, capfd):
    (tmp_path / "notes.txt").write_text("mine")
    assert encoded(model, pictures, tmp_path) == 2
    assert "is neither empty nor a cache" in capfd.readouterr().err


def test_memory_and_space_are_checked_first(model, pictures, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("experiments._encoders.device_memory_bytes", lambda devices: 10_000)
    assert encoded(model, pictures, tmp_path / "a") == 2
    assert "Divide T5 by --t5-shards all" in capfd.readouterr().err
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("experiments._encode_run.shutil.disk_usage", lambda path: usage)
    assert encoded(model, pictures, tmp_path / "b") == 2
    assert "not enough space for the cache: " in capfd.readouterr().err


def test_one_process_a_part(model, pictures, tmp_path, capfd):
    from experiments._encode_run import Worker, only_worker

    with only_worker(tmp_path, Worker(0, 1)):
        (tmp_path / "cache.json").unlink(missing_ok=True)
        hidden = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        assert not hidden
        assert encoded(model, pictures, tmp_path) == 2
    assert "another process encodes part 1 of 1" in capfd.readouterr().err


def test_unreadable_pictures_are_left_out_and_named(model, pictures, tmp_path, caplog, capfd):
    data = shutil.copytree(pictures, tmp_path / "data")
    content = (data / "large.png").read_bytes()
    (data / "large.png").write_bytes(content[: len(content) // 2])  # its header is fine
    (data / "none.png").write_bytes(b"nothing")
    (data / "none.txt").write_text("a cat")
    caplog.set_level("INFO")
    assert encoded(model, data, tmp_path / "cache") == 0
    assert "cannot read none.png" in caplog.text
    assert "lacks 1 pictures that cannot be read: large.png" in caplog.text
    assert sorted(samples_of(tmp_path / "cache")) == [
        "cat.png",
        "clip.mp4",
        "deep/dogs.png",
        "grey.png",
        "snow.png",
    ]


def test_too_many_unreadable_pictures_end_it(model, pictures, tmp_path, capfd):
    data = shutil.copytree(pictures, tmp_path / "data")
    content = (data / "large.png").read_bytes()
    for i in range(12):
        (data / f"none{i}.png").write_bytes(content[: len(content) // 2])
        (data / f"none{i}.txt").write_text("a cat")
    assert encoded(model, data, tmp_path / "cache") == 2
    assert "at most 1.00% of the samples may be bad; got 10 of" in capfd.readouterr().err
    assert encoded(model, data, tmp_path / "cache", max_bad_fraction=0.9) == 0
    assert len(samples_of(tmp_path / "cache")) == len(PICTURES) + 1


def test_long_captions_are_cut_and_padding_left_out_where_that_is_asked_for(model, pictures, cache, tmp_path):
    options = {"truncate": True, "no_padding": True, "no_variance": True, "text": "bfloat16"}
    assert encoded(model, pictures, tmp_path, **options, latents="bfloat16") == 0
    source, whole = EncodedCache(tmp_path, rules=RULES), samples_of(cache)
    tokens = Tokenizer(model / "tokenizer_2", max_length=TEXT_TOKENS)
    for i in range(len(source)):
        name = source.sample_name(i)
        caption = "a dog" if name == "clip.mp4" else PICTURES[name.removesuffix(".png")][2]
        assert source.text_lengths[i] == tokens([caption]).mask.sum()
        rows, text, _ = whole[name]
        own = source.text(i)
        assert np.abs(own - text[: len(own)]).max() < 0.01 * np.abs(text).max()
        assert np.abs(source.read(i) - rows).max() < 0.01 * np.abs(rows).max()
    assert source.dropped_text_length == 1


def test_tar_shards(model, pictures, cache, tmp_path):
    members = [(f"a{end}", (pictures / f"cat{end}").read_bytes()) for end in (".png", ".txt")]
    save_tar(tmp_path / "x.tar", members)
    assert encoded(model, tmp_path / "x.tar", tmp_path / "cache") == 0
    (found,) = samples_of(tmp_path / "cache").values()
    assert_same({"a": found}, {"a": samples_of(cache)["cat.png"]})


_KILLED = """
import os, signal, sys
from experiments import encode
from experiments._program import run_program
from experiments.data import _cache_files

rename, count = os.replace, 0


def replace(source, target):
    global count
    count += 1
    if count == {last}:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)


_cache_files.os.replace = replace
sys.exit(run_program(encode.main, sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "last", [pytest.param(1, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full), 5]
)
def test_a_killed_process_goes_on(model, pictures, cache, tmp_path, last):
    """Killed in the place of its first rename, that of a shard's file, or that of its index."""
    options = arguments(model, pictures, tmp_path / "cache")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", _KILLED.format(last=last), *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    shards = range(json.loads((tmp_path / "cache" / "cache.json").read_text())["num_shards"])
    finished = [shard for shard in shards if is_finished(tmp_path / "cache", shard)]
    assert len(finished) == max(last - 2, 0) // 2
    before = {
        path: time for path, time in snapshot(tmp_path / "cache" / "shards").items() if _is_of(path, finished)
    }
    assert encoded(model, pictures, tmp_path / "cache") == 0
    assert before.items() <= snapshot(tmp_path / "cache" / "shards").items()
    assert_same(samples_of(tmp_path / "cache"), samples_of(cache))
    assert not list((tmp_path / "cache" / "shards").glob(".part-*"))


def _is_of(path, shards):
    return path.name.split(".")[0] in [f"{shard:06d}" for shard in shards]


@pytest.mark.full
def test_t5_on_several_devices_and_one_device_for_all(model, pictures, cache, tmp_path):
    assert encoded(model, pictures, tmp_path / "all", t5_shards="all") == 0
    assert_same(samples_of(tmp_path / "all"), samples_of(cache))
    assert encoded(model, pictures, tmp_path / "one", devices=1) == 0
    assert_same(samples_of(tmp_path / "one"), samples_of(cache))


@pytest.mark.full
def test_two_processes_share_the_work(model, pictures, cache, tmp_path):
    options = arguments(model, pictures, tmp_path / "cache", devices=1)
    processes = finish_together(start_two("encode", *options, cache=tmp_path / "programs"), timeout=240)
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr[-3000:]
    assert "is whole: 6 samples" in processes[0].stderr
    assert_same(samples_of(tmp_path / "cache"), samples_of(cache))
    assert all(read_index(tmp_path / "cache", shard).bad == [] for shard in range(2))
