"""Times of the balancer and of what follows a plan, on the recorded batches of the three published mixes.

Three things are timed apart: `balance`, from lengths to a finished plan (slice tables and every figure
included); what one host makes of it for its 8 devices, off the critical path (layouts, routes, sizes, padded
tables); and the expansion of those tables to row indices on a device.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any, NamedTuple

import jax

from experiments._bench_batches import CHECKOUT, mean, recorded_steps
from experiments._bench_report import Section, Times, markdown_table, paragraph
from parallel import expand_attention, expand_route
from solver import (
    BalancePlan,
    StepLayout,
    StepTables,
    Topology,
    balance,
    capacity_for,
    step_needs,
    step_tables,
)

_DEVICES_PER_MACHINE = 8
_NUM_HEADS = 24
_BLOCK = 128
_WARM_UP = 3  # calls before those that count


@dataclass(frozen=True, slots=True)
class _Case:
    """Ranks of a mix, repeated, and the milliseconds a plan may take, where a limit was set."""

    mix: str
    copies: int
    limit_ms: float | None


_CASES = (_Case("joint", 1, 1.0), _Case("lowres", 1, 5.0), _Case("mixres", 1, None), _Case("joint", 32, 50.0))
_BAG_SIZES = (1, 2, 4, 8)
# What a plan without a spec may take, with the ranks of each mix repeated so often.
_AUTO_CASES = tuple(
    _Case(mix, copies, limit)
    for copies, limit in ((1, 25.0), (8, 100.0), (32, 300.0))
    for mix in ("joint", "lowres", "mixres")
)
# Milliseconds of plans in a process to itself: of the cases with one copy, where Numba is said to be absent.
_WITHOUT_NUMBA = """
import json, sys
sys.modules["numba"] = None
from experiments._bench_solver import auto_times
from solver._compiled import HAS_NUMBA
assert not HAS_NUMBA
print(json.dumps([entry.plan_ms.samples for entry in auto_times(copies=(1,), repeats=int(sys.argv[1]), warm_up=0)]))
"""


@dataclass(frozen=True, slots=True)
class SolverTimes:
    """Milliseconds for one mix, device count and bag spec; of the slower of the steps timed.

    Attributes:
        mix, devices, bags, sequences, limit_ms: the case.
        plan_ms: `balance`.
        host_ms: layouts, routes, sizes and tables of one host's devices.
        load_max_over_mean, static_step_cost: of the plans, means over the steps.
    """

    mix: str
    devices: int
    bags: str
    sequences: int
    limit_ms: float | None
    plan_ms: Times
    host_ms: Times
    load_max_over_mean: float
    static_step_cost: float

    @property
    def share_of_limit(self) -> float:
        """Median over limit; 0 without one."""
        return self.plan_ms.middle / self.limit_ms if self.limit_ms else 0.0


def solver_times(*, repeats: int = 25, quick: bool = False) -> list[SolverTimes]:
    """Time planning and what one host does afterwards, for equal bags of 1, 2, 4 and 8 devices.

    The first two steps of each mix, on 32 devices and, the ranks repeated, on 1,024.

    Raises:
        UserError: outside a checkout, which the recorded batches are part of.
    """
    cases = _CASES[:1] if quick else _CASES
    return [_time_spec(case, size, repeats) for case in cases for size in _BAG_SIZES]


def _time_spec(case: _Case, size: int, repeats: int) -> SolverTimes:
    problems = [_problem(case, size, step) for step in range(2)]
    plans = [plan() for plan in problems]
    plan_ms = [_times(plan, repeats) for plan in problems]
    host_ms = [_times(partial(_host_tables, plan), max(repeats // 5, 2)) for plan in plans]
    return SolverTimes(
        mix=case.mix,
        devices=plans[0].num_devices,
        bags=f"g{size}n{plans[0].num_devices // size}",
        sequences=len(plans[0].lengths),
        limit_ms=case.limit_ms,
        plan_ms=max(plan_ms, key=lambda t: t.middle),
        host_ms=max(host_ms, key=lambda t: t.middle),
        load_max_over_mean=mean([plan.load_max_over_mean for plan in plans]),
        static_step_cost=mean([plan.static_step_cost for plan in plans]),
    )


@dataclass(frozen=True, slots=True)
class AutoTimes:
    """Milliseconds of `balance` with `bags="auto"`; of the slower of the steps timed.

    Attributes:
        mix, devices, sequences, limit_ms: the case.
        plan_ms: with Numba's inner loops where it is installed.
        thread_ms: CPU time of the planning thread in those calls.
        plain_ms: with plain Python's; None where not timed.
        rows_sent_fraction, static_step_cost: of the plans, means over the steps.
    """

    mix: str
    devices: int
    sequences: int
    limit_ms: float
    plan_ms: Times
    thread_ms: Times
    plain_ms: Times | None
    rows_sent_fraction: float
    static_step_cost: float


def auto_times(
    *, copies: Sequence[int] = (1, 8, 32), repeats: int = 25, warm_up: int = _WARM_UP
) -> list[AutoTimes]:
    """Time planning without a spec, in this process: the first two steps of each mix, the ranks repeated.

    Args:
        copies: how often, of 1, 8 and 32.
        repeats: calls of each.
        warm_up: calls before those, besides the one that shows the plan.
    """
    return [_time_auto(case, repeats, warm_up) for case in _AUTO_CASES if case.copies in copies]


def _time_auto(case: _Case, repeats: int, warm_up: int) -> AutoTimes:
    problems = [_problem(case, "auto", step) for step in range(2)]
    plans = [plan() for plan in problems]
    assert case.limit_ms is not None
    clocked = max((_clocked(plan, repeats, warm_up) for plan in problems), key=lambda t: t.thread.middle)
    return AutoTimes(
        mix=case.mix,
        devices=plans[0].num_devices,
        sequences=len(plans[0].lengths),
        limit_ms=case.limit_ms,
        plan_ms=clocked.wall,
        thread_ms=clocked.thread,
        plain_ms=None,
        rows_sent_fraction=mean([plan.rows_sent_fraction for plan in plans]),
        static_step_cost=mean([plan.static_step_cost for plan in plans]),
    )


def times_without_numba(repeats: int) -> list[Times]:
    """Times of the first cases of `auto_times` in a process that does not see Numba."""
    command = [sys.executable, "-c", _WITHOUT_NUMBA, str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT)
    return [Times(tuple(samples)) for samples in json.loads(done.stdout)]


def _problem(case: _Case, bags: int | str, step: int) -> Callable[[], BalancePlan]:
    ranks = recorded_steps(case.mix)[step] * case.copies
    lengths = [length for rank in ranks for length in rank]
    home = [device for device, rank in enumerate(ranks) for _ in rank]
    return partial(
        balance,
        lengths,
        home,
        num_devices=len(ranks),
        bags=bags if isinstance(bags, str) else f"g{bags}n{len(ranks) // bags}",
        num_heads=_NUM_HEADS,
        topology=Topology(len(ranks) // _DEVICES_PER_MACHINE, _DEVICES_PER_MACHINE),
    )


def _host_tables(plan: BalancePlan) -> StepTables:
    """All that the first host does with a plan, on a platform with ragged collectives."""
    layout = StepLayout(plan, _BLOCK)
    return step_tables(layout, step_needs(layout, padded=False), range(_DEVICES_PER_MACHINE))


class _Clocked(NamedTuple):
    """Milliseconds on the wall, and of this thread, which other load on the machine disturbs less."""

    wall: Times
    thread: Times


def _times(call: Callable[[], object], repeats: int) -> Times:
    return _clocked(call, repeats, _WARM_UP).wall


def _clocked(call: Callable[[], object], repeats: int, warm_up: int) -> _Clocked:
    wall, thread = [], []
    for _ in range(repeats + warm_up):
        start, thread_start = time.perf_counter(), time.thread_time()
        call()
        wall.append((time.perf_counter() - start) * 1e3)
        thread.append((time.thread_time() - thread_start) * 1e3)
    return _Clocked(Times(tuple(wall[warm_up:])), Times(tuple(thread[warm_up:])))


@dataclass(frozen=True, slots=True)
class ExpansionTimes:
    """Milliseconds in which a device turns its tables into row indices, once a step."""

    bags: str
    attention_rows: int
    tokens: int
    ms: Times


def expansion_times(*, repeats: int = 15) -> list[ExpansionTimes]:
    """Time the expansion of one device's tables of the joint mix at full size, 24 heads, on this platform."""
    return [_time_expansion(size, repeats) for size in (1, 8)]


def _time_expansion(size: int, repeats: int) -> ExpansionTimes:
    layout = StepLayout(_problem(_CASES[0], size, 0)(), _BLOCK)
    capacity = capacity_for([step_needs(layout)])
    tables = jax.tree.map(lambda x: x[0], step_tables(layout, capacity, [0]))

    @jax.jit
    def expand(tables: Any) -> Any:
        attention = expand_attention(tables, capacity, num_heads=_NUM_HEADS)
        image = expand_route(
            tables.image, capacity.image_route, rows_in=capacity.home_image, rows_out=capacity.image
        )
        return attention, image

    placed = jax.device_put(tables)
    run = partial(_blocked, expand, placed)
    run()
    return ExpansionTimes(
        f"g{size}n{32 // size}", capacity.key_rows, capacity.text + capacity.image, _times(run, repeats)
    )


def _blocked(call: Callable[..., Any], *inputs: Any) -> Any:
    return jax.block_until_ready(call(*inputs))


def bench_solver(*, quick: bool) -> Section:
    """Everything above as a section."""
    plans = solver_times(quick=quick, repeats=5 if quick else 25)
    autos = auto_times(copies=(1,), repeats=3) if quick else auto_times()
    plain = times_without_numba(repeats=1 if quick else 5)
    autos = [replace(entry, plain_ms=times) for entry, times in zip_longest(autos, plain)]
    expansions = [] if quick else expansion_times()
    figures = {
        "plans": [asdict(entry) for entry in plans],
        "auto": [asdict(entry) for entry in autos],
        "expansions": [asdict(entry) for entry in expansions],
    }
    return Section("solver", "Solver", _body(plans, autos, expansions), figures)


def _body(plans: list[SolverTimes], autos: list[AutoTimes], expansions: list[ExpansionTimes]) -> str:
    slowest = max(plans, key=lambda entry: entry.share_of_limit)
    table = markdown_table(
        (
            "mix",
            "devices",
            "bags",
            "sequences",
            "plan, of limit",
            "plan, ms",
            "limit, ms",
            "tables of a host, ms",
            "load",
            "J",
        ),
        [
            (
                entry.mix,
                entry.devices,
                entry.bags,
                entry.sequences,
                f"{entry.share_of_limit:.2f}" if entry.limit_ms else "-",
                entry.plan_ms.text(),
                f"{entry.limit_ms:.0f}" if entry.limit_ms else "-",
                entry.host_ms.text(),
                f"{entry.load_max_over_mean:.4f}",
                f"{entry.static_step_cost:.3f}",
            )
            for entry in plans
        ],
    )
    text = paragraph(
        f"""The slowest plan takes **{slowest.share_of_limit:.2f} of its limit** ({slowest.mix},
        {slowest.devices} devices, {slowest.bags}; limits: joint 1 ms, lowres 5 ms, 1,024 devices 50 ms).
        Times of one thread, median (minimum). *Plan* is `balance` from lengths to slice tables and every
        figure; *tables of a host* is what one host then makes for its {_DEVICES_PER_MACHINE} devices, off
        the critical path. *Load* is max over mean, *J* the static step cost."""
    )
    return "\n\n".join([text, table, *_auto_text(autos), *_expansion_text(expansions)])


def _auto_text(autos: list[AutoTimes]) -> list[str]:
    shares = [entry.plan_ms.middle / entry.limit_ms for entry in autos]
    worst = autos[shares.index(max(shares))]
    loops = "Numba" if find_spec("numba") else "plain Python, for Numba is not installed"
    text = f"""`bags="auto"`, the same way: the slowest plan takes **{max(shares):.2f} of its limit** ({worst.mix},
        {worst.devices} devices; limits: 25, 100 and 300 ms on 32, 256 and 1,024 devices). Inner loops by {loops}, the
        first calls left out; *thread* is CPU time, which other load disturbs less; *plain* in a process without Numba,
        which makes the same plans."""
    header = (
        "mix",
        "devices",
        "sequences",
        "plan, of limit",
        "plan, ms",
        "thread, ms",
        "limit, ms",
        "plain, ms",
        "J",
        "rows sent",
    )
    rows = [
        (
            entry.mix,
            entry.devices,
            entry.sequences,
            f"{share:.2f}",
            entry.plan_ms.text(digits=1),
            entry.thread_ms.text(digits=1),
            f"{entry.limit_ms:.0f}",
            entry.plain_ms.text(digits=1) if entry.plain_ms else "-",
            f"{entry.static_step_cost:.3f}",
            f"{entry.rows_sent_fraction:.1%}",
        )
        for entry, share in zip(autos, shares, strict=True)
    ]
    return [paragraph(text), markdown_table(header, rows)]


def _expansion_text(expansions: list[ExpansionTimes]) -> list[str]:
    if not expansions:
        return []
    text = f"""Expansion of a device's tables to row indices, once a step, on one CPU device (joint at
    full length on 32 devices, {_NUM_HEADS} heads, padded exchange; not measured on a GPU):"""
    table = markdown_table(
        ("bags", "tokens a device", "attention rows a device", "ms: median (minimum)"),
        [
            (entry.bags, f"{entry.tokens:,}", f"{entry.attention_rows:,}", entry.ms.text(digits=1))
            for entry in expansions
        ],
    )
    return [paragraph(text), table]
