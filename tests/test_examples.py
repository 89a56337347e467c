"""The examples run as their users would run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name, **env):
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_against(text, alone):
    """What the example computed on 8 devices, and alone."""
    pattern = rf"loss (\S+), {alone} (\S+); largest difference of an update (\S+)"
    loss, wanted, error = map(float, re.search(pattern, text).groups())
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert error < 1e-5


def test_balanced_transformer():
    text = output_of("balanced_transformer")
    check_against(text, "one by one")
    tokens = json.loads(re.search(r"(\[.*\]) balanced", text.split("as loaded, ")[1])[1])
    assert max(tokens) <= 1.01 * sum(tokens) / len(tokens)


def test_sequence_parallel_transformer():
    # Compiling is what takes time here.
    text = output_of("sequence_parallel_transformer", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    check_against(text, "on one device")
    assert "403 tokens over 8 devices: 51 rows each" in text


@pytest.mark.parametrize("name", ["balanced_transformer", "sequence_parallel_transformer"])
def test_they_are_short_and_know_nothing_of_jaxdit(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 60
    assert "jaxdit" not in text
