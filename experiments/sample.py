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
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", type=Path, help="folder of a run of experiments.train")
    source.add_argument("--model", type=Path, help="folder of a FLUX.1 pipeline in diffusers' layout")
    parser.add_argument("--prompt", action="append", default=[], help="caption (repeat for several pictures)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="captions, one a line")
    parser.add_argument(
        "--size", default=None, help="HEIGHTxWIDTH in pixels (default: 32x32; --model 1024x1024)"
    )
    parser.add_argument("--frames", type=int, default=1, help="more than 1 makes a clip")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write; .gif or .mp4 for a clip (default: in WORKDIR/samples, or samples)",
    )
    parser.add_argument(
        "--devices", type=int, help="number of devices (default: as the run was trained on; --model all)"
    )
    run = parser.add_argument_group("with --workdir")
    run.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    model = parser.add_argument_group("with --model")
    model.add_argument("--steps", type=int, help="default: 28 (dev), 4 (schnell)")
    model.add_argument("--guidance", type=float, help="distilled guidance (default: 3.5)")
    model.add_argument(
        "--true-guidance", type=float, default=1.0, help="classifier-free guidance; 1 for none"
    )
    model.add_argument("--negative-prompt", help="what classifier-free guidance leads away from")
    model.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    model.add_argument(
        "--shards", choices=["all", "machine", "one"], default="all", help="share one copy of the weights"
    )
    model.add_argument("--devices-per-machine", type=int)
    model.add_argument(
        "--truncate", action="store_true", help="cut captions that are too long, instead of refusing them"
    )
    model.add_argument("--cache", type=Path, help="folder where compiled programs are kept")
    return parser


def main(argv: Sequence[str]) -> int:
    """Sample the prompts in one batch and write a file for each. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    args.prompt += _prompts(args.prompts)
    if not args.prompt:
        raise UserError("--prompt or --prompts must give a caption.")
    return _sample_run(args) if args.model is None else _sample_model(args)


def _prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path} cannot be read: {error}.") from error


def _size(args: argparse.Namespace, default: str) -> tuple[int, int]:
    from experiments._sampling import parse_size

    args.size = args.size or default
    frames, height, width = parse_size(args.size)
    if frames != 1:
        raise UserError(f"--size is HEIGHTxWIDTH, the number of frames is --frames; got {args.size!r}.")
    return height, width


def _sample_run(args: argparse.Namespace) -> int:
    """Pictures of a run of ours."""
    from experiments._sampling import PictureSampler, SampleRequest, check_requests
    from experiments._workdir import load_run

    height, width = _size(args, "32x32")
    requests = [SampleRequest(p, args.frames, height, width, noise_id=i) for i, p in enumerate(args.prompt)]
    paths = _paths(args, args.workdir / "samples")
    opened = load_run(
        args.workdir, args.bindings, args.devices, check=lambda run: check_requests(requests, run)
    )
    pictures = PictureSampler(opened.run, seed=args.seed)(opened.params, requests)
    for path, request, picture in zip(paths, requests, pictures, strict=True):
        _write(path, picture, {"prompt": request.prompt, "seed": str(args.seed), "step": str(opened.step)})
        logging.info("wrote %s", path)
    return 0


def _sample_model(args: argparse.Namespace) -> int:
    """Pictures of a published pipeline."""
    from experiments._engine import EngineSettings, generate, open_engine
    from jaxdit.sampling import Request

    height, width = _size(args, "1024x1024")
    paths = _paths(args, Path("samples"))
    engine = open_engine(
        EngineSettings(
            args.model,
            devices=args.devices,
            devices_per_machine=args.devices_per_machine,
            dtype=args.dtype,
            shards=args.shards,
            cache=args.cache,
            on_long="truncate" if args.truncate else "error",
        )
    )
    requests = [
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
    samples = generate(engine, requests)
    for path, made in zip(paths, samples, strict=True):
        if made.frames is None:
            logging.error("%s: %s", path, made.error)
            continue
        _write(path, made.frames, {name: str(value) for name, value in made.about.items()})
        logging.info("wrote %s", path)
    return int(any(made.frames is None for made in samples))


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
