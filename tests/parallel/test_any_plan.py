"""The executor runs any legal plan: from home and back through attention, gradients too, in one program."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from solver import CostModel, Links, StepLayout, Topology, balance, capacity_for, step_needs, validate_plan
from tests.oracles_balance import MIXES, WIDTH, flatten, load_golden
from tests.parallel.plan_cases import DEVICES, HomeProgram, check_at_home, legal_plans, roomy_capacity

HEADS, BLOCK = 4, 16
ANY = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

# Mixes at 1/32 of their length: with 1/32 of the width, attention keeps its share of the work and traffic its share of
# the time.
SCALE = 32
MIX_HEADS, MIX_BLOCK = 6, 64
COST = CostModel(WIDTH // SCALE, 0.4)
LINKS = Links(inside_bytes_per_s=SCALE * 450e9, across_bytes_per_s=SCALE * 50e9)


@pytest.fixture(scope="module")
def any_program():
    return HomeProgram(roomy_capacity(HEADS, BLOCK))


@pytest.fixture(scope="module")
def program_of_two_groups():
    return HomeProgram(roomy_capacity(HEADS, BLOCK, head_groups=2))


def check_any(program, plan):
    validate_plan(plan)
    assert program.capacity.fits(step_needs(StepLayout(plan, BLOCK, program.capacity.head_groups)))
    check_at_home(program, plan, BLOCK)
    assert program.run._cache_size() == 1


@settings(ANY, max_examples=40)
@given(legal_plans(HEADS))
def test_any_legal_plan(any_program, plan):
    check_any(any_program, plan)


@settings(ANY, max_examples=15)
@given(legal_plans(HEADS))
def test_any_legal_plan_in_two_head_groups(program_of_two_groups, plan):
    check_any(program_of_two_groups, plan)


@pytest.mark.full
@settings(ANY, max_examples=500, derandomize=False)
@given(legal_plans(HEADS))
def test_many_legal_plans(any_program, plan):
    check_any(any_program, plan)


def planned(lengths, home, bags="auto"):
    plan = balance(
        np.maximum(np.asarray(lengths) // SCALE, 1),
        home,
        num_devices=DEVICES,
        bags=bags,
        cost=COST,
        num_heads=MIX_HEADS,
        topology=Topology(2, DEVICES // 2),
        links=LINKS,
    )
    validate_plan(plan)
    return plan


def golden_plan(mix, bags="auto"):
    """Every fourth device of the mix, which has all its sizes."""
    ranks = load_golden()["batches"][mix]["steps"][0]
    return planned(*flatten(ranks[:: len(ranks) // DEVICES]), bags)


def long_tail_plan(longest=None):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(2000), 1.2, 8 * DEVICES), 64, 65_536).astype(np.int64)
    if longest is not None:
        lengths[0] = longest
    return planned(lengths, np.repeat(np.arange(DEVICES), 8))


def check_together(plans):
    """Every plan in one program."""
    program = HomeProgram(capacity_for([step_needs(StepLayout(plan, MIX_BLOCK)) for plan in plans]))
    for plan in plans:
        check_at_home(program, plan, MIX_BLOCK)
    assert program.run._cache_size() == 1


def test_balanced_mixes():
    plans = [*map(golden_plan, MIXES), golden_plan("joint", "g4n2"), long_tail_plan()]
    assert any(plan.rows_sent.any() for plan in plans)
    assert {StepLayout(plan, MIX_BLOCK).splits_items for plan in plans} == {False, True}
    check_together(plans)


@pytest.mark.full
def test_a_long_tail_with_one_sequence_longer_than_all_others():
    plan = long_tail_plan(131_072)
    assert plan.lengths.max() == 4096
    check_together([plan])
