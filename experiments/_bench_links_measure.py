"""What `bench_links` measures on emulated machines: step times at several rates, bytes sent, compute alone."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments._bench_links_network import Network
from experiments._bench_links_processes import Workers, running
from experiments._bench_links_variants import DIRECTIONS, Sizes, Variant, across_bytes, variants
from experiments._bench_report import Times
from solver import Topology

_LOG = logging.getLogger(__name__)

# Float32, relative to each array's largest number.
_TOLERANCE = 1e-5


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

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.topology.num_machines} machines x {self.topology.devices_per_machine}"

    @property
    def rates(self) -> list[float]:
        """In Mbit/s."""
        return list(self.programs[0].limited)

    def programs_of(self, direction: str) -> dict[str, Measured]:
        """By variant."""
        return {one.variant: one for one in self.programs if one.direction == direction}


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
    _LOG.info("%s machines x %s: compiling ...", topology.num_machines, topology.devices_per_machine)
    network = Network(topology.num_machines, shared=shared)
    with network, running(topology, sizes) as workers:
        checked = _checked(workers)
        clock = _Clock(workers, topology)
        for number in range(rounds):
            for rate in (None, *rates_mbit):
                _LOG.info("round %s of %s, %s Mbit/s ...", number + 1, rounds, rate or "unlimited")
                network.limit(rate)
                clock.time_all(rate, backwards=number % 2 == 1)
            clock.time_compute()
    programs = [
        _measured(topology, sizes, variant, backward, checked[variant.name, backward], clock)
        for variant, backward in _programs(topology)
    ]
    return Machines(topology, Times(tuple(clock.compute)).middle, tuple(programs))


def _programs(topology: Topology) -> list[tuple[Variant, bool]]:
    """Every variant, forward and with the gradient."""
    return [(variant, backward) for variant in variants(topology) for backward in (False, True)]


@dataclass(frozen=True, slots=True)
class _Checked:
    """Of a program: its largest error over all processes, and the bytes of its collectives."""

    error: float
    compiled_bytes: float


def _checked(workers: Workers) -> dict[tuple[str, bool], _Checked]:
    """Of each program, by variant and whether it has the gradient.

    Raises:
        RuntimeError: one is wrong.
    """
    found: dict[tuple[str, bool], _Checked] = {}
    for one in (program for answer in workers.ask({"do": "check"}) for program in answer["programs"]):
        if not one["error"] <= _TOLERANCE:  # NaN is wrong too
            raise RuntimeError(f"bench_links: {one['variant']} differs from attention by {one['error']:.2g}")
        key = one["variant"], one["backward"]
        others = found[key].error if key in found else 0.0
        found[key] = _Checked(max(one["error"], others), one["compiled_bytes"])
    return found


class _Clock:
    """Samples so far, by variant and whether with the gradient."""

    def __init__(self, workers: Workers, topology: Topology) -> None:
        self.workers, self.topology = workers, topology
        # Of each rate; None is without a limit.
        self.seconds: dict[tuple[str, bool], dict[float | None, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.sent: dict[tuple[str, bool], list[float]] = defaultdict(list)
        self.compute: list[float] = []

    def time_all(self, rate: float | None, *, backwards: bool) -> None:
        """Each program once."""
        for variant, backward in _programs(self.topology)[:: -1 if backwards else 1]:
            answers = self.workers.ask({"do": "time", "variant": variant.name, "backward": backward})
            self.seconds[variant.name, backward][rate].append(_elapsed(answers))
            # Processes of a machine read the same counter.
            machines = answers[:: self.topology.devices_per_machine]
            mean = sum(answer["sent_bytes"] for answer in machines) / len(machines)
            self.sent[variant.name, backward].append(mean)

    def time_compute(self) -> None:
        """All devices' shares of the attention at once."""
        self.compute.append(_elapsed(self.workers.ask({"do": "compute"})))


def _elapsed(answers: list[dict[str, Any]]) -> float:
    """From the first begin to the last end."""
    return max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)


def _measured(
    topology: Topology, sizes: Sizes, variant: Variant, backward: bool, checked: _Checked, clock: _Clock
) -> Measured:
    key = variant.name, backward
    times = {rate: Times(tuple(samples)) for rate, samples in clock.seconds[key].items()}
    return Measured(
        variant=variant.name,
        direction=DIRECTIONS[backward],
        formula_bytes=across_bytes(variant, topology, sizes.tensor_bytes, backward=backward),
        compiled_bytes=checked.compiled_bytes,
        sent_bytes=Times(tuple(clock.sent[key])).middle,
        error=checked.error,
        unlimited=times[None],
        limited={rate: found for rate, found in times.items() if rate is not None},
    )
