"""The training loop: steps, reports, checkpoints, validation and pictures."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments._checkpoint import Checkpoints
from experiments._config import UserError
from experiments._feed import Ahead, PreparedStep, StepAssembler
from experiments._figures import DeviceLoads, plot_loads, plot_training, save_grid
from experiments._metrics import MetricsWriter, Progress, StepReport, read_metrics
from experiments._run import Run
from experiments._sampling import PictureSampler, parse_request
from experiments._signals import StopRequest
from experiments.data import StepIndex, StepReader, make_loader
from jaxdit.training import StepMetrics, TrainState, make_eval_step, make_train_step
from solver import StepCapacity

_LOG = logging.getLogger(__name__)


@dataclass
class Profile:
    """Steps to trace with jax.profiler; none if `steps` is 0."""

    steps: int = 0
    first: int = 3

    def at(self, done: int, folder: Path) -> None:
        """Start or stop the trace after `done` steps of this process."""
        if self.steps and done == self.first:
            jax.profiler.start_trace(str(folder))
        if self.steps and done == self.first + self.steps:
            jax.profiler.stop_trace()
            _LOG.info("profile of %d steps written to %s", self.steps, folder)


@dataclass
class Trainer:
    """Runs a `Run` from its last checkpoint to its end.

    Attributes:
        run: the run.
        workdir: its folder.
        profile: steps to trace.
    """

    run: Run
    workdir: Path
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        self._key = jax.random.key(self.run.settings.seed, impl="threefry2x32")
        self._programs: dict[StepCapacity, Any] = {}
        self._evaluator: _Evaluator | None = None
        self._last_loads: tuple[np.ndarray, np.ndarray] | None = None

    def train(self, checkpoints: Checkpoints) -> int:
        """Train to the end, or until a signal asks to stop.

        Returns:
            The number of steps done.

        Raises:
            UserError: when a checkpoint cannot be used or written, data is lost, or a loss is not finite and the run
                must stop.
        """
        state, capacity = self._start(checkpoints)
        first = int(state.step)
        settings = self.run.settings
        if first >= settings.steps:
            _LOG.info("all %d steps are done already", settings.steps)
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(MetricsWriter(self.workdir, first))
            progress = stack.enter_context(Progress(settings.steps, first, log_every=settings.log_every))
            stop = stack.enter_context(StopRequest())
            prepared = stack.enter_context(Ahead(lambda: self._prepare(first, capacity)))
            done = first
            while done < settings.steps:
                started = time.perf_counter()
                item = next(prepared)
                state, row = self._step(state, item, checkpoints)
                done += 1
                row["step_s"] = time.perf_counter() - started
                row["tokens_per_s"] = item.stats.tokens / row["step_s"]
                stopping = stop.agreed()
                # Saved before anything else is made of the state, so that a failure there loses no step.
                if done % settings.save_every == 0 or done == settings.steps or stopping:
                    metrics.flush()
                    checkpoints.save(done, state, self.run.meta(done, item.capacity))
                if not stopping:
                    self._periodic(state, done, row)
                self._last_loads = item.stats.loads
                metrics.write(done - 1, row)
                progress.update(done, _report(row))
                self.profile.at(done - first, self.workdir / "profile")
                if stopping:
                    _LOG.info("stopped after step %d; the same command goes on from there", done)
                    break
            checkpoints.wait()
        self._plot(done)
        return done

    def _start(self, checkpoints: Checkpoints) -> tuple[TrainState, StepCapacity]:
        latest = checkpoints.latest()
        capacity, state = None, None
        if latest is not None:
            meta = checkpoints.meta(latest)
            self.run.check_same_data(meta, checkpoints)
            state = checkpoints.restore(self.run.abstract_state, step=latest).state
            capacity = self.run.saved_capacity(meta)
            _LOG.info("going on from step %d of %s", latest, checkpoints.directory)
        if state is None:
            state = self.run.init_state()
        if capacity is None:
            first, settings = int(state.step), self.run.settings
            count = min(settings.lookahead, max(settings.steps - first, 1))
            capacity = self.run.initial_capacity(
                self.run.data.train, count * settings.micro_batches, first * settings.micro_batches
            )
        return state, capacity

    def _prepare(self, first: int, capacity: StepCapacity) -> Iterator[PreparedStep]:
        """Steps with data, plans and arrays, in a thread beside the step that runs."""
        run, micro = self.run, self.run.settings.micro_batches

        def upcoming(step: int) -> Iterator[StepIndex]:
            last = min(step + run.settings.lookahead, run.settings.steps)
            return (run.data.train.step(t) for t in range(step * micro, last * micro))

        assembler = StepAssembler(run.planner, run.mesh, capacity, upcoming=upcoming)
        reader = StepReader(
            run.data.train,
            local_devices=assembler.local_devices,
            num_devices=run.planner.num_devices,
            bad_limit=run.settings.data.bad_limit,
        )
        with make_loader(reader, start_step=first * micro) as loader:
            for step in range(first, run.settings.steps):
                yield assembler.assemble(step, [next(loader)[1] for _ in range(micro)])

    def _step(
        self, state: TrainState, item: PreparedStep, checkpoints: Checkpoints
    ) -> tuple[TrainState, dict[str, Any]]:
        if item.capacity not in self._programs:
            self._programs[item.capacity] = make_train_step(self.run.program, item.capacity)
        state, metrics = self._programs[item.capacity](state, item.inputs, self._key)
        # Waiting here keeps at most one step in flight: several dead-lock XLA's CPU collectives.
        found: StepMetrics = jax.device_get(metrics)
        if not found.plans_agree:
            raise RuntimeError(
                f"step {item.step}: processes computed different plans; they see different data or run different"
                " versions of the code."
            )
        if not found.finite:
            self._report_nonfinite(item.step, found, checkpoints)
        stats = item.stats
        learning_rate = self.run.settings.optimizer.learning_rate(self.run.settings.steps)(item.step)
        return state, {
            "loss": float(found.loss),
            "grad_norm": float(found.grad_norm),
            "learning_rate": float(learning_rate),
            "tokens": stats.tokens,
            "sequences": stats.sequences,
            "load_before": stats.max_over_mean_before,
            "load_after": stats.max_over_mean,
            "static_cost_before": stats.static_cost_before,
            "static_cost": stats.static_cost,
            "padded_fraction": stats.padded_fraction,
            "rows_sent_fraction": stats.rows_sent_fraction,
            "compilations": len(self._programs),
            "bad_samples": stats.bad,
            "skipped": int(not found.finite),
        }

    def _report_nonfinite(self, step: int, found: StepMetrics, checkpoints: Checkpoints) -> None:
        text = (
            f"step {step}: loss {float(found.loss)}, gradient norm {float(found.grad_norm)};"
            " the update was not applied"
        )
        if self.run.settings.on_nonfinite == "stop":
            latest = checkpoints.latest()
            kept = (
                "no checkpoint was written yet"
                if latest is None
                else f"the checkpoint of step {latest} is kept"
            )
            raise UserError(
                f"{text}. {kept}. Lower the learning rate, or set train.on_nonfinite=skip to go on."
            )
        _LOG.warning("%s (train.on_nonfinite=skip)", text)

    def _periodic(self, state: TrainState, done: int, row: dict[str, Any]) -> None:
        settings = self.run.settings

        def due(every: int) -> bool:
            return done == settings.steps or (every > 0 and done % every == 0)

        if self.run.data.validation is not None and due(settings.eval_every):
            row["validation_loss"] = self._validate(state)
        if settings.sample_prompts and due(settings.sample_every):
            self._draw_samples(state, done)

    def _validate(self, state: TrainState) -> float:
        if self._evaluator is None:
            self._evaluator = _Evaluator(self.run, self._key)
        return self._evaluator.loss(state.ema)

    def _draw_samples(self, state: TrainState, done: int) -> None:
        requests = [parse_request(text, i) for i, text in enumerate(self.run.settings.sample_prompts)]
        sampler = PictureSampler(self.run, seed=self.run.settings.seed)
        pictures = sampler(state.ema, requests)
        if jax.process_index() == 0:
            save_grid(
                self.workdir / "samples" / f"step_{done:07d}.png",
                [picture[0] if len(picture) == 1 else picture for picture in pictures],
                [request.prompt for request in requests],
                title=f"step {done}, EMA weights",
            )

    def _plot(self, done: int) -> None:
        """Plots of the run; a run without steps has none."""
        if jax.process_index() != 0 or not done:
            return
        rows = [row for row in read_metrics(self.workdir) if math.isfinite(row.get("loss", math.nan))]
        if rows:
            plot_training(self.workdir / "training.png", rows, title=f"{done} steps")
        if self._last_loads is not None:
            before, after = self._last_loads
            plot_loads(self.workdir / "loads.png", DeviceLoads(*before), DeviceLoads(*after))


class _Evaluator:
    """The loss on held-out data, with the same random draws each time."""

    def __init__(self, run: Run, key: Any) -> None:
        assert run.data.validation is not None
        self._run, self._key = run, key
        self._sampler = run.data.validation
        capacity = run.initial_capacity(self._sampler, self._sampler.num_steps)
        self._assembler = StepAssembler(run.planner, run.mesh, capacity)
        self._step = make_eval_step(run.program, capacity)

    def loss(self, params: Any) -> float:
        """Weighted mean over all held-out elements; batches may be unequal."""
        reader = StepReader(
            self._sampler,
            local_devices=self._assembler.local_devices,
            num_devices=self._run.planner.num_devices,
            bad_limit=self._run.settings.data.bad_limit,
        )
        total = weight = 0.0
        for index in range(self._sampler.num_steps):
            item = self._assembler.assemble(index, [reader.read(index)])
            part = jax.device_get(self._step(params, item.inputs, np.int32(index), self._key))
            total, weight = total + float(part[0]), weight + float(part[1])
        return total / max(weight, 1.0)


def _report(row: dict[str, Any]) -> StepReport:
    names = ("loss", "tokens_per_s", "step_s", "load_before", "load_after", "padded_fraction", "compilations")
    return StepReport(**{name: row[name] for name in names})
