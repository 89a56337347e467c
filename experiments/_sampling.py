"""Prompts to pictures of a run: requests of any mixture of sizes, sampled by the engine."""

import argparse
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments._config import UserError, checking
from experiments._engine import engine_settings, keep_programs, open_engine
from experiments._platform import ProcessSettings, compiled_together, compiler_options
from experiments._run import Run
from experiments._run_flux import RunFluxPipeline
from experiments._run_pipeline import RunPipeline
from experiments._workdir import load_run
from jaxdit.pipelines import default_size
from jaxdit.sampling import Engine, Request, Sample
from jaxdit.training import SamplerSettings

_LOG = logging.getLogger(__name__)
_SIZE = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)")


def parse_size(text: str) -> tuple[int, int, int]:
    """Frames, height and width from "32x48" or "4x32x48".

    Raises:
        UserError: for another form.
    """
    text = text.strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(
            f"a size is HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH in pixels, such as 32x48; got {text!r}."
        )
    return int(match[1] or 1), int(match[2]), int(match[3])


def parse_request(text: str, number: int, *, seed: int = 0) -> Request:
    """A request from "caption | HEIGHTxWIDTH".

    Raises:
        UserError: for another form.
    """
    prompt, bar, size = text.rpartition("|")
    if not bar:
        raise UserError(f"a sample prompt is 'caption | HEIGHTxWIDTH'; got {text!r}.")
    frames, height, width = parse_size(size)
    return Request(prompt.strip(), height, width, frames, seed=seed, number=number)


def run_requests(run: Run) -> list[Request]:
    """Those of a config's sample prompts.

    Raises:
        UserError: for one of another form.
    """
    settings = run.settings
    return [parse_request(text, i, seed=settings.seed) for i, text in enumerate(settings.sample_prompts)]


def check_requests(requests: Sequence[Request], run: Run) -> None:
    """Refuse what a run's model cannot make, before its parameters are read.

    Raises:
        UserError: naming the rule.
    """
    pipeline = RunPipeline(run)
    with checking():
        for request in requests:
            pipeline.checked(request)


def run_engine(run: Run, pipeline: RunPipeline | RunFluxPipeline, **options: Any) -> Engine:
    """The engine of a run's model, on the devices of the run.

    Args:
        run: the run.
        pipeline: of the run.
        options: of `Engine`.
    """
    return Engine(
        pipeline,
        run.mesh.devices.ravel().tolist(),
        devices_per_machine=run.planner.devices_per_machine,
        compiler_options=compiler_options(run.mesh),
        compile_together=compiled_together if jax.process_count() > 1 else None,
        **options,
    )


def open_run_engine(
    workdir: Path,
    requests: Sequence[Request],
    make: Callable[[Run], RunPipeline | RunFluxPipeline],
    *,
    bindings: Sequence[str] = (),
    devices: int | None = None,
    processes: ProcessSettings | None = None,
    **options: Any,
) -> Engine:
    """The engine of a trained run; what is asked of it is checked before its parameters are read.

    Args:
        workdir: the run's folder.
        requests: that it will be asked for.
        make: the pipeline of the run.
        bindings: `--set` texts applied to the run's config.
        devices: to use instead of the run's.
        processes: that sample together.
        options: of `Engine`.

    Raises:
        UserError: if there is no run or no checkpoint in it, or for a request that cannot be made.
    """
    made: list[RunPipeline | RunFluxPipeline] = []

    def check(run: Run) -> None:
        with checking():
            made.append(make(run))
            for request in requests:
                made[0].checked(request)

    opened = load_run(workdir, bindings, devices, processes=processes, check=check)
    pipeline = made[0]
    pipeline.trained, pipeline.step = opened.params, opened.step
    return run_engine(opened.run, pipeline, **options)


def open_asked_engine(
    args: argparse.Namespace, requests: Sequence[Request] = (), processes: ProcessSettings | None = None
) -> Engine:
    """The engine of what a command line names: a run (`--workdir`), a pipeline (`--model`), or a run with the text
    encoders and autoencoder of a pipeline.

    Args:
        args: of `add_engine_options`, and workdir, model, bindings.
        requests: that it will be asked for; a run's parameters are read once they are checked.
        processes: that sample together.

    Raises:
        UserError: for what cannot be opened, or a request that cannot be made.
    """
    settings = engine_settings(args, processes)
    if args.workdir is None:
        return open_engine(settings)
    keep_programs(settings.cache)

    def make(run: Run) -> RunPipeline | RunFluxPipeline:
        if args.model is None:
            return RunPipeline(run)
        return RunFluxPipeline(run, args.model, on_long=settings.on_long)

    return open_run_engine(
        args.workdir,
        requests,
        make,
        bindings=args.bindings,
        devices=args.devices,
        processes=processes,
        step_cache=settings.step_cache,
    )


def default_picture_size(model: Path | None) -> tuple[int, int]:
    """Height and width in pixels where nobody says another: of a pipeline what it was trained for, of a run 32 x 32.

    Raises:
        UserError: for a folder that is no pipeline.
    """
    if model is None:
        return 32, 32
    with checking():
        return default_size(model)


class PictureSampler:
    """Pictures of a run while its parameters change.

    Args:
        run: the run, on the mesh to sample on.
        settings: steps, guidance, method; the run's own by default.
    """

    def __init__(self, run: Run, settings: SamplerSettings | None = None) -> None:
        self._pipeline = RunPipeline(run, settings=settings)
        self._engine = run_engine(run, self._pipeline)

    def __call__(self, params: Any, requests: Sequence[Request]) -> list[np.ndarray | None]:
        """Uint8 RGB of shape (frames, height, width, 3) for each request, None and a warning where one failed.

        With several processes all call it, and all get the pictures.

        Raises:
            UserError: for a request the model cannot make.
        """
        self._pipeline.trained = params
        self._engine.forget_params()
        try:
            with checking():
                samples = self._engine.generate(list(requests))
        finally:
            # The next ones will be others; until then nobody needs a second copy.
            self._pipeline.trained = None
            self._engine.forget_params()
        return [_frames(sample) for sample in samples]


def _frames(sample: Sample) -> np.ndarray | None:
    if sample.error is not None:
        _LOG.warning("no picture for %r: %s", sample.request.prompt, sample.error)
    return sample.frames
