"""config.json of published models, in and out, and what is refused in it."""

import json
from dataclasses import replace

import pytest

from jaxdit.models import FLUX_DEV, dit_config
from jaxdit.weights import (
    WeightsError,
    abstract_params,
    config_json,
    load_params,
    read_config,
    save_params,
)
from tests.jaxdit._weights_cases import (
    CONFIGS,
    FLUX,
    ODD,
    assert_equal,
    draw,
)


@pytest.mark.parametrize("name", ["flux", "dit"])
def test_config_json(tmp_path, name):
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(config_json(config, sample_size=8))
    dtype = config.compute_dtype
    assert read_config(tmp_path, compute_dtype=dtype) == config
    assert read_config(tmp_path / "config.json", compute_dtype=dtype) == config


def test_config_json_of_published_models(tmp_path):
    path = tmp_path / "config.json"
    flux = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0", "guidance_embeds": True}
    path.write_text(json.dumps({**flux, "attention_head_dim": 128, "num_layers": 19, "patch_size": 1}))
    assert read_config(path) == FLUX_DEV
    dit = {
        "_class_name": "Transformer2DModel",
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_head_dim": 72,
        "cross_attention_dim": None,
        "double_self_attention": False,
        "in_channels": 4,
        "norm_type": "ada_norm_zero",
        "num_attention_heads": 16,
        "num_embeds_ada_norm": 1000,
        "num_layers": 28,
        "out_channels": 8,
        "patch_size": 2,
        "sample_size": 32,
    }
    path.write_text(json.dumps(dit))
    assert read_config(path) == dit_config("DiT-XL/2", time_frequency_shift=1, mlp_norm_epsilon=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "SD3Transformer2DModel"}, "_class_name must be"),
        ({"patch_size": 2}, "patch_size must be 1; got 2"),
        ({"attention_head_dim": 120}, "axes_dim must be three even sizes"),
        ({"use_flash": 3}, "does not know: {'use_flash': 3}"),
        ({"num_layers": "many"}, "config.json"),
        ({"axes_dims_rope": 5}, "axes_dims_rope must be a list of whole numbers; got 5"),
        ({"axes_dims_rope": [16, 56.0, 56]}, "axes_dims_rope must be a list of whole numbers"),
        ({"num_layers": True}, "num_layers must be a whole number; got True"),
        ({"num_layers": 2.0}, "num_layers must be a whole number; got 2.0"),
        ({"guidance_embeds": "false"}, "guidance_embeds must be true or false; got 'false'"),
        ({"guidance_embeds": None}, "guidance_embeds must be true or false"),
        ({"in_channels": float("nan")}, "in_channels must be a whole number"),
        ({"patch_size": True}, "patch_size must be a whole number"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, message):
    values = {"_class_name": "FluxTransformer2DModel", **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_no_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(WeightsError, match=r"config\.json"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (ODD, "mlp_ratio=2.5"),
        (dit_config("DiT-S/2"), "time_frequency_shift=0"),
        (dit_config("DiT-S/2", null_class=False, time_frequency_shift=1), "null_class=False"),
    ],
)
def test_models_that_diffusers_cannot_express(tmp_path, config, setting):
    with pytest.raises(WeightsError, match=f"no setting for {setting}"):
        save_params(tmp_path / "a", abstract_params(config), config)
    assert list(tmp_path.iterdir()) == []


def test_out_channels_written_out(saved, tmp_path):
    """Equal to in_channels or left out: the same model."""
    written = replace(FLUX, out_channels=6)
    (tmp_path / "config.json").write_text(config_json(written, sample_size=8))
    assert read_config(tmp_path, compute_dtype="float32") == FLUX
    assert_equal(load_params(saved / "flux_diffusers", written), draw(FLUX))
