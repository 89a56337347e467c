"""The engine: requests in, pictures out, on all devices of a mesh."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from solver import SequenceHardware

from .._hosts import on_host
from ..schedulers import SamplerState, SamplingTable
from ._buckets import SizeBuckets
from ._denoiser import Conditions
from ._pipeline import Pipeline
from ._plan import BatchPlan, BatchPlanner, SequenceChooser, batch_shape, fastest_plan
from ._program import Batch, Layout, make_evaluation, make_home, make_start
from ._request import NonFiniteError, Request, Sample

_LOG = logging.getLogger(__name__)

Progress = Callable[[int, int], bool | None]
"""`progress(evaluations done, evaluations)`; True stops the batch."""


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
    ) -> None:
        self.pipeline = pipeline
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
        self._params: tuple[Mesh, Any] | None = None
        self._programs: dict[Any, Programs] = {}

    @property
    def num_programs(self) -> int:
        """Programs of the denoiser compiled so far."""
        return len(self._programs)

    def checked(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with defaults filled in.

        Raises:
            ValueError: for what cannot be made; see `Pipeline.checked`.
        """
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
        running = self._prepared(requests)
        rows, errors = running.run(progress)
        samples = []
        for request, latents, error in zip(running.requests, rows, errors, strict=True):
            grid = self.pipeline.grid(request)
            frames = None if error is not None else self.pipeline.decode(latents, grid)
            samples.append(Sample(request, frames, error, self.pipeline.about(request)))
        return samples

    def compiled(self, requests: Sequence[Request]) -> jax.stages.Compiled:
        """The evaluation that `generate` would run for these requests, compiled and not run.

        For what it says of itself: `memory_analysis()`, `as_text()`. It is not compiled again when it runs.

        Raises:
            ValueError: as `generate`.
        """
        return self._prepared(requests).compiled()

    def _prepared(self, requests: Sequence[Request]) -> "_Running":
        if not requests:
            raise ValueError("Engine: at least one request; got none.")
        requests = self.checked(requests)
        grids = [self.pipeline.grid(request) for request in requests]
        is_guided = any(self.pipeline.is_guided(request) for request in requests)
        given = self.pipeline.conditions(requests, is_guided=is_guided)
        image = [grid.t * grid.h * grid.w for grid in grids]
        plan = self._planner.plan(batch_shape(image, given.text_lengths, self.pipeline.text_tokens))
        _LOG.info("%s", plan.text)
        return _Running(self, plan, requests, np.array(grids, np.int32), given)

    def params_on(self, mesh: Mesh) -> Any:
        """The backbone's parameters on a mesh; meshes of one device order share them."""
        shardings = self.pipeline.backbone.weights.shardings(mesh)
        if self._params is None:
            self._params = mesh, self.pipeline.params(shardings)
        elif self._params[0] != mesh:
            self._params = mesh, jax.device_put(self._params[1], shardings)
        return self._params[1]

    def programs(self, plan: BatchPlan) -> "Programs":
        """Those of a layout, made once."""
        layout = plan.layout
        key = layout, tuple(plan.compiler_options.items())
        if key not in self._programs:
            backbone = self.pipeline.backbone
            options = {**self._options, **plan.compiler_options}
            evaluation = make_evaluation(layout, backbone, options or None)
            self._programs[key] = Programs(
                make_start(layout, self.pipeline.channels), evaluation, make_home(layout)
            )
        return self._programs[key]


class Programs(NamedTuple):
    """Compiled for a layout: `make_start`, `make_evaluation`, `make_home`."""

    start: Callable[..., SamplerState]
    evaluation: jax.stages.Wrapped
    home: Callable[[Batch], Any]


class _Running:
    """A batch while it is sampled."""

    def __init__(
        self,
        engine: Engine,
        plan: BatchPlan,
        requests: list[Request],
        grids: np.ndarray,
        given: Conditions,
    ) -> None:
        self.layout: Layout = plan.layout
        self.requests, self.grids = requests, grids
        self.programs = engine.programs(plan)
        self.params = engine.params_on(self.layout.mesh)
        self.channels = engine.pipeline.channels
        self.table = sampling_table(engine.pipeline.scheduler, requests, grids.prod(1), self.layout.requests)
        missing = self.layout.requests - len(requests)
        padded = np.pad(grids, ((0, missing), (0, 0)))
        place = jax.tree.map(self._by_device, plan.tables)
        self.batch = Batch(self._replicated(padded), place)
        self.given = jax.tree.map(self._replicated, _padded(given, missing))

    def run(self, progress: Progress | None) -> tuple[list[np.ndarray], list[Exception | None]]:
        """Latents (tokens, channels) of each request, and what went wrong."""
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
        return list(self._latents(state)), self._errors(np.stack([np.asarray(x) for x in finite]))

    def compiled(self) -> jax.stages.Compiled:
        """The evaluation, not run."""
        return self.programs.evaluation.lower(*self._arguments(self._started(), 0)).compile()

    def _arguments(self, state: SamplerState, index: int) -> tuple[Any, ...]:
        """Of an evaluation."""
        time, coefficients = (self._replicated(x[index]) for x in self.table[:2])
        return self.params, state, time, coefficients, self.given, self.batch

    def _started(self) -> SamplerState:
        missing = self.layout.requests - len(self.requests)
        seeds = [jax.random.key(request.seed, impl="threefry2x32") for request in self.requests]
        keys = np.stack([np.asarray(jax.random.key_data(seed)) for seed in seeds])
        keys = np.pad(keys, ((0, missing), (0, 0)))
        names = np.pad(np.array([r.number for r in self.requests], np.int32), (0, missing))
        state = self.programs.start(self._replicated(keys), self._replicated(names), self.batch)
        if all(request.noise is None for request in self.requests):
            return state
        rows = np.array(on_host(state.rows))
        for request, (devices, places, tokens) in zip(self.requests, self._places(), strict=True):
            if request.noise is not None:
                rows[devices, places] = request.noise[tokens]
        return state._replace(rows=self._by_device(rows[self._local()]))

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
        return jax.make_array_from_process_local_data(sharding, x, x.shape)

    def _by_device(self, x: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self.layout.mesh, P(self.layout.axes))
        shape = self.layout.mesh.devices.size, *x.shape[1:]
        return jax.make_array_from_process_local_data(sharding, x, shape)


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
