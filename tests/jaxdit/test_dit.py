"""DiT on packed rows against Peebles & Xie's computation on each image by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdit.encoders import patch_positions
from jaxdit.models import DiT, DiTConfig, ImageLabelRows, dit_config, scan_layers
from tests.oracles_models import (
    Sequence,
    dit_forward,
    dit_names,
    masked_attention,
    relative_error,
    segment_attention,
)

TOLERANCE = 1e-5
FIELDS = {
    "width": 24,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 2,
    "channels": 3,
    "num_classes": 5,
    "compute_dtype": "float32",
}
CONFIG = DiTConfig(**FIELDS)
GRIDS = ((2, 3), (1, 1), (4, 2))  # height and width in tokens: landscape, a single token, portrait
LABELS = (2, 5, 0)  # 5 is the null class
STEPS = (999, 0, 333)  # 0.333 in float32 times 1000 is not 333


def random_params(config: DiTConfig) -> dict:
    model = nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        scale = 0.7 / np.sqrt(leaf.shape[-2]) if path[-1].key == "kernel" else 0.3
        return jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def build(config: DiTConfig, params: dict) -> DiT:
    graph, _ = nnx.split(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, params)


def make_sequences() -> list[Sequence]:
    rng = np.random.default_rng(0)
    empty = np.zeros((0, 1))
    return [
        Sequence(
            img=rng.normal(size=(h * w, CONFIG.in_channels)),
            img_pos=np.stack([np.zeros(h * w), *np.divmod(np.arange(h * w), w)], axis=1),
            txt=empty,
            txt_pos=empty,
            time=float(step),
            vector=label,
        )
        for (h, w), label, step in zip(GRIDS, LABELS, STEPS, strict=True)
    ]


def pack(sequences: list[Sequence], order=(1, 2, 0), fill: float = 0.0, pad: int = 4) -> ImageLabelRows:
    """Sequences one after the other, then padding."""
    img = np.concatenate([*(sequences[s].img for s in order), np.full((pad, CONFIG.in_channels), fill)])
    pos = np.concatenate([*(sequences[s].img_pos for s in order), np.zeros((pad, 3))])
    ids = np.concatenate([*(np.full(len(sequences[s].img), s + 1) for s in order), np.zeros(pad)])
    return ImageLabelRows(
        img=jnp.asarray(img, jnp.float32),
        img_segment_ids=jnp.asarray(ids, jnp.int32),
        img_positions=jnp.asarray(pos, jnp.int32),
        time=jnp.asarray([s.time for s in sequences], jnp.float32) / 1000,
        labels=jnp.asarray([s.vector for s in sequences], jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def run(config, params, rows, policy="none"):
    attention = masked_attention(rows.img_segment_ids)
    return build(config, params)(rows, attention=attention, layer_scan=scan_layers(policy))


def reference(params, sequence, xp=np):
    named = dit_names(params)
    if xp is np:
        named = {name: np.asarray(value, np.float64) for name, value in named.items()}
    return dit_forward(named, sequence, heads=CONFIG.num_heads, xp=xp)


def test_packed_equals_each_image_by_itself():
    params, sequences = random_params(CONFIG), make_sequences()
    for rows in (pack(sequences), pack(sequences, order=(0, 1, 2), fill=np.nan)):
        out = run(CONFIG, params, rows)
        assert (out.shape, out.dtype) == ((rows.img.shape[0], 2 * CONFIG.in_channels), jnp.float32)
        for s, sequence in enumerate(sequences):
            mine = np.asarray(out)[np.asarray(rows.img_segment_ids) == s + 1]
            assert relative_error(mine, reference(params, sequence)) < TOLERANCE
        assert not np.any(np.asarray(out)[np.asarray(rows.img_segment_ids) == 0])


def test_gradients_equal_those_of_single_images():
    params, sequences = random_params(CONFIG), make_sequences()
    rows = pack(sequences)

    def packed(params):
        return jnp.sum(jnp.square(run(CONFIG, params, rows, "full")))

    def single(params):
        total = 0.0
        for s in sequences:
            out = reference(params, s._replace(img=jnp.asarray(s.img, jnp.float32)), jnp)
            total += jnp.sum(jnp.square(out))
        return total

    value, grads = jax.jit(jax.value_and_grad(packed))(params)
    # The reference is an unrolled loop; optimising it would be most of this file's time.
    quick = {"xla_backend_optimization_level": 0}
    expected, expected_grads = jax.jit(jax.value_and_grad(single), compiler_options=quick)(params)
    assert abs(value - expected) < TOLERANCE * abs(expected)
    errors = jax.tree.map(relative_error, grads, expected_grads)
    assert max(jax.tree.leaves(errors)) < TOLERANCE, errors


def test_bfloat16_computes_in_bfloat16_and_stays_close():
    config = DiTConfig(**{**FIELDS, "compute_dtype": "bfloat16"})
    params, rows = random_params(config), pack(make_sequences())
    seen = set()

    def attention(q, k, v):
        seen.update({q.dtype, k.dtype, v.dtype})
        return masked_attention(rows.img_segment_ids)(q, k, v)

    out = jax.jit(lambda p: build(config, p)(rows, attention=attention))(params)
    assert out.dtype == jnp.float32
    assert seen == {jnp.dtype("bfloat16")}
    assert 0 < relative_error(out, run(CONFIG, params, rows)) < 2e-2


def test_initial_model_predicts_zero():
    model = nnx.jit(lambda: DiT(CONFIG, rngs=nnx.Rngs(0)))()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert not np.any(np.asarray(run(CONFIG, params, pack(make_sequences()))))
    assert params["label_in"].shape == (6, 24)
    assert 0.015 < np.std(np.asarray(params["label_in"])) < 0.025
    bound = np.sqrt(6 / (12 + 24))  # Xavier on the flattened patch
    assert 0.9 * bound < np.abs(np.asarray(params["img_in"]["kernel"])).max() <= bound


def test_a_label_outside_the_table_is_loud():
    params, rows = random_params(CONFIG), pack(make_sequences())
    attention = segment_attention(rows.img_segment_ids)  # shares nothing between sequences, not even 0 * NaN
    rows = rows._replace(labels=rows.labels.at[0].set(6))
    out = np.asarray(jax.jit(lambda rows: build(CONFIG, params)(rows, attention=attention))(rows))
    first = np.asarray(rows.img_segment_ids) == 1
    assert np.all(np.isnan(out[first]))
    assert not np.any(np.isnan(out[~first]))


def test_positions_of_a_published_grid_are_the_row_major_ones():
    positions = patch_positions((1, 3, 2))
    np.testing.assert_array_equal(positions[:, 1:], [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])


# Published totals include the fixed position table of a 32 x 32 latent: (32 / patch)^2 * width.
@pytest.mark.parametrize(("name", "table", "published"), [("DiT-XL/2", 256 * 1152, 675_129_632)])
def test_dit_has_the_published_number_of_parameters(name, table, published):
    config = dit_config(name)
    model = nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0)))
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert total + table == published


@pytest.mark.parametrize("size", ["S", "B", "L", "XL"])
@pytest.mark.parametrize("patch", [2, 4, 8])
def test_every_published_size_has_its_formula(size, patch):
    config = dit_config(f"DiT-{size}/{patch}")
    d, p = config.width, patch * patch
    block = (6 * d * d + 6 * d) + (3 * d * d + 3 * d) + (d * d + d) + (8 * d * d + 5 * d)
    ends = (4 * p * d + d) + (256 * d + d) + (d * d + d) + 1001 * d
    final = (2 * d * d + 2 * d) + (8 * p * d + 8 * p)
    model = nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0)))
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert total == config.depth * block + ends + final


def test_published_sizes_can_be_changed():
    config = dit_config("DiT-S/4", num_classes=10, learn_sigma=False)
    assert (config.in_channels, config.out_channels, config.num_classes) == (64, 64, 10)


@pytest.mark.parametrize("name", ["DiT-XL/3", "XL/2", "DiT-XXL/2"])
def test_unknown_size_is_refused_with_the_list(name):
    with pytest.raises(ValueError, match=r"one of DiT-S/2, .*DiT-XL/8; got name="):
        dit_config(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth must be at least 1; got depth=0"),
        ({"num_heads": 5}, "must be an even whole number; got width=24, num_heads=5"),
        ({"width": 30, "num_heads": 3}, "width must be a multiple of 4 .*; got width=30. Use 32"),
        ({"mlp_ratio": 0.01}, r"mlp_ratio \* width must be at least 1"),
        ({"compute_dtype": "int8"}, "one of bfloat16, float32"),
        ({"time_channels": 7}, "time_channels must be even"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DiTConfig(**{**FIELDS, **change})
