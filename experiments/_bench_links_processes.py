"""The processes of `bench_links` on emulated machines, which answer requests."""

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from experiments._bench_batches import CHECKOUT
from experiments._bench_links_network import inside, machine_address, machine_name
from experiments._bench_links_variants import Sizes
from solver import Topology

# Nothing else listens in a namespace.
_PORT = 9911
_ANSWER_S = 1200
_LINES_OF_LOG = 15


class Workers:
    """Running processes, and their answers."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.logs: list[IO[str]] = []

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all processes to one request, in order of processes.

        Raises:
            RuntimeError: as `answers` does.
        """
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `answers` says what it died of
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """A line of each process.

        Raises:
            RuntimeError: a process has ended, or is silent for long.
        """
        lines: dict[int, str] = {}
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, number)
            while len(lines) < len(self.processes):
                ready = selector.select(_ANSWER_S)
                if not ready:
                    silent = min(set(range(len(self.processes))) - set(lines))
                    raise self._failed(silent, f"is silent for {_ANSWER_S} s")
                for key, _ in ready:
                    lines[key.data] = key.fileobj.readline()  # type: ignore[union-attr]
                    if not lines[key.data]:
                        raise self._failed(key.data, "ended")
                    selector.unregister(key.fileobj)
        return [json.loads(lines[number]) for number in range(len(self.processes))]

    def _failed(self, number: int, what: str) -> RuntimeError:
        log = self.logs[number]
        log.seek(0)
        last = "\n".join(log.read().splitlines()[-_LINES_OF_LOG:])
        return RuntimeError(f"bench_links: process {number} {what}; the end of its log:\n{last}")

    def start(self, command: list[str], log: IO[str]) -> None:
        """One more process, with its stderr in a file open for reading and appending."""
        # Each process sees all cores; what the caller set for XLA is for other programs.
        env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
        process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
            start_new_session=True,  # an interrupt from the keyboard is for this process alone
        )
        self.processes.append(process)
        self.logs.append(log)

    def end(self) -> None:
        """Kill what runs: JAX's processes take SIGTERM for a request."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


def worker_command(topology: Topology, sizes: Sizes, process: int) -> list[str]:
    """The command of a process, in the namespace of its machine."""
    program = [sys.executable, "-m", "experiments._bench_links_worker"]
    program += ["--coordinator", f"{machine_address(0)}:{_PORT}", "--process", str(process)]
    program += ["--machines", str(topology.num_machines)]
    program += ["--devices-per-machine", str(topology.devices_per_machine)]
    program += ["--sizes", json.dumps(dataclasses.asdict(sizes))]
    return inside(machine_name(int(topology.machine_of(process))), program)


@contextlib.contextmanager
def running(topology: Topology, sizes: Sizes) -> Iterator[Workers]:
    """One process for each device, ready to answer; killed on leaving.

    Raises:
        RuntimeError: a process does not get ready.
    """
    workers = Workers()
    with contextlib.ExitStack() as logs:
        try:
            for number in range(topology.num_devices):
                log = logs.enter_context(tempfile.TemporaryFile("a+"))
                workers.start(worker_command(topology, sizes, number), log)
            workers.answers()
            yield workers
        finally:
            workers.end()
