"""Importing does no work: no backend is started, and the planner does not know JAX."""

import subprocess
import sys

import pytest

MODULES = [
    "solver",
    "parallel",
    "jaxdit",
    "jaxdit.models",
    "jaxdit.encoders",
    "jaxdit.training",
    "experiments",
    "experiments.train",
    "experiments.sample",
    "experiments.evaluate",
    "experiments.aot",
    "experiments.aot_sequence",
    "experiments.aot_shipped",
    "experiments.sequence_figures",
    "experiments.simulate",
    "experiments._simulate_run",
    "experiments.calibrate",
    "experiments._calibrate_run",
    "experiments._aot_dry_run",
    "experiments.data",
    "experiments._loop",
    "experiments._sampling",
    "experiments._platform",
]

NO_BACKEND = """
import importlib, os, sys
threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None
for name in sys.argv[1:]:
    importlib.import_module(name)
import jax
from jax.extend import backend
# A backend that is up would refuse another number of devices.
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""

NO_JAX = """
import importlib, sys
importlib.import_module(sys.argv[1])
loaded = {name.split(".")[0] for name in sys.modules}
unwanted = loaded & set(sys.argv[2].split(","))
assert not unwanted, unwanted
"""


def python(script, *args):
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
    return done.stderr


def test_no_import_starts_a_backend():
    assert python(NO_BACKEND, *MODULES) == ""


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("solver", "jax,jaxlib,flax,optax,gin,experiments,parallel,jaxdit"),
        ("parallel", "flax,optax,gin,orbax,solver,experiments,jaxdit,matplotlib,grain"),
        ("jaxdit.models", "gin,orbax,solver,parallel,experiments,matplotlib,grain"),
        # What `--help` and a mistyped flag should not wait for.
        ("experiments.train", "jax,flax,gin,orbax,matplotlib,grain"),
        ("experiments.sample", "jax,flax,gin,orbax,matplotlib,grain"),
        ("experiments.aot", "jax,flax,gin,orbax,matplotlib,grain"),
        ("experiments.aot_sequence", "jax,flax,gin,orbax,matplotlib,grain"),
        ("experiments.aot_shipped", "jax,flax,gin,orbax,matplotlib,grain"),
        ("experiments.simulate", "jax,flax,gin,orbax,matplotlib,grain"),
        ("experiments.calibrate", "jax,flax,gin,orbax,matplotlib,grain"),
        ("experiments.evaluate", "jax,flax,gin,orbax,matplotlib,grain,sklearn"),
    ],
)
def test_what_an_import_does_not_load(module, unwanted):
    assert python(NO_JAX, module, unwanted) == ""
