"""Benchmarks: `python -m experiments.bench [--only step,attention,solver,compilations] [--quick] [--json FILE]`.

Runs on 8 virtual CPU devices, writes each section of docs/benchmarks.md and prints it; progress goes to stderr.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments._program import UserError, log_to_stderr, run_program, write_report

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
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it works; writes no document"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures as JSON")
    parser.add_argument(
        "--out", type=Path, help="document to write (default: docs/benchmarks.md of the checkout)"
    )
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
    from experiments._bench_batches import CHECKOUT, recorded_steps
    from experiments._bench_report import Conditions, write_section
    from experiments._disk import check_file_writable

    recorded_steps("joint")  # a missing file is told before minutes of work
    out = args.out if args.out is not None or args.quick else CHECKOUT / "docs" / "benchmarks.md"
    check_file_writable(out, option="--out")
    check_file_writable(args.json, option="--json")
    conditions = Conditions.now()  # before the load is our own
    figures: dict[str, Any] = {}
    for name in names:
        _LOG.info("%s ...", name)
        section = _runner(name)(quick=args.quick)
        command = f"python -m experiments.bench --only {name}{' --quick' * args.quick}"
        text = f"## {section.title}\n\n{section.body}\n\n{conditions.line(command, SECTIONS[name])}"
        figures[name] = {**section.figures, "conditions": asdict(conditions)}
        write_report(text + "\n\n")
        if out is not None:
            write_section(out, name, text)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
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
