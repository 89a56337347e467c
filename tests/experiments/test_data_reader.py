"""Reading local shares, unreadable samples, the home layout and the loader."""

import functools
import logging
import threading
import time

import numpy as np
import pytest
from _data_cases import CHANNELS, ListSource

from experiments.data import (
    BadLimit,
    DataError,
    StepReader,
    StepSampler,
    SyntheticCodes,
    SyntheticRows,
    collate_home,
    make_loader,
)


@functools.lru_cache
def sampler(bad=(), dropout=0.25):
    rng = np.random.default_rng(0)
    sources = [
        ListSource("a", rng.integers(1, 30, 60), rng.integers(0, 8, 60), bad=bad),
        ListSource("b", [90, 7], [3, 5]),
    ]
    return StepSampler(sources, weights=[3, 1], token_budget=256, seed=5, caption_dropout=dropout)


def capacities(index, devices):
    image, text = index.home_tokens(devices).max(axis=0).tolist()
    return {"image_capacity": image, "text_capacity": text}


@pytest.mark.parametrize("shares", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [0, 2], [1]]])
def test_processes_together_read_the_whole_step_once(shares):
    for t in (0, 7):
        parts = [StepReader(sampler(), local_devices=s, num_devices=4).read(t) for s in shares]
        index = parts[0].index
        sequences = np.concatenate([p.sequences for p in parts])
        assert sorted(sequences.tolist()) == list(range(index.num_sequences))
        for part in parts:
            np.testing.assert_array_equal(part.index.lengths, index.lengths)
            for sequence, rows, text in zip(part.sequences.tolist(), part.rows, part.text, strict=True):
                assert rows.shape == (index.image_lengths[sequence], CHANNELS)
                assert (rows[:, 0] == index.index[sequence]).all()
                assert len(text) == index.text_lengths[sequence]


def test_only_local_samples_are_read():
    sample = sampler.__wrapped__()
    data = StepReader(sample, local_devices=[1], num_devices=4).read(3)
    step = sample.step(3)
    mine = step.home(4) == 1
    for k, source in enumerate(sample.sources):
        assert sorted(source.reads) == sorted(step.index[mine & (step.source == k)].tolist())
    assert len(data.rows) == mine.sum()


def test_a_device_without_a_sequence_has_only_padding():
    data = StepReader(sampler(), local_devices=range(64), num_devices=64).read(0)
    batch = collate_home(data, devices=range(64), image_capacity=90, text_capacity=8)
    empty = np.setdiff1d(np.arange(64), data.index.home(64))
    assert len(empty)
    assert not batch.img_segment_ids[empty].any()
    assert not batch.img[empty].any()


def test_home_layout_holds_every_token_in_order():
    reader = StepReader(sampler(), local_devices=range(3), num_devices=3)
    for t in range(4):
        data = reader.read(t)
        index = data.index
        need = capacities(index, 3)
        batch = collate_home(
            data, image_capacity=need["image_capacity"] + 5, text_capacity=need["text_capacity"]
        )
        home = index.home(3)
        for device in range(3):
            mine = np.flatnonzero(home == device)
            for ids, token, lengths in (
                (batch.img_segment_ids, batch.img_token_index, index.image_lengths),
                (batch.txt_segment_ids, batch.txt_token_index, index.text_lengths),
            ):
                count = int(lengths[mine].sum())
                np.testing.assert_array_equal(ids[device, :count], np.repeat(mine + 1, lengths[mine]))
                assert not ids[device, count:].any()
                expected = [i for n in lengths[mine].tolist() for i in range(n)]
                np.testing.assert_array_equal(token[device, :count], expected)
            count = int(index.image_lengths[mine].sum())
            np.testing.assert_array_equal(batch.img[device, :count, 1], batch.img_token_index[device, :count])
            np.testing.assert_array_equal(
                batch.img_positions[device, :count, 2], batch.img_token_index[device, :count]
            )
            np.testing.assert_array_equal(
                batch.img_loss_weight[device] > 0, batch.img_segment_ids[device] > 0
            )
        assert batch.txt.dtype == np.int32


def test_layout_on_one_device_is_the_concatenation_of_that_on_four():
    whole = StepReader(sampler(), local_devices=[0], num_devices=1).read(2)
    parts = StepReader(sampler(), local_devices=range(4), num_devices=4).read(2)
    one = collate_home(whole, **capacities(whole.index, 1))
    four = collate_home(parts, **capacities(parts.index, 4))
    for field in ("img", "img_segment_ids", "img_positions", "img_token_index", "img_loss_weight"):
        np.testing.assert_array_equal(getattr(one, field)[0], getattr(four, field)[four.img_segment_ids > 0])
    np.testing.assert_array_equal(one.txt[0], four.txt[four.txt_segment_ids > 0])


def test_a_capacity_too_small_names_the_sequence_and_the_need():
    data = StepReader(sampler(), local_devices=range(2), num_devices=2).read(0)
    need = capacities(data.index, 2)
    collate_home(data, **need)
    with pytest.raises(
        ValueError, match=rf"image_capacity=\d+, sequence \d+ of step 0 .* {need['image_capacity']}\."
    ):
        collate_home(data, **(need | {"image_capacity": need["image_capacity"] - 1}))
    with pytest.raises(ValueError, match="text_capacity"):
        collate_home(data, **(need | {"text_capacity": need["text_capacity"] - 1}))
    with pytest.raises(ValueError, match="devices must be among"):
        collate_home(data, devices=[2], **need)


def test_features_and_pooled_vectors_are_laid_out():
    rows = SyntheticRows(channels=4, text_channels=6, pooled_channels=5, max_text=3)
    source = SyntheticCodes("g2b2i32f1s0", rows=rows, num_steps=3)
    step_sampler = StepSampler([source], caption_dropout=0.5)
    data = StepReader(step_sampler, local_devices=[0, 1], num_devices=2).read(1)
    batch = collate_home(data, image_capacity=16, text_capacity=8, sequence_capacity=6)
    assert batch.img.shape == (2, 16, 4)
    assert batch.txt.shape == (2, 8, 6)
    assert batch.pooled.shape == (2, 6, 5)
    table = batch.pooled.sum(axis=0)
    for s in range(4):
        expected = np.zeros(5) if data.index.dropped[s] else source.pooled(int(data.index.index[s]))
        np.testing.assert_array_equal(table[s], expected)
    with pytest.raises(ValueError, match="sequence_capacity"):
        collate_home(data, image_capacity=16, text_capacity=8, sequence_capacity=3)


def labelled_sampler(**changes):
    sources = [
        ListSource("a", [5] * 20, [2] * 20, labels=np.arange(20) % 7),
        ListSource("b", [9] * 20, [1] * 20, labels=np.full(20, 30)),
    ]
    for name, labels in changes.items():
        next(s for s in sources if s.name == name).labels = labels
    return StepSampler(sources, token_budget=100, caption_dropout=0.3, seed=2)


def test_labels_make_a_table_that_names_dropped_ones():
    step_sampler = labelled_sampler()
    capacity = {"image_capacity": 100, "text_capacity": 50, "sequence_capacity": 40}
    dropped = 0
    for t in range(3):
        parts = [StepReader(step_sampler, local_devices=d, num_devices=3).read(t) for d in ([0, 2], [1])]
        tables = [collate_home(part, **capacity).labels for part in parts]
        assert [(x.shape, x.dtype) for x in tables] == [((2, 40), np.int32), ((1, 40), np.int32)]
        table = np.concatenate(tables).sum(axis=0)
        index = parts[0].index
        known = np.where(index.source == 0, index.index % 7, 30)
        num = index.num_sequences
        np.testing.assert_array_equal(table[:num], np.where(index.dropped, -1, known + 1))
        assert not table[num:].any()
        np.testing.assert_array_equal(known[parts[1].sequences], parts[1].labels)
        dropped += index.dropped.sum()
    assert dropped
    with pytest.raises(ValueError, match="sequence_capacity=1"):
        collate_home(parts[0], **(capacity | {"sequence_capacity": 1}))


def test_there_are_no_labels_where_a_source_has_none_and_no_negative_ones():
    data = StepReader(labelled_sampler(b=None), local_devices=[0], num_devices=1).read(0)
    assert data.labels is None
    assert collate_home(data, image_capacity=100, text_capacity=50).labels is None
    data = StepReader(labelled_sampler(b=np.full(20, -1, np.int32)), local_devices=[0], num_devices=1).read(0)
    with pytest.raises(ValueError, match="labels must be at least 0; got label=-1"):
        collate_home(data, image_capacity=100, text_capacity=50)


def test_unreadable_samples_keep_their_place_without_loss(caplog):
    good = StepReader(sampler(), local_devices=range(2), num_devices=2)
    broken = StepReader(
        sampler(bad=range(0, 60, 2)), local_devices=range(2), num_devices=2, bad_limit=BadLimit(1.0, 10**6)
    )
    with caplog.at_level(logging.WARNING):
        a, b = good.read(1), broken.read(1)
    np.testing.assert_array_equal(a.index.lengths, b.index.lengths)
    assert b.bad
    assert broken.tally.num_bad == len(b.bad)
    assert all(name in caplog.text for name in b.bad)
    need = capacities(a.index, 2)
    x, y = collate_home(a, **need), collate_home(b, **need)
    np.testing.assert_array_equal(x.img_segment_ids, y.img_segment_ids)
    lost = (x.img_loss_weight > 0) & (y.img_loss_weight == 0)
    assert lost.any()
    assert not y.img[lost].any()
    np.testing.assert_array_equal(x.img[~lost], y.img[~lost])


def test_too_many_unreadable_samples_stop_with_a_list():
    reader = StepReader(sampler(bad=range(60)), local_devices=[0], num_devices=1, bad_limit=BadLimit(0.2, 5))
    with pytest.raises(DataError, match=r"at most 20.00% .* got 5 of \d+: a-\d+, a-\d+"):
        reader.read(0)


def test_few_unreadable_samples_are_no_reason_to_stop():
    reader = StepReader(sampler(bad=(0,)), local_devices=[0], num_devices=1, bad_limit=BadLimit(0.2, 5))
    for t in range(30):
        reader.read(t)
    assert reader.tally.num_bad > 0
    assert reader.tally.names == ("a-0",)


def test_content_of_another_size_than_indexed_is_unreadable():
    sample = sampler.__wrapped__()
    sample.sources[0].image_lengths += 1  # what a file changed under a running program looks like
    reader = StepReader(sample, local_devices=[0], num_devices=1, bad_limit=BadLimit(1.0, 10**6))
    sample.step(0)
    sample.sources[0].read = lambda index: np.zeros((1, CHANNELS), np.float32)
    assert any("a-" in name for name in reader.read(0).bad)


@pytest.mark.parametrize(
    ("local", "match"), [([0, 0], "distinct"), ([4], "below num_devices"), ([-1], "distinct")]
)
def test_reader_rejects_bad_devices(local, match):
    with pytest.raises(ValueError, match=match):
        StepReader(sampler(), local_devices=local, num_devices=4)


def test_reader_rejects_rows_of_different_width():
    odd = ListSource("odd", [4])
    odd.channels = 5
    mixed = StepSampler([ListSource("a", [4]), odd], token_budget=100)
    with pytest.raises(ValueError, match="rows of one width"):
        StepReader(mixed, local_devices=[0], num_devices=1)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_loader_gives_steps_in_order_from_any_start_and_ends_its_threads(num_threads):
    before = threading.active_count()
    reader = StepReader(sampler(), local_devices=[0], num_devices=1)
    with make_loader(reader, start_step=41, num_threads=num_threads, prefetch=3) as loader:
        for expected in range(41, 49):
            t, data = next(loader)
            assert t == expected == data.index.step
            np.testing.assert_array_equal(data.index.lengths, sampler().step(t).lengths)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    loader.close()


def test_loader_ends_after_num_steps_and_reports_errors_in_the_caller():
    reader = StepReader(sampler(), local_devices=[0], num_devices=1)
    with make_loader(reader, num_steps=3) as loader:
        assert [t for t, _ in loader] == [0, 1, 2]
    bad = StepReader(sampler(bad=range(60)), local_devices=[0], num_devices=1, bad_limit=BadLimit(0.0, 1))
    with make_loader(bad) as loader, pytest.raises(DataError, match=r"at most 0\.00%"):
        next(loader)


@pytest.mark.parametrize("bad", [{"start_step": -1}, {"num_threads": -1}, {"prefetch": 0}])
def test_loader_rejects_bad_arguments(bad):
    with pytest.raises(ValueError, match="make_loader"):
        make_loader(StepReader(sampler(), local_devices=[0], num_devices=1), **bad)


@pytest.mark.parametrize("bad", [{"fraction": -0.1}, {"fraction": 1.1}, {"count": 0}])
def test_bad_limit_rejects_bad_values(bad):
    with pytest.raises(ValueError, match="BadLimit"):
        BadLimit(**bad)
