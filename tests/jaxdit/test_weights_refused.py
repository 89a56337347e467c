"""Files that are no checkpoint of the model: truncated, changed, of another model, pickles."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdit.weights import (
    SaveFormat,
    WeightsError,
    checkpoint_digest,
    load_params,
    save_params,
)
from tests.jaxdit._weights_cases import DIT, FLUX, draw, rewrite


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
    save_params(folder, draw(FLUX), FLUX, SaveFormat(max_file_bytes=100_000))
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


@pytest.mark.parametrize(("host_bytes", "dtype"), [(1 << 25, "float16"), (0, "float16"), (0, "float32")])
def test_values_that_the_dtype_cannot_hold(saved, tmp_path, monkeypatch, host_bytes, dtype):
    """Put together on the host, or on devices, where a cast says nothing."""
    monkeypatch.setattr("jaxdit.weights._load._HOST_BYTES", host_bytes)
    wide = set_tensor(PROJ, np.full((64, 64), 1e300 if dtype == "float32" else 1e5))
    folder = rewrite(saved / "flux_diffusers", tmp_path / "a", wide)
    with pytest.raises(WeightsError, match=f"{PROJ} has values that {dtype} cannot hold"):
        load_params(folder, FLUX, dtype=dtype)


def test_values_that_are_not_finite_are_not_saved(tmp_path):
    params = draw(FLUX)
    params["img_in"]["bias"] = params["img_in"]["bias"] * np.nan
    with pytest.raises(WeightsError, match=r"x_embedder.bias has values that are not finite"):
        save_params(tmp_path / "a", params, FLUX)
    assert not list(tmp_path.iterdir())


def test_a_digest_tells_checkpoints_apart(saved, tmp_path):
    one = checkpoint_digest(saved / "flux_diffusers")
    assert checkpoint_digest(saved / "flux_diffusers") == one
    changed = rewrite(
        saved / "flux_diffusers", tmp_path / "a", lambda t: [v.__imul__(1.5) for v in t.values()]
    )
    assert checkpoint_digest(changed) != one
