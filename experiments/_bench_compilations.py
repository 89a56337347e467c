"""How many programs 200 random batches need, and how much of them is padding; host only, nothing is compiled.

Capacities start and grow as in a run (`experiments._feed.StepAssembler`): sized for the batches looked ahead at, and
for as many again whenever a batch does not fit.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from experiments._bench_batches import SCALE, fresh_joint, fresh_mix, fresh_tails, mean
from experiments._bench_report import Section, markdown_table, paragraph
from experiments._config import find_config, load_config
from experiments._feed import Planner
from experiments._run_data import open_data
from experiments._run_planner import CPU_LINKS, make_planner
from experiments._workdir import checked_settings
from experiments.data import StepIndex
from solver import BalancePlan, CostModel, StepCapacity, StepLayout, Topology, capacity_for

NUM_DEVICES = 8
MOST_PROGRAMS = 8
# A run looks 256 steps ahead unless told otherwise, further than the batches counted here: shorter sights are harder.
SIGHTS = (1, 16, 64)
_JOINT_BAGS = (None, "g1n8", "g2n4", "g4n2", "g8n1", "g1n2+g2n1+g4n1", "auto")
_TAIL_BAGS = (None, "g1n8", "g2n4", "g4n2", "g8n1", "auto")
_QUICKSTART_BAGS = (None, "g1n8", "g2n4", "g4n2", "g1n4+g4n1", "g8n1", "auto")
_FULL_MIXES, _FULL_BAGS = ("joint", "mixres"), ("g8n4", "auto")
# Padded over useful compute that is wanted at full length, at the longest sight.
MOST_PADDED = 1.04


@dataclass(frozen=True, slots=True)
class Series:
    """Batches, more than are counted: as many as are looked ahead at besides."""

    name: str
    planner: Planner
    indices: Sequence[StepIndex]
    bags: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Growth:
    """What a series of batches needs under a bag spec.

    Attributes:
        data, bags: what was planned, and how.
        programs: distinct capacities, the first included, for each number of batches looked ahead at.
        grown: sizes that grew at the longest sight.
        padded_tokens: rows of the token layout without a token, over all rows, mean over batches at the longest sight.
        padded_rows: the same of the attention layout, where padding costs memory but no attention work.
        rows_max_over_mean: attention rows of the fullest device over the mean, by the plans.
        computed_over_useful: cost of all rows of a device's token layout and of the most attention of any, over the
            mean load (`StepStats.computed_over_useful`).
        attention_max_over_mean: attention work of the fullest device over the mean.
        blocks_over_useful: query-key pairs of the blocks that are visited over those of the sequences.
    """

    data: str
    bags: str
    programs: dict[int, int]
    grown: list[str]
    padded_tokens: float
    padded_rows: float
    rows_max_over_mean: float
    computed_over_useful: float
    attention_max_over_mean: float
    blocks_over_useful: float


def measure_growth(series: Series, bags: str | None, num_batches: int, sights: Sequence[int]) -> Growth:
    """Plan all batches, and grow the capacity as a run does."""
    planner = dataclasses.replace(series.planner, bags=bags)
    layouts = [planner.layout(index) for index in series.indices]
    needs = [planner.needs(layout) for layout in layouts]
    capacities = {sight: _capacities(needs, num_batches, sight) for sight in sights}
    longest = capacities[max(sights)]
    pairs = [(layout.plan, capacity) for layout, capacity in zip(layouts, longest, strict=False)]
    return Growth(
        data=series.name,
        bags=bags or "none",
        programs={sight: len(set(found)) for sight, found in capacities.items()},
        grown=_differences(longest[0], longest[-1]),
        padded_tokens=mean([_padded_tokens(plan, capacity) for plan, capacity in pairs]),
        padded_rows=mean([_padded_rows(plan, capacity) for plan, capacity in pairs]),
        rows_max_over_mean=mean([_max_over_mean(plan.rows) for plan, _ in pairs]),
        computed_over_useful=mean([_computed(plan, capacity) for plan, capacity in pairs]),
        attention_max_over_mean=mean([_max_over_mean(plan.attention_work) for plan, _ in pairs]),
        blocks_over_useful=mean([_blocks(layout) for layout in layouts[:num_batches]]),
    )


def _capacities(needs: Sequence[StepCapacity], num_batches: int, sight: int) -> list[StepCapacity]:
    """The capacity of each batch's program."""
    capacity = capacity_for(needs[:sight])
    found = []
    for t in range(num_batches):
        if not capacity.fits(needs[t]):
            capacity = capacity_for(needs[t : t + 1 + sight], at_least=capacity)
        found.append(capacity)
    return found


def _padded_tokens(plan: BalancePlan, capacity: StepCapacity) -> float:
    return 1.0 - int(plan.tokens.sum()) / ((capacity.text + capacity.image) * plan.num_devices)


def _padded_rows(plan: BalancePlan, capacity: StepCapacity) -> float:
    return 1.0 - int(plan.rows.sum()) / (capacity.key_rows * plan.num_devices)


def _max_over_mean(values: NDArray) -> float:
    return float(values.max() / values.mean())


def _computed(plan: BalancePlan, capacity: StepCapacity) -> float:
    linear_s = float(plan.cost.linear(capacity.text + capacity.image))
    return (linear_s + float(plan.attention_work.max())) / float(plan.load.mean())


def _blocks(layout: StepLayout) -> float:
    pairs = sum(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in layout.key_blocks)
    work = layout.plan.num_heads * float(np.sum(layout.plan.lengths.astype(float) ** 2))
    return pairs * layout.block**2 / work


def _differences(old: StepCapacity, new: StepCapacity) -> list[str]:
    before, after = asdict(old), asdict(new)
    names = []
    for name, value in after.items():
        if isinstance(value, dict) and isinstance(before[name], dict):
            names += [f"{name}.{part}" for part in value if value[part] != before[name][part]]
        elif value != before[name]:
            names.append(name)
    return names


def bench_compilations(*, quick: bool) -> Section:
    """Both series under several bag specs."""
    num_batches, sights = (20, SIGHTS[:2]) if quick else (200, SIGHTS)
    count = num_batches + max(sights)
    few = [_joint(count), _tail(count), _quickstart(count)]
    results, full = (
        [measure_growth(series, bags, num_batches, sights) for series in all_series for bags in series.bags]
        for all_series in (few, [_full(mix, count) for mix in _FULL_MIXES])
    )
    return Section(
        name="compilations",
        title="Compilations",
        body=f"{_body(results, num_batches, sights)}\n\n{_full_body(full, num_batches, sights)}",
        figures={
            "results": [asdict(result) for result in results],
            "full_length": [asdict(result) for result in full],
            "limit": MOST_PROGRAMS,
        },
    )


def _joint(count: int) -> Series:
    return Series(f"joint / {SCALE}", _small_planner(), fresh_joint(count), _JOINT_BAGS)


def _tail(count: int) -> Series:
    return Series(f"tail / {SCALE}", _small_planner(), fresh_tails(count), _TAIL_BAGS)


def _small_planner() -> Planner:
    cost = CostModel(width=256, gamma=0.4)
    return Planner(num_devices=NUM_DEVICES, num_heads=8, bags=None, cost=cost, links=CPU_LINKS, block=64)


def _full(mix: str, count: int) -> Series:
    """A mix as FLUX.1 would train on it: 4 machines of 8 GPUs, whose exchanges are not padded."""
    planner = Planner(
        num_devices=32,
        num_heads=24,
        bags=None,
        cost=CostModel(width=3072, gamma=0.4),
        topology=Topology(4, 8),
        padded=False,
    )
    return Series(mix, planner, fresh_mix(mix, count), _FULL_BAGS)


def _quickstart(count: int) -> Series:
    load_config(find_config("quickstart"))
    settings = checked_settings([])
    sampler = open_data(settings).train
    planner = make_planner(settings, NUM_DEVICES, padded=True)
    return Series("quickstart", planner, [sampler.step(t) for t in range(count)], _QUICKSTART_BAGS)


def _body(results: list[Growth], num_batches: int, sights: Sequence[int]) -> str:
    longest = max(sights)
    worst = max(result.programs[longest] for result in results)
    text = f"""Programs that {num_batches} random batches need: **{worst} at most** where {longest} are looked ahead
    at (wanted: at most {MOST_PROGRAMS}; a run looks 256 ahead unless told otherwise, so that these would all be
    planned for). A batch that does not fit enlarges the program for itself and for as many again as are looked ahead
    at. Joint: fresh draws of the mix, lengths divided by {SCALE}; tail: the lengths of the training step's; quickstart:
    the data of `make train`. Padding is the
    mean over batches with {longest} looked ahead at; padded attention rows cost memory, not attention work."""
    header = [
        "data",
        "bags",
        *(f"programs, {n} ahead" for n in sights),
        "tokens padded",
        "attention rows padded",
    ]
    rows = [
        [
            result.data,
            result.bags,
            *(result.programs[sight] for sight in sights),
            f"{result.padded_tokens:.1%}",
            f"{result.padded_rows:.1%}",
        ]
        for result in results
    ]
    return f"{paragraph(text)}\n\n{markdown_table(header, rows)}"


def _full_body(results: list[Growth], num_batches: int, sights: Sequence[int]) -> str:
    longest = max(sights)
    text = f"""At full length on 32 devices (4 machines of 8, 24 heads, width 3,072, blocks of 128 rows, exchanges as
    on GPUs), fresh draws, {longest} looked ahead at; padded over useful (wanted: at most {MOST_PADDED} of compute, at
    most {MOST_PROGRAMS} programs). *Linear* counts rows of the token layout over tokens. *Attention* is the work of the
    fullest device over the mean; with linear rows it makes *compute*, by the cost model, against the mean load.
    *Attention rows* are the program's over those with a key, of which *unequal* is what the plans' fullest device has
    over the mean: attention work is spread evenly, so devices with short sequences hold more rows; empty ones take
    memory and no attention. *Blocks*: what rounding sequences to whole blocks adds inside the attention kernel."""
    header = (
        "data",
        "bags",
        *(f"programs, {n} ahead" for n in sights),
        "compute",
        "linear",
        "attention",
        "attention rows",
        "unequal",
        "blocks",
    )
    rows = [
        [
            result.data,
            result.bags,
            *(result.programs[sight] for sight in sights),
            f"{result.computed_over_useful:.3f}",
            f"{1 / (1 - result.padded_tokens):.3f}",
            f"{result.attention_max_over_mean:.3f}",
            f"{1 / (1 - result.padded_rows):.2f}",
            f"{result.rows_max_over_mean:.2f}",
            f"{result.blocks_over_useful:.3f}",
        ]
        for result in results
    ]
    return f"{paragraph(text)}\n\n{markdown_table(header, rows)}"
