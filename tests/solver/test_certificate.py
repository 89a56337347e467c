"""Bounds beside a plan's figures: below those of every legal plan, and right where the answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import BalanceProblem, Bound, CostModel, Topology, balance, plan_from_slices
from tests.oracles_balance import flatten, load_golden
from tests.parallel.plan_cases import DEVICES, legal_plans


def on(plan, topology):
    """The same layouts on other machines."""
    problem = BalanceProblem(plan.lengths, plan.text_lengths, plan.home, plan.num_heads, topology, plan.cost)
    bounds = plan.load_lower_bound, plan.step_lower_bound
    return plan_from_slices(problem, plan.token_slices, plan.head_slices, lower_bounds=bounds)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(plan=st.sampled_from([1, 2, 5]).flatmap(legal_plans), machines=st.sampled_from([1, 2, 4, 8]))
def test_no_legal_plan_is_below_its_bounds(plan, machines):
    certificate = on(plan, Topology(machines, DEVICES // machines)).certificate
    for name, bound in certificate._asdict().items():
        assert bound.least <= bound.value, name
        assert bound.gap >= 0


def test_one_sequence_over_all_devices():
    """Equal parts of tokens and heads: all but its own heads leave a token's device, and no plan does better."""
    plan = balance([64], [0], num_devices=8, bags="g8n1", num_heads=8, topology=Topology(2, 4))
    certificate = plan.certificate
    assert certificate.image_tokens == (8, 8)
    assert certificate.rows_sent == (64 * 7, 64 * 7)
    assert certificate.rows_across_machines == (64 * 4, 64 * 4)
    assert certificate.attention_work.gap == pytest.approx(0, abs=1e-8)


def test_whole_sequences_at_home_need_no_traffic():
    certificate = balance([8] * 8, range(8), num_devices=8, bags=None, num_heads=8).certificate
    assert certificate.rows_sent == (0, 0)
    assert certificate.rows_sent.gap == 0


def test_gap():
    assert Bound(3.0, 2.0).gap == 0.5
    assert Bound(0, 0).gap == 0
    assert math.isinf(Bound(1, 0).gap)


def test_bounds_of_auto_are_not_those_of_the_bags_it_took():
    """Bags of one leave the long sequence whole; free plans need not."""
    lengths = np.array([4000, *[1000] * 31])
    options = {"num_devices": 8, "num_heads": 8, "cost": CostModel(256, 0.4)}
    auto = balance(lengths, np.arange(32) % 8, bags="auto", **options)
    whole = balance(lengths, np.arange(32) % 8, bags="g1n8", **options)
    assert auto.certificate.load.least <= whole.certificate.load.least
    assert auto.certificate.load.least == pytest.approx(auto.load.mean())


@pytest.mark.parametrize(("mix", "gap"), [("mixres", 0.25), ("joint", 0.3)])
def test_gaps_on_the_mixes(mix, gap):
    for ranks in load_golden()["batches"][mix]["steps"][:3]:
        lengths, home = flatten(ranks)
        plan = balance(lengths, home, num_devices=32, bags="auto", topology=Topology(4, 8))
        certificate = plan.certificate
        assert certificate.rows_sent.gap <= gap
        assert certificate.rows_across_machines == (0, 0)
        assert certificate.step.gap <= 0.005
        assert certificate.attention_work.gap <= 0.0101
