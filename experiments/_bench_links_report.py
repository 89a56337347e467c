"""The report of `bench_links`: measured times beside bytes and the planner's model."""

import dataclasses
import math
from collections.abc import Sequence
from statistics import median
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
        parts += ["### Topology-aware placement against USP", _gain_table(gains), _verdict(gains)]
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
            seconds = {name: one.limited[rate] for name, one in programs.items()}
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
            summed = [_bytes_and_compute(one, rate) for one in (usp, aware)]
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


def _bytes_and_compute(one: Measured, rate_mbit: float) -> float:
    """Seconds: bytes over rate, on top of the time without a limit."""
    return one.unlimited.middle + transfer_seconds(one.formula_bytes, rate_mbit)


def _introduction(measured: Sequence[Machines], sizes: Sizes, *, shared: bool) -> str:
    limit = (
        """each direction has the rate, as a budget of twice as much for both together: two processes that exchange data
        by gloo take turns, which then costs nothing"""
        if shared
        else """each direction has the rate for itself: two processes that exchange data by gloo take turns, so that
        exchanges may need up to twice the time of their bytes, and rings of three machines and more do not"""
    )
    programs = [one for machines in measured for one in machines.programs]
    text = f"""Machines are network namespaces of this computer, whose links are limited by `tc tbf`; {limit}. On
    each machine run one or two JAX processes of a device. {sizes.batch} sequences of {sizes.seq_len} tokens,
    {sizes.num_heads} heads of {sizes.head_dim}, float32: {sizes.tensor_bytes / 1e6:.1f} MB a tensor. Before anything is
    timed every program's output and gradients are compared with attention on one device: at most
    {max(one.error for one in programs):.1g} of an array's largest number apart; and the bytes of its compiled
    collectives with the formula: {_most_apart(programs)}. Seconds are the median of
    {len(programs[0].unlimited.samples)} interleaved rounds, from the first process' begin to the last one's end.
    "No limit" is the same program with unlimited links: its compute, with what this computer needs to move the bytes.
    MB are what a machine sends to others: by formula, and by the counters of the links. "Bytes" is the formula's bytes
    over the rate; "planner" is `solver.layer_timeline` of the emulated links: rate known, two-sided, ring steps not
    hidden, compute from a share of attention timed alone. It models the forward pass only."""
    noise = f"""Samples of a program at a rate are up to {max(map(_spread, programs)):.0%} apart; in half of the
    programs up to {median(map(_spread, programs)):.0%}."""
    return paragraph(text) + "\n\n" + paragraph(noise)


def _most_apart(programs: Sequence[Measured]) -> str:
    apart = max(abs(one.compiled_bytes / one.formula_bytes - 1) for one in programs)
    return "equal" if apart == 0 else f"up to {apart:.2%} apart"


def _spread(one: Measured) -> float:
    """Of its samples at the rate where they are furthest apart."""
    return max(max(times.samples) / times.least - 1 for times in one.limited.values())


def _times_table(machines: Machines, sizes: Sizes, direction: str) -> str:
    rates = _rates(machines)
    models = {rate: _model(machines, sizes, rate) for rate in rates if direction == _FORWARD}
    what = "measured / bytes / planner" if models else "measured / bytes"
    header = [
        "algorithm",
        "MB: formula",
        "sent",
        "no limit, s",
        *(f"{rate:g} Mbit/s: {what}, s" for rate in rates),
    ]
    rows = []
    for name, one in _of(machines, direction).items():
        row = [
            name,
            *(f"{x:.2f}" for x in (one.formula_bytes / 1e6, one.sent_bytes / 1e6, one.unlimited.middle)),
        ]
        for rate in rates:
            seconds = [one.limited[rate].middle, transfer_seconds(one.formula_bytes, rate)]
            seconds += [models[rate][name]] if models else []
            row.append(" / ".join(f"{x:.2f}" for x in seconds))
        rows.append(row)
    return markdown_table(header, rows)


def _ranking_table(rankings: Sequence[_Ranking]) -> str:
    rows = []
    for one in rankings:
        row = [one.name, one.direction, f"{one.rate_mbit:g}"]
        row += [_agreement_cell(found) for found in (one.by_bytes, one.by_planner, one.in_turn)]
        rows.append(row)
    return markdown_table(("machines", "program", "Mbit/s", "bytes", "planner", "planner, in turn"), rows)


def _agreement_cell(one: Agreement | None) -> str:
    return f"{one.tau:.2f}, {one.ordered - len(one.disagreeing)} of {one.ordered}" if one else ""


_PREDICTIONS = {"by_bytes": "bytes", "by_planner": "the planner", "in_turn": "the planner in turn"}


def _ranking_text(rankings: Sequence[_Ranking]) -> str:
    text = paragraph(
        """Kendall's tau (b) of the predicted with the measured order, and how many pairs have the same order, of those
        that neither takes for equal: predictions do within 1 %, measurements if samples overlap. "In turn" is the
        planner's transfers and compute one after another, as XLA on CPU runs them: the planner's latency lets Torus
        hide its pulls, which nothing can here, and differs for nobody else."""
    )
    bullets = [_prediction_text(field, rankings) for field in _PREDICTIONS]
    return "\n".join([text, "", *bullets])


def _prediction_text(field: str, rankings: Sequence[_Ranking]) -> str:
    """A prediction over all rankings that have it; each pair that disagrees is named."""
    found = [(ranking, one) for ranking in rankings if (one := getattr(ranking, field)) is not None]
    ordered = sum(one.ordered for _, one in found)
    pairs = [
        f"{pair.slower} is measured {pair.measured:.2f} of {pair.faster} and predicted {pair.predicted:.2f}"
        f" ({ranking.name}, {ranking.direction}, {ranking.rate_mbit:g} Mbit/s)"
        for ranking, one in found
        for pair in one.disagreeing
    ]
    named = f" The others: {'; '.join(pairs)}." if pairs else ""
    first = max(one.regret for _, one in found)
    return paragraph(
        f"""By {_PREDICTIONS[field]} {ordered - len(pairs)} of {ordered} pairs are in order, and what should be fastest
        takes at most {first:.2f} of the fastest one's time.{named}""",
        bullet=True,
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


def _verdict(gains: Sequence[_Gain]) -> str:
    """Whether topology-aware placement wins by what bytes predict, on each set of machines."""
    return "\n".join(_verdict_on(name, gains) for name in dict.fromkeys(gain.name for gain in gains))


def _verdict_on(name: str, gains: Sequence[_Gain]) -> str:
    ours = [one for one in gains if one.name == name]
    wins = sum(one.measured > 1 for one in ours)
    off = max(abs(one.measured / one.with_compute - 1) for one in ours)
    measured, by_bytes = ([getattr(one, field) for one in ours] for field in ("measured", "by_bytes"))
    return paragraph(
        f"""{name}: topology-aware placement is faster in {wins} of {len(ours)} rows; USP takes {min(measured):.2f} to
        {max(measured):.2f} times as long, and sends {min(by_bytes):.2f} to {max(by_bytes):.2f} times as much. The ratio
        of times is within {off:.0%} of what bytes over rate and the time without a limit add up to.""",
        bullet=True,
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
