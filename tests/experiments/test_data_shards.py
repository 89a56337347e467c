"""WebDataset shards: members, captions, random access, damage."""

import dataclasses
import tarfile

import numpy as np
import pytest
from _data_cases import gradient_image, image_bytes, save_clip, save_tar

from experiments.data import BadLimit, DataError, MediaRules, WebDatasetShards, frames_from_rows
from jaxdit.encoders import byte_tokens

RULES = MediaRules(patch=8, max_tokens=64, max_frames=2)


def frames_of(source, index):
    return frames_from_rows(source.read(index), grid=source.grid(index), patch=source.patch)


def two_shards(folder):
    save_clip(folder / "clip.mkv", 3, 16, 24, codec="ffv1")
    clip = (folder / "clip.mkv").read_bytes()
    save_tar(
        folder / "train-000.tar",
        [
            ("b.png", image_bytes(16, 32, seed=1)),
            ("b.txt", b"a gradient\n"),
            ("b.json", b'{"caption": "unused"}'),
            ("a.txt", b"before its picture"),
            ("a.jpg", image_bytes(32, 16, form="JPEG")),
        ],
    )
    save_tar(
        folder / "train-001.tar",
        [("x/a.mkv", clip), ("x/a.json", b'{"text": "moving"}'), ("x/.hidden.png", b"?"), ("x/a.cls", b"3")],
    )


def test_members_are_grouped_by_key_and_read_in_any_order(tmp_path):
    two_shards(tmp_path)
    source = WebDatasetShards(str(tmp_path / "train-*.tar"), rules=RULES)
    assert [source.sample_name(i) for i in range(3)] == [
        "train-000.tar:b.png",
        "train-000.tar:a.jpg",
        "train-001.tar:x/a.mkv",
    ]
    assert [source.text(i).tolist() for i in range(3)] == [
        byte_tokens(caption).tolist() for caption in ("a gradient", "before its picture", "moving")
    ]
    assert source.grids.tolist() == [[1, 2, 4], [1, 4, 2], [2, 2, 3]]
    np.testing.assert_allclose(frames_of(source, 2)[:, -4:].mean(axis=(1, 2, 3)), [20, 28], atol=3)
    np.testing.assert_array_equal(frames_of(source, 0)[0], gradient_image(16, 32, seed=1))


def test_labels_are_cls_members_where_every_sample_has_one(tmp_path, caplog):
    two_shards(tmp_path)
    rules = MediaRules(patch=8, max_tokens=64, max_frames=2, index_folder=tmp_path / "cache")
    pattern = str(tmp_path / "train-*.tar")
    some = WebDatasetShards(pattern, rules=rules)
    assert some.labels is None
    assert "no labels, since 2 files have none: train-000.tar:b.png" in caplog.text
    one = WebDatasetShards(str(tmp_path / "train-001.tar"), rules=rules)
    assert one.labels.tolist() == [3]
    save_tar(
        tmp_path / "train-000.tar",
        [("b.png", image_bytes(16, 32)), ("b.txt", b"b"), ("b.cls", b" 12\n"), ("c.cls", b"1")],
    )
    for _ in range(2):  # scanned, and from the index file
        source = WebDatasetShards(pattern, rules=rules)
        assert source.labels.dtype == np.int32
        assert source.labels.tolist() == [12, 3]
    save_tar(
        tmp_path / "train-000.tar",
        [("b.png", image_bytes(16, 32)), ("b.txt", b"b"), ("b.cls", b"13")],
    )
    assert WebDatasetShards(pattern, rules=rules).digest != source.digest


def test_ranges_and_wildcards_name_the_same_shards(tmp_path):
    two_shards(tmp_path)
    a = WebDatasetShards(str(tmp_path / "train-{000..001}.tar"), rules=RULES)
    b = WebDatasetShards(str(tmp_path / "train-*.tar"), rules=RULES)
    np.testing.assert_array_equal(a.grids, b.grids)
    with pytest.raises(DataError, match=r"must match files.*train-002.tar"):
        WebDatasetShards(str(tmp_path / "train-{000..002}.tar"), rules=RULES)
    with pytest.raises(DataError, match="must match files"):
        WebDatasetShards(str(tmp_path / "nothing-*.tar"), rules=RULES)
    with pytest.raises(DataError, match="range must ascend"):
        WebDatasetShards(str(tmp_path / "train-{3..1}.tar"), rules=RULES)


def test_the_index_file_saves_scanning_the_shards(tmp_path, monkeypatch):
    two_shards(tmp_path)
    rules = MediaRules(patch=8, max_tokens=64, max_frames=2, index_folder=tmp_path / "cache")
    pattern = str(tmp_path / "train-*.tar")
    first = WebDatasetShards(pattern, rules=rules)
    opened = []
    original = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda path, *a: opened.append(path.name) or original(path, *a))
    again = WebDatasetShards(pattern, rules=rules)
    assert opened == []
    assert again.digest == first.digest
    np.testing.assert_array_equal(again.read(1), first.read(1))
    save_tar(tmp_path / "train-001.tar", [("y.png", image_bytes(16, 16)), ("y.txt", b"new")])
    opened.clear()  # writing it opened it too
    assert len(WebDatasetShards(pattern, rules=rules)) == 3
    assert opened == ["train-001.tar"]


def test_damaged_members_and_shards_are_skipped_and_named(tmp_path, caplog):
    two_shards(tmp_path)
    save_tar(
        tmp_path / "train-002.tar",
        [("bad.png", b"?"), ("bad.txt", b"bad"), ("ok.png", image_bytes(16, 16)), ("ok.txt", b"fine")],
    )
    cut = (tmp_path / "train-000.tar").read_bytes()[:700]
    (tmp_path / "train-003.tar").write_bytes(cut)
    (tmp_path / "train-004.tar").write_bytes(b"no tar at all" * 100)
    pattern = str(tmp_path / "train-*.tar")
    source = WebDatasetShards(pattern, rules=dataclasses.replace(RULES, bad_limit=BadLimit(fraction=0.5)))
    assert len(source) == 4
    for name in ("train-002.tar:bad.png", "train-003.tar", "train-004.tar"):
        assert name in caplog.text
    with pytest.raises(
        DataError, match=r"at most 1.00% of the shards .* got 2 of 5: .*train-003.tar, .*train-004.tar"
    ):
        WebDatasetShards(pattern, rules=RULES)


def cut_at_a_member(raw, start):
    return raw[:start]


def cut_in_a_header(raw, start):
    return raw[: start + 100]


def cut_in_data(raw, start):
    return raw[: start + 600]


def without_an_end_mark(raw, start):
    return raw.rstrip(b"\0")


def with_a_flipped_bit_in_a_header(raw, start):
    return raw[:start] + bytes([raw[start] ^ 1]) + raw[start + 1 :]


def with_a_header_of_zeros(raw, start):
    return raw[:start] + bytes(512) + raw[start + 512 :]


@pytest.mark.parametrize(
    "damage",
    [
        cut_at_a_member,
        cut_in_a_header,
        cut_in_data,
        without_an_end_mark,
        with_a_flipped_bit_in_a_header,
        with_a_header_of_zeros,
    ],
)
def test_no_damage_of_a_shard_makes_a_smaller_data_set(tmp_path, damage):
    members = [(f"{i}.{e}", b) for i in range(8) for e, b in (("png", image_bytes(16, 16)), ("txt", b"x"))]
    path = tmp_path / "s.tar"
    save_tar(path, members)
    assert len(WebDatasetShards(str(path), rules=RULES)) == 8
    with tarfile.open(path) as shard:
        start = shard.getmembers()[9].offset
    path.write_bytes(damage(path.read_bytes(), start))
    with pytest.raises(DataError, match=r"of the shards may be damaged; got 1 of 1"):
        WebDatasetShards(str(path), rules=RULES)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("a.png", 0), ("a.jpg", 0), ("a.txt", b"x")], "one image or video"),
        ([("a.png", 0), ("a.json", b"{nonsense")], "UTF-8 text or JSON"),
        ([("a.png", 0), ("a.txt", b"\xff\xfe\xff")], "UTF-8 text or JSON"),
        ([("a.png", 0), ("a.json", b'{"other": "x"}')], r"1 of 1 without: s.tar:a.png"),
        (
            [("a.png", 0), ("a.txt", b"x"), ("a.cls", b"dog")],
            "integer of at least 0; got 'dog' in 's.tar:a.cls'",
        ),
        ([("a.png", 0), ("a.txt", b"x"), ("a.cls", b"2147483647")], "integer of at least 0"),
        ([("a.txt", b"only text")], "must be images or videos"),
    ],
)
def test_unusable_shards_are_errors(tmp_path, members, match):
    save_tar(tmp_path / "s.tar", [(n, image_bytes(16, 16) if c == 0 else c) for n, c in members])
    with pytest.raises(DataError, match=match):
        WebDatasetShards(str(tmp_path / "s.tar"), rules=RULES)
