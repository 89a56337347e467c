"""Synthetic sequences from KnapFormer's data codes."""

import numpy as np
import pytest
from _data_cases import ListSource

from experiments.data import (
    SteppedSource,
    StepReader,
    StepSampler,
    SyntheticCodes,
    SyntheticRows,
    parse_codes,
)

JOINT = "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"

# Ten batches of the published simulator on this mix: first rank, sequences per rank, least, most and mean length.
PUBLISHED = [
    (0, 4, 263, 653, 449.6),
    (8, 5, 1005, 1416, 1204.7),
    (10, 5, 3980, 4606, 4286.1),
    (12, 1, 15765, 17311, 16611.5),
    (16, 10, 995, 1448, 1211.3),
    (17, 1, 4009, 4587, 4233.6),
    (20, 2, 6190, 7032, 6585.8),
    (28, 1, 24738, 26826, 25900.6),
]


@pytest.mark.parametrize(
    ("code", "grid"),
    [
        ("g1b1i256f1s0", (1, 16, 16)),
        ("g1b1i250f4s0", (4, 15, 15)),
        ("g1b1i512f85s1", (25, 32, 32)),
        ("g1b1i256f1s1", (1, 16, 16)),
        ("g1b1i256f17s1", (5, 16, 16)),
    ],
)
def test_codes_give_the_published_token_counts(code, grid):
    (part,) = parse_codes(code)
    assert part.grid() == grid
    source = SyntheticCodes(code, num_steps=400)
    ratio = source.image_lengths / np.prod(grid)
    assert 0.96 - 1 / np.prod(grid) <= ratio.min() < 0.963
    assert 1.037 < ratio.max() <= 1.04
    assert (source.grids[:, 0] == grid[0]).all()
    assert (source.grids.prod(axis=1) >= source.image_lengths).all()
    assert (source.grids.prod(axis=1) - source.image_lengths < source.grids[:, 2] * grid[0] + grid[0]).all()


def test_lengths_agree_with_published_batches_rank_by_rank():
    source = SyntheticCodes(JOINT, num_steps=256)
    assert isinstance(source, SteppedSource)
    assert source.num_ranks == 32
    lengths = source.image_lengths + source.text_lengths
    per_rank = np.bincount(source.home_ranks, minlength=32) // 256
    firsts = [row[0] for row in PUBLISHED]
    for (first, count, least, most, mean), stop in zip(PUBLISHED, [*firsts[1:], 32], strict=True):
        here = lengths[(source.home_ranks >= first) & (source.home_ranks < stop)]
        assert (per_rank[first:stop] == count).all()
        assert here.min() <= least
        assert here.max() >= most
        assert here.min() > 0.9 * least
        assert here.max() < 1.05 * most
        assert here.mean() == pytest.approx(mean, rel=0.02)
    assert source.text_lengths.min() == 0
    assert source.text_lengths.max() == 392


def test_the_aspect_factor_is_one_per_rank_and_step():
    source = SyntheticCodes("g2b6i1024f1s0", num_steps=5)
    image = source.image_lengths.reshape(5, 2, 6)
    assert (image == image[:, :, :1]).all()
    assert len(np.unique(image[:, :, 0])) == 10


def test_a_step_is_a_batch_of_every_rank_at_home_there():
    source = SyntheticCodes(JOINT, num_steps=4)
    sampler = StepSampler([source])
    one, again = sampler.step(1), sampler.step(5)
    np.testing.assert_array_equal(one.index, again.index)
    assert again.epoch.tolist() == [1] * source.samples_per_step
    assert one.num_sequences == sampler.max_sequences == source.samples_per_step == 89
    np.testing.assert_array_equal(one.home(32), source.home_ranks[:89])
    np.testing.assert_array_equal(one.home(8), source.home_ranks[:89] // 4)
    assert sampler.token_budget == max(sampler.step(t).lengths.sum() for t in range(4))
    assert set(range(4)) == {int(sampler.step(t).index[0]) // 89 for t in range(4)}


def test_ranks_can_be_replicated():
    source = SyntheticCodes("g1b2i64f1s0,g1b1i128f1s0", num_ranks=6, num_steps=2)
    assert source.home_ranks[: source.samples_per_step].tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    with pytest.raises(ValueError, match="multiple of the codes' 2 ranks"):
        SyntheticCodes("g1b2i64f1s0,g1b1i128f1s0", num_ranks=5)


def test_content_is_deterministic_and_has_the_wanted_widths():
    rows = SyntheticRows(channels=6, text_channels=3, pooled_channels=2, max_text=9)
    a, b = (SyntheticCodes("g1b3i64f2s0", rows=rows, num_steps=2, seed=7) for _ in range(2))
    assert a.digest == b.digest != SyntheticCodes("g1b3i64f2s0", rows=rows, num_steps=2, seed=8).digest
    for i in (4, 1):
        np.testing.assert_array_equal(a.read(i), b.read(i))
        assert a.read(i).shape == (a.image_lengths[i], 6)
        assert np.abs(a.read(i)).max() <= 1
        assert a.text(i).shape == (a.text_lengths[i], 3)
        assert a.pooled(i).shape == (2,)
        assert a.text(i).dtype == a.read(i).dtype == np.float32
    by_bytes = SyntheticCodes("g1b3i64f2s0", num_steps=2)
    assert by_bytes.text(0).dtype == np.uint8
    assert by_bytes.text(0).shape == (by_bytes.text_lengths[0], 8)
    data = StepReader(StepSampler([a]), local_devices=[0], num_devices=1).read(0)
    assert not data.bad


def test_labels_are_uniform_deterministic_and_part_of_the_digest():
    def source(num_classes, seed=0):
        rows = SyntheticRows(num_classes=num_classes)
        return SyntheticCodes("g1b50i64f1s0", rows=rows, num_steps=40, seed=seed)

    labels = source(10).labels
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, source(10).labels)
    counts = np.bincount(labels, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 140  # 200 each, standard deviation 13
    assert (source(10, seed=1).labels != labels).any()
    assert source(0).labels is None
    assert source(0).digest != source(10).digest != source(11).digest
    with pytest.raises(ValueError, match="num_classes must not be negative"):
        source(-1)


@pytest.mark.parametrize(
    "codes", ["", "g1b1i256f1", "g1b1i256f1s2", "g0b1i256f1s0", "g1b1i15f1s0", "g1b1i256f1s0,"]
)
def test_unknown_syntax_is_an_error(codes):
    with pytest.raises(ValueError, match="each part must read gXbYiZfWsV"):
        parse_codes(codes)


def test_limits_and_company_are_checked():
    source = SyntheticCodes("g2b2i64f1s0", num_steps=4)
    with pytest.raises(ValueError, match="must fit token_budget=10"):
        StepSampler([source], token_budget=10)
    with pytest.raises(ValueError, match="must fit max_sequences=3"):
        StepSampler([source], max_sequences=3)
    with pytest.raises(ValueError, match="must be the only one"):
        StepSampler([source, ListSource("s", [1])], token_budget=10**6)
