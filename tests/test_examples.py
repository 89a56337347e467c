"""The examples run as their users would run them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_balanced_transformer():
    path = EXAMPLES / "balanced_transformer.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loss, alone, error = re.search(
        r"loss (\S+), one by one (\S+); largest difference of an update (\S+)", done.stdout
    ).groups()
    assert float(loss) == pytest.approx(float(alone), rel=1e-5)
    assert float(error) < 1e-5
    tokens = json.loads(re.search(r"(\[.*\]) balanced", done.stdout.split("as loaded, ")[1])[1])
    assert max(tokens) <= 1.01 * sum(tokens) / len(tokens)


def test_it_is_short_and_knows_nothing_of_jaxdit():
    text = (EXAMPLES / "balanced_transformer.py").read_text()
    assert len(text.splitlines()) < 60
    assert "jaxdit" not in text
