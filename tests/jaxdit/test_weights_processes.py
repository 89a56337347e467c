"""Saving with two processes, of which the first, which writes, cannot: both say so, and both go on to the next save."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from jaxdit.models import DiTConfig
from jaxdit.weights import load_params

CONFIG = DiTConfig(width=32, depth=3, num_heads=2, patch_size=2, num_classes=5, time_frequency_shift=1)


def two_processes(folder):
    """What each process printed, by the name it saved to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.jaxdit.write_failure_worker", port]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(folder)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "NPROC": "32"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        found = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [err[-2000:] for _, err in found]
    return [dict(line.split(" ", 1) for line in out.splitlines()) for out, _ in found]


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
