"""Devices exchanged within machines where exchanges are padded: same balance, fewer rows in the busiest pairs."""

import dataclasses
import itertools

import numpy as np
import pytest

from solver import (
    BalancePlan,
    BalanceProblem,
    CostModel,
    Links,
    StepLayout,
    Topology,
    balance,
    step_needs,
    validate_plan,
)
from solver._auto_relabel import relabel
from solver._padded_rows import padded_rounds, rows_between
from tests.oracles import COST, random_plan, random_step

PADDED = Links(flops_per_s=1e9, inside_bytes_per_s=1e9, across_bytes_per_s=1e9, padded=True)

# Virtual devices on two cores.
CPU = Links(
    flops_per_s=27e9, inside_bytes_per_s=1.2e9, across_bytes_per_s=1.2e9, element_bytes=4, padded=True
)


def problem_of(plan):
    return BalanceProblem(
        plan.lengths, plan.text_lengths, plan.home, plan.num_heads, plan.topology, plan.cost
    )


def free_plan(rng, topology, *, links=None):
    lengths = rng.lognormal(5, 1.2, 4 * topology.num_devices).astype(int) + 1
    home = np.arange(len(lengths)) % topology.num_devices
    return balance(
        lengths,
        home,
        num_devices=topology.num_devices,
        bags="auto",
        num_heads=6,
        cost=COST,
        topology=topology,
        **({} if links is None else {"links": links}),
    )


@pytest.mark.parametrize("seed", range(12))
def test_rows_between_devices_are_those_the_plan_counts(seed):
    rng = np.random.default_rng(seed)
    step = random_step(rng, num_devices=4, num_heads=3, num_sequences=6, max_length=60)
    plan = random_plan(rng, step, divide=True)
    rows = rows_between(plan)
    np.testing.assert_array_equal(rows.sum(1), plan.rows_sent)
    assert not rows.diagonal().any()
    whole = random_plan(rng, step, divide=False)
    layout = StepLayout(whole, 16)
    np.testing.assert_array_equal(rows_between(whole), layout.key_route.sent())
    assert padded_rounds(whole).sum() == sum(step_needs(layout).key_route.rounds)


@pytest.mark.parametrize("topology", [Topology(1, 8), Topology(2, 4), Topology(1, 6), Topology(4, 1)])
def test_relabelled_plans_are_as_balanced_and_pad_no_more(topology):
    rng = np.random.default_rng(0)
    for _ in range(4):
        plan = free_plan(rng, topology)
        found = relabel(problem_of(plan), plan)
        validate_plan(found)
        assert padded_rounds(found).sum() <= padded_rounds(plan).sum()
        for name in ("tokens", "attention_work", "rows", "rows_sent", "rows_across_machines"):
            mine, before = (getattr(x, name).reshape(-1, topology.devices_per_machine) for x in (found, plan))
            np.testing.assert_array_equal(np.sort(mine, 1), np.sort(before, 1))
        assert found.static_step_cost == plan.static_step_cost


def test_one_pair_that_sends_is_in_one_round():
    """Two long sequences, each on two devices: wherever they lie, they can exchange at the same time."""
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        lengths, home = [400, 400, 9, 9], np.array(order)
        plan = balance(lengths, home, num_devices=4, bags="auto", num_heads=2, cost=COST, links=PADDED)
        pairs = np.argwhere(rows_between(plan) > 50)
        assert len(pairs)
        assert len({int(a) ^ int(b) for a, b in pairs}) == 1


def test_traffic_is_the_padded_rows_where_exchanges_are_padded():
    plan = free_plan(np.random.default_rng(1), Topology(1, 8))
    exact = Links(flops_per_s=1e9, inside_bytes_per_s=1e9, across_bytes_per_s=1e9)
    ratio = padded_rounds(plan).sum() / plan.rows_sent.max()
    assert ratio > 1
    exact_s, padded_s = exact.step_seconds(plan), PADDED.step_seconds(plan)
    assert padded_s.compute == exact_s.compute
    assert padded_s.traffic == pytest.approx(ratio * exact_s.traffic)
    # Equal bags of all devices pad nothing.
    even = balance([160] * 8, range(8), num_devices=8, bags="g8n1", num_heads=8, cost=COST)
    assert PADDED.step_seconds(even) == exact.step_seconds(even)


def test_a_plan_is_priced_from_one_table_of_rows_between_devices(monkeypatch):
    plan, tables = free_plan(np.random.default_rng(1), Topology(1, 8)), []

    def counted(plan):
        tables.append(rows_between(plan))
        return tables[-1]

    monkeypatch.setattr("solver._padded_rows.rows_between", counted)
    assert PADDED.price_s(plan) > PADDED.step_seconds(plan).exposed
    assert len(tables) == 2  # one each
    exact = Links(flops_per_s=1e9, inside_bytes_per_s=1e9, across_bytes_per_s=1e9)
    assert exact.price_s(plan) == exact.step_seconds(plan).exposed
    assert len(tables) == 2


def _divides_queries(plan: BalancePlan) -> bool:
    sequence, _, _, start, stop, _ = plan.head_slices.T
    return bool((stop - start < plan.lengths[sequence]).any())


def test_queries_are_divided_under_padding_only_where_much_is_gained():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(4, 40, 60), [300, 300, 280]])
    home = np.arange(len(lengths)) * 8 // len(lengths)
    args = {"num_devices": 8, "bags": "auto", "num_heads": 4, "cost": CostModel(128, 1.0)}
    exact = dataclasses.replace(CPU, padded=False)
    assert _divides_queries(balance(lengths, home, links=exact, **args))
    assert not _divides_queries(balance(lengths, home, links=CPU, **args))
    # With one sequence and two heads on eight devices there is little else to do.
    assert _divides_queries(balance([4096], [0], links=CPU, **(args | {"num_heads": 2})))
