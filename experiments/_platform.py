"""Starting JAX for a run: virtual CPU devices, several processes, the mesh."""

import os
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from experiments._config import UserError, checking
from parallel import data_mesh

# XLA's CPU client dead-locks on collectives of several steps in flight when its thread pool has few threads.
_CPU_THREADS = "32"


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Which process of how many this is; all None for a single one, or what a cluster's environment says.

    Attributes:
        coordinator: host:port of process 0.
        num_processes, process_id: as `jax.distributed.initialize` takes them.
        cluster: several processes whose addresses JAX finds out itself (SLURM, Kubernetes, MPI).
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    cluster: bool = False


def prepare_platform(num_devices: int, processes: ProcessSettings) -> None:
    """Configure JAX before it touches a device: virtual CPU devices for this process, and the other processes.

    The number of virtual CPU devices has no effect where there are GPUs.

    Raises:
        UserError: if some but not all of coordinator, num_processes and process_id are given, or devices cannot be dealt
            out to processes.
    """
    os.environ.setdefault("NPROC", _CPU_THREADS)
    count = processes.num_processes or 1
    if num_devices % count:
        raise UserError(
            f"train.num_devices must be a multiple of the processes; got num_devices={num_devices}, processes={count}."
        )
    jax.config.update("jax_num_cpu_devices", num_devices // count)
    explicit = (processes.coordinator, processes.num_processes, processes.process_id)
    if any(x is not None for x in explicit):
        if any(x is None for x in explicit):
            raise UserError(
                "--coordinator, --num-processes and --process-id go together; got"
                f" {processes.coordinator}, {processes.num_processes}, {processes.process_id}."
            )
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(*explicit)
    elif processes.cluster:
        jax.distributed.initialize()


def make_mesh(num_devices: int, shards: int) -> Mesh:
    """The mesh of a run.

    Raises:
        UserError: if there are not that many devices, or `shards` does not divide them.
    """
    devices = jax.devices()
    if num_devices > len(devices):
        raise UserError(
            f"train.num_devices must be at most the {len(devices)} {devices[0].platform} devices there are; got"
            f" num_devices={num_devices}. Set train.num_devices, or add machines."
        )
    if jax.process_count() > 1 and num_devices != len(devices):
        raise UserError(
            f"with several processes train.num_devices must be all {len(devices)} devices; got {num_devices}."
        )
    with checking():
        return data_mesh(devices[:num_devices], shards=shards)


def needs_padded_exchange(mesh: Mesh) -> bool:
    """Whether this mesh's platform has no ragged collective."""
    return mesh.devices.flat[0].platform == "cpu"


def device_memory_bytes(mesh: Mesh) -> int | None:
    """Memory of a device, where the platform tells."""
    stats = mesh.local_devices[0].memory_stats()
    return None if stats is None else stats.get("bytes_limit")
