"""Independent references for moving rows and for attention: everything row by row in plain Python, or in float64."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from solver import BalancePlan, BalanceProblem, CostModel, Topology, plan_from_slices

COST = CostModel(width=16, gamma=0.5)


class Step(NamedTuple):
    """Sequences of a step: how long they are and where they start."""

    lengths: list[int]
    text_lengths: list[int]
    home: list[int]
    num_devices: int
    num_heads: int


def plan_of(step: Step, token_slices: Iterable[Any], head_slices: Iterable[Any]) -> BalancePlan:
    """A plan with the given slices, sorted as plans are."""
    tokens = sorted(map(tuple, token_slices), key=lambda s: (s[3], s[0], s[1]))
    heads = sorted(map(tuple, head_slices), key=lambda s: (s[5], s[0], s[1], s[3]))
    problem = BalanceProblem(
        lengths=np.array(step.lengths, np.int64),
        text_lengths=np.array(step.text_lengths, np.int64),
        home=np.array(step.home, np.int64),
        num_heads=step.num_heads,
        topology=Topology(1, step.num_devices),
        cost=COST,
    )
    return plan_from_slices(
        problem,
        np.array(tokens, np.int32).reshape(-1, 4),
        np.array(heads, np.int32).reshape(-1, 6),
        lower_bounds=(0.0, 0.0),
    )


def random_step(
    rng: np.random.Generator, *, num_devices: int, num_heads: int, num_sequences: int, max_length: int
) -> Step:
    """Sequences of all kinds: only text, only image, both, one token, none."""
    text, image = rng.integers(0, max_length + 1, (2, num_sequences))
    kind = rng.integers(0, 5, num_sequences)
    text, image = np.where(kind == 0, 0, text // 2), np.where(kind == 1, 0, image // 2)
    text = np.where(kind == 2, (image == 0).astype(int), text)  # one token of text, or none
    home = rng.choice(rng.permutation(num_devices)[: rng.integers(1, num_devices + 1)], num_sequences)
    return Step((text + image).tolist(), text.tolist(), home.tolist(), num_devices, num_heads)


def random_plan(rng: np.random.Generator, step: Step, *, cuts: int = 3, divide: bool = True) -> BalancePlan:
    """Any legal plan: tokens cut anywhere, (heads x queries) cut in rectangles, pieces on any devices.

    Pieces of one sequence may lie on one device, rectangles may overlap in heads without being equal, and some devices
    may have nothing. Without `divide` only heads are dealt out.
    """
    able = rng.permutation(step.num_devices)[: rng.integers(1, step.num_devices + 1)]
    token_slices, head_slices = [], []
    for number, length in enumerate(step.lengths):
        if not length:
            continue
        edges = sorted({0, length, *rng.integers(0, length + 1, rng.integers(0, cuts + 1)).tolist()})
        for start, stop in itertools.pairwise(edges):
            token_slices.append((number, start, stop, int(rng.choice(able))))
        for rectangle in _rectangles(rng, (0, step.num_heads, 0, length), cuts, divide):
            head_slices.append((number, *rectangle, int(rng.choice(able))))
    return plan_of(step, token_slices, head_slices)


def _rectangles(rng: Any, box: tuple[int, int, int, int], cuts: int, divide: bool) -> list[tuple]:
    head_start, head_stop, start, stop = box
    by_query = divide and bool(rng.integers(2))
    low, high = (start, stop) if by_query else (head_start, head_stop)
    if cuts == 0 or high - low < 2 or rng.random() < 0.3:
        return [box]
    cut = int(rng.integers(low + 1, high))
    if by_query:
        halves = (head_start, head_stop, start, cut), (head_start, head_stop, cut, stop)
    else:
        halves = (head_start, cut, start, stop), (cut, head_stop, start, stop)
    return [r for half in halves for r in _rectangles(rng, half, cuts - 1, divide)]


# Layouts by definition. A stream is "text" or "image"; a token of it is (sequence, index in the joint sequence).


def home_tokens(plan: BalancePlan, stream: str) -> list[list[tuple[int, int]]]:
    """Per device its tokens in row order: whole sequences by number."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_devices)]
    for number, home in enumerate(plan.home.tolist()):
        rows[home] += [(number, token) for token in _stream(plan, number, stream)]
    return rows


def _stream(plan: BalancePlan, number: int, stream: str) -> range:
    text, length = int(plan.text_lengths[number]), int(plan.lengths[number])
    return range(text) if stream == "text" else range(text, length)


def placed_tokens(plan: BalancePlan, stream: str) -> list[list[tuple[int, int]]]:
    """Per device its tokens in token layout, in row order."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_devices)]
    for number, start, stop, device in plan.token_slices.tolist():
        inside = _stream(plan, number, stream)
        rows[device] += [(number, token) for token in range(start, stop) if token in inside]
    return rows


def token_moves(plan: BalancePlan, stream: str) -> set[tuple[int, int, int, int]]:
    """(source, row, target, row) of every token from home to token layout."""
    where = {
        token: (d, r) for d, rows in enumerate(placed_tokens(plan, stream)) for r, token in enumerate(rows)
    }
    return {
        (d, r, *where[token])
        for d, rows in enumerate(home_tokens(plan, stream))
        for r, token in enumerate(rows)
    }


def head_rows(plan: BalancePlan, text_capacity: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Device and A row of every (sequence, token, head) in token layout, image rows after `text_capacity`."""
    found = {}
    for stream, first in (("text", 0), ("image", text_capacity)):
        for device, rows in enumerate(placed_tokens(plan, stream)):
            for r, (number, token) in enumerate(rows):
                for head in range(plan.num_heads):
                    found[number, token, head] = device, (first + r) * plan.num_heads + head
    return found


class Item(NamedTuple):
    """A (sequence, head) on a device with the joint positions of its rows, and where those rows lie."""

    device: int
    sequence: int
    head: int
    tokens: range
    rows: list[int]


def attention_items(plan: BalancePlan, fields: np.ndarray, *, keys: bool) -> list[Item]:
    """Every item with its rows by the placement formula; `fields` (base, first, per_group, group, stride) per slice."""
    items = []
    for (number, low, high, start, stop, device), f in zip(
        plan.head_slices.tolist(), fields.tolist(), strict=True
    ):
        tokens = range(int(plan.lengths[number])) if keys else range(start, stop)
        for h in range(high - low):
            rows = [placed_row(f, h, j) for j in range(len(tokens))]
            items.append(Item(device, number, low + h, tokens, rows))
    return items


def placed_row(fields: list[int], h: int, j: int) -> int:
    """Row j of the slice's h-th head."""
    base, first, per_group, group, stride = fields[:5]
    whole, rest = divmod(first + h, per_group)
    return base + whole * group + rest * stride + j


def head_moves(
    plan: BalancePlan, items: list[Item], text_capacity: int
) -> dict[tuple[int, int, int, int], int]:
    """(source, row, target, row) of every row that an item needs, with how often it occurs."""
    where = head_rows(plan, text_capacity)
    moves: dict[tuple[int, int, int, int], int] = {}
    for item in items:
        for token, row in zip(item.tokens, item.rows, strict=True):
            move = (*where[item.sequence, token, item.head], item.device, row)
            moves[move] = moves.get(move, 0) + 1
    return moves


# Tables of an exchange, filled in and read out as their documentation says.


def moves_of_tables(tables: Any, num_heads: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(source, row, target, row, copy) of every row; tables of all devices, as NumPy arrays."""
    num_devices = len(tables.peers)
    leaving = [
        [
            (a + j * num_heads + h, copy)
            for a, heads, length, copy in runs
            for h in range(heads)
            for j in range(length)
        ]
        for runs in tables.send_runs.tolist()
    ]
    arriving = [
        [placed_row(run, h, j) for run in runs for h in range(run[5]) for j in range(run[6])]
        for runs in tables.recv_runs.tolist()
    ]
    for device, runs in enumerate(tables.stay_runs.tolist()):
        for a, heads, length, copy, *fields in runs:
            for h in range(heads):
                for j in range(length):
                    yield device, a + j * num_heads + h, device, placed_row(fields, h, j), copy
    for s in range(num_devices):
        sent, _, there, _, _, _ = tables.peers[s].tolist()
        assert sum(sent) == len(leaving[s])
        for t in range(num_devices):
            for i in range(sent[t]):
                row, copy = leaving[s][sum(sent[:t]) + i]
                yield s, row, t, arriving[t][there[t] + i], copy


# Attention.


class Attended(NamedTuple):
    """Attention by definition, in float64."""

    out: np.ndarray
    lse: np.ndarray
    weights: np.ndarray


def attention(q: Any, k: Any, v: Any, query_ids: Any, key_ids: Any, scale: float | None = None) -> Attended:
    """Softmax attention of (rows, d) arrays where ids agree and are not 0; rows that attend to nothing give 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = q.shape[1] ** -0.5 if scale is None else scale
    mask = (np.asarray(query_ids)[:, None] == np.asarray(key_ids)[None]) & (np.asarray(query_ids) > 0)[
        :, None
    ]
    logits = np.where(mask, q @ k.T * scale, -np.inf)
    top = np.where(mask.any(1), logits.max(1), 0.0)
    weights = np.exp(logits - top[:, None])
    total = weights.sum(1)
    some = total > 0
    weights = weights / np.where(some, total, 1.0)[:, None]
    lse = np.where(some, top + np.log(np.where(some, total, 1.0)), -np.inf)
    return Attended(weights @ v, lse, weights)


def attention_gradients(
    q: Any, k: Any, v: Any, attended: Attended, d_out: Any, d_lse: Any = 0.0, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of q, k, v by the chain rule on the whole weight matrix, in float64."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    scale = q.shape[1] ** -0.5 if scale is None else scale
    weights = attended.weights
    d_weights = d_out @ v.T
    d_lse = np.broadcast_to(np.asarray(d_lse, np.float64), attended.lse.shape)
    d_logits = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True) + d_lse[:, None]) * scale
    return d_logits @ k, d_logits.T @ q, weights.T @ d_out


def close(actual: Any, expected: Any, tolerance: float, floor: float = 1e-30) -> None:
    """Assert max|a - b| <= tolerance * max|b|, with an absolute floor for arrays that are zero."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max(initial=0.0)
    assert error <= max(tolerance * np.abs(expected).max(initial=0.0), floor), error
