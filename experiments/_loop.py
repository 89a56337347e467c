"""The training loop: steps, reports, checkpoints, validation and pictures."""

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments._checkpoint import Checkpoints
from experiments._config import UserError
from experiments._disk import writing
from experiments._feed import Ahead, PreparedStep, StepAssembler
from experiments._figures import DeviceLoads, plot_loads, plot_training, save_grid
from experiments._metrics import METRICS_FILE, MetricsWriter, Progress, StepReport, read_metrics
from experiments._plan_figure import plot_plan
from experiments._platform import compiled_together
from experiments._profile import Profile
from experiments._run import Run
from experiments._run_data import data_errors
from experiments._sampling import PictureSampler, run_requests
from experiments._signals import StopRequest
from experiments.data import StepIndex, StepReader, make_loader
from jaxdit.training import StepMetrics, TrainState, make_eval_step, make_train_step
from solver import StepCapacity

_LOG = logging.getLogger(__name__)

TRAINING_PLOT, LOADS_PLOT, LAYOUTS_PLOT = "training.png", "loads.png", "layouts.png"
# A run that skips so many steps one after the other has come to its end.
_MOST_SKIPPED_IN_A_ROW = 50
_MAKE_ROOM = "Make room or change its permissions; the checkpoints are as they were."


@dataclass(frozen=True)
class Start:
    """Where a run begins or goes on.

    Attributes:
        state: parameters and all that follows them.
        step: steps done.
        capacity: of the first program.
        row: metrics of the last step, as the checkpoint has them; None at the beginning.
    """

    state: TrainState
    step: int
    capacity: StepCapacity
    row: dict[str, Any] | None


@dataclass
class Trainer:
    """Runs a `Run` from its last checkpoint to its end.

    Attributes:
        run: the run.
        workdir: its folder.
        profile_steps: steps to trace with the profiler.
    """

    run: Run
    workdir: Path
    profile_steps: int = 0

    def __post_init__(self) -> None:
        self._key = jax.random.key(self.run.settings.seed, impl="threefry2x32")
        self._programs: dict[StepCapacity, Any] = {}
        self._evaluator: _Evaluator | None = None
        self._pictures: PictureSampler | None = None
        self._schedule = self.run.settings.optimizer.learning_rate(self.run.settings.steps)
        self._skipped_in_a_row = 0

    def start(self, checkpoints: Checkpoints) -> Start:
        """The state of the last checkpoint, or a fresh one; writes nothing.

        Raises:
            UserError: for a checkpoint of another model or other data, a damaged one, or rows no device can hold.
        """
        latest = checkpoints.latest()
        if latest is None:
            adapters = self.run.pretrained.check()
            capacity = self._fresh_capacity(0)
            return Start(self.run.init_state(adapters), 0, capacity, None)
        meta = checkpoints.meta(latest)
        self.run.check_same_data(meta, checkpoints.directory)
        self.run.pretrained.check_same(meta, checkpoints.directory)
        capacity = self.run.saved_capacity(meta) or self._fresh_capacity(latest)
        wanted = self.run.abstract_state._replace(frozen={})
        state = checkpoints.restore(wanted, step=latest).state._replace(frozen=self.run.pretrained.frozen())
        _LOG.info("going on from step %d of %s", latest, checkpoints.directory)
        return Start(state, latest, capacity, json.loads(meta.get("row", "null")))

    def _fresh_capacity(self, step: int) -> StepCapacity:
        """The capacity that holds the steps looked ahead at."""
        settings, micro = self.run.settings, self.run.settings.micro_batches
        count = min(settings.lookahead, max(settings.steps - step, 1))
        capacity = self.run.initial_capacity(self.run.training_data.train, count * micro, step * micro)
        self.run.check_rows(capacity.text + capacity.image, "the fullest device holds too many tokens")
        return capacity

    def train(self, start: Start, checkpoints: Checkpoints) -> int:
        """Train to the end, or until a signal asks to stop.

        Returns:
            The number of steps done.

        Raises:
            UserError: when a checkpoint cannot be used or written, data is lost, or a loss is not finite and the run
                must stop.
        """
        settings, state, done = self.run.settings, start.state, start.step
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(self._metrics(start))
            progress = stack.enter_context(Progress(settings.steps, done, log_every=settings.log_every))
            stop = stack.enter_context(StopRequest())
            profile = stack.enter_context(Profile(self.profile_steps, self.workdir / "profile"))
            prepared = stack.enter_context(Ahead(lambda: self._prepare(start.step, start.capacity)))
            while done < settings.steps:
                profile.before(done - start.step, settings.steps - done)
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
                    saved = state._replace(frozen={})  # it lies where it was loaded from
                    checkpoints.save(done, saved, self.run.meta(done, item.capacity, row))
                if not stopping:
                    self._periodic(state, done, row)
                metrics.write(done - 1, row)
                progress.update(done, _report(row))
                if stopping:
                    _LOG.info("stopped after step %d; the same command goes on from there", done)
                    break
            checkpoints.wait()
        self._plot(done)
        return done

    def finish(self, start: Start) -> None:
        """Make what a run that ended right after its last checkpoint still lacks: pictures, held-out loss, plots."""
        if start.step > self.run.settings.steps or not _on_process_0(lambda: self._is_unfinished(start.step)):
            _LOG.info("all %d steps are done already; raise train.steps to go on", start.step)
            return
        row = dict(start.row or {})
        with MetricsWriter(self.workdir, start.step - 1) as metrics:
            self._periodic(start.state, start.step, row)
            metrics.write(start.step - 1, row)
        self._plot(start.step)

    def _is_unfinished(self, done: int) -> bool:
        written = read_metrics(self.workdir) if (self.workdir / METRICS_FILE).is_file() else []
        rows = [row for row in written if row["step"] == done - 1]
        validated = self.run.training_data.validation is None or any("validation_loss" in row for row in rows)
        pictures = [self._samples_path(done)] if self.run.settings.sample_prompts else []
        wanted = [*pictures, *(self.workdir / name for name in (TRAINING_PLOT, LOADS_PLOT, LAYOUTS_PLOT))]
        return not (rows and validated and all(path.exists() for path in wanted))

    def _samples_path(self, done: int) -> Path:
        return self.workdir / "samples" / f"step_{done:07d}.png"

    @contextlib.contextmanager
    def _metrics(self, start: Start) -> Iterator[MetricsWriter]:
        """The metrics file, with the row of the last step even if its process ended between saving and writing it."""
        last = start.step - 1
        path = self.workdir / METRICS_FILE
        missing = start.row is not None and (not path.is_file() or _last_step(self.workdir, last) < last)
        with MetricsWriter(self.workdir, last if missing else start.step) as writer:
            if missing and start.row is not None:
                writer.write(last, start.row)
            yield writer

    def _prepare(self, first: int, capacity: StepCapacity) -> Iterator[PreparedStep]:
        """Steps with data, plans and arrays, in a thread beside the step that runs."""
        run, micro = self.run, self.run.settings.micro_batches
        sampler = run.training_data.train

        def upcoming(step: int) -> Iterator[StepIndex]:
            last = min(step + run.settings.lookahead, run.settings.steps)
            return (sampler.step(t) for t in range(step * micro, last * micro))

        assembler = StepAssembler(run.planner, run.mesh, capacity, upcoming=upcoming)
        reader = StepReader(
            sampler,
            local_devices=assembler.local_devices,
            num_devices=run.planner.num_devices,
            bad_limit=run.settings.data.bad_limit,
        )
        with data_errors(), make_loader(reader, start_step=first * micro) as loader:
            for step in range(first, run.settings.steps):
                yield assembler.assemble(step, [next(loader)[1] for _ in range(micro)])

    def _step(
        self, state: TrainState, item: PreparedStep, checkpoints: Checkpoints
    ) -> tuple[TrainState, dict[str, Any]]:
        skipped = int(state.skipped)
        state, metrics = self._program(state, item)(state, item.inputs, self._key)
        # Waiting here keeps at most one step in flight: several dead-lock XLA's CPU collectives.
        found: StepMetrics = jax.device_get(metrics)
        if not found.plans_agree:
            raise RuntimeError(
                f"step {item.step}: processes computed different plans; they see different data or run different"
                " versions of the code."
            )
        self._skipped_in_a_row = 0 if found.finite else self._skipped_in_a_row + 1
        if not found.finite:
            self._report_nonfinite(item.step, found, checkpoints)
        stats = item.stats
        learning_rate = self._schedule(item.step - skipped)  # the optimiser does not count skipped steps
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
            "computed_over_useful": stats.computed_over_useful,
            "padded_attention_fraction": stats.padded_attention_fraction,
            "rows_sent_fraction": stats.rows_sent_fraction,
            "compilations": len(self._programs),
            "bad_samples": stats.bad,
            "skipped": int(not found.finite),
        }

    def _program(self, state: TrainState, item: PreparedStep) -> Any:
        if item.capacity not in self._programs:
            step, name = make_train_step(self.run.program, item.capacity), f"train-{len(self._programs)}"
            self._programs[item.capacity] = compiled_together(step, name, state, item.inputs, self._key)
        return self._programs[item.capacity]

    def _report_nonfinite(self, step: int, found: StepMetrics, checkpoints: Checkpoints) -> None:
        text = (
            f"step {step}: loss {float(found.loss)}, gradient norm {float(found.grad_norm)};"
            " the update was not applied"
        )
        hopeless = self._skipped_in_a_row == _MOST_SKIPPED_IN_A_ROW
        if hopeless:
            text = f"{text}, nor were {_MOST_SKIPPED_IN_A_ROW - 1} before it"
        if hopeless or self.run.settings.on_nonfinite == "stop":
            checkpoints.wait()
            latest = checkpoints.latest()
            kept = (
                "no checkpoint was written yet"
                if latest is None
                else f"the checkpoint of step {latest} is kept"
            )
            raise UserError(
                f"{text}. {kept}. Lower the learning rate, or set train.on_nonfinite=skip to go on after single ones."
            )
        _LOG.warning("%s (train.on_nonfinite=skip)", text)

    def _periodic(self, state: TrainState, done: int, row: dict[str, Any]) -> None:
        settings = self.run.settings

        def due(every: int) -> bool:
            return done == settings.steps or (every > 0 and done % every == 0)

        if self.run.training_data.validation is not None and due(settings.eval_every):
            row["validation_loss"] = self._validate(state)
        if settings.sample_prompts and due(settings.sample_every):
            self._draw_samples(state, done)

    def _validate(self, state: TrainState) -> float:
        if self._evaluator is None:
            self._evaluator = _Evaluator(self.run, self._key)
        return self._evaluator.loss(state.all_ema)

    def _draw_samples(self, state: TrainState, done: int) -> None:
        requests = run_requests(self.run)
        if self._pictures is None:
            self._pictures = PictureSampler(self.run)
        drawn = self._pictures(state.all_ema, requests)
        made = [(r, frames) for r, frames in zip(requests, drawn, strict=True) if frames is not None]
        if jax.process_index() != 0 or not made:
            return
        path = self._samples_path(done)
        with writing(path, _MAKE_ROOM):
            save_grid(
                path,
                [frames[0] if len(frames) == 1 else frames for _, frames in made],
                [request.prompt for request, _ in made],
                title=f"step {done}, EMA weights",
            )

    def _plot(self, done: int) -> None:
        """Plots of the run so far, and of its last step."""
        if jax.process_index() != 0:
            return
        planner, micro = self.run.planner, self.run.settings.micro_batches
        last = [self.run.training_data.train.step((done - 1) * micro + i) for i in range(micro)]
        rows = [row for row in read_metrics(self.workdir) if math.isfinite(row.get("loss", math.nan))]
        with writing(self.workdir, _MAKE_ROOM):
            if rows:
                plot_training(self.workdir / TRAINING_PLOT, rows, title=f"{done} steps")
            before, after = planner.loads(last)
            plot_loads(self.workdir / LOADS_PLOT, DeviceLoads(*before), DeviceLoads(*after))
            title = f"step {done}, bags {self.run.settings.bags}"
            plot_plan(self.workdir / LAYOUTS_PLOT, planner.layout(last[0]).plan, title=title)


def _on_process_0(decide: Callable[[], bool]) -> bool:
    """What process 0 decides, on all processes."""
    if jax.process_count() == 1:
        return decide()
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.array(jax.process_index() == 0 and decide())))


def _last_step(workdir: Path, below: int) -> int:
    """The last step up to `below` that the metrics of a run have; -1 if none."""
    return max((row["step"] for row in read_metrics(workdir) if row["step"] <= below), default=-1)


class _Evaluator:
    """The loss on held-out data, with the same random draws each time."""

    def __init__(self, run: Run, key: Any) -> None:
        validation = run.training_data.validation
        assert validation is not None
        self._run, self._key = run, key
        self._sampler = validation
        capacity = run.initial_capacity(self._sampler, self._sampler.num_steps)
        self._assembler = StepAssembler(run.planner, run.mesh, capacity)
        self._program = make_eval_step(run.program, capacity)
        self._compiled: Any = None

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
            with data_errors():
                data = reader.read(index)
            item = self._assembler.assemble(index, [data])
            args = (params, item.inputs, np.int32(index), self._key)
            self._compiled = self._compiled or compiled_together(self._program, "evaluation", *args)
            part = jax.device_get(self._compiled(*args))
            total, weight = total + float(part[0]), weight + float(part[1])
        return total / max(weight, 1.0)


def _report(row: dict[str, Any]) -> StepReport:
    return StepReport(**{field.name: row[field.name] for field in dataclasses.fields(StepReport)})
