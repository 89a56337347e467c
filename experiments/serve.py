"""Serve pictures over HTTP: `python -m experiments.serve --model FLUX.1-dev --port 8000`.

`POST /v1/images/generations` takes OpenAI's form (prompt, n, size as WIDTHxHEIGHT), and seed, steps, guidance,
negative_prompt, true_guidance and frames; pictures come as b64_json. `GET /health`, `GET /metrics` (Prometheus),
`GET /v1/models`.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._program import log_to_stderr, run_program

_CLOSE_S = 60.0


def _parser() -> argparse.ArgumentParser:
    from experiments._serve_app import ServiceLimits
    from experiments._serve_queue import QueueLimits

    limits, queue = ServiceLimits(), QueueLimits()
    parser = argparse.ArgumentParser(prog="python -m experiments.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="folder of a FLUX.1 pipeline")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--devices-per-machine", type=int)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--shards", choices=["all", "machine", "one"], default="all")
    parser.add_argument("--cache", type=Path, help="folder where compiled programs are kept")
    parser.add_argument("--waiting", type=int, default=queue.waiting, help="requests that may wait")
    parser.add_argument("--batch", type=int, default=queue.batch, help="most requests of a batch")
    parser.add_argument(
        "--batch-tokens", type=int, default=queue.batch_tokens, help="most image tokens of a batch"
    )
    parser.add_argument("--most-pixels", type=int, default=limits.pixels, help="of a request")
    parser.add_argument("--most-steps", type=int, default=limits.steps, help="of a request")
    parser.add_argument("--most-pictures", type=int, default=limits.pictures, help="of a request")
    parser.add_argument("--size", default=limits.size, help="of requests that name none")
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    import uvicorn

    from experiments._engine import EngineSettings, open_engine
    from experiments._serve_app import Service, ServiceLimits
    from experiments._serve_metrics import ServiceMetrics
    from experiments._serve_queue import QueueLimits, SamplingQueue

    settings = EngineSettings(
        args.model,
        devices=args.devices,
        devices_per_machine=args.devices_per_machine,
        dtype=args.dtype,
        shards=args.shards,
        cache=args.cache,
    )
    engine = open_engine(settings)
    metrics = ServiceMetrics()
    queue = SamplingQueue(engine, QueueLimits(args.waiting, args.batch, args.batch_tokens), metrics)
    limits = ServiceLimits(
        pixels=args.most_pixels, steps=args.most_steps, pictures=args.most_pictures, size=args.size
    )
    service = Service(engine, queue, metrics, limits, args.model.resolve().name)
    logging.info("serving %s on http://%s:%d", service.name, args.host, args.port)
    uvicorn.run(service.app(), host=args.host, port=args.port, log_level="warning")
    queue.close(_CLOSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
