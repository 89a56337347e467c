"""A step's tables: routes and items as padded int32 arrays, one row a device, ready for the program.

Both are named tuples, so that JAX sees pytrees of arrays without this package knowing JAX.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from solver._capacity import (
    RouteCapacity,
    StepCapacity,
    check_same_program,
    rows_by_device,
    step_needs,
    with_queries_of,
)
from solver._check import instance, integers
from solver._layout import StepLayout
from solver._routes import Route, round_of_pair

Int32 = NDArray[np.int32]


class ExchangeTables(NamedTuple):
    """A route as arrays with leading axis the listed devices; unused entries are zero (a run of no rows).

    Attributes:
        send_runs: (devices, runs, 4) a_start, heads, length, copy of rows that leave, in send-buffer order.
        recv_runs: (devices, runs, 7) base, first, per_group, group, stride, heads, length of rows that arrive.
        stay_runs: (devices, runs, 9) a_start, heads, length, copy, base, first, per_group, group, stride.
        peers: (devices, 6, num_devices) rows sent to each peer; rows received from each; where the rows sent start
            in the peer's receive buffer; where rows sent back start in the peer's send buffer; the round of the padded
            exchange in which this device sends to each peer, and in which it receives from each. There are
            num_devices - 1 rounds: with a power of two devices round r pairs s with s XOR r, otherwise it sends s to
            (s + r) mod num_devices.
    """

    send_runs: Int32
    recv_runs: Int32
    stay_runs: Int32
    peers: Int32


class AttentionTables(NamedTuple):
    """Tables of one head group's attention; arrays with leading axis the listed devices.

    Attributes:
        keys: token to attention layout, for q, k and v, or for k and v if `queries` is given.
        queries: token to attention layout for queries (and back for outputs) when items may be divided.
        key_items, query_items: (devices, items, 7) base, first, per_group, group, stride, heads, rows of each item.
        key_blocks: (devices, query_rows // block, 2) key blocks that each query block needs, half open.
        query_blocks: (devices, key_rows // block, 2) query blocks that need each key block, half open.
    """

    keys: ExchangeTables
    queries: ExchangeTables | None
    key_items: Int32
    query_items: Int32
    key_blocks: Int32
    query_blocks: Int32


class StepTables(NamedTuple):
    """All tables of a step; arrays with leading axis the listed devices.

    Attributes:
        text, image: home to token layout.
        sequences: (devices, device_sequences) the sequences of which a device holds tokens in token layout, plus one;
            0 where there are fewer.
        attention: of each head group, one after another.
    """

    text: ExchangeTables
    image: ExchangeTables
    sequences: Int32
    attention: tuple[AttentionTables, ...]


def _grouped(group: NDArray, values: NDArray, wanted: NDArray, capacity: int) -> Int32:
    """Rows of `values`, sorted by `group`, as one padded (capacity, k) table for each wanted group."""
    start = np.searchsorted(group, wanted)
    count = np.searchsorted(group, wanted, side="right") - start
    # A table has a run to look at, if only an empty one.
    out = np.zeros((len(wanted), max(capacity, 1), values.shape[1]), np.int32)
    owner = np.repeat(np.arange(len(wanted)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    out[owner, within] = values[start[owner] + within]
    return out


def exchange_tables(
    route: Route, capacity: RouteCapacity, devices: NDArray[np.int64], *, text_capacity: int = 0
) -> ExchangeTables:
    """The tables of one route for `devices`.

    Args:
        route: the route, over all devices.
        capacity: sizes the route must fit; `route_needs(route)` is the least.
        devices: devices to make tables for (those of this process).
        text_capacity: rows of text before the image rows in layout A, when the route moves both streams.
    """
    a_start = route.a_start + route.in_image * (text_capacity * route.num_heads)
    leaves = route.source != route.target
    near = np.stack([a_start, route.heads, route.length, route.copy], -1)
    shape = np.stack([route.heads, route.length], -1)
    far = np.concatenate([route.b_fields, shape], -1)

    def of(group, values, mask, size):
        return _grouped(group[mask], values[mask], devices, size)

    # Sorted by (source, target) already; a stable sort by target gives (target, source) in the same inner order.
    by_target = np.argsort(route.target, kind="stable")
    sent = route.sent()
    there = np.cumsum(sent, axis=0) - sent
    back = np.cumsum(sent, axis=1) - sent
    rounds = round_of_pair(route.num_devices)
    peers = sent, sent.T, there, back.T, rounds, rounds.T
    return ExchangeTables(
        send_runs=of(route.source, near, leaves, capacity.send_runs),
        recv_runs=of(route.target[by_target], far[by_target], leaves[by_target], capacity.recv_runs),
        stay_runs=of(route.source, np.concatenate([near, route.b_fields], -1), ~leaves, capacity.stay_runs),
        peers=np.stack([x[devices] for x in peers], 1).astype(np.int32),
    )


def step_tables(
    layout: StepLayout, capacity: StepCapacity, devices: Sequence[int] | None = None
) -> StepTables:
    """The tables of a step, padded to `capacity`; on the host.

    Args:
        layout: the step's layouts.
        capacity: sizes that the program was compiled for.
        devices: devices to make tables for, in the order of the mesh (those of this process); all by default.

    Raises:
        TypeError: a layout or a capacity of another type.
        ValueError: if the layout does not fit the capacity: the message names the first size that is too small, what
            the step needs, and of which device and sequence; or for devices that the plan has not.

    Example:
        >>> from solver import StepLayout, balance, capacity_for, step_needs, step_tables
        >>> plan = balance([100, 20], [0, 1], num_devices=2, bags="g2n1", num_heads=2)
        >>> layout = StepLayout(plan, block=64)
        >>> capacity = capacity_for([step_needs(layout)])
        >>> tables = step_tables(layout, capacity)
        >>> (attention,) = tables.attention
        >>> attention.keys.peers[:, 0].tolist()  # half of the tokens' rows, 50 + 10 of one head, go to the other device
        [[0, 60], [60, 0]]
        >>> attention.key_items[0, :2, 5:].tolist()  # device 0: one head of 100 rows, one of 20
        [[1, 100], [1, 20]]
    """
    instance("step_tables", "layout", layout, StepLayout, advice="Make one with StepLayout(plan, block).")
    instance("step_tables", "capacity", capacity, StepCapacity, advice="Make one with capacity_for.")
    _check_fits(layout, capacity)
    num_devices = layout.plan.num_devices
    wanted = np.arange(num_devices)
    if devices is not None:
        advice = f"The plan has {num_devices}, numbered from 0."
        wanted = integers(
            "step_tables", "devices", devices, most=num_devices - 1, each="device", advice=advice
        )

    return StepTables(
        text=exchange_tables(layout.text_route, capacity.text_route, wanted),
        image=exchange_tables(layout.image_route, capacity.image_route, wanted),
        sequences=_grouped(
            layout.present[:, 0], layout.present[:, 1:] + 1, wanted, capacity.device_sequences
        )[..., 0],
        attention=tuple(_attention_tables(group, capacity, wanted) for group in layout.groups),
    )


def _attention_tables(
    group: StepLayout, capacity: StepCapacity, wanted: NDArray[np.int64]
) -> AttentionTables:
    def items(*, keys: bool) -> Int32:
        device, table = group.item_table(keys=keys)
        return _grouped(device, table, wanted, capacity.items)

    def blocks(ranges: list[Int32], rows: int) -> Int32:
        out = np.zeros((len(wanted), rows // capacity.block, 2), np.int32)
        for i, device in enumerate(wanted):
            out[i, : len(ranges[device])] = ranges[device]
        return out

    def route(route: Route, sizes: RouteCapacity) -> ExchangeTables:
        return exchange_tables(route, sizes, wanted, text_capacity=capacity.text)

    return AttentionTables(
        keys=route(group.key_route, capacity.key_route),
        queries=None if capacity.query_route is None else route(group.query_route, capacity.query_route),
        key_items=items(keys=True),
        query_items=items(keys=False),
        key_blocks=blocks(group.key_blocks, capacity.query_rows),
        query_blocks=blocks(group.query_blocks, capacity.key_rows),
    )


def _check_fits(layout: StepLayout, capacity: StepCapacity) -> None:
    needs = step_needs(layout, padded=bool(capacity.key_route.rounds))
    check_same_program("step_tables", capacity, needs)
    too_small = _first_too_small(capacity, with_queries_of(needs, capacity))
    if too_small:
        name, have, want = too_small
        raise ValueError(
            f"step_tables: a step must fit its capacity; got {name}={have} and the step needs {want}"
            f"{_where(layout, name)}. Use capacity.grown(step_needs(layout)), which compiles a larger program, or"
            " capacity_for the needs of several steps ahead."
        )


def _where(layout: StepLayout, name: str) -> str:
    """The device that needs most of a size, and the longest sequence there; of the step, if it is no device's own."""
    lengths, device = layout.plan.lengths, layout.plan.home
    sequence = np.arange(len(lengths))
    sizes, place = rows_by_device(layout).get(name), ""
    if sizes is not None:
        fullest = int(sizes.argmax())
        place = f" on device {fullest}"
        if name in ("text", "image", "device_sequences"):
            device, sequence = layout.present.T
        elif name in ("query_rows", "key_rows", "items"):
            sequence, device = layout.plan.head_slices[:, [0, 5]].T
        sequence = sequence[device == fullest]
    if not len(sequence):
        return place
    longest = int(sequence[lengths[sequence].argmax()])
    return f"{place} (its longest sequence: {longest}, of {lengths[longest]} tokens)"


def _first_too_small(capacity: Any, needs: Any, prefix: str = "") -> tuple[str, int, int] | None:
    for name in type(needs).__slots__:
        have, want = getattr(capacity, name), getattr(needs, name)
        if isinstance(want, RouteCapacity):
            found = (prefix + name, 0, 1) if have is None else _first_too_small(have, want, f"{name}.")
            if found:
                return found
        elif isinstance(want, tuple):
            short = [(h, w) for h, w in zip(have, want, strict=True) if h < w]
            if short:
                return prefix + name, *short[0]
        elif want is not None and have < want:
            return prefix + name, have, want
    return None
