"""How a program ends when it is one of several processes and the only one that fails."""

import time

import pytest

from tests.processes import free_port, run_together

PROCESS = """
import sys
import jax
import numpy as np
process, port, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
from jax.experimental import multihost_utils
from experiments._program import UserError, run_program

def main(argv):
    multihost_utils.process_allgather(np.array(1))
    if process == 1:
        raise UserError("only here") if kind == "user" else KeyError("a defect")
    multihost_utils.process_allgather(np.array(2))

sys.exit(run_program(main, []))
"""


@pytest.mark.full
@pytest.mark.parametrize(("kind", "code"), [("user", 2), ("defect", 1)])
def test_a_process_that_fails_alone_leaves_and_the_others_end(kind, code):
    port, started = free_port(), time.monotonic()
    processes = run_together([["-c", PROCESS, index, port, kind] for index in range(2)], timeout=60)
    assert processes[1].returncode == code
    assert processes[0].returncode not in (0, None)
    assert ("error: only here" if kind == "user" else "KeyError: 'a defect'") in processes[1].stderr
    assert time.monotonic() - started < 45
