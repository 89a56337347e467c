"""Starting JAX for a run: virtual CPU devices, several processes, the mesh."""

import ctypes
import functools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from experiments._config import UserError, checking, one_line
from parallel import data_mesh

_LOG = logging.getLogger(__name__)

# XLA's CPU client dead-locks on collectives of several steps in flight when its thread pool has few threads.
_CPU_THREADS = "32"
_MOST_VIRTUAL_DEVICES = 1024
_CPU_OPTIONS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": False,
    "xla_cpu_copy_insertion_use_region_analysis": True,
}
# Bytes of parameters that one collective may carry: all of a layer's, whatever the model.
_LAYER_BYTES = 4 << 30
_CUDA_OPTIONS = {
    # By default every collective in the loops of FLUX.1's step is waited for where it starts.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # A layer has some twenty parameters. One gather of each would need as many pieces of compute to run under; so the
    # gathers of a layer are one, and the reduce-scatters of its gradients.
    "xla_gpu_all_gather_combine_threshold_bytes": _LAYER_BYTES,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": _LAYER_BYTES,
    "xla_gpu_all_reduce_combine_threshold_bytes": _LAYER_BYTES,
    # In the backward pass a gather, a reduce-scatter and an exchange of attention are under way; the scheduler's
    # default of one makes it choose.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
# glibc's `mallopt`: parameter and value.
_MALLOC_OPTIONS = {"trim threshold": (-1, -1), "top pad": (-2, 64 << 20), "mmap threshold": (-3, 32 << 20)}
# Where Linux says how much memory a container may use: control groups of version 2, and of version 1.
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# How long the others may work on after this process has done its part.
_LONGEST_WAIT_S = 14 * 24 * 3600
# How long the others may take to compile the same program.
_COMPILE_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Which process of how many this is; all None for a single one, or what a cluster's environment says.

    Attributes:
        coordinator: host:port of process 0.
        num_processes, process_id: as `jax.distributed.initialize` takes them.
        cluster: several processes whose addresses JAX finds out itself (SLURM, Kubernetes, MPI).
        heartbeat_s: seconds of silence after which a process counts as dead and the others end.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    cluster: bool = False
    heartbeat_s: int = 60


def prepare_platform(num_devices: int, processes: ProcessSettings) -> None:
    """Configure JAX before it touches a device: virtual CPU devices for this process, and the other processes.

    The number of virtual CPU devices has no effect where there are GPUs.

    Raises:
        UserError: if some but not all of coordinator, num_processes and process_id are given, devices cannot be dealt
            out to processes, or the other processes cannot be reached.
    """
    os.environ.setdefault("NPROC", _CPU_THREADS)
    explicit = (processes.coordinator, processes.num_processes, processes.process_id)
    if any(x is not None for x in explicit):
        _check_explicit(processes)
    count = processes.num_processes or 1
    if num_devices % count:
        raise UserError(
            f"train.num_devices must be a multiple of the processes; got num_devices={num_devices}, processes={count}."
        )
    _make_virtual_devices(num_devices // count)
    if processes.coordinator is None and not processes.cluster:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            *explicit,
            local_device_ids=_all_gpus_of_the_task() if processes.cluster else None,
            heartbeat_timeout_seconds=processes.heartbeat_s,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of the run cannot be joined: {one_line(str(error))}. Check --coordinator, which every"
            " process must be able to reach, or what the cluster's environment says."
        ) from error


def _all_gpus_of_the_task() -> list[int] | None:
    """All GPUs of the machine for a SLURM task that is alone on it, of which JAX would take one; else None."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if "JAX_LOCAL_DEVICE_IDS" in os.environ or not gpus.isdigit():
        return None
    return list(range(int(gpus))) if re.fullmatch(r"1(\(x\d+\))?", tasks) else None


def _keep_freed_memory() -> None:
    """Have freed memory kept for the next buffer: XLA's CPU client gets every one from malloc, every step.

    By default glibc hands large ones back to the system, and faulting them in again takes a sixth of a step. The price
    is that the process keeps the most memory it ever had.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for name, (parameter, value) in _MALLOC_OPTIONS.items():
        if not mallopt(parameter, value):
            _LOG.debug("malloc's %s cannot be set to %d", name, value)


def _check_explicit(processes: ProcessSettings) -> None:
    address, count, index = processes.coordinator, processes.num_processes, processes.process_id
    if address is None or count is None or index is None or processes.cluster:
        raise UserError(
            "--coordinator, --num-processes and --process-id go together, and without --cluster; got"
            f" {address}, {count}, {index}, cluster={processes.cluster}."
        )
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UserError(f"--coordinator is HOST:PORT of process 0; got {address!r}.")
    if count < 1 or not 0 <= index < count:
        raise UserError(f"--process-id must be in [0, --num-processes); got {index} of {count}.")


def _make_virtual_devices(count: int) -> None:
    """Ask for CPU devices; where a program that uses us has some already, `make_mesh` says if they are too few."""
    if count > _MOST_VIRTUAL_DEVICES:
        return  # `make_mesh` says that there are fewer
    if jax.config.jax_num_cpu_devices >= count:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        _LOG.debug("devices are in use already: their number stays")


def make_mesh(num_devices: int, shards: int) -> Mesh:
    """The mesh of a run.

    Raises:
        UserError: if there are not that many devices, or `shards` does not divide them.
    """
    devices = jax.devices()
    if devices[0].platform == "cpu":
        _keep_freed_memory()
    if num_devices > len(devices):
        raise UserError(
            f"train.num_devices must be at most the {len(devices)} {devices[0].platform} devices there are; got"
            f" num_devices={num_devices}. Set train.num_devices, or add machines."
        )
    if jax.process_count() > 1 and num_devices != len(devices):
        raise UserError(
            f"with several processes train.num_devices must be all {len(devices)} devices; got {num_devices}. On CPU"
            " name the processes by --coordinator and not by --cluster: then each makes its share of the devices."
        )
    with checking():
        return data_mesh(devices[:num_devices], shards=shards)


def compiled_together(program: Any, name: str, *args: Any) -> Any:
    """A jitted program, compiled by all processes before any of them runs it.

    A first collective gives up on a process that arrives half a minute late, and compiling may well take one process so
    much longer than another. A single process compiles at the first call.

    Args:
        program: from `jax.jit`.
        name: of the program, each once in a run.
        *args: what it will be called with, or the like.
    """
    if jax.process_count() == 1:
        return program
    compiled = program.lower(*args).compile()
    client = ocp.multihost.get_jax_distributed_client()
    client.wait_at_barrier(f"compiled-{name}", _COMPILE_TIMEOUT_S * 1000)
    return compiled


def wait_for_others(name: str) -> None:
    """Returns when all processes have come here; one that ended earlier would take the others with it.

    Args:
        name: of the place, each once in a run.
    """
    if jax.process_count() > 1:
        ocp.multihost.get_jax_distributed_client().wait_at_barrier(name, _LONGEST_WAIT_S * 1000)


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needs_padded_exchange(mesh: Mesh) -> bool:
    """Whether this mesh's platform has no ragged collective."""
    return mesh.devices.flat[0].platform == "cpu"


def compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, Any] | None:
    """What XLA should do otherwise than by default on this mesh's platform; None where nothing is known to help.

    On virtual CPU devices the default schedule spreads a device's work over threads that the other devices need, and
    the default copy insertion copies the accumulators of attention's loops at every turn: together a quarter of the
    step. On NVIDIA GPUs the default schedule runs nothing under the gathers of sharded parameters and the
    reduce-scatters of their gradients; with these options all of them have attention under them (see docs/gpus.md). A
    version of XLA that does not know the options goes without.
    """
    if isinstance(mesh, AbstractMesh):
        return None
    by_platform: dict[str, dict[str, Any]] = {
        "cpu": _CPU_OPTIONS,
        "gpu": _CUDA_OPTIONS,
        "cuda": _CUDA_OPTIONS,
    }
    options = by_platform.get(mesh.devices.flat[0].platform)
    if options is None or not _known_to_compiler(mesh, tuple(options.items())):
        return None
    return dict(options)


@functools.cache
def _known_to_compiler(mesh: Mesh, items: tuple[tuple[str, Any], ...]) -> bool:
    options = dict(items)
    try:
        program = jax.jit(
            lambda: 0, out_shardings=NamedSharding(mesh, PartitionSpec()), compiler_options=options
        )
        program.lower().compile()
    except (RuntimeError, ValueError) as error:
        _LOG.warning(
            "this XLA does not know the options %s, steps take longer: %s", options, one_line(str(error))
        )
        return False
    return True


def device_memory_bytes(devices: Sequence[Any]) -> int:
    """Memory of a device of some of this process; virtual ones share the host's."""
    stats = devices[0].memory_stats()
    limit = None if stats is None else stats.get("bytes_limit")
    return limit or _host_memory_bytes() // len(devices)


def _host_memory_bytes() -> int:
    """Memory of this machine, or what a container leaves of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in _CONTAINER_LIMITS if path.is_file()]
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def put_everywhere(values: Any, sharding: Any) -> jax.Array:
    """A global array of values that every process has."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
