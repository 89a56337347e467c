"""One program that moves rows along all routes of a step, and a check of all it returns against the definition."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel import exchange, expand_route
from solver import (
    BalancePlan,
    StepCapacity,
    StepLayout,
    StepTables,
    balance,
    capacity_for,
    step_needs,
    step_tables,
)
from tests.oracles import (
    COST,
    Step,
    attention_items,
    head_moves,
    plan_of,
    random_plan,
    random_step,
    token_moves,
)

HEADS = 3
BLOCK = 16


def one_axis_mesh(num_devices: int) -> jax.sharding.Mesh:
    """The first devices along one axis."""
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_devices,), ("x",), auto, devices=jax.devices()[:num_devices])


def ragged_all_to_all_by_hand(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What the operation is documented to do, from everybody's operands; several pieces a peer lie side by side."""
    operands, starts, sizes, there = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    pieces = sizes.shape[1] // sizes.shape[0]
    mine = lax.axis_index(axis_name) * pieces + jnp.arange(pieces)
    slot = jnp.arange(operand.shape[0])
    for s in range(sizes.shape[0]):
        for piece in range(pieces):
            sent = slot < sizes[s, mine[piece]]
            target = jnp.where(sent, there[s, mine[piece]] + slot, output.shape[0])
            output = output.at[target].set(operands[s][starts[s, mine[piece]] + slot], mode="drop")
    return jnp.where((recv_sizes == sizes[:, mine].reshape(-1)).all(), output, jnp.asarray(77, output.dtype))


def all_kinds_of_plans(num_devices: int) -> list[BalancePlan]:
    """Random legal plans, and those at the edges."""
    plans = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        step = random_step(rng, num_devices=num_devices, num_heads=HEADS, num_sequences=7, max_length=40)
        plans.append(random_plan(rng, step, divide=seed > 0))
    last = num_devices - 1
    heads = partial(balance, num_devices=num_devices, cost=COST, num_heads=HEADS)
    plans += [
        heads([21, 0, 5, 1], [0, 0, last, last], bags=None, text_lengths=[21, 0, 0, 1]),
        heads([33], [last], bags=f"g{num_devices}n1", text_lengths=[0]),  # one giant, image only
        heads([33, 2], [last, 0], bags=f"g{num_devices}n1", text_lengths=[33, 2]),  # text only
        # Everything from the first device to the last; nothing anywhere.
        plan_of(
            Step([20, 9], [3, 9], [0, 0], num_devices, HEADS),
            [(0, 0, 20, last), (1, 0, 9, last)],
            [(0, 0, HEADS, 0, 20, 0), (1, 0, HEADS, 0, 9, last)],
        ),
        plan_of(Step([0], [0], [0], num_devices, HEADS), [], []),
    ]
    return plans


@dataclass
class Program:
    """`run(rows, weights, tables)` moves rows along every route, there, back and by the gradient; counts programs."""

    mesh: jax.sharding.Mesh
    capacity: StepCapacity
    run: Any = field(init=False)

    def __post_init__(self) -> None:
        axes = self.mesh.axis_names
        axis = axes if len(axes) > 1 else axes[0]
        spec = P(axes)

        def device(rows: Any, weights: Any, tables: StepTables) -> Any:
            out = self._device(axis, *jax.tree.map(lambda x: x[0], (rows, weights, tables)))
            return jax.tree.map(lambda x: x[None], out)

        # Rows are only moved: unoptimised code compiles in half the time and gives the same bits.
        self.run = jax.jit(
            jax.shard_map(device, mesh=self.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False),
            compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
        )

    def _device(self, axis: Any, rows: Any, weights: Any, tables: StepTables) -> Any:
        size = self.capacity
        token_rows = (size.text + size.image) * HEADS
        route = expand_route(tables.image, size.image_route, rows_in=size.home_image, rows_out=size.image)
        (group,) = tables.attention
        keys = expand_route(
            group.keys, size.key_route, rows_in=token_rows, rows_out=size.key_rows, num_heads=HEADS
        )
        queries = expand_route(
            group.queries, size.query_route, rows_in=token_rows, rows_out=size.query_rows, num_heads=HEADS
        )
        ints = {k: x for k, x in rows["image"].items() if not jnp.issubdtype(x.dtype, jnp.inexact)}
        floats = {k: x for k, x in rows["image"].items() if k not in ints}

        def move(floats: Any) -> Any:
            moved = exchange({**floats, **ints}, route, axis_name=axis)
            return {k: moved[k] for k in floats}, moved

        def pull(route: Any, x: Any, w: Any) -> Any:
            y, vjp = jax.vjp(lambda x: exchange(x, route, axis_name=axis), x)
            return {"there": y, "gradient": vjp(w)[0]}

        _, vjp, moved = jax.vjp(move, floats, has_aux=True)
        return {
            "image": {
                "there": moved,
                "back": exchange(moved, route.reversed, axis_name=axis),
                "gradient": vjp(weights["image"])[0],
            },
            "keys": pull(keys, rows["heads"], weights["keys"]),
            "queries": pull(queries, rows["heads"], weights["queries"]),
            "outputs": pull(queries.reversed, weights["queries"], rows["heads"]),
        }


def program_for(mesh: jax.sharding.Mesh, plans: list[BalancePlan], *, padded: bool = True) -> Program:
    """A program whose capacity holds all the plans."""
    return Program(mesh, capacity_for([step_needs(StepLayout(p, BLOCK), padded=padded) for p in plans]))


def draw_rows(capacity: StepCapacity, num_devices: int, seed: int) -> tuple[Any, Any]:
    """Rows and cotangents, integer-valued where sums must come out exact."""
    rng = np.random.default_rng(seed)

    def integers(*shape: int, dtype: Any = np.float32, most: int = 1000) -> Any:
        return rng.integers(-most, most, (num_devices, *shape)).astype(dtype)

    n, token_rows = capacity.home_image, (capacity.text + capacity.image) * HEADS
    image = {
        "ids": rng.integers(2**24, 2**31 - 1, (num_devices, n)).astype(np.int32),
        "positions": integers(n, 3, dtype=np.int32),
        "wide": rng.standard_normal((num_devices, n, 2, 2)).astype(np.float32),
        "one": integers(n),
        "half": rng.standard_normal((num_devices, n, 3)).astype(jnp.bfloat16),
    }
    weights = {
        "wide": integers(capacity.image, 2, 2),
        "one": integers(capacity.image),
        "half": integers(capacity.image, 3, dtype=jnp.bfloat16, most=100),
    }
    return (
        {"image": image, "heads": integers(token_rows, 2)},
        {
            "image": weights,
            "keys": integers(capacity.key_rows, 2),
            "queries": integers(capacity.query_rows, 2),
        },
    )


def moved_by(moves: Any, x: np.ndarray, rows: int, *, backward: bool = False) -> np.ndarray:
    """Rows of `x` moved one by one and added up; all others zero."""
    out = np.zeros((x.shape[0], rows, *x.shape[2:]), np.float64 if x.dtype.kind not in "iub" else x.dtype)
    for s, a, t, b in moves:
        if backward:
            out[s, a] += x[t, b].astype(out.dtype)
        else:
            out[t, b] += x[s, a].astype(out.dtype)
    return out


def same(actual: Any, expected: np.ndarray, dtype: Any) -> None:
    assert actual.dtype == dtype
    np.testing.assert_array_equal(np.asarray(actual).astype(expected.dtype), expected)


def check(program: Program, plan: BalancePlan, seed: int = 0) -> None:
    """Run a plan and compare all that comes out, bit by bit, with its definition."""
    capacity, num_devices = program.capacity, plan.num_devices
    tables = step_tables(StepLayout(plan, BLOCK), capacity)
    rows, weights = draw_rows(capacity, num_devices, seed)
    out = program.run(rows, weights, tables)
    moves = token_moves(plan, "image")
    home = {(s, a) for s, a, _, _ in moves}
    for name, x in rows["image"].items():
        same(out["image"]["there"][name], moved_by(moves, x, capacity.image), x.dtype)
        used = np.zeros(x.shape[:2], bool)
        used[tuple(np.array(sorted(home), int).reshape(-1, 2).T)] = True
        back = np.asarray(out["image"]["back"][name])
        np.testing.assert_array_equal(back[used], x[used])
        assert not back[~used].any()
    for name, w in weights["image"].items():
        expected = moved_by(moves, w, capacity.home_image, backward=True)
        same(out["image"]["gradient"][name], expected, w.dtype)
        if name == "one":
            ax, x = np.asarray(out["image"]["there"][name]), rows["image"][name]
            assert (ax.astype(np.float64) * w).sum() == (x * expected).sum(), "<Ax, w> = <x, A'w>"
    (group,) = tables.attention
    for name in ("keys", "queries"):
        table = group.key_items if name == "keys" else group.query_items
        fields = table[table[:, :, 5] > 0][:, :5]
        items = attention_items(plan, fields, keys=name == "keys")
        moves = head_moves(plan, items, capacity.text)
        rows_out = capacity.key_rows if name == "keys" else capacity.query_rows
        x, w = rows["heads"], weights[name]
        there, gradient = moved_by(moves, x, rows_out), moved_by(moves, w, x.shape[1], backward=True)
        same(out[name]["there"], there, np.float32)
        same(out[name]["gradient"], gradient, np.float32)
        assert (there * w).sum() == (x * gradient).sum()
        if name == "queries":
            same(out["outputs"]["there"], gradient, np.float32)
            same(out["outputs"]["gradient"], there, np.float32)
