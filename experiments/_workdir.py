"""A finished or running training run, opened for sampling and evaluation."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments._config import UserError, checking, load_config

CONFIG_FILE = "config.gin"


def load_run(workdir: Path, bindings: Sequence[str]) -> tuple[Any, Any, int]:
    """The run of a workdir, its EMA parameters on the mesh, and the step they are of.

    Args:
        workdir: the run's folder.
        bindings: `--set` texts applied to the run's own config, for example another sampler or fewer devices.

    Raises:
        UserError: if there is no run or no checkpoint in it.
    """
    config = workdir / CONFIG_FILE
    if not config.is_file():
        raise UserError(f"no {CONFIG_FILE} in {workdir}: is it the workdir of a run of experiments.train?")
    from experiments import _components, _platform

    load_config(config, bindings)
    with checking():
        settings = _components.train()
    _platform.prepare_platform(settings.num_devices, _platform.ProcessSettings())

    from experiments._checkpoint import Checkpoints
    from experiments._run import Run, open_data

    mesh = _platform.make_mesh(settings.num_devices, settings.shards)
    run = Run.make(settings, mesh, open_data(settings))
    with Checkpoints(workdir, read_only=True) as checkpoints:
        restored = checkpoints.restore({"ema": run.abstract_state.ema}, partial=True)
    logging.info("EMA weights of step %d of %s", restored.step, workdir)
    return run, restored.state["ema"], restored.step
