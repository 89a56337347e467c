"""MMDiT on packed rows against FLUX.1's computation on each sequence by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdit.models import (
    FLUX_DEV,
    FLUX_SCHNELL,
    REMAT_POLICIES,
    ImageTextRows,
    MMDiT,
    MMDiTConfig,
    scan_layers,
)
from tests.oracles_models import (
    Sequence,
    flux_forward,
    flux_names,
    masked_attention,
    relative_error,
    segment_attention,
)

TOLERANCE = 1e-5
# The references are unrolled loops; optimising them would be most of this file's time.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
BF16_TOLERANCE = 2e-2
FIELDS = {
    "in_channels": 6,
    "out_channels": 5,
    "text_channels": 7,
    "pooled_channels": 4,
    "width": 24,
    "num_heads": 2,
    "num_double_blocks": 2,
    "num_single_blocks": 1,
    "axes_dim": (2, 4, 6),
    "guidance_embed": True,
    "compute_dtype": "float32",
}
CONFIG = MMDiTConfig(**FIELDS)
DOUBLE_ONLY = MMDiTConfig(
    **{**FIELDS, "num_single_blocks": 0, "qkv_bias": False, "guidance_embed": False, "axes_dim": (0, 6, 6)}
)
SINGLE_ONLY = MMDiTConfig(**{**FIELDS, "num_double_blocks": 0, "num_single_blocks": 3, "mlp_ratio": 2.5})
# (image tokens, text tokens) of each sequence: no text at all, one image token, a long one.
SIZES = ((5, 3), (1, 0), (9, 2))
ROWS = (18, 8)  # capacities, so with padding
FEW = SIZES[:2]  # for gradients: compiling their reference is what takes time


def random_params(config: MMDiTConfig) -> dict:
    """Parameters without the zeros of the initialisation, which would hide most of the network."""
    model = nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.normal(size=leaf.shape)
        is_kernel = path[-1].key == "kernel"
        return jnp.asarray(0.7 / np.sqrt(leaf.shape[-2]) * values if is_kernel else 0.3 * values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def build(config: MMDiTConfig, params: dict) -> MMDiT:
    graph, _ = nnx.split(nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, params)


def make_sequences(config: MMDiTConfig = CONFIG, sizes=SIZES) -> list[Sequence]:
    rng = np.random.default_rng(0)
    times = (0.125, 0.5, 0.875)  # 1000 t is exact in float32, so float64 means the same time
    return [
        Sequence(
            img=rng.normal(size=(n_img, config.in_channels)),
            img_pos=rng.integers(0, 100, size=(n_img, 3)),
            txt=rng.normal(size=(n_txt, config.text_channels)),
            txt_pos=np.zeros((n_txt, 3), np.int64),
            time=times[i],
            vector=rng.normal(size=config.pooled_channels),
            guidance=1.0 + i if config.guidance_embed else None,
        )
        for i, (n_img, n_txt) in enumerate(sizes)
    ]


def pack(sequences: list[Sequence], *, order=None, sizes=ROWS, fill: float = 0.0) -> ImageTextRows:
    """Packs sequences, rows of both kinds in random order with padding between, up to `sizes` rows."""
    order = list(range(len(sequences))) if order is None else order
    rng = np.random.default_rng(len(order) + order[0])

    def rows(kind: str, size: int):
        values = [getattr(sequences[s], kind) for s in order]
        segment = np.concatenate([np.full(len(v), s + 1) for s, v in zip(order, values, strict=True)])
        position = np.concatenate([getattr(sequences[s], f"{kind}_pos") for s in order])
        pad, shuffle = size - len(segment), rng.permutation(size)
        value = np.concatenate([*values, np.full((pad, values[0].shape[1]), fill)])
        return (
            jnp.asarray(value[shuffle], jnp.float32),
            jnp.asarray(np.concatenate([segment, np.zeros(pad)])[shuffle], jnp.int32),
            jnp.asarray(np.concatenate([position, np.full((pad, 3), 7)])[shuffle], jnp.int32),
        )

    def table(name: str):
        return jnp.asarray(np.stack([np.asarray(getattr(s, name)) for s in sequences]), jnp.float32)

    img, txt = rows("img", sizes[0]), rows("txt", sizes[1])
    guidance = None if sequences[0].guidance is None else table("guidance")
    return ImageTextRows(*img, *txt, time=table("time"), pooled=table("vector"), guidance=guidance)


def tokens_of(out, rows: ImageTextRows, sequences: list[Sequence], s: int) -> np.ndarray:
    """Output rows of a sequence in the order of its tokens, which are recognised by their input."""
    at = np.flatnonzero(np.asarray(rows.img_segment_ids) == s + 1)
    packed, original = np.asarray(rows.img)[at], sequences[s].img.astype(np.float32)
    order = [int(np.flatnonzero((packed == token).all(axis=1))[0]) for token in original]
    return np.asarray(out)[at[order]]


def attention_of(rows: ImageTextRows):
    return masked_attention(jnp.concatenate([rows.txt_segment_ids, rows.img_segment_ids]))


@functools.partial(jax.jit, static_argnums=0)
def run(config: MMDiTConfig, params: dict, rows: ImageTextRows):
    return build(config, params)(rows, attention=attention_of(rows))


def reference(config: MMDiTConfig, params: dict, sequence: Sequence, xp=np):
    named = flux_names(params)
    if xp is np:
        named = {name: np.asarray(value, np.float64) for name, value in named.items()}
    shape = {"heads": config.num_heads, "axes_dim": config.axes_dim, "theta": config.theta}
    return flux_forward(named, sequence, xp=xp, **shape)


def target_of(img):
    """A target per output that depends on the token only, not on where it is packed."""
    return 2 * np.cos(10 * np.asarray(img)[:, : CONFIG.out_channels])


def packed_loss(params, rows, target, policy="none"):
    out = build(CONFIG, params)(rows, attention=attention_of(rows), layer_scan=scan_layers(policy))
    return jnp.sum(jnp.where(rows.img_segment_ids[:, None] > 0, jnp.square(out - target), 0))


@functools.cache
def unpacked_value_and_grads():
    """Loss and gradients from sequences by themselves."""

    def loss(params):
        total = 0.0
        for s in make_sequences(sizes=FEW):
            arrays = {f: jnp.asarray(getattr(s, f), jnp.float32) for f in ("img", "txt", "vector")}
            total += jnp.sum(
                jnp.square(reference(CONFIG, params, s._replace(**arrays), jnp) - target_of(s.img))
            )
        return total

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK_COMPILE)(random_params(CONFIG))


def assert_equals_unpacked(value, grads):
    expected, expected_grads = unpacked_value_and_grads()
    assert abs(value - expected) < TOLERANCE * abs(expected)
    errors = jax.tree.map(relative_error, grads, expected_grads)
    assert max(jax.tree.leaves(errors)) < TOLERANCE, errors


@pytest.mark.parametrize("config", [CONFIG, DOUBLE_ONLY, SINGLE_ONLY], ids=["both", "double", "single"])
def test_packed_equals_each_sequence_by_itself(config):
    params, sequences = random_params(config), make_sequences(config)
    rows = pack(sequences)
    out = run(config, params, rows)
    assert out.dtype == jnp.float32
    for s, sequence in enumerate(sequences):
        expected = reference(config, params, sequence)
        assert relative_error(tokens_of(out, rows, sequences, s), expected) < TOLERANCE
    assert not np.any(np.asarray(out)[np.asarray(rows.img_segment_ids) == 0])


@pytest.mark.full  # "none" and "full" are also covered by the two tests with padding and with two devices
@pytest.mark.parametrize("policy", sorted(REMAT_POLICIES))
def test_gradients_equal_those_of_unpacked_sequences(policy):
    rows = pack(make_sequences(sizes=FEW))
    grad = jax.jit(jax.value_and_grad(packed_loss), static_argnums=3)
    assert_equals_unpacked(*grad(random_params(CONFIG), rows, target_of(rows.img), policy))


def test_gradients_with_padding_which_gives_nothing_and_gets_none():
    params, sequences = random_params(CONFIG), make_sequences(sizes=FEW)
    rows, poisoned = pack(sequences), pack(sequences, fill=np.nan)
    grad = jax.jit(jax.value_and_grad(packed_loss, argnums=(0, 1), allow_int=True))
    value, (param_grads, row_grads) = grad(params, rows, target_of(rows.img))
    other, (other_param_grads, _) = grad(params, poisoned, target_of(rows.img))
    assert value == other
    jax.tree.map(np.testing.assert_array_equal, param_grads, other_param_grads)
    assert_equals_unpacked(value, param_grads)
    for kind in ("img", "txt"):
        is_padding = np.asarray(getattr(rows, f"{kind}_segment_ids")) == 0
        assert not np.any(np.asarray(getattr(row_grads, kind))[is_padding])
        assert np.all(np.any(np.asarray(getattr(row_grads, kind))[~is_padding], axis=1))


def test_a_poisoned_sequence_changes_no_other():
    params, sequences = random_params(CONFIG), make_sequences()
    rows, victim = pack(sequences), 2
    attention = segment_attention(np.concatenate([rows.txt_segment_ids, rows.img_segment_ids]))
    forward = jax.jit(lambda rows: build(CONFIG, params)(rows, attention=attention))
    clean = np.asarray(forward(rows))
    others = np.asarray(rows.img_segment_ids) != victim + 1
    for poison in (np.nan, 1e30):
        bad = sequences[victim]
        bad = bad._replace(img=bad.img * poison, txt=bad.txt * poison, vector=bad.vector * poison)
        dirty = np.asarray(forward(pack([*sequences[:victim], bad])))
        np.testing.assert_array_equal(clean[others], dirty[others])
        assert np.all(clean[~others] != dirty[~others])


def test_order_of_packing_does_not_matter():
    params, sequences = random_params(CONFIG), make_sequences()
    first, second = pack(sequences), pack(sequences, order=[2, 0, 1])
    outs = run(CONFIG, params, first), run(CONFIG, params, second)
    for s in range(len(sequences)):
        one, other = (
            tokens_of(out, rows, sequences, s) for out, rows in zip(outs, (first, second), strict=True)
        )
        assert relative_error(one, other) < TOLERANCE


@pytest.mark.full
def test_a_batch_without_text_needs_no_text_rows():
    params, sequences = random_params(CONFIG), make_sequences(sizes=((5, 0), (1, 0), (9, 0)))
    grad = jax.jit(jax.value_and_grad(packed_loss))
    padded, without = (pack(sequences, sizes=(18, n)) for n in (8, 0))
    (value, grads), (wanted, wanted_grads) = (
        grad(params, rows, target_of(rows.img)) for rows in (without, padded)
    )
    assert value == pytest.approx(float(wanted), rel=TOLERANCE)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max())


def test_frames_differ_by_the_time_axis():
    params, rows = random_params(CONFIG), pack(make_sequences())
    later = rows.img_positions.at[:, 0].add(5 * (jnp.arange(ROWS[0]) % 2))
    moved = run(CONFIG, params, rows._replace(img_positions=later))
    assert relative_error(moved, run(CONFIG, params, rows)) > 1e-3


def test_bfloat16_computes_in_bfloat16_and_stays_close():
    config = MMDiTConfig(**{**FIELDS, "compute_dtype": "bfloat16"})
    params, rows = random_params(config), pack(make_sequences())
    attend, seen = attention_of(rows), {"attention": set(), "carry": set(), "parameters": set()}

    def attention(q, k, v):
        seen["attention"] |= {q.dtype, k.dtype, v.dtype}
        return attend(q, k, v)

    def scan(fn, stacked, carry, consts):
        seen["carry"] |= {leaf.dtype for leaf in jax.tree.leaves(carry)}
        seen["parameters"] |= {leaf.dtype for leaf in jax.tree.leaves((stacked, consts))}
        return scan_layers()(fn, stacked, carry, consts)

    def loss(params):
        out = build(config, params)(rows, attention=attention, layer_scan=scan)
        return jnp.sum(out), out

    _, out = jax.jit(loss)(params)
    _, grads = jax.eval_shape(jax.value_and_grad(loss, has_aux=True), params)
    assert out.dtype == jnp.float32
    assert seen["attention"] == seen["carry"] == {jnp.dtype("bfloat16")}
    assert seen["parameters"] == {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert 0 < relative_error(out, run(CONFIG, params, rows)) < BF16_TOLERANCE


def test_initial_model_predicts_zero_from_independent_layers():
    rows = pack(make_sequences())
    model = nnx.jit(lambda: MMDiT(CONFIG, rngs=nnx.Rngs(0)))()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert not np.any(np.asarray(run(CONFIG, params, rows)))
    kernels = np.asarray(params["double_blocks"]["img"]["qkv"]["kernel"])
    assert kernels.shape == (2, 24, 72)
    assert np.all(kernels[0] != kernels[1])
    bound = np.sqrt(6 / (24 + 72))
    assert 0.98 * bound < np.abs(kernels).max() <= bound
    assert not np.any(np.asarray(params["double_blocks"]["txt"]["modulation"]["kernel"]))


def test_runs_on_two_devices_in_shard_map_with_varying_axes_checked():
    """Tables are the same on both devices, rows are not; gradients add over devices."""
    sequences = make_sequences(sizes=FEW)
    halves = [pack(sequences, order=order, sizes=(7, 4)) for order in ([0], [1])]
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *halves)
    rows = rows._replace(time=halves[0].time, pooled=halves[0].pooled, guidance=halves[0].guidance)
    specs = ImageTextRows(*[P("d")] * 6, time=P(), pooled=P(), guidance=P())
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loss(params, rows, target):
        return jax.lax.psum(packed_loss(params, rows, target, "full"), "d")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P(), specs, P("d")), out_specs=P())
    grad = jax.jit(jax.value_and_grad(sharded))
    assert_equals_unpacked(*grad(random_params(CONFIG), rows, jnp.asarray(target_of(rows.img))))


@pytest.mark.parametrize(("config", "count"), [(FLUX_DEV, 11_901_408_320), (FLUX_SCHNELL, 11_891_178_560)])
def test_flux_has_the_published_number_of_parameters(config, count):
    model = nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0)))
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    d = 3072
    stream = (6 * d * d + 6 * d) + (3 * d * d + 3 * d) + 2 * 128 + (d * d + d) + (8 * d * d + 5 * d)
    single = (3 * d * d + 3 * d) + (7 * d * d + 7 * d) + (5 * d * d + d) + 2 * 128
    embed = (256 * d + d) + (d * d + d)
    ends = (64 * d + d) + (4096 * d + d) + (768 * d + d) + (d * d + d) + (2 * d * d + 2 * d) + (64 * d + 64)
    formula = 19 * 2 * stream + 38 * single + ends + embed * (2 if config.guidance_embed else 1)
    assert total == formula == count


def test_flux_traces_at_full_size():
    def shape(*size, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(size, dtype)

    img_rows = (shape(8, 64), shape(8, dtype=jnp.int32), shape(8, 3, dtype=jnp.int32))
    txt_rows = (shape(4, 4096), shape(4, dtype=jnp.int32), shape(4, 3, dtype=jnp.int32))
    rows = ImageTextRows(*img_rows, *txt_rows, shape(1), shape(1, 768), shape(1))
    graph, state = nnx.split(nnx.eval_shape(lambda: MMDiT(FLUX_DEV, rngs=nnx.Rngs(0))))

    def forward(state, rows):
        return nnx.merge(graph, state)(rows, attention=lambda q, k, v: v, layer_scan=scan_layers("full"))

    out = jax.eval_shape(forward, state, rows)
    assert (out.shape, out.dtype) == ((8, 64), jnp.float32)


def test_no_array_is_quadratic_in_rows():
    sequences = make_sequences(sizes=((41, 12), (30, 20), (31, 1)))
    rows = pack(sequences, sizes=(103, 37))
    params = random_params(CONFIG)
    jaxpr = str(
        jax.make_jaxpr(jax.grad(lambda p: jnp.sum(build(CONFIG, p)(rows, attention=lambda q, k, v: v))))(
            params
        )
    )
    assert "[103,24]" in jaxpr
    for n in (103, 37, 140):
        assert f"[{n},{n}" not in jaxpr


def test_guidance_is_required_or_refused():
    rows = pack(make_sequences())
    with pytest.raises(ValueError, match="needs guidance; got guidance=None"):
        run(CONFIG, random_params(CONFIG), rows._replace(guidance=None))
    with pytest.raises(ValueError, match=r"needs a model with guidance_embed; got guidance of shape \(3,\)"):
        run(DOUBLE_ONLY, random_params(DOUBLE_ONLY), rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width must be at least 1; got width=0"),
        ({"num_heads": 5}, "must be an even whole number; got width=24, num_heads=5"),
        ({"num_heads": 8}, "must be an even whole number; got width=24, num_heads=8"),
        ({"axes_dim": (2, 4, 4)}, r"add up to width / num_heads = 12; got axes_dim=\(2, 4, 4\)"),
        ({"axes_dim": (3, 3, 6)}, "three even sizes"),
        ({"axes_dim": (6, 6)}, "three even sizes"),
        ({"num_double_blocks": 0, "num_single_blocks": 0}, "not both zero"),
        ({"num_single_blocks": -1}, "non-negative"),
        ({"compute_dtype": "float16"}, "one of bfloat16, float32; got compute_dtype='float16'"),
        ({"mlp_ratio": 0.0}, "at least 1 and theta positive; got mlp_ratio=0.0"),
        ({"time_channels": 255}, "time_channels must be even; got time_channels=255"),
        ({"out_channels": 0}, "out_channels must be at least 1; got out_channels=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MMDiTConfig(**{**FIELDS, **change})
