"""Meshes: devices in plan order, shards next to each other; and what importing the package does not do."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from parallel import DATA_AXES, check_machines, data_mesh


@pytest.mark.parametrize(("shards", "shape"), [(None, (1, 8)), (1, (8, 1)), (4, (2, 4)), (8, (1, 8))])
def test_devices_row_by_row(shards, shape):
    mesh = data_mesh(shards=shards)
    assert mesh.axis_names == DATA_AXES == ("replica", "shard")
    assert mesh.devices.shape == shape
    assert [d.id for d in mesh.devices.flat] == sorted(d.id for d in jax.devices())
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_given_devices_are_put_in_order():
    mesh = data_mesh(jax.devices()[5:2:-1], shards=3)
    assert mesh.devices.tolist() == [jax.devices()[3:6]]


@pytest.mark.parametrize("shards", [0, 3, 16, -1])
def test_shards_divide_the_devices(shards):
    with pytest.raises(
        ValueError, match=f"data_mesh: shards must divide the devices; got shards={shards}, devices=8"
    ):
        data_mesh(shards=shards)


@pytest.mark.parametrize("shards", [2.0, True, "2"])
def test_shards_are_an_integer(shards):
    with pytest.raises(TypeError, match=f"data_mesh: shards is an integer; got {type(shards).__name__}"):
        inspect.unwrap(data_mesh)(shards=shards)


@pytest.mark.parametrize("devices", [[], [0, 1, 1]])
def test_devices_are_there_and_differ(devices):
    with pytest.raises(
        ValueError, match=f"data_mesh: devices, .*got {len(devices)}, {len(set(devices))} of them"
    ):
        data_mesh([jax.devices()[i] for i in devices])


class Processes:
    """A mesh of devices of these processes; `check_machines` looks at no more."""

    def __init__(self, *process_of_device):
        self.devices = np.array([SimpleNamespace(process_index=i) for i in process_of_device], object)


def test_machines_of_a_topology_are_those_of_the_mesh():
    for devices_per_machine in (1, 2, 8):  # one process: as many machines as one likes to try
        check_machines(data_mesh(), devices_per_machine)
    two, four = Processes(0, 0, 0, 0, 1, 1, 1, 1), Processes(0, 0, 1, 1, 2, 2, 3, 3)
    for mesh, devices_per_machine in ((two, 4), (two, 8), (four, 4), (four, 2)):
        inspect.unwrap(check_machines)(mesh, devices_per_machine)
    for mesh, devices_per_machine, message in (
        (two, 2, r"devices_per_machine=2, with which those of process 0 are on machines \[0, 1\]"),
        (Processes(0, 0, 0, 1, 1, 1), 2, r"of process 0 are on machines \[0, 1\]. Give the devices of one"),
        (Processes(0, 1, 0, 1), 2, r"of process 0 are on machines \[0, 1\]"),
        (two, 3, "divides the devices of the mesh; got devices_per_machine=3, devices=8"),
        (two, 0, "got devices_per_machine=0"),
        (two, 16, "got devices_per_machine=16, devices=8"),
    ):
        with pytest.raises(ValueError, match=f"check_machines: .*{message}"):
            inspect.unwrap(check_machines)(mesh, devices_per_machine)
    for mesh, value, message in (
        (None, 2, "mesh is a Mesh; got NoneType"),
        (two, "2", "devices_per_machine is an integer; got str"),
        (two, True, "devices_per_machine is an integer; got bool"),
    ):
        with pytest.raises(TypeError, match=f"check_machines: {message}"):
            inspect.unwrap(check_machines)(mesh, value)


def test_import_starts_no_backend_and_loads_neither_solver_nor_models():
    code = (
        "import sys, parallel\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
        "assert not {'solver', 'flax', 'optax', 'gin', 'jaxdit'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_solver_needs_no_jax():
    subprocess.run([sys.executable, "-c", "import sys, solver; assert 'jax' not in sys.modules"], check=True)
