"""Meshes for balanced training: the devices of a plan in order, and those that share parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

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
        ValueError: if the devices cannot be divided into groups of `shards`.
    """
    devices = sorted(jax.devices() if devices is None else devices, key=lambda d: (d.process_index, d.id))
    shards = len(devices) if shards is None else shards
    if shards < 1 or len(devices) % shards:
        raise ValueError(
            f"data_mesh: shards must divide the devices; got shards={shards}, devices={len(devices)}."
            " Use 1 to replicate parameters, or the number of devices to shard them over all."
        )
    grid = np.array(devices, dtype=object).reshape(-1, shards)
    return Mesh(grid, DATA_AXES, axis_types=(AxisType.Auto, AxisType.Auto))
