"""Dry run without GPUs: `python -m experiments.aot --config flux_32xh100.gin --topology 4x8`.

Compiles a config's training step, or its sampling, for GPUs that are not here, and says what it holds, computes and
sends. Prints the report on stdout; logs go to stderr.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments._program import UserError, log_to_stderr, run_program, write_report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="gin file, or the name of a shipped config")
    parser.add_argument("--topology", required=True, metavar="MACHINESxGPUS", help="such as 4x8")
    parser.add_argument("--gpu", default="h100", help="a GPU that is described (default: h100)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    parser.add_argument("--out", type=Path, help="folder for report.json, report.md and figures")
    parser.add_argument("--compare", metavar="OTHER.gin", help="a second config, side by side")
    parser.add_argument(
        "--compare-set",
        action="append",
        default=[],
        metavar="NAME.PARAMETER=VALUE",
        help="bindings of the second",
    )
    parser.add_argument(
        "--forward-only",
        action="store_true",
        help="sampling, of a batch of the data's sizes, instead of the training step",
    )
    parser.add_argument(
        "--remat-policies",
        metavar="NAMES",
        help="compile with each of these policies, such as none,full,attention",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Check everything, compile, report. Returns the exit code: 2 if the first program does not fit."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    # Before JAX is imported: it ends the process at a flag it does not know.
    from experiments._aot_compiler import check_cuda_compiler, check_xla_flags
    from experiments._aot_gpus import load_gpu, parse_machines

    gpu, machines, variants = load_gpu(args.gpu), parse_machines(args.topology), _variants(args)
    check_xla_flags()
    check_cuda_compiler()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.out is not None:
        from experiments._disk import check_writable

        check_writable(args.out, option="--out")
    from experiments._aot_dry_run import DryRun
    from experiments._aot_report import Target
    from experiments._aot_text import compare_table, remat_table, report_markdown

    dry_run = DryRun(Target(gpu, machines), args.forward_only)
    # All that can be wrong, before the first of them takes its minute to compile.
    runs = {label: dry_run.prepared(config, bindings) for config, bindings, label in variants}
    reports = [dry_run.report(run, label) for label, run in runs.items()]
    pages = []
    for i, report in enumerate(reports):
        pages.append(report_markdown(report, _saved(report, args.out, "report" if i == 0 else f"report_{i}")))
    if args.remat_policies is not None:
        pages = [*pages[:1], remat_table(reports) + "\n"]
    elif len(reports) > 1:
        pages.append(compare_table(reports) + "\n")
    write_report("\n".join(pages))
    if args.out is not None:
        _write(args.out, "report.md", "\n".join(pages))
    for report in reports[:1]:
        dry_run.check_fits(report)
    return 0


def _variants(args: argparse.Namespace) -> list[tuple[str, list[str], str]]:
    """(config, bindings, label) of everything to compile."""
    if args.compare is not None and args.remat_policies is not None:
        raise UserError("--compare and --remat-policies do not go together; got both. Leave one out.")
    if args.compare_set and args.compare is None:
        raise UserError("--compare-set changes the config of --compare, which is missing.")
    if args.remat_policies is not None:
        policies = _policies(args)
        return [(args.config, [*args.bindings, f"train.remat='{name}'"], name) for name in policies]
    first = (args.config, args.bindings, _label(args.config, args.bindings))
    if args.compare is None:
        return [first]
    second = (args.compare, args.compare_set, _label(args.compare, args.compare_set))
    if second[2] == first[2]:
        raise UserError(f"--compare needs another config, or --compare-set; got {first[2]} twice.")
    return [first, second]


def _policies(args: argparse.Namespace) -> list[str]:
    if args.forward_only:
        raise UserError(
            "--remat-policies is about what training keeps; sampling keeps nothing. Leave one out."
        )
    names = [name.strip() for name in args.remat_policies.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UserError(
            f"--remat-policies names policies, each once, such as none,full; got {args.remat_policies!r}."
        )
    return names


def _label(config: str, bindings: Sequence[str]) -> str:
    return " ".join([Path(config).stem, *bindings])


def _saved(report: dict[str, Any], folder: Path | None, stem: str) -> dict[str, str]:
    """Figures and JSON of a report, if there is a folder for them; the figures' names by title."""
    if folder is None:
        return {}
    from experiments._aot_figures import save_figures

    _write(folder, f"{stem}.json", json.dumps(report, indent=1) + "\n")
    return save_figures(report, folder, stem)


def _write(folder: Path, name: str, text: str) -> None:
    from experiments._disk import write_text

    write_text(folder / name, text, option="--out")


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
