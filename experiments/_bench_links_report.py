"""The report of `bench_links`: measured times beside bytes and the planner's model."""

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import Any

from experiments._bench_links_compare import PREDICTIONS, Agreement, Gain, Ranking, gains, rankings
from experiments._bench_links_measure import Machines, Measured
from experiments._bench_links_model import all_modelled, transfer_seconds
from experiments._bench_links_variants import DIRECTIONS, Sizes
from experiments._bench_report import Section, markdown_table, paragraph

TITLE = "Sequence-parallel attention over slow links, emulated"
_FORWARD = DIRECTIONS[0]


def links_section(measured: Sequence[Machines], sizes: Sizes, *, shared: bool) -> Section:
    """The report of all that was measured."""
    ranked = [one for machines in measured for one in rankings(machines, sizes)]
    gained = [one for machines in measured for one in gains(machines)]
    parts = [_introduction(measured, sizes, shared=shared)]
    for machines in measured:
        for direction in DIRECTIONS:
            parts += [f"### {machines.name}, {direction}", _times_table(machines, sizes, direction)]
    parts += ["### Do bytes and the planner rank as the clock does?", *_ranking_parts(ranked)]
    if gained:
        parts += ["### Topology-aware placement against USP", _gain_table(gained), _verdict(gained)]
    figures = {
        "sizes": dataclasses.asdict(sizes),
        "shared": shared,
        "machines": [_figures(machines, sizes) for machines in measured],
        "rankings": [dataclasses.asdict(ranking) for ranking in ranked],
        "topology_aware_over_usp": [dataclasses.asdict(gain) for gain in gained],
    }
    return Section("links", TITLE, "\n\n".join(parts), figures)


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
    hidden, compute from a share of attention timed alone."""
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
    rates = machines.rates
    models = {rate: all_modelled(machines, sizes, rate) for rate in rates if direction == _FORWARD}
    what = "measured / bytes / planner" if models else "measured / bytes"
    header = [
        "algorithm",
        "MB: formula",
        "sent",
        "no limit, s",
        *(f"{rate:g} Mbit/s: {what}, s" for rate in rates),
    ]
    rows = []
    for name, one in machines.programs_of(direction).items():
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


def _ranking_parts(ranked: Sequence[Ranking]) -> list[str]:
    text = """Kendall's tau (b) of the predicted with the measured order, and how many pairs have the same order, of
        those that neither takes for equal: predictions do within 1 %, measurements if samples overlap. "In turn" is the
        planner's transfers and compute one after another, as XLA on CPU runs them: the planner's latency lets Torus
        hide its pulls, which nothing can here. It models the forward pass only."""
    rows = [
        [
            *(one.name, one.direction, f"{one.rate_mbit:g}"),
            *(_agreement_cell(one.agreements.get(prediction)) for prediction in PREDICTIONS),
        ]
        for one in ranked
    ]
    table = markdown_table(("machines", "program", "Mbit/s", *PREDICTIONS), rows)
    counts = "\n".join(_count_text(prediction, ranked) for prediction in PREDICTIONS)
    return [paragraph(text), table, counts, *_disagreements(ranked)]


def _agreement_cell(one: Agreement | None) -> str:
    if one is None:
        return ""
    if one.tau is None:
        return "all equal"
    return f"{one.tau:.2f}, {one.ordered - len(one.disagreeing)} of {one.ordered}"


def _count_text(prediction: str, ranked: Sequence[Ranking]) -> str:
    found = [one.agreements[prediction] for one in ranked if prediction in one.agreements]
    ordered = sum(one.ordered for one in found)
    agreeing = ordered - sum(len(one.disagreeing) for one in found)
    return paragraph(
        f"""{prediction}: {agreeing} of {ordered} pairs in order; what is predicted to be fastest takes at
        most {max(one.regret for one in found):.2f} times as long as what is.""",
        bullet=True,
    )


def _disagreements(ranked: Sequence[Ranking]) -> list[str]:
    """Each pair that is measured the other way round, by more than the noise."""
    rows = [
        [
            *(prediction, one.name, one.direction, f"{one.rate_mbit:g}"),
            *(pair.faster, pair.slower, f"{pair.predicted:.2f}", f"{pair.measured:.2f}"),
        ]
        for prediction in PREDICTIONS
        for one in ranked
        if prediction in one.agreements
        for pair in one.agreements[prediction].disagreeing
    ]
    if not rows:
        return []
    header = ("prediction", "machines", "program", "Mbit/s", "faster by it", "slower by it")
    table = markdown_table((*header, "time ratio predicted", "measured"), rows)
    return ["The pairs that are not in order (slower over faster):", table]


def _gain_table(gained: Sequence[Gain]) -> str:
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
            *(_ratio(x) for x in (one.measured, one.with_compute, one.transfers, one.by_bytes)),
        )
        for one in gained
    ]
    return "USP's time over that of topology-aware placement:\n\n" + markdown_table(header, rows)


def _ratio(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}"


def _verdict(gained: Sequence[Gain]) -> str:
    """Whether topology-aware placement wins by what bytes predict, on each set of machines."""
    return "\n".join(_verdict_on(name, gained) for name in dict.fromkeys(gain.name for gain in gained))


def _verdict_on(name: str, gained: Sequence[Gain]) -> str:
    ours = [one for one in gained if one.name == name]
    faster, slower = (sum(one.order == sign for one in ours) for sign in (1, -1))
    off = max(abs(one.measured / one.with_compute - 1) for one in ours)
    return paragraph(
        f"""{name}: by more than the noise topology-aware placement is faster in {faster} and slower in {slower} of
        {len(ours)} rows; USP takes
        {_range([one.measured for one in ours])} times as long, and sends {_range([one.by_bytes for one in ours])} times
        as much. The ratio of times is within {off:.0%} of what bytes over rate and the time without a limit add up
        to.""",
        bullet=True,
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


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
        "planned_forward_s": {f"{rate:g}": all_modelled(machines, sizes, rate) for rate in machines.rates},
        "in_turn_forward_s": {
            f"{rate:g}": all_modelled(machines, sizes, rate, in_turn=True) for rate in machines.rates
        },
    }
