"""Which temporaries a compiled program holds when it holds most, from the compiler's dump of its buffers.

The dump (`xla_dump_to` with `xla_dump_hlo_as_text`) says where each value lies and from which to which instruction.
Values that share an address share a buffer: a loop's state before, in and after the loop.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from experiments.hlo._text import ArrayShape

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$")
_VALUE = re.compile(r"^ value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^    (\S+):(\d+)-(\d+)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value in the temporary allocation.

    Attributes:
        name: of the instruction that defines it, with the place in its result in braces.
        offset, num_bytes: where it lies.
        shape: None for a tuple's table of addresses.
        start, stop: first and last instruction of the schedule at which it is needed.
    """

    name: str
    offset: int
    num_bytes: int
    shape: ArrayShape | None
    start: int
    stop: int

    @property
    def instruction(self) -> str:
        """Name of the instruction without the place in its result."""
        return self.name.partition("{")[0]


def parse_buffers(assignment: str, live_ranges: str) -> list[Buffer]:
    """The values of the temporary allocation.

    Args:
        assignment: text of the dump's buffer-assignment file.
        live_ranges: text of its live-range file.
    """
    ranges = _ranges(live_ranges)
    buffers: list[Buffer] = []
    is_temporary = False
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            is_temporary = "preallocated-temp" in found[2]
        elif is_temporary and (found := _VALUE.match(line)):
            name = found[1] if found[1].endswith("}") else found[1] + "{}"
            start, stop = ranges.get(name, (0, -1))
            shape = None if found[4].startswith("(") else _shape(found[4])
            buffers.append(Buffer(found[1], int(found[3]), int(found[2]), shape, start, stop))
    return buffers


def _ranges(text: str) -> Mapping[str, tuple[int, int]]:
    found = (_RANGE.match(line) for line in text.splitlines())
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


def _shape(text: str) -> ArrayShape | None:
    found = _ARRAY.match(text)
    return ArrayShape(found[1], tuple(int(n) for n in found[2].split(",") if n)) if found else None


def peak_buffers(buffers: Iterable[Buffer]) -> list[Buffer]:
    """The buffers that are live when most bytes are, largest first; of values that share an address, the largest."""
    buffers = [b for b in buffers if b.stop >= b.start and b.num_bytes]
    if not buffers:
        return []
    end = max(b.stop for b in buffers) + 2
    # Values at one address count once: a loop's state has one name before, in and after the loop.
    delta = np.zeros(end, np.int64)
    for start, stop, size in _joined(buffers):
        delta[start] += size
        delta[stop + 1] -= size
    when = int(np.argmax(np.cumsum(delta)))
    live = sorted((b for b in buffers if b.start <= when <= b.stop), key=lambda b: -b.num_bytes)
    chosen: list[Buffer] = []
    taken: set[int] = set()
    for buffer in live:
        if buffer.offset not in taken:
            taken.add(buffer.offset)
            chosen.append(buffer)
    return chosen


def _joined(buffers: Iterable[Buffer]) -> list[tuple[int, int, int]]:
    """Spans (start, stop, size) in which an address is taken, those of one address joined where they touch."""
    spans: list[tuple[int, int, int]] = []
    by_offset: dict[tuple[int, int], list[Buffer]] = {}
    for buffer in buffers:
        by_offset.setdefault((buffer.offset, buffer.num_bytes), []).append(buffer)
    for (_, size), group in by_offset.items():
        group.sort(key=lambda b: b.start)
        start, stop = group[0].start, group[0].stop
        for buffer in group[1:]:
            if buffer.start <= stop + 1:
                stop = max(stop, buffer.stop)
            else:
                spans.append((start, stop, size))
                start, stop = buffer.start, buffer.stop
        spans.append((start, stop, size))
    return spans
