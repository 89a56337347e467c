"""Autoencoders' checkpoints and config.json: every layout in and out, sharded, and what is refused."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from jaxdit.encoders import FLUX_VAE, SD_VAE, AutoencoderKLConfig
from jaxdit.weights import (
    SaveFormat,
    WeightsError,
    abstract_params,
    config_json,
    load_params,
    read_config,
    save_params,
)
from tests.jaxdit._weights_cases import FLUX, assert_equal, draw, rewrite

VAE = AutoencoderKLConfig(
    latent_channels=3, block_out_channels=(4, 8, 8), layers_per_block=1, norm_num_groups=2
)
LAYOUTS = ("diffusers", "original", "diffusers_old", "diffusers_old_convolutions")
MID = "decoder.mid_block.attentions.0."
# One name of each kind in the layouts that have it, with its shape.
NAMES = {
    "diffusers": {
        MID + "to_q.weight": (8, 8),
        MID + "to_out.0.bias": (8,),
        MID + "group_norm.weight": (8,),
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight": (8, 4, 1, 1),
        "decoder.up_blocks.0.upsamplers.0.conv.weight": (8, 8, 3, 3),
        "quant_conv.weight": (6, 6, 1, 1),
    },
    "original": {
        "decoder.mid.attn_1.q.weight": (8, 8, 1, 1),
        "decoder.mid.attn_1.proj_out.bias": (8,),
        "decoder.mid.attn_1.norm.weight": (8,),
        "encoder.down.1.block.0.nin_shortcut.weight": (8, 4, 1, 1),
        "decoder.up.2.upsample.conv.weight": (8, 8, 3, 3),
        "decoder.mid.block_2.norm2.bias": (8,),
        "encoder.norm_out.weight": (8,),
    },
    "diffusers_old": {MID + "query.weight": (8, 8), MID + "proj_attn.bias": (8,)},
    "diffusers_old_convolutions": {
        MID + "value.weight": (8, 8, 1, 1),
        MID + "proj_attn.weight": (8, 8, 1, 1),
    },
}


@pytest.fixture(scope="module")
def saved_vae(tmp_path_factory):
    """A folder of every layout."""
    root = tmp_path_factory.mktemp("autoencoders")
    for layout in LAYOUTS:
        save_params(root / layout, draw(VAE), VAE, SaveFormat(layout=layout, dtype="bfloat16"))
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_and_out(saved_vae, layout):
    (file,) = (saved_vae / layout).glob("*.safetensors")
    tensors = load_file(file)
    assert {name: tensors[name].shape for name in NAMES[layout]} == NAMES[layout]
    assert_equal(load_params(saved_vae / layout, VAE), draw(VAE))


def test_convolutions_keep_their_axes(saved_vae):
    tensors = load_file(saved_vae / "diffusers" / "diffusion_pytorch_model.safetensors")
    kernel = draw(VAE)["decoder"][1]["kernel"]
    there = tensors["decoder.conv_in.weight"].astype(np.float32)
    np.testing.assert_array_equal(there.transpose(2, 3, 1, 0), kernel)


def test_several_files_and_shards(tmp_path, monkeypatch):
    save_params(tmp_path / "vae", draw(VAE), VAE, SaveFormat(max_file_bytes=20_000))
    assert len(list((tmp_path / "vae").glob("*.safetensors"))) > 1
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    shardings = jax.tree.map(
        lambda x: NamedSharding(
            mesh, P(*(None,) * (len(x.shape) - 1), "a" if x.shape[-1] % 2 == 0 else None)
        ),
        abstract_params(VAE),
    )
    monkeypatch.setattr("jaxdit.weights._load._HOST_BYTES", 0)  # updated on the devices, as large ones are
    params = load_params(tmp_path / "vae", VAE, shardings=shardings)
    assert_equal(params, draw(VAE))
    assert params["decoder"][1]["kernel"].sharding.shard_shape((3, 3, 3, 8)) == (3, 3, 3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(MID + "to_q.weight"), rf"1 missing: {MID}to_q.weight \[8, 8\]"),
        (lambda t: t.__setitem__("extra", np.zeros(3, np.float32)), r"1 not of this model: extra \[3\]"),
        (
            lambda t: t.__setitem__("decoder.conv_in.weight", np.zeros((8, 3, 3, 2), np.float32)),
            r"decoder.conv_in.weight \[8, 3, 3, 2\], needs \[8, 3, 3, 3\]",
        ),
    ],
)
def test_checkpoints_of_something_else(saved_vae, tmp_path, change, message):
    folder = rewrite(saved_vae / "diffusers", tmp_path / "changed", change)
    with pytest.raises(WeightsError, match=message):
        load_params(folder, VAE)


def test_files_of_another_kind_of_model(saved_vae):
    with pytest.raises(WeightsError, match="is of a AutoencoderKLConfig, the model is of a MMDiTConfig"):
        load_params(saved_vae / "diffusers", FLUX)
    with pytest.raises(WeightsError, match="layers_per_block=1 there, 2 here"):
        load_params(saved_vae / "diffusers", replace(VAE, layers_per_block=2))


def test_mixed_names_of_the_attention(saved_vae, tmp_path):
    """Most names decide for a layout, and the rest are named."""
    tensors = load_file(saved_vae / "diffusers" / "diffusion_pytorch_model.safetensors")
    tensors[MID + "query.weight"] = tensors.pop(MID + "to_q.weight")
    save_file(tensors, tmp_path / "vae.safetensors")
    with pytest.raises(WeightsError, match=rf"1 missing: {MID}to_q.* 1 not of this model: {MID}query"):
        load_params(tmp_path / "vae.safetensors", VAE)


def test_config_json_of_published_models(tmp_path):
    path = tmp_path / "config.json"
    published = {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": "0.30.0.dev0",
        "act_fn": "silu",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "in_channels": 3,
        "latent_channels": 4,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "out_channels": 3,
        "sample_size": 512,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    }
    path.write_text(json.dumps(published))
    assert read_config(path) == SD_VAE
    flux = {
        "force_upcast": True,
        "latent_channels": 16,
        "latents_mean": None,
        "latents_std": None,
        "mid_block_add_attention": True,
        "sample_size": [1024, 1024],
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    }
    path.write_text(json.dumps({**published, **flux}))
    assert read_config(path) == FLUX_VAE
    path.write_text(json.dumps({**published, "shift_factor": None}))
    assert read_config(path) == SD_VAE
    for config in (FLUX_VAE, SD_VAE, VAE):
        path.write_text(config_json(config, sample_size=32))
        assert read_config(path) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": "gelu"}, "act_fn must be 'silu'"),
        (
            {"up_block_types": ["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]},
            "up_block_types must be UpDecoderBlock2D",
        ),
        (
            {"down_block_types": ["DownEncoderBlock2D"]},
            "down_block_types must be DownEncoderBlock2D for each of",
        ),
        ({"latents_mean": [0.0]}, "settings that this model does not know: {'latents_mean'"),
        ({"block_out_channels": [32, "64"]}, "block_out_channels must be a list of whole numbers"),
        ({"block_out_channels": [32, 65]}, "multiples of norm_num_groups"),
        ({"layers_per_block": 1.5}, "layers_per_block must be a whole number"),
        ({"scaling_factor": "1"}, "scaling_factor must be a number"),
        (
            {"_class_name": "AutoencoderTiny"},
            "_class_name must be .* or AutoencoderKL, or architectures .*; got 'AutoencoderTiny'",
        ),
    ],
)
def test_config_json_of_something_else(tmp_path, change, message):
    values = json.loads(
        config_json(replace(VAE, block_out_channels=(32, 64), norm_num_groups=32), sample_size=8)
    )
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(WeightsError, match=message):
        read_config(tmp_path)
