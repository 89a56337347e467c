"""The quickstart's data: what ships inside packages, nothing downloaded."""

import socket

import numpy as np
import pytest

from experiments.data import (
    DIGIT_WORDS,
    LARGE_DIGIT_SIZES,
    SMALL_DIGIT_SIZES,
    ClipSource,
    DataError,
    DigitSource,
    PhotoSource,
    Source,
    StepSampler,
    draw_digit,
    frames_from_rows,
    handwritten_digits,
    quickstart_sources,
)
from experiments.data import _quickstart as quickstart
from jaxdit.encoders import byte_tokens


@pytest.fixture(scope="module")
def sources():
    return quickstart_sources()


def test_all_is_found_without_a_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the quickstart must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for source in (PhotoSource(tokens=(36,)), ClipSource(shapes=((2, 12),))):
        for i in range(len(source)):
            assert source.read(i).shape == (source.image_lengths[i], 48)


WEIGHTS = [0.5, 0.25, 0.1, 0.15]


def test_a_mixed_batch_spreads_thirty_fold(sources):
    sampler = StepSampler(sources, weights=WEIGHTS, token_budget=8192, caption_dropout=0.1, seed=0)
    steps = [sampler.step(t) for t in range(100)]
    assert all(step.lengths.max() >= 30 * step.lengths.min() for step in steps)
    assert all(len(set(step.source.tolist())) == 4 for step in steps)


def test_sources_are_rgb_and_captioned(sources):
    for source in sources:
        assert isinstance(source, Source)
        assert source.channels == 48
        assert source.text_lengths.min() >= 1
        for i in (0, len(source) - 1):
            t, h, w = source.grid(i)
            frames = frames_from_rows(source.read(i), grid=(t, h, w), patch=4)
            assert frames.shape == (t, 4 * h, 4 * w, 3)
            assert frames.std() > 5


def test_clips_move_and_photos_do_not_change_shape(sources):
    photos, clips = sources[2:]
    for i in range(0, len(clips), 3):
        rows = clips.read(i).reshape(clips.grids[i, 0], -1)
        assert np.abs(np.diff(rows, axis=0)).mean() > 1e-3
    ratios = photos.grids[:, 1] / photos.grids[:, 2]
    by_photo = ratios.reshape(-1, len(quickstart.PHOTO_TOKENS))
    np.testing.assert_allclose(by_photo, by_photo[:, -1:] * np.ones_like(by_photo), rtol=0.25)
    assert photos.read(0) is photos.read(0)  # decoded once


def test_captions_name_the_digit_and_mostly_in_the_form_that_is_evaluated(sources):
    numbers = handwritten_digits(held_out=False)
    for digits, sizes in zip(sources, (SMALL_DIGIT_SIZES, LARGE_DIGIT_SIZES), strict=False):
        main = 0
        for i in range(len(digits)):
            word = DIGIT_WORDS[numbers.labels[i // len(sizes)]]
            assert byte_tokens(word)[0].tolist() in digits.text(i).tolist()
            main += np.array_equal(digits.text(i), byte_tokens(f"a handwritten {word}"))
        assert main / len(digits) == pytest.approx(0.6, abs=0.03)


def test_digits_are_labelled_and_photographs_are_not(sources):
    digits, _, photos, clips = sources
    assert digits.labels.dtype == np.int32
    for i in range(0, len(digits), 97):
        assert byte_tokens(DIGIT_WORDS[digits.labels[i]])[0].tolist() in digits.text(i).tolist()
    assert photos.labels is clips.labels is None


def test_small_steps_are_mixed_too(sources):
    sampler = StepSampler(sources, weights=WEIGHTS, token_budget=2600, caption_dropout=0.1, seed=0)
    steps = [sampler.step(t) for t in range(512)]
    counts = np.asarray([np.bincount(s.source, minlength=4) for s in steps])
    assert counts[:, :2].min() >= 1
    assert counts[:, 2:].sum(1).mean() > 1.5
    assert np.mean([s.lengths.sum() for s in steps]) > 0.955 * 2600
    assert np.median([s.lengths.max() / s.lengths.min() for s in steps]) > 28


def test_held_out_digits_are_never_trained_on():
    train, held_out = handwritten_digits(held_out=False), handwritten_digits(held_out=True)
    assert len(train.labels) == 1438
    assert len(held_out.labels) == 359
    assert not set(train.numbers.tolist()) & set(held_out.numbers.tolist())
    assert set(held_out.labels.tolist()) == set(range(10))
    a, b = DigitSource(), DigitSource(held_out=True)
    assert not {a.split_name(i) for i in range(len(a))} & {b.split_name(i) for i in range(len(b))}


@pytest.mark.parametrize(("height", "width"), [(16, 16), (48, 32), (16, 24)])
def test_digits_keep_their_shape_in_the_centre(height, width):
    digit = handwritten_digits(held_out=False).images[3]
    picture = draw_digit(digit, height=height, width=width)
    side = min(height, width)
    square = draw_digit(digit, height=side, width=side)
    top, left = (height - side) // 2, (width - side) // 2
    np.testing.assert_array_equal(picture[top : top + side, left : left + side], square)
    assert picture.sum() == square.sum()


def test_bad_arguments_and_missing_packages(monkeypatch):
    with pytest.raises(ValueError, match="multiples of patch=4"):
        DigitSource(sizes=((16, 18),))
    with pytest.raises(ValueError, match="multiples of patch=32"):
        DigitSource(patch=32)
    monkeypatch.setitem(quickstart._PHOTOS, "no_such_photo.png", "nothing")
    with pytest.raises(DataError, match=r"got none for no_such_photo.png"):
        PhotoSource()
    with pytest.raises(DataError, match="no-such-package must be installed"):
        quickstart._packaged_files("no-such-package", ["a"])
