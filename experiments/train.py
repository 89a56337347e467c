"""Train a model: `python -m experiments.train --config experiments/configs/quickstart.gin`.

The same command in the same workdir goes on from the last checkpoint.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._options import add_process_options, process_options
from experiments._program import UserError, log_to_stderr, run_program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="gin file, or the name of a shipped config")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    parser.add_argument("--workdir", type=Path, help="folder of the run (default: runs/NAME OF THE CONFIG)")
    parser.add_argument(
        "--profile", type=int, nargs="?", const=3, default=0, metavar="STEPS", help="trace a few steps"
    )
    add_process_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Check everything, then train. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    if args.profile < 0:
        raise UserError(f"--profile counts up; got {args.profile}.")
    processes = process_options(args)
    # Imported here: `--help` should not load JAX.
    from experiments import _platform, _workdir
    from experiments._config import load_config

    config = load_config(args.config, args.bindings)
    settings = _workdir.checked_settings(args.bindings)
    workdir = args.workdir or Path("runs") / config.stem
    _platform.prepare_platform(settings.num_devices, _platform.ProcessSettings(**processes))

    from experiments._checkpoint import Checkpoints
    from experiments._disk import check_disk_space
    from experiments._loop import Trainer
    from experiments._manifest import state_bytes
    from experiments._run import Run
    from experiments._run_data import open_data
    from experiments._sampling import check_requests, run_requests

    mesh = _platform.make_mesh(settings.num_devices, settings.shards)
    run = Run.make(settings, mesh, open_data(settings))
    check_requests(run_requests(run), run)
    with _workdir.only_user(workdir), Checkpoints(workdir, keep=settings.keep) as checkpoints:
        trainer = Trainer(run, workdir, args.profile)
        if (checkpoints.latest() or 0) < settings.steps:
            check_disk_space(workdir, state_bytes(run.abstract_state._replace(frozen={})), settings.keep)
        start = trainer.start(checkpoints)
        if start.step >= settings.steps:
            trainer.finish(start)
            return 0
        # Only now is it sure that the folder is this run's: nothing of another run has been overwritten.
        _workdir.describe(run, workdir)
        trainer.train(start, checkpoints)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
