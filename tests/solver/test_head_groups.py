"""Head groups: every item in one group, and every group with about its part of all that a device does and sends."""

import numpy as np
import pytest

from solver import StepLayout, balance, capacity_for, step_needs, step_tables
from tests.oracles import COST, random_plan, random_step

BLOCK = 16


def plan_for(seed, num_heads=5, divide=True):
    rng = np.random.default_rng(seed)
    step = random_step(rng, num_devices=4, num_heads=num_heads, num_sequences=7, max_length=40)
    return random_plan(rng, step, divide=divide)


def cells(slices):
    """(sequence, head, query, device) of all slices, sorted."""
    return sorted(
        (s, h, q, device)
        for s, h0, h1, q0, q1, device in slices.tolist()
        for h in range(h0, h1)
        for q in range(q0, q1)
    )


def slices_of(group):
    items = group.items(keys=False)
    return np.stack(
        [items.sequence, items.head_start, items.head_stop, items.start, items.stop, items.device], -1
    )


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_groups_have_every_item_once(seed, num_groups):
    plan = plan_for(seed)
    groups = StepLayout(plan, BLOCK, num_groups).groups
    assert len(groups) == num_groups
    together = np.concatenate([slices_of(group) for group in groups])
    assert cells(together) == cells(np.asarray(plan.head_slices))


def test_a_group_has_its_part_of_every_pairs_rows():
    plan = balance([800] * 8, np.arange(8), num_devices=8, bags="g8n1", cost=COST, num_heads=32)
    layout = StepLayout(plan, BLOCK, 2)
    for group in layout.groups:
        np.testing.assert_array_equal(2 * group.key_route.sent(), layout.key_route.sent())
        np.testing.assert_array_equal(
            2 * group.key_placement.rows_per_device, layout.key_placement.rows_per_device
        )


@pytest.mark.parametrize("seed", range(5))
def test_work_of_two_groups_differs_by_one_head_at_most(seed):
    plan = plan_for(seed)
    lengths = np.asarray(plan.lengths)
    work = np.zeros((2, plan.num_devices))
    largest = np.zeros(plan.num_devices)
    for g, group in enumerate(StepLayout(plan, BLOCK, 2).groups):
        sequence, start, stop, begin, end, device = slices_of(group).T
        one = lengths[sequence] * (end - begin)
        np.add.at(work[g], device, one * (stop - start))
        np.maximum.at(largest, device, one)
    assert (abs(work[0] - work[1]) <= largest).all()


def test_the_capacity_is_that_of_the_largest_group():
    layout = StepLayout(plan_for(1), BLOCK, 2)
    needs = step_needs(layout)
    assert needs.head_groups == 2
    rows = [group.query_placement.rows_per_device.max() for group in layout.groups]
    assert needs.query_rows == max(rows) < step_needs(StepLayout(layout.plan, BLOCK)).query_rows
    tables = step_tables(layout, capacity_for([needs]))
    first, second = tables.attention
    assert first.key_blocks.shape == second.key_blocks.shape
    assert first.keys.send_runs.shape == second.keys.send_runs.shape


def test_an_empty_plan_has_empty_groups():
    plan = balance([], [], num_devices=2, bags=None, cost=COST, num_heads=4)
    needs = step_needs(StepLayout(plan, BLOCK, 2))
    assert needs.items == needs.query_rows == 0


def test_what_is_refused():
    plan = plan_for(0)
    for wrong, error in ((0, ValueError), (6, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="StepLayout: head_groups"):
            StepLayout(plan, BLOCK, wrong)
    one, two = (step_needs(StepLayout(plan, BLOCK, n)) for n in (1, 2))
    with pytest.raises(ValueError, match="as many head groups; got head_groups=1 and head_groups=2"):
        one.grown(two)
