"""Contact sheets, clips and plots: what is drawn is what was given, files are whole, nothing global is touched."""

import json
import subprocess
import sys

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from experiments import _pictures
from experiments._figures import (
    DeviceLoads,
    SheetStyle,
    plot_loads,
    plot_training,
    save_clip,
    save_grid,
    save_image,
    smoothed,
)

WHITE = (255, 255, 255)


def noise(*shape):
    return np.random.default_rng(sum(shape)).integers(0, 256, size=(*shape, 3), dtype=np.uint8)


def sheet_of(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).copy()


def places(sheet, picture):
    """Where the inside of the picture (a hairline is drawn along its edge) appears in the sheet."""
    inner = picture[1:-1, 1:-1]
    windows = np.lib.stride_tricks.sliding_window_view(sheet, inner.shape)[:, :, 0]
    candidates = np.argwhere((windows[:, :, 0, 0] == inner[0, 0]).all(-1))
    return [tuple(at) for at in candidates if (windows[tuple(at)] == inner).all()]


def enlarged(picture, factor):
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


def test_small_pictures_are_enlarged_by_whole_factors_and_big_ones_fit(tmp_path):
    images = [noise(8, 8), noise(5, 20), noise(40, 7), noise(300, 200)]
    style = SheetStyle(columns=4, cell=40)
    save_grid(tmp_path / "s.png", images, ["a", "b", "c", "d"], style=style)
    sheet = sheet_of(tmp_path / "s.png")
    left = [places(sheet, enlarged(images[k], factor)) for k, factor in ((0, 5), (1, 2), (2, 1))]
    assert [len(found) for found in left] == [1, 1, 1]
    columns = [found[0][1] for found in left]
    assert columns == sorted(columns)
    shrunk = np.asarray(_pictures._fitted(images[3], 40))
    assert shrunk.shape == (40, 27, 3)
    assert len(places(sheet, shrunk)) == 1
    assert sheet.shape[1] == 4 * 40 + 5 * 12


def test_rows_break_at_the_columns_and_a_clip_has_its_own(tmp_path):
    images = [noise(8, 8 + k) for k in range(3)] + [
        np.stack([noise(8, 12), noise(8, 13)[:, :12]]),
        noise(9, 8),
    ]
    save_grid(tmp_path / "s.png", images, list("abcde"), style=SheetStyle(columns=2, cell=16))
    sheet = sheet_of(tmp_path / "s.png")
    tops = [places(sheet, enlarged(images[k], 16 // max(images[k].shape[:2])))[0][0] for k in (0, 1, 2, 4)]
    first, second = places(sheet, images[3][0])[0], places(sheet, images[3][1])[0]
    assert first[0] == second[0]
    assert second[1] == first[1] + 12 + 3
    assert tops[0] == tops[1] < tops[2] < first[0] < tops[3]


def test_long_clip_shows_its_first_and_last_frame(tmp_path):
    frames = np.stack([np.full((8, 8, 3), 3 * k, np.uint8) for k in range(60)])
    save_grid(tmp_path / "s.png", [frames], ["c"], style=SheetStyle(columns=4, cell=8))
    sheet = sheet_of(tmp_path / "s.png")
    assert sheet.shape[1] <= 4 * (8 + 12) + 12 + 3
    strip = sheet[12 + 4]
    assert tuple(strip[12 + 4]) == (0, 0, 0)
    assert (strip == 59 * 3).all(-1).any()


def test_captions_are_kept_in_the_file_and_wrapped_in_the_picture(tmp_path):
    captions = ["сорок два \N{SNOWMAN}", "word " * 60, "", "\n\n", "x" * 500]
    metadata = {"config": "train.steps = 3\n", "prompt": "ü"}
    save_grid(tmp_path / "s.png", [noise(8, 8)] * 5, captions, title="title", metadata=metadata)
    with Image.open(tmp_path / "s.png") as picture:
        assert json.loads(picture.text["captions"]) == captions
        assert {name: picture.text[name] for name in metadata} == metadata
    font = _pictures._font(13)
    for caption in captions:
        lines = _pictures._wrapped(caption, font, 100)
        assert len(lines) <= 3
        assert all(font.getlength(line) <= 100 for line in lines)
    assert _pictures._wrapped("word " * 60, font, 100)[-1].endswith("\N{HORIZONTAL ELLIPSIS}")
    assert _pictures._wrapped("two words", font, 100) == ["two words"]


def test_captions_are_legible(tmp_path):
    save_grid(tmp_path / "s.png", [np.full((8, 8, 3), 255, np.uint8)], ["caption"], style=SheetStyle(cell=64))
    ink = (sheet_of(tmp_path / "s.png").astype(int).sum(-1) < 200).sum()
    assert ink > 40
    assert tuple(sheet_of(tmp_path / "s.png")[0, 0]) == WHITE


def test_what_is_refused(tmp_path):
    target = tmp_path / "s.png"
    with pytest.raises(ValueError, match="got 1 images and 2 captions"):
        save_grid(target, [noise(4, 4)], ["a", "b"])
    with pytest.raises(ValueError, match="got 0 images"):
        save_grid(target, [], [])
    for bad in (
        noise(4, 4).astype(np.float32),
        noise(4, 4)[..., 0],
        noise(4, 4)[:0],
        np.zeros((4, 4, 4), np.uint8),
    ):
        with pytest.raises(ValueError, match="must be uint8 RGB"):
            save_grid(target, [bad], ["a"])
    with pytest.raises(ValueError, match="must be one picture; got 2 frames"):
        save_image(target, noise(2, 4, 4))
    with pytest.raises(ValueError, match="columns, cell and font_size must be positive"):
        SheetStyle(columns=0)
    with pytest.raises(ValueError, match=r"must end in \.gif or \.mp4; got '.*s\.png'"):
        save_clip(target, noise(2, 4, 4))
    with pytest.raises(ValueError, match="fps and scale must be positive; got fps=0, scale=1"):
        save_clip(tmp_path / "s.gif", noise(2, 4, 4), fps=0)
    assert not list(tmp_path.iterdir())


def test_image_is_written_as_it_is(tmp_path):
    save_image(tmp_path / "new" / "i.png", noise(5, 9), {"prompt": "a seven"})
    np.testing.assert_array_equal(sheet_of(tmp_path / "new" / "i.png"), noise(5, 9))
    with Image.open(tmp_path / "new" / "i.png") as picture:
        assert picture.text["prompt"] == "a seven"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["i.png"]


def moving_bar(num_frames=6, height=18, width=25):
    frames = np.full((num_frames, height, width, 3), 30, np.uint8)
    for index in range(num_frames):
        frames[index, :, 3 * index : 3 * index + 4] = (220, 40, 40)
    return frames


def test_gif(tmp_path):
    frames = moving_bar()
    save_clip(tmp_path / "c.gif", frames, fps=12.5, scale=2)
    with Image.open(tmp_path / "c.gif") as picture:
        assert picture.info["duration"] == 80
        assert picture.info["loop"] == 0
        shown = np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)])
    expected = frames.repeat(2, axis=1).repeat(2, axis=2)
    assert shown.shape == expected.shape
    assert np.abs(shown.astype(int) - expected).max() <= 8


def test_mp4(tmp_path):
    frames = moving_bar()
    save_clip(tmp_path / "c.mp4", frames, fps=7.5)
    with av.open(str(tmp_path / "c.mp4")) as container:
        assert float(container.streams.video[0].average_rate) == 7.5
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert shown.shape == (6, 18, 26, 3)
    assert np.abs(shown[:, :, :25].astype(int) - frames).mean() < 12
    assert shown[:, :, 14, 0].mean(1).argmax() == 4, "the bar covers column 14 in frame 4 only"
    assert [path.name for path in tmp_path.iterdir()] == ["c.mp4"]


def run_of(num_steps):
    rng = np.random.default_rng(0)
    rows = []
    for step in range(num_steps):
        loss = 0.2 + np.exp(-step / 20) + 0.05 * rng.normal()
        rows.append({"step": step, "loss": loss, "learning_rate": 1e-4 * step, "tokens_per_s": 1e4 + step})
        if step % 10 == 0:
            rows[-1]["validation_loss"] = loss
    return rows


@pytest.mark.parametrize("num_steps", [1, 2, 100])
def test_training_plot(tmp_path, num_steps):
    plot_training(tmp_path / "t.png", run_of(num_steps), title="a run")
    assert sheet_of(tmp_path / "t.png").std() > 5
    assert [path.name for path in tmp_path.iterdir()] == ["t.png"]


def test_training_plot_takes_what_there_is(tmp_path):
    rows = [{"step": 0, "loss": float("nan")}, {"step": 1, "note": 1}, {"step": 2, "loss": float("inf")}]
    plot_training(tmp_path / "only.png", rows)
    plot_training(tmp_path / "full.png", run_of(3))
    assert sheet_of(tmp_path / "only.png").shape[0] < sheet_of(tmp_path / "full.png").shape[0]
    with pytest.raises(ValueError, match="rows must have a 'loss'"):
        plot_training(tmp_path / "none.png", [{"step": 1}])


def test_the_same_rows_give_the_same_file(tmp_path):
    for name in ("a.png", "b.png"):
        plot_training(tmp_path / name, run_of(20))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("num_devices", [1, 8, 100])
def test_load_plot(tmp_path, num_devices):
    rng = np.random.default_rng(0)
    before = DeviceLoads(rng.gamma(2, 1e-3, num_devices), rng.gamma(1, 1e-3, num_devices))
    after = DeviceLoads(
        np.full(num_devices, before.linear.mean()), np.full(num_devices, before.attention.mean())
    )
    assert after.max_over_mean == pytest.approx(1)
    plot_loads(tmp_path / "l.svg", before, after, title="step 3", machine_size=4)
    assert (tmp_path / "l.svg").stat().st_size > 1000
    plot_loads(tmp_path / "l.png", before, after)
    sheet = sheet_of(tmp_path / "l.png").reshape(-1, 3)
    for colour in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)):
        assert (sheet == colour).all(-1).sum() > 1000


def test_loads():
    loads = DeviceLoads(np.array([1.0, 1.0]), np.array([0.0, 2.0]))
    np.testing.assert_array_equal(loads.total, [1, 3])
    assert loads.max_over_mean == 1.5
    assert DeviceLoads(np.zeros(2), np.zeros(2)).max_over_mean == 1
    for linear, attention in ((np.ones(2), np.ones(3)), (np.ones((2, 2)), np.ones((2, 2))), ([], [])):
        with pytest.raises(ValueError, match="must have one shape"):
            DeviceLoads(linear, attention)


def test_smoothing():
    np.testing.assert_allclose(smoothed(np.full(50, 3.0), 4), 3.0)
    np.testing.assert_allclose(smoothed(np.arange(101.0), 2)[50], 50)  # no delay
    weights = 0.5 ** (np.abs(np.arange(5) - 1) / 2)
    values = np.array([1.0, np.nan, 4.0, np.inf, 2.0])
    kept = np.isfinite(values)
    expected = (weights[kept] * values[kept]).sum() / weights[kept].sum()
    np.testing.assert_allclose(smoothed(values, 2)[1], expected)
    assert np.isnan(smoothed([float("nan")], 1)).all()
    assert len(smoothed([], 1)) == 0


def test_pyplot_and_its_global_state_are_left_alone():
    code = "import sys, experiments._figures; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
