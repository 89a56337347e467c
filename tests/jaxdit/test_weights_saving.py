"""Folders that appear whole or not at all, beside what was there."""

import os

import pytest

from jaxdit.models import dit_config
from jaxdit.weights import (
    SaveFormat,
    WeightsError,
    _write,
    load_params,
    save_params,
)
from tests.jaxdit._weights_cases import DIT, assert_equal, draw


def test_what_was_there_stays(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious.txt").write_text("mine")
    save_params(tmp_path / "out", draw(DIT), DIT, SaveFormat(sample_size=8))
    assert (tmp_path / "out.partial" / "precious.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]


def test_two_exports_to_one_folder_do_not_mix(tmp_path, monkeypatch):
    """The second finishes while the first writes: the first says so, and the second's folder stays whole."""
    write = _write._save
    again = []

    def save(tensors, file):
        write(tensors, file)
        if not again:
            again.append(True)
            save_params(tmp_path / "out", draw(DIT), DIT, SaveFormat(sample_size=8))

    monkeypatch.setattr(_write, "_save", save)
    with pytest.raises(OSError, match="not empty"):
        save_params(tmp_path / "out", draw(DIT), DIT, SaveFormat(dtype="bfloat16", sample_size=8))
    assert_equal(load_params(tmp_path / "out", DIT), draw(DIT))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_others_may_read_what_was_saved(tmp_path):
    save_params(tmp_path / "out", draw(DIT), DIT, SaveFormat(sample_size=8))
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


def test_links_are_no_targets(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(WeightsError, match="is a link"):
        save_params(tmp_path / "link", draw(DIT), DIT)


def test_what_cannot_be_saved(saved, tmp_path):
    params = draw(DIT)
    with pytest.raises(WeightsError, match="is there already and not empty"):
        save_params(saved / "dit_diffusers", params, DIT)
    for name, value in (("dtype", "int8"), ("layout", "other"), ("max_file_bytes", 0)):
        with pytest.raises(WeightsError, match=f"{name} must be"):
            save_params(tmp_path / "a", params, DIT, SaveFormat(**{name: value}))
    for layout in ("original", "diffusers"):
        with pytest.raises(WeightsError, match="sample_size must be a multiple of the patch, 2; got 7"):
            save_params(tmp_path / "a", params, DIT, SaveFormat(layout=layout, sample_size=7))
    with pytest.raises(WeightsError, match=r"has shape \(3, 256\), the model of the config \(12, 1536\)"):
        save_params(tmp_path / "a", params, dit_config("DiT-S/2"), SaveFormat(layout="original"))
    params["blocks"]["qkv"]["bias"][1, 2] = 1e6
    with pytest.raises(
        WeightsError, match=r"transformer_blocks.1.attn1.to_q.bias has values that float16 cannot"
    ):
        save_params(tmp_path / "a", params, DIT, SaveFormat(dtype="float16"))
    assert list(tmp_path.iterdir()) == []
