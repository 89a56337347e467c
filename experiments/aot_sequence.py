"""Sequence-parallel attention compiled for H100: `python -m experiments.aot_sequence --out docs/benchmarks.md`.

Fails if a transfer that should run under attention does not, if a device sends other bytes than the formulas say, if
anything gathers the sequence, or if Torus needs more memory than USP and a buffer for each of q, k, v, o.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments._program import log_to_stderr, run_program, write_report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.aot_sequence", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="markdown file whose section is written if nothing is amiss; printed if left out",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Compile, check, write. Returns the exit code: 1 if anything is not as it should be."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    from experiments._aot_compiler import check_cuda_compiler, check_xla_flags
    from experiments._aot_gpus import load_gpu

    gpu = load_gpu("h100")
    check_xla_flags()
    check_cuda_compiler()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from experiments._aot_sequence import TORUS, cases, compile_case
    from experiments._aot_sequence_reading import problems, read_case, usp_of
    from experiments._aot_sequence_text import SECTION, section
    from experiments._bench_report import write_section
    from experiments._disk import check_file_writable

    check_file_writable(args.out, option="--out")
    readings, two = [], {}
    for case in cases():
        started = time.perf_counter()
        readings.append(read_case(compile_case(case, gpu), gpu))
        if case.algorithm == TORUS and case.degrees.ring_inside > 1:
            two[case] = read_case(compile_case(case, gpu, in_flight=2), gpu)
        write_report(f"{case.title}: {time.perf_counter() - started:.1f} s\n")
        sys.stdout.flush()
    found = [text for r in readings for text in problems(r, usp_of(readings, r))]
    found += [text for r in two.values() for text in problems(r, None)]
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    text = section(readings, two, gpu.title)
    if args.out is None:
        write_report(f"{text}\n")
    elif not found:
        write_section(args.out, SECTION, text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
