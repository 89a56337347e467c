"""The engine: the same pictures on any devices and in any batch, few programs, failures that stay alone."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdit.encoders import Grid
from jaxdit.sampling import (
    Backbone,
    CancelledError,
    Conditions,
    Engine,
    LabelDenoiser,
    Request,
    ShardedModule,
    StepCache,
    TextDenoiser,
)
from jaxdit.sampling._buckets import CanvasBuckets, SizeBuckets
from jaxdit.sampling._plan import BatchPlanner, BatchShape
from jaxdit.sampling._request import with_defaults
from jaxdit.schedulers import FlowTimes, Scheduler, heun
from solver import H100_MACHINE, Topology, sequence_plans
from tests.sampling.sampling_cases import CHANNELS, POOLED, TEXT_CHANNELS, dit, mmdit

TEXT = 8


@dataclass
class TinyPipeline:
    """Captions are hashed to features; rows are shown as they are."""

    kind: object = mmdit
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(FlowTimes(), heun))
    channels: int = CHANNELS
    num_heads: int = 4
    head_dim: int = 8
    largest_tokens: int = 1024
    text_tokens: int = TEXT

    @cached_property
    def _made(self):
        return self.kind()

    @cached_property
    def backbone(self):
        denoiser = TextDenoiser() if self.kind is mmdit else LabelDenoiser(CHANNELS)
        return Backbone(ShardedModule(self._made[0], jnp.float32), denoiser)

    def params(self, shardings):
        return jax.device_put(self._made[1], shardings)

    def checked(self, request):
        return with_defaults(request, steps=3, guidance=2.0)

    def grid(self, request):
        return Grid(request.frames, request.height, request.width)

    def is_guided(self, request):
        return request.guidance != 1

    def conditions(self, requests, *, is_guided):
        prompts = [[r.prompt for r in requests], [r.negative_prompt or "" for r in requests]][: 1 + is_guided]
        lengths = np.array([[min(len(p), TEXT) for p in row] for row in prompts], np.int32)
        if self.kind is dit:
            labels = np.array([[int(p) for p in prompts[0]], [5] * len(requests)][: 1 + is_guided], np.int32)
            scale = np.array([r.guidance for r in requests], np.float32)
            return Conditions(None, np.zeros_like(labels), None, labels, None, scale)

        def features(prompt, shape):
            return np.random.default_rng([*prompt.encode(), 1]).normal(size=shape)

        text = np.array([[features(p, (TEXT, TEXT_CHANNELS)) for p in row] for row in prompts], np.float32)
        pooled = np.array([[features(p, POOLED) for p in row] for row in prompts], np.float32)
        return Conditions(
            text, lengths, pooled, None, None, np.array([r.guidance for r in requests], np.float32)
        )

    def decode(self, rows, grid):
        pixels = np.clip(128 + 40 * rows[:, :3], 0, 255)
        self.last = rows
        return pixels.reshape(grid.t, grid.h, grid.w, 3).astype(np.uint8)

    def about(self, request):
        return {"prompt": request.prompt}


REQUESTS = [
    Request("a cat", 4, 5),
    Request("two dogs", 6, 3, seed=7, steps=2),
    Request("", 3, 4, frames=2, negative_prompt="grey"),
]


def latents(engine, requests):
    """Latents of each request."""
    found = []
    decode = engine.pipeline.decode
    engine.pipeline.decode = lambda rows, grid: found.append(rows) or decode(rows, grid)
    try:
        samples = engine.generate(requests)
    finally:
        del engine.pipeline.decode
    assert [s.error for s in samples] == [None] * len(requests)
    return found


@pytest.fixture(scope="module")
def alone():
    """Latents of each request, on one device and alone."""
    engine = Engine(TinyPipeline(), jax.devices()[:1])
    return [latents(engine, [request])[0] for request in REQUESTS]


FULL = pytest.mark.full


@pytest.mark.parametrize("numbers", [(0, 1, 2), (0,), *(pytest.param((i,), marks=FULL) for i in (1, 2))])
@pytest.mark.parametrize("devices", [pytest.param(2, marks=FULL), 4, pytest.param(8, marks=FULL)])
def test_pictures_do_not_depend_on_devices_or_on_the_batch(alone, devices, numbers):
    batch = [REQUESTS[number] for number in numbers]
    engine = Engine(TinyPipeline(), jax.devices()[:devices], devices_per_machine=min(devices, 4))
    for request, found in zip(batch, latents(engine, batch), strict=True):
        right = alone[REQUESTS.index(request)]
        np.testing.assert_allclose(found, right, atol=1e-4 * np.abs(right).max(), rtol=0)


@pytest.mark.full
def test_classes():
    requests = [Request("3", 4, 4), Request("0", 2, 6)]
    pipeline = TinyPipeline(dit)
    one, four = (Engine(pipeline, jax.devices()[:n]) for n in (1, 4))
    for found, right in zip(latents(four, requests), latents(one, requests), strict=True):
        np.testing.assert_allclose(found, right, atol=1e-4 * np.abs(right).max(), rtol=0)


@pytest.mark.full
def test_given_noise_is_what_sampling_starts_from():
    engine = Engine(TinyPipeline(), jax.devices()[:4])
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(20, CHANNELS)).astype(np.float32)
    request = Request("a cat", 4, 5, noise=noise)
    (found,) = latents(engine, [request])
    several = latents(engine, [Request("a cat", 3, 3), request])
    np.testing.assert_allclose(several[1], found, atol=1e-4 * np.abs(found).max(), rtol=0)
    assert np.abs(found - latents(engine, [Request("a cat", 4, 5)])[0]).max() > 0.1


def test_a_request_that_is_not_finite_fails_alone():
    engine = Engine(TinyPipeline(), jax.devices()[:2])
    bad = Request("a cat", 4, 5, noise=np.full((20, CHANNELS), np.nan, np.float32))
    samples = engine.generate([REQUESTS[1], bad])
    assert samples[0].error is None
    assert samples[1].frames is None
    assert "at step 1 of 3" in str(samples[1].error)


def test_progress_and_cancelling():
    engine = Engine(TinyPipeline(), jax.devices()[:2])
    seen = []
    engine.generate(REQUESTS[:1], progress=lambda *x: seen.append(x))
    assert seen == [(i, 5) for i in range(1, 6)]  # Heun asks twice in each step but the last
    with pytest.raises(CancelledError, match="after 2 of 5"):
        engine.generate(REQUESTS[:1], progress=lambda done, _: done == 2)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=FULL), 4])
@pytest.mark.parametrize("numbers", [(0,), pytest.param((0, 1, 2), marks=FULL)])
def test_a_step_cache_leaves_blocks_out_and_says_what_it_costs(devices, numbers):
    batch = [REQUESTS[number] for number in numbers]
    every, few = (Engine(TinyPipeline(), jax.devices()[:devices], step_cache=StepCache(t)) for t in (0, 1e9))
    for error in every.cache_errors(batch):
        assert error.skipped == 0
        assert error.relative < 1e-6
    for error in few.cache_errors(batch):
        assert error.skipped == pytest.approx(3 / 5)  # the first and the last evaluation always run
        assert 0.001 < error.relative < 2
    (sample, *_) = few.generate(batch)
    assert sample.about["step_cache"] == 1e9
    assert sample.about["skipped"] == pytest.approx(3 / 5)


def test_without_a_step_cache_there_is_no_error_of_it():
    with pytest.raises(ValueError, match="Give step_cache"):
        Engine(TinyPipeline(), jax.devices()[:1]).cache_errors(REQUESTS[:1])


@FULL
def test_programs_are_compiled_once():
    engine = Engine(TinyPipeline(), jax.devices()[:2])
    for batch in (REQUESTS[:1], REQUESTS[:1], REQUESTS, REQUESTS, [REQUESTS[0], REQUESTS[2]], REQUESTS[:1]):
        engine.generate(batch)
    assert engine.num_programs == 3  # one request; up to four; up to two
    for programs in engine._programs.values():
        assert {program._cache_size() for program in programs} <= {0, 1}


def test_no_requests():
    with pytest.raises(ValueError, match="at least one request"):
        Engine(TinyPipeline(), jax.devices()[:1]).generate([])


@pytest.mark.parametrize("seed", range(20))
def test_fifty_random_sizes_need_few_programs(seed):
    rng = np.random.default_rng(seed)
    buckets, canvases = SizeBuckets(6, 65_536), CanvasBuckets(6, (1024, 1024))
    for height, width in rng.integers(32, 257, (50, 2)).tolist():
        size = (height // 2) * (width // 2)
        assert size <= buckets.fit(size)
        rows, columns = canvases.fit(height, width)
        assert rows >= height
        assert columns >= width
    assert len(buckets.sizes) <= 6
    assert len(canvases.sizes) <= 6


@pytest.mark.parametrize(
    "sizes", [range(1, 20_000, 399), range(20_000, 1, -399), [20_000], [1, 20_000, 19_000]]
)
def test_sizes_that_rise_or_fall_need_as_many_more_as_they_double(sizes):
    buckets = SizeBuckets(2, 20_000)
    for size in sizes:
        assert size <= buckets.fit(size) <= 20_096
    assert len(buckets.sizes) <= 2 + 8
    assert SizeBuckets(1, 20_000).fit(12_000) == 20_096


def test_a_plan_may_be_chosen():
    seen = []

    def ring(plans):
        seen.append(plans)
        return next(plan for plan in plans if plan.algorithm == "ring")

    engine = Engine(TinyPipeline(), jax.devices()[:2], choose=ring)
    (found,) = latents(engine, REQUESTS[:1])
    for request in (*REQUESTS[:1], Request("a dog", 5, 4)):
        assert "ring" in engine._planner.plan(shape_of(engine, request)).text
    assert len(seen) == 1  # both run in one program
    assert [plan.layer_s for plan in seen[0]] == sorted(plan.layer_s for plan in seen[0])
    (right,) = latents(Engine(TinyPipeline(), jax.devices()[:2]), REQUESTS[:1])
    np.testing.assert_allclose(found, right, atol=1e-4 * np.abs(right).max(), rtol=0)


def shape_of(engine, request):
    grid = engine.pipeline.grid(request)
    return BatchShape(np.array([grid.t * grid.h * grid.w]), np.full((2, 1), TEXT), TEXT)


@pytest.mark.parametrize(
    ("choose", "error", "part"),
    [
        (lambda plans: "ring", TypeError, "must return a SequenceParallelPlan; got a str"),
        (lambda plans: sequence_plans(Topology(1, 4), 4, 8, 20)[0], ValueError, "got one for 1 x 4"),
        (lambda plans: sequence_plans(Topology(1, 2), 4, 8, 20)[0], ValueError, "2 branches of guidance"),
    ],
)
def test_plans_that_are_for_something_else_are_refused(choose, error, part):
    engine = Engine(TinyPipeline(), jax.devices()[:2], choose=choose)
    with pytest.raises(error, match=part):
        engine.generate(REQUESTS[:1])


def test_plans_have_no_puts_and_gets():
    seen = []
    hardware = replace(H100_MACHINE, one_sided=True)
    choose = lambda plans: seen.extend(plans) or plans[0]  # noqa: E731
    engine = Engine(
        TinyPipeline(), jax.devices()[:4], devices_per_machine=2, hardware=hardware, choose=choose
    )
    engine._planner.plan(shape_of(engine, REQUESTS[0]))
    assert seen
    assert not any(plan.one_sided for plan in seen)


def test_a_program_tells_of_itself_and_is_compiled_once(caplog):
    engine = Engine(TinyPipeline(), jax.devices()[:2])
    compiled = engine.compiled(REQUESTS[:1])
    assert compiled.memory_analysis().temp_size_in_bytes > 0
    assert "all-gather" in compiled.as_text()  # of parameters
    with jax.log_compiles():
        engine.generate(REQUESTS[:1])
    assert "jit(device_home)" in caplog.text
    assert "jit(device_evaluation)" not in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_packed_programs_are_few_and_the_last_ones_are_kept(seed):
    """Batches of 2 to 8 random requests: hardly more programs than numbers of requests, and none after a while."""
    rng = np.random.default_rng(seed)
    planner = BatchPlanner(jax.devices()[:2], None, 4, 16, SizeBuckets(6, 65_536))
    made = []
    for batch in range(200):
        image = rng.integers(16, 145, rng.choice([2, 3, 4, 6, 8]))
        plan = planner.plan(BatchShape(image, np.full((1, len(image)), 64), 64))
        if plan.layout not in [layout for layout, _ in made]:
            if plan.outgrown is not None:
                assert plan.outgrown in [layout for layout, _ in made]
                assert plan.outgrown.requests == plan.layout.requests
            made.append((plan.layout, batch))
    assert len(made) <= 3 + 3
    assert all(batch < 120 for _, batch in made)
