"""The image autoencoder: against diffusers' recorded results, rows divided against whole pictures, and bad input."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxdit.encoders import (
    FLUX_VAE,
    SD_VAE,
    AutoencoderKL,
    AutoencoderKLConfig,
    LatentPosterior,
    PictureRows,
    decode_split,
    decoder_chain,
    encode_split,
    encoder_chain,
    run_chain,
)
from jaxdit.encoders._autoencoder_split import _run
from jaxdit.encoders._picture_rows import WHOLE
from tests.parity.autoencoder import (
    AUTOENCODER_BOUND,
    AUTOENCODER_CASES,
    autoencoder_errors,
    run_our_autoencoder,
    write_autoencoder,
)

RECORDED = Path(__file__).parents[1] / "data" / "parity"
CONFIG = AutoencoderKLConfig(
    latent_channels=3,
    block_out_channels=(4, 8),
    layers_per_block=1,
    norm_num_groups=2,
    shift_factor=0.1,
    compute_dtype="float32",
)
# What LLVM makes of a program is not what is tested here, and takes most of the time to compile it.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
SPLIT_TOLERANCE = 1e-5


@cache
def model():
    graph, state = nnx.split(nnx.eval_shape(lambda: AutoencoderKL(CONFIG, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), state)
    )


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def mesh_of(*sizes):
    names = ("a", "b", "c")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes), devices=devices)


def compiled(function, *args):
    return jax.jit(function, compiler_options=FAST_COMPILE).lower(*args).compile()


def run(function, *args):
    return compiled(function, *args)(*args)


def assert_close(a, b, tolerance=SPLIT_TOLERANCE):
    assert a.shape == b.shape
    error = float(jnp.abs(a - b).max() / jnp.abs(b).max())
    assert error <= tolerance, error


@cache
def whole(height):
    """Latents, and what they and their picture give without division."""
    latents = normal(2, height, 5, 3)
    pictures = run(model().decode, latents)
    return latents, pictures, run(model().encode, jnp.tanh(pictures))


@pytest.mark.parametrize("case", [c for c in AUTOENCODER_CASES if c.recorded], ids=lambda case: case.name)
def test_recorded_results_of_diffusers(case, tmp_path):
    write_autoencoder(case, tmp_path)
    reference = load_file(RECORDED / f"{case.name}.safetensors")
    found = autoencoder_errors(run_our_autoencoder(case, tmp_path), reference)
    assert max(found.values()) <= AUTOENCODER_BOUND, found


# Heights that devices share evenly and not, with whole devices of padding, and fewer rows than devices.
SPLITS = [
    *((height, (n,)) for height, n in ((9, 4), (3, 8))),
    # Several axes.
    (9, (2, 4)),
]
ALL_SPLITS = [(height, (n,)) for height in (1, 8, 9, 13) for n in (1, 2, 3, 4, 5, 6, 7, 8)]


def check_split(height, sizes):
    latents, pictures, posterior = whole(height)
    mesh = mesh_of(*sizes)
    axes = {"mesh": mesh, "axis_names": mesh.axis_names}
    assert_close(run(lambda x: decode_split(model(), x, **axes), latents), pictures)
    found = run(lambda x: encode_split(model(), x, **axes), jnp.tanh(pictures))
    assert_close(found.mean, posterior.mean)
    assert_close(found.logvar, posterior.logvar)


@pytest.mark.parametrize(("height", "sizes"), SPLITS)
def test_rows_divided_over_devices_give_the_whole_picture(height, sizes):
    check_split(height, sizes)


@pytest.mark.full
@pytest.mark.parametrize(("height", "sizes"), [split for split in ALL_SPLITS if split not in SPLITS])
def test_rows_divided_over_any_number_of_devices(height, sizes):
    check_split(height, sizes)


def test_axes_that_do_not_share_the_picture_do_the_same():
    latents, pictures, _ = whole(8)
    mesh = mesh_of(2, 2)
    out = run(lambda x: decode_split(model(), x, mesh=mesh, axis_names=("b",)), latents)
    assert_close(out, pictures)
    assert out.sharding.spec == P(None, "b")


def test_what_lies_in_padding_is_not_read():
    latents, pictures, _ = whole(9)
    mesh, filled = mesh_of(4), jnp.concatenate([latents, jnp.full((2, 3, 5, 3), jnp.nan)], axis=1)

    @partial(jax.shard_map, mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"))
    def decode(x):
        return model().decode(x, rows=PictureRows(("a",), 9))

    assert_close(run(decode, filled)[:, :18], pictures)


@pytest.mark.parametrize("sizes", [(1,), (4,), pytest.param((3,), marks=pytest.mark.full)])
def test_one_program_decodes_all_sizes_that_its_array_holds(sizes):
    latents, pictures, _ = whole(9)
    mesh, width = mesh_of(*sizes), latents.shape[2]
    canvas = jnp.full((2, 13, width + 3, 3), jnp.nan).at[:, :9, :width].set(latents)
    decode = partial(decode_split, model(), mesh=mesh, axis_names=mesh.axis_names)
    compiled = _run._cache_size()
    assert_close(decode(canvas, size=(9, width))[:, :18, : 2 * width], pictures)
    smaller = decode(canvas, size=(5, 2))[:, :10, :4]
    assert_close(smaller, run(lambda x: model().decode(x), latents[:, :5, :2]))
    assert _run._cache_size() == compiled + 1
    with pytest.raises(ValueError, match=r"size is 1 to 13 rows and 1 to .* got size=\(14, 2\)"):
        decode(canvas, size=(14, 2))


def test_gradients_of_divided_rows():
    latents, pictures, _ = whole(9)
    weights = normal(*pictures.shape, seed=1)
    mesh = mesh_of(4)

    def split(x):
        return jnp.sum(weights * decode_split(model(), x, mesh=mesh, axis_names=("a",)))

    found = run(jax.grad(split), latents)
    assert_close(found, run(jax.grad(lambda x: jnp.sum(weights * model().decode(x))), latents))


def test_what_is_sent():
    """Rows to both neighbours for each 3 x 3 convolution, moments for each norm, keys once round; no picture."""
    latents, *_ = whole(8)
    mesh = mesh_of(4)
    x = jax.device_put(latents, NamedSharding(mesh, P(None, "a")))
    lowered = jax.jit(lambda x: decode_split(model(), x, mesh=mesh, axis_names=("a",))).lower(x)
    text = lowered.as_text()
    chain = [spec.kind.name for spec in decoder_chain(CONFIG)]
    resnets = chain.count("RESNET")
    convolutions = 2 * resnets + chain.count("CONV_3") + chain.count("UP") + 1
    assert text.count("collective_permute") == 2 * convolutions + 1  # the ring is a loop
    assert text.count("stablehlo.all_gather") == 2 * resnets + 2
    assert "all_reduce" not in text
    compiled_text = lowered.compile(FAST_COMPILE).as_text()
    assert compiled_text.count(" all-gather(") == 2 * resnets + 2


def test_memory_is_a_part_of_the_pictures():
    latents = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)
    temp = [
        compiled(lambda x, n=n: decode_split(model(), x, mesh=mesh_of(n), axis_names=("a",)), latents)
        .memory_analysis()
        .temp_size_in_bytes
        for n in (1, 8)
    ]
    assert temp[0] > 6 * temp[1], temp


@pytest.mark.parametrize("sizes", [(1,), (3,)])
def test_statistics_keep_their_digits(sizes):
    """A mean 500 times the deviation, and rows of different means: sums of squares in float32 would keep two digits."""
    values = 1e3 + np.random.default_rng(0).standard_normal((2, 6, 50, 4)) + np.arange(6)[:, None, None]
    x = jnp.asarray(values, jnp.float32)
    rows = PictureRows(("a",), 6)
    moments = jax.shard_map(
        lambda x: rows.moments(x, 2),
        mesh=mesh_of(*sizes),
        in_specs=P(None, "a"),
        out_specs=P(),
        check_vma=False,
    )(x)
    grouped = np.asarray(x, np.float64).reshape(2, 6, 50, 2, 2)
    np.testing.assert_allclose(moments.mean, grouped.mean((1, 2, 4)), rtol=1e-6)
    np.testing.assert_allclose(moments.variance, grouped.var((1, 2, 4)), rtol=1e-4)


def test_chains_may_be_cut_anywhere():
    latents, pictures, posterior = whole(8)
    x = run(lambda x: run_chain(model().decoder[:5], x), latents)
    assert_close(run(lambda x: run_chain(model().decoder[5:], x), x), pictures)
    moments = run(lambda x: run_chain(model().encoder, x), jnp.tanh(pictures))
    assert_close(moments[..., :3], posterior.mean)


@pytest.mark.parametrize("config", [FLUX_VAE, SD_VAE], ids=["flux", "sd"])
def test_presets(config):
    """Shapes and parameters of the published models."""
    made = nnx.eval_shape(lambda: AutoencoderKL(config, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(made, nnx.Param)))
    assert count == {16: 83_819_683, 4: 83_653_863}[config.latent_channels]
    assert config.factor == 8
    assert [len(chain(config)) for chain in (encoder_chain, decoder_chain)] == {16: [16, 20], 4: [17, 21]}[
        config.latent_channels
    ]
    graph, state = nnx.split(made)
    latents = jax.ShapeDtypeStruct((1, 3, 5, config.latent_channels), jnp.bfloat16)
    image = jax.eval_shape(lambda state, x: nnx.merge(graph, state).decode(x), state, latents)
    assert (image.shape, image.dtype) == ((1, 24, 40, 3), jnp.float32)
    found = jax.eval_shape(lambda state, x: nnx.merge(graph, state).encode(x), state, image)
    assert (found.mean.shape, found.mean.dtype) == ((1, 3, 5, config.latent_channels), jnp.float32)


def test_latents_of_a_diffusion_model():
    latents = normal(2, 3, 3, 3)
    np.testing.assert_allclose(model().normalized(latents), (latents - 0.1) * 0.18215, rtol=1e-6)
    np.testing.assert_allclose(model().denormalized(model().normalized(latents)), latents, atol=1e-6)


def test_samples_do_not_depend_on_the_batch():
    posterior = LatentPosterior(normal(3, 8, 5, 4), normal(3, 8, 5, 4, seed=1))
    key = jax.random.key(0)
    sample = jax.jit(lambda posterior, ids: posterior.sample(ids, key=key))
    samples = sample(posterior, None)
    one = sample(LatentPosterior(*(x[1:2] for x in posterior)), jnp.array([1]))
    np.testing.assert_array_equal(samples[1:2], one)
    placed = jax.device_put(posterior, NamedSharding(mesh_of(4), P(None, "a")))
    np.testing.assert_array_equal(sample(placed, None), samples)
    noise = (samples - posterior.mean) / jnp.exp(posterior.logvar / 2)
    assert abs(float(noise.mean())) < 0.2 and abs(float(noise.std()) - 1) < 0.1  # noqa: PT018
    np.testing.assert_array_equal(posterior.mode(), posterior.mean)


@pytest.mark.full
def test_log_variances_are_bounded():
    wild = AutoencoderKL(replace(CONFIG, use_quant_conv=True), rngs=nnx.Rngs(0))
    wild.encoder[-1].bias[...] = jnp.array([0, 0, 0, 100, -100, 0], jnp.float32)
    logvar = run(wild.encode, normal(1, 4, 4, 3)).logvar
    assert (float(logvar[..., 0].min()), float(logvar[..., 1].max())) == (20, -30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_channels": 0}, "latent_channels must be at least 1"),
        ({"layers_per_block": 0}, "layers_per_block must be at least 1"),
        (
            {"block_out_channels": (4, 7)},
            "block_out_channels must be one or more multiples of norm_num_groups",
        ),
        ({"block_out_channels": ()}, "block_out_channels must be one or more"),
        ({"scaling_factor": 0.0}, "scaling_factor must be finite and not zero"),
        ({"shift_factor": float("nan")}, "shift_factor finite"),
        ({"compute_dtype": "float16"}, "compute_dtype must be one of"),
    ],
)
def test_configs_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_pictures_that_do_not_fit():
    with pytest.raises(ValueError, match=r"decode: pictures must be \(batch, height, width, 3\)"):
        model().decode(normal(1, 4, 4, 4))
    with pytest.raises(ValueError, match="positive multiples of 2; got"):
        model().encode(normal(1, 4, 5, 3))
    with pytest.raises(ValueError, match="height and width positive"):
        model().decode(normal(1, 0, 4, 3))


def test_divisions_that_do_not_fit():
    latents, mesh = normal(1, 4, 4, 3), mesh_of(2, 2)
    for axes in ((), ("a", "a"), ("a", "x")):
        with pytest.raises(ValueError, match="decode_split: axis_names must be axes of the mesh"):
            decode_split(model(), latents, mesh=mesh, axis_names=axes)
    with pytest.raises(ValueError, match="encode_split: heights must be multiples of 2"):
        encode_split(model(), normal(1, 5, 4, 3), mesh=mesh, axis_names=("a",))

    @partial(jax.shard_map, mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"))
    def decode(x):
        return model().decode(x, rows=PictureRows(("a",), 5))

    with pytest.raises(
        ValueError, match=r"got 2 rows, height=5, devices=2. Use decode_split, or fill up .* to 6 rows"
    ):
        decode(latents)
    assert WHOLE.num_devices == 1
