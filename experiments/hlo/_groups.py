"""Which devices a collective joins, and what of its traffic leaves a machine."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.hlo._text import Instruction

_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a device sends for one run of a collective, mean over the devices of the program.

    Attributes:
        inside: to devices of its own machine.
        across: to devices of other machines.
    """

    inside: float
    across: float


def replica_groups(instruction: Instruction, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that exchange data, by position in the mesh; all devices if none are named."""
    attributes = instruction.attributes
    if found := _IOTA.search(attributes):
        shape, source = (_integers(found[i]) for i in (1, 2))
        ids = np.arange(math.prod(source)).reshape(source)
        if found[3]:
            ids = ids.transpose(_integers(found[3]))
        return tuple(tuple(row) for row in ids.reshape(shape).tolist())
    found = _LISTS.search(attributes)
    groups = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    return tuple(_integers(group) for group in groups) or (tuple(range(num_devices)),)


def permute_pairs(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """(source, target) of a permute."""
    found = _PAIRS.search(instruction.attributes)
    return tuple(_integers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", found[1])) if found else ()


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def permute_traffic(
    num_bytes: float, pairs: Sequence[Sequence[int]], num_devices: int, per_machine: int
) -> Traffic:
    """A permute: every pair sends the whole operand; a device that keeps its own sends nothing."""
    moving = [(s, t) for s, t in pairs if s != t]
    across = sum(s // per_machine != t // per_machine for s, t in moving)
    return Traffic(num_bytes * (len(moving) - across) / num_devices, num_bytes * across / num_devices)


def ring_traffic(
    num_bytes: float, groups: Sequence[Sequence[int]], num_devices: int, per_machine: int
) -> Traffic:
    """Gathers and reductions, as rings in the order of each group: (n - 1) / n of the bytes pass over every edge.

    Args:
        num_bytes: the whole array, gathered or to be scattered.
        groups: devices of each ring.
        num_devices: devices of the program.
        per_machine: devices of a machine.
    """
    inside = across = 0.0
    for group in groups:
        size = len(group)
        edges = [(group[i], group[(i + 1) % size]) for i in range(size)] if size > 1 else []
        leaving = sum(s // per_machine != t // per_machine for s, t in edges)
        across += leaving * num_bytes * (size - 1) / size
        inside += (len(edges) - leaving) * num_bytes * (size - 1) / size
    return Traffic(inside / num_devices, across / num_devices)


def all_to_all_traffic(
    num_bytes: float, groups: Sequence[Sequence[int]], num_devices: int, per_machine: int
) -> Traffic:
    """An all-to-all: every device sends an equal part of its operand to each peer, and keeps one."""
    inside = across = 0.0
    for group in groups:
        part = num_bytes / len(group)
        for device in group:
            near = sum(peer // per_machine == device // per_machine for peer in group)
            inside += part * (near - 1)
            across += part * (len(group) - near)
    return Traffic(inside / num_devices, across / num_devices)
