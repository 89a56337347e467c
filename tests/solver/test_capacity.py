"""Capacities: exact needs, growth that is monotone and settles, and what no program can hold."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import RouteCapacity, StepCapacity, StepLayout, balance, capacity_for, step_needs, step_tables
from solver._capacity import bucket
from tests.oracles import COST, Step, placed_tokens, plan_of, random_plan, random_step


def needs_of(seed, *, divide=True, padded=True, num_devices=4, block=16):
    rng = np.random.default_rng(seed)
    step = random_step(rng, num_devices=num_devices, num_heads=3, num_sequences=6, max_length=60)
    return step_needs(StepLayout(random_plan(rng, step, divide=divide), block), padded=padded)


def sizes(capacity):
    """All integers of a capacity by name."""
    found = {}
    for field in fields(capacity):
        value = getattr(capacity, field.name)
        if isinstance(value, RouteCapacity):
            found |= {f"{field.name}.{name}": size for name, size in sizes(value).items()}
        elif isinstance(value, tuple):
            found |= {f"{field.name}.{i}": size for i, size in enumerate(value)}
        elif value is not None:
            found[field.name] = value
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.booleans())
def test_grown_holds_both_is_idempotent_and_never_shrinks(seeds, divide):
    needs = [needs_of(seed, divide=divide or seed % 2 == 0) for seed in seeds]
    capacity = capacity_for(needs[:1])
    for need in needs:
        grown = capacity.grown(need)
        assert grown.fits(need)
        assert grown.fits(capacity)
        assert grown.grown(need) is grown
        assert all(sizes(grown).get(name, -1) >= size for name, size in sizes(need).items())
        assert all(sizes(grown)[name] >= size for name, size in sizes(capacity).items())
        assert capacity.fits(need) == (grown == capacity)
        capacity = grown
    assert all(capacity.fits(need) for need in needs)
    together = capacity_for(needs)
    assert all(together.fits(need) for need in needs)


def test_sizes_are_those_of_a_capacity_that_jax_can_hash():
    capacity = capacity_for([needs_of(0)])
    assert isinstance(capacity, StepCapacity)
    assert hash(capacity) == hash(capacity_for([needs_of(0)]))


def test_aligned_sizes_stay_aligned_when_they_grow():
    capacity = capacity_for([needs_of(1)])
    for seed in range(2, 40):
        capacity = capacity.grown(needs_of(seed))
        assert capacity.text % 8 == capacity.image % 8 == 0
        assert capacity.query_rows % 16 == capacity.key_rows % 16 == 0


def test_needs_are_the_largest_over_devices():
    rng = np.random.default_rng(4)
    step = random_step(rng, num_devices=4, num_heads=3, num_sequences=9, max_length=60)
    layout = StepLayout(random_plan(rng, step), 16)
    needs = step_needs(layout)
    assert needs.sequences == 9
    assert needs.text == max(map(len, placed_tokens(layout.plan, "text")))
    assert needs.image == max(map(len, placed_tokens(layout.plan, "image")))
    tables = step_tables(layout, needs)
    (group,) = tables.attention
    for table, route in (
        (tables.text, needs.text_route),
        (group.keys, needs.key_route),
        (group.queries, needs.query_route),
    ):
        sent, received, _, _, round_to, _ = table.peers.transpose(1, 0, 2)
        assert route.send == sent.sum(1).max()
        assert route.recv == received.sum(1).max()
        assert route.rounds == tuple(sent[round_to == r].max() for r in (1, 2, 3))


def test_empty_rounds_stay_empty_and_other_sizes_have_headroom():
    # Bags of two: only round 1 (s XOR 1) carries anything.
    plan = balance([400, 100, 50, 300], [0, 1, 2, 3], num_devices=4, bags="g2n2", cost=COST, num_heads=2)
    needs = step_needs(StepLayout(plan, 16))
    capacity = capacity_for([needs])
    assert capacity.key_route.rounds[0] >= 1.2 * needs.key_route.rounds[0] > 0
    assert capacity.key_route.rounds[1:] == needs.key_route.rounds[1:] == (0, 0)
    assert needs.image <= capacity.image <= 1.1 * needs.image + 8
    assert capacity.key_route.copies == 1


def test_no_divided_items_no_route_of_their_own():
    whole, divided = needs_of(3, divide=False), needs_of(3)
    assert whole.query_route is None
    grown = capacity_for([whole]).grown(divided)
    assert grown.query_route is not None
    assert grown.fits(whole), "a program that can divide items runs whole ones"
    assert not capacity_for([whole]).fits(divided)


def test_queries_of_whole_items_need_the_room_of_their_keys_where_they_move_alone():
    """A program sized by a small step with divided items, given a large step without any."""
    small = balance([9], [0], num_devices=4, bags="g4n1", cost=COST, num_heads=3)
    large = plan_of(Step([200], [0], [0], 4, 3), [(0, 0, 200, 0)], [(0, 0, 3, 0, 200, 1)])
    small, large = (StepLayout(plan, 16) for plan in (small, large))
    capacity = capacity_for([step_needs(small)])
    roomy = replace(capacity.grown(step_needs(large)), query_route=capacity.query_route)
    with pytest.raises(ValueError, match=r"query_route\.send="):
        step_tables(large, roomy)
    assert not roomy.fits(step_needs(large))
    for grown in (capacity.grown(step_needs(large)), capacity_for([step_needs(s) for s in (large, small)])):
        assert grown.query_route.send >= step_needs(large).key_route.send
        step_tables(large, grown)


def test_unpadded_needs_ignore_who_talks_to_whom():
    assert needs_of(3, padded=False).key_route.rounds == ()
    assert needs_of(3, padded=False, num_devices=1) == needs_of(3, num_devices=1)


@pytest.mark.parametrize("grow", [lambda a, b: capacity_for([a]).grown(b), lambda a, b: capacity_for([a, b])])
def test_sizes_that_no_program_can_share_are_refused(grow):
    with pytest.raises(ValueError, match="one attention block size; got block=16 and block=32"):
        grow(needs_of(1), needs_of(1, block=32))
    with pytest.raises(ValueError, match="all padded or none; got num_rounds=3 and num_rounds=0"):
        grow(needs_of(1), needs_of(1, padded=False))
    with pytest.raises(ValueError, match="all padded or none; got num_rounds=0 and num_rounds=3"):
        grow(needs_of(1, padded=False), needs_of(1))
    with pytest.raises(ValueError, match="as many devices"):
        grow(needs_of(1), needs_of(1, num_devices=2))


def test_no_needs_no_capacity():
    with pytest.raises(ValueError, match="capacity_for: needs at least one step"):
        capacity_for([])
    for needs, found in (
        (needs_of(1), "StepCapacity"),
        (None, "NoneType"),
        ([needs_of(1), None], "NoneType"),
    ):
        with pytest.raises(TypeError, match=f"capacity_for: .*got {found}. Give a list of step_needs"):
            capacity_for(needs)
    with pytest.raises(TypeError, match="step_needs: layout is a StepLayout; got NoneType"):
        step_needs(None)
    with pytest.raises(TypeError, match="step_needs: padded is a bool; got str"):
        needs_of(1, padded="no")
    with pytest.raises(TypeError, match="capacity_for: at_least is a StepCapacity; got list"):
        capacity_for([needs_of(1)], at_least=[needs_of(1)])
    for use in (needs_of(1).fits, needs_of(1).grown):
        with pytest.raises(TypeError, match=r"StepCapacity\.grown: needs is a StepCapacity; got NoneType"):
            use(None)


def test_a_stream_that_no_step_has_takes_no_rows():
    plan = balance([40, 7], [0, 1], num_devices=2, bags="g2n1", cost=COST, num_heads=2)
    without = step_needs(StepLayout(plan, 16))
    capacity = capacity_for([without])
    assert capacity.text == capacity.home_text == 0
    plan = balance([40, 7], [0, 1], num_devices=2, bags="g2n1", cost=COST, num_heads=2, text_lengths=[3, 0])
    with_text = step_needs(StepLayout(plan, 16))
    assert not capacity.fits(with_text)
    assert capacity.grown(with_text).text == capacity_for([without, with_text]).text == 8


@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_buckets_are_few_monotone_and_at_least_the_need(alignment):
    found = [bucket(need, alignment=alignment) for need in range(5000)]
    assert all(b >= max(need, 1) and b % alignment == 0 for need, b in enumerate(found))
    assert all(a <= b for a, b in itertools.pairwise(found))
    assert len({b for b in found if 2048 < b <= 4096}) <= 64
    assert all(b <= need * 1.04 + alignment for need, b in enumerate(found[1:], 1))


def test_growth_is_recorded_for_the_named_size_alone():
    capacity = capacity_for([needs_of(6)])
    larger = replace(needs_of(6), image=capacity.image + 1)
    grown = capacity.grown(larger)
    assert grown == replace(capacity, image=grown.image)


def test_rows_get_the_headroom_that_many_steps_tell():
    """Half a standard deviation where it is less than a few steps would get, and finer sizes."""
    needs = [replace(needs_of(6), image=10_000 + 20 * i, text=500 + 100 * (i % 2)) for i in range(12)]
    few, many = capacity_for(needs[-4:]), capacity_for(needs)
    assert few.image == bucket(10_220, headroom=1.02, alignment=8)
    spread = float(np.std([need.image for need in needs]))
    assert 10_220 + spread / 2 <= many.image <= (10_220 + spread / 2) * 129 / 128 + 8
    assert many.text == bucket(600, headroom=1.02, alignment=8, an_octave=128)
    assert many.image_route == few.image_route
    assert all(many.fits(need) for need in needs)


def test_a_capacity_grows_for_several_steps_by_what_they_need():
    needs = [needs_of(seed, divide=False) for seed in range(20)]
    capacity = capacity_for(needs[:2])
    assert capacity_for(needs[:2], at_least=capacity) == capacity
    grown = capacity_for(needs, at_least=capacity)
    assert all(grown.fits(need) for need in needs)
    assert grown.fits(capacity)
    assert capacity_for(needs[:9], at_least=grown) == grown
    most = {name: max(sizes(need)[name] for need in needs) for name in sizes(needs[0])}
    for name, size in sizes(grown).items():
        assert (size == sizes(capacity)[name]) == (most[name] <= sizes(capacity)[name])
    divided = capacity_for([needs_of(3)], at_least=grown)
    assert divided.query_route is not None
    assert divided.fits(grown)
    with pytest.raises(ValueError, match="one attention block size"):
        capacity_for(needs, at_least=capacity_for([needs_of(1, block=32)]))
