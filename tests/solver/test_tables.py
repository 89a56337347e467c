"""A step's tables: filled in and read out in plain Python, for all devices and for some."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from solver import StepLayout, balance, capacity_for, step_needs, step_tables
from tests.oracles import (
    COST,
    attention_items,
    head_moves,
    moves_of_tables,
    random_plan,
    random_step,
    token_moves,
)


def make(seed, *, divide=True, num_devices=4):
    rng = np.random.default_rng(seed)
    step = random_step(rng, num_devices=num_devices, num_heads=3, num_sequences=6, max_length=30)
    return StepLayout(random_plan(rng, step, divide=divide), 16)


def leaves(tree):
    return [tree] if isinstance(tree, np.ndarray) else [x for t in tree if t is not None for x in leaves(t)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_devices", [1, 3, 4])
def test_buffers_filled_by_the_tables_hold_the_definition(seed, num_devices):
    layout = make(seed, num_devices=num_devices)
    plan = layout.plan
    capacity = capacity_for([step_needs(layout)])
    tables = step_tables(layout, capacity)
    assert {x.dtype for x in leaves(tables)} == {np.dtype(np.int32)}
    for stream, table in (("text", tables.text), ("image", tables.image)):
        moves = [m[:4] for m in moves_of_tables(table, 1)]
        assert len(moves) == len(set(moves))
        assert set(moves) == token_moves(plan, stream)
    (group,) = tables.attention
    routes = [(group.keys, group.key_items, True)]
    if group.queries is not None:
        routes.append((group.queries, group.query_items, False))
    for table, items, keys in routes:
        moves = list(moves_of_tables(table, plan.num_heads))
        used = items[items[:, :, 5] > 0]
        wanted = head_moves(plan, attention_items(plan, used[:, :5], keys=keys), capacity.text)
        assert Counter(m[:4] for m in moves) == wanted
        assert len({(*m[:2], m[4]) for m in moves}) == len(moves), "copies of a row are told apart"


@pytest.mark.parametrize("seed", range(12))
def test_sequences_are_those_with_tokens_on_a_device(seed):
    layout = make(seed)
    needs = step_needs(layout)
    tables = step_tables(layout, capacity_for([needs]))
    wanted = [
        sorted({int(s) + 1 for s, start, stop, d in layout.plan.token_slices if d == device and stop > start})
        for device in range(4)
    ]
    assert needs.device_sequences == max(map(len, wanted))
    for row, have in zip(tables.sequences, wanted, strict=True):
        assert row.tolist() == have + [0] * (len(row) - len(have))


@pytest.mark.parametrize("seed", range(4))
def test_peers_describe_both_directions(seed):
    layout = make(seed)
    for table in step_tables(layout, capacity_for([step_needs(layout)])):
        if hasattr(table, "peers"):
            sent, received, there, back, round_to, round_from = table.peers.transpose(1, 0, 2)
            np.testing.assert_array_equal(received, sent.T)
            np.testing.assert_array_equal(round_from, round_to.T)
            # Row blocks of a device's receive buffer by source, and of its send buffer by target, leave no hole.
            np.testing.assert_array_equal(there, np.cumsum(sent, 0) - sent)
            np.testing.assert_array_equal(back.T, np.cumsum(sent, 1) - sent)


@pytest.mark.parametrize("devices", [[], [2], [3, 1], [0, 1, 2, 3]])
def test_tables_of_some_devices_are_rows_of_those_of_all(devices):
    layout = make(5)
    capacity = capacity_for([step_needs(layout)])
    some, everything = step_tables(layout, capacity, devices), step_tables(layout, capacity)
    for a, b in zip(leaves(some), leaves(everything), strict=True):
        np.testing.assert_array_equal(a, b[np.array(devices, int)])


def test_same_plan_same_tables():
    capacity = capacity_for([step_needs(make(7))])
    for a, b in zip(
        leaves(step_tables(make(7), capacity)), leaves(step_tables(make(7), capacity)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_capacity_decides_the_shapes():
    small, large = make(1), make(2)
    capacity = capacity_for([step_needs(small), step_needs(large)])
    shapes = [[x.shape for x in leaves(step_tables(layout, capacity))] for layout in (small, large)]
    assert shapes[0] == shapes[1]


def test_tables_for_a_program_that_divides_items_of_a_plan_that_does_not():
    whole, divided = make(3, divide=False), make(3)
    assert not whole.splits_items
    assert divided.splits_items
    tables = step_tables(whole, capacity_for([step_needs(whole), step_needs(divided)]))
    (group,) = tables.attention
    queries, keys = moves_of_tables(group.queries, 3), moves_of_tables(group.keys, 3)
    assert set(queries) == set(keys)


SIZES = ("sequences", "home_text", "home_image", "text", "image", "query_rows", "key_rows", "items")
ROUTE_SIZES = ("send", "recv", "send_runs", "recv_runs", "stay_runs", "copies", "copied")


@pytest.mark.parametrize("name", SIZES)
def test_a_size_too_small_is_named(name):
    layout = make(5)
    needs = step_needs(layout)
    step_tables(layout, needs)
    size = getattr(needs, name)
    with pytest.raises(ValueError, match=f"step_tables: .*got {name}={size - 1} and the step needs {size}"):
        step_tables(layout, replace(needs, **{name: size - 1}))


@pytest.mark.parametrize("route", ["text_route", "image_route", "key_route", "query_route"])
@pytest.mark.parametrize("name", ROUTE_SIZES)
def test_a_size_of_a_route_too_small_is_named(route, name):
    layout = make(5)
    needs = step_needs(layout)
    size = getattr(getattr(needs, route), name)
    small = replace(needs, **{route: replace(getattr(needs, route), **{name: size - 1})})
    with pytest.raises(ValueError, match=rf"got {route}\.{name}={size - 1} and the step needs {size}"):
        step_tables(layout, small)


def test_other_misfits_are_named():
    layout = make(5)
    needs = step_needs(layout)
    rounds = needs.key_route.rounds
    short = (rounds[0] - 1, *rounds[1:])
    for changes, message in (
        ({"block": 8}, "got block=8 and block=16"),
        ({"query_route": None}, "got query_route=0"),
        ({"key_route": replace(needs.key_route, rounds=short)}, f"key_route.rounds={short[0]} and"),
        ({"key_route": replace(needs.key_route, rounds=rounds[:2])}, "got num_rounds=2 and num_rounds=3"),
    ):
        with pytest.raises(ValueError, match=message):
            step_tables(layout, replace(needs, **changes))


def test_a_size_too_small_names_the_device_and_its_longest_sequence():
    plan = balance([90, 700, 30, 8], [1, 2, 2, 0], num_devices=3, bags=None, cost=COST, num_heads=2)
    layout = StepLayout(plan, 16)
    needs = step_needs(layout)
    way_out = r"Use capacity\.grown\(step_needs\(layout\)\)"
    for name in ("image", "home_image", "key_rows"):
        with pytest.raises(
            ValueError, match=rf"{name}=8 .* on device 2 \(its longest sequence: 1, of 700 t.*{way_out}"
        ):
            step_tables(layout, replace(needs, **{name: 8}))
    with pytest.raises(
        ValueError, match=r"sequences=3 and the step needs 4 \(its longest sequence: 1, of 700"
    ):
        step_tables(layout, replace(needs, sequences=3))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([4], r"devices in 0\.\.3; got devices=4 at device 0\. The plan has 4, numbered from 0"),
        ([-1], r"devices in 0\.\.3; got devices=-1"),
        ([0.5], "devices are integers; got dtype=float64"),
        ([True], "devices are integers; got a bool"),
        (2, "devices is one-dimensional; got int"),
    ],
)
def test_devices_that_the_plan_has_not_are_refused(devices, message):
    layout = make(5)
    with pytest.raises(ValueError, match=f"step_tables: {message}"):
        step_tables(layout, step_needs(layout), devices)


def test_plans_of_another_program_are_refused():
    layout = make(5)
    needs = step_needs(layout)
    for changes, message in (
        ({"num_devices": 8}, "are for as many devices; got num_devices=8 and num_devices=4"),
        ({"num_heads": 2}, "have one number of heads; got num_heads=2 and num_heads=3"),
    ):
        with pytest.raises(ValueError, match=message):
            step_tables(layout, replace(needs, **changes))
    for args, name in (((None, needs), "layout"), ((layout, None), "capacity")):
        with pytest.raises(TypeError, match=f"step_tables: {name} is a Step"):
            step_tables(*args)


def test_rows_past_int32_are_refused():
    """70 million tokens of 32 heads on one device: a plan is no trouble, its row numbers are."""
    plan = balance([4_000] * 17_000, [0] * 17_000, num_devices=1, bags=None, cost=COST, num_heads=32)
    with pytest.raises(
        ValueError, match=r"step_needs: a device has at most 2147483647 .* got \d+\. Use more devices"
    ):
        step_needs(StepLayout(plan, 16))
