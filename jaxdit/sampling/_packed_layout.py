"""Requests of any mixture of sizes, packed and balanced over all devices, as in training."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from parallel import PackedKernel, exchange, expand_attention, expand_tokens, make_balanced_attention
from solver import StepCapacity, StepLayout, StepTables, step_tables

from .._sharding import AnyMesh
from ._backbone import Evaluate
from ._denoiser import Conditions, DenoiserRows
from ._home import HomeRows, positions
from ._step_cache import CacheState


class PackedTables(NamedTuple):
    """A batch's tables; arrays (devices, ...), sharded over devices.

    Attributes:
        step: of the plan, whose sequence g * r is request r's branch g.
        request, token: (devices, rows) what the rows of latents are, as in `HomeRows`.
        text_sequence, text_token: (devices, rows) sequence plus one, and index, of text rows in home layout.
    """

    step: StepTables
    request: Any
    token: Any
    text_sequence: Any
    text_token: Any


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Latents lie whole at their request's home, and move to where the plan wants them for every evaluation.

    Attributes:
        mesh: its devices, in the order of its axes, are the plan's.
        capacity: static sizes.
        requests: requests that the batch has room for.
        branches: of guidance.
        kernel: block computation of packed attention; chosen by platform if None.
    """

    mesh: AnyMesh
    capacity: StepCapacity
    requests: int
    branches: int
    kernel: PackedKernel | None = None

    @property
    def rows(self) -> int:
        """Rows of a device's latents."""
        return -(-self.capacity.home_image // self.branches)

    @property
    def sequences(self) -> int:
        """Sequences that are evaluated."""
        return self.branches * self.requests

    @property
    def evaluated_rows(self) -> int:
        """Image rows that a device evaluates."""
        return self.capacity.image

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which devices are numbered, all of them."""
        return self.mesh.axis_names

    @property
    def table_specs(self) -> Any:
        """Partition specs of the tables."""
        return P(self.axes)

    def tables(self, layout: StepLayout, devices: list[int]) -> PackedTables:
        """Host arrays for the listed devices.

        Args:
            layout: of a plan for `branches * requests` sequences, of which those without tokens are no requests.
            devices: numbers of this process's devices.
        """
        plan = layout.plan
        text = np.asarray(plan.text_lengths, np.int64)
        image = np.asarray(plan.lengths, np.int64) - text
        first = slice(0, self.requests)
        request, token = _home_rows(image[first], np.asarray(plan.home)[first], devices, self.rows)
        text_rows = _home_rows(text, np.asarray(plan.home), devices, self.capacity.home_text)
        return PackedTables(step_tables(layout, self.capacity, devices), request, token, *text_rows)

    def home(self, grids: Int[Array, "r 3"], tables: PackedTables) -> HomeRows:
        """Inside `shard_map`: the rows here; tables without their device axis."""
        return HomeRows(tables.request, tables.token)

    def predict(
        self,
        evaluate: Evaluate,
        x: Float[Array, "n c"],
        time: Float[Array, " r"],
        conditions: Conditions,
        grids: Int[Array, "r 3"],
        tables: PackedTables,
    ) -> tuple[Float[Array, "g n c"], CacheState | None]:
        """Inside `shard_map`: predictions of all branches for the rows here, and the step cache."""
        given, capacity = conditions.flat(), self.capacity
        routes = expand_tokens(tables.step, capacity)
        # Home rows of the plan: the requests' of branch 0, then those of branch 1.
        count = jnp.maximum((tables.request > 0).sum(), 1)
        row = jnp.arange(capacity.home_image)
        branch, source = row // count, row % count
        real = (branch < self.branches) & (tables.request[source] > 0)
        sequence = jnp.where(real, tables.request[source] + branch * self.requests, 0)
        img, ids, token = exchange(
            (jnp.where(real[:, None], x[source], 0.0), sequence, tables.token[source]),
            routes.image,
            axis_name=self.axes,
        )
        txt, txt_ids = self._text(given, tables, routes.text)
        attention = make_balanced_attention(
            expand_attention(tables.step, capacity, num_heads=capacity.num_heads),
            axis_name=self.axes,
            kernel=self.kernel,
        )
        rows = DenoiserRows(
            img=img,
            img_ids=ids,
            img_positions=positions(HomeRows(ids, token), jnp.tile(grids, (self.branches, 1))),
            txt=txt,
            txt_ids=txt_ids,
            time=jnp.tile(time, self.branches),
            conditions=given,
        )
        found, cache = evaluate(rows, attention)
        back = exchange(found, routes.image.reversed, axis_name=self.axes)
        first = count * jnp.arange(self.branches)[:, None]
        return back[jnp.minimum(first + jnp.arange(self.rows)[None], capacity.home_image - 1)], cache

    def _text(self, given: Conditions, tables: PackedTables, route: Any) -> tuple[Array | None, Array]:
        """Text rows in token layout: features are on every device, so only what they are moves."""
        ids, token = exchange((tables.text_sequence, tables.text_token), route, axis_name=self.axes)
        if given.text is None:
            return None, ids
        rows = given.text[jnp.maximum(ids - 1, 0), token]
        return jnp.where(ids[:, None] > 0, rows, 0.0), ids


def _home_rows(
    lengths: np.ndarray, home: np.ndarray, devices: list[int], capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sequence plus one and token of every row of the devices: their sequences one after another."""
    sequence = np.zeros((len(devices), capacity), np.int32)
    token = np.zeros_like(sequence)
    for row, device in enumerate(devices):
        mine = np.flatnonzero(home == device)
        counts = lengths[mine]
        total = int(counts.sum())
        sequence[row, :total] = np.repeat(mine + 1, counts)
        token[row, :total] = np.concatenate([np.arange(count) for count in counts] or [np.zeros(0)])
    return sequence, token
