"""Training whose disk is full from step 4 on, in a process of its own: Orbax never awaits the writes it gives up.

python -m tests.experiments.full_disk_worker WORKDIR ARGUMENTS_OF_TRAIN...
"""

import resource
import sys
import time
from pathlib import Path

import jax

from experiments import _loop, train
from experiments._program import run_program
from tests.experiments._program_cases import checkpoints


def main() -> int:
    """Train; once step 4 is done and step 3 is saved, no file grows beyond 20 kB."""
    jax.config.update("jax_disable_most_optimizations", True)  # as the runs that it is compared with
    workdir, update = Path(sys.argv[1]), _loop.Progress.update

    def then_full(self, done, report):
        update(self, done, report)
        if done == 4:
            while checkpoints(workdir) != [3]:
                time.sleep(0.05)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    _loop.Progress.update = then_full
    return run_program(train.main, ["--workdir", str(workdir), *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
