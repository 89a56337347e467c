"""A service with a fake engine, for tests that send it signals: `python -m tests.experiments.serve_worker`."""

import argparse
import os

from experiments._program import log_to_stderr
from experiments._serve_app import Service, ServiceLimits
from experiments._serve_metrics import ServiceMetrics
from experiments._serve_queue import QueueLimits, SamplingQueue
from experiments._serve_run import bound_socket, serve
from tests.experiments._serve_cases import FakeEngine


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, default=1.0)
    parser.add_argument("--deaf", action="store_true")
    args = parser.parse_args()
    log_to_stderr()
    engine, metrics = FakeEngine(is_deaf=args.deaf, step_s=4.0 if args.deaf else 0.4), ServiceMetrics()
    queue = SamplingQueue(engine, QueueLimits(8, 1, 64, 0.01), metrics)
    service = Service(engine, queue, metrics, ServiceLimits(pixels=1 << 16, size="16x8"), "tiny")
    listener = bound_socket("127.0.0.1", 0)
    if not serve(service, listener, grace_s=args.grace):
        os._exit(0)


if __name__ == "__main__":
    main()
