"""`experiments.sample --model` on a small FLUX.1 pipeline."""

import pytest
from PIL import Image

from experiments import sample
from tests.experiments._program_cases import run
from tests.parity.pipeline import PIPELINE_CASES, write_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_pipeline(PIPELINE_CASES[0], path)
    return path


def draw(folder, *args):
    return run(sample.main, "--model", folder, "--dtype", "float32", "--devices", 2, "--truncate", *args)


def test_prompts_of_a_file_and_of_the_command_line(folder, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a cat\n\nsnow, grey\n")
    arguments = [
        "--prompt",
        "two dogs",
        "--prompts",
        "prompts.txt",
        "--size",
        "16x24",
        "--steps",
        2,
        "--seed",
        3,
    ]
    assert draw(folder, *arguments) == 0
    names = ["two_dogs_16x24_seed3_0.png", "a_cat_16x24_seed3_1.png", "snow_grey_16x24_seed3_2.png"]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == sorted(names)
    with Image.open(tmp_path / "samples" / names[1]) as picture:
        assert picture.size == (24, 16)
        about = picture.text
    assert about["prompt"] == "a cat"
    assert about | {"seed": "3", "number": "1", "steps": "2", "guidance": "3.5", "model": "tiny"} == about
    assert "3 requests of 24 to 24 image tokens, packed" in caplog.text


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "--prompt or --prompts must give a caption"),
        (["--prompts", "nothing.txt"], "--prompts nothing.txt cannot be read"),
        (["--prompt", "a", "--size", "15x16"], "height: a positive multiple of 4; got height=15. Try 16."),
        (["--prompt", "a", "--size", "16"], "a size is HEIGHTxWIDTH"),
        (["--prompt", "a", "--frames", 2, "--size", "16x16"], "frames: this model makes pictures"),
        (["--prompt", "a", "--prompt", "b", "--out", "x.png"], "--out names one file"),
        (["--prompt", "a", "--steps", 0, "--size", "16x16"], "steps: 1 to 1000; got steps=0"),
    ],
)
def test_what_cannot_be_made_is_refused(folder, tmp_path, monkeypatch, capfd, args, part):
    monkeypatch.chdir(tmp_path)
    assert draw(folder, *args) == 2
    assert part in capfd.readouterr().err
    assert not (tmp_path / "samples").exists()


def test_a_folder_that_is_no_pipeline(tmp_path, capfd):
    assert draw(tmp_path, "--prompt", "a") == 2
    assert "is no pipeline: it has no model_index.json" in capfd.readouterr().err
