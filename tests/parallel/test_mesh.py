"""Meshes: devices in plan order, shards next to each other; and what importing the package does not do."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from parallel import DATA_AXES, data_mesh


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
