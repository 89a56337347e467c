"""A published pipeline opened for sampling by the programs."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments._config import UserError, checking
from experiments._platform import ProcessSettings, compiled_together, compiler_options, prepare_platform
from jaxdit.pipelines import open_pipeline
from jaxdit.sampling import Engine, Request, Sample, StepCache
from parallel import data_mesh


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a pipeline is opened.

    Attributes:
        model: folder of the pipeline.
        devices: number to use; all if None.
        devices_per_machine: of the machines, where JAX does not know.
        dtype: of parameters and activations.
        shards: devices that share a copy of the parameters: "all", "machine" or "one".
        cache: folder where compiled programs are kept; None keeps none.
        on_long: what becomes of a caption that is too long: "error" or "truncate".
        step_cache: leaves blocks out of evaluations in which little changes; None computes all.
        processes: that sample together; None for one.
    """

    model: Path
    devices: int | None = None
    devices_per_machine: int | None = None
    dtype: str = "bfloat16"
    shards: str = "all"
    cache: Path | None = None
    on_long: str = "error"
    step_cache: StepCache | None = None
    processes: ProcessSettings | None = None


def engine_settings(args: argparse.Namespace, processes: ProcessSettings | None = None) -> EngineSettings:
    """What a command line of `add_engine_options` and --model says.

    Raises:
        UserError: for a threshold of the step cache that is none.
    """
    return EngineSettings(
        args.model,
        devices=args.devices,
        devices_per_machine=args.devices_per_machine,
        dtype=args.dtype,
        shards=args.shards,
        cache=args.cache,
        on_long="truncate" if args.truncate else "error",
        step_cache=step_cache(args),
        processes=processes,
    )


def step_cache(args: argparse.Namespace) -> StepCache | None:
    """The step cache that a command line asks for.

    Raises:
        UserError: for a threshold that is none.
    """
    with checking("--step-cache"):
        return None if args.step_cache is None else StepCache(args.step_cache)


def keep_programs(folder: Path | None) -> None:
    """Keep compiled programs in a folder, from now on; None keeps none."""
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", os.fspath(folder))


def open_engine(settings: EngineSettings) -> Engine:
    """Start JAX, and open the pipeline; its parameters are read at the first picture.

    Raises:
        UserError: for a folder that is no pipeline of ours, or devices that there are not.
    """
    keep_programs(settings.cache)
    if settings.devices is not None and settings.devices < 1:
        raise UserError(f"--devices must be at least 1; got {settings.devices}.")
    processes = settings.processes or ProcessSettings()
    prepare_platform(settings.devices or processes.num_processes or 1, processes)
    devices: list[Any] = jax.devices()
    if settings.devices is not None:
        if settings.devices > len(devices):
            raise UserError(
                f"--devices must be at most the {len(devices)} {devices[0].platform} devices there are; got"
                f" {settings.devices}."
            )
        devices = devices[: settings.devices]
    with checking():
        pipeline = open_pipeline(
            settings.model,
            devices,
            devices_per_machine=settings.devices_per_machine,
            compute_dtype=settings.dtype,
            shards=settings.shards,
            on_long=settings.on_long,
        )
        return Engine(
            pipeline,
            devices,
            devices_per_machine=settings.devices_per_machine,
            compiler_options=compiler_options(data_mesh(devices)),
            step_cache=settings.step_cache,
            compile_together=compiled_together if jax.process_count() > 1 else None,
        )


def generate(engine: Engine, requests: list[Request]) -> list[Sample]:
    """Samples of requests, with a progress bar.

    Raises:
        UserError: for a request that cannot be made.
    """
    show = jax.process_index() == 0
    with checking(), logging_redirect_tqdm(), tqdm(unit="evaluation", disable=not show) as bar:

        def progress(done: int, evaluations: int) -> None:
            bar.total = evaluations
            bar.update(done - bar.n)

        return engine.generate(requests, progress=progress)
