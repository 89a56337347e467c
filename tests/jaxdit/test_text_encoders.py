"""T5's and CLIP's text encoders: against oracles in NumPy, masks and padding, pooling, sharded layers, bad input."""

import json
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxdit._sharding import (
    gather_unstacked,
    layer_scan_for,
    param_shardings,
    param_specs,
    shard_axes,
)
from jaxdit.encoders import CLIP_L, T5_XXL, ClipTextConfig, ClipTextEncoder, T5Config, T5Encoder
from jaxdit.encoders._t5 import relative_buckets
from jaxdit.encoders._text_attention import attend, check_tokens
from jaxdit.training import module_params
from jaxdit.weights import abstract_params, load_params, read_config
from parallel import DATA_AXES, data_mesh
from tests.oracles_encoders import _bucket, clip_oracle, t5_oracle
from tests.parity.text_cases import TEXT_CASES, TextCase, captions_of, write_encoder
from tests.parity.text_ours import encoder_of

F32, BF16 = 1e-5, 2e-2
CASES = {case.name: case for case in TEXT_CASES if case.recorded or case.name == "t5_buckets"}
T5, CLIP = CASES["t5_small"], CASES["clip_small"]
DEFAULTS = {
    "t5": {
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
    },
    "clip": {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of every case's encoder, by the case's name."""
    root = tmp_path_factory.mktemp("encoders")
    for case in CASES.values():
        write_encoder(case, root / case.name)
    return root


# Compiled once for each encoder and mask or none, as all batches of a case have one shape.
loaded = lru_cache(encoder_of)
run = nnx.jit(lambda model, ids, mask: model(ids, mask=mask))


def encode(folder, ids, mask=None, compute_dtype="float32"):
    return run(loaded(folder, compute_dtype), jnp.asarray(ids), None if mask is None else jnp.asarray(mask))


def close(actual, expected, tolerance):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def expected_of(case, folder, captions, masks):
    """(features, pooled) by the oracle; T5 has no pooled vectors."""
    tensors, config = load_file(folder / "model.safetensors"), {**DEFAULTS[case.kind], **case.config}
    oracle = t5_oracle if case.kind == "t5" else clip_oracle
    found = [oracle(tensors, config, *pair) for pair in zip(captions.ids, masks, strict=True)]
    if case.kind == "t5":
        return np.stack(found), None
    return tuple(np.stack(values) for values in zip(*found, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_features_are_those_of_the_oracle(folders, name, masked):
    case, captions = CASES[name], captions_of(CASES[name])
    found = encode(folders / name, captions.ids, captions.mask if masked else None)
    features, pooled = found if case.kind == "clip" else (found, None)
    expected = expected_of(
        case, folders / name, captions, captions.mask if masked else [None] * len(captions.ids)
    )
    assert features.dtype == jnp.float32
    close(features, expected[0], F32)
    if pooled is not None:
        close(pooled, expected[1], F32)


@pytest.mark.parametrize("case", [T5, CLIP], ids=lambda case: case.name)
def test_bfloat16(folders, case):
    ids = captions_of(case).ids
    exact, rounded = (encode(folders / case.name, ids, None, dtype) for dtype in ("float32", "bfloat16"))
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        assert a.dtype == jnp.float32
        close(a, b, BF16)


def test_padding_is_attended_to_unless_it_is_masked(folders):
    """T5: tokens of padding, and their number, move nothing behind a mask; without one, as FLUX.1 has it, they do."""
    captions = captions_of(T5)
    row, length = 1, T5.lengths[1]
    alone = encode(folders / T5.name, captions.ids[row : row + 1, :length])[0]
    ids = captions.ids.copy()
    ids[row, length:] = 17
    close(encode(folders / T5.name, ids, captions.mask)[row, :length], alone, F32)
    assert np.abs(encode(folders / T5.name, ids)[row, :length] - alone).max() > 0.1


def test_what_follows_the_end_token_does_not_change_the_pooled_vector(folders):
    case = CASES["clip_gelu"]
    captions = captions_of(case)
    ids = captions.ids.copy()
    ids[~captions.mask] = 17
    close(encode(folders / case.name, ids).pooled, encode(folders / case.name, captions.ids).pooled, F32)


def test_a_caption_without_a_token_to_keep_is_finite(folders):
    captions = captions_of(T5)
    mask = captions.mask.copy()
    mask[2] = False
    found = np.asarray(encode(folders / T5.name, captions.ids, mask))
    assert np.isfinite(found).all()
    expected = encode(folders / T5.name, captions.ids, captions.mask)
    close(np.delete(found, 2, 0), np.delete(np.asarray(expected), 2, 0), F32)


@pytest.mark.parametrize("wrong", [-1, 40, 2**30])
@pytest.mark.parametrize("case", [T5, CLIP], ids=lambda case: case.name)
def test_ids_that_are_not_in_the_table_give_nan_and_no_others_features(folders, case, wrong):
    captions = captions_of(case)
    ids = captions.ids.copy()
    ids[1, 3] = wrong
    found, expected = (jax.tree.leaves(encode(folders / case.name, x))[0] for x in (ids, captions.ids))
    assert np.isnan(found[1, 3]).all()
    close(np.delete(found, 1, 0), np.delete(expected, 1, 0), F32)


def test_a_caption_without_its_end_token_has_no_pooled_vector(folders):
    case = CASES["clip_gelu"]
    ids = captions_of(case).ids.copy()
    ids[1][ids[1] == 38] = 5
    pooled = np.asarray(encode(folders / case.name, ids).pooled)
    assert np.isnan(pooled[1]).all()
    assert np.isfinite(np.delete(pooled, 1, 0)).all()


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 2), (16, 64), (64, 512)])
def test_buckets_of_distances(num_buckets, max_distance):
    length = 600
    found = relative_buckets(length, num_buckets, max_distance)
    distances = range(-length + 1, length)
    np.testing.assert_array_equal(found, [_bucket(d, num_buckets, max_distance) for d in distances])
    assert relative_buckets(1, num_buckets, max_distance).tolist() == [0]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_blocks_of_queries(monkeypatch, causal):
    """Blocks that divide the length and that do not, of one query, of all."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 13, 3, 4)), jnp.float32) for _ in range(3))
    bias = jnp.asarray(rng.standard_normal((3, 25)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 13)) < 0.7)

    def by_blocks():
        return jax.jit(lambda *args: attend(*args, scale=0.5, bias=bias, mask=mask, causal=causal))(q, k, v)

    expected = by_blocks()
    for rows in (0.5, 1, 5, 13):
        monkeypatch.setattr("jaxdit.encoders._text_attention._SCORE_BYTES", int(rows * 4 * 2 * 3 * 13))
        close(by_blocks(), expected, F32)


def test_scores_of_long_batches_do_not_exist_at_once():
    batch, length, num_heads, head_dim = 16, 512, 32, 8
    x = jax.ShapeDtypeStruct((batch, length, num_heads, head_dim), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((num_heads, 2 * length - 1), jnp.float32)

    def run(q, k, v, bias):
        return attend(q, k, v, scale=1.0, bias=bias)

    scores = 4 * batch * num_heads * length**2
    temporary = jax.jit(run).lower(x, x, x, bias).compile().memory_analysis().temp_size_in_bytes
    assert scores == 512 << 20
    assert temporary < 400 << 20


WIDE = TextCase(
    "wide",
    "t5",
    {
        "vocab_size": 40,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 3,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    },
    (5, 9, 12, 7, 12, 3, 4, 1),
    12,
)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_sharded_layers_are_gathered_one_by_one(tmp_path, shards):
    """Loaded onto shards, run inside shard_map on captions spread over devices."""
    write_encoder(WIDE, tmp_path)
    captions = captions_of(WIDE)
    ids, mask = jnp.asarray(captions.ids), jnp.asarray(captions.mask)
    config = read_config(tmp_path, compute_dtype="float32")
    mesh = data_mesh(jax.devices(), shards=shards)
    axes = shard_axes(abstract_params(config), shards)
    params = load_params(tmp_path, config, shardings=param_shardings(axes, mesh))
    kernel = params["blocks"]["qkv"]["kernel"]
    assert kernel.addressable_shards[0].data.size * shards == kernel.size
    graph = nnx.graphdef(nnx.eval_shape(lambda: T5Encoder(config, rngs=nnx.Rngs(0))))
    scan = layer_scan_for(axes, mesh, remat="full", dtype=jnp.float32)

    def device(params, ids, mask):
        return nnx.merge(graph, gather_unstacked(params, axes))(ids, mask=mask, layer_scan=scan)

    program = jax.jit(
        jax.shard_map(
            device,
            mesh=mesh,
            in_specs=(param_specs(axes), P(DATA_AXES), P(DATA_AXES)),
            out_specs=P(DATA_AXES),
            check_vma=False,
        )
    )
    close(program(params, ids, mask), encode(tmp_path, ids, mask), F32)
    # By the compiler, without shard_map.
    close(run(nnx.merge(graph, params), ids, mask), encode(tmp_path, ids, mask), F32)


@pytest.mark.parametrize(("config", "count"), [(T5_XXL, 4_762_310_656), (CLIP_L, 123_060_480)])
def test_published_sizes(config, count):
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract_params(config))) == count


def test_initial_parameters_are_finite_and_of_the_shapes_promised():
    tiny = T5Config(vocab_size=9, width=8, head_dim=4, num_heads=2, mlp_width=8, depth=2)
    small = ClipTextConfig(vocab_size=9, width=8, num_heads=2, mlp_width=8, depth=2, eos_id=2)
    for kind, config in ((T5Encoder, tiny), (ClipTextEncoder, small)):
        model = kind(config, rngs=nnx.Rngs(0))
        jax.tree.map(
            lambda a, b: np.testing.assert_equal(a.shape, b.shape),
            module_params(model),
            abstract_params(config),
        )
        assert all(
            np.isfinite(x).all() for x in jax.tree.leaves(run(model, jnp.zeros((2, 3), jnp.int32), None))
        )


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (T5_XXL, {"compute_dtype": "float16"}, "compute_dtype must be one of .* activations of T5 overflow"),
        (CLIP_L, {"compute_dtype": "float16"}, "compute_dtype must be one of bfloat16, float32"),
        (T5_XXL, {"activation": "gated-silu"}, "activation must be one of gated-gelu, relu"),
        (CLIP_L, {"activation": "relu"}, "activation must be one of quick_gelu, gelu"),
        (T5_XXL, {"depth": 0}, "depth must be at least 1; got depth=0"),
        (CLIP_L, {"max_length": 0}, "max_length must be at least 1"),
        (T5_XXL, {"num_buckets": 3}, "num_buckets must be even and at least 4"),
        (T5_XXL, {"num_buckets": 2}, "num_buckets must be even and at least 4"),
        (T5_XXL, {"max_distance": 8}, "max_distance above a quarter of it"),
        (CLIP_L, {"num_heads": 5}, "num_heads must divide width; got width=768, num_heads=5"),
    ],
)
def test_configs_that_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)
    replace(T5_XXL, num_buckets=4, max_distance=2)


def test_inputs_that_are_refused(folders):
    ids, mask = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)
    check_tokens("T5Encoder", ids, mask)
    with pytest.raises(TypeError, match=r"T5Encoder: mask must be boolean, True = token; got dtype=int32"):
        check_tokens("T5Encoder", ids, ids)
    with pytest.raises(TypeError, match=r"ids must be integers; got dtype=float32"):
        check_tokens("T5Encoder", jnp.zeros((2, 3)), None)
    with pytest.raises(ValueError, match=r"mask must have the shape of ids; got mask \(2, 2\)"):
        check_tokens("T5Encoder", ids, mask[:, :2])
    with pytest.raises(ValueError, match=r"ids must be \(batch, length\).* got shape=\(3,\)"):
        check_tokens("T5Encoder", ids[0], None)
    for case in (T5, CLIP):
        with pytest.raises(ValueError, match=r"ids must be \(batch, length\).* got shape=\(2, 0\)"):
            loaded(folders / case.name)(ids[:, :0])


def test_more_tokens_than_positions(folders):
    encode(folders / CLIP.name, np.zeros((3, 24), np.int32))
    with pytest.raises(ValueError, match=r"at most max_length=24 tokens; got ids of shape \(1, 25\)"):
        loaded(folders / CLIP.name)(jnp.zeros((1, 25), jnp.int32))


def test_settings_of_a_case_are_those_of_its_config(folders):
    values = json.loads((folders / CLIP.name / "config.json").read_text())
    config = read_config(folders / CLIP.name)
    assert (config.width, config.num_heads, config.eos_id) == (values["hidden_size"], 2, 2)
    assert config.compute_dtype == "bfloat16"
