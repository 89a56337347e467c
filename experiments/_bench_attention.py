"""Packed attention against dense attention with a mask, forward and backward, on one CPU device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._bench_batches import random_lengths
from experiments._bench_report import Section, Times, markdown_table, paragraph
from parallel import (
    AttentionLayout,
    HeadGroup,
    balanced_attention,
    exchange,
    expand_attention,
    packed_attention,
)
from solver import CostModel, StepLayout, balance, step_needs, step_tables

NUM_HEADS, HEAD_DIM, BLOCK = 8, 64, 128
_MIB = 2**20
# A plan for one device moves rows on that device only: no axis is ever looked up.
_NO_AXIS = "unused"


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Segments of 200 to 4000 tokens, scaled to `total` in all; every form is timed `repeats` times."""

    num_segments: int
    total: int
    repeats: int


@dataclass(frozen=True, slots=True)
class _Case:
    """A compiled value and gradient, and its inputs."""

    name: str
    compiled: Any
    inputs: tuple[jax.Array, ...]

    @property
    def temp_bytes(self) -> int:
        """Memory beside inputs and outputs."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)

    def run(self) -> tuple[jax.Array, ...]:
        return jax.block_until_ready(self.compiled(*self.inputs))

    def seconds(self) -> float:
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started


def bench_attention(*, quick: bool) -> Section:
    """Times in turn, memory from the compiled programs, and how far the results differ."""
    sizes = _Sizes(8, 1024, 3) if quick else _Sizes(16, 4096, 5)
    lengths = random_lengths(sizes.num_segments, sizes.total, least=200, most=4000, seed=0)
    group = _only_group(lengths)
    rng = np.random.default_rng(0)
    tokens = tuple(
        jnp.asarray(rng.standard_normal((sizes.total, NUM_HEADS, HEAD_DIM), np.float32)) for _ in range(4)
    )
    rows = tuple(_to_rows(group, x) for x in tokens)
    cases = [
        _compiled("`jax.nn.dot_product_attention`, mask", _dense(lengths), tokens),
        _compiled("`packed_attention`", lambda q, k, v: packed_attention(q, k, v, group.segments).out, rows),
        _compiled(
            "the same, rows moved from tokens and back",
            lambda q, k, v: balanced_attention(q, k, v, AttentionLayout((group,)), axis_name=_NO_AXIS),
            tokens,
        ),
    ]
    error = _largest_difference(cases[0].run(), cases[2].run())
    samples = [[case.seconds() for case in cases] for _ in range(sizes.repeats)]
    times = [Times(tuple(column)) for column in zip(*samples, strict=True)]
    figures = {
        "lengths": lengths,
        "time_ratio": [times[0].middle / t.middle for t in times],
        "time_ratio_of_minima": [times[0].least / t.least for t in times],
        "memory_ratio": [case.temp_bytes / cases[0].temp_bytes for case in cases],
        "seconds": [t.samples for t in times],
        "temp_bytes": [case.temp_bytes for case in cases],
        "largest_difference": error,
    }
    return Section("attention", "Packed attention", _body(figures, cases, times), figures)


def _body(figures: dict[str, Any], cases: Sequence[_Case], times: Sequence[Times]) -> str:
    rows = [
        (
            case.name,
            f"{figures['time_ratio'][i]:.1f} ({figures['time_ratio_of_minima'][i]:.1f})",
            f"1/{1 / figures['memory_ratio'][i]:.0f}",
            times[i].text(1e-3, 0),
            f"{case.temp_bytes / _MIB:.0f}",
        )
        for i, case in enumerate(cases)
    ]
    header = (
        "value and gradient, in turn, one process",
        "times faster: of medians (minima)",
        "memory",
        "ms: median (minimum)",
        "MiB",
    )
    lengths = figures["lengths"]
    claim = f"""Packed attention against dense attention with a mask: **{figures["time_ratio"][1]:.1f}
    times faster** (wanted: at least 6) in **1/{1 / figures["memory_ratio"][1]:.0f} of the memory**
    (wanted: under 1/20; temporaries by `compiled.memory_analysis()`)."""
    case = f"""Float32, {NUM_HEADS} heads of {HEAD_DIM} channels, {len(lengths)} segments of
    {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all (uniform in 200 to 4000, scaled),
    blocks of {BLOCK} rows. Outputs and gradients differ by {figures["largest_difference"]:.0e} of the
    largest at most."""
    return "\n\n".join([paragraph(claim), markdown_table(header, rows), paragraph(case)])


def _only_group(lengths: Sequence[int]) -> HeadGroup:
    """The attention layout of one device."""
    cost = CostModel(width=NUM_HEADS * HEAD_DIM, gamma=0.4)
    plan = balance(lengths, [0] * len(lengths), num_devices=1, bags=None, cost=cost, num_heads=NUM_HEADS)
    layout = StepLayout(plan, BLOCK)
    sizes = step_needs(layout)
    tables = jax.tree.map(lambda x: x[0], step_tables(layout, sizes))
    return expand_attention(tables, sizes, num_heads=NUM_HEADS).groups[0]


def _to_rows(group: HeadGroup, x: jax.Array) -> jax.Array:
    return exchange(x.reshape(-1, HEAD_DIM), group.keys, axis_name=_NO_AXIS)


def _dense(lengths: Sequence[int]) -> Callable[..., jax.Array]:
    ids = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = ids[:, None] == ids[None, :]
        return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask[None, None])[0]

    return attend


def _compiled(name: str, attend: Callable[..., jax.Array], inputs: tuple[jax.Array, ...]) -> _Case:
    def value_and_gradients(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(d_out)

    case = _Case(name, jax.jit(value_and_gradients).lower(*inputs).compile(), inputs)
    case.run()
    return case


def _largest_difference(want: Sequence[jax.Array], got: Sequence[jax.Array]) -> float:
    """Over all arrays, of the largest value in each."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(want, got, strict=True)]
    return float(max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs))
