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
    layout = StepLayout(plan, block, program.capacity.head_groups)
    shape = plan.num_heads, DIM
    lengths = plan.lengths.tolist() or [0]
    qkv = [rng.standard_normal((n, 3, *shape)).astype(np.float32) for n in lengths]
    weights = [rng.standard_normal((n, *shape)).astype(np.float32) for n in lengths]
    # Padding is poisoned: nothing of it may reach a token.
    inputs = (at_home(plan, program.capacity, values, np.nan) for values in (qkv, weights))
    out, gradient = program.run(*inputs, step_tables(layout, program.capacity))
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


LENGTHS = (0, 1, 2, 7, 8, 9, 15, 16, 17, MOST_TOKENS)


def legal_plans(num_heads: int) -> st.SearchStrategy[BalancePlan]:
    """Any plan of a small step.

    Tokens are cut anywhere, (heads x queries) in rectangles, pinwheels among them, on all devices, some or one; homes
    are where the work is, anywhere, or where there is none, so that everything moves.
    """
    return st.builds(
        _legal_plan,
        st.just(num_heads),
        st.integers(0, 2**32 - 1),
        st.sampled_from([DEVICES, DEVICES - 1, 3, 1]),
        st.sampled_from(["anywhere", "where the work is", "where no work is"]),
        st.sampled_from(["both", "image", "text"]),
    )


def _legal_plan(num_heads: int, seed: int, num_able: int, homes: str, streams: str) -> BalancePlan:
    rng = np.random.default_rng(seed)
    lengths = rng.choice(LENGTHS, rng.integers(0, MOST_SEQUENCES + 1)).tolist()
    text = [{"both": int(rng.integers(0, n + 1)), "image": 0, "text": n}[streams] for n in lengths]
    devices = rng.permutation(DEVICES).tolist()
    able, others = devices[:num_able], devices[num_able:] or devices
    places = {"anywhere": devices, "where the work is": able, "where no work is": others}[homes]
    home = [int(rng.choice(places)) for _ in lengths]
    token_slices, head_slices = [], []
    for number, n in enumerate(lengths):
        if not n:
            continue
        cuts = rng.permutation(np.arange(1, n))[: rng.integers(0, MOST_PARTS)].tolist()
        for start, stop in itertools.pairwise([0, *sorted(cuts), n]):
            token_slices.append((number, start, stop, int(rng.choice(able))))
        for box in _boxes(rng, (0, num_heads, 0, n), int(rng.integers(1, MOST_BOXES + 1))):
            head_slices.append((number, *box, int(rng.choice(able))))
    return plan_of(Step(lengths, text, home, DEVICES, num_heads), token_slices, head_slices)


def _boxes(
    rng: np.random.Generator, box: tuple[int, int, int, int], most: int
) -> list[tuple[int, int, int, int]]:
    """At most `most` rectangles that tile the box."""
    low, high, start, stop = box
    ways = ["heads"] * (high - low > 1) + ["queries"] * (stop - start > 1)
    ways += ["pinwheel"] * (most >= 5 and high - low > 2 and stop - start > 2)
    if most == 1 or not ways:
        return [box]
    way = str(rng.choice(ways))
    if way == "pinwheel":  # no cut from edge to edge
        a, b = np.sort(rng.choice(np.arange(low + 1, high), 2, replace=False)).tolist()
        c, d = np.sort(rng.choice(np.arange(start + 1, stop), 2, replace=False)).tolist()
        return [(low, b, start, c), (b, high, start, d), (a, high, d, stop), (low, a, c, stop), (a, b, c, d)]
    if way == "heads":
        cut = int(rng.integers(low + 1, high))
        halves = (low, cut, start, stop), (cut, high, start, stop)
    else:
        cut = int(rng.integers(start + 1, stop))
        halves = (low, high, start, cut), (low, high, cut, stop)
    first = _boxes(rng, halves[0], most // 2)
    return first + _boxes(rng, halves[1], most - len(first))


def roomy_capacity(num_heads: int, block: int, head_groups: int = 1) -> StepCapacity:
    """Room for every plan of `legal_plans`, all of it on one device if need be.

    A head that is cut into MOST_BOXES parts has all its keys in each, on whole blocks.
    """
    tokens = MOST_SEQUENCES * MOST_TOKENS
    copies = MOST_BOXES * num_heads * tokens
    rows = MOST_SEQUENCES * MOST_BOXES * num_heads * (-(-MOST_TOKENS // block) * block)
    parts = MOST_SEQUENCES * (MOST_PARTS + 1) * MOST_BOXES  # a part with text and image is two

    def route(size: int, runs: int, copies: int) -> RouteCapacity:
        return RouteCapacity(
            size, size, (size,) * (DEVICES - 1), runs, runs, runs, copies, (copies - 1) * num_heads * tokens
        )

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
        head_groups=head_groups,
    )
