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
        "--layout", choices=("diffusers", "original"), help="names of the tensors (default: diffusers)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the tensors (default: float32)"
    )
    parser.add_argument(
        "--sample-size", type=int, help="edge of a DiT's latent images, in latent pixels (default: 32)"
    )
    parser.add_argument("--max-file-gb", type=float, default=5.0, help="size above which files are divided")
    parser.add_argument("--merge", action="store_true", help="of a run with adapters: the whole model")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    return parser


def main(argv: Sequence[str]) -> int:
    """Export the EMA weights of the backbone, or its adapters. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    if not 0 < args.max_file_gb < 1e9:
        raise UserError(f"--max-file-gb must be positive, and a number; got {args.max_file_gb}.")
    from experiments._config import checking
    from experiments._disk import writing
    from experiments._workdir import load_run
    from jaxdit.weights import SaveFormat, check_target, merge_lora, save_lora, save_params

    with checking("--out"), writing(args.out, "Choose another --out."):
        check_target(args.out)
    opened = load_run(args.workdir, args.bindings, adapters_alone=not args.merge)
    model, adapter = opened.run.settings.model, opened.run.settings.adapter
    if args.merge and adapter is None:
        raise UserError("--merge is for runs with train.adapter; this one trained all parameters.")
    params = opened.params
    for name in model.backbone_path:
        params = params[name]
    options = {"layout": args.layout, "dtype": args.dtype, "sample_size": args.sample_size}
    given = {name: value for name, value in options.items() if value is not None}
    with checking("--out"), writing(args.out, "Choose another --out."):
        if adapter is not None and not args.merge:
            if given:
                raise UserError(
                    f"adapters are written in float32 by diffusers' names; got {', '.join(given)}. With --merge the"
                    " whole model is written as asked."
                )
            save_lora(args.out, params, model.config, adapter.lora)
        else:
            if adapter is not None:
                params = merge_lora(params, model.config, adapter.lora)
            max_file_bytes = round(args.max_file_gb * 1e9)
            save_params(args.out, params, model.config, SaveFormat(max_file_bytes=max_file_bytes, **given))
    logging.info("wrote %s, step %d of %s", args.out, opened.step, args.workdir)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
