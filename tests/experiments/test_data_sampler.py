"""The step sampler: budget, epochs, weights, random access, independence of devices."""

import collections

import numpy as np
import pytest
from _data_cases import ListSource

from experiments.data import DataError, Source, StepSampler
from experiments.data import _window as window
from experiments.data._packing import length_classes, pack, pack_balanced, pack_spread, pack_tight


def mixed_sources():
    rng = np.random.default_rng(0)
    return [
        ListSource("small", rng.integers(4, 20, 300), rng.integers(0, 10, 300)),
        ListSource("middle", rng.integers(40, 90, 40), rng.integers(0, 30, 40)),
        ListSource("large", [300, 420, 511], [5, 0, 1]),
    ]


def same(a, b):
    return all(
        np.array_equal(getattr(a, f), getattr(b, f))
        for f in ("source", "index", "epoch", "lengths", "dropped")
    )


def test_a_step_depends_on_seed_and_step_only():
    kwargs = {"weights": [2, 1, 1], "token_budget": 1024, "caption_dropout": 0.2}
    one, two = StepSampler(mixed_sources(), seed=3, **kwargs), StepSampler(mixed_sources(), seed=3, **kwargs)
    order = [900, 3, 0, 77, 3, 10**6]
    first = {t: one.step(t) for t in order}
    for t in sorted(order):
        assert same(first[t], two.step(t))
    assert one.digest == two.digest
    other = StepSampler(mixed_sources(), seed=4, **kwargs)
    assert not same(other.step(3), first[3])
    assert other.digest != one.digest


def test_every_step_fits_the_budget_and_is_nearly_full():
    sampler = StepSampler(mixed_sources(), weights=[2, 1, 1], token_budget=1024, seed=0)
    totals = np.asarray([sampler.step(t).lengths.sum() for t in range(700)])
    assert totals.max() <= 1024
    assert totals.min() > 0.85 * 1024
    assert totals.mean() > 0.95 * 1024
    assert sampler.expected_fill == pytest.approx(totals.mean() / 1024, abs=0.03)


def test_weights_are_shares_of_the_tokens():
    sampler = StepSampler(mixed_sources(), weights=[5, 3, 2], token_budget=2048, seed=0)
    tokens = np.zeros(3)
    for t in range(600):
        step = sampler.step(t)
        np.add.at(tokens, step.source, step.lengths)
    np.testing.assert_allclose(tokens / tokens.sum(), [0.5, 0.3, 0.2], atol=0.01)


def test_without_weights_all_samples_are_drawn_equally_often():
    sampler = StepSampler(mixed_sources(), token_budget=2048, seed=0)
    counts = collections.Counter()
    for t in range(600):
        step = sampler.step(t)
        counts.update(step.source.tolist())
    assert counts[0] / 300 == pytest.approx(counts[1] / 40, rel=0.05)
    assert counts[2] / 3 == pytest.approx(counts[1] / 40, rel=0.15)


def test_an_epoch_has_every_sample_once():
    sources = mixed_sources()
    sampler = StepSampler(sources, weights=[2, 1, 1], token_budget=1024, seed=1)
    seen = collections.defaultdict(list)
    for t in range(1024):  # whole windows: they are powers of two up to 512
        step = sampler.step(t)
        for k, i, e in zip(step.source.tolist(), step.index.tolist(), step.epoch.tolist(), strict=True):
            seen[k, e].append(i)
    orders = collections.defaultdict(list)
    for (k, e), indices in seen.items():
        assert len(set(indices)) == len(indices), (k, e)
        if (k, e + 2) in seen:  # a finished epoch: all is there
            assert sorted(indices) == list(range(len(sources[k])))
            orders[k].append(tuple(indices))
    assert len(orders[0]) >= 3
    assert len(set(orders[0])) == len(orders[0])  # each epoch in another order


def test_a_sample_is_always_dropped_or_never_within_an_epoch_and_at_the_wanted_rate():
    source = ListSource("s", np.full(5000, 10), np.full(5000, 10))
    sampler = StepSampler([source], token_budget=4000, caption_dropout=0.3, seed=0)
    steps = [sampler.step(t) for t in range(25)]
    dropped = np.concatenate([s.dropped for s in steps])
    assert dropped.mean() == pytest.approx(0.3, abs=0.01)
    for step in steps:
        np.testing.assert_array_equal(step.text_lengths, np.where(step.dropped, 0, 10))
        np.testing.assert_array_equal(step.lengths, step.image_lengths + step.text_lengths)
    assert not StepSampler([source], token_budget=4000, seed=0).step(0).dropped.any()
    assert StepSampler([source], token_budget=4000, caption_dropout=1.0).step(0).dropped.all()


def test_every_sample_loses_its_caption_in_some_epoch():
    source = ListSource("s", np.arange(20, 60), np.full(40, 10))
    sampler = StepSampler([source], token_budget=500, caption_dropout=0.25, seed=0)
    steps = [sampler.step(t) for t in range(600)]
    index, dropped = (np.concatenate([getattr(s, f) for s in steps]) for f in ("index", "dropped"))
    rate = np.bincount(index, weights=dropped) / np.bincount(index)
    np.testing.assert_allclose(rate, 0.25, atol=0.12)  # about 150 epochs: 3.4 standard deviations
    # Steps are mixed: not all of one kind.
    assert np.mean([0 < s.dropped.sum() < s.num_sequences for s in steps]) > 0.9


@pytest.mark.parametrize("dropout", [0.1, 0.5, 1.0])
def test_what_dropped_captions_leave_free_is_used(dropout):
    rng = np.random.default_rng(0)
    sources = [
        ListSource("captions", rng.integers(4, 20, 300), rng.integers(20, 60, 300)),
        ListSource("pictures", rng.integers(40, 90, 40), rng.integers(0, 30, 40)),
    ]
    sampler = StepSampler(sources, weights=[3, 1], token_budget=1024, caption_dropout=dropout, seed=0)
    steps = [sampler.step(t) for t in range(512)]
    totals = np.asarray([step.lengths.sum() for step in steps])
    assert totals.max() <= 1024
    assert totals.mean() > 0.95 * 1024
    assert sampler.expected_fill == pytest.approx(totals.mean() / 1024, abs=0.01)
    tokens = sum(np.bincount(s.source, weights=s.lengths, minlength=2) for s in steps)
    np.testing.assert_allclose(tokens / tokens.sum(), [0.75, 0.25], atol=0.01)
    assert np.concatenate([s.dropped for s in steps]).mean() == pytest.approx(dropout, abs=0.005)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_packing_of_the_worst_case_holds_whatever_is_drawn(monkeypatch, dropout):
    monkeypatch.setattr(window, "pack_spread", lambda *_, **__: None)
    monkeypatch.setattr(window, "pack_balanced", lambda *_, **__: None)
    sampler = StepSampler(
        mixed_sources(), weights=[2, 1, 1], token_budget=1024, caption_dropout=dropout, seed=0
    )
    totals = [sampler.step(t).lengths.sum() for t in range(600)]
    assert 0 < min(totals) <= max(totals) <= 1024


def test_each_source_is_in_every_step_when_it_has_enough_samples():
    sources = [*mixed_sources()[:2], ListSource("middle too", np.arange(100, 140))]
    sampler = StepSampler(sources, weights=[2, 1, 1], token_budget=1024, seed=0)
    steps = [sampler.step(t) for t in range(256)]
    shares = np.asarray([np.bincount(s.source, weights=s.lengths, minlength=3) / 1024 for s in steps])
    assert shares.min() > 0.05
    assert shares[:, 1].std() < 0.03
    totals = np.asarray([s.lengths.sum() for s in steps])
    assert totals.min() > 0.9 * 1024


def test_max_sequences_is_kept():
    sampler = StepSampler(mixed_sources(), weights=[2, 1, 1], token_budget=1024, max_sequences=12, seed=0)
    sizes = [sampler.step(t).num_sequences for t in range(300)]
    assert max(sizes) <= 12
    assert min(sizes) >= 1
    assert sampler.max_sequences == 12


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [
        ([7], 7),
        ([7], 70),
        ([1000] * 30, 1000),
        (list(range(500, 1000, 13)), 999),  # one sequence a step, all of different length
        ([600] * 20 + [10] * 500, 1000),
        ([1] * 3, 1),
    ],
)
def test_no_step_is_empty_or_too_full(lengths, budget):
    sampler = StepSampler([ListSource("s", lengths)], token_budget=budget, seed=0)
    for t in [*range(600), 10**6, 10**6 + 1]:
        total = sampler.step(t).lengths.sum()
        assert 0 < total <= budget


def test_equal_sources_of_one_sequence_per_step_each_get_their_turn():
    sources = [ListSource(name, np.arange(600, 1000, 50)) for name in "abc"]
    sampler = StepSampler(sources, weights=[1, 1, 1], token_budget=1000, seed=0)
    drawn = np.concatenate([sampler.step(t).source for t in range(1200)])
    assert len(drawn) == 1200
    np.testing.assert_allclose(np.bincount(drawn) / 1200, [1 / 3] * 3, atol=0.02)


def test_a_million_samples_and_a_million_steps():
    rng = np.random.default_rng(0)
    source = ListSource("big", np.clip(np.exp(rng.normal(5, 1, 10**6)), 4, 8192).astype(int))
    sampler = StepSampler([source], token_budget=2**17, seed=0)
    for t in (10**6, 10**6 + 1, 0):
        assert 0.9 * 2**17 < sampler.step(t).lengths.sum() <= 2**17


def test_home_is_a_contiguous_deal_over_any_number_of_devices():
    step = StepSampler(mixed_sources(), weights=[2, 1, 1], token_budget=1024, seed=0).step(5)
    for devices in (1, 3, 8, 500):
        home = step.home(devices)
        assert home.dtype == np.int32
        assert (np.diff(home) >= 0).all()
        assert home.max() < devices
        counts = np.bincount(home, minlength=devices)
        assert counts.max() - counts.min() <= 1
        np.testing.assert_array_equal(
            step.home_tokens(devices).sum(axis=0), [step.image_lengths.sum(), step.text_lengths.sum()]
        )
    with pytest.raises(ValueError, match="num_devices"):
        step.home(0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weights": [1, 0, 1]}, "weight=0 for source 'middle'"),
        ({"weights": [1, float("nan"), 1]}, "weights must be positive"),
        ({"weights": [1, 1]}, "one weight per source"),
        ({"token_budget": 511}, r"'large-2' of source 'large' \(1 such\)"),
        ({"token_budget": None}, "token_budget must be given"),
        ({"caption_dropout": 1.5}, "caption_dropout"),
        ({"max_sequences": 0}, "max_sequences"),
    ],
)
def test_bad_arguments(change, match):
    arguments = {"weights": [1, 1, 1], "token_budget": 512, "seed": 0} | change
    with pytest.raises(ValueError, match=match):
        StepSampler(mixed_sources(), **arguments)
    StepSampler(mixed_sources(), weights=[1, 1, 1], token_budget=512)


def test_sources_must_exist_and_have_samples():
    assert isinstance(ListSource("s", [1]), Source)
    with pytest.raises(ValueError, match="sources must not be empty"):
        StepSampler([], token_budget=10)
    with pytest.raises(DataError, match="'nothing' with none"):
        StepSampler([ListSource("nothing", [])], token_budget=10)
    with pytest.raises(ValueError, match="t must be at least 0"):
        StepSampler([ListSource("s", [1])], token_budget=10).step(-1)


def test_packing_respects_both_limits_or_says_no():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60, 200)
    for rule in (pack_balanced, pack_tight, pack):
        bins = rule(sizes, num_bins=40, capacity=200, max_items=6)
        assert np.bincount(bins, weights=sizes, minlength=40).max() <= 200
        assert np.bincount(bins, minlength=40).max() <= 6
        assert rule(sizes, num_bins=40, capacity=200, max_items=4) is None
        assert rule(sizes, num_bins=40, capacity=int(sizes.sum()) // 40 - 1, max_items=200) is None
    # Groups of 20 and 180 items in 10 bins: loads stay even, and the small group is even too.
    groups = np.asarray([0] * 20 + [1] * 180)
    spread = pack_spread(sizes, groups, num_bins=10, capacity=700, max_items=200)
    loads = np.bincount(spread, weights=sizes, minlength=10)
    assert np.ptp(loads) <= 3
    first = np.bincount(spread[:20], weights=sizes[:20], minlength=10)
    np.testing.assert_allclose(first, sizes[:20].sum() / 10, rtol=0.15)
    assert pack_spread(sizes, groups, num_bins=10, capacity=int(sizes.sum()) // 10 - 1, max_items=200) is None
    assert pack_spread(sizes, groups, num_bins=10, capacity=700, max_items=19) is None
    # Only the tight rule solves this one: 6 and 4, 5 and 5.
    assert pack_balanced(np.asarray([6, 5, 5, 4]), num_bins=2, capacity=10, max_items=2) is not None
    assert pack(np.asarray([5, 5, 4, 4, 2]), num_bins=2, capacity=10, max_items=3) is not None


def test_length_classes_end_with_the_longest_and_are_exact_when_each_is_drawn_often():
    lengths = np.repeat([3, 50, 51, 200], 100)
    np.testing.assert_array_equal(length_classes(lengths, rate=1.0), [3, 50, 51, 200])
    assert length_classes(np.arange(1, 5000), rate=0.5)[-1] == 4999
    np.testing.assert_array_equal(length_classes(np.asarray([9]), rate=0.01), [9])
