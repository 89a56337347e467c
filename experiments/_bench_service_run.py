"""The service in a process of its own, under load, and its memory meanwhile."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments._bench_service_load import Answer, Load, Sent, get
from experiments._program import UserError

_SERVING = re.compile(r"serving .* on http://([\d.]+):(\d+)$")
_START_S = 120.0
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Resident:
    """Memory of the service at a moment.

    Attributes:
        seconds: since the first request.
        answers: so far.
        bytes: resident.
    """

    seconds: float
    answers: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load test found.

    Attributes:
        answers: of all requests.
        seconds: from the first request to the last answer.
        memory: over time, from before the first request.
        batches, pictures: sampled, by the service's own count.
        exit_code, exit_s: after SIGTERM.
    """

    answers: list[Answer]
    seconds: float
    memory: list[Resident]
    batches: int
    pictures: int
    exit_code: int
    exit_s: float

    @property
    def mb_per_thousand(self) -> float:
        """MB that memory grows by in 1,000 requests, fitted to the last half of the requests."""
        half = [one for one in self.memory if one.answers >= len(self.answers) / 2]
        answers, resident = ([getattr(one, name) for one in half] for name in ("answers", "bytes"))
        if len(set(answers)) < 2:
            return float("nan")
        return float(np.polyfit(answers, resident, 1)[0]) * 1000 / _MB


class Service:
    """A running service.

    Attributes:
        address: host and port.
        pid: of its process.
    """

    def __init__(self, model: Path, options: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "experiments.serve", "--model", str(model), "--port", "0", *options]
        self._log = log
        with log.open("w") as stream:
            self._process = subprocess.Popen(command, stderr=stream)
        self.pid = self._process.pid
        try:
            self.address = self._address()
        except BaseException:
            self._process.kill()
            raise

    def _address(self) -> tuple[str, int]:
        stop = time.monotonic() + _START_S
        while time.monotonic() < stop and self._process.poll() is None:
            for line in self._log.read_text().splitlines():
                if found := _SERVING.search(line):
                    return found[1], int(found[2])
            time.sleep(0.1)
        raise UserError(f"the service did not start: {self._log.read_text()[-2000:]}")

    def resident_bytes(self) -> int:
        """Of its process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def ended(self, timeout_s: float) -> int:
        """Its exit code after SIGTERM; it is killed if it takes longer than that."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def under_load(
    model: Path, requests: Sequence[Sent], *, clients: int, options: Sequence[str], log: Path
) -> Loaded:
    """Start the service, send all requests, end it.

    Args:
        model: folder of a pipeline.
        requests: to send.
        clients: that send at a time.
        options: of the service.
        log: file for what it says.

    Raises:
        UserError: if it does not start.
    """
    if not Path("/proc/self/statm").is_file():
        raise UserError("the load test reads memory from Linux's /proc, which is not here.")
    service = Service(model, options, log)
    try:
        load = Load(service.address, requests, clients)
        started = time.monotonic()
        with _watched(service, lambda: len(load.answers)) as memory:
            answers = load.run()
        seconds = time.monotonic() - started
        text = get(service.address, "/metrics")[1]
    finally:
        ending = time.monotonic()
        exit_code = service.ended(60.0)
    exit_s = time.monotonic() - ending
    batches, pictures = (_metric(text, f"jaxdit_batch_size_{name}") for name in ("count", "sum"))
    return Loaded(answers, seconds, memory, batches, pictures, exit_code, exit_s)


@contextmanager
def _watched(service: Service, answers: Callable[[], int]) -> Iterator[list[Resident]]:
    """Memory four times a second while the block runs, and at its ends."""
    found: list[Resident] = []
    started, done = time.monotonic(), threading.Event()

    def look() -> None:
        found.append(Resident(time.monotonic() - started, answers(), service.resident_bytes()))

    def watch() -> None:
        while not done.wait(0.25):
            look()

    look()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        look()


def _metric(text: str, name: str) -> int:
    found = re.search(rf"^{name} ([\d.e+]+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"the service's metrics must have {name}.")
    return round(float(found[1]))
