"""The examples run as their users would run them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_balanced_attention():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "balanced_attention.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"largest difference from dense attention: (\S+)", done.stdout)
    assert found is not None
    assert float(found[1]) < 1e-5
