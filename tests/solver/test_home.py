"""Rows of sequences laid out in home layout and read back, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import StepLayout, capacity_for, pack_home, step_needs, unpack_home
from tests.oracles import home_tokens, random_plan, random_step


def step(seed, num_devices=4):
    rng = np.random.default_rng(seed)
    case = random_step(rng, num_devices=num_devices, num_heads=2, num_sequences=6, max_length=20)
    layout = StepLayout(random_plan(rng, case), 8)
    return layout, capacity_for([step_needs(layout)])


def rows_of(layout, stream):
    """Rows that say which token of which sequence they are."""
    lengths = layout.text_lengths if stream == "text" else layout.image_lengths
    first = 0 * lengths if stream == "text" else layout.text_lengths
    return [
        np.stack([np.full(n, i), first[i] + np.arange(n)], -1).astype(np.int16) for i, n in enumerate(lengths)
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["text", "image"]))
def test_rows_lie_where_the_definition_says_and_come_back(seed, stream):
    layout, capacity = step(seed)
    values, text = rows_of(layout, stream), stream == "text"
    packed = pack_home(values, layout, capacity, text=text)
    assert packed.shape == (4, capacity.home_text if text else capacity.home_image, 2)
    assert packed.dtype == np.int16
    for rows, tokens in zip(packed, home_tokens(layout.plan, stream), strict=True):
        assert list(map(tuple, rows[: len(tokens)].tolist())) == tokens
        assert not rows[len(tokens) :].any()
    for value, back in zip(values, unpack_home(packed, layout, text=text), strict=True):
        np.testing.assert_array_equal(back, value, strict=True)


def test_a_process_lays_out_its_own_devices():
    layout, capacity = step(3)
    values, home = rows_of(layout, "image"), layout.plan.home
    packed = pack_home(values, layout, capacity)
    for devices in ([1, 0], [2], [3, 1]):
        here = np.isin(home, devices)
        local = [value if mine else None for value, mine in zip(values, here, strict=True)]
        if not here.any():
            local[0] = np.zeros((0, 2), np.int16)  # says what a row is like
        rows = pack_home(local, layout, capacity, devices=devices)
        np.testing.assert_array_equal(rows, packed[devices])
        found = unpack_home(rows, layout, devices=devices)
        for value, back, mine in zip(values, found, here, strict=True):
            assert back is None if not mine else np.array_equal(back, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v[:-1], "one array for each sequence; got 5 for 6 sequences"),
        (lambda v: [None] * 6, "one array at least, for the shape and dtype of a row; got none"),
        (lambda v: [None, *v[1:]], r"a row for each token .*; got None for sequence 0 of \d+ tokens"),
        (lambda v: [np.zeros((99, 2), np.int16), *v[1:]], ".*got 99 rows for sequence 0"),
        (lambda v: [*v[:-1], v[-1].astype(float)], r"rows of one shape and dtype; got float64\[2\] for seq"),
        (lambda v: [*v[:-1], v[-1][:, :1]], r"rows of one shape and dtype; got int16\[1\] for sequence 5"),
    ],
)
def test_rows_that_are_not_those_of_the_step_are_refused(change, message):
    layout, capacity = step(3)
    with pytest.raises(ValueError, match=f"pack_home: {message}"):
        pack_home(change(rows_of(layout, "image")), layout, capacity)


def test_other_misfits_are_refused():
    layout, capacity = step(3)
    values = rows_of(layout, "image")
    small = replace(capacity, home_image=step_needs(layout).home_image - 1)
    with pytest.raises(
        ValueError, match=r"pack_home: .*got \d+ rows and sequence \d+ of \d+ tokens ends at row"
    ):
        pack_home(values, layout, small)
    packed = pack_home(values, layout, capacity)
    for rows in (packed[1:], packed[:, :3], packed.ravel()):
        with pytest.raises(
            ValueError, match=r"unpack_home: rows are \(devices, rows, ...\) of 4 devices and at least"
        ):
            unpack_home(rows, layout)
    with pytest.raises(ValueError, match=r"unpack_home: devices in 0\.\.3; got devices=4 at device 1"):
        unpack_home(packed, layout, devices=[0, 4])
    for use in (
        lambda: pack_home(values, layout, capacity, devices=[1, 1]),
        lambda: unpack_home(packed[:2], layout, devices=[1, 1]),
    ):
        with pytest.raises(ValueError, match="pack_home: devices, each once; got 2, 1 of them different"):
            use()
    with pytest.raises(
        ValueError, match="pack_home: a capacity for the plan's devices; got 5 and a plan for 4"
    ):
        pack_home(values, layout, replace(capacity, num_devices=5))
    for bad, message in (
        (5, "values are a list of arrays, one for each sequence; got int"),
        ([5, *values[1:]], "sequence 0 is an array of rows; got int"),
    ):
        with pytest.raises(TypeError, match=f"pack_home: {message}"):
            pack_home(bad, layout, capacity)
    with pytest.raises(ValueError, match="pack_home: rows of one shape; got several in sequence 0"):
        pack_home([[[1], [2, 3]], *values[1:]], layout, capacity)
    with pytest.raises(TypeError, match="pack_home: layout is a StepLayout; got BalancePlan"):
        pack_home(values, layout.plan, capacity)
