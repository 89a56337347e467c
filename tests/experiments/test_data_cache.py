"""Caches of encoded samples: what is written is read, what is damaged or unfinished is named, draws have no place."""

import json
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from experiments.data import (
    BadSampleError,
    BatchSource,
    CachedSample,
    CacheInfo,
    CacheLayout,
    DataError,
    EncodedCache,
    EncodedFolder,
    EncodedRules,
    Source,
    StepReader,
    StepSampler,
    Wanted,
    drawn_latents,
    is_cache,
    is_finished,
    read_index,
    rows_of_latents,
    split_source,
    verified,
    write_info,
    write_shard,
)
from experiments.data import _cache_files as cache_files
from tests.experiments._data_cases import save_encoded

LAYOUT = CacheLayout(
    latent_channels=4,
    patch=2,
    latent_dtype="float32",
    has_variance=True,
    text_channels=6,
    text_dtype="bfloat16",
    pooled_channels=5,
)
RULES = EncodedRules(patch=2)
GRIDS = [(1, 2, 3), (2, 1, 4), (1, 3, 1), (1, 2, 2), (1, 1, 1)]
TOKENS = [3, 7, 1, 7, 2]
# Samples of each shard; not in order.
SHARDS = [[3, 0], [4], [1, 2]]


def sample(number, layout=LAYOUT):
    rng = np.random.default_rng([7, number])
    tensors = {
        part.name: rng.standard_normal(part.shape).astype(np.float32)
        for part in layout.parts(GRIDS[number], TOKENS[number])
    }
    return CachedSample(number, f"{number}.png", f"caption {number} é", GRIDS[number], tensors)


def write(root, layout=LAYOUT, shards=SHARDS, made_of=None):
    """A cache; shards may be given in part."""
    write_info(root, CacheInfo(layout, len(GRIDS), len(SHARDS), made_of or {"model": "a"}))
    rng = np.random.default_rng(1)
    empty = {
        "text": rng.standard_normal((2, layout.text_channels)).astype(np.float32),
        "pooled": rng.standard_normal(layout.pooled_channels).astype(np.float32),
    }
    save_file(empty, root / "empty_caption.safetensors")
    for shard, numbers in enumerate(shards):
        write_shard(root, shard, layout, [sample(i, layout) for i in numbers], [])
    return empty


@pytest.fixture
def cache(tmp_path):
    root = tmp_path / "cache"
    return root, write(root)


def bf16(values):
    return values.astype(cache_files.ml_dtypes.bfloat16).astype(np.float32)


def test_samples_are_in_the_order_of_the_data(cache):
    root, _ = cache
    source = EncodedCache(root, rules=RULES)
    assert isinstance(source, Source)
    assert isinstance(source, BatchSource)
    assert [source.sample_name(i) for i in range(5)] == [f"{i}.png" for i in range(5)]
    assert source.grids.tolist() == [list(grid) for grid in GRIDS]
    assert source.image_lengths.tolist() == [6, 8, 3, 4, 1]
    assert source.text_lengths.tolist() == TOKENS
    assert (source.channels, source.text_channels, source.pooled_channels) == (16, 6, 5)
    assert source.dropped_text_length == 2
    for i in range(5):
        tensors = sample(i).tensors
        mean = rows_of_latents(tensors["latents"], 2, channels_last=False)
        np.testing.assert_array_equal(source.read(i), mean)
        np.testing.assert_array_equal(source.text(i), bf16(tensors["text"]))
        np.testing.assert_array_equal(source.pooled(i), tensors["pooled"])


def test_shards_are_safetensors(cache):
    root, _ = cache
    with safe_open(root / "shards" / "000002.safetensors", framework="np") as file:
        found = {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118
        captions = json.loads(file.metadata()["captions"])
    assert captions == {"1": "caption 1 é", "2": "caption 2 é"}
    assert sorted(found) == [
        f"{i}.{name}" for i in (1, 2) for name in ("latents", "logvar", "pooled", "text")
    ]
    np.testing.assert_array_equal(found["2.logvar"], sample(2).tensors["logvar"])
    np.testing.assert_array_equal(found["1.text"], bf16(sample(1).tensors["text"]))


def test_latents_are_drawn_by_seed_step_and_sequence_alone(cache):
    root, _ = cache
    source = EncodedCache(root, rules=RULES)
    wanted = [Wanted(i, False, 0, (3, 9, s)) for s, i in enumerate([2, 0, 1])]
    together = source.read_batch(wanted)
    for w, found in zip(wanted, together, strict=True):
        (alone,) = source.read_batch([w._replace(device=5)])
        np.testing.assert_array_equal(alone.rows, found.rows)
        tensors = sample(w.sample).tensors
        drawn = drawn_latents(tensors["latents"], tensors["logvar"], w.draw)
        np.testing.assert_array_equal(found.rows, rows_of_latents(drawn, 2, channels_last=False))
        for change in ((4, 9), (3, 8)):
            (other,) = source.read_batch([w._replace(draw=(*change, w.draw[2]))])
            assert np.abs(other.rows - found.rows).max() > 0.1
    zeros = np.zeros((4, 1, 64, 64), np.float32)
    noise = drawn_latents(zeros, zeros + np.float32(np.log(9)), (0, 1, 2))
    assert abs(noise.std() - 3) < 0.1
    assert abs(noise.mean()) < 0.1


def test_the_mean_where_that_is_asked_for_or_all_there_is(tmp_path):
    wanted = Wanted(1, False, 0, (0, 0, 0))
    for name, layout, rules in (
        ("asked", LAYOUT, EncodedRules(draw_latents=False)),
        ("without", CacheLayout(4, 2, "float16", False, 6, "float32", 5), RULES),
    ):
        write(tmp_path / name, layout)
        source = EncodedCache(tmp_path / name, rules=rules)
        (found,) = source.read_batch([wanted])
        np.testing.assert_array_equal(found.rows, source.read(1))


def test_a_dropped_caption_is_an_empty_one(cache):
    root, empty = cache
    source = EncodedCache(root, rules=RULES)
    sampler = StepSampler([source], token_budget=64, caption_dropout=0.4, seed=2)
    reader = StepReader(sampler, local_devices=[0, 1], num_devices=2)
    dropped = 0
    for t in range(6):
        data = reader.read(t)
        for s, index in enumerate(data.index.index.tolist()):
            text, pooled = source.text(index), source.pooled(index)
            if data.index.dropped[s]:
                text, pooled, dropped = empty["text"], empty["pooled"], dropped + 1
            np.testing.assert_array_equal(data.text[s], text)
            np.testing.assert_array_equal(data.pooled[s], pooled)
            assert data.index.text_lengths[s] == len(text)
        assert data.index.lengths.sum() <= 64
    assert dropped > 3


def test_steps_fit_where_the_empty_caption_is_the_longest(tmp_path):
    write(tmp_path)
    long = {"text": np.ones((30, 6), np.float32), "pooled": np.ones(5, np.float32)}
    save_file(long, tmp_path / "empty_caption.safetensors")
    sampler = StepSampler([EncodedCache(tmp_path, rules=RULES)], token_budget=80, caption_dropout=0.5, seed=0)
    steps = [sampler.step(t) for t in range(200)]
    assert max(int(step.lengths.sum()) for step in steps) <= 80
    assert {int(x) for step in steps for x in step.text_lengths[step.dropped]} == {30}
    with pytest.raises(ValueError, match="got 38 tokens"):
        StepSampler([EncodedCache(tmp_path, rules=RULES)], token_budget=37, caption_dropout=0.5)


def test_parts_of_a_split_read_the_same(cache):
    root, _ = cache
    source = EncodedCache(root, rules=RULES)
    parts = split_source(source, count=2, seed=1)
    for part in parts:
        reader = StepReader(StepSampler([part], token_budget=64, seed=5), local_devices=[0], num_devices=1)
        data = reader.read(3)
        for s, index in enumerate(data.index.index.tolist()):
            (found,) = source.read_batch([Wanted(part.index_in_whole(index), False, 0, (5, 3, s))])
            np.testing.assert_array_equal(data.rows[s], found.rows)


def test_a_single_file_of_an_empty_caption(tmp_path):
    """In a folder of single files it does the same, and is no sample."""
    for i in range(4):
        save_encoded(tmp_path / f"{i}.safetensors", height=4, width=4, tokens=3 + i)
    before = EncodedFolder(tmp_path, rules=RULES)
    assert before.dropped_text_length == 0
    empty = {"text": np.ones((2, 6), np.float32), "pooled": np.full(5, 2, np.float32)}
    save_file(empty, tmp_path / "empty_caption.safetensors")
    source = EncodedFolder(tmp_path, rules=RULES)
    assert len(source) == 4
    assert source.digest != before.digest
    sampler = StepSampler([source], token_budget=40, caption_dropout=1.0)
    data = StepReader(sampler, local_devices=[0], num_devices=1).read(0)
    assert all((text == 1).all() and text.shape == (2, 6) for text in data.text)
    assert all((pooled == 2).all() for pooled in data.pooled)
    save_file({**empty, "pooled": np.ones(4, np.float32)}, tmp_path / "empty_caption.safetensors")
    with pytest.raises(DataError, match="features like the samples, 6 of text and 5 pooled; got 6 and 4"):
        EncodedFolder(tmp_path, rules=RULES)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("place", [-1, -40])
def test_a_damaged_shard_is_named(cache, place):
    root, _ = cache
    path = root / "shards" / "000001.safetensors"
    assert verified(root, 1) == ""
    flip(path, place)
    source = EncodedCache(root, rules=RULES)
    with pytest.raises(BadSampleError, match=r"000001\.safetensors is damaged at byte"):
        source.read(4)
    (found,) = source.read_batch([Wanted(4, False, 0, (0, 0, 0))])
    assert isinstance(found, BadSampleError)
    assert len(source.read(0))
    assert "000001.safetensors is damaged" in verified(root, 1)
    data = StepReader(StepSampler([source], token_budget=99), local_devices=[0], num_devices=1).read(0)
    assert set(data.bad) == {"4.png"}
    np.testing.assert_array_equal(data.loss_weight == 0, data.index.index == 4)


def test_a_damaged_header_changes_no_sample(cache):
    """Only reading the whole file finds it: samples are read by the index."""
    root, _ = cache
    flip(root / "shards" / "000001.safetensors", 20)
    assert len(EncodedCache(root, rules=RULES).read(4))
    assert "is damaged" in verified(root, 1)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda shards: (shards / "000001.json").unlink(), "1 of 3 shards that are not there yet: 000001"),
        (lambda shards: (shards / "000001.safetensors").unlink(), "cut off or missing: 000001"),
        (lambda shards: os.truncate(shards / "000001.safetensors", 99), "cut off or missing: 000001"),
        (
            lambda shards: flip(shards / "000001.json", -9),
            r"000001\.json is damaged: its checksum is another",
        ),
        (lambda shards: os.truncate(shards / "000001.json", 0), r"000001\.json is damaged"),
        (lambda shards: (shards / ".." / "cache.json").write_text("{"), r"cache\.json cannot be read"),
        (
            lambda shards: (shards / ".." / "empty_caption.safetensors").unlink(),
            "features of an empty caption",
        ),
    ],
)
def test_a_cache_that_is_not_whole(cache, harm, message):
    root, _ = cache
    assert is_cache(root)
    harm(root / "shards")
    with pytest.raises(DataError, match=message):
        EncodedCache(root, rules=RULES)


def test_another_patch(cache):
    with pytest.raises(DataError, match=r"encoded\.patch must be that of .*, 2; got patch=1"):
        EncodedCache(cache[0], rules=EncodedRules(patch=1))


@pytest.mark.parametrize("failing", [1, 2])
def test_half_written_shards_are_never_seen(tmp_path, monkeypatch, failing):
    """Whichever rename the process does not live to see."""
    write(tmp_path, shards=SHARDS[:1])
    renamed = []

    def replace(source, target):
        renamed.append(target)
        if len(renamed) == failing:
            raise KeyboardInterrupt
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(cache_files.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            write_shard(tmp_path, 1, LAYOUT, [sample(4)], [])
    assert is_finished(tmp_path, 0)
    assert not is_finished(tmp_path, 1)
    assert any(path.name.startswith(".part-") for path in (tmp_path / "shards").iterdir())
    write(tmp_path)
    assert is_finished(tmp_path, 1)
    assert not any(path.name.startswith(".part-") for path in (tmp_path / "shards").iterdir())
    assert len(EncodedCache(tmp_path, rules=RULES)) == 5


def test_the_first_to_make_a_cache_makes_it(tmp_path):
    infos = [CacheInfo(LAYOUT, 5, 3, {"model": name}) for name in "ab"]
    for info in infos:
        write_info(tmp_path, info)
    assert cache_files.read_info(tmp_path) == infos[0]
    assert [path.name for path in tmp_path.iterdir()] == ["cache.json"]


def test_values_that_are_not_finite(tmp_path):
    write(tmp_path, shards=SHARDS[:2])
    samples = [sample(1), sample(2)]
    samples[0].tensors["logvar"][0, 0, 0, 0] = np.nan
    write_shard(tmp_path, 2, LAYOUT, samples, [("x.png", "made up")])
    assert read_index(tmp_path, 2).bad == [["x.png", "made up"]]
    source = EncodedCache(tmp_path, rules=RULES)
    with pytest.raises(BadSampleError, match="logvar has values that are not finite"):
        source.read(1)


def test_the_digest_is_of_samples_and_rules(cache, tmp_path):
    root, _ = cache
    digests = [EncodedCache(root, rules=rules).digest for rules in (RULES, RULES, EncodedRules(max_text=4))]
    assert digests[0] == digests[1] != digests[2]
    write(tmp_path / "other", made_of={"model": "b"})
    assert EncodedCache(tmp_path / "other", rules=RULES).digest != digests[0]
    assert EncodedCache(root, rules=EncodedRules(max_text=4)).text_lengths.tolist() == [3, 4, 1, 4, 2]
