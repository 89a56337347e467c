"""Runs the processes of `bench_links` on emulated machines, and collects what they measure."""

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments._bench_batches import CHECKOUT
from experiments._bench_links_network import Network, inside, machine_address, machine_name
from experiments._bench_links_variants import DIRECTIONS, Sizes, across_bytes, variants
from experiments._bench_report import Times
from solver import Topology

_LOG = logging.getLogger(__name__)

# Nothing else listens in a namespace.
_PORT = 9911
_ANSWER_S = 1200
# Float32, relative to each array's largest number.
_TOLERANCE = 1e-5
_LINES_OF_LOG = 15


@dataclass(frozen=True, slots=True)
class Measured:
    """One program on one set of machines.

    Attributes:
        variant: its name.
        direction: one of `DIRECTIONS`.
        formula_bytes, compiled_bytes, sent_bytes: that a machine sends to others: by formula, by the collectives of the
            compiled program, and by the counters of the links (median of all runs, headers and barriers included).
        error: the largest, against attention on one device.
        unlimited: seconds without limits, which are those of the compute and of this computer's memory.
        limited: seconds by rate in Mbit/s.
    """

    variant: str
    direction: str
    formula_bytes: float
    compiled_bytes: float
    sent_bytes: float
    error: float
    unlimited: Times
    limited: dict[float, Times]


@dataclass(frozen=True, slots=True)
class Machines:
    """All that was measured on some machines.

    Attributes:
        topology: machines and processes of each.
        compute_s: median seconds of each device's share of the attention, all at once, with nothing to send.
        programs: by variant and direction.
    """

    topology: Topology
    compute_s: float
    programs: tuple[Measured, ...]


def measure(
    topology: Topology, sizes: Sizes, rates_mbit: Sequence[float], rounds: int, *, shared: bool
) -> Machines:
    """Emulate the machines, check that all variants agree with attention on one device, and time them.

    In each round every variant runs at every rate and without a limit; odd rounds go through the variants backwards.

    Args:
        topology: machines and processes of each.
        sizes: of the attention.
        rates_mbit: of a link in each direction.
        rounds: measurements of each program.
        shared: whether the two directions of a link have one limit, of twice the rate.

    Raises:
        RuntimeError: if a process fails or a variant is wrong.
        UserError: if machines cannot be emulated.
    """
    network = Network(topology.num_machines, shared=shared)
    with network, _processes(topology, sizes) as workers:
        _LOG.info("%s machines x %s: compiling ...", topology.num_machines, topology.devices_per_machine)
        workers.answers()
        checked = workers.ask({"do": "check"})
        _check_errors(checked)
        clock = _Clock(workers, topology)
        for number in range(rounds):
            for rate in (None, *rates_mbit):
                _LOG.info("round %s of %s, %s Mbit/s ...", number + 1, rounds, rate or "unlimited")
                network.limit(rate)
                clock.time_all(rate, backwards=number % 2 == 1)
            clock.time_compute()
    return _collected(topology, sizes, checked, clock)


def _check_errors(checked: list[dict[str, Any]]) -> None:
    for one in (program for answer in checked for program in answer["programs"]):
        if not one["error"] <= _TOLERANCE:  # NaN is wrong too
            raise RuntimeError(f"bench_links: {one['variant']} differs from attention by {one['error']:.2g}")


class _Clock:
    """Samples so far."""

    def __init__(self, workers: "_Workers", topology: Topology) -> None:
        self.workers, self.topology = workers, topology
        self.keys = [(v.name, backward) for v in variants(topology) for backward in (False, True)]
        self.seconds: dict[tuple[str, bool, float | None], list[float]] = {}
        self.sent: dict[tuple[str, bool], list[float]] = {}
        self.compute: list[float] = []

    def time_all(self, rate: float | None, *, backwards: bool) -> None:
        """Each program once."""
        for name, backward in self.keys[:: -1 if backwards else 1]:
            answers = self.workers.ask({"do": "time", "variant": name, "backward": backward})
            self.seconds.setdefault((name, backward, rate), []).append(_elapsed(answers))
            # Processes of a machine read the same counter.
            machines = answers[:: self.topology.devices_per_machine]
            mean = sum(answer["sent_bytes"] for answer in machines) / len(machines)
            self.sent.setdefault((name, backward), []).append(mean)

    def time_compute(self) -> None:
        """All devices' shares of the attention at once."""
        self.compute.append(_elapsed(self.workers.ask({"do": "compute"})))


def _elapsed(answers: list[dict[str, Any]]) -> float:
    """From the first begin to the last end."""
    return max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)


def _collected(topology: Topology, sizes: Sizes, checked: list[dict[str, Any]], clock: _Clock) -> Machines:
    measured = []
    for variant in variants(topology):
        for backward, direction in enumerate(DIRECTIONS):
            key = variant.name, bool(backward)
            of_all = [
                one
                for answer in checked
                for one in answer["programs"]
                if (one["variant"], one["backward"]) == key
            ]
            times = {rate: Times(tuple(s)) for (*k, rate), s in clock.seconds.items() if tuple(k) == key}
            measured.append(
                Measured(
                    variant=variant.name,
                    direction=direction,
                    formula_bytes=across_bytes(
                        variant, topology, sizes.tensor_bytes, backward=bool(backward)
                    ),
                    compiled_bytes=of_all[0]["compiled_bytes"],
                    sent_bytes=Times(tuple(clock.sent[key])).middle,
                    error=max(one["error"] for one in of_all),
                    unlimited=times[None],
                    limited={rate: found for rate, found in times.items() if rate is not None},
                )
            )
    return Machines(topology, Times(tuple(clock.compute)).middle, tuple(measured))


class _Workers:
    """The processes, and their answers."""

    def __init__(self, processes: list[subprocess.Popen], logs: list[Path]) -> None:
        self.processes, self.logs = processes, logs

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all processes to one request, in order of processes."""
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
        last = "\n".join(self.logs[number].read_text().splitlines()[-_LINES_OF_LOG:])
        return RuntimeError(f"bench_links: process {number} {what}; the end of its log:\n{last}")

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
def _processes(topology: Topology, sizes: Sizes) -> Iterator[_Workers]:
    """One process for each device; killed on leaving."""
    workers = _Workers([], [])
    # Of all cores each process sees as many threads as there are; what the caller set for XLA is for other programs.
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(topology.num_devices):
                log = Path(folder) / f"{number}.log"
                with log.open("w") as errors:
                    # In a session of its own: an interrupt from the keyboard is for this process alone.
                    process = subprocess.Popen(
                        worker_command(topology, sizes, number),
                        cwd=CHECKOUT,
                        env=env,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        bufsize=1,
                        start_new_session=True,
                    )
                workers.processes.append(process)
                workers.logs.append(log)
            yield workers
        finally:
            workers.end()
