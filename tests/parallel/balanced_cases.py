"""A program of balanced attention and its gradients, and a check of any plan against every sequence attended alone."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from parallel import balanced_attention, expand_attention
from solver import StepLayout, balance, capacity_for, step_needs, step_tables
from tests.oracles import (
    COST,
    attention,
    attention_gradients,
    close,
    placed_tokens,
    random_plan,
    random_step,
)

F32, BF16 = 1e-5, 2e-2
BLOCK = 16
DIM = 4
# Text and image tokens; only text, only image, one token, none; a long one; more and fewer than devices.
LENGTHS = [70, 9, 12, 1, 0, 33, 25, 5, 5, 48]
TEXT = [20, 9, 0, 1, 0, 3, 25, 0, 5, 8]
HOME = [0, 0, 1, 1, 2, 3, 3, 5, 6, 6]


@dataclass
class Program:
    """Attention and its gradients on the rows of all devices; one executable for every plan of its capacity."""

    mesh: Any
    capacity: Any
    num_heads: int
    kernel: Any = None
    run: Any = field(init=False)

    def __post_init__(self) -> None:
        axes = self.mesh.axis_names
        axis = axes if len(axes) > 1 else axes[0]

        def device(qkv, weights, tables):
            qkv, weights, tables = jax.tree.map(lambda x: x[0], (qkv, weights, tables))
            layout = expand_attention(tables, self.capacity, num_heads=self.num_heads)
            out, vjp = jax.vjp(
                lambda *x: balanced_attention(*x, layout, axis_name=axis, kernel=self.kernel), *qkv
            )
            return jax.tree.map(lambda x: x[None], (out, vjp(weights)))

        spec = P(axes)
        self.run = jax.jit(
            jax.shard_map(device, mesh=self.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
        )

    def tables(self, plan):
        return step_tables(StepLayout(plan, BLOCK, self.capacity.head_groups), self.capacity)


def program_for(mesh, plans, num_heads):
    return Program(mesh, capacity_for([step_needs(StepLayout(p, BLOCK)) for p in plans]), num_heads)


def scattered(plan, capacity, values, padding):
    """(devices, rows, heads, dim) rows in token layout from (tokens, heads, dim) of each sequence."""
    shape = (plan.num_devices, capacity.text + capacity.image, plan.num_heads, DIM)
    rows = np.full(shape, padding, np.float32)
    for stream, first in (("text", 0), ("image", capacity.text)):
        for device, tokens in enumerate(placed_tokens(plan, stream)):
            for r, (number, token) in enumerate(tokens):
                rows[device, first + r] = values[number][token]
    return rows


def check(program, plan, *, tolerance=F32, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v, w = (
        [rng.standard_normal((n, plan.num_heads, DIM)).astype(np.float32) for n in plan.lengths]
        for _ in range(4)
    )
    # Padding is poisoned: nothing of it may reach a token, and its own output is zero.
    to_rows = partial(scattered, plan, program.capacity)
    rows = [jnp.asarray(to_rows(x, np.nan), dtype) for x in (q, k, v, w)]
    results = program.run(tuple(rows[:3]), rows[3], program.tables(plan))
    expected = [[np.zeros_like(x) for x in q] for _ in range(4)]
    for i in range(len(q)):
        ids = np.ones(len(q[i]))
        for h in range(plan.num_heads if len(ids) else 0):
            one = [x[i][:, h] for x in (q, k, v)]
            attended = attention(*one, ids, ids)
            gradients = attention_gradients(*one, attended, w[i][:, h])
            for target, value in zip(expected, (attended.out, *gradients), strict=True):
                target[i][:, h] = value
    for actual, values in zip(jax.tree.leaves(results), expected, strict=True):
        assert actual.dtype == dtype
        close(actual, to_rows(values, 0.0), tolerance)


def bag_plans(bags, num_heads, num_devices=8):
    home = np.array(HOME) % num_devices
    return [
        balance(
            LENGTHS, home, num_devices=num_devices, bags=b, cost=COST, num_heads=num_heads, text_lengths=TEXT
        )
        for b in bags
    ]


def any_plan(seed):
    rng = np.random.default_rng(seed)
    step = random_step(rng, num_devices=4, num_heads=3, num_sequences=5, max_length=40)
    return random_plan(rng, step)
