"""Measure this machine for the planner: `python -m experiments.calibrate --out calibration.json [--check]`.

Times a transformer block, forward and backward, over lengths on the devices at hand, fits gamma and speeds to it, and
writes a file for `train.calibration` with a figure beside it. `--check` also compares predicted and measured times of
random batches. Prints the report on stdout; logs go to stderr.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._program import UserError, log_to_stderr, run_program, write_report

# Set by launchers in every one of several processes: SLURM's srun, Open MPI's mpirun.
_LAUNCHED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def _parser() -> argparse.ArgumentParser:
    summary = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments.calibrate", description=summary)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("calibration.json"),
        help="file to write, and its figure beside it (default: %(default)s)",
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="FILE",
        help="also measure random batches against the prediction; with a calibration FILE measure only these",
    )
    parser.add_argument("--batches", type=int, default=30, help="random batches of --check (default: 30)")
    parser.add_argument(
        "--config", help="training config whose model is measured: gin file or a shipped one's name"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    parser.add_argument(
        "--devices", type=int, help="devices (default: all; on CPU as many virtual ones as there are cores)"
    )
    parser.add_argument("--lengths", help="comma-separated tokens of a sequence, such as 448,4096,65536")
    parser.add_argument("--width", type=int, help="of the model (default: 3072; on CPU 256)")
    parser.add_argument("--num-heads", type=int, help="attention heads (default: 24; on CPU 4)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16; on CPU float32")
    parser.add_argument("--block", type=int, help="attention block size in rows (default: 128; on CPU 64)")
    parser.add_argument("--text", type=int, help="text tokens of a sequence (default: 512; on CPU 16)")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds (default: 9)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Check everything, measure, fit, report. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    _refuse_processes()
    # Imported here: `--help` should not load JAX.
    from experiments._calibrate_settings import Requested, asked_shape, parse_lengths

    requested = Requested(
        shape=asked_shape(args),
        lengths=None if args.lengths is None else parse_lengths(args.lengths),
        devices=args.devices,
        repeats=args.repeats,
        batches=None if args.check is None else args.batches,
    )
    requested.check()
    command = shlex.join(["python", "-m", "experiments.calibrate", *argv])
    from experiments._calibrate_run import calibrate, check_file
    from experiments._disk import check_writable

    if args.check:
        write_report(check_file(Path(args.check), requested, command))
        return 0
    if args.out.suffix != ".json":
        raise UserError(f"--out must end in .json, the figure gets the same name; got {args.out}.")
    for path in (args.out, args.out.with_suffix(".png")):
        if path.is_dir():
            raise UserError(
                f"--out and its figure are files to write; {path} is a folder. Choose another --out."
            )
    check_writable(args.out.parent, option="--out")
    write_report(calibrate(args.out, requested, command))
    return 0


def _refuse_processes() -> None:
    for name in _LAUNCHED:
        if os.environ.get(name, "1") != "1":
            raise UserError(
                f"calibration is of one process with the devices of one machine; got {name}={os.environ[name]}."
                " Start it once, by itself, on one of the machines."
            )


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
