"""Checkpoints: what comes back, onto which devices, and how damage is noticed."""

import json
import random
import shutil

import jax
import numpy as np
import pytest
from _checkpoint_cases import META, abstract, assert_same, big, host_state, place, saved, shardings

from experiments import _fingerprint
from experiments._checkpoint import Checkpoints, DamagedCheckpointError
from experiments._config import UserError
from experiments._fingerprint import fingerprints


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
        with pytest.raises(ValueError, match="read_only must be False; got read_only=True"):
            reader.save(1, place(host_state()), {})
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
