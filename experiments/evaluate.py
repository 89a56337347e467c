"""How many sampled digits a classifier of real digits recognises: `python -m experiments.evaluate --workdir DIR`.

Prints one JSON object on stdout; logs go to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._program import UserError, log_to_stderr, run_program, seed, write_report

NUM_SAMPLES = 200


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evaluate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workdir", required=True, type=Path, help="folder of a quickstart run")
    parser.add_argument(
        "--size", help="HEIGHTxWIDTH of all samples (default: the sizes of the training digits in turn)"
    )
    parser.add_argument("--seed", type=seed, default=1)
    parser.add_argument("--grid", type=Path, help="also write the samples as a PNG")
    parser.add_argument("--devices", type=int, help="number of devices (default: as the run was trained on)")
    parser.add_argument(
        "--step-cache", type=float, metavar="THRESHOLD", help="sample with a step cache, to see what it costs"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    return parser


def main(argv: Sequence[str]) -> int:
    """Sample, classify, print. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    import numpy as np

    from experiments._digits import DigitClassifier
    from experiments._disk import writing
    from experiments._engine import generate, step_cache
    from experiments._figures import SheetStyle, save_grid
    from experiments._sampling import RunPipeline, open_run_engine, parse_size
    from experiments.data import DIGIT_SIZES, DIGIT_WORDS
    from jaxdit.sampling import Request

    sizes = [(1, *size) for size in DIGIT_SIZES] if args.size is None else [parse_size(args.size)]
    if any(frames != 1 for frames, _, _ in sizes):
        raise UserError(f"--size is HEIGHTxWIDTH, digits are pictures; got {args.size!r}.")
    labels = np.arange(NUM_SAMPLES) % 10
    # Ten digits in a row share a size, so that every digit is drawn at every size.
    chosen = [sizes[(i // 10) % len(sizes)] for i in range(NUM_SAMPLES)]
    requests = [
        Request(f"a handwritten {DIGIT_WORDS[label]}", height, width, seed=args.seed, number=i)
        for i, (label, (_, height, width)) in enumerate(zip(labels, chosen, strict=True))
    ]
    engine = open_run_engine(
        args.workdir,
        requests,
        RunPipeline,
        bindings=args.bindings,
        devices=args.devices,
        step_cache=step_cache(args),
    )
    samples = generate(engine, requests)
    pictures = [made.frames[0] for made in samples if made.frames is not None]
    if len(pictures) < len(requests):
        raise UserError(
            f"{len(requests) - len(pictures)} of {len(requests)} pictures became NaN or infinite."
            " Evaluate an earlier checkpoint, or train at a lower learning rate."
        )
    classifier = DigitClassifier()
    correct = classifier.classify(pictures) == labels
    if args.grid is not None:
        with writing(args.grid, "Choose another --grid."):
            save_grid(
                args.grid, pictures, [r.prompt for r in requests], style=SheetStyle(columns=10, cell=96)
            )
    by_size = {
        f"{height}x{width}": float(correct[[size == (frames, height, width) for size in chosen]].mean())
        for frames, height, width in sizes
    }
    result = {
        "recognised": float(correct.mean()),
        "samples": NUM_SAMPLES,
        "step": samples[0].about.get("step"),
        "classifier_accuracy": classifier.held_out_accuracy(),
        "recognised_by_digit": [float(correct[labels == digit].mean()) for digit in range(10)],
        "recognised_by_size": by_size,
    }
    if args.step_cache is not None:
        result["skipped"] = samples[0].about["skipped"]
    write_report(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
