"""Importing the data package starts no accelerator."""

import subprocess
import sys

_PROGRAM = """
import experiments.data
from jax._src import xla_bridge

assert not xla_bridge._backends, list(xla_bridge._backends)
sampler = experiments.data.StepSampler([experiments.data.SyntheticCodes("g1b1i64f1s0")])
reader = experiments.data.StepReader(sampler, local_devices=[0], num_devices=1)
with experiments.data.make_loader(reader, num_steps=1) as loader:
    assert [t for t, _ in loader] == [0]
assert not xla_bridge._backends, list(xla_bridge._backends)
"""


def test_neither_the_import_nor_reading_starts_a_backend():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
