"""Low-rank adapters: what they compute, diffusers' names for them, and their files."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxdit.models import DiT, DiTConfig, ImageTextRows, MMDiT, MMDiTConfig
from jaxdit.training import merged
from jaxdit.weights import DEFAULT_TARGETS, Lora, WeightsError, add_lora, load_lora, merge_lora, save_lora
from tests.jaxdit.test_mmdit import CONFIG, make_sequences, random_params
from tests.oracles_models import relative_error, segment_attention

LORA = Lora(rank=3, alpha=6.0)
DIT = DiTConfig(width=24, depth=2, num_heads=2, patch_size=2, num_classes=3, compute_dtype="float32")


def with_adapters(config, lora=LORA, make=MMDiT):
    """(graph, parameters) of a model whose adapters' b are not zero."""

    def module():
        model = make(config, rngs=nnx.Rngs(0))
        add_lora(model, config, lora, rngs=nnx.Rngs(1))
        return model

    abstract = nnx.eval_shape(module)
    rng = np.random.default_rng(3)
    params = nnx.to_pure_dict(nnx.state(abstract, nnx.LoRAParam))
    adapters = jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape).astype(np.float32), params)
    return nnx.graphdef(abstract), adapters


def names_of(config, lora=LORA, tmp_path=None, make=MMDiT):
    _, adapters = with_adapters(config, lora, make)
    save_lora(tmp_path / "lora", adapters, config, lora)
    return load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")


def output(graph, params, rows, ids):
    return nnx.merge(graph, params)(rows, attention=segment_attention(ids))


def packed_rows():
    first = make_sequences()[0]
    n_img, n_txt = len(first.img), len(first.txt)
    values = ImageTextRows(
        img=first.img.astype(np.float32),
        img_segment_ids=np.ones(n_img, np.int32),
        img_positions=first.img_pos.astype(np.int32),
        txt=first.txt.astype(np.float32),
        txt_segment_ids=np.ones(n_txt, np.int32),
        txt_positions=first.txt_pos.astype(np.int32),
        time=np.array([first.time], np.float32),
        pooled=first.vector[None].astype(np.float32),
        guidance=np.array([first.guidance], np.float32),
    )
    return jax.tree.map(jnp.asarray, values), np.ones(n_txt + n_img, np.int32)


@pytest.mark.parametrize(
    "targets", [DEFAULT_TARGETS, ("to_q", "proj_mlp"), ("attn.to_v", "ff.net.2", "norm.linear")]
)
def test_adapters_and_merged_kernels_compute_the_same(targets):
    lora = Lora(rank=3, alpha=6.0, targets=targets)
    graph, adapters = with_adapters(CONFIG, lora)
    base = random_params(CONFIG)
    rows, ids = packed_rows()
    adapted = jax.jit(lambda p: output(graph, p, rows, ids))(merged(base, adapters))
    plain_graph = nnx.graphdef(nnx.eval_shape(lambda: MMDiT(CONFIG, rngs=nnx.Rngs(0))))
    plain = jax.jit(lambda p: output(plain_graph, p, rows, ids))
    assert relative_error(adapted, plain(merge_lora(merged(base, adapters), CONFIG, lora))) < 1e-5
    assert relative_error(adapted, plain(base)) > 1e-2


def test_a_fresh_adapter_changes_nothing():
    def module():
        model = MMDiT(CONFIG, rngs=nnx.Rngs(0))
        add_lora(model, CONFIG, LORA, rngs=nnx.Rngs(1))
        return nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))

    adapters = jax.jit(module)()
    graph, _ = with_adapters(CONFIG)
    rows, ids = packed_rows()
    base = random_params(CONFIG)
    plain = nnx.graphdef(nnx.eval_shape(lambda: MMDiT(CONFIG, rngs=nnx.Rngs(0))))
    adapted = jax.jit(lambda p: output(graph, p, rows, ids))(merged(base, adapters))
    assert relative_error(adapted, jax.jit(lambda p: output(plain, p, rows, ids))(base)) < 1e-6
    first = adapters["double_blocks"]["img"]["qkv"]["adapter"]["parts"]["attn_to_q"]["a"]
    assert first.shape == (2, 24, 3)
    assert np.abs(first).max() <= 24**-0.5
    assert np.std(first) > 0.5 * 24**-0.5


def test_names_in_the_file(tmp_path):
    found = names_of(CONFIG, tmp_path=tmp_path)
    blocks = {"transformer.transformer_blocks.0", "transformer.transformer_blocks.1"}
    blocks |= {"transformer.single_transformer_blocks.0"}
    assert {".".join(name.split(".")[:3]) for name in found} == blocks
    double = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"]
    double += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
    double += ["ff_context.net.0.proj", "ff_context.net.2"]
    single = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"]
    assert len(found) == 2 * (2 * len(double) + len(single))
    for name in double:
        assert f"transformer.transformer_blocks.1.{name}.lora_A.weight" in found
    assert found["transformer.single_transformer_blocks.0.proj_out.lora_A.weight"].shape == (3, 120)
    assert found["transformer.single_transformer_blocks.0.proj_out.lora_B.weight"].shape == (24, 3)
    assert found["transformer.single_transformer_blocks.0.proj_mlp.lora_B.weight"].shape == (96, 3)


def test_the_file_stands_alone(tmp_path):
    """A reader that knows no alpha computes the same product."""
    _, adapters = with_adapters(CONFIG)
    found = names_of(CONFIG, tmp_path=tmp_path)
    pair = adapters["single_blocks"]["linear1"]["adapter"]["parts"]["proj_mlp"]
    a, b = (found[f"transformer.single_transformer_blocks.0.proj_mlp.lora_{x}.weight"] for x in "AB")
    np.testing.assert_allclose(b @ a, LORA.scale * (pair["a"][0] @ pair["b"][0]).T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [Lora(rank=4), Lora(rank=3, alpha=6.0), Lora(rank=2, targets=("to_k",))])
@pytest.mark.parametrize(("config", "make"), [(CONFIG, MMDiT), (DIT, DiT)])
def test_round_trip(tmp_path, lora, config, make):
    _, adapters = with_adapters(config, lora, make)
    save_lora(tmp_path / "a", adapters, config, lora)
    loaded = load_lora(tmp_path / "a", config, lora)
    assert jax.tree.structure(loaded) == jax.tree.structure(adapters)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)


def test_files_of_others(tmp_path):
    """Without the prefix, in bfloat16, and with alphas of their own."""
    import ml_dtypes

    tensors = {
        name.removeprefix("transformer."): value
        for name, value in names_of(CONFIG, tmp_path=tmp_path).items()
    }
    alphas = {name.replace(".lora_A.weight", ".alpha"): np.float32(9) for name in tensors if "lora_A" in name}
    halves = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    save_file(
        {**halves, **{name: np.asarray(value) for name, value in alphas.items()}}, tmp_path / "b.safetensors"
    )
    loaded = load_lora(tmp_path / "b.safetensors", CONFIG, LORA)
    _, adapters = with_adapters(CONFIG)
    path = ("double_blocks", "txt", "proj", "adapter", "parts", "attn_to_add_out", "b")
    ours, theirs = loaded, adapters
    for name in path:
        ours, theirs = ours[name], theirs[name]
    # There alpha / rank is 3, and in the file itself 2 is in the values already.
    np.testing.assert_allclose(ours, 3 * theirs, rtol=1e-2)


def set_alpha(value):
    return lambda t: t.__setitem__("transformer.transformer_blocks.0.attn.to_q.alpha", value)


@pytest.mark.parametrize(
    ("metadata", "scale"),
    [
        ({"transformer.r": 3, "transformer.lora_alpha": 12}, 4.0),
        ({"transformer.r": 3, "transformer.lora_alpha": 3, "transformer.rank_pattern": {}}, 1.0),
        ({"r": 3, "lora_alpha": 1.5, "use_rslora": False}, 0.5),
    ],
)
def test_alpha_in_the_header(tmp_path, metadata, scale):
    """As diffusers' training scripts write it; without alpha tensors."""
    tensors = names_of(CONFIG, tmp_path=tmp_path)
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(metadata)}
    save_file(tensors, tmp_path / "b.safetensors", metadata=header)
    plain = load_lora(tmp_path / "lora", CONFIG, LORA)
    loaded = load_lora(tmp_path / "b.safetensors", CONFIG, LORA)
    path = ("single_blocks", "linear2", "adapter", "parts", "proj_out", "b")
    for name in path:
        plain, loaded = plain[name], loaded[name]
    np.testing.assert_allclose(loaded, scale * plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"transformer.alpha_pattern": {"to_q": 3}}', "alpha_pattern, which are not known here"),
        ('{"transformer.use_rslora": true}', "use_rslora"),
        ('{"transformer.lora_alpha": "many"}', "lora_alpha must be a positive number"),
        ("[", "lora_adapter_metadata cannot be read"),
        *[
            (f'{{"r": {rank}, "lora_alpha": 6}}', "r in its header must be the rank of its tensors, 3; got")
            for rank in ("0", "null", '"3"', "-3", "true", "3.0", "6", "Infinity")
        ],
        *[
            (f'{{"lora_alpha": {alpha}}}', "lora_alpha must be a positive number")
            for alpha in ("true", "null", "1" + "0" * 400)
        ],
    ],
)
def test_headers_that_are_refused(tmp_path, metadata, message):
    tensors = names_of(CONFIG, tmp_path=tmp_path)
    save_file(tensors, tmp_path / "b.safetensors", metadata={"lora_adapter_metadata": metadata})
    with pytest.raises(WeightsError, match=message):
        load_lora(tmp_path / "b.safetensors", CONFIG, LORA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.popitem(), "1 missing"),
        (
            lambda t: t.__setitem__("transformer.x.lora_A.weight", np.zeros((3, 2), np.float32)),
            "1 not of this model",
        ),
        (lambda t: t.update({n: v[:2] for n, v in t.items() if "lora_A" in n}), "of another shape"),
        (lambda t: t.update({"transformer.nonsense.alpha": np.ones(1, np.float32)}), "1 not of this model"),
        (set_alpha(np.full(1, np.nan, np.float32)), "not finite|must be a positive number"),
        (set_alpha(np.zeros(1, np.float32)), "must be a positive number; got 0.0"),
        (set_alpha(np.ones(2, np.float32)), "must be one number"),
        (lambda t: next(iter(t.values())).__setitem__((0, 0), np.nan), "not finite"),
    ],
)
def test_other_adapters_are_refused(tmp_path, change, message):
    tensors = names_of(CONFIG, tmp_path=tmp_path)
    change(tensors)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()}, tmp_path / "b.safetensors"
    )
    with pytest.raises(WeightsError, match=message):
        load_lora(tmp_path / "b.safetensors", CONFIG, LORA)


@pytest.mark.parametrize(
    "targets", [("to_x",), ("to_q", "proj_outt"), ("transformer_blocks.7.attn.to_q",), ()]
)
def test_unknown_targets_are_refused(targets):
    with pytest.raises(WeightsError, match=r"names of the model's linear layers.*attn.to_q"):
        with_adapters(CONFIG, Lora(rank=2, targets=targets))


def test_default_targets_of_another_model_are_named():
    with pytest.raises(WeightsError, match="got add_q_proj, to_add_out"):
        with_adapters(DIT, Lora(rank=2, targets=("to_add_out", "add_q_proj")), make=DiT)


@pytest.mark.parametrize(
    "lora", [Lora(rank=2, alpha=6.0), Lora(rank=3, alpha=6.0, targets=("to_q",))], ids=["rank", "targets"]
)
def test_adapters_of_other_sizes_are_neither_saved_nor_merged(tmp_path, lora):
    """They would be scaled by a rank that they do not have, or dropped."""
    _, adapters = with_adapters(CONFIG)
    for use in (
        lambda: save_lora(tmp_path / "a", adapters, CONFIG, lora),
        lambda: merge_lora(adapters, CONFIG, lora),
    ):
        with pytest.raises(WeightsError, match=r"adapter.parts.* of the parameters has shape"):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_adapters_that_are_not_finite_are_not_saved(tmp_path, value):
    """Or are not once alpha is multiplied in."""
    _, adapters = with_adapters(CONFIG)
    with pytest.raises(WeightsError, match=r"lora_[AB].weight has values that are not finite"):
        save_lora(tmp_path / "a", jax.tree.map(lambda x: x * 0 + np.float32(value), adapters), CONFIG, LORA)


@pytest.mark.parametrize(
    "values",
    [
        {"rank": 0},
        {"rank": True},
        *({"rank": 2, "alpha": alpha} for alpha in (0.0, float("nan"), True, 10**400)),
    ],
)
def test_sizes_are_checked(values):
    with pytest.raises(ValueError, match="rank and alpha must be positive"):
        Lora(**values)


@pytest.mark.parametrize("targets", ["to_q", None, (1,)])
def test_targets_are_a_list_of_texts(targets):
    with pytest.raises(ValueError, match="targets must be a list of texts"):
        inspect.unwrap(Lora.__init__)(object.__new__(Lora), rank=2, targets=targets)


def test_models_without_a_kind_of_block(tmp_path):
    single_only = MMDiTConfig(
        in_channels=6,
        text_channels=7,
        pooled_channels=4,
        width=24,
        num_heads=2,
        num_double_blocks=0,
        num_single_blocks=2,
        axes_dim=(0, 6, 6),
        compute_dtype="float32",
    )
    names = names_of(single_only, tmp_path=tmp_path)
    assert all(name.startswith("transformer.single_transformer_blocks.") for name in names)
