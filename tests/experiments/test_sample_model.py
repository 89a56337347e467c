"""`experiments.sample --model` on a small FLUX.1 pipeline."""

import numpy as np
import pytest
from PIL import Image

from experiments import sample, train
from tests.experiments._program_cases import run
from tests.parity.pipeline import PIPELINE_CASES, write_pipeline
from tests.processes import free_port, run_together


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
        (["--prompt", "a", "--step-cache", -1], "StepCache: threshold must be at least 0"),
        (["--prompt", "a", "--step-cache-error"], "--step-cache-error is of --step-cache"),
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


RUN = """
import experiments._components
train.model = @text_to_image()
train.objective = @flow_matching()
train.data = @synthetic()
train.optimizer = @adamw()
train.num_devices = 2
train.steps = 1
train.block = 32
train.init_from = '{transformer}'
train.adapter = @lora()
lora.rank = 2
text_to_image.width = 64
text_to_image.num_heads = 4
text_to_image.num_double_blocks = 1
text_to_image.num_single_blocks = 1
text_to_image.axes_dim = (4, 6, 6)
text_to_image.channels = 64
text_to_image.text_channels = 24
text_to_image.pooled_channels = 24
text_to_image.max_text = None
text_to_image.guidance_embed = True
flow_matching.guidance = 3.5
synthetic.codes = 'g2b1i64f1s0'
synthetic.channels = 64
synthetic.text_channels = 24
synthetic.pooled_channels = 24
synthetic.max_text = 16
adamw.learning_rate = {learning_rate}
"""


@pytest.mark.full
def test_a_run_of_the_transformer_with_the_other_parts_of_its_pipeline(folder, tmp_path, capfd):
    """Adapters that were not trained change nothing; trained ones do."""

    def picture(out, *args):
        options = ["--prompt", "a cat", "--size", "16x24", "--steps", 2, "--out", tmp_path / out]
        assert run(sample.main, *args, *options, "--truncate") == 0
        with Image.open(tmp_path / out) as found:
            return np.asarray(found).astype(int), found.text

    right, _ = picture("base.png", "--model", folder, "--dtype", "float32", "--devices", 2)
    for rate, least, most in ((1e-12, 0, 1), (0.5, 2, 255)):
        config, workdir = tmp_path / "run.gin", tmp_path / f"run_{rate}"
        config.write_text(RUN.format(transformer=folder / "transformer", learning_rate=rate))
        assert run(train.main, "--config", config, "--workdir", workdir) == 0
        found, about = picture(f"{rate}.png", "--workdir", workdir, "--model", folder)
        assert least <= np.abs(found - right).max() <= most
        assert about["step"] == "1"
    assert run(sample.main, "--workdir", workdir, "--prompt", "a cat") == 2
    assert "no pixels" in capfd.readouterr().err


@pytest.mark.full
def test_a_step_cache_and_its_error(folder, tmp_path, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "a.png"
    options = ["--steps", 4, "--step-cache", "1e9", "--step-cache-error"]
    assert draw(folder, "--prompt", "a cat", "--size", "16x24", "--out", out, *options) == 0
    assert "blocks were left out of 50% of the evaluations; latents differ from exact ones by" in caplog.text
    with Image.open(out) as picture:
        assert picture.text["skipped"] == "0.5"


@pytest.mark.full
def test_two_processes_make_what_one_makes(folder, tmp_path):
    """Of a pipeline, alone and packed, and with compiled programs from disk; one of the processes writes."""
    cache = tmp_path / "cache"

    def draw_with(processes, out, *prompts, devices):
        options = ["--size", "16x24", "--steps", 2, "--dtype", "float32", "--devices", devices, "--truncate"]
        asked = [item for prompt in prompts for item in ("--prompt", prompt)]
        common = ["-m", "experiments.sample", "--model", folder, *options, *asked, "--cache", cache]
        address = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", processes]
        commands = [
            [*common, *(address if processes > 1 else []), *(["--process-id", i] if processes > 1 else [])]
            for i in range(processes)
        ]
        (tmp_path / out).mkdir()
        finished = run_together(commands, timeout=600, cwd=tmp_path / out)
        assert [process.returncode for process in finished] == [0] * processes, finished[0].stderr[-3000:]
        found = [np.asarray(Image.open(path)) for path in sorted((tmp_path / out / "samples").iterdir())]
        assert len(found) == len(prompts)
        return np.stack(found).astype(int)

    for name, prompts in (("alone", ["a cat"]), ("packed", ["a cat", "two dogs"])):
        one = draw_with(1, f"{name}_one", *prompts, devices=1)
        two = draw_with(2, f"{name}_two", *prompts, devices=4)
        assert np.abs(one - two).max() <= 1
    assert any(cache.iterdir())
