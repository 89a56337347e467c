"""Serve pictures over HTTP: `python -m experiments.serve --model FLUX.1-dev --port 8000`.

`POST /v1/images/generations` takes OpenAI's form (prompt, n, size as WIDTHxHEIGHT), and seed, steps, guidance,
negative_prompt, true_guidance and frames; pictures come as b64_json. `GET /health`, `GET /metrics` (Prometheus),
`GET /v1/models`. SIGTERM ends it: what waits is refused, the batch at hand is answered.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._options import add_engine_options
from experiments._program import UserError, log_to_stderr, run_program


def _parser() -> argparse.ArgumentParser:
    from experiments._serve_app import ServiceLimits
    from experiments._serve_queue import QueueLimits

    limits, queue = ServiceLimits(), QueueLimits()
    parser = argparse.ArgumentParser(prog="python -m experiments.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a pipeline in diffusers' layout: FLUX.1 or DiT")
    parser.add_argument(
        "--workdir", type=Path, help="folder of a run of experiments.train, alone or with --model"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument(
        "--grace",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="that the batch at hand may take after SIGTERM (default: 20)",
    )
    add_engine_options(parser)
    parser.add_argument("--waiting", type=int, default=queue.waiting, help="requests that may wait")
    parser.add_argument("--batch", type=int, default=queue.batch, help="most requests of a batch")
    parser.add_argument(
        "--batch-tokens", type=int, default=queue.batch_tokens, help="most image tokens of a batch"
    )
    parser.add_argument("--most-pixels", type=int, default=limits.pixels, help="of a request")
    parser.add_argument("--most-steps", type=int, default=limits.steps, help="of a request")
    parser.add_argument("--most-pictures", type=int, default=limits.pictures, help="of a request")
    parser.add_argument(
        "--size", help="WIDTHxHEIGHT of requests that name none (default: what it was trained for)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes. Returns the exit code."""
    log_to_stderr()  # before libraries that options come from set up logs of their own
    args = _parser().parse_args(argv)
    if not 0 <= args.grace < 86_400:
        raise UserError(f"--grace must be seconds, at least 0 and less than a day; got {args.grace:g}.")
    if args.workdir is None and args.model is None:
        raise UserError("--workdir or --model must say what to serve.")
    from experiments._sampling import default_picture_size, open_asked_engine
    from experiments._serve_app import Service, ServiceLimits
    from experiments._serve_metrics import ServiceMetrics
    from experiments._serve_queue import QueueLimits, SamplingQueue
    from experiments._serve_run import bound_socket, serve

    listener = bound_socket(args.host, args.port)  # an address that is taken is told before the model is read
    height, width = default_picture_size(args.model)
    engine = open_asked_engine(argparse.Namespace(bindings=[], **vars(args)))
    metrics = ServiceMetrics()
    queue = SamplingQueue(engine, QueueLimits(args.waiting, args.batch, args.batch_tokens), metrics)
    limits = ServiceLimits(
        pixels=args.most_pixels,
        steps=args.most_steps,
        pictures=args.most_pictures,
        size=args.size or f"{width}x{height}",
    )
    service = Service(engine, queue, metrics, limits, (args.workdir or args.model).resolve().name)
    if not serve(service, listener, grace_s=args.grace):
        # A thread that computes would be ended in the middle of it when Python ends, and abort the process.
        logging.warning("a batch that could not be stopped is left behind")
        logging.shutdown()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
