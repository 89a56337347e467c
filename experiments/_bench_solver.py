"""Times of the balancer, on the batches of the three published mixes."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from solver import BalancePlan, Topology, balance

_BATCHES = Path(__file__).parents[1] / "tests" / "data" / "balance.json.gz"
_DEVICES_PER_MACHINE = 8
_REPEATS = 15
# (mix, copies of its 32 ranks, milliseconds a plan may take)
_CASES = (("joint", 1, 1.0), ("lowres", 1, 5.0), ("mixres", 1, 1.0), ("joint", 32, 50.0))
_BAG_SIZES = (1, 2, 4, 8)


def solver_times(batches: Path = _BATCHES) -> list[dict[str, str | int | float]]:
    """Time `balance` from lengths to a finished plan: slice tables and every figure included.

    The first two steps of each mix, on 32 devices and, the ranks repeated, on 1,024, for equal bags of 1, 2, 4
    and 8 devices.

    Args:
        batches: gzipped JSON with `batches[mix]["steps"][step][rank]` a list of lengths.

    Returns:
        One entry for each mix, device count and bag spec: `mix`, `devices`, `bags`, `sequences`, `min_ms` and
        `median_ms` over the repeats (of the slower step), `limit_ms`, `load_max_over_mean` and
        `static_step_cost` (means over the steps).

    Raises:
        FileNotFoundError: the batches are not there: they are part of a checkout, not of the wheel.
    """
    mixes = json.loads(gzip.decompress(batches.read_bytes()))["batches"]
    rows: list[dict[str, str | int | float]] = []
    for mix, copies, limit_ms in _CASES:
        for size in _BAG_SIZES:
            steps = [step * copies for step in mixes[mix]["steps"][:2]]
            rows.append({"mix": mix, "limit_ms": limit_ms, **_time_spec(steps, size)})
    return rows


def _time_spec(steps: list[list[list[int]]], size: int) -> dict[str, str | int | float]:
    num_devices = len(steps[0])
    bags = f"g{size}n{num_devices // size}"
    topology = Topology(num_devices // _DEVICES_PER_MACHINE, _DEVICES_PER_MACHINE)
    plans, least, middle = [], 0.0, 0.0
    for ranks in steps:
        lengths = [length for rank in ranks for length in rank]
        home = [device for device, rank in enumerate(ranks) for _ in rank]

        def plan(lengths: list[int] = lengths, home: list[int] = home) -> BalancePlan:
            return balance(lengths, home, num_devices=num_devices, bags=bags, topology=topology)

        plans.append(plan())
        times = [_milliseconds(plan) for _ in range(_REPEATS)]
        least, middle = max(least, min(times)), max(middle, median(times))
    return {
        "devices": num_devices,
        "bags": bags,
        "sequences": len(plans[0].lengths),
        "min_ms": least,
        "median_ms": middle,
        "load_max_over_mean": sum(p.load_max_over_mean for p in plans) / len(plans),
        "static_step_cost": sum(p.static_step_cost for p in plans) / len(plans),
    }


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
