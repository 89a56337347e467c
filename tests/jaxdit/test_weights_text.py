"""Text encoders from the folders transformers writes: variants of names, files that are something else."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdit.encoders import ClipTextConfig, T5Config
from jaxdit.weights import WeightsError, check_checkpoint, load_params, read_config, save_params
from tests.jaxdit._weights_cases import FLUX, assert_equal
from tests.parity.text_cases import TEXT_CASES, write_encoder

T5, CLIP = (next(case for case in TEXT_CASES if case.name == name) for name in ("t5_small", "clip_small"))
SHARED, EMBED = "shared.weight", "encoder.embed_tokens.weight"
POSITIONS = "text_model.embeddings.position_ids"


@pytest.fixture
def written(tmp_path):
    """Writes a case's folder, its tensors changed by `change(dict)`."""

    def write(case, change=lambda tensors: None):
        folder = tmp_path / case.name
        write_encoder(case, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


def load(folder: Path):
    return load_params(folder, read_config(folder))


def test_configs(written):
    """Settings that are left out are transformers' defaults."""
    folder = written(T5)
    (folder / "config.json").write_text('{"architectures": ["T5EncoderModel"], "is_encoder_decoder": true}')
    assert read_config(folder) == T5Config(
        vocab_size=32_128, width=512, head_dim=64, num_heads=8, mlp_width=2048, depth=6, activation="relu"
    )
    (folder / "config.json").write_text('{"architectures": ["CLIPTextModel"], "torch_dtype": "bfloat16"}')
    assert read_config(folder, compute_dtype="float32") == ClipTextConfig(
        vocab_size=49_408, width=512, num_heads=8, mlp_width=2048, depth=12, compute_dtype="float32"
    )


@pytest.mark.parametrize("names", [[EMBED], [SHARED, EMBED]])
def test_both_names_of_t5s_table(written, names):
    expected = load(written(T5))

    def change(tensors):
        table = tensors.pop(SHARED)
        tensors |= {name: table.copy() for name in names}

    assert_equal(load(written(T5, change)), expected)


def test_tables_of_t5_that_differ(written):
    folder = written(T5, lambda t: t.__setitem__(EMBED, t[SHARED] + 1))
    with pytest.raises(WeightsError, match=rf"{EMBED} must equal {SHARED}"):
        load(folder)


def test_names_of_clip_in_transformers_5_and_positions_of_older_files(written):
    expected = load(written(CLIP))

    def shorten(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("text_model.")] = tensors.pop(name)

    assert_equal(load(written(CLIP, shorten)), expected)
    folder = written(CLIP, lambda t: t.__setitem__(POSITIONS, np.arange(24)[None]))
    assert_equal(load(folder), expected)


def test_several_files_with_an_index(written):
    folder = written(T5)
    expected = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for i in range(2):
        part = dict(list(tensors.items())[i::2])
        save_file(part, folder / f"model-0000{i + 1}-of-00002.safetensors")
        index |= dict.fromkeys(part, f"model-0000{i + 1}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_equal(load(folder), expected)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (T5, lambda t: t.pop(SHARED), r"1 missing: shared.weight \[40, 24\]\.$"),
        (
            T5,
            lambda t: t.__setitem__("lm_head.weight", t[SHARED] + 0),
            r"1 not of this model: lm_head.weight \[40, 24\]",
        ),
        (
            T5,
            lambda t: t.__setitem__(SHARED, np.zeros((41, 24), np.float32)),
            r"1 of another shape: shared.weight \[41, 24\], needs \[40, 24\]",
        ),
        (
            CLIP,
            lambda t: t.__setitem__("text_projection.weight", np.zeros((3, 3), np.float32)),
            r"1 not of this model: text_projection.weight \[3, 3\]",
        ),
        (
            CLIP,
            lambda t: t.pop("text_model.encoder.layers.2.self_attn.k_proj.bias"),
            r"1 missing: text_model.encoder.layers.2.self_attn.k_proj.bias \[24\]",
        ),
    ],
)
def test_tensors_of_something_else(written, case, change, message):
    folder = written(case, change)
    with pytest.raises(WeightsError, match=f"is not a checkpoint of this model. {message}"):
        check_checkpoint(folder, read_config(folder))


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        (T5, {"architectures": ["T5ForConditionalGeneration"]}, r"or architectures \[T5EncoderModel\] or"),
        (CLIP, {"architectures": ["CLIPTextModelWithProjection"]}, r"got \['CLIPTextModelWithProjection'\]"),
        (CLIP, {"architectures": None}, r"got None"),
        (T5, {"feed_forward_proj": "gated-silu"}, r"activation must be one of gated-gelu, relu"),
        (T5, {"num_layers": 2.0}, r"num_layers must be a whole number; got 2.0"),
        (CLIP, {"hidden_act": 3}, r"hidden_act must be a text; got 3"),
        (CLIP, {"num_attention_heads": 5}, r"num_heads must divide width"),
    ],
)
def test_configs_of_something_else(written, case, settings, message):
    file = written(case) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(WeightsError, match=message):
        read_config(file.parent)


def test_weights_beside_another_config(written):
    folder, other = written(T5), written(CLIP)
    with pytest.raises(WeightsError, match="is of a T5Config, the model is of a ClipTextConfig"):
        load_params(folder, read_config(other))
    with pytest.raises(WeightsError, match="is of a T5Config, the model is of a MMDiTConfig"):
        load_params(folder, FLUX)
    config = read_config(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "relative_attention_max_distance": 64}))
    with pytest.raises(WeightsError, match="max_distance=64 there, 128 here"):
        load_params(folder, config)


def test_a_pipelines_folder_and_pickles(written):
    folder = written(T5)
    config = read_config(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"no .safetensors file. Its pytorch_model.bin are pickles"):
        load_params(folder, config)
    (folder.parent / "model_index.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"is a pipeline of several models .* text_encoder_2 or vae"):
        read_config(folder.parent)


def test_variants_beside_one_another_must_be_named(written):
    folder = written(CLIP)
    expected = load(folder)
    (folder / "model.fp16.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(WeightsError, match=r"several checkpoints: model.fp16.safetensors, model.safetensors"):
        load(folder)
    config = read_config(folder)
    assert_equal(load_params(folder / "model.fp16.safetensors", config), expected)


def test_they_are_not_written(written, tmp_path):
    folder = written(CLIP)
    config = read_config(folder)
    with pytest.raises(
        WeightsError, match="text encoders, which are frozen, are not written; got a ClipTextConfig"
    ):
        save_params.__wrapped__(tmp_path / "a", load_params(folder, config), config)
