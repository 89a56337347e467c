"""The layouts of a step against the plan's slices, token by token."""

import numpy as np
import pytest

from solver import StepLayout, balance
from tests.oracles import COST, home_tokens, placed_tokens, random_plan, random_step


def tokens_of(intervals, layout, stream):
    """Per device its (sequence, joint index) by row, and that every row is used once."""
    rows = [{} for _ in range(layout.plan.num_devices)]
    for s, start, stop, device, row in zip(
        intervals.sequence, intervals.start, intervals.stop, intervals.device, intervals.row, strict=True
    ):
        first = int(layout.text_lengths[s]) if stream == "image" else 0
        for j in range(stop - start):
            assert row + j not in rows[device]
            rows[device][int(row + j)] = (int(s), int(first + start + j))
    assert all(sorted(r) == list(range(len(r))) for r in rows)
    return [[r[i] for i in range(len(r))] for r in rows]


@pytest.mark.parametrize("seed", range(12))
def test_home_and_token_rows_are_those_of_the_plan(seed):
    rng = np.random.default_rng(seed)
    step = random_step(rng, num_devices=5, num_heads=3, num_sequences=8, max_length=30)
    layout = StepLayout(random_plan(rng, step), 16)
    plan = layout.plan
    for stream, home, token in (
        ("text", layout.home_text, layout.text),
        ("image", layout.home_image, layout.image),
    ):
        assert tokens_of(home, layout, stream) == home_tokens(plan, stream)
        assert tokens_of(token, layout, stream) == placed_tokens(plan, stream)


def test_queries_share_the_keys_layout_unless_items_are_divided():
    def layout(num_heads):
        return StepLayout(
            balance([40, 3], [0, 1], num_devices=4, bags="g4n1", cost=COST, num_heads=num_heads), 16
        )

    whole, divided = layout(4), layout(3)
    assert not whole.splits_items
    assert whole.query_route is whole.key_route
    assert whole.query_placement is whole.key_placement
    assert divided.splits_items
    assert divided.query_route is not divided.key_route
    assert divided.key_route.copy.max() == 1, "three heads over four devices: every head on two at most"
    assert not divided.query_route.copy.any()


@pytest.mark.parametrize(
    ("block", "rule"),
    [
        (0, "block >= 8; got block=0"),
        (-8, "block >= 8; got block=-8"),
        (4, "block >= 8; got block=4"),
        (12, r"multiple of 8; got block=12\. Use 16"),
        (1 << 16, "block <= 32768; got block=65536"),
    ],
)
def test_block_is_a_positive_multiple_of_eight(block, rule):
    plan = balance([4], [0], num_devices=1, bags=None, cost=COST, num_heads=1)
    with pytest.raises(ValueError, match=f"StepLayout: .*{rule}"):
        StepLayout(plan, block)
    StepLayout(plan, 8)


@pytest.mark.parametrize("block", [64.0, True, "64", None])
def test_block_is_an_integer(block):
    plan = balance([4], [0], num_devices=1, bags=None, cost=COST, num_heads=1)
    with pytest.raises(TypeError, match=f"StepLayout: block is an integer; got {type(block).__name__}"):
        StepLayout(plan, block)
    with pytest.raises(TypeError, match="StepLayout: plan is a BalancePlan; got str"):
        StepLayout("plan", 64)
    assert type(StepLayout(plan, np.int64(64)).block) is int
