"""Meshes for balanced training: the devices of a plan in order, and those that share parameters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from parallel._check import device_list, integer

REPLICA_AXIS = "replica"
SHARD_AXIS = "shard"
# Plans number devices along both axes, row by row.
DATA_AXES = (REPLICA_AXIS, SHARD_AXIS)


def data_mesh(devices: Sequence[Any] | None = None, *, shards: int | None = None) -> Mesh:
    """A (replica, shard) mesh: sequences are spread over all devices, parameters sharded over the `shard` axis.

    Devices are ordered by process and id, so that a plan's device d is on machine d // devices_per_machine, and shards
    of the parameters are neighbours: with `shards` the devices of a machine, parameters are gathered inside machines
    and replicated across them.

    Args:
        devices: devices to use; all by default.
        shards: size of the shard axis; all devices by default, 1 replicates the parameters.

    Returns:
        The mesh, with automatic axes.

    Raises:
        TypeError: if `shards` is no integer, or devices are no sequence of devices.
        ValueError: if there are no devices, one is given twice, or they cannot be divided into groups of `shards`.

    Example:
        >>> import jax
        >>> mesh = data_mesh(jax.devices()[:1])
        >>> mesh.axis_names, mesh.devices.shape
        (('replica', 'shard'), (1, 1))
    """
    devices = sorted(device_list("data_mesh", devices), key=lambda d: (d.process_index, d.id))
    shards = len(devices) if shards is None else shards
    shards = integer("data_mesh", "shards", shards, advice="Use 1 to replicate parameters.")
    if shards < 1 or len(devices) % shards:
        raise ValueError(
            f"data_mesh: shards must divide the devices; got shards={shards}, devices={len(devices)}."
            " Use 1 to replicate parameters, or the number of devices to shard them over all."
        )
    grid = np.array(devices, dtype=object).reshape(-1, shards)
    return Mesh(grid, DATA_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def check_machines(mesh: Mesh, devices_per_machine: int) -> None:
    """Check that a plan's machines can be those of a mesh: `solver.Topology` puts device d on d // devices_per_machine.

    Args:
        mesh: its devices, row by row, are the plan's.
        devices_per_machine: of the topology.

    Raises:
        TypeError: a mesh of another type, or a number that is no integer.
        ValueError: if the devices are not a multiple of it, or it puts the devices of one process on two machines.
            A single process may have as many machines as it likes, to try plans on one.

    Example:
        >>> import jax
        >>> check_machines(data_mesh(jax.devices()[:1]), 8)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: check_machines: devices_per_machine divides the devices of the mesh; got ...
    """
    if not isinstance(getattr(mesh, "devices", None), np.ndarray):
        raise TypeError(
            f"check_machines: mesh is a Mesh; got {type(mesh).__name__}. Make one with data_mesh."
        )
    advice = "Give the topology's."
    devices_per_machine = integer("check_machines", "devices_per_machine", devices_per_machine, advice=advice)
    devices = mesh.devices.ravel().tolist()
    if devices_per_machine < 1 or len(devices) % devices_per_machine:
        raise ValueError(
            "check_machines: devices_per_machine divides the devices of the mesh; got"
            f" devices_per_machine={devices_per_machine}, devices={len(devices)}. Give the devices of one machine."
        )
    machines: dict[int, set[int]] = {}
    for number, device in enumerate(devices):
        machines.setdefault(device.process_index, set()).add(number // devices_per_machine)
    for process, found in machines.items():
        if len(machines) > 1 and len(found) > 1:
            raise ValueError(
                "check_machines: devices of a process are on one machine; got"
                f" devices_per_machine={devices_per_machine}, with which those of process {process} are on machines"
                f" {sorted(found)}. Give the devices of one machine, and put the mesh's in the order of data_mesh."
            )
