"""Attention over slow links: `python -m experiments.bench_links [--quick] [--machines 2x2,4x2] [--rates 50,100,200]`.

Emulates machines on this one (root and iproute2 needed), times sequence-parallel attention on them at several rates of
their links, and compares with the bytes that travel and with the planner's model. Writes its section of
docs/benchmarks.md and prints it; progress goes to stderr.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from experiments._bench_links_network import check_privileges
from experiments._options import add_report_options
from experiments._program import UserError, log_to_stderr, run_program, write_report

MACHINES, RATES, ROUNDS = "2x1,2x2,4x1,4x2", "50,100,200", 3
_QUICK_MACHINES, _QUICK_RATES = "2x2", "100,400"
# Processes on this computer, and the heads that are there to be dealt out.
_MOST_DEVICES = 8


def _parser() -> argparse.ArgumentParser:
    summary = str(__doc__).split("\n\n")[1].replace("\n", " ")
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_links", description=summary)
    parser.add_argument(
        "--machines", help=f"machines x processes of each, comma-separated (default: {MACHINES})"
    )
    parser.add_argument("--rates", help=f"of each link and direction in Mbit/s (default: {RATES})")
    parser.add_argument("--rounds", type=int, help=f"measurements of each program (default: {ROUNDS})")
    parser.add_argument(
        "--separate",
        action="store_true",
        help="a limit for each direction of a link, instead of twice the rate for both together",
    )
    add_report_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns the exit code."""
    args = _parser().parse_args(argv)
    shapes = machine_shapes(args.machines or (_QUICK_MACHINES if args.quick else MACHINES))
    rates = link_rates(args.rates or (_QUICK_RATES if args.quick else RATES))
    rounds = (1 if args.quick else ROUNDS) if args.rounds is None else args.rounds
    if rounds < 1:
        raise UserError(f"--rounds is at least 1; got {rounds}.")
    check_privileges()
    log_to_stderr()
    # So that a terminated run removes its machines as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from experiments._bench_batches import CHECKOUT
    from experiments._bench_links_measure import measure
    from experiments._bench_links_report import links_section
    from experiments._bench_links_variants import Sizes
    from experiments._bench_report import Conditions, write_section
    from experiments._disk import check_file_writable
    from solver import Topology

    out = args.out if args.out is not None or args.quick else CHECKOUT / "docs" / "benchmarks.md"
    check_file_writable(out, option="--out")
    check_file_writable(args.json, option="--json")
    conditions = Conditions.now()  # before the load is our own
    sizes = Sizes(batch=2, seq_len=64, head_dim=32) if args.quick else Sizes()
    measured = [measure(Topology(*shape), sizes, rates, rounds, shared=not args.separate) for shape in shapes]
    section = links_section(measured, sizes, shared=not args.separate)
    options = {"--machines": args.machines, "--rates": args.rates, "--rounds": args.rounds}
    given = [f" {option} {value}" for option, value in options.items() if value is not None]
    flags = " --separate" * args.separate + " --quick" * args.quick
    command = "python -m experiments.bench_links" + "".join(given) + flags
    where = f"up to {max(machines * each for machines, each in shapes)} processes of a device each"
    text = f"## {section.title}\n\n{section.body}\n\n{conditions.line(command, where)}"
    write_report(text + "\n")
    if out is not None:
        write_section(out, section.name, text)
    if args.json is not None:
        figures = {**section.figures, "conditions": asdict(conditions)}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def machine_shapes(text: str) -> list[tuple[int, int]]:
    """`--machines`: "2x2,4x1" is 2 machines of 2 processes, and 4 of 1.

    Raises:
        UserError: for anything else, fewer than 2 machines, more than 8 processes, or one given twice.
    """
    shapes = []
    for part in text.split(","):
        machines, times, each = part.partition("x")
        ok = times and machines.isdecimal() and each.isdecimal()
        shape = (int(machines), int(each)) if ok else (0, 0)
        # All variants deal out 8 heads, and divide their rows by a power of two.
        if shape[0] < 2 or shape[0] * shape[1] not in (2, 4, _MOST_DEVICES) or shape in shapes:
            raise UserError(
                "--machines takes MACHINESxPROCESSES, 2 machines at least, and 2, 4 or"
                f" {_MOST_DEVICES} processes in all, each once, such as {MACHINES}; got {part!r}."
            )
        shapes.append(shape)
    return shapes


def link_rates(text: str) -> list[float]:
    """`--rates`, in Mbit/s.

    Raises:
        UserError: for what is no number, one that is not 1 to 10,000, or one given twice.
    """
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not 1 <= rate <= 10_000 or rate in rates:
            raise UserError(f"--rates takes numbers of Mbit/s from 1 to 10000, each once; got {part!r}.")
        rates.append(rate)
    return rates


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
