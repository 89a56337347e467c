"""A small FLUX.1 pipeline, pictures and clips with captions, and the arguments that encode them quickly."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

import jaxdit.pipelines
from experiments import _encoding_source, encode
from experiments.data import EncodedCache, EncodedRules
from tests.experiments._data_cases import save_clip, save_image
from tests.experiments._program_cases import run
from tests.parity.pipeline import PIPELINE_CASES, TEXT_TOKENS, write_pipeline

# Pixels of a token of the pipeline.
UNIT = 4
PICTURES = {
    "cat": (16, 24, "a cat"),
    "deep/dogs": (24, 16, "two dogs"),
    "snow": (32, 20, "a cat in the snow"),
    "grey": (20, 20, "grey"),
    "large": (60, 40, "a cat"),
}
RULES = EncodedRules(patch=2)
_encoders = {}


@contextlib.contextmanager
def encoders_shared():
    """Programs that encode with the same weights on the same devices share what they compile."""

    def shared(folder, mesh, **options):
        given = {name: value for name, value in options.items() if name != "params"}
        key = (folder.path, folder.dtype, folder.text_tokens, mesh, str(given))
        if key not in _encoders:
            _encoders[key] = made(folder, mesh, **options)
        return _encoders[key]

    made = jaxdit.pipelines.FluxEncoders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxdit.pipelines, "FluxEncoders", shared)
        patch.setattr(_encoding_source, "FluxEncoders", shared)
        yield


def write_model(folder: Path) -> Path:
    """The pipeline's folder."""
    write_pipeline(PIPELINE_CASES[0], folder)
    return folder


def write_pictures(root: Path) -> Path:
    """The pictures' folder: five pictures and a clip of six frames, of which every second is taken."""
    for name, (height, width, caption) in PICTURES.items():
        save_image(root / f"{name}.png", height, width)
        (root / f"{name}.txt").write_text(caption)
    save_clip(root / "clip.mp4", 6, 24, 32)
    (root / "clip.txt").write_text("a dog")
    return root


def arguments(model, data, out, **changes):
    """Command-line arguments; a change of True is an option without a value, of None leaves one out."""
    options = {
        "model": model,
        "data": data,
        "out": out,
        "text-tokens": TEXT_TOKENS,
        "dtype": "float32",
        "text": "float32",
        "max-tokens": 128,
        "frame-stride": 2,
        "devices": 2,
        "canvases": 1,
        "text-batch": 2,
        # Two pictures a device.
        "batch-pixels": 2 * 64 * 48,
        "shard-mb": 0.04,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    given = [(f"--{name}", value) for name, value in options.items() if value is not None]
    return [part for name, value in given for part in ((name,) if value is True else (name, value))]


def encoded(model, data, out, **changes):
    """The exit code of encoding in this process."""
    return run(encode.main, *arguments(model, data, out, **changes))


def samples_of(root):
    """Rows, text and pooled of every sample of a cache, by name."""
    source = EncodedCache(root, rules=RULES)
    return {
        source.sample_name(i): (source.read(i), source.text(i), source.pooled(i)) for i in range(len(source))
    }


def assert_same(ours, theirs, tolerance=2e-5):
    """Of two caches' samples."""
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        for mine, value in zip(ours[name], values, strict=True):
            assert mine.shape == value.shape
            assert np.abs(mine - value).max() <= tolerance * np.abs(value).max(), name
