"""What `bench_sampling` found, as a section of docs/benchmarks.md."""

from collections.abc import Sequence
from typing import Any

from experiments._bench_report import Section, markdown_table, paragraph
from experiments._bench_sampling_measure import Algorithm, Placed, measure_all
from experiments._bench_sampling_model import QUICK, BenchSizes

TITLE = "Sampling: algorithms, and the planner's choice"
_MB = 1e6


def bench_sampling(*, quick: bool) -> Section:
    """Measure and report."""
    sizes = QUICK if quick else BenchSizes()
    placed = measure_all(sizes)
    parts = [_introduction(sizes)]
    for one in placed:
        parts += [f"### {_name(one)}", _table(one), _choices(one), _batches(one, sizes)]
    return Section("sampling", TITLE, "\n\n".join(parts), {"placed": [_figures(one) for one in placed]})


def _name(one: Placed) -> str:
    topology = one.topology
    machines = "machines" if topology.num_machines > 1 else "machine"
    return f"{topology.num_machines} {machines} x {topology.devices_per_machine}"


def _introduction(sizes: BenchSizes) -> str:
    grids = ", ".join(f"{height * width:,}" for height, width in sizes.grids)
    return paragraph(f"""The engine's evaluation of an MMDiT (width {sizes.width}, {sizes.num_heads} heads,
    {sizes.blocks} double and {sizes.blocks} single blocks, float32) of random weights, for one picture of {grids}
    image tokens and {sizes.text} of text, under the planner's best mesh of every algorithm. Times are ratios to the
    fastest of that size: medians of {sizes.rounds} interleaved rounds, of {sizes.evaluations} evaluations each. MB are
    rows that a device sends in an evaluation, counted in the compiled program, to the same machine and to others;
    memory is the compiled temporaries of a device. The devices are virtual: all links are this computer's memory, so
    what crosses machines costs as much as what does not, nothing runs under anything, and times say what algorithms
    cost beside their links. The planner is told that: speeds of products, of attention and of an exchange, measured in
    the same run, everything in turn.""")


def _table(one: Placed) -> str:
    rows = []
    for algorithm in one.algorithms:
        same = [other for other in one.algorithms if other.grid == algorithm.grid]
        best = min(other.times.middle for other in same)
        rows.append(
            [
                f"{algorithm.grid[0] * algorithm.grid[1]:,}",
                algorithm.text,
                f"{algorithm.times.middle / best:.2f}",
                f"{algorithm.traffic.inside / _MB:.2f}",
                f"{algorithm.traffic.across / _MB:.2f}",
                f"{algorithm.temp_bytes / _MB:.1f}",
                "chosen" if one.chosen[algorithm.grid] is algorithm.plan else "",
            ]
        )
    header = [
        "tokens",
        "algorithm (machines x devices)",
        "time",
        "MB inside",
        "MB across",
        "MB of memory",
        "planner",
    ]
    return markdown_table(header, rows)


def _choices(one: Placed) -> str:
    """How far the planner's choice is from the best."""
    found = []
    for grid, plan in one.chosen.items():
        same = [a for a in one.algorithms if a.grid == grid]
        chosen = next(a for a in same if a.plan is plan)
        found.append(chosen.times.middle / min(a.times.middle for a in same))
    worst = max(_spread(a) for a in one.algorithms)
    return paragraph(
        f"The planner's choices take {', '.join(f'{ratio:.2f}' for ratio in found)} times as long as the best measured;"
        f" samples of a program are up to {worst:.0%} apart.",
        bullet=True,
    )


def _spread(algorithm: Algorithm) -> float:
    return max(algorithm.times.samples) / algorithm.times.least - 1


def _batches(one: Placed, sizes: BenchSizes) -> str:
    mixed = [height * width for height, width in sizes.mixed]
    batched, apart = (one.branches[name].middle for name in ("batched", "apart"))
    lines = [
        f"With guidance, of the largest picture: branches on halves of the devices take {apart / batched:.2f} times as"
        " long as both on all of them.",
        f"{len(mixed)} pictures of {min(mixed):,} to {max(mixed):,} tokens packed:"
        f" {one.alone.middle / one.packed.middle:.2f} times as fast as one after another, each on all devices.",
    ]
    return "\n".join(paragraph(line, bullet=True) for line in lines)


def _figures(one: Placed) -> dict[str, Any]:
    def plan(algorithm: Algorithm) -> dict[str, Any]:
        return {
            "algorithm": algorithm.text,
            "grid": list(algorithm.grid),
            "seconds": list(algorithm.times.samples),
            "inside_bytes": algorithm.traffic.inside,
            "across_bytes": algorithm.traffic.across,
            "temp_bytes": algorithm.temp_bytes,
            "chosen": one.chosen[algorithm.grid] is algorithm.plan,
        }

    def samples(times: Any) -> Sequence[float]:
        return list(times.samples)

    return {
        "devices": _name(one),
        "algorithms": [plan(algorithm) for algorithm in one.algorithms],
        "branches": {name: samples(times) for name, times in one.branches.items()},
        "packed": samples(one.packed),
        "alone": samples(one.alone),
    }
