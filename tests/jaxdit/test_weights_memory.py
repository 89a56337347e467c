"""Loading 2 GB takes no second copy of anything large: measured in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Compiled updates and freed pieces that the allocator keeps, whatever the sizes: 110 to 160 MB were measured.
FIXED_OVERHEAD = 256 << 20


def worker(*args):
    command = [sys.executable, "-m", "tests.jaxdit.weights_memory_worker", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_host_memory_beyond_the_shards(tmp_path):
    worker("save", tmp_path / "weights", 1)
    for num_devices in (1, 8):
        found = json.loads(worker("load", tmp_path / "weights", num_devices))
        assert found["shards"] > 2e9
        assert found["extra"] < 1.2 * found["largest"] + FIXED_OVERHEAD, found
