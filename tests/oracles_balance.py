"""Independent references for balancing: the published greedy, exhaustive search, and plans expanded token by token."""

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOLDEN_FILE = Path(__file__).parent / "data" / "balance.json.gz"
MIXES = ("lowres", "mixres", "joint")
SPECS = ("g1n32", "g2n16", "g4n8", "g8n4")
GAMMAS = (0.4, 1.0)
WIDTH = 3072


def load_golden() -> dict[str, Any]:
    """Batches of the three published mixes, and the published balancer's plans for them."""
    return json.loads(gzip.decompress(GOLDEN_FILE.read_bytes()))


def flatten(ranks: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Lengths and home devices of a step given as lists of lengths per device."""
    return [n for rank in ranks for n in rank], [device for device, rank in enumerate(ranks) for _ in rank]


def tera_flop(length: int, gamma: float, width: int = WIDTH) -> float:
    """Work of a sequence in the unit the published balancer adds up in; the unit decides its ties."""
    return (24 * length * width**2 + gamma * (4 * length**2 * width)) / 1e12


def published_assignment(
    lengths: Sequence[int], sizes: Sequence[int], gamma: float, width: int = WIDTH
) -> list[int]:
    """Bag of each sequence by the published greedy, looking at every bag for every sequence."""
    work = [tera_flop(length, gamma, width) for length in lengths]
    total = 0.0
    for amount in work:
        total += amount
    capacity = [size * (total / sum(sizes)) for size in sizes]
    fill = [0.0] * len(sizes)
    bag_of = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: -work[i]):
        able = [b for b, size in enumerate(sizes) if capacity[b] >= work[index] and lengths[index] >= size]
        able = able or [b for b, size in enumerate(sizes) if size == max(sizes)]
        bag = min(able, key=lambda b: fill[b])
        fill[bag] += work[index] / capacity[bag]
        bag_of[index] = bag
    return bag_of


class Shares(NamedTuple):
    """Largest load and static-shape step of an assignment, per device."""

    load: float
    step: float


def shares_of(
    lengths: Sequence[int],
    bag_of: Sequence[int],
    sizes: Sequence[int],
    gamma: float,
    text_lengths: Sequence[int] | None = None,
) -> Shares:
    """Bag load over bag size, and most text, most image tokens and most attention, of an assignment (TFLOP)."""
    text, image, attention = ([0.0] * len(sizes) for _ in range(3))
    for length, bag, text_length in zip(lengths, bag_of, text_lengths or [0] * len(lengths), strict=True):
        text[bag] += 24 * text_length * WIDTH**2 / sizes[bag] / 1e12
        image[bag] += 24 * (length - text_length) * WIDTH**2 / sizes[bag] / 1e12
        attention[bag] += gamma * 4 * length**2 * WIDTH / sizes[bag] / 1e12
    loads = map(sum, zip(text, image, attention, strict=True))
    return Shares(max(loads), max(text) + max(image) + max(attention))


def every_assignment(lengths: Sequence[int], sizes: Sequence[int], gamma: float) -> Iterator[Shares]:
    """Figures of all ways to assign the sequences to bags."""
    for bag_of in itertools.product(range(len(sizes)), repeat=len(lengths)):
        yield shares_of(lengths, bag_of, sizes, gamma)


class Expanded(NamedTuple):
    """A plan written out: device of every token, devices of every (head, query)."""

    token_device: dict[tuple[int, int], list[int]]
    head_device: dict[tuple[int, int, int], list[int]]


def expand(plan: Any) -> Expanded:
    """Write out the slices of a small plan."""
    tokens, heads = defaultdict(list), defaultdict(list)
    for sequence, start, stop, device in plan.token_slices.tolist():
        for token in range(start, stop):
            tokens[sequence, token].append(device)
    for sequence, head_start, head_stop, query_start, query_stop, device in plan.head_slices.tolist():
        for head in range(head_start, head_stop):
            for query in range(query_start, query_stop):
                heads[sequence, head, query].append(device)
    return Expanded(dict(tokens), dict(heads))


def figures_of(plan: Any) -> dict[str, np.ndarray]:
    """The plan's figures per device, from its expansion by their definitions."""
    expanded = expand(plan)
    num_devices, num_heads, cost = plan.num_devices, plan.num_heads, plan.cost
    out = {
        name: np.zeros(num_devices)
        for name in ("tokens", "text_tokens", "attention_work", "rows", "rows_sent", "rows_across_machines")
    }
    needs = defaultdict(set)  # devices that attend with some query of this head of this sequence
    pair = 4 * cost.width * cost.gamma / num_heads * cost.seconds_per_flop
    for (sequence, head, _), devices in expanded.head_device.items():
        for device in devices:
            needs[sequence, head].add(device)
            out["attention_work"][device] += pair * plan.lengths[sequence]
    for (sequence, _), devices in needs.items():
        for device in devices:
            out["rows"][device] += plan.lengths[sequence]
    for (sequence, token), devices in expanded.token_device.items():
        (device,) = devices
        out["tokens"][device] += 1
        out["text_tokens"][device] += token < plan.text_lengths[sequence]
        for head in range(num_heads):
            for destination in needs[sequence, head] - {device}:
                out["rows_sent"][device] += 1
                per_machine = plan.topology.devices_per_machine
                out["rows_across_machines"][device] += destination // per_machine != device // per_machine
    linear = 24 * cost.width**2 * cost.seconds_per_flop * out["tokens"]
    return out | {"load": linear + out["attention_work"]}
