"""Write a run's weights for other programs: `python -m experiments.export --workdir DIR --out FOLDER`.

Of a run that trained adapters, their file in diffusers' format; with `--merge` the whole model with them in it.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._program import UserError, log_to_stderr, run_program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.export", description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, type=Path, help="folder of a run of experiments.train")
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument(
        "--layout", default="diffusers", choices=("diffusers", "original"), help="names of the tensors"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--sample-size", type=int, default=32, help="edge of the latent images a DiT is for, in latent pixels"
    )
    parser.add_argument("--max-file-gb", type=float, default=5.0, help="size above which files are divided")
    parser.add_argument("--merge", action="store_true", help="of a run with adapters: the whole model")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    return parser


def main(argv: Sequence[str]) -> int:
    """Export the EMA weights of the backbone, or its adapters. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    if not args.max_file_gb > 0:
        raise UserError(f"--max-file-gb must be positive; got {args.max_file_gb}.")
    from experiments._config import checking
    from experiments._disk import writing
    from experiments._workdir import load_run
    from jaxdit.weights import merge_lora, save_lora, save_params

    opened = load_run(args.workdir, args.bindings)
    model, adapter = opened.run.settings.model, opened.run.settings.adapter
    if args.merge and adapter is None:
        raise UserError("--merge is for runs with train.adapter; this one trained all parameters.")
    params = opened.params
    for name in model.backbone_path:
        params = params[name]
    with checking("--out"), writing(args.out, "Choose another --out."):
        if adapter is not None and not args.merge:
            save_lora(args.out, params, model.config, adapter.lora)
            logging.info("wrote adapters to %s, step %d of %s", args.out, opened.step, args.workdir)
            return 0
        if adapter is not None:
            params = merge_lora(params, model.config, adapter.lora)
        save_params(
            args.out,
            params,
            model.config,
            layout=args.layout,
            dtype=args.dtype,
            sample_size=args.sample_size,
            max_file_bytes=round(args.max_file_gb * 1e9),
        )
    logging.info("wrote %s, step %d of %s", args.out, opened.step, args.workdir)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
