"""Step caching: exact where it should be, and the same decisions wherever rows lie."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdit.models import DiT, DiTConfig, ImageLabelRows, ImageTextRows, MMDiT, MMDiTConfig
from jaxdit.sampling import StagedModel, StepCache, cache_error, cached_call, initial_cache
from jaxdit.schedulers import FlowTimes, Scheduler, advance, initial_state, integrate
from tests.oracles_models import masked_attention

CONFIG = DiTConfig(
    channels=4, patch_size=1, width=16, depth=2, num_heads=2, num_classes=3, learn_sigma=False, compute_dtype="float32"
)  # fmt: skip
IDS = np.array([1, 1, 0, 2, 2, 1, 2, 0, 2, 1, 1, 2, 2, 0, 1, 2], np.int32)
NUM_SEQUENCES = 3  # the third is not there
POSITIONS = np.stack([0 * IDS, np.arange(len(IDS)), np.arange(len(IDS)) % 3], axis=1).astype(np.int32)
STEPS = 12
THRESHOLD = 1.2


def with_values(make) -> nnx.Module:
    """A module with random parameters and none of the zeros it starts with."""
    graph, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.float32), state)
    )


@pytest.fixture(scope="module")
def model():
    return with_values(lambda: DiT(CONFIG, rngs=nnx.Rngs(0)))


def rows_at(img, time, ids=IDS, positions=None):
    positions = POSITIONS if positions is None else positions
    return ImageLabelRows(
        jnp.asarray(img), jnp.asarray(ids), jnp.asarray(positions), time, jnp.array([0, 1, 2])
    )


def noise():
    return np.random.default_rng(1).normal(size=(len(IDS), 4)).astype(np.float32)


TABLE = Scheduler(FlowTimes()).table(STEPS, np.array([6, 7, 0]))


def sample_cached(model, settings, noise, ids, positions, attention, reduce=lambda sums: sums):
    """Sampled rows, the cache at the end, and runs after each evaluation; by a scan such as an engine's."""

    def evaluate(carry, evaluation):
        state, cache = carry
        time, coefficients, step = evaluation
        rows = rows_at(state.rows, time, ids, positions)
        prediction, cache = cached_call(
            model, rows, cache, settings, attention=attention, reduce=reduce, force=step == STEPS - 1
        )
        return (advance(state, prediction, coefficients, ids), cache), cache.num_runs

    cache = initial_cache(len(ids), NUM_SEQUENCES, width=CONFIG.width, dtype=CONFIG.dtype)
    (state, cache), runs = jax.lax.scan(
        evaluate, (initial_state(noise), cache), jax.tree.map(jnp.asarray, TABLE)
    )
    return state.rows, cache, runs


@pytest.fixture(scope="module")
def sample(model):
    @functools.cache
    def run(threshold):
        ids, attention = jnp.asarray(IDS), masked_attention(jnp.asarray(IDS))
        settings = StepCache(threshold)
        return jax.jit(lambda x: sample_cached(model, settings, x, ids, POSITIONS, attention))(noise())

    return run


@pytest.fixture(scope="module")
def exact(model):
    attention = masked_attention(jnp.asarray(IDS))

    def denoise(img, time):
        return model(rows_at(img, time), attention=attention)

    return jax.jit(lambda x: integrate(denoise, x, TABLE, jnp.asarray(IDS)))(noise())


def test_threshold_zero_is_exact(sample, exact):
    rows, cache, _ = sample(0.0)
    np.testing.assert_array_equal(rows, exact)
    assert int(cache.num_runs) == int(cache.num_evaluations) == STEPS


def test_the_first_and_a_forced_evaluation_always_run(sample):
    _, cache, runs = sample(1e9)
    assert runs.tolist() == [1] * (STEPS - 1) + [2]
    assert int(cache.num_evaluations) == STEPS


def test_error_and_savings_grow_with_the_threshold(sample, exact):
    found = []
    for threshold in (0.0, THRESHOLD, 1e9):
        rows, cache, _ = sample(threshold)
        skipped = 1 - int(cache.num_runs) / int(cache.num_evaluations)
        found.append(cache_error(exact[IDS > 0], rows[IDS > 0], skipped))
    assert found[0] == (0, 0, 0, 0)
    for less, more in itertools.pairwise(found):
        assert all(a < b for a, b in zip(less, more, strict=True)), found
    assert found[-1].skipped == pytest.approx(1 - 2 / STEPS)
    difference = np.abs(np.asarray(sample(1e9)[0]) - np.asarray(exact))[IDS > 0]
    assert found[-1].largest == pytest.approx(difference.max())
    assert found[-1].relative == pytest.approx(difference.mean() / np.abs(exact[IDS > 0]).mean(), rel=1e-5)


def test_one_evaluation_after_another_by_hand(model):
    attention = masked_attention(jnp.asarray(IDS))
    first, second = (rows_at(x * noise(), jnp.full(3, t)) for x, t in ((1.0, 0.9), (1.02, 0.88)))
    cache = initial_cache(len(IDS), NUM_SEQUENCES, width=CONFIG.width, dtype=CONFIG.dtype)
    settings = StepCache(1e3, polynomial=(0.25, 2.0, 0.1))
    call = jax.jit(lambda rows, cache: cached_call(model, rows, cache, settings, attention=attention))
    _, cache = call(first, cache)
    assert cache.change.tolist() == [0, 0, 0]
    out, after = call(second, cache)

    @jax.jit
    def by_hand(first, second):
        before, now = (model.embed(rows) for rows in (first, second))
        residual = model.run_blocks(before, attention=attention) - before.img
        inputs = [model.first_input(x) for x in (before, now)]
        return residual, model.head(now.img + residual, now), inputs

    residual, expected, (old, new) = jax.tree.map(np.asarray, by_hand(first, second))
    np.testing.assert_allclose(after.residual, residual, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for s in range(2):
        mine = s + 1 == IDS
        relative = np.abs(new[mine] - old[mine]).sum() / np.abs(old[mine]).sum()
        np.testing.assert_allclose(after.change[s], np.polyval(settings.polynomial, relative), rtol=1e-4)
    assert after.change[2] == 0  # it has no rows, and the constant does not count for it
    assert int(after.num_runs) == 1


MMDIT = {
    "in_channels": 4,
    "text_channels": 5,
    "pooled_channels": 6,
    "width": 16,
    "num_heads": 2,
    "num_double_blocks": 2,
    "num_single_blocks": 2,
    "axes_dim": (2, 2, 4),
    "compute_dtype": "float32",
}


@pytest.mark.parametrize("changed", [{}, {"num_double_blocks": 0}], ids=["double", "single"])
def test_the_first_input_is_what_the_first_block_projects(changed):
    """Where nothing but the first block's image rows goes on, they are all that its projection is given."""
    config = MMDiTConfig(**MMDIT | changed)
    model = with_values(lambda: MMDiT(config, rngs=nnx.Rngs(0)))
    assert isinstance(model, StagedModel)
    rng = np.random.default_rng(0)
    rows = ImageTextRows(
        img=jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
        img_segment_ids=jnp.array([1, 2, 1]),
        img_positions=jnp.zeros((3, 3), jnp.int32),
        txt=jnp.zeros((2, 5)),
        txt_segment_ids=jnp.array([1, 2]),
        txt_positions=jnp.zeros((2, 3), jnp.int32),
        time=jnp.array([0.3, 0.8]),
        pooled=jnp.asarray(rng.normal(size=(2, 6)), jnp.float32),
    )
    found = jax.jit(lambda rows: model.first_input(model.embed(rows)))(rows)

    stack = model.double_blocks.img if config.num_double_blocks else model.single_blocks
    img = np.asarray(model.img_in(rows.img))
    kernel, bias = (np.asarray(x[...][0]) for x in (stack.modulation.kernel, stack.modulation.bias))
    shift, scale = np.split(
        np.asarray(nnx.silu(model.condition(rows))) @ kernel + bias, kernel.shape[1] // 16, 1
    )[:2]
    normed = (img - img.mean(1, keepdims=True)) / np.sqrt(img.var(1, keepdims=True) + 1e-6)
    of_row = np.asarray(rows.img_segment_ids) - 1
    np.testing.assert_allclose(found, normed * (1 + scale[of_row]) + shift[of_row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", [2, 8])
def test_decisions_do_not_depend_on_the_devices(model, sample, devices):
    """Rows are dealt to devices, attention gathers keys inside the branch that may be skipped."""
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def run(noise, ids, positions):
        def everywhere(x):
            return jax.lax.all_gather(x, "d", tiled=True)

        def attention(q, k, v):
            return _attend(q, everywhere(k), everywhere(v), ids, everywhere(ids))

        rows, _, runs = sample_cached(
            model, StepCache(THRESHOLD), noise, ids, positions, attention, lambda x: jax.lax.psum(x, "d")
        )
        return rows, runs

    sharded = jax.shard_map(run, mesh=mesh, in_specs=P("d"), out_specs=(P("d"), P()), check_vma=False)
    order = np.random.default_rng(2).permutation(len(IDS))
    rows, runs = jax.jit(sharded)(noise()[order], IDS[order], POSITIONS[order])
    alone, _, runs_alone = sample(THRESHOLD)
    assert runs.tolist() == runs_alone.tolist()
    assert 2 < runs[-1] < STEPS
    np.testing.assert_allclose(rows, alone[order], atol=1e-5)


def _attend(q, k, v, ids, every):
    same = (ids[:, None] == every[None, :]) & (every[None, :] > 0)
    scores = jnp.where(same[None], jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1) * same[None]
    return jnp.einsum("hqk,khd->qhd", weights, v)


def test_bad_settings_are_refused():
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=f"threshold must be at least 0; got threshold={bad}"):
            StepCache(bad)
    with pytest.raises(ValueError, match="polynomial must have coefficients"):
        StepCache(0.1, polynomial=())
