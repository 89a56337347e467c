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

_SIZED = re.compile(r"(?P<prompt>.*)\|\s*(?P<size>(\d+x)?\d+x\d+)\s*", re.DOTALL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.sample", description=__doc__.splitlines()[0])
    source = parser.add_argument_group(
        "model, one of them or both (a run that trained the pipeline's transformer)"
    )
    source.add_argument("--workdir", type=Path, help="folder of a run of experiments.train")
    source.add_argument("--model", type=Path, help="folder of a pipeline in diffusers' layout: FLUX.1 or DiT")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="caption (repeat for several); '| HEIGHTxWIDTH' or '| FRAMESxHEIGHTxWIDTH' at its end is a size",
    )
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
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE", help="also draw all pictures and clips on one sheet, a PNG"
    )
    parser.add_argument("--batch", type=int, default=16, help="most pictures sampled at once (default: 16)")
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
    _check(args)
    requests = _requests(args)
    paths = _paths(args, requests, Path("samples") if args.workdir is None else args.workdir / "samples")
    if not args.process_id:  # the first process writes
        from experiments._disk import check_file_writable

        check_file_writable(args.out, option="--out")
        check_file_writable(args.sheet, option="--sheet")
    import jax

    from experiments._config import checking
    from experiments._disk import check_writable
    from experiments._engine import generate
    from experiments._platform import ProcessSettings
    from experiments._sampling import open_asked_engine

    engine = open_asked_engine(args, requests, ProcessSettings(**process_options(args)))
    with checking():
        engine.checked(requests)
    if jax.process_index() == 0:
        check_writable(paths[0].parent, option="--out")
    drawn = []
    for start in range(0, len(requests), args.batch):
        here = slice(start, start + args.batch)
        for path, made in zip(paths[here], generate(engine, requests[here]), strict=True):
            if made.frames is None:
                logging.error("%s: %s", path, made.error)
                continue
            _write(path, made.frames, {name: str(value) for name, value in made.about.items()})
            drawn.append(made)
        if args.step_cache_error:
            for path, error in zip(paths[here], engine.cache_errors(requests[here]), strict=True):
                logging.info("%s: %s", path, error.text)
    if args.sheet is not None and drawn:
        _write_sheet(args.sheet, drawn)
    return int(len(drawn) < len(requests))


def _check(args: argparse.Namespace) -> None:
    """Refuse options that do not go together, and take the captions of a file."""
    if args.workdir is None and args.model is None:
        raise UserError("--workdir or --model must say what to sample.")
    args.prompt += _prompts(args.prompts)
    if not args.prompt:
        raise UserError("--prompt or --prompts must give a caption.")
    if args.step_cache_error and args.step_cache is None:
        raise UserError("--step-cache-error is of --step-cache, which is missing.")
    if args.batch < 1:
        raise UserError(f"--batch is at least 1; got {args.batch}.")


def _requests(args: argparse.Namespace) -> list[Any]:
    """One for each prompt, of its own size if it names one."""
    from jaxdit.sampling import Request

    parts = [_SIZED.fullmatch(prompt) for prompt in args.prompt]
    if args.size is not None or not all(parts):
        height, width = _size(args)
    found = []
    for number, (prompt, sized) in enumerate(zip(args.prompt, parts, strict=True)):
        if sized is None:
            size = args.frames, height, width
        else:
            prompt, size = sized["prompt"].rstrip(), _parsed(sized["size"])
        request = Request(
            prompt,
            height=size[1],
            width=size[2],
            frames=size[0],
            steps=args.steps,
            guidance=args.guidance,
            negative_prompt=args.negative_prompt,
            true_guidance=args.true_guidance,
            seed=args.seed,
            number=number,
        )
        found.append(request)
    return found


def _parsed(size: str) -> tuple[int, int, int]:
    from experiments._sampling import parse_size

    return parse_size(size)


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


def _paths(args: argparse.Namespace, requests: Sequence[Any], folder: Path) -> list[Path]:
    """A file for each request."""
    if args.sheet is not None and args.sheet.suffix.lower() != ".png":
        raise UserError(f"--sheet must end in .png; got {args.sheet}.")
    if args.out is not None:
        if len(requests) > 1:
            raise UserError("--out names one file; leave it out for several prompts.")
        suffixes = _suffixes(requests[0])
        if args.out.suffix.lower() not in suffixes:
            raise UserError(f"--out must end in {' or '.join(suffixes)}; got {args.out}.")
        return [args.out]
    return [folder / _name(request) for request in requests]


def _suffixes(request: Any) -> tuple[str, ...]:
    return (".gif", ".mp4") if request.frames > 1 else (".png",)


def _name(request: Any) -> str:
    slug = re.sub(r"\W+", "_", request.prompt.lower()).strip("_")[:60] or "empty"
    size = f"{request.height}x{request.width}"
    if request.frames > 1:
        size = f"{request.frames}x{size}"
    return f"{slug}_{size}_seed{request.seed}_{request.number}{_suffixes(request)[0]}"


def _write_sheet(path: Path, samples: Sequence[Any]) -> None:
    import jax

    from experiments._disk import writing
    from experiments._figures import save_grid

    if jax.process_index() != 0:
        return
    frames = [made.frames[0] if len(made.frames) == 1 else made.frames for made in samples]
    with writing(path, "Choose another --sheet."):
        save_grid(path, frames, [made.request.prompt for made in samples])
    logging.info("wrote %s", path)


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
