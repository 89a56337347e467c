"""Encode images and captions for training: `python -m experiments.encode --model FLUX.1-dev --data FOLDER --out CACHE`.

Then train on it: --set train.data=@encoded() --set encoded.root=CACHE. The same command goes on where it was ended.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments._options import add_process_options, process_options
from experiments._program import UserError, log_to_stderr, run_program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.encode", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of the cache")
    parser.add_argument(
        "--verify", action="store_true", help="read the whole cache and compare all checksums"
    )
    parser.add_argument("--model", help="folder of a FLUX.1 pipeline in diffusers' layout")
    parser.add_argument("--data", help="folder of images and clips with captions, or a pattern of tar shards")
    data = parser.add_argument_group("data, as folder.* of a config")
    data.add_argument(
        "--max-tokens", type=int, default=4096, help="image tokens; larger pictures are scaled down"
    )
    data.add_argument("--frame-stride", type=int, default=1, help="keep every so-manieth frame of a clip")
    data.add_argument("--max-frames", type=int, default=16, help="of a clip")
    data.add_argument("--allow-uncaptioned", action="store_true", help="take files without a caption")
    data.add_argument("--max-bad-fraction", type=float, default=0.01, help="of files that cannot be read")
    data.add_argument("--index-folder", help="where sizes of files are remembered between runs")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument(
        "--text-tokens", type=int, help="tokens of a caption (default: 512 for dev, 256 for schnell)"
    )
    kept.add_argument("--no-padding", action="store_true", help="leave out the text rows of padding tokens")
    kept.add_argument("--truncate", action="store_true", help="cut captions that are too long")
    kept.add_argument(
        "--text", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of text rows"
    )
    kept.add_argument(
        "--latents", choices=("float32", "bfloat16", "float16"), default="float32", help="dtype"
    )
    kept.add_argument(
        "--no-variance", action="store_true", help="leave out the variance that latents are drawn by"
    )
    kept.add_argument("--shard-mb", type=float, default=256.0, help="about the largest size of a file")
    work = parser.add_argument_group("how it is computed")
    work.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products")
    work.add_argument("--devices", type=int, help="devices of this process (default: all)")
    work.add_argument(
        "--t5-shards",
        choices=("one", "all"),
        default="one",
        help="'all' divides T5 among this process's devices",
    )
    work.add_argument(
        "--canvases", type=int, default=6, help="most sizes that the autoencoder is compiled for"
    )
    work.add_argument(
        "--batch-pixels", type=int, default=1 << 20, help="pixels that a device encodes together"
    )
    work.add_argument("--text-batch", type=int, default=8, help="captions that a device encodes together")
    work.add_argument("--cache", type=Path, help="folder where compiled programs are kept")
    work.add_argument(
        "--part", default="1/1", metavar="I/N", help="make the I-th of N parts; several processes share one"
    )
    add_process_options(work)
    return parser


def main(argv: Sequence[str]) -> int:
    """Make the shards of this process that are not there yet, or verify a cache. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    if args.verify:
        return _verify(args.out)
    if args.model is None or args.data is None:
        raise UserError("--model and --data must be given (or --verify).")
    return _encode(args)


def _verify(root: Path) -> int:
    from concurrent.futures import ThreadPoolExecutor

    from experiments._run_data import data_errors
    from experiments.data import EncodedCache, EncodedRules, read_info, verified

    with data_errors():
        info = read_info(root)
        with ThreadPoolExecutor(4) as pool:
            problems = list(
                filter(None, pool.map(lambda shard: verified(root, shard), range(info.num_shards)))
            )
        if problems:
            for problem in problems:
                logging.error("%s", problem)
            raise UserError(
                f"{root}: {len(problems)} of {info.num_shards} shards are missing or damaged, see above. Remove the"
                " damaged files and run experiments.encode again with the same arguments."
            )
        samples = len(EncodedCache(root, rules=EncodedRules(patch=info.layout.patch)))
    logging.info(
        "%s is whole: all %d shards, %d samples, are as they were written", root, info.num_shards, samples
    )
    return 0


def _part(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise UserError(f"--part is I/N, with I from 1 to N, such as 1/4; got {text!r}.")
    return int(number), int(count)


def _checked(args: argparse.Namespace) -> tuple[int, int]:
    """The part, after a look at the other numbers."""
    limits = {"text_batch": 1, "batch_pixels": 1, "shard_mb": 1e-3}
    for name, least in limits.items():
        if not getattr(args, name) >= least:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} must be at least {least}; got {getattr(args, name)}.")
    if args.devices is not None and args.devices < 1:
        raise UserError(f"--devices must be at least 1; got {args.devices}.")
    return _part(args.part)


def _encode(args: argparse.Namespace) -> int:
    part = _checked(args)
    import jax

    from experiments import _platform
    from experiments._config import checking
    from experiments._encode_plan import claim
    from experiments._encode_run import Worker, check_space, only_worker, report_whole, unfinished
    from experiments._run_data import data_errors

    processes = _platform.ProcessSettings(**process_options(args))
    if args.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(args.cache))
    _platform.prepare_platform((args.devices or 1) * (args.num_processes or 1), processes)
    process, count = jax.process_index(), jax.process_count()
    worker = Worker((part[0] - 1) * count + process, part[1] * count)
    with data_errors(), checking():
        plan = _plan(args)
        claim(args.out, plan.info)
        with only_worker(args.out, worker):
            todo = unfinished(args.out, worker.shards(plan.info.num_shards))
            if todo:
                check_space(args.out, plan, todo)
                _make(args, plan, todo)
    _platform.wait_for_others("encoded")
    if process == 0:
        report_whole(args.out, plan.info.num_shards)
    return 0


def _plan(args: argparse.Namespace) -> Any:
    from experiments._data_components import WHOLE_CAPTIONS, open_media_source
    from experiments._encode_plan import CachePlan, CacheSettings
    from experiments._encoders import EncoderSettings
    from experiments.data import BadLimit, MediaRules

    encoders = EncoderSettings(
        args.model,
        text_tokens=args.text_tokens,
        padding=not args.no_padding,
        on_long="truncate" if args.truncate else "error",
        dtype=args.dtype,
        text_dtype=args.text,
        canvases=args.canvases,
    )
    folder = encoders.open()
    rules = MediaRules(
        patch=folder.pixels_per_token,
        max_tokens=args.max_tokens,
        frame_stride=args.frame_stride,
        max_frames=args.max_frames,
        max_text=WHOLE_CAPTIONS,
        allow_uncaptioned=args.allow_uncaptioned,
        bad_limit=BadLimit(fraction=args.max_bad_fraction),
        index_folder=args.index_folder,
    )
    settings = CacheSettings(
        rules=rules,
        shard_bytes=round(args.shard_mb * 1e6),
        latent_dtype=args.latents,
        has_variance=not args.no_variance,
        group_pixels=args.batch_pixels,
    )
    return CachePlan.make(open_media_source(args.data, rules), folder, encoders, settings)


def _make(args: argparse.Namespace, plan: Any, todo: Sequence[int]) -> None:
    import jax

    from experiments._encode_run import ShardEncoder
    from experiments._encoders import BatchEncoder, check_memory
    from experiments.data import BadLimit, BadTally
    from jaxdit.pipelines import FluxEncoders
    from parallel import sequence_mesh

    devices = jax.local_devices()
    if args.devices is not None and args.devices > len(devices):
        raise UserError(
            f"--devices must be at most the {len(devices)} {devices[0].platform} devices there are; got {args.devices}."
        )
    devices = devices[: args.devices]
    shares = len(devices) if args.t5_shards == "all" else 1
    captions = min(args.text_batch, -(-len(plan.source) // len(devices)))
    check_memory(plan.folder, plan.canvases, devices, captions=captions, t5_degree=shares)
    logging.info("%d of %d shards to make on %d devices", len(todo), plan.info.num_shards, len(devices))
    encoders = FluxEncoders(
        plan.folder,
        sequence_mesh(devices, ulysses_degree=len(devices)),
        t5_shards=args.t5_shards,
        text_dtype=args.text,
    )
    encoder = BatchEncoder(encoders, plan.canvases, captions=captions, padding=not args.no_padding)
    tally = BadTally(BadLimit(fraction=args.max_bad_fraction), plan.source.name)
    logging.info("%s", ShardEncoder(args.out, plan, encoder, tally).run(todo, show=jax.process_index() == 0))


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
