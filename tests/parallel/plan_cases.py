"""Home rows through token and attention layout and back, with gradients, in one program; and any plan that is legal."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from parallel import balanced_attention, exchange, expand_attention, expand_tokens
from solver import BalancePlan, RouteCapacity, StepCapacity, StepLayout, step_tables
from tests.oracles import Step, attention, attention_gradients, close, home_tokens, plan_of
from tests.parallel.exchange_cases import one_axis_mesh

DEVICES = 8
DIM = 4
F32 = 1e-5


@dataclass
class HomeProgram:
    """`run(qkv, weights, tables)`: attention of home rows, back home, and its gradients; each by stream.

    Arrays are (devices, home rows of the stream, 3 or none, heads, dim). One executable for every plan of its capacity.
    """

    capacity: StepCapacity
    run: Any = field(init=False)

    def __post_init__(self) -> None:
        size = self.capacity

        def device(qkv: Any, weights: Any, tables: Any) -> Any:
            qkv, weights, tables = jax.tree.map(lambda x: x[0], (qkv, weights, tables))
            routes = expand_tokens(tables, size)
            layout = expand_attention(tables, size, num_heads=size.num_heads)

            def attend(qkv: Any) -> Any:
                moved = [exchange(x, route, axis_name="x") for x, route in zip(qkv, routes, strict=True)]
                q, k, v = jnp.concatenate(moved).swapaxes(0, 1)
                out = balanced_attention(q, k, v, layout, axis_name="x")
                parts = jnp.split(out, [size.text])
                return tuple(
                    exchange(part, route.reversed, axis_name="x")
                    for part, route in zip(parts, routes, strict=True)
                )

            out, vjp = jax.vjp(attend, qkv)
            return jax.tree.map(lambda x: x[None], (out, vjp(weights)[0]))

        mesh = one_axis_mesh(DEVICES)
        self.run = jax.jit(
            jax.shard_map(device, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"), check_vma=False)
        )


def at_home(plan: BalancePlan, capacity: StepCapacity, values: list[np.ndarray], padding: float) -> Any:
    """(devices, rows, ...) of each stream in home layout from (tokens, ...) of each sequence."""
    found = []
    for stream, rows in (("text", capacity.home_text), ("image", capacity.home_image)):
        out = np.full((plan.num_devices, rows, *values[0].shape[1:]), padding, np.float32)
        for device, tokens in enumerate(home_tokens(plan, stream)):
            for row, (number, token) in enumerate(tokens):
                out[device, row] = values[number][token]
        found.append(out)
    return tuple(found)


def check_at_home(program: HomeProgram, plan: BalancePlan, block: int, seed: int = 0) -> None:
    """Run a plan and compare output and gradients with every sequence attended alone, in float64."""
    rng = np.random.default_rng(seed)
    shape = plan.num_heads, DIM
    lengths = plan.lengths.tolist() or [0]
    qkv = [rng.standard_normal((n, 3, *shape)).astype(np.float32) for n in lengths]
    weights = [rng.standard_normal((n, *shape)).astype(np.float32) for n in lengths]
    # Padding is poisoned: nothing of it may reach a token.
    inputs = (at_home(plan, program.capacity, values, np.nan) for values in (qkv, weights))
    out, gradient = program.run(*inputs, step_tables(StepLayout(plan, block), program.capacity))
    expected_out, expected_gradient = [np.zeros_like(x) for x in weights], [np.zeros_like(x) for x in qkv]
    for i, n in enumerate(lengths):
        ids = np.ones(n)
        for head in range(plan.num_heads if n else 0):
            one = qkv[i][:, :, head].swapaxes(0, 1)
            attended = attention(*one, ids, ids)
            expected_out[i][:, head] = attended.out
            for c, g in enumerate(attention_gradients(*one, attended, weights[i][:, head])):
                expected_gradient[i][:, c, head] = g
    for actual, values in ((out, expected_out), (gradient, expected_gradient)):
        for rows, expected in zip(actual, at_home(plan, program.capacity, values, 0.0), strict=True):
            close(rows, expected, F32)


# Plans of at most these sizes have a capacity of their own, found by counting (`roomy_capacity`).
MOST_SEQUENCES, MOST_TOKENS, MOST_PARTS, MOST_BOXES = 5, 24, 4, 6


@st.composite
def legal_plans(draw: Any, num_heads: int) -> BalancePlan:
    """Any plan of a small step.

    Tokens are cut anywhere, (heads x queries) in rectangles, pinwheels among them; devices are all, some or one; homes
    are where the work is, anywhere, or where there is none, so that everything moves.
    """
    lengths = draw(
        st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, MOST_TOKENS]), max_size=MOST_SEQUENCES)
    )
    text = [draw(st.integers(0, n)) for n in lengths]
    able = draw(
        st.one_of(
            st.just(list(range(DEVICES))),
            st.lists(st.integers(0, DEVICES - 1), min_size=1, max_size=DEVICES, unique=True),
            st.integers(0, DEVICES - 1).map(lambda device: [device]),
        )
    )
    others = sorted(set(range(DEVICES)) - set(able)) or able
    homes = draw(st.sampled_from([able, others, list(range(DEVICES))]))
    home = [draw(st.sampled_from(homes)) for _ in lengths]
    token_slices, head_slices = [], []
    for number, n in enumerate(lengths):
        if not n:
            continue
        inside = st.integers(1, n - 1) if n > 1 else st.nothing()
        cuts = draw(st.lists(inside, max_size=MOST_PARTS - 1, unique=True)) if n > 1 else []
        for start, stop in itertools.pairwise([0, *sorted(cuts), n]):
            token_slices.append((number, start, stop, draw(st.sampled_from(able))))
        for box in _boxes(draw, (0, num_heads, 0, n), MOST_BOXES):
            head_slices.append((number, *box, draw(st.sampled_from(able))))
    return plan_of(Step(lengths, text, home, DEVICES, num_heads), token_slices, head_slices)


def _boxes(draw: Any, box: tuple[int, int, int, int], most: int) -> list[tuple[int, int, int, int]]:
    """At most `most` rectangles that tile the box."""
    low, high, start, stop = box
    ways = ["whole"]
    if most > 1:
        ways += ["heads"] * (high - low > 1) + ["queries"] * (stop - start > 1)
    if most >= 5 and high - low > 2 and stop - start > 2:
        ways += ["pinwheel"]
    way = draw(st.sampled_from(ways))
    if way == "whole":
        return [box]
    if way == "pinwheel":  # no cut from edge to edge
        a, c = draw(st.integers(low + 1, high - 2)), draw(st.integers(start + 1, stop - 2))
        b, d = draw(st.integers(a + 1, high - 1)), draw(st.integers(c + 1, stop - 1))
        return [(low, b, start, c), (b, high, start, d), (a, high, d, stop), (low, a, c, stop), (a, b, c, d)]
    if way == "heads":
        cut = draw(st.integers(low + 1, high - 1))
        halves = (low, cut, start, stop), (cut, high, start, stop)
    else:
        cut = draw(st.integers(start + 1, stop - 1))
        halves = (low, high, start, cut), (low, high, cut, stop)
    first = _boxes(draw, halves[0], most // 2)
    return first + _boxes(draw, halves[1], most - len(first))


def roomy_capacity(num_heads: int, block: int) -> StepCapacity:
    """Room for every plan of `legal_plans`, all of it on one device if need be.

    A head that is cut into MOST_BOXES parts has all its keys in each, on whole blocks.
    """
    tokens = MOST_SEQUENCES * MOST_TOKENS
    copies = MOST_BOXES * num_heads * tokens
    rows = MOST_SEQUENCES * MOST_BOXES * num_heads * (-(-MOST_TOKENS // block) * block)
    parts = MOST_SEQUENCES * (MOST_PARTS + 1) * MOST_BOXES  # a part with text and image is two

    def route(size: int, runs: int, copies: int) -> RouteCapacity:
        return RouteCapacity(size, size, (size,) * (DEVICES - 1), runs, runs, runs, copies)

    return StepCapacity(
        num_devices=DEVICES,
        num_heads=num_heads,
        block=block,
        sequences=MOST_SEQUENCES,
        device_sequences=MOST_SEQUENCES,
        home_text=tokens,
        home_image=tokens,
        text=tokens,
        image=tokens,
        query_rows=rows,
        key_rows=rows,
        items=MOST_SEQUENCES * MOST_BOXES,
        text_route=route(tokens, parts, 1),
        image_route=route(tokens, parts, 1),
        key_route=route(copies, parts, MOST_BOXES),
        query_route=route(num_heads * tokens, parts, 1),
    )
