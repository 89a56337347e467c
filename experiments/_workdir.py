"""The folder of a run: what it says of the run, who may write to it, and opening it for sampling and evaluation."""

import contextlib
import errno
import fcntl
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments._config import (
    UserError,
    check_used,
    checking,
    config_text,
    load_config,
    operative_config,
    versions,
)
from experiments._disk import check_writable, write_text

CONFIG_FILE = "config.gin"
OPERATIVE_CONFIG_FILE = "operative_config.gin"
ABOUT_FILE = "about.json"
_LOCK_FILE = ".lock"

_LOG = logging.getLogger(__name__)


def checked_settings(bindings: Sequence[str]) -> Any:
    """The settings of the loaded config, as far as they can be checked without a device.

    Args:
        bindings: the `--set` texts it was loaded with.

    Raises:
        UserError: naming the rule.
    """
    from experiments import _components
    from experiments._settings import check_settings

    with checking():
        settings = _components.train()
    check_used(bindings)
    check_settings(settings)
    return settings


@contextlib.contextmanager
def only_user(workdir: Path) -> Iterator[None]:
    """Holds the folder against another training: the second would take the first one's unfinished saves for leftovers.

    The system releases the lock when the process ends, however it ends. With several processes the first holds it.

    Raises:
        UserError: if another process holds it, or the folder cannot be written to.
    """
    import jax

    if jax.process_index() != 0:
        yield
        return
    check_writable(workdir)
    if (workdir / _LOCK_FILE).is_dir():
        raise UserError(f"{workdir / _LOCK_FILE} must be a file; got a folder. Remove it.")
    with open(workdir / _LOCK_FILE, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(
                    f"another process is training in {workdir}. Wait for it, or choose another --workdir."
                ) from error
            _LOG.warning("%s cannot be locked (%s): make sure that one run uses it", workdir, error.strerror)
        yield


def describe(run: Any, workdir: Path) -> None:
    """Say what the run is, and save it in its folder: the config, all parameters used, versions and mesh.

    Raises:
        UserError: if the folder cannot be written to.
    """
    import jax

    devices = run.mesh.devices
    _LOG.info(
        "%s parameters, %d x %s, %d shard(s), bags %s, workdir %s",
        f"{run.num_params:,}",
        devices.size,
        devices.flat[0].device_kind,
        run.mesh.shape["shard"],
        run.settings.bags,
        workdir,
    )
    if jax.process_index() != 0:
        return
    about = {
        "versions": versions(),
        "mesh": {name: int(size) for name, size in run.mesh.shape.items()},
        "devices": [str(device) for device in devices.flat],
        "device_kind": devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "parameters": run.num_params,
        "data": run.training_data.train.digest,
    }
    write_text(workdir / CONFIG_FILE, config_text())
    write_text(workdir / OPERATIVE_CONFIG_FILE, operative_config())
    write_text(workdir / ABOUT_FILE, json.dumps(about, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A training run opened for its pictures.

    Attributes:
        run: the run, without its data.
        params: its EMA parameters, on the mesh.
        step: the step they are of.
    """

    run: Any
    params: Any
    step: int


def load_run(
    workdir: Path,
    bindings: Sequence[str],
    num_devices: int | None = None,
    *,
    adapters_alone: bool = False,
    processes: Any = None,
    check: Callable[[Any], None] | None = None,
) -> OpenedRun:
    """The run of a workdir with its EMA parameters; the data it was trained on need not be there.

    Args:
        workdir: the run's folder.
        bindings: `--set` texts applied to the run's own config, for example another sampler.
        num_devices: devices to use instead of the run's, each sequence spread over all of them; parameters are then
            replicated unless `bindings` say otherwise.
        adapters_alone: of a run that trained adapters, load nothing else.
        processes: `experiments._platform.ProcessSettings`, of several that open it together.
        check: called with the run before its parameters are read, to refuse what it cannot do while that costs nothing.

    Raises:
        UserError: if there is no run or no checkpoint in it.
    """
    config = workdir / CONFIG_FILE
    if not config.is_file():
        raise UserError(f"no {CONFIG_FILE} in {workdir}: is it the workdir of a run of experiments.train?")
    from experiments import _components, _platform

    assert _components  # registers what a run's config names
    load_config(config, [*_on_devices(num_devices), *bindings])
    settings = checked_settings(bindings)
    _platform.prepare_platform(settings.num_devices, processes or _platform.ProcessSettings())

    from experiments._checkpoint import Checkpoints
    from experiments._run import Run
    from jaxdit.training import merged

    mesh = _platform.make_mesh(settings.num_devices, settings.shards)
    run = Run.make(settings, mesh, None)
    if check is not None:
        check(run)
    with Checkpoints(workdir, read_only=True) as checkpoints:
        restored = checkpoints.restore({"ema": run.abstract_state.ema}, partial=True)
        run.pretrained.check_same(restored.meta, checkpoints.directory, has_base=not adapters_alone)
    _LOG.info("EMA weights of step %d of %s", restored.step, workdir)
    frozen = {} if adapters_alone else run.pretrained.frozen()
    return OpenedRun(run, merged(frozen, restored.state["ema"]), restored.step)


def _on_devices(count: int | None) -> list[str]:
    """Bindings for another number of devices than the run's."""
    if count is None:
        return []
    if count < 1:
        raise UserError(f"--devices must be at least 1; got {count}.")
    return [
        f"train.num_devices={count}",
        f"train.bags=g{count}n1",
        "train.shards=1",
        "train.devices_per_machine=None",
    ]
