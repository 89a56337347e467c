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
from experiments._platform import ProcessSettings, compiler_options, prepare_platform
from jaxdit.pipelines import FluxPipeline
from jaxdit.sampling import Engine, Request, Sample
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
    """

    model: Path
    devices: int | None = None
    devices_per_machine: int | None = None
    dtype: str = "bfloat16"
    shards: str = "all"
    cache: Path | None = None
    on_long: str = "error"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that `engine_settings` reads, but for --model."""
    parser.add_argument("--devices", type=int, help="number of devices (default: all)")
    parser.add_argument("--devices-per-machine", type=int, help="of a machine, where JAX does not know")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--shards", choices=["all", "machine", "one"], default="all", help="share one copy of the weights"
    )
    parser.add_argument("--cache", type=Path, help="folder where compiled programs are kept")
    parser.add_argument(
        "--truncate", action="store_true", help="cut captions that are too long, instead of refusing them"
    )


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """What a command line of `add_engine_options` and --model says."""
    return EngineSettings(
        args.model,
        devices=args.devices,
        devices_per_machine=args.devices_per_machine,
        dtype=args.dtype,
        shards=args.shards,
        cache=args.cache,
        on_long="truncate" if args.truncate else "error",
    )


def open_engine(settings: EngineSettings) -> Engine:
    """Start JAX, and open the pipeline; its parameters are read at the first picture.

    Raises:
        UserError: for a folder that is no pipeline of ours, or devices that there are not.
    """
    if settings.cache is not None:
        jax.config.update("jax_compilation_cache_dir", os.fspath(settings.cache))
    if settings.devices is not None and settings.devices < 1:
        raise UserError(f"--devices must be at least 1; got {settings.devices}.")
    prepare_platform(settings.devices or 1, ProcessSettings())
    devices: list[Any] = jax.devices()
    if settings.devices is not None:
        if settings.devices > len(devices):
            raise UserError(
                f"--devices must be at most the {len(devices)} {devices[0].platform} devices there are; got"
                f" {settings.devices}."
            )
        devices = devices[: settings.devices]
    with checking():
        pipeline = FluxPipeline(
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
        )


def generate(engine: Engine, requests: list[Request]) -> list[Sample]:
    """Samples of requests, with a progress bar.

    Raises:
        UserError: for a request that cannot be made.
    """
    with checking():
        requests = engine.checked(requests)
    with logging_redirect_tqdm(), tqdm(unit="evaluation", disable=jax.process_index() != 0) as bar:

        def progress(done: int, evaluations: int) -> None:
            bar.total = evaluations
            bar.update(done - bar.n)

        return engine.generate(requests, progress=progress)
