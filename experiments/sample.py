"""Make pictures or clips: `python -m experiments.sample --workdir DIR --prompt "a handwritten seven" --size 32x48`."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments._program import UserError, log_to_stderr, run_program, seed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.sample", description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, type=Path, help="folder of a run of experiments.train")
    parser.add_argument(
        "--prompt", required=True, action="append", help="caption (repeat for several pictures)"
    )
    parser.add_argument("--size", default="32x32", help="HEIGHTxWIDTH in pixels")
    parser.add_argument("--frames", type=int, default=1, help="more than 1 makes a clip")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument(
        "--out", type=Path, help="file to write; .gif or .mp4 for a clip (default: in WORKDIR/samples)"
    )
    parser.add_argument("--devices", type=int, help="number of devices (default: as the run was trained on)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    return parser


def main(argv: Sequence[str]) -> int:
    """Sample the prompts in one batch and write a file for each. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    from experiments._sampling import PictureSampler, SampleRequest, check_requests, parse_size
    from experiments._workdir import load_run

    frames, height, width = parse_size(args.size)
    if frames != 1:
        raise UserError(f"--size is HEIGHTxWIDTH, the number of frames is --frames; got {args.size!r}.")
    requests = [SampleRequest(p, args.frames, height, width, noise_id=i) for i, p in enumerate(args.prompt)]
    paths = _paths(args, requests)
    opened = load_run(
        args.workdir, args.bindings, args.devices, check=lambda run: check_requests(requests, run)
    )
    pictures = PictureSampler(opened.run, seed=args.seed)(opened.params, requests)
    for path, request, picture in zip(paths, requests, pictures, strict=True):
        _write(path, picture, {"prompt": request.prompt, "seed": str(args.seed), "step": str(opened.step)})
        logging.info("wrote %s", path)
    return 0


def _paths(args: argparse.Namespace, requests: Sequence[object]) -> list[Path]:
    suffixes = (".gif", ".mp4") if args.frames > 1 else (".png",)
    if args.out is not None:
        if len(requests) > 1:
            raise UserError("--out names one file; leave it out for several prompts.")
        if args.out.suffix.lower() not in suffixes:
            raise UserError(f"--out must end in {' or '.join(suffixes)}; got {args.out}.")
        return [args.out]
    folder = args.workdir / "samples"
    size = args.size if args.frames == 1 else f"{args.frames}x{args.size}"
    slugs = [re.sub(r"\W+", "_", prompt.lower()).strip("_")[:60] or "empty" for prompt in args.prompt]
    return [folder / f"{slug}_{size}_seed{args.seed}_{i}{suffixes[0]}" for i, slug in enumerate(slugs)]


def _write(path: Path, picture: Any, about: dict[str, str]) -> None:
    from experiments._disk import writing
    from experiments._figures import save_clip, save_image

    with writing(path, "Choose another --out."):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".png":
            save_image(path, picture[0], about)
        else:
            save_clip(path, picture)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
