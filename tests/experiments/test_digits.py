"""The judge of drawn digits."""

import numpy as np
import pytest

from experiments._digits import DigitClassifier, digit_cells
from experiments.data import DIGIT_SIZES, draw_digit, handwritten_digits


@pytest.fixture(scope="module")
def classifier():
    return DigitClassifier()


@pytest.mark.parametrize(("height", "width"), [*DIGIT_SIZES, (8, 8), (20, 28), (64, 48)])
def test_held_out_digits_are_recognised_at_every_size(classifier, height, width):
    assert classifier.held_out_accuracy(height=height, width=width) >= 0.98


def test_pictures_of_mixed_sizes_with_noise_and_low_contrast_are_recognised(classifier):
    digits = handwritten_digits(held_out=True)
    rng = np.random.default_rng(0)
    pictures = []
    for i, digit in enumerate(digits.images):
        height, width = DIGIT_SIZES[i % len(DIGIT_SIZES)]
        clean = draw_digit(digit, height=height, width=width) * 0.8 + 20
        pictures.append(np.clip(clean + rng.normal(0, 25, clean.shape), 0, 255).astype(np.uint8))
    guessed = classifier.classify(pictures)
    assert guessed.dtype == np.int64
    assert np.mean(guessed == digits.labels) >= 0.97


def test_it_is_deterministic_and_takes_empty_input(classifier):
    pictures = [draw_digit(d, height=16, width=16) for d in handwritten_digits(held_out=True).images[:50]]
    np.testing.assert_array_equal(classifier.classify(pictures), DigitClassifier().classify(pictures))
    assert classifier.classify([]).shape == (0,)


def test_pictures_of_nothing_are_not_recognised_as_the_digit_asked_for(classifier):
    # Grey fields and noise: what an untrained model draws. A judge that guesses scores one in ten.
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (32, 32, 3), np.uint8) for _ in range(200)]
    asked = np.arange(200) % 10
    assert np.mean(classifier.classify(noise) == asked) < 0.2
    assert not digit_cells(np.full((24, 16, 3), 128, np.uint8)).any()


def test_cells_undo_drawing():
    for digit in handwritten_digits(held_out=True).images[:20]:
        cells = digit_cells(draw_digit(digit, height=32, width=48))
        assert cells.shape == (8, 8)
        assert np.corrcoef(cells.ravel(), digit.ravel())[0, 1] > 0.97
