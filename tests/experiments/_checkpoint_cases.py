"""States to save, where to put them, and how to compare them; shared by the tests of checkpoints."""

import contextlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments._checkpoint import Checkpoints

META = {
    "data": {"position": 12, "seed": 0},
    "capacities": [128, 256],
    "model": "abc",
    "none": None,
    "rate": 0.1,
}


def mesh_of(num_devices):
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def host_state(seed=0, rows=16):
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(rows, 6)).astype(np.float32)
    return {
        "params": {"blocks": [weights, rng.normal(size=(8, 3)).astype(jnp.bfloat16)]},
        "opt": (np.int32(seed), {"mask": rng.integers(0, 2, size=8).astype(bool)}),
        "ids": rng.integers(0, 99, size=(8,), dtype=np.int8),
    }


def shardings(tree, num_devices):
    mesh = mesh_of(num_devices)

    def one(leaf):
        return NamedSharding(mesh, PartitionSpec("data") if np.ndim(leaf) else PartitionSpec())

    return jax.tree.map(one, tree)


def place(tree, num_devices=8):
    return jax.tree.map(jax.device_put, tree, shardings(tree, num_devices))


def abstract(tree, num_devices=8):
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding),
        tree,
        shardings(tree, num_devices),
    )


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), theirs)


def saved(workdir, *steps, keep=3):
    with Checkpoints(workdir, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, place(host_state(step)), {**META, "step": step})


def big(seed):
    return {"w": np.random.default_rng(seed).normal(size=(64, 512)).astype(np.float32), "n": np.int32(seed)}


@contextlib.contextmanager
def file_size_limit(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
