"""Benchmarks: `python -m experiments.bench [--only step,attention,solver,compilations] [--quick] [--json FILE]`.

Runs on 8 virtual CPU devices, writes each section of docs/benchmarks.md and prints it; progress goes to stderr.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from experiments._options import add_report_options
from experiments._program import UserError, log_to_stderr, run_program

_LOG = logging.getLogger(__name__)

NUM_DEVICES = 8
# What each section runs on, in the order of a whole run: what is timed comes first, while the machine is quiet.
SECTIONS = {
    "step": f"{NUM_DEVICES} virtual devices in one process",
    "attention": "one virtual device",
    "solver": "no device but for the expansion",
    "compilations": "no device",
}


def _parser() -> argparse.ArgumentParser:
    summary = str(__doc__).splitlines()[2]
    parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=summary)
    parser.add_argument("--only", help=f"comma-separated sections, of {', '.join(SECTIONS)}; all by default")
    add_report_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the sections asked for. Returns the exit code."""
    args = _parser().parse_args(argv)
    names = _chosen(args.only)
    log_to_stderr()
    # Before anything touches a device.
    from experiments._platform import ProcessSettings, prepare_platform

    _use_cpu()
    prepare_platform(NUM_DEVICES, ProcessSettings())
    from experiments._bench_batches import recorded_steps
    from experiments._bench_report import Report

    recorded_steps("joint")  # a missing file is told before minutes of work
    report = Report(args)
    for name in names:
        _LOG.info("%s ...", name)
        section = _runner(name)(quick=args.quick)
        report.add(
            section, f"python -m experiments.bench --only {name}{' --quick' * args.quick}", SECTIONS[name]
        )
    report.close()
    return 0


def _chosen(only: str | None) -> list[str]:
    if only is None:
        return list(SECTIONS)
    names = only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise UserError(f"--only takes sections of {', '.join(SECTIONS)}; got {unknown[0]!r}.")
    return names


def _use_cpu() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")


def _runner(name: str) -> Callable[..., Any]:
    """Imported once the platform is set: some of these make arrays."""
    from experiments._bench_attention import bench_attention
    from experiments._bench_compilations import bench_compilations
    from experiments._bench_solver import bench_solver
    from experiments._bench_step_report import bench_step

    return {
        "step": bench_step,
        "attention": bench_attention,
        "solver": bench_solver,
        "compilations": bench_compilations,
    }[name]


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
