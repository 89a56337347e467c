"""The quickstart's measure: one JSON object on stdout, and nothing else there."""

import json

import numpy as np
import pytest
from PIL import Image

from experiments import evaluate
from experiments._digits import DigitClassifier
from experiments.data import DIGIT_SIZES, draw_digit, handwritten_digits
from jaxdit.sampling import Sample
from tests.experiments._program_cases import bindings, programs_shared, run, trained_run


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with programs_shared():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_run(tmp_path_factory)


def test_evaluate_prints_one_object(trained, tmp_path, capfd):
    grid = tmp_path / "grid.png"
    arguments = ["--workdir", trained, "--grid", grid, *bindings(sampler__num_steps=1)]
    assert run(evaluate.main, *arguments) == 0
    out = capfd.readouterr().out
    assert out.endswith("\n")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["samples"] == 200
    assert 0 <= found["recognised"] <= 1
    assert found["step"] == 6
    assert found["classifier_accuracy"] >= 0.95
    assert found["recognised"] == pytest.approx(np.mean(found["recognised_by_digit"]))
    assert set(found["recognised_by_size"]) == {f"{height}x{width}" for height, width in DIGIT_SIZES}
    with Image.open(grid) as picture:
        assert min(picture.size) > 500


def test_real_digits_are_recognised(trained, capfd, monkeypatch):
    """The measure itself: were the samples real held-out digits, nearly all of them would be recognised."""
    held_out = handwritten_digits(held_out=True)

    def real(engine, requests):
        words = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4}
        words |= {"five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
        digits = [words[request.prompt.split()[-1]] for request in requests]
        chosen = [np.flatnonzero(held_out.labels == d)[i // 10] for i, d in enumerate(digits)]
        drawn = [
            draw_digit(held_out.images[c], height=r.height, width=r.width)[None]
            for c, r in zip(chosen, requests, strict=True)
        ]
        return [Sample(r, frames, None, {}) for r, frames in zip(requests, drawn, strict=True)]

    monkeypatch.setattr("experiments._engine.generate", real)
    assert run(evaluate.main, "--workdir", trained) == 0
    assert json.loads(capfd.readouterr().out)["recognised"] >= 0.95


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--size", "32"], "HEIGHTxWIDTH"),
        (["--size", "2x32x32"], "digits are pictures"),
        (["--size", "33x32"], "height: a positive multiple of 8"),
        (
            ["--set", "train.data=@synthetic()", "--set", "synthetic.codes=g8b1i64f1s0"],
            "cannot make pictures",
        ),
    ],
)
def test_what_cannot_be_evaluated(trained, capfd, args, part):
    assert run(evaluate.main, "--workdir", trained, *args) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert part in err.splitlines()[-1]


def test_a_folder_without_a_run(tmp_path, capfd):
    assert run(evaluate.main, "--workdir", tmp_path) == 2
    assert "no config.gin" in capfd.readouterr().err


def test_the_judge_alone():
    assert DigitClassifier().held_out_accuracy() >= 0.95
