"""Samples encoded beforehand: rows in both orders, sizes and features known from headers, bad files."""

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from experiments.data import (
    BadLimit,
    BadSampleError,
    DataError,
    EncodedFolder,
    EncodedRules,
    Source,
    StepReader,
    StepSampler,
)
from tests.experiments._data_cases import save_encoded

RULES = EncodedRules(patch=2)


@pytest.fixture
def folder(tmp_path):
    save_encoded(tmp_path / "a.safetensors", height=4, width=6, tokens=3)
    save_encoded(tmp_path / "deep" / "b.safetensors", height=2, width=8, tokens=0, frames=3)
    save_encoded(tmp_path / "c.safetensors", height=8, width=2, tokens=7)
    return tmp_path


def test_sizes_are_known_from_headers(folder):
    source = EncodedFolder(folder, rules=RULES)
    assert isinstance(source, Source)
    assert [source.sample_name(i) for i in range(len(source))] == [
        "a.safetensors",
        "c.safetensors",
        "deep/b.safetensors",
    ]
    assert source.grids.tolist() == [[1, 2, 3], [1, 4, 1], [3, 1, 4]]
    assert source.image_lengths.tolist() == [6, 4, 12]
    assert source.text_lengths.tolist() == [3, 7, 0]
    assert (source.channels, source.text_channels, source.pooled_channels) == (16, 6, 5)
    assert source.labels is None


def test_rows_of_flux(folder):
    """Row (h, w) holds channels x 2 x 2: channel by channel, each with the four pixels of the patch."""
    latents = save_encoded(folder / "a.safetensors", height=4, width=6, tokens=3)["latents"]
    rows = EncodedFolder(folder, rules=RULES).read(0)
    assert rows.dtype == np.float32
    for h in range(2):
        for w in range(3):
            patch = latents[:, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2]
            np.testing.assert_array_equal(rows[3 * h + w], patch.reshape(-1))


def test_rows_of_a_dit(folder):
    latents = save_encoded(folder / "a.safetensors", height=4, width=6, tokens=3)["latents"]
    rows = EncodedFolder(folder, rules=EncodedRules(patch=2, channels_last=True)).read(0)
    patch = latents[:, 2:4, 4:6]
    np.testing.assert_array_equal(rows[5], patch.transpose(1, 2, 0).reshape(-1))


def test_clips(folder):
    latents = save_encoded(folder / "deep" / "b.safetensors", height=2, width=8, tokens=0, frames=3)[
        "latents"
    ]
    rows = EncodedFolder(folder, rules=RULES).read(2)
    np.testing.assert_array_equal(rows[4 + 1], latents[:, 1, :, 2:4].reshape(-1))


def test_text_and_pooled(folder):
    tensors = save_encoded(folder / "c.safetensors", height=8, width=2, tokens=7)
    source = EncodedFolder(folder, rules=EncodedRules(max_text=5))
    np.testing.assert_array_equal(source.text(1), tensors["text"][:5])
    np.testing.assert_array_equal(source.pooled(1), tensors["pooled"])
    assert source.text(2).shape == (0, 6)
    assert source.text_lengths.tolist() == [3, 5, 0]


def test_half_precision(tmp_path):
    values = np.arange(32, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 4, 4)
    save_encoded(tmp_path / "a.safetensors", height=1, width=1, tokens=1, latents=values)
    source = EncodedFolder(tmp_path, rules=RULES)
    assert source.read(0).dtype == np.float32
    assert source.read(0).sum() == np.arange(32).sum()


def test_labels_in_the_place_of_text(tmp_path):
    for i in range(3):
        path = tmp_path / f"{i}.safetensors"
        save_encoded(path, height=2, width=2, tokens=0, label=np.array(i + 4))
    assert EncodedFolder(tmp_path, rules=RULES).labels.tolist() == [4, 5, 6]


def test_the_digest_follows_the_files(folder):
    before = EncodedFolder(folder, rules=RULES).digest
    assert EncodedFolder(folder, rules=RULES).digest == before
    save_encoded(folder / "d.safetensors", height=2, width=2, tokens=1)
    assert EncodedFolder(folder, rules=RULES).digest != before


def test_a_step(folder):
    sampler = StepSampler([EncodedFolder(folder, rules=RULES)], token_budget=64, seed=0)
    data = StepReader(sampler, local_devices=[0, 1], num_devices=2).read(0)
    assert sum(len(rows) for rows in data.rows) == data.index.image_lengths.sum()
    assert {text.dtype for text in data.text} == {np.dtype(np.float32)}
    assert not data.bad


def test_a_file_is_opened_once_for_its_sample(folder, monkeypatch):
    """And gives what it gives in parts, also with other samples and another opening between."""
    source = EncodedFolder(folder, rules=EncodedRules(patch=2, max_text=5))
    apart = [(source.text(i), source.pooled(i)) for i in range(3)]
    opened = []

    def counting(path, framework):
        opened.append(path.name)
        return safe_open(path, framework=framework)

    monkeypatch.setattr("experiments.data._encoded.safe_open", counting)
    sampler = StepSampler([source], token_budget=64, seed=0, caption_dropout=0.0)
    data = StepReader(sampler, local_devices=[0], num_devices=1).read(0)
    assert len(opened) == len(data.rows) >= 3
    for sample, text, pooled in zip(data.index.index, data.text, data.pooled, strict=True):
        np.testing.assert_array_equal(text, apart[sample][0])
        np.testing.assert_array_equal(pooled, apart[sample][1])
    source.read(0)
    np.testing.assert_array_equal(source.text(1), apart[1][0])
    for _ in range(2):
        np.testing.assert_array_equal(source.text(0), apart[0][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 3}, r"whole patches of 2 x 2 high and wide; got 1 that are not: z.safetensors"),
        ({"channels": 3}, r"the same features; got 4 latent, 6 text, 5 pooled, no label: a.safetensors"),
        ({"text": 4}, "the same features"),
        ({"label": np.array(2)}, "a label: z.safetensors"),
    ],
)
def test_files_that_do_not_go_together(folder, change, message):
    save_encoded(folder / "z.safetensors", **{"height": 2, "width": 2, "tokens": 1, **change})
    with pytest.raises(DataError, match=message):
        EncodedFolder(folder, rules=RULES)


def test_no_files(tmp_path):
    with pytest.raises(DataError, match=r"must contain \.safetensors files"):
        EncodedFolder(tmp_path, rules=RULES)
    with pytest.raises(DataError, match="root must be a folder"):
        EncodedFolder(tmp_path / "nowhere", rules=RULES)
    (tmp_path / "a.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="files that can be read; got 1, none of which can"):
        EncodedFolder(tmp_path, rules=RULES)


def test_bad_files_are_counted(folder, caplog):
    data = (folder / "a.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(data[:-4])
    save_encoded(
        folder / "odd.safetensors", height=2, width=2, tokens=1, latents=np.zeros((2, 2), np.float32)
    )
    source = EncodedFolder(folder, rules=RULES)
    assert len(source) == 3
    assert "cannot read cut.safetensors" in caplog.text
    assert "cannot read odd.safetensors" in caplog.text
    with pytest.raises(DataError, match="at most"):
        EncodedFolder(folder, rules=EncodedRules(bad_limit=BadLimit(0.1, 1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 2},
        {"tokens": 5},
        {"text": 4},
        {"height": 6, "width": 4},
        {"latents": np.zeros((4, 4, 6), np.float16)},
    ],
)
def test_anything_that_changes_under_way_is_noticed(folder, changes):
    source = EncodedFolder(folder, rules=RULES)
    save_encoded(folder / "a.safetensors", **{"height": 4, "width": 6, "tokens": 3, **changes})
    with pytest.raises(BadSampleError, match="when the run began"):
        source.read(0)


@pytest.mark.parametrize("name", ["latents", "text", "pooled"])
def test_values_that_are_not_finite(folder, name):
    tensors = save_encoded(folder / "a.safetensors", height=4, width=6, tokens=3)
    tensors[name].reshape(-1)[1] = np.inf
    save_file(tensors, folder / "a.safetensors")
    with pytest.raises(BadSampleError, match=f"{name} has values that are not finite"):
        EncodedFolder(folder, rules=RULES).read(0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"label": np.array(2.7, np.float32)},
        {"label": np.array(2**40)},
        {"label": np.array(-1)},
        {"label": np.array([1, 2])},
        {"latents": np.zeros((4, 4, 4), np.uint8)},
        {"latents": np.zeros((1, 1, 4, 4, 4), np.float32)},
    ],
)
def test_kinds_of_values_that_are_refused(tmp_path, caplog, wrong):
    save_encoded(tmp_path / "good.safetensors", height=2, width=2, tokens=1)
    save_encoded(tmp_path / "odd.safetensors", **{"height": 2, "width": 2, "tokens": 3, **wrong})
    assert len(EncodedFolder(tmp_path, rules=RULES)) == 1
    assert "cannot read odd.safetensors" in caplog.text


def test_files_that_change_under_way(folder):
    source = EncodedFolder(folder, rules=RULES)
    save_encoded(folder / "a.safetensors", height=2, width=2, tokens=1)
    with pytest.raises(BadSampleError, match="when the run began"):
        source.read(0)
    assert source.text(0).shape == (3, 6)
    (folder / "a.safetensors").unlink()
    with pytest.raises(BadSampleError):
        source.read(0)
    assert not source.text(0).any()
    nan = np.full((4, 8, 2), np.nan, np.float32)
    save_encoded(folder / "c.safetensors", height=8, width=2, tokens=7, latents=nan)
    with pytest.raises(BadSampleError, match="not finite"):
        source.read(1)


@pytest.mark.parametrize("values", [{"patch": 0}, {"max_text": -1}])
def test_rules_are_checked(values):
    with pytest.raises(ValueError, match="EncodedRules"):
        EncodedRules(**values)
