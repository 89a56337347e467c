"""Checkpoints: what comes back, onto which devices, and after kills, full disks and flipped bytes."""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments import _disk, _fingerprint
from experiments._checkpoint import Checkpoints, DamagedCheckpointError
from experiments._config import UserError
from experiments._disk import check_disk_space, check_writable, size_text
from experiments._fingerprint import fingerprints
from experiments._manifest import state_bytes

META = {
    "data": {"position": 12, "seed": 0},
    "capacities": [128, 256],
    "model": "abc",
    "none": None,
    "rate": 0.1,
}


def mesh_of(num_devices):
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def host_state(seed=0, rows=16):
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(rows, 6)).astype(np.float32)
    return {
        "params": {"blocks": [weights, rng.normal(size=(8, 3)).astype(jnp.bfloat16)]},
        "opt": (np.int32(seed), {"mask": rng.integers(0, 2, size=8).astype(bool)}),
        "ids": rng.integers(0, 99, size=(8,), dtype=np.int8),
    }


def shardings(tree, num_devices):
    mesh = mesh_of(num_devices)

    def one(leaf):
        return NamedSharding(mesh, PartitionSpec("data") if np.ndim(leaf) else PartitionSpec())

    return jax.tree.map(one, tree)


def place(tree, num_devices=8):
    return jax.tree.map(jax.device_put, tree, shardings(tree, num_devices))


def abstract(tree, num_devices=8):
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding),
        tree,
        shardings(tree, num_devices),
    )


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), theirs)


def saved(workdir, *steps, keep=3):
    with Checkpoints(workdir, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, place(host_state(step)), {**META, "step": step})


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_restores_onto_any_number_of_devices(tmp_path, num_devices):
    state = host_state(7)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.save(7, place(state, 4), META)
        checkpoints.wait()
        restored = checkpoints.restore(abstract(state, num_devices))
    assert restored.step == 7
    assert restored.meta == META
    assert_same(restored.state, state)
    for leaf, sharding in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(shardings(state, num_devices)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_names_are_paths_and_nothing_is_pickled(tmp_path):
    saved(tmp_path, 1)
    with open(tmp_path / "checkpoints/1/meta/metadata") as file:
        names = list(json.load(file)["arrays"])
    assert names == ["ids", "opt.0", "opt.1.mask", "params.blocks.0", "params.blocks.1"]
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or not path.read_bytes().startswith(b"\x80\x04"), path


def test_keeps_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (5, 10, 15, 200):
            assert checkpoints.save(step, place(host_state(step)), {})
        checkpoints.wait()
        assert checkpoints.steps() == [15, 200]
        assert checkpoints.latest() == 200
        assert_same(checkpoints.restore(abstract(host_state()), step=15).state, host_state(15))
        assert checkpoints.meta(15) == {}


def test_save_of_a_step_already_there(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.save(3, place(host_state(3)), {})
        assert not checkpoints.save(3, place(host_state(3)), {})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"checkpoints of another run from step 2 on: 3\. Delete"):
            checkpoints.save(2, place(host_state(3)), {})
        checkpoints.restore(abstract(host_state()))
        assert not checkpoints.save(3, place(host_state(3)), {})
        assert checkpoints.save(4, place(host_state(4)), {})


def test_the_state_may_be_donated_at_once(tmp_path):
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    host = {"w": np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)}
    state = place(host)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(3):
            state = jax.block_until_ready(advance(state))
        checkpoints.wait()
        assert_same(checkpoints.restore(abstract(host)).state, host)


def test_part_of_a_state(tmp_path):
    saved(tmp_path, 1)
    part = {"params": host_state()["params"]}
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        got = checkpoints.restore(abstract(part, 1), partial=True).state
        assert_same(got, {"params": host_state(1)["params"]})
        with pytest.raises(UserError, match="of another model, 1 of 1 arrays differ: absent is absent there"):
            checkpoints.restore(abstract({"absent": host_state()["ids"]}), partial=True)


def test_reader_beside_a_training(tmp_path):
    with Checkpoints(tmp_path, read_only=True) as reader:
        assert reader.latest() is None
        with pytest.raises(UserError, match=r"no checkpoint in .*: there are none"):
            reader.restore(abstract(host_state()))
    assert not list(tmp_path.iterdir())
    saved(tmp_path, 1)
    unfinished = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with Checkpoints(tmp_path, read_only=True) as reader:
        assert reader.latest() == 1
        saved_meta = reader.restore(abstract(host_state())).meta
        assert saved_meta["step"] == 1
        assert unfinished.exists()
        with pytest.raises(UserError, match=r"no checkpoint of step 9 in .*: have steps 1"):
            reader.meta(9)


def test_checkpoint_of_another_model(tmp_path):
    saved(tmp_path, 1)
    other = host_state(rows=32)
    other["opt"] = (other["opt"][0].astype(np.float32), {"new": other["opt"][1]["mask"]})
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(abstract(other))
    text = str(caught.value)
    assert "\n" not in text
    assert "of another model, 4 of 6 arrays differ: " in text
    assert "params.blocks.0 is float32[16, 6] there, float32[32, 6] here" in text or "1 more" in text
    assert "opt.0 is int32[] there, float32[] here" in text
    assert "opt.1.new is absent there, bool[8] here" in text


def test_what_cannot_be_saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match=r"jax.Arrays; got a of int. Put plain Python values into meta"):
            checkpoints.save(1, {"a": 3}, {})
        with pytest.raises(TypeError, match="got k of key<fry>"):
            checkpoints.save(1, {"k": jax.random.key(0)}, {})
        with pytest.raises(ValueError, match="empty pytree"):
            checkpoints.save(1, {}, {})
        leaf = place(host_state())["ids"]
        with pytest.raises(ValueError, match=r"names must be unique; got a\.b twice"):
            checkpoints.save(1, {"a": {"b": leaf}, "a.b": leaf}, {})
        for meta in ({"x": np.int32(1)}, {"x": (1, 2)}, {1: 2}, {"x": float("nan")}):
            with pytest.raises(TypeError, match="meta must"):
                checkpoints.save(1, {"a": leaf}, meta)
        checkpoints.save(1, {"a": leaf}, {})
        checkpoints.wait()
        with pytest.raises(TypeError, match="with a sharding; got a of"):
            checkpoints.restore({"a": jax.ShapeDtypeStruct((8,), np.int8)})
    with pytest.raises(ValueError, match="keep must be at least 1; got keep=0"):
        Checkpoints(tmp_path, keep=0)


# Damage


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "meta", "meta digit", "structure"])
def test_damage_is_noticed_and_the_good_one_named(tmp_path, damage, capfd):
    for step in (1, 2):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.restore(abstract(big(1))) if step == 2 else None
            checkpoints.save(step, place(big(step)), META)
    folder = tmp_path / "checkpoints" / "2"
    data, meta = largest_file(folder / "state"), folder / "meta" / "metadata"
    if damage == "flip":
        flip_a_byte(data)
    elif damage == "truncate":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    elif damage == "delete":
        data.unlink()
    elif damage == "meta":
        meta.write_bytes(meta.read_bytes()[:40])
    elif damage == "meta digit":
        meta.write_text(meta.read_text().replace('"position": 12', '"position": 13'))
    else:
        flip_a_byte(folder / "state" / "_METADATA")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(DamagedCheckpointError) as caught:
            checkpoints.restore(abstract(big(2)))
        text = str(caught.value)
        assert f"checkpoint {folder} is damaged: " in text
        assert text.endswith("Delete that folder and run again to go on from step 1, which is good.")
        assert "\n" not in text
        if damage.startswith("meta"):
            with pytest.raises(DamagedCheckpointError, match="go on from step 1"):
                checkpoints.meta()
        shutil.rmtree(folder)
        assert_same(checkpoints.restore(abstract(big(1))).state, big(1))
    assert "Traceback" not in capfd.readouterr().err


def test_no_good_one_left(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "checkpoints/1/meta/metadata").write_text("{}")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(DamagedCheckpointError, match="no good one"):
        checkpoints.restore(abstract(host_state()))


def big(seed):
    return {"w": np.random.default_rng(seed).normal(size=(64, 512)).astype(np.float32), "n": np.int32(seed)}


# No space, no permission


@contextlib.contextmanager
def file_size_limit(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("keep", [1, 2])
def test_failed_write_leaves_the_last_good_one(tmp_path, keep, capfd):
    with Checkpoints(tmp_path, keep=keep) as checkpoints:
        checkpoints.save(1, place(big(1)), META)
        checkpoints.wait()
        with file_size_limit(20_000):
            checkpoints.save(2, place(big(2)), META)
            with pytest.raises(UserError) as caught:
                checkpoints.wait()
        text = str(caught.value)
        assert "checkpoint of step 2 could not be written to" in text
        assert "it needs up to 131 kB" in text
        assert "(File too large)" in text
        assert "last good checkpoint is step 1" in text
        assert checkpoints.steps() == [1]
        assert not list(checkpoints.directory.glob("*tmp*"))
        assert_same(checkpoints.restore(abstract(big(1))).state, big(1))
        checkpoints.save(2, place(big(2)), META)
        checkpoints.wait()
        assert_same(checkpoints.restore(abstract(big(2))).state, big(2))
    assert "Traceback" not in capfd.readouterr().err


def test_failed_write_is_raised_by_the_next_save_and_by_close(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with file_size_limit(20_000):
            checkpoints.save(1, place(big(1)), META)
            with pytest.raises(UserError, match=r"step 1 could not be written .* No earlier checkpoint"):
                checkpoints.save(2, place(big(2)), META)
        assert checkpoints.save(2, place(big(2)), META)
    limited = Checkpoints(tmp_path)
    with file_size_limit(20_000):
        limited.restore(abstract(big(2)))
        limited.save(3, place(big(3)), META)
        with pytest.raises(UserError, match="step 3 could not be written"):
            limited.close()


def test_another_exception_is_not_hidden_by_a_failed_save(tmp_path):
    def training():
        with Checkpoints(tmp_path) as checkpoints, file_size_limit(20_000):
            checkpoints.save(1, place(big(1)), META)
            with contextlib.suppress(UserError):
                checkpoints.wait()
            raise KeyError("the model")

    with pytest.raises(KeyError, match="the model"):
        training()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root; the file size limit covers the same path")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def save_and_wait(checkpoints, step, state):
    checkpoints.save(step, state, META)
    checkpoints.wait()


def test_full_disk(small_disk):
    # The second of 0.5 MB does not fit into 1 MiB beside the first.
    state = {"w": np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)}
    with Checkpoints(small_disk, keep=1) as checkpoints:
        checkpoints.save(1, place(state), META)
        checkpoints.wait()
        with pytest.raises(UserError, match=r"needs up to 524 kB, .* free \(No space left on device\)"):
            save_and_wait(checkpoints, 2, place(state))
        assert checkpoints.steps() == [1]
        assert_same(checkpoints.restore(abstract(state)).state, state)


def test_read_only_workdir(small_disk):
    saved(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"cannot write to .*checkpoints: Read-only file system\."):
        Checkpoints(small_disk)
    with Checkpoints(small_disk, read_only=True) as checkpoints:
        assert_same(checkpoints.restore(abstract(host_state())).state, host_state(1))


def test_workdir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write to .*: Not a directory"):
        Checkpoints(tmp_path / "file")
    check_writable(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())


def test_disk_space(tmp_path, monkeypatch, caplog):
    free = shutil._ntuple_diskusage(total=100_000_000, used=60_000_000, free=40_000_000)
    monkeypatch.setattr(_disk.shutil, "disk_usage", lambda path: free)
    check_disk_space(tmp_path / "not" / "yet", 10_000_000, keep=3)
    assert not caplog.records
    check_disk_space(tmp_path, 10_000_001, keep=3)
    assert "10 MB, 3 are kept while one is written, 40 MB are free" in caplog.text
    with pytest.raises(UserError, match="not enough space for checkpoints: a checkpoint takes up to 41 MB"):
        check_disk_space(tmp_path, 41_000_000, keep=3)
    caplog.clear()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "old").write_bytes(bytes(1000))
    check_disk_space(tmp_path, 10_000_001, keep=3)
    assert not caplog.records


def test_sizes():
    assert [size_text(n) for n in (0, 999, 1000, 123_456_789, 2e9, 3.5e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "123 MB",
        "2 GB",
        "3500 TB",
    ]
    assert state_bytes(abstract(host_state())) == 16 * 6 * 4 + 8 * 3 * 2 + 4 + 8 + 8


# Fingerprints


def test_fingerprint_is_independent_of_placement_and_of_the_method():
    host = host_state(3)
    host["long"] = np.random.default_rng(0).integers(0, 2**31, size=(8, 5), dtype=np.int32)
    flat = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(host))}
    expected = {
        name: _fingerprint._of_block(np.asarray(leaf), leaf.shape, [0] * leaf.ndim)
        for name, leaf in flat.items()
    }
    for num_devices in (1, 2, 8):
        placed = place(flat, num_devices)
        assert fingerprints(placed) == expected
        assert dict(zip(placed, _fingerprint._on_device(list(placed.values())), strict=True)) == expected


def test_fingerprint_notices_single_changes_and_swaps():
    data = np.random.default_rng(0).normal(size=(6, 4))
    original = _fingerprint._of_block(data, data.shape, [0, 0])
    for position in np.ndindex(6, 4):
        changed = data.copy()
        changed.view(np.uint64)[position] ^= np.uint64(1) << np.uint64(random.Random(0).randrange(64))
        assert _fingerprint._of_block(changed, data.shape, [0, 0]) != original
    swapped = data.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert _fingerprint._of_block(swapped, data.shape, [0, 0]) != original


# Kills


TRAINING = """
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_platforms", "cpu")
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from experiments._checkpoint import Checkpoints
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("data"))
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    start = checkpoints.latest() or 0
    if start:
        abstract = {"w": jax.ShapeDtypeStruct((64, 512), np.float32, sharding=sharding)}
        restored = checkpoints.restore(abstract)
        assert restored.meta == {"step": start}
        np.testing.assert_array_equal(np.asarray(restored.state["w"]), np.float32(start))
    print("ready", start, flush=True)
    for step in range(start + 1, start + 10_000):
        state = {"w": jax.device_put(np.full((64, 512), step, np.float32), sharding)}
        checkpoints.save(step, state, {"step": step})
"""


def killed_rounds(workdir, num_rounds):
    """Starts the program above again and again, each time killed at a random moment while it saves."""
    rng = random.Random(0)
    reached = []
    for _ in range(num_rounds):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TRAINING), str(workdir)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            assert line[:1] == ["ready"], "the program did not come up from what the kill left"
            reached.append(int(line[1]))
            time.sleep(0.1 + 0.2 * rng.random())
            process.kill()
    return reached


def test_killed_at_any_moment(tmp_path):
    reached = killed_rounds(tmp_path, 4)
    assert reached == sorted(set(reached)), "every round must get further than the one before"
    with Checkpoints(tmp_path) as checkpoints:
        step = checkpoints.latest()
        state = {"w": np.full((64, 512), step, np.float32)}
        assert_same(checkpoints.restore(abstract(state, 4)).state, state)
        assert not list(checkpoints.directory.glob("*tmp*"))


@pytest.mark.full
def test_killed_very_often(tmp_path):
    reached = killed_rounds(tmp_path, 25)
    assert reached == sorted(set(reached))
    assert os.listdir(tmp_path) == ["checkpoints"]
