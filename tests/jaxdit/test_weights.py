"""Checkpoints: names against the independent map of the references, round trips to the bit, onto any shards."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxdit.models import FLUX_DEV, FLUX_SCHNELL, dit_config
from jaxdit.training import param_shardings, shard_axes
from jaxdit.weights import (
    SaveFormat,
    load_params,
    save_params,
)
from jaxdit.weights._tables import table_for
from tests.jaxdit._weights_cases import (
    CASES,
    CONFIGS,
    DIT,
    FLUX,
    assert_equal,
    draw,
)
from tests.oracles_models import dit_names, flux_names


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_round_trip(saved, name, layout):
    assert_equal(load_params(saved / f"{name}_{layout}", CONFIGS[name]), draw(CONFIGS[name]))


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("shape", [(1, 8), (4, 2)])
def test_onto_shards(saved, name, layout, shape):
    mesh = jax.make_mesh(shape, ("replica", "shard"), axis_types=(AxisType.Auto,) * 2)
    expected = draw(CONFIGS[name])
    shardings = param_shardings(shard_axes(expected, shape[1]), mesh)
    loaded = load_params(saved / f"{name}_{layout}", CONFIGS[name], shardings=shardings)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    assert_equal(loaded, expected)


def test_shards_that_cut_fused_projections(saved):
    """Every axis sharded in turn, also the one along which q, k and v are neighbours, and a 2-D cut."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    expected = draw(FLUX)
    for spec in (P(None, None, ("a", "b")), P(None, "a", "b"), P(None, "b")):
        shardings = jax.tree.map(lambda x, spec=spec: NamedSharding(mesh, P()), expected)
        for block, layer in (("double_blocks", "qkv"), ("single_blocks", "linear1")):
            at = shardings[block]["img"] if block == "double_blocks" else shardings[block]
            at[layer]["kernel"] = NamedSharding(mesh, spec)
        assert_equal(load_params(saved / "flux_diffusers", FLUX, shardings=shardings), expected)


@pytest.mark.parametrize(("name", "layout"), CASES[:3])
def test_in_pieces_on_the_devices(saved, monkeypatch, name, layout):
    """What large parameters take: many pieces of a tensor, put together where the shards are."""
    monkeypatch.setattr("jaxdit.weights._files._CHUNK_BYTES", 5000)
    monkeypatch.setattr("jaxdit.weights._load._HOST_BYTES", 20_000)
    mesh = jax.make_mesh((1, 2), ("replica", "shard"), axis_types=(AxisType.Auto,) * 2)
    expected = draw(CONFIGS[name])
    shardings = param_shardings(shard_axes(expected, 2), mesh)
    assert_equal(load_params(saved / f"{name}_{layout}", CONFIGS[name], shardings=shardings), expected)


def test_names_of_the_originals(saved):
    flux = load_file(saved / "flux_original" / "flux1.safetensors")
    expected = flux_names(draw(FLUX))
    assert flux.keys() == expected.keys()
    for name, value in flux.items():
        np.testing.assert_array_equal(value, expected[name], name)
    dit = load_file(saved / "dit_original" / "dit.safetensors")
    expected = dit_names(draw(DIT))
    positions = dit.pop("pos_embed")
    assert positions.shape == (1, 16, 64)
    assert dit.keys() == expected.keys()
    for name, value in dit.items():
        if name == "x_embedder.proj.weight":
            value = value.transpose(0, 2, 3, 1).reshape(value.shape[0], -1)
        np.testing.assert_array_equal(value, expected[name], name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_exported_to_the_bit(saved, tmp_path, name, layout, dtype):
    """Read in a dtype and written in it again: the same bytes, also in the other dtypes of the parameters."""
    config = CONFIGS[name]
    save_params(tmp_path / "a", draw(config), config, SaveFormat(layout=layout, dtype=dtype, sample_size=8))
    loaded = load_params(tmp_path / "a", config)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype("float32")}
    save_params(tmp_path / "b", loaded, config, SaveFormat(layout=layout, dtype=dtype, sample_size=8))
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {path.name for path in (tmp_path / "b").iterdir()}
    for file in names:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_loaded_in_half_precision(saved):
    loaded = load_params(saved / "flux_diffusers", FLUX, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(ml_dtypes.bfloat16)}
    assert_equal(jax.tree.map(lambda x: np.asarray(x, np.float32), loaded), draw(FLUX))


def test_several_files_with_an_index(saved, tmp_path):
    save_params(tmp_path / "parts", draw(FLUX), FLUX, SaveFormat(max_file_bytes=100_000))
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "parts" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert_equal(load_params(tmp_path / "parts", FLUX), draw(FLUX))
    by_index = tmp_path / "parts" / "diffusion_pytorch_model.safetensors.index.json"
    assert_equal(load_params(by_index, FLUX), draw(FLUX))


def test_published_names_and_sizes():
    """As many tensors and parameters as the published files of FLUX.1 have."""
    for config, layout, count in (
        (FLUX_DEV, "original", 780),
        (FLUX_SCHNELL, "original", 776),
        (FLUX_DEV, "diffusers", 1_160),
    ):
        shapes = table_for(config, layout).shapes
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == (
            11_901_408_320 if config.guidance_embed else 11_891_178_560
        )
        assert len(shapes) == count
    shapes = table_for(dit_config("DiT-XL/2"), "original").shapes
    assert shapes["x_embedder.proj.weight"] == (1152, 4, 2, 2)
    assert shapes["final_layer.linear.weight"] == (32, 1152)
