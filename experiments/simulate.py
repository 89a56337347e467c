"""Plans of mixed batches side by side, without an accelerator: `python -m experiments.simulate --mix joint`.

Draws batches, plans them with every equal bag spec and freely, and says what each device would hold, compute and send.
With `--sampling`, one long sequence on several machines instead: published speed-ups of sequence parallelism beside
modelled ones, and the planner's choices. Times of GPUs are modelled, never measured. Prints tables, or JSON, on stdout;
logs go to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments._program import UserError, log_to_stderr, run_program, seed, write_report

if TYPE_CHECKING:
    from experiments._simulate_batches import Workload
    from experiments._simulate_model import StepModel

_ALL = "all"
_DEVICES_PER_MACHINE = 8
_SLOWEST = 1e6  # FLOP a second
_MOST_STEPS = 1000


def _parser() -> argparse.ArgumentParser:
    summary = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments.simulate", description=summary)
    data = parser.add_argument_group("batches")
    data.add_argument("--mix", help="lowres, mixres, joint, all (the three), or data codes (default: joint)")
    data.add_argument(
        "--lengths", type=Path, metavar="FILE", help="lengths of one batch, a line for each device"
    )
    data.add_argument("--steps", type=int, help="batches to draw (default: 3; 1 beyond 128 devices)")
    data.add_argument("--seed", type=seed, default=0, help="of the draws (default: 0)")
    data.add_argument(
        "--text", action="store_true", help="balance text and image tokens apart, as training does"
    )
    data.add_argument(
        "--sampling",
        action="store_true",
        help="sampling on several machines; with --json, --figure and --latencies alone",
    )
    plans = parser.add_argument_group("plans")
    plans.add_argument(
        "--bags", default="auto", help="what to mark and draw: none, auto, full or bags such as g8n4"
    )
    plans.add_argument(
        "--devices", type=int, help="(default: one for each rank of the mix, or each line of the file)"
    )
    plans.add_argument("--topology", metavar="MACHINESxGPUS", help="such as 4x8 (default: machines of 8)")
    model = parser.add_argument_group("model and GPU")
    model.add_argument("--width", type=int, default=3072, help="(default: FLUX's 3072)")
    model.add_argument("--heads", type=int, default=24, help="(default: FLUX's 24)")
    model.add_argument("--blocks", default="19+38", metavar="DOUBLE+SINGLE", help="(default: FLUX's 19+38)")
    model.add_argument(
        "--gamma", type=float, default=0.4, help="cost of an attention FLOP over a linear one (default: 0.4)"
    )
    model.add_argument("--remat", choices=("full", "none"), default="full", help="(default: full)")
    model.add_argument("--gpu", default="h100", help="a GPU that is described (default: h100)")
    model.add_argument(
        "--tflops", type=float, help="TFLOP/s reached in linear layers (default: 40.4 %% of the peak)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out.add_argument(
        "--figure", type=Path, metavar="PATH", help="modelled steps as bars, or layers as lanes, .svg or .png"
    )
    out.add_argument(
        "--plot", type=Path, metavar="PATH", help="the plan of the first batch, .svg, .png or .html"
    )
    out.add_argument(
        "--latencies",
        type=Path,
        metavar="PATH",
        help="with --sampling: published and modelled latencies, .svg or .png",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Check everything, plan, report. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    _check_output(args)
    if args.sampling:
        return _sampling(args)
    workloads = _workloads(args)
    model = _model(args, workloads[0].num_devices)
    from experiments._simulate_run import check_plannable, compare, variant, variants_for

    chosen = variant(args.bags, model.machines.num_devices)
    for workload in workloads:
        check_plannable(workload, model, chosen)
    if args.plot is not None:
        from experiments._plan_page import save_plan

        title = f"{workloads[0].name}, {model.machines.num_devices} devices, bags {chosen.name}"
        save_plan(args.plot, chosen.plan(workloads[0].batches[0], model), title=title)
    variants = variants_for(model.machines.num_devices, chosen)
    from experiments._simulate_report import build_report
    from experiments._simulate_text import report_markdown

    report = build_report(model, [compare(workload, model, variants) for workload in workloads], chosen)
    report["settings"]["seed"] = args.seed
    if args.figure is not None:
        from experiments._simulate_figure import save_figure

        save_figure(args.figure, report)
    write_report(json.dumps(report, indent=1) + "\n" if args.json else report_markdown(report))
    return 0


def _sampling(args: argparse.Namespace) -> int:
    """Report on sampling; its workloads and GPUs are the published ones, so that other options have no meaning."""
    for name, default in vars(_parser().parse_args([])).items():
        if name not in ("sampling", "json", "figure", "latencies") and getattr(args, name) != default:
            raise UserError(
                f"--sampling takes --json, --figure and --latencies alone; got --{name} too. Leave one out."
            )
    from experiments._simulate_sampling import FIGURE_HARDWARE, FIGURE_WORKLOAD, build_sampling_report
    from experiments._simulate_sampling_text import sampling_markdown

    report = build_sampling_report()
    if args.figure is not None:
        from experiments._simulate_timeline_figure import save_timelines

        save_timelines(args.figure, FIGURE_WORKLOAD, FIGURE_HARDWARE)
    if args.latencies is not None:
        from experiments._simulate_latency_figure import save_latencies

        save_latencies(args.latencies, report)
    sys.stdout.write(json.dumps(report, indent=1) + "\n" if args.json else sampling_markdown(report))
    return 0


def _check_output(args: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before anything is computed."""
    from experiments._disk import check_file_writable

    for option, path, kinds in (
        ("--figure", args.figure, (".svg", ".png")),
        ("--plot", args.plot, (".svg", ".png", ".html")),
        ("--latencies", args.latencies, (".svg", ".png")),
    ):
        if path is None:
            continue
        if path.suffix not in kinds:
            raise UserError(f"{option} ends in {' or '.join(kinds)}; got {str(path)!r}.")
        check_file_writable(path, option=option)
    if args.plot is not None and args.figure is not None and args.plot.resolve() == args.figure.resolve():
        raise UserError(
            f"--plot and --figure are two files; got {args.plot} for both. Choose another --figure."
        )
    if args.plot is not None and args.mix == _ALL:
        raise UserError("--plot draws one batch; got --mix all. Name one mix.")


def _workloads(args: argparse.Namespace) -> "list[Workload]":
    """The batches asked for."""
    steps = args.steps
    if steps is not None and not 1 <= steps <= _MOST_STEPS:
        raise UserError(f"--steps must be in 1 .. {_MOST_STEPS}; got {steps}.")
    if args.lengths is not None:
        for option, given in (("--mix", args.mix is not None), ("--steps", steps is not None)):
            if given:
                raise UserError(f"--lengths is one batch of its own; got {option} too. Leave one out.")
        if args.text:
            raise UserError("--text needs text lengths, which --lengths does not tell. Leave one out.")
    from experiments._simulate_batches import drawn_workload, read_lengths
    from experiments.data import MIXES

    if args.lengths is not None:
        return [read_lengths(args.lengths, num_devices=args.devices)]
    mixes = list(MIXES) if args.mix == _ALL else ["joint" if args.mix is None else args.mix]
    return [
        drawn_workload(mix, num_devices=args.devices, steps=steps, seed=args.seed, text_apart=args.text)
        for mix in mixes
    ]


def _model(args: argparse.Namespace, num_devices: int) -> "StepModel":
    """The model on its machines."""
    from experiments._aot_gpus import Machines, load_gpu, parse_machines
    from experiments._program import checking
    from experiments._simulate_model import REACHED, StepModel, parse_shape

    shape = parse_shape(args.width, args.heads, args.blocks)
    gpu = load_gpu(args.gpu)
    if args.topology is None:
        whole = num_devices % _DEVICES_PER_MACHINE == 0
        machines = (
            Machines(num_devices // _DEVICES_PER_MACHINE, _DEVICES_PER_MACHINE)
            if whole
            else Machines(1, num_devices)
        )
    else:
        machines = parse_machines(args.topology)
    if machines.num_devices != num_devices:
        raise UserError(
            f"--topology must have the {num_devices} devices of the batch; got {machines}, which are"
            f" {machines.num_devices}. Set --topology or --devices."
        )
    peak = gpu.flop_speed("bf16")
    flops_per_s = peak * REACHED if args.tflops is None else args.tflops * 1e12
    if not _SLOWEST <= flops_per_s <= peak:
        raise UserError(
            f"--tflops must be at least {_SLOWEST / 1e12:g} and at most the peak, {peak / 1e12:g}; got {args.tflops}."
        )
    model = StepModel(shape, gpu, machines, flops_per_s, args.gamma, remat=args.remat == "full")
    with checking("--width, --gamma"):
        assert model.cost
    return model


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
