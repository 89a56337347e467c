"""Balanced attention on up to 8 devices against every sequence attended alone, whatever the plan."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import (
    KernelTiles,
    PallasKernel,
    Tiles,
    balanced_attention,
    data_mesh,
    expand_attention,
    make_balanced_attention,
)
from solver import StepLayout, capacity_for, step_needs, step_tables
from tests.parallel.balanced_cases import (
    BF16,
    BLOCK,
    DIM,
    Program,
    any_plan,
    bag_plans,
    check,
    program_for,
)
from tests.parallel.exchange_cases import one_axis_mesh

BAGS = (None, "g1n8", "g2n4", "g4n2", "g8n1", "g1n2+g2n1+g4n1")


@pytest.mark.parametrize(
    ("num_heads", "divides"), [(8, False), (3, True)], ids=["heads deal out", "fewer heads than the bag"]
)
def test_bags_of_all_sizes_in_one_program(num_heads, divides):
    plans = bag_plans(BAGS, num_heads)
    mesh = data_mesh(shards=4) if divides else one_axis_mesh(8)
    program = program_for(mesh, plans, num_heads)
    assert (program.capacity.query_route is not None) == divides
    for plan in plans:
        check(program, plan)
    assert program.run._cache_size() == 1


@pytest.mark.parametrize(("num_devices", "num_heads"), [(4, 30), (7, 24)])
def test_heads_that_the_bag_does_not_divide(num_devices, num_heads):
    plans = bag_plans([f"g{num_devices}n1"], num_heads, num_devices)
    heads = plans[0].head_slices[:, 2] - plans[0].head_slices[:, 1]
    assert set(heads.tolist()) == {num_heads // num_devices, num_heads // num_devices + 1}
    program = program_for(one_axis_mesh(num_devices), plans, num_heads)
    assert program.capacity.query_route is None
    check(program, plans[0])


@pytest.mark.full
def test_bfloat16():
    plans = bag_plans(["g4n2"], 8)
    check(program_for(one_axis_mesh(8), plans, 8), plans[0], tolerance=BF16, dtype=jnp.bfloat16)


def test_gpu_kernels_on_the_solvers_tables():
    """They read the ranges of query blocks, which plain JAX does not; divided items have other keys than queries."""
    plan = any_plan(0)
    capacity = capacity_for([step_needs(StepLayout(plan, BLOCK))])
    assert capacity.query_route is not None
    tiles = KernelTiles(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2))
    check(Program(one_axis_mesh(4), capacity, 3, PallasKernel(tiles, interpret=True)), plan)


def test_as_a_callable_for_models():
    plan = bag_plans([None], 2, 1)[0]
    program = program_for(one_axis_mesh(1), [plan], 2)
    tables = jax.tree.map(lambda x: jnp.asarray(x[0]), program.tables(plan))
    rng = np.random.default_rng(0)
    rows = program.capacity.text + program.capacity.image
    q, k, v = rng.standard_normal((3, rows, 2, DIM)).astype(np.float32)

    @jax.jit
    def both(q, k, v, tables):
        layout = expand_attention(tables, program.capacity, num_heads=2)
        by_hand = balanced_attention(q, k, v, layout, axis_name="x")
        return make_balanced_attention(layout, axis_name="x")(q, k, v), by_hand

    out, by_hand = both(q, k, v, tables)
    np.testing.assert_array_equal(out, by_hand)
    assert out.shape == q.shape
    k, v = jnp.asarray(k), jnp.asarray(v)
    half = k[:, :1]
    for others, found in (((half, half), "float32\\[.*, 1, "), ((k.astype(jnp.bfloat16), v), "bfloat16")):
        with pytest.raises(ValueError, match=f"one shape and dtype; got float32.*{found}"):
            inspect.unwrap(balanced_attention)(jnp.asarray(q), *others, None, axis_name="x")


def traced(plan, num_devices, *, capacity=None, num_heads=2, squeeze=True):
    """Trace attention of a plan on the first devices, with another capacity or number of heads than its own."""
    layout = StepLayout(plan, BLOCK)
    own = capacity_for([step_needs(layout)])
    sizes = capacity or own

    def device(x, tables):
        x, tables = jax.tree.map(lambda a: a[0], (x, tables)) if squeeze else (x[0], tables)
        layout = expand_attention(tables, sizes, num_heads=num_heads)
        return balanced_attention(x, x, x, layout, axis_name="x")[None]

    mesh = one_axis_mesh(num_devices)
    f = jax.shard_map(device, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"), check_vma=False)
    rows = jnp.zeros((plan.num_devices, sizes.text + sizes.image, plan.num_heads, DIM))
    return jax.eval_shape(f, rows, jax.tree.map(jnp.asarray, step_tables(layout, own)))


def test_plans_of_other_devices_heads_or_capacities_are_refused():
    plan = bag_plans(["g8n1"], 2)[0]
    traced(plan, 8)
    with pytest.raises(
        ValueError, match=r"exchange: .*a plan for 8 devices and axis_name='x' of 4\. Plan with"
    ):
        traced(plan, 4)
    with pytest.raises(ValueError, match=r"exchange: .*a plan for 8 devices and axis_name='x' of 1"):
        traced(plan, 1)
    with pytest.raises(
        ValueError, match=r"expand_attention: .*got num_heads=4 and a capacity for 2\. Balance with"
    ):
        traced(plan, 8, num_heads=4)
    with pytest.raises(
        ValueError, match=r"expand_attention: tables of one device, .*key_blocks of shape \(1, "
    ):
        traced(plan, 8, squeeze=False)
    own = capacity_for([step_needs(StepLayout(plan, BLOCK))])
    with pytest.raises(ValueError, match=r"expand_attention: .*key_blocks of shape \(\d+, 2\) instead of"):
        traced(plan, 8, capacity=replace(own, query_rows=own.query_rows + BLOCK))
    route = replace(own.key_route, recv_runs=own.key_route.recv_runs + 3)
    with pytest.raises(
        ValueError, match=r"expand_route: .*got \d+ recv_runs and sizes\.recv_runs=\d+\. Make"
    ):
        traced(plan, 8, capacity=replace(own, key_route=route))
