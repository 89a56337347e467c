"""The collectives of an attention call, and what enters them, read from programs lowered for CPU and for CUDA."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel import _routes
from parallel._exchange import exchange_together
from parallel._routes import expand_beside
from solver import StepCapacity, StepLayout, step_needs
from tests.parallel.balanced_cases import BLOCK, DIM, Program, any_plan, bag_plans, check
from tests.parallel.exchange_cases import one_axis_mesh, ragged_all_to_all_by_hand

# Heads of eight deal out to eight devices; three are divided by queries.
HEADS = {"whole items": 8, "divided items": 3}


def exact_program(plan: Any, *, padded: bool, head_groups: int = 1) -> Program:
    """A program with no slot to spare."""
    needs = step_needs(StepLayout(plan, BLOCK, head_groups), padded=padded)
    return Program(one_axis_mesh(plan.num_devices), needs, plan.num_heads)


def traced(program: Program, plan: Any) -> Any:
    size = program.capacity
    rows = jnp.zeros((size.num_devices, size.text + size.image, size.num_heads, DIM))
    # All arguments stay, so that they have their numbers.
    return jax.jit(program.run, keep_unused=True).trace((rows,) * 3, rows, program.tables(plan))


@pytest.mark.parametrize("kind", HEADS)
def test_one_exchange_there_and_one_back(kind):
    """q, k and v leave together and the output returns; the gradient doubles that."""
    plan = bag_plans(["g2n4" if kind == "whole items" else "g8n1"], HEADS[kind])[0]
    program = exact_program(plan, padded=True)
    assert (program.capacity.query_route is None) == (kind == "whole items")
    text = traced(program, plan).lower().as_text()
    collectives = re.findall(r"stablehlo\.(?:collective_permute|all_to_all)", text)
    used = [any(rows) for rows in zip(*(r.rounds for r in routes_of(program.capacity)), strict=True)]
    back = [rows > 0 for rows in routes_of(program.capacity)[0].rounds]
    assert len(collectives) in {2 * (sum(used) + sum(back)), 4}, "a permute a round, or one all_to_all"


def routes_of(size: StepCapacity) -> list[Any]:
    """That of queries and outputs, and that of keys if it is another."""
    return [route for route in (size.query_route, size.key_route) if route is not None]


@dataclass
class Lowered:
    """The MLIR of a program, followed backwards from a value to the program's arguments."""

    module: Any

    def __post_init__(self) -> None:
        self.ops = list(_walk(self.module.operation))
        self.calls: dict[str, list[Any]] = {}
        for op in self.ops:
            if op.name == "func.call":
                self.calls.setdefault(op.attributes["callee"].value, []).append(op)

    def ragged(self) -> list[Any]:
        return [
            op
            for op in self.ops
            if op.name == "stablehlo.custom_call"
            and op.attributes["call_target_name"].value == "ragged_all_to_all"
        ]

    def sources(self, value: Any) -> set[int]:
        """Numbers of the program's arguments that a value may depend on; in a function, by all its calls."""
        found: set[int] = set()
        seen: set[Any] = set()
        todo = [value]
        while todo:
            value = todo.pop()
            owner = value.owner
            inside = not hasattr(owner, "operands")  # of a block, as its argument
            place = value.arg_number if inside else 0
            parent = owner.owner if inside else owner
            key = (parent.operation, inside, place)
            if key in seen:
                continue
            seen.add(key)
            if not inside:
                todo += list(parent.operands)
            elif parent.operation.name != "func.func":
                todo.append(parent.operation.operands[place])
            elif parent.attributes["sym_name"].value == "main":
                found.add(place)
            else:
                todo += [call.operands[place] for call in self.calls[parent.attributes["sym_name"].value]]
        return found


def _walk(op: Any) -> Any:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)


@pytest.mark.parametrize("kind", HEADS)
def test_cuda_moves_the_rows_that_change_device_and_no_more(kind):
    """Buffers hold the rows that leave or reach the busiest device; how many go to whom is data of the step."""
    divided = kind == "divided items"
    plan = bag_plans(["g8n1" if divided else "g2n4"], HEADS[kind])[0]
    program = exact_program(plan, padded=False)
    size, tables = program.capacity, program.tables(plan)
    assert size.key_route.send == plan.rows_sent.max()
    if not divided:
        assert size.key_route.send < plan.tokens.min() * plan.num_heads, "some rows stay"

    lowered = traced(program, plan).lower(lowering_platforms=("cuda",))
    assert not re.search(r"stablehlo\.(all_to_all|collective_permute|all_gather)", lowered.as_text())
    mlir = Lowered(lowered.compiler_ir("stablehlo"))
    home, keys = routes_of(size)[0], size.key_route
    if divided:
        leave, arrive, width = home.send + 2 * keys.send, home.recv + 2 * keys.recv, DIM
    else:
        leave, arrive, width = home.send, home.recv, 3 * DIM
    there, back = ([leave, width], [arrive, width]), ([home.recv, DIM], [home.send, DIM])
    found = mlir.ragged()
    shapes = [tuple(list(x.type.shape) for x in op.operands[:2]) for op in found]
    assert shapes == [there, back, back[::-1], there[::-1]], "there, back, and the gradients of both"

    # The program's arguments: q, k, v, cotangents, then the tables.
    number = {id(leaf): 4 + i for i, leaf in enumerate(jax.tree.leaves(tables))}
    (group,) = tables.attention
    of_home = {number[id((group.queries if divided else group.keys).peers)]}
    of_both = of_home | {number[id(group.keys.peers)]}
    for op, peers in zip(found, (of_both, of_home, of_home, of_both), strict=True):
        _, _, starts, sent, places, received = op.operands
        assert mlir.sources(sent) == mlir.sources(received) == peers
        assert mlir.sources(starts) >= peers
        assert mlir.sources(places) >= peers


def test_head_groups_have_exchanges_of_their_own():
    """Each of half the rows, and in an order that lets one group's exchange run under the other's attention."""
    plan = bag_plans(["g2n4"], 8)[0]
    one, two = (exact_program(plan, padded=False, head_groups=n) for n in (1, 2))
    lowered = traced(two, plan).lower(lowering_platforms=("cuda",))
    found = Lowered(lowered.compiler_ir("stablehlo")).ragged()
    assert len(found) == 8, "for each group, q, k and v there, outputs back, and the gradients of both"
    half = one.capacity.key_route.send // 2
    assert {op.operands[0].type.shape[0] for op in found} == {half}
    # Between the two groups three orders are fixed, and as many for the gradient.
    assert lowered.as_text().count("stablehlo.optimization_barrier") == 6


@pytest.mark.parametrize(
    "form", ["ragged", "collective_permute", pytest.param("all_to_all", marks=pytest.mark.full)]
)
def test_pieces_of_two_routes_in_one_collective(form, monkeypatch):
    """No CPU runs the ragged collective itself; a stand-in checks offsets, sizes and indices."""
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all_by_hand)
    monkeypatch.setattr(_routes, "_ROWS_OF_A_ROUND", 10**9 if form == "all_to_all" else -(10**9))
    plan = any_plan(0)
    program = exact_program(plan, padded=form != "ragged")
    assert program.capacity.query_route is not None
    if form != "ragged":
        assert f"stablehlo.{form}" in traced(program, plan).lower().as_text()
    check(program, plan)


def test_routes_padded_otherwise_do_not_share_a_collective():
    plan = any_plan(0)
    program = exact_program(plan, padded=True)
    size = program.capacity
    rows_in = (size.text + size.image) * size.num_heads

    def move(tables):
        tables = jax.tree.map(lambda x: x[0], tables)
        (group,) = tables.attention
        routes = [
            expand_beside(
                group.queries, size.query_route, r, rows_in=rows_in, rows_out=size.query_rows, num_heads=3
            )
            for r in ((1,) * 3, (10**6,) * 3)
        ]
        rows = jnp.zeros((rows_in, DIM))
        return exchange_together([(rows, route) for route in routes], axis_name="x")

    mapped = jax.shard_map(move, mesh=program.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with pytest.raises(ValueError, match=r"exchange_together: routes of one direction.*\(False, 3, True\)"):
        jax.eval_shape(mapped, jax.tree.map(jnp.asarray, program.tables(plan)))
