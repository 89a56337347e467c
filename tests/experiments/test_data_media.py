"""Folders of images and clips: sizes, captions, orientation, damaged files, the index file."""

import json

import numpy as np
import pytest
from _data_cases import gradient_image, save_clip, save_image, words_of
from PIL import Image

from experiments.data import (
    BadLimit,
    BadSampleError,
    DataError,
    ImageFolder,
    MediaRules,
    Source,
    frames_from_rows,
    metadata_captions,
    sidecar_captions,
)
from jaxdit.encoders import byte_tokens

RULES = MediaRules(patch=8, max_tokens=64, allow_uncaptioned=True, max_frames=4, frame_stride=2)


def frames_of(source, index):
    return frames_from_rows(source.read(index), grid=source.grid(index), patch=source.patch)


def names_of(source):
    return [source.sample_name(i) for i in range(len(source))]


def test_portrait_and_landscape_keep_their_shape_and_are_never_cropped(tmp_path):
    save_image(tmp_path / "a" / "wide.png", 64, 256)
    save_image(tmp_path / "b" / "tall.jpg", 200, 80)
    save_image(tmp_path / "exact.webp", 48, 40, lossless=True)
    source = ImageFolder(tmp_path, rules=RULES)
    assert isinstance(source, Source)
    assert names_of(source) == ["a/wide.png", "b/tall.jpg", "exact.webp"]
    assert source.grids.tolist() == [[1, 4, 16], [1, 13, 5], [1, 6, 5]] or source.grids[1].prod() <= 64
    for i, (height, width) in enumerate([(64, 256), (200, 80), (48, 40)]):
        (frame,) = frames_of(source, i)
        assert abs(np.log(frame.shape[0] / frame.shape[1] / (height / width))) < 0.12
        # All four corners are there: nothing is cut off.
        assert frame[0, 0, :2].max() < 25
        assert frame[-1, -1, :2].min() > 175
        assert frame[0, -1, 1] > 175 > 25 > frame[0, -1, 0]
    np.testing.assert_array_equal(frames_of(source, 2)[0], gradient_image(48, 40))


def test_labels_are_the_top_level_folders_where_every_file_is_in_one(tmp_path):
    for name in ("wolf/1.png", "cat/x/2.png", "cat/3.png", "ant/4.png"):
        save_image(tmp_path / name, 16, 16)
    source = ImageFolder(tmp_path, rules=RULES)
    assert names_of(source) == ["ant/4.png", "cat/3.png", "cat/x/2.png", "wolf/1.png"]
    assert source.labels.dtype == np.int32
    assert source.labels.tolist() == [0, 1, 1, 2]
    (tmp_path / "ant" / "4.png").write_bytes(b"?")  # renumbers nothing
    assert ImageFolder(tmp_path, rules=RULES).labels.tolist() == [1, 1, 2]
    save_image(tmp_path / "loose.png", 16, 16)
    assert ImageFolder(tmp_path, rules=RULES).labels is None


def test_exif_orientation_is_honoured(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side: turn it clockwise to look at it
    picture = Image.fromarray(gradient_image(48, 32))
    picture.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    source = ImageFolder(tmp_path, rules=RULES)
    assert source.grids.tolist() == [[1, 6, 4]]
    np.testing.assert_array_equal(frames_of(source, 0)[0], gradient_image(48, 32))


def test_transparency_grey_and_16_bit_become_rgb(tmp_path):
    clear = np.zeros((16, 16, 4), np.uint8)
    clear[:8] = (10, 20, 30, 255)
    Image.fromarray(clear).save(tmp_path / "clear.png")
    Image.fromarray(np.full((16, 16), 90, np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(np.full((16, 16), 25700, np.uint16)).save(tmp_path / "sixteen.png")
    source = ImageFolder(tmp_path, rules=RULES)
    (top,) = frames_of(source, 0)
    assert top[0, 0].tolist() == [10, 20, 30]
    assert top[-1, -1].tolist() == [255, 255, 255]
    assert np.unique(frames_of(source, 1)).tolist() == [90]
    assert np.unique(frames_of(source, 2)).tolist() == [100]


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "mpeg4"), ("mkv", "ffv1"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
@pytest.mark.parametrize(("frames", "expected"), [(1, 1), (2, 1), (3, 2), (7, 4), (12, 4)])
def test_clips_give_every_second_frame_up_to_the_limit(tmp_path, suffix, codec, frames, expected):
    save_clip(tmp_path / f"clip.{suffix}", frames, 32, 48, codec=codec)
    source = ImageFolder(tmp_path, rules=RULES)
    assert source.grids[0, 0] == expected
    assert source.image_lengths[0] <= 64
    clip = frames_of(source, 0)
    levels = clip[:, -8:].mean(axis=(1, 2, 3))
    np.testing.assert_allclose(levels, [20 + 16 * i for i in range(expected)], atol=4)
    assert (clip[:, :4, :4] > 200).all()


def test_a_clip_with_rotation_is_read_upright(tmp_path):
    path = tmp_path / "phone.mp4"
    save_clip(path, 3, 32, 64)
    identity = b"".join(n.to_bytes(4, "big") for n in (0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000))
    clockwise = b"".join(n.to_bytes(4, "big") for n in (0, 0x10000, 0, 0xFFFF0000, 0, 0, 0, 0, 0x40000000))
    raw = path.read_bytes()
    at = raw.index(b"tkhd")
    path.write_bytes(raw[:at] + raw[at:].replace(identity, clockwise, 1))
    source = ImageFolder(
        tmp_path, rules=MediaRules(patch=8, max_tokens=64, max_frames=1, allow_uncaptioned=True)
    )
    assert source.grids.tolist() == [[1, 8, 4]]
    (frame,) = frames_of(source, 0)
    assert frame[:4, -4:].min() > 200  # the white corner went from top left to top right
    assert frame[:4, :4].max() < 100


def test_an_animated_gif_is_a_clip(tmp_path):
    frames = [Image.fromarray(np.full((16, 24, 3), 40 * i, np.uint8)) for i in range(5)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:], duration=100)
    source = ImageFolder(tmp_path, rules=RULES)
    assert source.grids.tolist() == [[3, 2, 3]]
    np.testing.assert_allclose(frames_of(source, 0).mean(axis=(1, 2, 3)), [0, 80, 160], atol=3)


def test_sidecar_captions(tmp_path):
    save_image(tmp_path / "sub" / "cat.png", 16, 16)
    (tmp_path / "sub" / "cat.txt").write_text("  eine Katze läuft\n", encoding="utf-8")
    source = ImageFolder(tmp_path, rules=MediaRules(patch=8, max_tokens=64), captions=sidecar_captions)
    assert words_of(source.text(0)) == ["eine", "Katze", "läuft"]
    assert source.text_lengths.tolist() == [3]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_metadata_captions(tmp_path, form, caplog):
    for name in ("one.png", "sub/two.png"):
        save_image(tmp_path / name, 16, 16)
    rows = [("one.png", 'a "quoted", text'), ("sub/two.png", "two"), ("gone.png", "x")]
    if form == "jsonl":
        text = "\n".join(json.dumps({"file_name": n, "text": t}) for n, t in rows) + "\n\n"
    else:
        text = "\ufefffile_name,text\n" + "".join(
            '{},"{}"\n'.format(n, t.replace('"', '""')) for n, t in rows
        )
    (tmp_path / f"metadata.{form}").write_text(text, encoding="utf-8")
    source = ImageFolder(tmp_path, rules=MediaRules(patch=8, max_tokens=64))
    assert [source.text(i).tolist() for i in range(2)] == [byte_tokens(t).tolist() for _, t in rows[:2]]
    assert "1 rows about files that are not there, such as gone.png" in caplog.text


def test_the_default_mixes_both_and_a_rule_of_ones_own_works(tmp_path):
    for name in ("one.png", "two.png"):
        save_image(tmp_path / name, 16, 16)
        (tmp_path / name).with_suffix(".txt").write_text("beside")
    (tmp_path / "metadata.csv").write_text("file_name,text\none.png,listed\n")
    rules = MediaRules(patch=8, max_tokens=64)
    source = ImageFolder(tmp_path, rules=rules)
    assert [words_of(source.text(i)) for i in range(2)] == [["listed"], ["beside"]]
    own = ImageFolder(tmp_path, rules=rules, captions=lambda root, names: dict.fromkeys(names, "same"))
    assert words_of(own.text(1)) == ["same"]
    assert own.digest != source.digest


def test_missing_captions_are_counted_and_named(tmp_path):
    for i in range(7):
        save_image(tmp_path / f"{i}.png", 16, 16)
    (tmp_path / "3.txt").write_text("three")
    (tmp_path / "4.txt").write_text("  ")
    with pytest.raises(DataError, match=r"got 6 of 7 without: 0.png, 1.png, 2.png, 4.png, 5.png, \.\.\."):
        ImageFolder(tmp_path, rules=MediaRules(patch=8, max_tokens=64))
    assert ImageFolder(tmp_path, rules=RULES).text_lengths.tolist() == [0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("metadata.jsonl", '{"file_name": "a.png"}\n', "row 1 of"),
        ("metadata.jsonl", "[1]\n", "row 1 of"),
        ("metadata.jsonl", "{nonsense\n", "must be well formed"),
        ("metadata.csv", "file,text\na.png,b\n", "row 1 of"),
    ],
)
def test_malformed_metadata_is_an_error(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=match):
        metadata_captions(tmp_path, ["a.png"])


def test_two_metadata_files_are_an_error(tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,text\n")
    (tmp_path / "metadata.jsonl").write_text("")
    with pytest.raises(DataError, match="one metadata file"):
        metadata_captions(tmp_path, [])


def test_long_captions_are_cut_between_tokens_and_logged(tmp_path, caplog):
    save_image(tmp_path / "a.png", 16, 16)
    (tmp_path / "a.txt").write_text("einundzwanzig rote Katzen", encoding="utf-8")
    source = ImageFolder(tmp_path, rules=MediaRules(patch=8, max_tokens=64, max_text=3))
    np.testing.assert_array_equal(source.text(0), byte_tokens("einundzwanzig rote"))
    assert "1 of 1 captions are cut to max_text=3 tokens" in caplog.text


def test_damaged_headers_are_skipped_and_named(tmp_path, caplog):
    save_image(tmp_path / "good.png", 16, 16)
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    (tmp_path / "bad.mp4").write_bytes(b"\0" * 400)
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    source = ImageFolder(tmp_path, rules=RULES)
    assert names_of(source) == ["good.png"]
    assert "cannot read gone.png" in caplog.text
    (tmp_path / "gone.png").unlink()
    assert "cannot read bad.png" in caplog.text
    assert "cannot read bad.mp4" in caplog.text
    strict = MediaRules(patch=8, max_tokens=64, allow_uncaptioned=True, bad_limit=BadLimit(0.5, 2))
    with pytest.raises(DataError, match=r"got 2 of 3: bad.mp4, bad.png"):
        ImageFolder(tmp_path, rules=strict)


def test_damaged_content_is_a_bad_sample(tmp_path):
    save_image(tmp_path / "cut.png", 128, 128)
    path = tmp_path / "cut.png"
    path.write_bytes(path.read_bytes()[:200])
    save_clip(tmp_path / "cut.avi", 12, 32, 48)
    source = ImageFolder(tmp_path, rules=RULES)
    clip = tmp_path / "cut.avi"
    clip.write_bytes(clip.read_bytes()[:300])
    for i in range(2):
        with pytest.raises(BadSampleError):
            source.read(i)
    path.unlink()
    with pytest.raises(BadSampleError, match="FileNotFoundError"):
        source.read(names_of(source).index("cut.png"))


def test_empty_missing_or_tiny(tmp_path):
    with pytest.raises(DataError, match="must be a folder"):
        ImageFolder(tmp_path / "nowhere", rules=RULES)
    (tmp_path / "notes.txt").write_text("x")
    save_image(tmp_path / ".hidden" / "a.png", 16, 16)
    save_image(tmp_path / "._a.png", 16, 16)
    with pytest.raises(DataError, match="must contain images or videos"):
        ImageFolder(tmp_path, rules=RULES)
    save_image(tmp_path / "tiny.png", 7, 64)
    with pytest.raises(DataError, match=r"one patch of 8 pixels .* 1 smaller: tiny.png"):
        ImageFolder(tmp_path, rules=RULES)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"patch": 0}, "patch"),
        ({"frame_stride": 0}, "frame_stride"),
        ({"max_frames": 0}, "max_frames"),
        ({"max_tokens": 15}, "each frame a token"),
        ({"max_text": -1}, "max_text"),
    ],
)
def test_rules_reject_bad_values(bad, match):
    with pytest.raises(ValueError, match=match):
        MediaRules(**({"patch": 8, "max_tokens": 16} | bad))


def test_an_index_folder_that_cannot_be_written_is_refused(tmp_path):
    save_image(tmp_path / "data" / "0.png", 16, 16)
    (tmp_path / "file").write_bytes(b"")
    rules = MediaRules(
        patch=8, max_tokens=64, allow_uncaptioned=True, index_folder=tmp_path / "file" / "cache"
    )
    with pytest.raises(
        DataError, match="index_folder must be a folder that can be written; got .*file/cache"
    ):
        ImageFolder(tmp_path / "data", rules=rules)


def test_the_index_file_is_used_and_follows_changes(tmp_path, monkeypatch):
    root, cache = tmp_path / "data", tmp_path / "cache"
    rules = MediaRules(patch=8, max_tokens=64, allow_uncaptioned=True, index_folder=cache)
    for i in range(3):
        save_image(root / f"{i}.png", 16, 16 + 8 * i)
    (root / "bad.png").write_bytes(b"?")
    first = ImageFolder(root, rules=rules)
    scanned = []
    import experiments.data._folder as folder

    original = folder.scan_media
    monkeypatch.setattr(folder, "scan_media", lambda path, e: scanned.append(path.name) or original(path, e))
    again = ImageFolder(root, rules=rules)
    assert scanned == ["bad.png"]  # what could not be read is tried again
    assert again.digest == first.digest
    assert again.grids.tolist() == first.grids.tolist()

    scanned.clear()
    save_image(root / "1.png", 32, 32)
    save_image(root / "new.png", 16, 16)
    (root / "0.png").unlink()
    changed = ImageFolder(root, rules=rules)
    assert sorted(scanned) == ["1.png", "bad.png", "new.png"]
    assert names_of(changed) == ["1.png", "2.png", "new.png"]
    assert changed.grids[0].tolist() == [1, 4, 4]
    assert changed.digest != first.digest

    (index,) = cache.iterdir()
    index.write_text("{damaged")
    assert ImageFolder(root, rules=rules).digest == changed.digest
