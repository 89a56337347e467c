"""Saving with two processes, of which the first, which writes, cannot: both say so, and both go on to the next save."""

import jax
import numpy as np

from jaxdit.models import DiTConfig
from jaxdit.weights import load_params
from tests.processes import free_port, run_together

CONFIG = DiTConfig(width=32, depth=3, num_heads=2, patch_size=2, num_classes=5, time_frequency_shift=1)


def two_processes(folder):
    """What each process printed, by the name it saved to."""
    command = ["-m", "tests.jaxdit.write_failure_worker", free_port()]
    found = run_together([[*command, i, folder] for i in range(2)], timeout=120, env={"NPROC": "32"})
    assert [process.returncode for process in found] == [0, 0], [x.stderr[-2000:] for x in found]
    return [dict(line.split(" ", 1) for line in process.stdout.splitlines()) for process in found]


def test_a_first_process_that_cannot_write_leaves_nobody_waiting(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious.txt").write_text("mine")
    first, second = two_processes(tmp_path)
    assert "File too large" in first["full"]
    assert first["file/inside"].startswith(("NotADirectoryError", "FileExistsError"))
    assert "is there already and not empty" in first["taken"]
    for name in ("full", "file/inside", "taken"):
        path = tmp_path / name
        assert second[name].startswith(f"WeightsError: {path} was not written: the first process could not")
    assert first["good"] == second["good"] == "saved"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "good", "taken"]
    jax.tree.map(
        lambda x: np.testing.assert_array_equal(x, np.full(x.shape, 3)),
        load_params(tmp_path / "good", CONFIG),
    )
