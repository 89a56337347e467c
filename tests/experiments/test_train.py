"""The training program from start to end: what it leaves, how it goes on, and what it refuses to go on from."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from experiments import _components, _feed, _loop, train
from experiments._config import load_config
from experiments._workdir import only_user
from experiments.data import DataError
from tests.experiments._program_cases import (
    ROOT,
    TINY,
    arrays,
    bindings,
    checkpoints,
    interrupted,
    losses,
    programs_shared,
    rows,
    run,
    snapshot,
)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with programs_shared():
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of six steps without interruption."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    assert run(train.main, "--config", TINY, "--workdir", workdir) == 0
    return workdir


@pytest.fixture
def halfway(straight, tmp_path):
    """The same run, killed right after the checkpoint of step 3."""
    return interrupted(straight, tmp_path / "halfway", 3)


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(n, action)`: calls `action` once the loop has done n steps, just before it goes on to the next."""

    def install(step, action):
        shown = _loop.Progress.update

        def update(self, done, report):
            shown(self, done, report)
            if done == step:
                action()

        monkeypatch.setattr(_loop.Progress, "update", update)

    return install


def go_on(workdir, *args):
    return run(train.main, "--config", TINY, "--workdir", workdir, *args)


def test_what_a_run_leaves(straight):
    assert len(losses(straight)) == 6
    assert all(np.isfinite(losses(straight)))
    row = rows(straight)[-1]
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_s", "step_s", "padded_fraction"} <= set(row)
    assert 1 < row["static_cost"] <= row["computed_over_useful"] < 2
    assert 0 <= row["padded_attention_fraction"] < 1
    # Mixed bags level what the loader's contiguous deal leaves uneven.
    assert 1.0 <= row["load_after"] < 1.2
    assert all(r["load_after"] <= r["load_before"] for r in rows(straight))
    assert row["compilations"] == 1
    assert checkpoints(straight) == [3, 6]
    for name in ("training.png", "loads.png", "layouts.png"):
        assert (straight / name).stat().st_size > 1000
    assert list((straight / "events").iterdir())
    about = json.loads((straight / "about.json").read_text())
    assert about["mesh"] == {"replica": 4, "shard": 1}
    assert about["processes"] == 1
    assert {"python", "jax", "jaxdit"} <= set(about["versions"])
    assert not list(straight.rglob(".part-*"))


def test_the_saved_configs_are_those_of_the_run(straight):
    operative = (straight / "operative_config.gin").read_text()
    # Defaults are in it as well: a later version may have others.
    assert "train.ema_decay = " in operative
    assert "adamw.b2 = " in operative
    for name in ("config.gin", "operative_config.gin"):
        load_config(straight / name, [])
        settings = _components.train()
        assert (settings.steps, settings.bags) == (6, "g1n2+g2n1")


def test_a_second_start_after_the_end_does_nothing(straight):
    before = snapshot(straight)
    assert go_on(straight) == 0
    assert {p: t for p, t in snapshot(straight).items() if p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }


def test_what_a_run_interrupted_after_its_last_checkpoint_lacks_is_made_up_for(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    for name in ("training.png", "loads.png", "layouts.png"):
        (workdir / name).unlink()
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(lines[:-1]))
    prompts = bindings(train__sample_prompts="['a seven | 16x16']")
    assert go_on(workdir, *prompts) == 0
    for name in ("training.png", "loads.png", "layouts.png"):
        assert (workdir / name).read_bytes() == (straight / name).read_bytes()
    assert rows(workdir) == rows(straight)
    assert (workdir / "samples" / "step_0000006.png").is_file()
    before = snapshot(workdir)
    assert go_on(workdir, *prompts) == 0
    assert all(snapshot(workdir)[path] == then for path, then in before.items() if path.name != ".lock")


def test_a_relative_workdir(straight, tmp_path, monkeypatch):
    shutil.copytree(straight, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert go_on("run", *bindings(train__steps=6)) == 0
    assert checkpoints(tmp_path / "run") == [3, 6]


def test_resumed_on_the_same_devices_it_is_the_same_bit_for_bit(straight, halfway):
    assert go_on(halfway) == 0
    assert losses(halfway) == losses(straight)
    want, got = arrays(straight, 6), arrays(halfway, 6)
    assert set(want) == set(got)
    assert {name.split(".")[0] for name in want} == {"step", "params", "ema", "opt_state", "skipped"}
    for name in want:
        assert want[name].dtype == got[name].dtype
        np.testing.assert_array_equal(want[name], got[name], err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize(("num_devices", "shards"), [(1, 1), (2, 2), (4, 4), (8, 8), (8, 2)])
def test_resumed_on_other_devices_it_agrees_to_rounding(straight, halfway, num_devices, shards):
    changes = bindings(train__num_devices=num_devices, train__bags=f"g{num_devices}n1", train__shards=shards)
    if shards > 1:
        changes += bindings(train__remat="full")
    assert go_on(halfway, *changes) == 0
    np.testing.assert_allclose(losses(halfway), losses(straight), rtol=1e-4)
    want, got = arrays(straight, 6), arrays(halfway, 6)
    for name in want:
        if name.startswith(("params", "ema")):
            # Adam divides by the gradient's size, which for some entries is rounding itself.
            difference = np.linalg.norm(want[name] - got[name])
            assert difference <= 1e-3 * np.linalg.norm(want[name]) + 1e-5, name


def test_sigterm_saves_and_the_next_start_goes_on(straight, tmp_path, at_step):
    workdir = tmp_path / "run"
    # After step 2 the signal is pending while step 3 runs; save_every is out of reach.
    at_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert go_on(workdir, *bindings(train__save_every=100)) == 0
    assert checkpoints(workdir) == [2]
    assert len(losses(workdir)) == 2
    assert (workdir / "training.png").exists()
    assert go_on(workdir, *bindings(train__save_every=100)) == 0
    assert losses(workdir) == losses(straight)
    want, got = arrays(straight, 6), arrays(workdir, 6)
    assert all(np.array_equal(want[name], got[name]) for name in want)


def test_rows_that_were_not_written_when_the_run_was_killed(straight, halfway):
    kept = (halfway / "metrics.jsonl").read_text().splitlines()
    # Step 2 is the last that the checkpoint of step 3 covers; half of its row, nothing of the next.
    (halfway / "metrics.jsonl").write_text("\n".join([*kept[:2], kept[2][:20]]))
    assert go_on(halfway) == 0
    assert losses(halfway) == losses(straight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__seed": 1}, "train.seed=0, now 1"),
        ({"quickstart__token_budget": 1500}, "other data"),
        ({"train__micro_batches": 2}, "train.micro_batches=1, now 2"),
        ({"text_to_image__num_single_blocks": 2}, "is of another model"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(straight, changes, message, capfd):
    before = snapshot(straight)
    assert go_on(straight, *bindings(**changes)) == 2
    said = capfd.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("error: ")]) == 1
    assert message in said[-1]
    assert "--workdir" in said[-1]
    # Nothing of the run that is there was overwritten: it can still be sampled, and goes on.
    assert {p: t for p, t in snapshot(straight).items() if p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }


def poison(monkeypatch, step):
    """Makes the data of one step NaN."""
    home_rows = _feed.home_rows

    def poisoned(data, capacity):
        found = home_rows(data, capacity)
        return found._replace(img=np.full_like(found.img, np.nan)) if data.index.step == step else found

    monkeypatch.setattr(_feed, "home_rows", poisoned)


def test_a_step_that_is_not_finite_is_named_and_changes_nothing(tmp_path, monkeypatch, caplog):
    poison(monkeypatch, 2)
    workdir = tmp_path / "run"
    assert go_on(workdir, *bindings(train__save_every=1, train__keep=6)) == 0
    assert [row["skipped"] for row in rows(workdir)] == [0, 0, 1, 0, 0, 0]
    assert rows(workdir)[2]["non_finite"]["loss"] == "nan"
    assert any(
        "step 2: loss nan" in r.getMessage() and "not applied" in r.getMessage() for r in caplog.records
    )
    before, after = arrays(workdir, 2), arrays(workdir, 3)
    for name in before:
        if name not in ("step", "skipped"):
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    assert (after["step"], after["skipped"]) == (3, 1)
    assert np.isfinite(rows(workdir)[-1]["loss"])


def test_a_step_that_is_not_finite_stops_the_run_if_asked(tmp_path, monkeypatch, capfd):
    poison(monkeypatch, 4)
    workdir = tmp_path / "run"
    assert go_on(workdir, *bindings(train__on_nonfinite="stop")) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("error: step 4: loss nan")
    assert "checkpoint of step 3 is kept" in message
    assert checkpoints(workdir) == [3]
    assert len(losses(workdir)) == 4


def test_a_run_that_skips_step_after_step_stops(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(_loop, "_MOST_SKIPPED_IN_A_ROW", 3)
    workdir = tmp_path / "run"
    # The first update is beyond float32: neither it nor any later one is applied.
    assert go_on(workdir, *bindings(adamw__learning_rate=3e38, adamw__weight_decay=10.0)) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert "the update was not applied, nor were 2 before it" in message
    assert checkpoints(workdir) == []


def test_data_that_is_lost_on_the_way(straight, tmp_path, monkeypatch, capfd):
    read = _loop.StepReader.read

    def lose(self, t):
        if t == 4:
            raise DataError("at most 1.00% of the samples may be bad; got 20 of 90: a.png")
        return read(self, t)

    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(_loop.StepReader, "read", lose)
        assert go_on(workdir) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("error: at most 1.00% of the samples may be bad")
    assert checkpoints(workdir) == [3]
    assert go_on(workdir) == 0
    assert losses(workdir) == losses(straight)


def test_a_full_disk_leaves_the_last_good_checkpoint(straight, tmp_path):
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "tests.experiments.full_disk_worker", workdir, "--config", TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr[-2000:]
    # Orbax may go on to report the writes it gave up.
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message.startswith("error: checkpoint of step 6 could not be written")
    assert "The last good checkpoint is step 3" in message
    assert checkpoints(workdir) == [3]
    assert go_on(workdir) == 0
    assert losses(workdir) == losses(straight)


def test_a_picture_that_cannot_be_written(tmp_path, capfd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training.png").mkdir()
    assert go_on(tmp_path / "run") == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("error: cannot write")
    assert checkpoints(tmp_path / "run") == [3, 6]


def test_a_folder_that_cannot_be_written(tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    assert go_on(tmp_path / "file" / "run") == 2
    assert "error: cannot write to" in capfd.readouterr().err.splitlines()[-1]


def test_two_trainings_in_one_folder(straight, capfd):
    with only_user(straight):
        assert go_on(straight) == 2
    assert "another process is training in" in capfd.readouterr().err.splitlines()[-1]
    assert go_on(straight) == 0


def test_profile(halfway):
    assert go_on(halfway, "--profile", 1) == 0
    assert list((halfway / "profile").rglob("*.xplane.pb"))
