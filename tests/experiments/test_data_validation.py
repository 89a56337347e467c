"""Held-out parts and the one pass over them."""

import numpy as np
import pytest
from _data_cases import ListSource

from experiments.data import (
    DataError,
    DigitSource,
    Source,
    StepReader,
    SyntheticCodes,
    ValidationSampler,
    split_source,
)


def test_parts_are_disjoint_complete_and_keep_content():
    source = ListSource("s", np.arange(1, 301), np.arange(300) % 7)
    for train, held_out in (split_source(source, fraction=0.2), split_source(source, count=60, seed=3)):
        assert isinstance(train, Source)
        names = [[part.sample_name(i) for i in range(len(part))] for part in (train, held_out)]
        assert not set(names[0]) & set(names[1])
        assert len(names[0]) + len(names[1]) == 300
        assert len(held_out) == pytest.approx(60, abs=20)
        for part in (train, held_out):
            for i in (0, len(part) - 1):
                assert part.read(i).shape[0] == part.image_lengths[i]
                assert len(part.text(i)) == part.text_lengths[i]
                assert part.sample_name(i) == f"s-{int(part.read(i)[0, 0])}"
        assert train.digest != held_out.digest
    assert len(split_source(source, count=60)[1]) == 60


def test_parts_keep_labels():
    source = ListSource("s", np.ones(50), labels=np.arange(50) * 3)
    for part in split_source(source, count=10):
        names = [int(part.sample_name(i)[2:]) * 3 for i in range(len(part))]
        np.testing.assert_array_equal(part.labels, names)
    assert split_source(ListSource("s", np.ones(9)), count=2)[0].labels is None


def test_new_data_moves_no_old_sample_across():
    small, large = ListSource("s", np.ones(200)), ListSource("s", np.ones(500))
    old = split_source(small, fraction=0.3)[1]
    new = split_source(large, fraction=0.3)[1]
    names = {new.sample_name(i) for i in range(len(new))}
    assert {old.sample_name(i) for i in range(len(old))} == {n for n in names if int(n[2:]) < 200}


def test_what_shares_a_split_name_stays_together():
    digits = DigitSource(sizes=((8, 8), (8, 16)))
    train, held_out = split_source(digits, count=100)
    assert len(held_out) == 200
    assert not {train.split_name(i) for i in range(len(train))} & {
        held_out.split_name(i) for i in range(len(held_out))
    }


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "exactly one"),
        ({"fraction": 0.1, "count": 1}, ValueError, "exactly one"),
        ({"fraction": 0.0}, ValueError, "between 0 and 1"),
        ({"fraction": 1.0}, ValueError, "between 0 and 1"),
        ({"count": 0}, ValueError, r"in 1\.\.3"),
        ({"count": 4}, ValueError, r"in 1\.\.3"),
        ({"fraction": 1e-9}, DataError, "both parts"),
    ],
)
def test_bad_splits(arguments, error, match):
    with pytest.raises(error, match=match):
        split_source(ListSource("s", [1, 2, 3, 4]), **arguments)


def test_validation_covers_everything_once_in_unequal_steps():
    rng = np.random.default_rng(0)
    sources = [ListSource("a", rng.integers(1, 50, 77), rng.integers(0, 9, 77)), ListSource("b", [100, 3])]
    sampler = ValidationSampler(sources, token_budget=128, max_sequences=5)
    seen = []
    for t in range(sampler.num_steps):
        step = sampler.step(t)
        assert 0 < step.lengths.sum() <= 128
        assert step.num_sequences <= 5
        assert not step.dropped.any()
        seen += list(zip(step.source.tolist(), step.index.tolist(), strict=True))
    assert sorted(seen) == [(0, i) for i in range(77)] + [(1, 0), (1, 1)]
    assert len(seen) == len(set(seen))
    with pytest.raises(ValueError, match="t must be in"):
        sampler.step(sampler.num_steps)


def test_processes_without_a_validation_sequence_still_walk_all_steps():
    sampler = ValidationSampler([ListSource("a", [5, 5, 5])], token_budget=10)
    readers = [StepReader(sampler, local_devices=[d], num_devices=4) for d in range(4)]
    counts = [[len(r.read(t).rows) for r in readers] for t in range(sampler.num_steps)]
    assert np.sum(counts) == 3
    assert any(0 in row for row in counts)


def test_validation_errors():
    with pytest.raises(ValueError, match="must fit the step's token_budget=9"):
        ValidationSampler([ListSource("a", [10])], token_budget=9)
    with pytest.raises(DataError, match="with none"):
        ValidationSampler([ListSource("a", [])], token_budget=9)
    with pytest.raises(ValueError, match="synthetic codes"):
        ValidationSampler([SyntheticCodes("g1b1i64f1s0", num_steps=1)], token_budget=10**6)
