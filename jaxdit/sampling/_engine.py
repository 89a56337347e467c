"""The engine: requests in, pictures out, on all devices of a mesh."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from solver import SequenceHardware

from .._hosts import on_host
from .._sharding import AnyMesh
from ..encoders import Grid
from ..schedulers import SamplerState, SamplingTable
from ._buckets import SizeBuckets
from ._denoiser import Conditions
from ._pipeline import Pipeline
from ._plan import BatchPlan, BatchPlanner, BatchShape, SequenceChooser, fastest_plan
from ._program import (
    Batch,
    EvaluationInputs,
    Layout,
    SamplingState,
    make_evaluation,
    make_home,
    make_start,
)
from ._request import NonFiniteError, Request, Sample
from ._step_cache import CacheError, StepCache, cache_error

_LOG = logging.getLogger(__name__)

Progress = Callable[[int, int], bool | None]
"""`progress(evaluations done, evaluations)`; True stops the batch."""

CompileTogether = Callable[..., Any]
"""`compiled(program, name, *args)`: a jitted program that all processes have compiled; each name comes once."""

_NAMES = itertools.count()


class CancelledError(RuntimeError):
    """A batch that was stopped between evaluations."""


class Engine:
    """Samples requests with a pipeline on all devices: one on all of them, or many of any sizes packed.

    With several processes every one calls the same methods with the same requests.

    Args:
        pipeline: model, conditions, scheduler, decoder.
        devices: to use; all by default.
        devices_per_machine: where what JAX knows does not say it; a process's by default.
        hardware: for plans of one request; by the kind of device by default.
        choose: plans of one request (`SequenceChooser`); the fastest by the planner's model by default. Asked once for
            each program's size.
        programs: programs for single requests, see `SizeBuckets`.
        compiler_options: of evaluations, as `jax.jit` takes them; a plan's own go before them.
        step_cache: leaves blocks out of evaluations in which little changes; None computes all, which is exact.
        compile_together: of several processes, makes them wait until all have compiled a program: collectives give up
            on one that comes late.

    Raises:
        ValueError: for devices that machines do not divide.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        devices: Sequence[Any] | None = None,
        *,
        devices_per_machine: int | None = None,
        hardware: SequenceHardware | None = None,
        choose: SequenceChooser = fastest_plan,
        programs: int = 6,
        compiler_options: Mapping[str, Any] | None = None,
        step_cache: StepCache | None = None,
        compile_together: CompileTogether | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.step_cache, self._compile_together = step_cache, compile_together
        self._options = dict(compiler_options or {})
        devices = list(jax.devices() if devices is None else devices)
        self._planner = BatchPlanner(
            devices=devices,
            devices_per_machine=devices_per_machine,
            num_heads=pipeline.num_heads,
            head_dim=pipeline.head_dim,
            buckets=SizeBuckets(programs, pipeline.largest_tokens),
            hardware=hardware,
            choose=choose,
            padded=devices[0].platform == "cpu",
        )
        self._params: tuple[AnyMesh, Any] | None = None
        self._programs: dict[Any, Programs] = {}

    @property
    def num_programs(self) -> int:
        """Programs of the denoiser that are at hand."""
        return len(self._programs)

    def checked(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with defaults filled in.

        Raises:
            ValueError: for what cannot be made; see `Pipeline.checked`.
        """
        if not requests:
            raise ValueError("Engine: at least one request; got none.")
        return [self.pipeline.checked(request) for request in requests]

    def generate(self, requests: Sequence[Request], *, progress: Progress | None = None) -> list[Sample]:
        """Pictures of requests, in one batch.

        A request whose latents become NaN or infinite fails alone.

        Args:
            requests: at least one.
            progress: called after every evaluation.

        Raises:
            ValueError: for a request that cannot be made, before anything is computed.
            CancelledError: if `progress` asked for it.
        """
        found = self._prepared(requests, self.step_cache).run(progress)
        samples = []
        for request, grid, latents, error in zip(
            found.requests, found.grids, found.rows, found.errors, strict=True
        ):
            frames = None if error is not None else self.pipeline.decode(latents, Grid(*grid.tolist()))
            about = self.pipeline.about(request)
            if self.step_cache is not None:
                about = {**about, "step_cache": self.step_cache.threshold, "skipped": found.skipped}
            samples.append(Sample(request, frames, error, about))
        return samples

    def compiled(self, requests: Sequence[Request]) -> jax.stages.Compiled:
        """The evaluation that `generate` would run for these requests, compiled and not run.

        For what it says of itself: `memory_analysis()`, `as_text()`. It is not compiled again when it runs.

        Raises:
            ValueError: as `generate`.
        """
        return self._prepared(requests, self.step_cache).compiled()

    def cache_errors(self, requests: Sequence[Request]) -> list[CacheError]:
        """What the step cache costs and saves: requests sampled with and without it, from the same noise.

        Raises:
            ValueError: without a step cache, or for a request that cannot be made.
        """
        if self.step_cache is None:
            raise ValueError("Engine.cache_errors: the engine has no step cache; got None. Give step_cache.")
        exact, cached = (self._prepared(requests, cache).run(None) for cache in (None, self.step_cache))
        return [cache_error(*pair, cached.skipped) for pair in zip(exact.rows, cached.rows, strict=True)]

    def _prepared(self, requests: Sequence[Request], step_cache: StepCache | None) -> "_Running":
        """A batch that is checked and planned."""
        requests = self.checked(requests)
        grids = np.array([self.pipeline.grid(request) for request in requests], np.int32)
        is_guided = any(self.pipeline.is_guided(request) for request in requests)
        given = self.pipeline.conditions(requests, is_guided=is_guided)
        lengths = grids.prod(1, dtype=np.int64), np.asarray(given.text_lengths, np.int64)
        plan = self._planner.plan(BatchShape(*lengths, given.text_tokens))
        _LOG.info("%s", plan.text)
        return _Running(self, plan, requests, grids, given, step_cache)

    def forget_params(self) -> None:
        """Ask the pipeline for its parameters again before the next batch."""
        self._params = None

    def params_on(self, mesh: AnyMesh) -> Any:
        """The backbone's parameters on a mesh; meshes of one device order share them."""
        shardings = self.pipeline.backbone.weights.shardings(mesh)
        if self._params is None:
            self._params = mesh, self.pipeline.params(shardings)
        elif self._params[0] != mesh:
            self._params = mesh, jax.device_put(self._params[1], shardings)
        return self._params[1]

    def programs(self, plan: BatchPlan, step_cache: StepCache | None) -> "Programs":
        """Those of a layout, made once; those of one that is outgrown are given up, with their memory."""
        layout, backbone = plan.layout, self.pipeline.backbone
        if plan.outgrown is not None:
            self._programs = {key: made for key, made in self._programs.items() if key[0] != plan.outgrown}
        key = layout, tuple(plan.compiler_options.items()), step_cache
        if key not in self._programs:
            options = {**self._options, **plan.compiler_options}
            self._programs[key] = Programs(
                *map(
                    self._together,
                    (
                        make_start(layout, backbone, self.pipeline.channels, step_cache),
                        make_evaluation(layout, backbone, options or None, step_cache=step_cache),
                        make_home(layout),
                    ),
                )
            )
        return self._programs[key]

    def _together(self, program: Any) -> Any:
        return program if self._compile_together is None else _Together(program, self._compile_together)


class Programs(NamedTuple):
    """Compiled for a layout: `make_start`, `make_evaluation`, `make_home`."""

    start: Callable[..., SamplingState]
    evaluation: jax.stages.Wrapped
    home: Callable[[Batch], Any]


class _Together:
    """A jitted program that all processes compile before any of them runs it, for every shapes of arguments."""

    def __init__(self, program: Any, compiled: CompileTogether) -> None:
        self._program, self._compile = program, compiled
        self._made: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple((x.shape, x.dtype) for x in jax.tree.leaves(args))
        if key not in self._made:
            self._made[key] = self._compile(self._program, f"sampling-{next(_NAMES)}", *args)
        return self._made[key](*args)

    def lower(self, *args: Any) -> Any:
        """As of the program."""
        return self._program.lower(*args)


class _Latents(NamedTuple):
    """Of a finished batch.

    Attributes:
        requests: with defaults filled in.
        grids: (requests, 3).
        rows: (tokens, channels) of each request.
        errors: what went wrong with it, or None.
        skipped: share of evaluations whose blocks did not run.
    """

    requests: list[Request]
    grids: np.ndarray
    rows: list[np.ndarray]
    errors: list[Exception | None]
    skipped: float


class _Running:
    """A batch while it is sampled."""

    def __init__(
        self,
        engine: Engine,
        plan: BatchPlan,
        requests: list[Request],
        grids: np.ndarray,
        given: Conditions,
        step_cache: StepCache | None,
    ) -> None:
        self.layout: Layout = plan.layout
        self.requests, self.grids = requests, grids
        self.programs = engine.programs(plan, step_cache)
        self.params = engine.params_on(self.layout.mesh)
        self.channels = engine.pipeline.channels
        self.table = sampling_table(engine.pipeline.scheduler, requests, grids.prod(1), self.layout.requests)
        missing = self.layout.requests - len(requests)
        padded = np.pad(grids, ((0, missing), (0, 0)))
        place = jax.tree.map(self._by_device, plan.tables)
        self.batch = Batch(self._replicated(padded), place)
        self.given = jax.tree.map(self._replicated, _padded(given, missing))

    def run(self, progress: Progress | None) -> _Latents:
        """Sample."""
        state = self._started()
        evaluations = len(self.table.step)
        finite: list[Any] = []
        for index in range(evaluations):
            state, here = self.programs.evaluation(*self._arguments(state, index))
            finite.append(here)
            # One evaluation runs while the next is prepared; no more, so that a batch can be stopped.
            if index:
                jax.block_until_ready(finite[index - 1])
            if progress is not None and progress(index + 1, evaluations):
                raise CancelledError(f"stopped after {index + 1} of {evaluations} evaluations.")
        errors = self._errors(np.stack([np.asarray(x) for x in finite]))
        return _Latents(
            self.requests, self.grids, list(self._latents(state.sampler)), errors, _skipped(state)
        )

    def compiled(self) -> jax.stages.Compiled:
        """The evaluation, not run."""
        return self.programs.evaluation.lower(*self._arguments(self._started(), 0)).compile()

    def _arguments(self, state: SamplingState, index: int) -> tuple[Any, ...]:
        """Of an evaluation."""
        is_last = np.bool_(index == len(self.table.step) - 1)
        inputs = EvaluationInputs(self.table.time[index], self.table.coefficients[index], is_last)
        return self.params, state, jax.tree.map(self._replicated, inputs), self.given, self.batch

    def _started(self) -> SamplingState:
        missing = self.layout.requests - len(self.requests)
        seeds = [jax.random.key(request.seed, impl="threefry2x32") for request in self.requests]
        keys = np.stack([np.asarray(jax.random.key_data(seed)) for seed in seeds])
        keys = np.pad(keys, ((0, missing), (0, 0)))
        names = np.pad(np.array([r.number for r in self.requests], np.int32), (0, missing))
        state = self.programs.start(self._replicated(keys), self._replicated(names), self.batch)
        if all(request.noise is None for request in self.requests):
            return state
        rows = np.array(on_host(state.sampler.rows))
        for request, (devices, places, tokens) in zip(self.requests, self._places(), strict=True):
            if request.noise is not None:
                rows[devices, places] = request.noise[tokens]
        placed = self._by_device(rows[self._local()])
        return state._replace(sampler=state.sampler._replace(rows=placed))

    def _latents(self, state: SamplerState) -> Iterator[np.ndarray]:
        rows = on_host(state.rows)
        for count, (devices, places, tokens) in zip(self.grids.prod(1), self._places(), strict=True):
            latents = np.zeros((count, self.channels), np.float32)
            latents[tokens] = rows[devices, places]
            yield latents

    def _places(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Where each request's rows are: devices, rows there, and the tokens that they are."""
        home = self.programs.home(self.batch)
        request, token = on_host(home.request), on_host(home.token)
        for number in range(len(self.requests)):
            devices, places = np.nonzero(request == number + 1)
            yield devices, places, token[devices, places]

    def _errors(self, finite: np.ndarray) -> list[Exception | None]:
        """Of each request: the first step after which it was not finite."""
        errors: list[Exception | None] = []
        for number, request in enumerate(self.requests):
            wrong = np.flatnonzero(~finite[:, number])
            if not wrong.size:
                errors.append(None)
                continue
            step = int(self.table.step[wrong[0]]) + 1
            errors.append(
                NonFiniteError(
                    f"latents became NaN or infinite at step {step} of {request.steps}. Other requests are not"
                    " affected; try another guidance or dtype."
                )
            )
        return errors

    def _local(self) -> list[int]:
        process = jax.process_index()
        return [i for i, d in enumerate(_ordered(self.layout)) if d.process_index == process]

    def _replicated(self, x: Any) -> jax.Array:
        sharding = NamedSharding(self.layout.mesh, P())
        if isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_process_local_data(sharding, x, x.shape)

    def _by_device(self, x: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self.layout.mesh, P(self.layout.axes))
        shape = self.layout.mesh.devices.size, *x.shape[1:]
        return jax.make_array_from_process_local_data(sharding, x, shape)


def _skipped(state: SamplingState) -> float:
    """Share of evaluations whose blocks did not run."""
    if state.cache is None:
        return 0.0
    runs, evaluations = (int(on_host(x)[0]) for x in (state.cache.num_runs, state.cache.num_evaluations))
    return 1 - runs / evaluations


def _ordered(layout: Layout) -> list[Any]:
    """Devices in the order of the layout's axes."""
    mesh = layout.mesh
    return mesh.devices.transpose([mesh.axis_names.index(name) for name in layout.axes]).ravel().tolist()


def _padded(given: Conditions, missing: int) -> Conditions:
    """Conditions of so many requests more, which are none."""

    def pad(x: Any, axis: int) -> Any:
        widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)

    if not missing:
        return given
    rest = jax.tree.map(lambda x: pad(x, 1), given._replace(scale=None))
    return rest._replace(scale=pad(given.scale, 0))


def sampling_table(
    scheduler: Any, requests: Sequence[Request], tokens: np.ndarray, columns: int
) -> SamplingTable:
    """The tables of requests side by side; one that ends earlier, and columns of no request, stay as they are.

    `step` is of the request with the most evaluations.
    """
    tables = [
        scheduler.table(request.steps, np.array([count]))
        for request, count in zip(requests, tokens, strict=True)
    ]
    longest = max(tables, key=lambda table: len(table.step))
    evaluations = len(longest.step)
    time = np.zeros((evaluations, columns), np.float32)
    still = np.array([[1, 0, 0], [0, 0, 1]], np.float32)
    coefficients = np.tile(still, (evaluations, columns, 1, 1))
    for column, table in enumerate(tables):
        count = len(table.step)
        time[:count, column] = table.time[:, 0]
        time[count:, column] = table.time[-1, 0]
        coefficients[:count, column] = table.coefficients[:, 0]
    return SamplingTable(time, coefficients, longest.step)
