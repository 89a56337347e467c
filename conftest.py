"""Test session set-up: eight virtual CPU devices, and shapes in signatures checked at run time."""

import gc
import os
from pathlib import Path

# Many steps in flight dead-lock XLA's CPU collectives unless its thread pool is larger than the machine.
os.environ.setdefault("NPROC", "32")

import jax

# Must come before any device is touched; wins over XLA_FLAGS.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

from jaxtyping import install_import_hook

import tests.typechecker  # the hook names it below, and looks no deeper than what is imported

assert tests.typechecker
install_import_hook(["parallel", "jaxdit"], "tests.typechecker.checked")


# Each compiled program keeps its code mapped into memory, and the system grants a process some 65,000 maps; past them
# XLA aborts.
_MOST_MAPS = 40_000


# Where several workers share the tests, each takes whole files, in this order: what takes a minute or more must not be
# left to one of them at the end.
_FIRST = (
    "test_invariance.py",
    "test_train.py",
    "test_sample.py",
    "test_export.py",
    "test_evaluate.py",
    "test_configs.py",
    "test_adapters.py",
    "test_bench_gpu.py",
)


def pytest_collection_modifyitems(items):
    """Long files first."""
    order = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs where a folder of tests ends, and before they are too many."""
    maps = Path("/proc/self/maps")
    full = maps.is_file() and maps.read_bytes().count(b"\n") > _MOST_MAPS
    if full or nextitem is None or nextitem.path.parent != item.path.parent:
        jax.clear_caches()
        gc.collect()
