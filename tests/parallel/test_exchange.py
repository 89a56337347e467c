"""The exchange: every row arrives bit-exact and comes back, values and gradients, in every form of the collective."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel import _routes, data_mesh, exchange, expand_route
from solver import StepLayout, balance, capacity_for, step_needs, step_tables
from tests.oracles import COST, token_moves
from tests.parallel.exchange_cases import (
    BLOCK,
    all_kinds_of_plans,
    check,
    draw_rows,
    moved_by,
    one_axis_mesh,
    program_for,
    ragged_all_to_all_by_hand,
    same,
)

MESHES = {
    "1": lambda: one_axis_mesh(1),
    "2": lambda: one_axis_mesh(2),
    "3": lambda: one_axis_mesh(3),
    "4": lambda: one_axis_mesh(4),
    "6": lambda: one_axis_mesh(6),
    "8": lambda: one_axis_mesh(8),
    "2x4": lambda: data_mesh(shards=4),
}


def run_all(program, plans):
    for seed, plan in enumerate(plans):
        check(program, plan, seed)
    assert program.run._cache_size() == 1, "one program for all plans"


@pytest.mark.parametrize("mesh", ["1", "2", "4", "8", "2x4", pytest.param("6", marks=pytest.mark.full)])
def test_rows_there_and_back_and_gradients(mesh):
    mesh = MESHES[mesh]()
    plans = all_kinds_of_plans(mesh.size)
    run_all(program_for(mesh, plans), plans)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("form", "mesh"),
    [
        ("collective_permute", "3"),
        pytest.param("all_to_all", "3", marks=FULL),
        pytest.param("collective_permute", "8", marks=FULL),
        pytest.param("all_to_all", "8", marks=FULL),
    ],
)
def test_both_padded_forms(mesh, form, monkeypatch):
    monkeypatch.setattr(_routes, "_ROWS_OF_A_ROUND", 10**9 if form == "all_to_all" else -(10**9))
    mesh = MESHES[mesh]()
    plans = all_kinds_of_plans(mesh.size)[:3]
    program = program_for(mesh, plans)
    run_all(program, plans)
    rows, weights = draw_rows(program.capacity, mesh.size, 0)
    text = program.run.lower(
        rows, weights, step_tables(StepLayout(plans[0], BLOCK), program.capacity)
    ).as_text()
    other = {"all_to_all", "collective_permute"} - {form}
    assert f"stablehlo.{form}" in text
    assert f"stablehlo.{other.pop()}" not in text


@pytest.mark.parametrize("mesh", ["2x4", pytest.param("3", marks=pytest.mark.full)])
def test_ragged_form(mesh, monkeypatch):
    """No CPU runs the collective itself; a stand-in checks offsets, sizes and indices."""
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all_by_hand)
    mesh = MESHES[mesh]()
    plans = all_kinds_of_plans(mesh.size)
    run_all(program_for(mesh, plans, padded=False), plans)


def lowered(mesh, plans, *, platform, padded=True):
    program = program_for(mesh, plans, padded=padded)
    rows, weights = draw_rows(program.capacity, mesh.size, 0)
    tables = step_tables(StepLayout(plans[0], BLOCK), program.capacity)
    return program.run.trace(rows, weights, tables).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("mesh", ["4", "2x4"])
def test_cuda_program_has_the_ragged_collective_alone(mesh, padded):
    mesh = MESHES[mesh]()
    text = lowered(mesh, all_kinds_of_plans(mesh.size), platform="cuda", padded=padded)
    # Image rows have three dtypes, moved there and back, and two of them again for the gradient; keys, queries and
    # outputs one dtype each, there and for the gradient.
    assert len(re.findall(r"custom_call @ragged_all_to_all", text)) == 3 * 2 + 2 + 3 * 2
    assert not re.search(
        r"stablehlo\.(all_to_all|collective_permute|all_gather|all_reduce|scatter\S* .*f32)", text
    )


def small_program(tree, layout, *, gradient):
    """The text of a program that moves `tree` from home to token layout on 8 devices."""
    capacity = capacity_for([step_needs(layout)])
    tables = step_tables(layout, capacity).image

    def device(rows, tables):
        rows, tables = jax.tree.map(lambda x: x[0], (rows, tables))
        route = expand_route(
            tables, capacity.image_route, rows_in=capacity.home_image, rows_out=capacity.image
        )
        if not gradient:
            return jax.tree.map(lambda x: x[None], exchange(rows, route, axis_name="x"))
        y, vjp = jax.vjp(lambda x: exchange(x, route, axis_name="x"), rows)
        return jax.tree.map(lambda x: x[None], vjp(y)[0])

    mesh = one_axis_mesh(8)
    f = jax.shard_map(device, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    rows = jax.tree.map(
        lambda shape_dtype: jnp.zeros((8, capacity.home_image, *shape_dtype[0]), shape_dtype[1]),
        tree,
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], tuple),
    )
    return jax.jit(f).lower(rows, tables).as_text()


def count(text):
    return len(re.findall(r"stablehlo\.(?:collective_permute|all_to_all)", text))


def test_one_collective_per_dtype_and_round():
    def layout(bags):
        lengths = np.arange(8) * 7 + 20
        return StepLayout(
            balance(lengths, np.arange(8), num_devices=8, bags=bags, cost=COST, num_heads=8), BLOCK
        )

    mixed = {
        "a": ((), jnp.int32),
        "b": ((3,), jnp.int32),
        "c": ((4,), jnp.float32),
        "d": ((2, 2), jnp.float32),
    }
    floats = {k: mixed[k] for k in "cd"}
    # Bags of two: one round. Bags of four: three rounds. Nobody moves: none. Both ways for the gradient.
    for bags, rounds in (("g2n4", 1), ("g4n2", 3), (None, 0)):
        assert count(small_program(mixed, layout(bags), gradient=False)) in {2 * rounds, 2 * min(rounds, 1)}
        assert count(small_program(floats, layout(bags), gradient=True)) in {2 * rounds, 2 * min(rounds, 1)}
    assert count(small_program(mixed, layout("g2n4"), gradient=False)) == 2


def test_narrow_integers_and_sizes_that_are_exact():
    """uint8 and bool; a program with no slot to spare, for images at one device and no text at all."""
    plan = balance([9, 4], [1, 1], num_devices=2, bags="g2n1", cost=COST, num_heads=1)
    layout = StepLayout(plan, BLOCK)
    needs = step_needs(layout)
    tables = step_tables(layout, needs)
    rng = np.random.default_rng(0)
    rows = {
        "image": (
            rng.integers(0, 256, (2, needs.home_image, 2)).astype(np.uint8),
            rng.integers(0, 2, (2, needs.home_image)).astype(bool),
        ),
        "text": np.zeros((2, needs.home_text), np.float32),
    }

    def device(rows, tables):
        rows, tables = jax.tree.map(lambda x: x[0], (rows, tables))
        sizes = {"image": (needs.home_image, needs.image), "text": (needs.home_text, needs.text)}
        out = {}
        for name, (rows_in, rows_out) in sizes.items():
            capacity = getattr(needs, f"{name}_route")
            route = expand_route(getattr(tables, name), capacity, rows_in=rows_in, rows_out=rows_out)
            out[name] = exchange(rows[name], route, axis_name="x")
        return jax.tree.map(lambda x: x[None], out)

    f = jax.shard_map(device, mesh=one_axis_mesh(2), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    out = jax.jit(f)(rows, tables)
    moves = token_moves(plan, "image")
    for x, y in zip(rows["image"], out["image"], strict=True):
        same(y, moved_by(moves, x, needs.image), x.dtype)
    assert out["text"].shape == (2, 0)


def test_one_device_has_no_collective():
    mesh = one_axis_mesh(1)
    text = lowered(mesh, all_kinds_of_plans(1), platform="cpu")
    assert not re.search(r"stablehlo\.(all_to_all|collective_permute)|ragged", text)


def route_of(plan, move):
    """Trace `move(route)` for the keys' route of the first device."""
    layout = StepLayout(plan, BLOCK)
    capacity = capacity_for([step_needs(layout)])
    rows_in = (capacity.text + capacity.image) * plan.num_heads

    def run(tables):
        route = expand_route(
            jax.tree.map(lambda x: x[0], tables),
            capacity.key_route,
            rows_in=rows_in,
            rows_out=capacity.key_rows,
            num_heads=plan.num_heads,
        )
        return move(route, rows_in)

    return jax.eval_shape(run, jax.tree.map(jnp.asarray, step_tables(layout, capacity).attention[0].keys))


@pytest.mark.parametrize("extra", [(1,), (-1,), None])
def test_rows_of_another_number_are_refused(extra):
    plan = balance([40], [0], num_devices=1, bags=None, cost=COST, num_heads=1)

    def move(route, rows_in):
        good, bad = jnp.zeros(rows_in), jnp.zeros((rows_in + extra[0], 2) if extra else ())
        return exchange({"a": good, "b": bad}, route, axis_name="x")

    with pytest.raises(ValueError, match=r"exchange: .*leading axis; got shape=\((\d+, 2)?\), rows=\d+"):
        route_of(plan, move)


def test_a_route_with_copies_has_no_way_back():
    plan = balance([40], [0], num_devices=4, bags="g4n1", cost=COST, num_heads=3)
    with pytest.raises(ValueError, match=r"Route\.reversed: .*got copies=2"):
        route_of(plan, lambda route, _: route.reversed.copies)
