"""Benchmarks on GPUs: `python -m experiments.bench_gpu [--only attention,block,exchange] [--quick] [--json FILE]`.

Runs on the devices there are, prints each section, and can write all figures as JSON; progress goes to stderr. On CPU
only `--quick`, which shows that it works, ends soon.
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

SECTIONS = ("attention", "block", "exchange")


def _parser() -> argparse.ArgumentParser:
    summary = str(__doc__).splitlines()[2]
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_gpu", description=summary)
    parser.add_argument("--only", help=f"comma-separated sections, of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the sections asked for. Returns the exit code."""
    args = _parser().parse_args(argv)
    names = list(SECTIONS) if args.only is None else args.only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise UserError(f"--only takes sections of {', '.join(SECTIONS)}; got {unknown[0]!r}.")
    log_to_stderr()
    import jax

    from experiments._bench_report import Conditions
    from experiments._disk import check_file_writable

    check_file_writable(args.json, option="--json")
    devices = jax.devices()
    if devices[0].platform == "cpu" and not args.quick:
        raise UserError(
            "the benchmarks need a GPU, and JAX sees none. Add --quick to see on CPU that they work."
        )
    conditions = Conditions.now()  # before the load is our own
    where = f"{len(devices)} x {devices[0].device_kind}"
    figures: dict[str, Any] = {}
    for name in names:
        _LOG.info("%s ...", name)
        section = _runner(name)(quick=args.quick)
        command = f"python -m experiments.bench_gpu --only {name}{' --quick' * args.quick}"
        write_report(f"## {section.title}\n\n{section.body}\n\n{conditions.line(command, where)}\n\n")
        figures[name] = {**section.figures, "devices": where, "conditions": asdict(conditions)}
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _runner(name: str) -> Callable[..., Any]:
    """Imported once arguments are checked: some of these take a while."""
    from experiments._bench_gpu_attention import bench_gpu_attention
    from experiments._bench_gpu_block import bench_gpu_block
    from experiments._bench_gpu_exchange import bench_gpu_exchange

    return {"attention": bench_gpu_attention, "block": bench_gpu_block, "exchange": bench_gpu_exchange}[name]


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
