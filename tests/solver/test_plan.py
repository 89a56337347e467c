"""Figures of a plan against their definitions, and the checker against broken plans."""

from dataclasses import replace

import numpy as np
import pytest

from solver import BalanceProblem, CostModel, Topology, balance, plan_from_slices, validate_plan
from tests.oracles_balance import figures_of

COST = CostModel(width=16, gamma=0.7, seconds_per_flop=1e-9)
PROBLEM = BalanceProblem(
    lengths=np.array([5, 3, 0]),
    text_lengths=np.array([2, 3, 0]),
    home=np.array([0, 1, 3]),
    num_heads=4,
    topology=Topology(2, 2),
    cost=COST,
)
# Sequence 0 has tokens on three devices, heads 0-1 on device 0, head 2 cut by queries over devices 1 and 3, and
# head 3 on device 3; sequence 1 has its tokens on device 1 and its heads on device 2.
TOKEN_SLICES = np.array([[0, 0, 1, 0], [0, 1, 4, 1], [1, 0, 3, 1], [0, 4, 5, 3]], np.int32)
HEAD_SLICES = np.array(
    [[0, 0, 2, 0, 5, 0], [0, 2, 3, 0, 2, 1], [1, 0, 4, 0, 3, 2], [0, 2, 3, 2, 5, 3], [0, 3, 4, 0, 5, 3]],
    np.int32,
)


def make_plan(token_slices=TOKEN_SLICES, head_slices=HEAD_SLICES):
    return plan_from_slices(PROBLEM, token_slices, head_slices, lower_bounds=(0.0, 0.0))


def assert_figures_by_definition(plan):
    for name, expected in figures_of(plan).items():
        np.testing.assert_allclose(getattr(plan, name), expected, rtol=1e-12, err_msg=name)


def test_figures_of_a_plan_by_hand():
    plan = make_plan()
    validate_plan(plan)
    assert plan.tokens.tolist() == [1, 6, 0, 1]
    assert plan.text_tokens.tolist() == [1, 4, 0, 0]
    assert plan.rows.tolist() == [10, 5, 12, 10]
    # Device 0's token: head 2 to devices 1 and 3, head 3 to 3. Device 1's: heads 0-1 to 0, 2 and 3 to 3; all of
    # sequence 1 to device 2. Device 3's: heads 0-1 to 0, head 2 to 1.
    assert plan.rows_sent.tolist() == [3, 3 * 4 + 3 * 4, 0, 3]
    assert plan.rows_across_machines.tolist() == [2, 3 * 2 + 3 * 4, 0, 3]
    assert plan.tokens_moved_fraction == 4 / 8
    assert plan.rows_sent_fraction == 30 / 32
    assert_figures_by_definition(plan)


def test_step_cost_and_load_are_relative_to_the_mean():
    plan = make_plan()
    mean = plan.load.mean()
    assert plan.load_max_over_mean == pytest.approx(plan.load.max() / mean, rel=1e-14)
    step = COST.linear(6) + plan.attention_work.max()
    assert plan.static_step_cost == pytest.approx(step / mean, rel=1e-14)
    assert plan.static_step_cost >= plan.load_max_over_mean >= 1
    # At most 4 text tokens and 2 image tokens on a device (each on device 1 here), so as many as tokens.
    assert plan.padded_step_cost == plan.static_step_cost
    apart = make_plan(np.array([[0, 0, 5, 0], [1, 0, 3, 1]], np.int32))
    step = COST.linear(3 + 3) + apart.attention_work.max()
    assert apart.padded_step_cost == pytest.approx(step / apart.load.mean(), rel=1e-14)


def test_slices_of_one_head_on_one_device_hold_its_keys_once():
    # Head 2's queries on device 1 in two slices with a hole between, and heads 1-2 over heads 2-3 overlapping.
    token_slices = np.array([[0, 0, 5, 0], [1, 0, 3, 1]], np.int32)
    head_slices = np.array(
        [
            [0, 0, 1, 0, 5, 0],
            [0, 2, 3, 2, 3, 0],
            [0, 1, 3, 0, 2, 1],
            [0, 1, 2, 2, 5, 1],
            [0, 2, 4, 3, 5, 1],
            [0, 3, 4, 0, 3, 1],
            [1, 0, 4, 0, 3, 1],
        ],
        np.int32,
    )
    order = np.lexsort((head_slices[:, 3], head_slices[:, 1], head_slices[:, 0], head_slices[:, 5]))
    plan = make_plan(token_slices, head_slices[order])
    validate_plan(plan)
    assert plan.rows.tolist() == [2 * 5, 3 * 5 + 4 * 3, 0, 0]
    assert_figures_by_definition(plan)


@pytest.mark.parametrize("bags", [None, "g1n2+g2n1+g4n1", "g8n1", "g1n1+g7n1", "g2n2", "g1n1"])
@pytest.mark.parametrize("num_heads", [1, 4, 5])
def test_figures_of_balanced_plans_by_definition(bags, num_heads):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 24, 9)
    text_lengths = rng.integers(0, lengths + 1)
    plan = balance(
        lengths,
        rng.integers(0, 8, 9),
        num_devices=8,
        bags=bags,
        cost=COST,
        num_heads=num_heads,
        text_lengths=text_lengths,
        topology=Topology(2, 4),
    )
    validate_plan(plan)
    assert_figures_by_definition(plan)


def changed(table, row, column, value):
    table = table.copy()
    table[row, column] = value
    return table


@pytest.mark.parametrize(
    ("token_slices", "message"),
    [
        (TOKEN_SLICES[:-1], "every token exactly once; sequence 0"),
        (np.delete(TOKEN_SLICES, 2, 0), "every token exactly once; sequence 1"),
        (changed(TOKEN_SLICES, 1, 1, 0), "every token exactly once; sequence 0"),
        (changed(TOKEN_SLICES, 3, 2, 6), "every token exactly once; sequence 0"),
        (changed(TOKEN_SLICES, 0, 2, 0), "no token slice is empty"),
        (changed(TOKEN_SLICES, 3, 3, 4), r"token_slices device in \[0, 4\); got 4"),
        (changed(TOKEN_SLICES, 3, 0, 3), r"token_slices sequence in \[0, 3\); got 3"),
        (TOKEN_SLICES[::-1], "token_slices sorted by device, sequence, start"),
        (np.repeat(TOKEN_SLICES, 2, 0), "every token exactly once"),
    ],
)
def test_checker_names_what_is_wrong_with_token_slices(token_slices, message):
    with pytest.raises(ValueError, match=message):
        validate_plan(replace(make_plan(), token_slices=token_slices))


@pytest.mark.parametrize(
    ("head_slices", "message"),
    [
        (HEAD_SLICES[:-1], r"every \(head, query\) exactly once; sequence 0"),
        (np.delete(HEAD_SLICES, 2, 0), r"every \(head, query\) exactly once; sequence 1"),
        (changed(HEAD_SLICES, 1, 4, 3), r"every \(head, query\) exactly once; sequence 0"),
        (changed(HEAD_SLICES, 1, 4, 1), r"every \(head, query\) exactly once; sequence 0"),
        (changed(HEAD_SLICES, 4, 2, 5), r"every \(head, query\) exactly once; sequence 0"),
        (changed(HEAD_SLICES, 4, 4, 0), "no head slice is empty"),
        (changed(HEAD_SLICES, 4, 5, 4), r"head_slices device in \[0, 4\); got 4"),
        (HEAD_SLICES[::-1], "head_slices sorted by device, sequence, start"),
    ],
)
def test_checker_names_what_is_wrong_with_head_slices(head_slices, message):
    with pytest.raises(ValueError, match=message):
        validate_plan(replace(make_plan(), head_slices=head_slices))


def test_checker_recomputes_the_figures():
    plan = make_plan()
    for name in (
        "tokens",
        "text_tokens",
        "attention_work",
        "load",
        "rows",
        "rows_sent",
        "rows_across_machines",
    ):
        with pytest.raises(ValueError, match=f"validate_plan: {name} follows from the slices"):
            validate_plan(replace(plan, **{name: getattr(plan, name) + 1}))
    with pytest.raises(ValueError, match="load_lower_bound is at most the largest load"):
        validate_plan(replace(plan, load_lower_bound=2 * float(plan.load.max())))


@pytest.mark.parametrize(
    ("token_slices", "head_slices", "message"),
    [
        (changed(TOKEN_SLICES, 3, 3, 4), HEAD_SLICES, r"token_slices device in \[0, 4\); got 4"),
        (changed(TOKEN_SLICES, 0, 3, -1), HEAD_SLICES, r"token_slices device in \[0, 4\); got -1"),
        (TOKEN_SLICES, changed(HEAD_SLICES, 0, 0, 3), r"head_slices sequence in \[0, 3\); got 3"),
        (
            TOKEN_SLICES.astype(float),
            HEAD_SLICES,
            "token_slices is a table of 4 integers a row; got float64 of",
        ),
        (
            TOKEN_SLICES,
            HEAD_SLICES[:, :4],
            r"head_slices is a table of 6 integers a row; got int32 of shape \(5, 4",
        ),
        (np.array([]), HEAD_SLICES, r"token_slices .*shape \(0,\)\. Without any slice it has shape \(0, 4\)"),
    ],
)
def test_slices_that_are_no_tables_are_refused(token_slices, head_slices, message):
    with pytest.raises(ValueError, match=f"plan_from_slices: {message}"):
        make_plan(token_slices, head_slices)


def test_only_plans_are_checked():
    with pytest.raises(TypeError, match="validate_plan: plan is a BalancePlan; got NoneType"):
        validate_plan(None)
