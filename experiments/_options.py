"""Options that several programs have; nothing here loads JAX."""

import argparse
from pathlib import Path
from typing import Any

from experiments._program import UserError


def add_process_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options that `process_options` reads."""
    parser.add_argument(
        "--cluster", action="store_true", help="several processes, found from SLURM, Kubernetes or MPI"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="several processes, given by hand")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument(
        "--heartbeat",
        type=int,
        default=60,
        metavar="SECONDS",
        help="silence after which a process counts as dead",
    )


def process_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `experiments._platform.ProcessSettings`.

    Raises:
        UserError: for a heartbeat below one second.
    """
    if args.heartbeat < 1:
        raise UserError(f"--heartbeat is at least 1; got {args.heartbeat}.")
    return {
        "coordinator": args.coordinator,
        "num_processes": args.num_processes,
        "process_id": args.process_id,
        "cluster": args.cluster,
        "heartbeat_s": args.heartbeat,
    }


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that `experiments._engine.engine_settings` reads, but for --model."""
    parser.add_argument("--devices", type=int, help="number of devices (default: all; of a run, its own)")
    parser.add_argument("--devices-per-machine", type=int, help="of a machine, where JAX does not know")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of a pipeline (--model)"
    )
    parser.add_argument(
        "--shards",
        choices=["all", "machine", "one"],
        default="all",
        help="devices that share one copy of a pipeline's weights",
    )
    parser.add_argument("--cache", type=Path, help="folder where compiled programs are kept")
    parser.add_argument(
        "--truncate", action="store_true", help="cut captions that are too long, instead of refusing them"
    )
    parser.add_argument(
        "--step-cache",
        type=float,
        metavar="THRESHOLD",
        help="skip blocks while their input changes by less: faster, not exact (0.25 to 0.8 for FLUX.1)",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Where a benchmark's report goes, and whether it only shows that it works."""
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it works; writes no document"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures as JSON")
    parser.add_argument(
        "--out", type=Path, help="document to write (default: docs/benchmarks.md of the checkout)"
    )
