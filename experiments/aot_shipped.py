"""Dry runs of the shipped configs: `python -m experiments.aot_shipped --out docs/aot.json`, or `make aot`.

Fails if FLUX.1's shape does not fit 32 H100, or a gather or reduce-scatter in its loops has nothing scheduled under it.
folder.gin has no data until its user brings some: its model is compiled for pictures of 256 and 512 pixels, made up.
flux_lora.gin, whose model and data are its user's too, is left out for time.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments._program import UserError, log_to_stderr, run_program, write_report

_FLUX = "flux_32xh100"
_MADE_UP = (
    "train.data=@synthetic()",
    "synthetic.codes='g4b8i256f1s0,g4b4i512f1s0'",
    "synthetic.channels=768",
    "synthetic.max_text=128",
)
# Config, bindings, machines, whether sampling is compiled in the place of the training step.
_PROGRAMS: tuple[tuple[str, tuple[str, ...], str, bool], ...] = (
    (_FLUX, (), "4x8", False),
    (_FLUX, ("train.shards=8",), "4x8", False),
    (_FLUX, (), "4x8", True),
    ("dit_xl_2", (), "1x8", False),
    ("quickstart", (), "1x8", False),
    ("folder", _MADE_UP, "1x8", False),
    ("folder", _MADE_UP, "1x8", True),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.aot_shipped", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--figures", type=Path, help="folder for figures of the first program")
    parser.add_argument("--gpu", default="h100", help="a GPU that is described (default: h100)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Compile, check, write. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    from experiments._aot_compiler import check_cuda_compiler, check_xla_flags
    from experiments._aot_gpus import load_gpu, parse_machines

    gpu = load_gpu(args.gpu)
    check_xla_flags()
    check_cuda_compiler()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from experiments._aot_dry_run import DryRun
    from experiments._aot_figures import save_figures
    from experiments._aot_report import Target, summary
    from experiments._aot_text import fits_line, nothing_under_line
    from experiments._disk import check_file_writable, check_writable, write_text

    check_file_writable(args.out, option="--out")
    if args.figures is not None:
        check_writable(args.figures, option="--figures")
    found: list[dict[str, Any]] = []
    for config, bindings, topology, forward_only in _PROGRAMS:
        label = " ".join([config, *bindings, "sampling" if forward_only else "training"])
        dry_run = DryRun(Target(gpu, parse_machines(topology)), forward_only)
        report = dry_run.report(dry_run.prepared(config, bindings), label)
        write_report(f"{label}: {fits_line(report)} {nothing_under_line(report)}\n")
        sys.stdout.flush()
        if not found and args.figures is not None:
            save_figures(report, args.figures, "aot_flux")
        found.append({"bindings": list(bindings), **summary(report)})
    write_text(args.out, json.dumps({"schema": 1, "programs": found}, indent=1) + "\n")
    check_flux(found)
    return 0


def check_flux(programs: Sequence[dict[str, Any]]) -> None:
    """Refuse compiled programs of FLUX.1's shape that do not fit, or whose parameters travel with nothing under them.

    Raises:
        UserError: naming what is missing.
    """
    for program in programs:
        if program["config"] != _FLUX:
            continue
        if not program["fits"]:
            raise UserError(f"{_FLUX} must fit; it takes {program['peak_bytes'] / 1e9:.1f} GB.")
        for kind, counts in program["parameter_traffic_overlapped"].items():
            if counts["overlapped"] < counts["in_loops"]:
                raise UserError(
                    f"every {kind} in {_FLUX}'s loops must have compute scheduled under it; got"
                    f" {counts['overlapped']} of {counts['in_loops']} ({program['program']})."
                )


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
