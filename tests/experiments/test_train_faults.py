"""Training in processes of its own: killed at any moment, terminated, and several of them at once."""

import re
import signal
import time

import numpy as np
import pytest

from tests.experiments._program_cases import TINY, arrays, bindings, checkpoints, losses, start, start_two

# Every process compiles and starts anew.
pytestmark = pytest.mark.full

STEPS = 12
QUICK = bindings(train__num_devices=1, train__bags="None", train__steps=STEPS, train__save_every=2)
DEADLINE_S = 240


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def training(workdir, *args, cache=None):
    return start("train", "--config", TINY, "--workdir", workdir, *args, cache=cache)


def finish(process):
    """What a process said on stderr, once it has ended well."""
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return err


def wait_for(condition, *processes):
    """Waits, polling as fast as can be, for something that processes are about to do."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def num_rows(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def being_saved(workdir, step):
    return any((workdir / "checkpoints").glob(f"{step}.orbax-checkpoint-tmp*"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, cache):
    workdir = tmp_path_factory.mktemp("straight") / "run"
    err = finish(training(workdir, *QUICK, cache=cache))
    assert "Traceback" not in err
    return workdir


def kill_when(condition, workdir, cache):
    process = training(workdir, *QUICK, cache=cache)
    wait_for(condition, process)
    process.kill()
    process.communicate()


def assert_same_end(workdir, straight):
    assert losses(workdir) == losses(straight)
    assert checkpoints(workdir) == checkpoints(straight) == [STEPS - 2, STEPS]
    want, got = arrays(straight, STEPS), arrays(workdir, STEPS)
    for name in want:
        np.testing.assert_array_equal(want[name], got[name], err_msg=name)
    assert not list((workdir / "checkpoints").glob("*tmp*"))


def test_killed_in_the_middle_of_a_save_and_then_between_two(straight, tmp_path, cache):
    workdir = tmp_path / "run"
    kill_when(lambda: being_saved(workdir, 4), workdir, cache)
    assert checkpoints(workdir)[-1:] in ([2], [4])
    kill_when(lambda: num_rows(workdir) >= 9, workdir, cache)
    err = finish(training(workdir, *QUICK, cache=cache))
    assert int(re.search(r"going on from step (\d+)", err)[1]) >= 6
    assert_same_end(workdir, straight)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(straight, tmp_path, cache, seed):
    workdir = tmp_path / "run"
    rng = np.random.default_rng(seed)
    for _ in range(3):
        process = training(workdir, *QUICK, cache=cache)
        wait_for(lambda: (workdir / "operative_config.gin").exists(), process)
        # From before the first step to after the last.
        time.sleep(rng.uniform(0, 10))
        process.kill()
        process.communicate()
    finish(training(workdir, *QUICK, cache=cache))
    assert_same_end(workdir, straight)


def test_terminated(straight, tmp_path, cache):
    workdir = tmp_path / "run"
    process = training(workdir, *QUICK, cache=cache)
    wait_for(lambda: num_rows(workdir) >= 3, process)
    process.send_signal(signal.SIGTERM)
    err = finish(process)
    assert "SIGTERM" in err
    step = int(re.search(r"stopped after step (\d+)", err)[1])
    assert checkpoints(workdir)[-1] == step
    assert len(losses(workdir)) == step
    finish(training(workdir, *QUICK, cache=cache))
    assert losses(workdir) == losses(straight)


def two_processes(workdir, *args, cache=None):
    return start_two("train", "--config", TINY, "--workdir", workdir, *args, cache=cache)


def test_two_processes_do_what_one_does(tmp_path, cache):
    steps = bindings(train__steps=4, train__save_every=2, train__shards=4, train__remat="full")
    finish(training(tmp_path / "one", *steps, cache=cache))
    processes = two_processes(tmp_path / "two", *steps, cache=cache)
    errors = [finish(process) for process in processes]
    assert all("Traceback" not in err for err in errors)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4)
    assert checkpoints(tmp_path / "two") == [2, 4]
    # A checkpoint of two processes goes on in one.
    more = bindings(train__steps=5)
    finish(training(tmp_path / "two", *steps, *more, cache=cache))
    assert len(losses(tmp_path / "two")) == 5


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_takes_the_other_with_it(tmp_path, cache, victim):
    workdir = tmp_path / "run"
    processes = two_processes(workdir, *bindings(train__steps=100_000), cache=cache)
    try:
        wait_for(lambda: num_rows(workdir) >= 3, *processes)
        processes[victim].kill()
        killed = time.monotonic()
        err = processes[1 - victim].communicate(timeout=120)[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1 - victim].returncode != 0
    assert err
    assert time.monotonic() - killed < 60
