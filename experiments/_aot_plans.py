"""What the plans of a config's data say that its compiled program does not."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments._components import RunSettings
from experiments._feed import Planner, size_capacity
from experiments._run_data import Data
from solver import StepCapacity, StepLayout, step_tables


@dataclass(frozen=True)
class Plans:
    """What the plans of the data say that the compiled program does not.

    Attributes:
        capacity: sizes of the program's arrays, as a run finds them.
        tables: one device's index tables of a micro-batch, `StepTables`; for sampling `PackedTables`.
        block_visits: pairs of blocks that attention computes on the fullest device of that micro-batch, over its query
            blocks: the mean number of turns of attention's inner loop.
        sent_fraction: (token, head) rows that change device in an attention call, over the rows that there is room for.
        across_fraction: those that change machine.
        tokens: tokens of the micro-batch, over all devices; for sampling of all branches of guidance.
        requests: sequences that a batch for sampling has room for.
    """

    capacity: StepCapacity
    tables: Any
    block_visits: float
    sent_fraction: float
    across_fraction: float
    tokens: int
    requests: int = 0


def training_plans(settings: RunSettings, data: Data, planner: Planner) -> Plans:
    """Those of the first micro-batch, in arrays that hold as many as a run looks ahead at."""
    count = min(settings.lookahead, settings.steps) * settings.micro_batches
    capacity = size_capacity(planner, (data.train.step(t) for t in range(count)))
    layout = planner.layout(data.train.step(0))
    tables = step_tables(layout, capacity, list(range(settings.num_devices)))
    return plans_of(layout, capacity, tables, jax.tree.map(lambda x: x[:1], tables))


def plans_of(layout: StepLayout, capacity: StepCapacity, tables: Any, kept: Any, requests: int = 0) -> Plans:
    """What is told of a layout.

    Args:
        layout: of a micro-batch.
        capacity: of the program.
        tables: of all devices, `StepTables`.
        kept: tables of one device that the program takes.
        requests: as in `Plans`.
    """
    visits, sent, across = _figures(layout, tables, capacity)
    return Plans(capacity, kept, visits, sent, across, int(layout.plan.tokens.sum()), requests)


def _figures(layout: StepLayout, tables: Any, capacity: StepCapacity) -> tuple[float, float, float]:
    """Turns of attention's inner loop, and the parts of its exchanges' room that are sent and sent across machines."""
    blocks = np.concatenate([group.key_blocks for group in tables.attention], 1).astype(np.int64)
    visits = (blocks[..., 1] - blocks[..., 0]).sum(-1).max() / blocks.shape[-2]
    room, plan = capacity.key_route.send * layout.head_groups, layout.plan
    sent = [rows.max() / room if room else 0.0 for rows in (plan.rows_sent, plan.rows_across_machines)]
    return float(visits), float(sent[0]), float(sent[1])


def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape, where it will lie."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
