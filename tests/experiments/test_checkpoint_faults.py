"""Checkpoints on full and read-only disks, after kills at any moment, and written by several processes."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from _checkpoint_cases import (
    META,
    abstract,
    assert_same,
    big,
    file_size_limit,
    host_state,
    mesh_of,
    place,
    saved,
)
from jax.sharding import NamedSharding, PartitionSpec

from experiments import _disk
from experiments._checkpoint import Checkpoints
from experiments._config import UserError
from experiments._disk import check_disk_space, check_file_writable, check_writable, size_text
from experiments._manifest import state_bytes
from tests.processes import free_port, run_together


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


def test_files_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"--json is a file to write; .* is a folder\. Name a file in it\."):
        check_file_writable(tmp_path, option="--json")
    with pytest.raises(UserError, match=r"cannot write to .*: File exists\. Choose another --json"):
        check_file_writable(tmp_path / "file" / "x", option="--json")
    check_file_writable(tmp_path / "file", option="--json")
    assert (tmp_path / "file").read_text() == "in the way"


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


def wait_for_a_save(folder, start):
    """Until a step after `start` is committed, however busy the machine is."""
    deadline = time.monotonic() + 60
    while not any(path.name.isdigit() and int(path.name) > start for path in folder.glob("*")):
        assert time.monotonic() < deadline, "no step was saved within a minute"
        time.sleep(0.01)


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
            wait_for_a_save(workdir / "checkpoints", reached[-1])
            time.sleep(0.3 * rng.random())
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


PROCESS = """
import resource
import sys
import jax
import numpy as np
process, port, workdir, failing = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.experimental import multihost_utils
from experiments._checkpoint import Checkpoints, DamagedCheckpointError
from experiments._config import UserError, run_program
from experiments._signals import StopRequest

def size(path):
    return path.stat().st_size

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
host = {"w": np.arange(64 * 512, dtype=np.float32).reshape(64, 512), "n": np.full((3,), 7, np.int32)}
shardings = {"w": NamedSharding(mesh, PartitionSpec("data")), "n": NamedSharding(mesh, PartitionSpec())}
state = {
    name: jax.make_array_from_callback(host[name].shape, shardings[name], lambda index: host[name][index])
    for name in host
}

def limit(num_bytes):
    if str(process) in failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

def main(argv):
    with StopRequest() as stop, Checkpoints(workdir, keep=2) as checkpoints:
        checkpoints.save(1, state, {"step": 1})
        checkpoints.wait()
        limit(10_000)
        checkpoints.save(2, state, {})
        try:
            checkpoints.wait()
        except UserError as error:
            print(error, flush=True)
        limit(resource.RLIM_INFINITY)
        assert checkpoints.steps() == [1]
        checkpoints.save(3, state, {"step": 3})
        checkpoints.wait()
        wanted = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), state)
        restored = checkpoints.restore(wanted)
        assert restored.meta == {"step": 3}
        for name, value in restored.state.items():
            for shard in value.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), host[name][shard.index])
        if process == 0:
            lost = max((checkpoints.directory / "3/state/ocdbt.process_1/d").iterdir(), key=size)
            lost.rename(lost.with_suffix(".hidden"))
        multihost_utils.sync_global_devices("lost")
        try:
            checkpoints.restore(wanted)
        except DamagedCheckpointError as error:
            print(error, flush=True)
        multihost_utils.sync_global_devices("seen")
        if process == 0:
            lost.with_suffix(".hidden").rename(lost)
        assert not stop.agreed()
        if process == 1:
            stop.request()
        assert stop.agreed()
        limit(10_000)
        checkpoints.save(4, state, {})

sys.exit(run_program(main, []))
"""


@pytest.mark.parametrize("failing", ["1", pytest.param("0", marks=pytest.mark.full), "01"])
def test_two_processes_and_one_that_cannot_write(tmp_path, failing):
    port = free_port()
    processes = run_together(
        [["-c", PROCESS, index, port, tmp_path, failing] for index in range(2)], timeout=60
    )
    for index, process in enumerate(processes):
        out, err = process.stdout, process.stderr
        reason = "File too large" if str(index) in failing else "another process could not write its part"
        for step, text, last in ((2, out, 1), (4, err, 3)):
            assert f"checkpoint of step {step} could not be written" in text, err
            assert f"({reason}). The last good checkpoint is step {last}." in text
        damage = "another process cannot read its part" if index == 0 else "Encountered error while reading"
        assert f"checkpoints/3 is damaged: {damage}" in out
        assert "go on from step 1, which is good" in out
        assert process.returncode == 2
        assert "Traceback" not in err
        assert "asyncio" not in err
    host = {
        "w": np.arange(64 * 512, dtype=np.float32).reshape(64, 512),
        "n": np.full((3,), 7, np.int32),
    }
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 3]
        wanted = abstract({"w": host["w"]})
        wanted["n"] = jax.ShapeDtypeStruct(
            (3,), np.int32, sharding=NamedSharding(mesh_of(8), PartitionSpec())
        )
        assert_same(checkpoints.restore(wanted).state, host)
