"""Several processes that work together, on this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """A port for the coordinator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_together(
    commands: Sequence[Sequence[Any]],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = _ROOT,
) -> list[subprocess.CompletedProcess]:
    """Run one Python process for each list of arguments, at the same time, with `env` added to the environment."""
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in commands
    ]
    return finish_together(processes, timeout=timeout)


def finish_together(
    processes: Sequence[subprocess.Popen], *, timeout: float
) -> list[subprocess.CompletedProcess]:
    """Wait for processes in turn; none is left behind if one takes longer than the timeout."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]
