"""The code in the documents runs as it stands, block after block, and gives what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallel
import solver

DOCS = Path(__file__).parents[1] / "docs"

# Blocks with prompts are compared with what they print; the others have assertions.
RUN = """
import doctest, sys
names = {}
for number, source in enumerate(sys.stdin.read().split(chr(0))):
    where = f"block {number + 1}"
    if not source.startswith(">>> "):
        exec(compile(source, where, "exec"), names)
        continue
    test = doctest.DocTestParser().get_doctest(source, names, where, None, 0)
    runner = doctest.DocTestRunner()
    if runner.run(test, clear_globs=False).failed:
        sys.exit(1)
    names.update(test.globs)
"""


@pytest.mark.parametrize(("name", "least"), [("sequence_parallel", 6), ("sampling", 2)])
def test_code(name, least):
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{name}.md").read_text(), re.M | re.S)
    assert len(blocks) >= least
    command = [sys.executable, "-c", RUN]
    # Compiling is what takes time here.
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        command, input="\0".join(blocks), capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_names_of_sequence_parallelism_are_described():
    text = (DOCS / "sequence_parallel.md").read_text()
    topics = r"(parallel|solver)\._(sequence|ring|torus|ulysses|block|online|one_sided|zero_copy)"
    names = {
        name
        for package in (parallel, solver)
        for name in package.__all__
        if re.match(topics, getattr(getattr(package, name), "__module__", ""))
    }
    names |= {"RING_AXES", "ULYSSES_AXES", "SEQUENCE_DATA_AXIS"}  # tuples and a string know no module
    assert len(names) > 25
    assert not sorted(name for name in names if not re.search(rf"`[^`\n]*\b{name}\b", text))
