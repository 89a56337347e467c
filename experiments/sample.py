"""Make pictures or clips: `python -m experiments.sample --workdir DIR --prompt "a handwritten seven" --size 32x48`."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments._options import add_engine_options, add_process_options, process_options
from experiments._program import UserError, log_to_stderr, run_program, seed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.sample", description=__doc__.splitlines()[0])
    source = parser.add_argument_group(
        "model, one of them or both (a run that trained the pipeline's transformer)"
    )
    source.add_argument("--workdir", type=Path, help="folder of a run of experiments.train")
    source.add_argument("--model", type=Path, help="folder of a pipeline in diffusers' layout: FLUX.1 or DiT")
    parser.add_argument("--prompt", action="append", default=[], help="caption (repeat for several pictures)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="captions, one a line")
    parser.add_argument(
        "--size", default=None, help="HEIGHTxWIDTH in pixels (default: 32x32; what --model was trained for)"
    )
    parser.add_argument("--frames", type=int, default=1, help="more than 1 makes a clip")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument(
        "--steps", type=int, help="default: the run's; of FLUX.1 28 (dev) or 4 (schnell), of DiT 50"
    )
    parser.add_argument(
        "--guidance",
        type=float,
        help="a run's is classifier-free (default: the run's), as DiT's (4); FLUX.1's distilled (3.5)",
    )
    parser.add_argument("--negative-prompt", help="what classifier-free guidance leads away from")
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write; .gif or .mp4 for a clip (default: in WORKDIR/samples, or samples)",
    )
    add_engine_options(parser)
    parser.add_argument(
        "--step-cache-error", action="store_true", help="sample exactly too, and say how far apart they are"
    )
    parser.add_argument(
        "--true-guidance", type=float, default=1.0, help="classifier-free guidance of FLUX.1; 1 for none"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME.PARAMETER=VALUE",
        dest="bindings",
        help="of the config of a run",
    )
    add_process_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Sample the prompts in one batch and write a file for each. Returns the exit code, 1 if a picture failed."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    if args.workdir is None and args.model is None:
        raise UserError("--workdir or --model must say what to sample.")
    args.prompt += _prompts(args.prompts)
    if not args.prompt:
        raise UserError("--prompt or --prompts must give a caption.")
    if args.step_cache_error and args.step_cache is None:
        raise UserError("--step-cache-error is of --step-cache, which is missing.")
    requests = _requests(args)
    paths = _paths(args, Path("samples") if args.workdir is None else args.workdir / "samples")
    from experiments._engine import generate
    from experiments._platform import ProcessSettings
    from experiments._sampling import open_asked_engine

    engine = open_asked_engine(args, requests, ProcessSettings(**process_options(args)))
    failed = 0
    for path, made in zip(paths, generate(engine, requests), strict=True):
        if made.frames is None:
            failed += 1
            logging.error("%s: %s", path, made.error)
            continue
        _write(path, made.frames, {name: str(value) for name, value in made.about.items()})
    if args.step_cache_error:
        for path, error in zip(paths, engine.cache_errors(requests), strict=True):
            logging.info("%s: %s", path, error.text)
    return int(failed > 0)


def _requests(args: argparse.Namespace) -> list[Any]:
    """One for each prompt."""
    from jaxdit.sampling import Request

    height, width = _size(args)
    return [
        Request(
            prompt,
            height,
            width,
            frames=args.frames,
            steps=args.steps,
            guidance=args.guidance,
            negative_prompt=args.negative_prompt,
            true_guidance=args.true_guidance,
            seed=args.seed,
            number=number,
        )
        for number, prompt in enumerate(args.prompt)
    ]


def _prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path} cannot be read: {error}.") from error


def _size(args: argparse.Namespace) -> tuple[int, int]:
    from experiments._sampling import default_picture_size, parse_size

    args.size = args.size or "{}x{}".format(*default_picture_size(args.model))
    frames, height, width = parse_size(args.size)
    if frames != 1:
        raise UserError(f"--size is HEIGHTxWIDTH, the number of frames is --frames; got {args.size!r}.")
    return height, width


def _paths(args: argparse.Namespace, folder: Path) -> list[Path]:
    """A file for each prompt."""
    suffixes = (".gif", ".mp4") if args.frames > 1 else (".png",)
    if args.out is not None:
        if len(args.prompt) > 1:
            raise UserError("--out names one file; leave it out for several prompts.")
        if args.out.suffix.lower() not in suffixes:
            raise UserError(f"--out must end in {' or '.join(suffixes)}; got {args.out}.")
        return [args.out]
    size = args.size if args.frames == 1 else f"{args.frames}x{args.size}"
    slugs = [re.sub(r"\W+", "_", prompt.lower()).strip("_")[:60] or "empty" for prompt in args.prompt]
    return [folder / f"{slug}_{size}_seed{args.seed}_{i}{suffixes[0]}" for i, slug in enumerate(slugs)]


def _write(path: Path, picture: Any, about: dict[str, str]) -> None:
    import jax

    from experiments._disk import writing
    from experiments._figures import save_clip, save_image

    if jax.process_index() != 0:
        return
    with writing(path, "Choose another --out."):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".png":
            save_image(path, picture[0], about)
        else:
            save_clip(path, picture, about)
    logging.info("wrote %s", path)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
