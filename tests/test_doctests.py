"""The examples in the docstrings of `solver` and `parallel`, run as they stand, on the devices there are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a reader of the API meets first has an example.
SHOWN = {
    "solver": "balance parse_bags BagSpec Topology CostModel StepLayout capacity_for step_tables validate_plan"
    " plan_from_slices pack_home plan_sequence_parallel",
    "parallel": "expand_route data_mesh check_machines",
}


@pytest.mark.parametrize("package", SHOWN)
def test_examples_in_docstrings(package):
    # In a process of its own: here signatures are checked by wrappers, which hide docstrings from doctest.
    command = [sys.executable, "-m", "pytest", "--doctest-modules", "--noconftest", "-v", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    passed = re.findall(r"::[\w.]*?(\w+) PASSED", done.stdout)
    assert set(SHOWN[package].split()) <= set(passed)
