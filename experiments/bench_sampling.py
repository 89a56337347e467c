"""Sampling measured: `python -m experiments.bench_sampling`.

Every sequence-parallel algorithm in the engine on 8 virtual devices, and the service under load.
Writes sections of docs/benchmarks.md.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from experiments._options import add_report_options
from experiments._program import UserError, log_to_stderr, run_program

_LOG = logging.getLogger(__name__)

NUM_DEVICES = 8
SECTIONS = {"sampling": f"{NUM_DEVICES} virtual devices", "service": "2 virtual devices"}
_QUICK_REQUESTS = 12


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_sampling", description=__doc__.splitlines()[2]
    )
    parser.add_argument("--only", choices=list(SECTIONS), help="one of the sections; both by default")
    parser.add_argument("--requests", type=int, default=200, help="to the service (default: 200)")
    parser.add_argument("--clients", type=int, default=16, help="that send at a time (default: 16)")
    add_report_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    for name in ("requests", "clients"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is at least 1; got {getattr(args, name)}.")
    import jax

    from experiments._platform import ProcessSettings, prepare_platform

    jax.config.update("jax_platforms", "cpu")
    prepare_platform(NUM_DEVICES, ProcessSettings())
    from experiments._bench_report import Report

    report = Report(args)
    for name in SECTIONS if args.only is None else [args.only]:
        _LOG.info("%s ...", name)
        section, options = _measured(name, args)
        report.add(section, f"python -m experiments.bench_sampling --only {name}{options}", SECTIONS[name])
    report.close()
    return 0


def _measured(name: str, args: argparse.Namespace) -> tuple[Any, str]:
    """A section, and the options that it was measured with."""
    quick = " --quick" * args.quick
    if name == "sampling":
        from experiments._bench_sampling_report import bench_sampling

        return bench_sampling(quick=args.quick), quick
    from experiments._bench_service_report import bench_service

    requests = min(args.requests, _QUICK_REQUESTS) if args.quick else args.requests
    section = bench_service(requests=requests, clients=args.clients, largest=80 if args.quick else 128)
    return section, f" --requests {requests} --clients {args.clients}{quick}"


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
