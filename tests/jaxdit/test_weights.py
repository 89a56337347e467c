"""Checkpoints: names against the independent map of the references, round trips to the bit, onto any shards."""

import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from jaxdit.models import FLUX_DEV, FLUX_SCHNELL, DiTConfig, MMDiTConfig, dit_config
from jaxdit.training import param_shardings, shard_axes
from jaxdit.weights import (
    WeightsError,
    abstract_params,
    checkpoint_digest,
    config_json,
    load_params,
    read_config,
    save_params,
)
from jaxdit.weights._tables import table_for
from tests.oracles_models import dit_names, flux_names

FLUX = MMDiTConfig(
    in_channels=6,
    text_channels=7,
    pooled_channels=5,
    width=64,
    num_heads=2,
    num_double_blocks=2,
    num_single_blocks=3,
    axes_dim=(8, 12, 12),
    guidance_embed=True,
    compute_dtype="float32",
)
DIT = DiTConfig(width=64, depth=3, num_heads=2, patch_size=2, num_classes=5, time_frequency_shift=1)
ODD = MMDiTConfig(
    in_channels=6,
    out_channels=4,
    text_channels=7,
    pooled_channels=5,
    width=24,
    num_heads=2,
    num_double_blocks=0,
    num_single_blocks=1,
    axes_dim=(0, 6, 6),
    mlp_ratio=2.5,
)
CONFIGS = {"flux": FLUX, "dit": DIT, "odd": ODD}
CASES = [
    ("flux", "diffusers"),
    ("flux", "original"),
    ("dit", "diffusers"),
    ("dit", "original"),
    ("odd", "original"),
]


def draw(config, dtype=np.float32):
    """Random parameters whose values a 16-bit float holds."""
    rng = np.random.default_rng(0)
    values = lambda leaf: rng.standard_normal(leaf.shape).astype(ml_dtypes.bfloat16).astype(dtype)  # noqa: E731
    return jax.tree.map(values, abstract_params(config))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of every case."""
    root = tmp_path_factory.mktemp("weights")
    for name, layout in CASES:
        save_params(
            root / f"{name}_{layout}", draw(CONFIGS[name]), CONFIGS[name], layout=layout, sample_size=8
        )
    return root


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
    save_params(tmp_path / "a", draw(config), config, layout=layout, dtype=dtype, sample_size=8)
    loaded = load_params(tmp_path / "a", config)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype("float32")}
    save_params(tmp_path / "b", loaded, config, layout=layout, dtype=dtype, sample_size=8)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {path.name for path in (tmp_path / "b").iterdir()}
    for file in names:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_loaded_in_half_precision(saved):
    loaded = load_params(saved / "flux_diffusers", FLUX, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(ml_dtypes.bfloat16)}
    assert_equal(jax.tree.map(lambda x: np.asarray(x, np.float32), loaded), draw(FLUX))


def test_several_files_with_an_index(saved, tmp_path):
    save_params(tmp_path / "parts", draw(FLUX), FLUX, max_file_bytes=100_000)
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


def rewrite(source, target, change):
    """Copy a folder's one file with its tensors changed by `change(dict)`."""
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    change(tensors)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "diffusion_pytorch_model.safetensors")
    return target


def set_tensor(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


PROJ = "transformer_blocks.0.attn.to_q.weight"


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda t: t.pop(PROJ), [f"1 missing: {PROJ} [64, 64]."]),
        (set_tensor("extra", np.zeros(3, np.float32)), ["1 not of this model: extra [3]."]),
        (set_tensor(PROJ, np.zeros((64, 63), np.float32)), [f"{PROJ} [64, 63], needs [64, 64]"]),
        (set_tensor(PROJ, np.zeros((64, 64), np.int32)), ["neither F64, F32, F16 nor BF16", f"{PROJ} I32"]),
        (lambda t: [t.pop(name) for name in list(t) if "single" in name], ["missing", "single", ", ..."]),
    ],
)
def test_checkpoints_of_something_else(saved, tmp_path, monkeypatch, change, messages):
    monkeypatch.setattr("jaxdit.weights._load._Target", None)  # nothing is allocated
    folder = rewrite(saved / "flux_diffusers", tmp_path / "changed", change)
    with pytest.raises(WeightsError) as error:
        load_params(folder, FLUX)
    assert all(message in str(error.value) for message in messages), error.value
    assert len(str(error.value)) < 2000


def test_another_model(saved):
    with pytest.raises(WeightsError, match="is of a DiTConfig, the model is of a MMDiTConfig"):
        load_params(saved / "dit_diffusers", FLUX)
    with pytest.raises(WeightsError, match="is not a checkpoint of this model"):
        load_params(saved / "flux_original", DIT)


def test_copies_that_differ(saved, tmp_path):
    name = "transformer_blocks.2.norm1.emb.timestep_embedder.linear_1.weight"
    folder = rewrite(saved / "dit_diffusers", tmp_path / "a", lambda t: t[name].__setitem__((3, 4), 7))
    with pytest.raises(WeightsError, match=r"transformer_blocks.2.* must equal transformer_blocks.0"):
        load_params(folder, DIT)


def test_a_table_of_positions_that_was_changed(saved, tmp_path):
    tensors = load_file(saved / "dit_original" / "dit.safetensors")
    tensors["pos_embed"][0, 3] += 0.1
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match="pos_embed must be the fixed table"):
        load_params(tmp_path / "a.safetensors", DIT)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_files(saved, tmp_path, keep):
    data = (saved / "flux_original" / "flux1.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:keep])
    with pytest.raises(WeightsError, match=r"cut.safetensors is no complete safetensors file"):
        load_params(tmp_path / "cut.safetensors", FLUX)


def test_a_part_that_is_missing_or_disagrees_with_the_index(tmp_path):
    folder = tmp_path / "parts"
    save_params(folder, draw(FLUX), FLUX, max_file_bytes=100_000)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace(first.name, second.name, 1))
    with pytest.raises(WeightsError, match="the index and the files disagree on 1 tensors"):
        load_params(folder, FLUX)
    index.write_text(text)
    first.rename(tmp_path / "away")
    with pytest.raises(WeightsError, match=f"names files that are not beside it: {first.name}"):
        load_params(folder, FLUX)
    for broken in ("", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        index.write_text(broken)
        with pytest.raises(WeightsError, match="is no index of safetensors files"):
            load_params(folder, FLUX)


def test_pickles_are_never_opened(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(WeightsError, match="is a pickle, which runs code"):
        load_params(tmp_path / "model.bin", FLUX)
    with pytest.raises(WeightsError, match=r"no .safetensors file. Its model.bin are pickles"):
        load_params(tmp_path, FLUX)


def test_what_is_no_checkpoint(saved, tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        load_params(tmp_path / "nowhere", FLUX)
    with pytest.raises(WeightsError, match=r"has no \.safetensors file"):
        load_params(tmp_path, FLUX)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"several checkpoints: a\.safetensors, b\.safetensors"):
        load_params(tmp_path, FLUX)


def test_values_that_are_not_finite(saved, tmp_path):
    folder = rewrite(saved / "flux_diffusers", tmp_path / "a", lambda t: t[PROJ].__setitem__((1, 2), np.nan))
    with pytest.raises(WeightsError, match=f"{PROJ} has values that are not finite"):
        load_params(folder, FLUX)


def test_out_channels_written_out(saved, tmp_path):
    """Equal to in_channels or left out: the same model."""
    from dataclasses import replace

    written = replace(FLUX, out_channels=6)
    (tmp_path / "config.json").write_text(config_json(written, sample_size=8))
    assert read_config(tmp_path, compute_dtype="float32") == FLUX
    assert_equal(load_params(saved / "flux_diffusers", written), draw(FLUX))


def test_what_was_there_stays(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious.txt").write_text("mine")
    save_params(tmp_path / "out", draw(DIT), DIT, sample_size=8)
    assert (tmp_path / "out.partial" / "precious.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]


def test_two_exports_to_one_folder_do_not_mix(tmp_path, monkeypatch):
    """The second finishes while the first writes: the first says so, and the second's folder stays whole."""
    from jaxdit.weights import _write

    write = _write._save
    again = []

    def save(tensors, file):
        write(tensors, file)
        if not again:
            again.append(True)
            save_params(tmp_path / "out", draw(DIT), DIT, sample_size=8)

    monkeypatch.setattr(_write, "_save", save)
    with pytest.raises(OSError, match="not empty"):
        save_params(tmp_path / "out", draw(DIT), DIT, dtype="bfloat16", sample_size=8)
    assert_equal(load_params(tmp_path / "out", DIT), draw(DIT))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_others_may_read_what_was_saved(tmp_path):
    save_params(tmp_path / "out", draw(DIT), DIT, sample_size=8)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


def test_links_are_no_targets(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(WeightsError, match="is a link"):
        save_params(tmp_path / "link", draw(DIT), DIT)


def test_a_digest_tells_checkpoints_apart(saved, tmp_path):
    one = checkpoint_digest(saved / "flux_diffusers")
    assert checkpoint_digest(saved / "flux_diffusers") == one
    changed = rewrite(
        saved / "flux_diffusers", tmp_path / "a", lambda t: [v.__imul__(1.5) for v in t.values()]
    )
    assert checkpoint_digest(changed) != one


def test_what_cannot_be_saved(saved, tmp_path):
    params = draw(DIT)
    with pytest.raises(WeightsError, match="is there already and not empty"):
        save_params(saved / "dit_diffusers", params, DIT)
    for name, value in (("dtype", "int8"), ("layout", "other"), ("max_file_bytes", 0)):
        with pytest.raises(WeightsError, match=f"{name} must be"):
            save_params(tmp_path / "a", params, DIT, **{name: value})
    for layout in ("original", "diffusers"):
        with pytest.raises(WeightsError, match="sample_size must be a multiple of the patch, 2; got 7"):
            save_params(tmp_path / "a", params, DIT, layout=layout, sample_size=7)
    with pytest.raises(WeightsError, match=r"has shape \(3, 256\), the model of the config \(12, 1536\)"):
        save_params(tmp_path / "a", params, dit_config("DiT-S/2"), layout="original")
    params["blocks"]["qkv"]["bias"][1, 2] = 1e6
    with pytest.raises(
        WeightsError, match=r"transformer_blocks.1.attn1.to_q.bias has values that float16 cannot"
    ):
        save_params(tmp_path / "a", params, DIT, dtype="float16")
    assert list(tmp_path.iterdir()) == []
