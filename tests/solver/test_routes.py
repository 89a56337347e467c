"""Routes between layouts against their definition, row by row."""

from collections import Counter

import numpy as np
import pytest

from solver import StepLayout
from solver._routes import round_of_pair
from tests.oracles import (
    Step,
    attention_items,
    head_moves,
    placed_row,
    plan_of,
    random_plan,
    random_step,
    token_moves,
)

TEXT_CAPACITY = 1000  # rows before the image rows in token layout: larger than any here


def moves_of(route):
    """(source, row, target, row) of every row of a route, and the copies made of each A row."""
    moves, copies = Counter(), set()
    for i in range(len(route.source)):
        first = route.a_start[i] + route.in_image[i] * TEXT_CAPACITY * route.num_heads
        for h in range(route.heads[i]):
            for j in range(route.length[i]):
                near = int(route.source[i]), int(first + j * route.num_heads + h)
                far = int(route.target[i]), placed_row(route.b_fields[i].tolist(), h, j)
                moves[(*near, *far)] += 1
                copy = (*near, int(route.copy[i]))
                assert copy not in copies, "two runs make the same copy of a row"
                copies.add(copy)
    return moves, copies


def fields_of(placement, plan):
    return placement.fields(np.arange(len(plan.head_slices)))


def assert_routes_are_their_definition(plan, block=16):
    layout = StepLayout(plan, block)
    for stream, route in (("text", layout.text_route), ("image", layout.image_route)):
        moves, _ = moves_of(route)
        assert set(moves.values()) <= {1}
        assert set(moves) == token_moves(plan, stream)
    # Head slices of these plans are in the layout's order already.
    keys = attention_items(plan, fields_of(layout.key_placement, plan), keys=True)
    queries = attention_items(plan, fields_of(layout.query_placement, plan), keys=False)
    for route, items in ((layout.key_route, keys), (layout.query_route, queries)):
        moves, copies = moves_of(route)
        assert moves == head_moves(plan, items, TEXT_CAPACITY)
        most = max((c for *_, c in copies), default=0)
        assert most + 1 <= max(Counter(m[:2] for m in moves).values(), default=1), "no copies for nothing"
    assert (
        len({m[2:] for m in head_moves(plan, queries, TEXT_CAPACITY)}) == plan.lengths.sum() * plan.num_heads
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_plans(seed):
    rng = np.random.default_rng(seed)
    devices, heads = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    step = random_step(rng, num_devices=devices, num_heads=heads, num_sequences=6, max_length=40)
    assert_routes_are_their_definition(random_plan(rng, step))


def test_heads_shared_by_slices_of_unequal_head_ranges():
    """Heads 0-1 of half the queries on one device, each head of the rest elsewhere: both heads have two copies."""
    step = Step([10], [4], [0], 3, 2)
    plan = plan_of(step, [(0, 0, 10, 0)], [(0, 0, 2, 0, 5, 0), (0, 0, 1, 5, 10, 1), (0, 1, 2, 5, 10, 2)])
    assert_routes_are_their_definition(plan)
    assert StepLayout(plan, 16).key_route.copy.max() == 1


def test_a_step_without_tokens():
    step = Step([0, 0], [0, 0], [0, 1], 2, 3)
    layout = StepLayout(plan_of(step, [], []), 16)
    for route in (layout.text_route, layout.image_route, layout.key_route):
        assert len(route.source) == 0
        assert route.sent().tolist() == [[0, 0], [0, 0]]
    assert layout.key_placement.rows_per_device.tolist() == [0, 0]
    assert [b.shape for b in layout.key_blocks] == [(0, 2), (0, 2)]


def test_runs_are_as_few_as_the_slices_allow():
    """A sequence of one interval at home and all its heads on one other device is one run a stream."""
    step = Step([30, 7], [10, 0], [0, 1], 2, 4)
    layout = StepLayout(
        plan_of(step, [(0, 0, 30, 0), (1, 0, 7, 1)], [(0, 0, 4, 0, 30, 1), (1, 0, 4, 0, 7, 0)]), 16
    )
    assert len(layout.key_route.source) == 3
    assert layout.key_route.sent().tolist() == [[0, 120], [28, 0]]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8])
def test_rounds_pair_every_device_once(num_devices):
    rounds = round_of_pair(num_devices)
    everyone = list(range(num_devices))
    assert np.diag(rounds).tolist() == [0] * num_devices
    for s in everyone:
        assert sorted(rounds[s]) == everyone
        assert sorted(rounds[:, s]) == everyone
    if num_devices in (2, 4, 8):
        assert (rounds == rounds.T).all(), "a power of two: pairs exchange"
