"""The report of `bench_links`: measured times beside bytes and the planner's model."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from experiments._bench_links_measure import Machines, Measured
from experiments._bench_links_model import Agreement, agreement, modelled_seconds, transfer_seconds
from experiments._bench_links_variants import DIRECTIONS, Sizes, variants
from experiments._bench_report import Section, markdown_table, paragraph

TITLE = "Sequence-parallel attention over slow links, emulated"
_FORWARD = DIRECTIONS[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Ranking:
    """Agreement of orders on some machines at a rate.

    Attributes:
        by_bytes: of the formula's bytes.
        by_planner, in_turn: of the planner's latency, and of its events one after another; forward only.
    """

    name: str
    direction: str
    rate_mbit: float
    by_bytes: Agreement
    by_planner: Agreement | None = None
    in_turn: Agreement | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Gain:
    """USP's time over that of topology-aware placement.

    Attributes:
        measured: of medians.
        transfers: of medians less those without a limit; NaN where a limit adds nothing.
        by_bytes: of the formula's bytes.
        with_compute: of bytes over rate, and the time without a limit on top.
    """

    name: str
    direction: str
    rate_mbit: float
    measured: float
    transfers: float
    by_bytes: float
    with_compute: float


def links_section(measured: Sequence[Machines], sizes: Sizes, *, shared: bool) -> Section:
    """The report of all that was measured."""
    rankings = [ranking for machines in measured for ranking in _rankings(machines, sizes)]
    gains = [gain for machines in measured for gain in _gains(machines)]
    parts = [_introduction(measured, sizes, shared=shared)]
    for machines in measured:
        for direction in DIRECTIONS:
            parts += [f"### {_name(machines)}, {direction}", _times_table(machines, sizes, direction)]
    parts += ["### Do bytes and the planner rank as the clock does?", _ranking_table(rankings)]
    parts += [_ranking_text(rankings)]
    if gains:
        parts += ["### Topology-aware placement against USP", _gain_table(gains), _verdict(measured, gains)]
    figures = {
        "sizes": dataclasses.asdict(sizes),
        "shared": shared,
        "machines": [_figures(machines, sizes) for machines in measured],
        "rankings": [dataclasses.asdict(ranking) for ranking in rankings],
        "topology_aware_over_usp": [dataclasses.asdict(gain) for gain in gains],
    }
    return Section("links", TITLE, "\n\n".join(parts), figures)


def _name(machines: Machines) -> str:
    topology = machines.topology
    return f"{topology.num_machines} machines x {topology.devices_per_machine}"


def _of(machines: Machines, direction: str) -> dict[str, Measured]:
    return {one.variant: one for one in machines.programs if one.direction == direction}


def _rates(machines: Machines) -> list[float]:
    return list(machines.programs[0].limited)


def _model(machines: Machines, sizes: Sizes, rate: float, *, in_turn: bool = False) -> dict[str, float]:
    return {
        v.name: modelled_seconds(v, machines, sizes, rate, in_turn=in_turn)
        for v in variants(machines.topology)
    }


def _rankings(machines: Machines, sizes: Sizes) -> list[_Ranking]:
    found = []
    for direction in DIRECTIONS:
        programs = _of(machines, direction)
        num_bytes = {name: one.formula_bytes for name, one in programs.items()}
        for rate in _rates(machines):
            seconds = {name: one.limited[rate].middle for name, one in programs.items()}
            ranking = _Ranking(_name(machines), direction, rate, agreement(num_bytes, seconds))
            if direction == _FORWARD:
                planned, in_turn = (
                    agreement(_model(machines, sizes, rate, in_turn=turn), seconds) for turn in (False, True)
                )
                ranking = dataclasses.replace(ranking, by_planner=planned, in_turn=in_turn)
            found.append(ranking)
    return found


def _gains(machines: Machines) -> list[_Gain]:
    """None where one device a machine leaves nothing to place."""
    found = []
    for direction in DIRECTIONS:
        programs = _of(machines, direction)
        if "usp" not in programs:
            continue
        usp, aware = programs["usp"], programs["topology_aware"]
        for rate in _rates(machines):
            moved = [one.limited[rate].middle - one.unlimited.middle for one in (usp, aware)]
            summed = [
                one.unlimited.middle + transfer_seconds(one.formula_bytes, rate) for one in (usp, aware)
            ]
            gain = _Gain(
                name=_name(machines),
                direction=direction,
                rate_mbit=rate,
                measured=usp.limited[rate].middle / aware.limited[rate].middle,
                transfers=moved[0] / moved[1] if moved[1] > 0 else math.nan,
                by_bytes=usp.formula_bytes / aware.formula_bytes,
                with_compute=summed[0] / summed[1],
            )
            found.append(gain)
    return found


def _introduction(measured: Sequence[Machines], sizes: Sizes, *, shared: bool) -> str:
    limit = (
        """each direction has the rate, as a budget of twice as much for both together: two processes that exchange data
        by gloo take turns, which then costs nothing"""
        if shared
        else """each direction has the rate for itself: two processes that exchange data by gloo take turns, so that
        exchanges may need up to twice the time of their bytes, and rings of three machines and more do not"""
    )
    text = f"""Machines are network namespaces of this computer, whose links are limited by `tc tbf`; {limit}. On
    each machine run one or two JAX processes of a device. {sizes.batch} sequences of {sizes.seq_len} tokens,
    {sizes.num_heads} heads of {sizes.head_dim}, float32: {sizes.tensor_bytes / 1e6:.1f} MB a tensor. Before anything is
    timed every program's output and gradients are compared with attention on one device: at most
    {max(one.error for m in measured for one in m.programs):.1g} of an array's largest number apart. Seconds are the
    median (least) of {len(measured[0].programs[0].unlimited.samples)} interleaved rounds, from the first process' begin
    to the last one's end; "no limit" is the same program with unlimited links: its compute, with what this computer
    needs to move the bytes. MB are what a machine sends to others: by formula, by the collectives of the compiled
    program, by the counters of the links (with headers). XLA on CPU runs collectives and compute in turn, so that
    Torus can hide nothing here: what it moves is measured, not what it hides."""
    return paragraph(text)


def _times_table(machines: Machines, sizes: Sizes, direction: str) -> str:
    rates = _rates(machines)
    header = ["algorithm", "MB: formula", "compiled", "sent", "no limit, s"]
    for rate in rates:
        header += [f"{rate:g} Mbit/s, s", "bytes / rate, s"]
        header += ["planner, s"] if direction == _FORWARD else []
    rows = []
    models = {rate: _model(machines, sizes, rate) for rate in rates if direction == _FORWARD}
    for name, one in _of(machines, direction).items():
        megabytes = [one.formula_bytes, one.compiled_bytes, one.sent_bytes]
        row = [name, *(f"{x / 1e6:.2f}" for x in megabytes), one.unlimited.text()]
        for rate in rates:
            row += [one.limited[rate].text(), f"{transfer_seconds(one.formula_bytes, rate):.2f}"]
            row += [f"{models[rate][name]:.2f}"] if direction == _FORWARD else []
        rows.append(row)
    return markdown_table(header, rows)


def _ranking_table(rankings: Sequence[_Ranking]) -> str:
    rows = []
    for one in rankings:
        row = [one.name, one.direction, f"{one.rate_mbit:g}"]
        for found in (one.by_bytes, one.by_planner, one.in_turn):
            row += _agreement_cells(found) if found else ("", "")
        rows.append(row)
    header = ["machines", "program", "Mbit/s"]
    for name in ("bytes", "planner", "in turn"):
        header += [f"tau: {name}", "inverted"]
    return markdown_table(header, rows)


def _agreement_cells(one: Agreement) -> tuple[str, str]:
    pairs = ", ".join(f"{a} < {b}" for a, b in one.inverted)
    return f"{one.tau:.2f}", f"{len(one.inverted)} of {one.clear}{': ' * bool(pairs)}{pairs}"


def _ranking_text(rankings: Sequence[_Ranking]) -> str:
    def count(agreements: list[Agreement | None]) -> str:
        found = [one for one in agreements if one is not None]
        clear = sum(one.clear for one in found)
        return f"{clear - sum(len(one.inverted) for one in found)} of {clear}"

    by_bytes = count([one.by_bytes for one in rankings])
    planned, in_turn = (count([getattr(one, name) for one in rankings]) for name in ("by_planner", "in_turn"))
    return paragraph(
        f"""tau is Kendall's (b); inverted are pairs, of those predicted to differ by more than 5 %, that the medians
        order the other way (predicted to be faster first). In order are {by_bytes} such pairs by bytes, {planned} by
        the planner's latency (`solver.layer_timeline` of the emulated links: rate known, two-sided, ring steps not
        hidden, compute from a share of attention timed alone), and {in_turn} by the planner's transfers and compute
        "in turn", one after another: the planner lets Torus hide its pulls, which XLA on CPU cannot."""
    )


def _gain_table(gains: Sequence[_Gain]) -> str:
    header = (
        "machines",
        "program",
        "Mbit/s",
        "measured",
        "bytes and compute",
        "transfers alone",
        "bytes alone",
    )
    rows = [
        (
            one.name,
            one.direction,
            f"{one.rate_mbit:g}",
            *(f"{x:.2f}" for x in (one.measured, one.with_compute, one.transfers, one.by_bytes)),
        )
        for one in gains
    ]
    return "USP's time over that of topology-aware placement:\n\n" + markdown_table(header, rows)


def _verdict(measured: Sequence[Machines], gains: Sequence[_Gain]) -> str:
    """Whether topology-aware placement wins on most machines by what bytes predict."""
    most = _name(max(measured, key=lambda machines: machines.topology.num_machines))
    ours = [one for one in gains if one.name == most]
    wins = sum(one.measured > 1 for one in ours)
    off = max(abs(one.measured / one.with_compute - 1) for one in ours)
    off_bytes = max(abs(one.transfers / one.by_bytes - 1) for one in ours)
    ratios = f"{min(one.measured for one in ours):.2f} to {max(one.measured for one in ours):.2f}"
    return paragraph(
        f"""On {most}, topology-aware placement is faster than USP in {wins} of {len(ours)} rows: USP takes {ratios}
        times as long. That is within {off:.0%} of what bytes over rate and the time without a limit add up to; the
        ratio of what the limits add is within {off_bytes:.0%} of that of bytes."""
    )


def _figures(machines: Machines, sizes: Sizes) -> dict[str, Any]:
    topology = machines.topology
    return {
        "num_machines": topology.num_machines,
        "devices_per_machine": topology.devices_per_machine,
        "compute_s": machines.compute_s,
        "programs": [
            {
                **dataclasses.asdict(one),
                "unlimited": one.unlimited.samples,
                "limited": {f"{rate:g}": times.samples for rate, times in one.limited.items()},
            }
            for one in machines.programs
        ],
        "planned_forward_s": {f"{rate:g}": _model(machines, sizes, rate) for rate in _rates(machines)},
        "in_turn_forward_s": {
            f"{rate:g}": _model(machines, sizes, rate, in_turn=True) for rate in _rates(machines)
        },
    }
