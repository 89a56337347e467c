"""Pictures of sequence-parallel attention: `python -m experiments.sequence_figures --out docs/images`.

Who computes what, who receives what from whom, and when, drawn from the traced programs (`_sequence_figure_trace`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._program import log_to_stderr, run_program, write_report


def _parser() -> argparse.ArgumentParser:
    summary = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments.sequence_figures", description=summary)
    parser.add_argument("--out", type=Path, required=True, help="folder to write sequence_*.svg into")
    return parser


def main(argv: Sequence[str]) -> int:
    """Trace, draw, write. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    from experiments._disk import check_writable
    from experiments._sequence_figure import FIGURES, save_sequence_figure

    check_writable(args.out, option="--out")
    for name, panels in FIGURES.items():
        path = args.out / f"{name}.svg"
        save_sequence_figure(path, panels)
        write_report(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
