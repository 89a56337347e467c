"""Balancing tokens and attention apart: goals on mixes and long tails, rules of a plan, and what it is made of."""

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from solver import CostModel, Links, Topology, balance, validate_plan
from solver._auto_fill import spread
from solver._auto_partition import partition
from tests.oracles_balance import flatten, load_golden

GOLDEN = load_golden()
WIDTH, HEADS = 3072, 24


def auto(lengths, home, num_devices, gamma=0.4, **options):
    plan = balance(
        lengths,
        home,
        num_devices=num_devices,
        bags="auto",
        cost=CostModel(WIDTH, gamma),
        topology=Topology(max(num_devices // 8, 1), min(num_devices, 8)),
        **options,
    )
    validate_plan(plan)
    return plan


def golden(mix):
    for ranks in GOLDEN["batches"][mix]["steps"]:
        lengths, home = flatten(ranks)
        yield np.array(lengths), np.array(home)


def long_tail(num_devices, *, longest=None, batches=3):
    rng = np.random.default_rng(0)
    for _ in range(batches):
        lengths = np.clip(rng.lognormal(np.log(2000), 1.2, 8 * num_devices), 64, 65536).astype(np.int64)
        if longest:
            lengths[0] = longest
        yield lengths, np.repeat(np.arange(num_devices), 8)


def figures(plans):
    rows = np.array(
        [
            (
                plan.static_step_cost,
                plan.rows_sent_fraction,
                plan.rows_across_machines.sum() / (plan.lengths.sum() * HEADS),
                plan.rows.max() / plan.rows.mean(),
                plan.tokens.max() / plan.tokens.mean(),
                plan.attention_work.max() / plan.attention_work.mean(),
                plan.tokens_moved_fraction,
            )
            for plan in plans
        ]
    )
    names = ("step", "sent", "across", "rows", "tokens", "attention", "moved")
    return dict(zip(names, rows.mean(0), strict=True)), dict(zip(names, rows.max(0), strict=True))


@pytest.mark.parametrize("gamma", [0.4, 1.0])
@pytest.mark.parametrize(("mix", "sent"), [("mixres", 0.48), ("joint", 0.48)])
def test_mixed_sizes(mix, sent, gamma):
    mean, most = figures([auto(*batch, 32, gamma) for batch in golden(mix)])
    assert mean["step"] <= 1.005
    assert mean["sent"] <= sent
    assert most["across"] == 0
    assert mean["rows"] <= 1.5
    assert most["tokens"] <= 1.01
    assert most["attention"] <= 1.0101


@pytest.mark.parametrize(("gamma", "moved"), [(0.4, 0.05), (1.0, 0.1)])
def test_one_size_stays_where_it_is(gamma, moved):
    mean, most = figures([auto(*batch, 32, gamma) for batch in golden("lowres")])
    assert mean["step"] <= 1.004
    assert mean["sent"] <= 0.01
    assert most["across"] == 0
    assert mean["moved"] <= moved


@pytest.mark.parametrize(
    ("longest", "step", "sent", "rows"), [(None, 1.01, 0.25, 1.5), (131072, 1.015, 0.35, 2.5)]
)
def test_long_tails(longest, step, sent, rows):
    mean, most = figures([auto(*batch, 32) for batch in long_tail(32, longest=longest)])
    assert mean["step"] <= step
    assert mean["sent"] <= sent
    assert mean["rows"] <= rows
    assert most["attention"] <= 1.0101


@pytest.mark.parametrize("mix", ["mixres", "joint"])
def test_many_devices(mix):
    lengths, home = next(golden(mix))
    copies = 8
    lengths, home = np.tile(lengths, copies), np.concatenate([home + 32 * i for i in range(copies)])
    mean, _ = figures([auto(lengths, home, 32 * copies)])
    assert mean["step"] <= 1.008
    assert mean["sent"] <= 0.5
    assert mean["across"] == 0


@pytest.mark.parametrize(("longest", "step", "sent"), [(None, 1.01, 0.25), (131072, 1.015, 0.3)])
def test_long_tails_on_many_devices(longest, step, sent):
    mean, most = figures([auto(*batch, 256) for batch in long_tail(256, longest=longest, batches=2)])
    assert mean["step"] <= step
    assert mean["sent"] <= sent
    assert mean["rows"] <= 2.5
    assert most["attention"] <= 1.0101


@pytest.mark.parametrize("gamma", [0.4, 1.0])
def test_one_size_on_many_devices(gamma):
    lengths, home = next(golden("lowres"))
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.permutation(lengths) for _ in range(8)])
    home = np.concatenate([home + 32 * i for i in range(8)])
    mean, most = figures([auto(lengths, home, 256, gamma)])
    assert mean["step"] <= 1.004
    assert mean["sent"] <= 0.01
    assert most["across"] == 0


@pytest.mark.parametrize("mix", ["lowres", "mixres", "joint"])
def test_text_and_image_tokens_each(mix):
    rng = np.random.default_rng(0)
    lengths, home = next(golden(mix))
    text = np.minimum(rng.integers(0, 393, len(lengths)), lengths - 1)
    plan = auto(lengths, home, 32, text_lengths=text)
    image = plan.tokens - plan.text_tokens
    assert plan.text_tokens.max() <= 1.01 * plan.text_tokens.mean() + 1
    assert image.max() <= 1.01 * image.mean() + 1


@pytest.mark.parametrize("gamma", [0.4, 1.0])
@pytest.mark.parametrize("mix", ["lowres", "mixres", "joint"])
def test_no_slower_than_what_it_replaces(mix, gamma):
    """Modelled time against no balancing and all equal bags, on every batch."""
    links, ratios = Links(), []
    for lengths, home in golden(mix):
        plan = auto(lengths, home, 32, gamma)
        others = [
            balance(lengths, home, num_devices=32, bags=bags, cost=plan.cost, topology=plan.topology)
            for bags in (None, "g1n32", "g2n16", "g4n8", "g8n4", "g16n2", "g32n1")
        ]
        best = min(links.step_seconds(other).exposed for other in others)
        ratios.append(links.step_seconds(plan).exposed / best)
    assert max(ratios) <= 1.005
    if mix != "lowres":
        assert np.mean(ratios) < 1


def test_bounds_hold():
    for lengths, home in [next(golden("joint")), next(long_tail(32, longest=131072))]:
        plan = auto(lengths, home, 32)
        assert plan.load_lower_bound <= plan.load.max() * (1 + 1e-12)
        assert plan.static_step_cost_lower_bound <= plan.static_step_cost * (1 + 1e-12)


STEPS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 400), st.integers(0, 15)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=STEPS, num_devices=st.sampled_from([1, 2, 6, 16]), num_heads=st.sampled_from([1, 3, 8]))
def test_any_step_gives_a_valid_plan(steps, num_devices, num_heads):
    image, text, home = (np.array(x) for x in zip(*steps, strict=True))
    topology = Topology(2, num_devices // 2) if num_devices > 1 else None
    plan = balance(
        image + text,
        home % num_devices,
        num_devices=num_devices,
        bags="auto",
        num_heads=num_heads,
        text_lengths=text,
        topology=topology,
    )
    validate_plan(plan)


@st.composite
def problems(draw):
    """Options of `balance(bags="auto")` for a small step on a few machines."""
    topology = Topology(draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    long = st.sampled_from([0, 1, 2, 100, 101, 5_000, 70_000])
    lengths = draw(st.lists(st.one_of(st.integers(0, 600), long), max_size=24))
    homes = draw(st.lists(st.integers(0, topology.num_devices - 1), min_size=1, max_size=4))
    options = {
        "home": [draw(st.sampled_from(homes)) for _ in lengths],
        "num_devices": topology.num_devices,
        "num_heads": draw(st.integers(1, 9)),
        "topology": topology,
        "cost": CostModel(
            draw(st.sampled_from([8, 512, 3072])), draw(st.sampled_from([0.0, 0.01, 0.4, 1.0, 50.0]))
        ),
        "links": Links(across_bytes_per_s=draw(st.sampled_from([1e6, 50e9, 1e18]))),
        "max_rows": draw(st.sampled_from([None, 1, 1.0, 1.2, 2.0, 24.0])),
    }
    if draw(st.booleans()):
        options["text_lengths"] = [draw(st.integers(0, n)) for n in lengths]
    return {"lengths": lengths, **options}


def check_problem(options):
    try:
        plan = balance(bags="auto", **options)
    except ValueError:
        assert options["max_rows"] is not None
        with pytest.raises(ValueError, match=r"max_rows >= \d+\.\d+ for these sequences"):
            balance(bags="auto", **options)
        return
    validate_plan(plan)
    if options["max_rows"] is not None:
        assert plan.rows.max() <= options["max_rows"] * plan.rows.mean()
    again = balance(bags="auto", **options | {"lengths": np.array(options["lengths"], np.int32)})
    assert np.array_equal(plan.token_slices, again.token_slices)
    assert np.array_equal(plan.head_slices, again.head_slices)
    assert plan.static_step_cost_lower_bound <= plan.static_step_cost * (1 + 1e-9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_any_problem_gives_a_valid_plan_and_the_same_again(options):
    check_problem(options)


@pytest.mark.full
@settings(max_examples=3000, deadline=None)
@given(problems())
def test_many_problems(options):
    check_problem(options)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 5], [100_000], [100_000, 1], [7] * 3])
def test_few_sequences(lengths):
    plan = auto(np.array(lengths, np.int64), np.zeros(len(lengths), np.int64), 32)
    assert plan.tokens.sum() == sum(lengths)
    if max(lengths, default=0) > 1000:
        assert plan.tokens.max() <= 1.01 * plan.tokens.mean()
        assert plan.attention_work.max() <= 1.02 * plan.attention_work.mean()


def test_a_cap_on_rows_is_met_or_refused():
    lengths, home = next(long_tail(32))
    free = auto(lengths, home, 32)
    needed = free.rows.max() / free.rows.mean()
    assert np.array_equal(auto(lengths, home, 32, max_rows=needed + 1e-6).head_slices, free.head_slices)
    capped = auto(lengths, home, 32, max_rows=1.1)
    assert capped.rows.max() <= 1.1 * capped.rows.mean()
    giant = np.array([50_000, *[10] * 31])
    with pytest.raises(ValueError, match=r"max_rows >= 1, the mean; got max_rows=0\.5"):
        auto(giant, np.arange(32), 32, max_rows=0.5)
    with pytest.raises(ValueError, match="max_rows goes with bags='auto'"):
        balance(giant, np.arange(32), num_devices=32, bags="g8n4", max_rows=2.0)


def test_the_same_plan_without_numba():
    """Numba is optional: plain Python makes the same bits."""
    script = """
import sys
if sys.argv[1] == "without":
    sys.modules["numba"] = None
import hashlib, numpy as np
from solver import Topology, balance
from solver._compiled import HAS_NUMBA
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for sigma in (0.1, 1.0, 2.0):
    lengths = rng.lognormal(6, sigma, 60).astype(int)
    text = np.minimum(lengths, 50)
    for kinds in (None, text):
        plan = balance(lengths, np.arange(60) % 16, num_devices=16, bags="auto", text_lengths=kinds,
                       topology=Topology(2, 8))
        digest.update(plan.token_slices.tobytes() + plan.head_slices.tobytes())
print(HAS_NUMBA, digest.hexdigest())
"""
    found = [
        subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True).stdout
        for how in ("with", "without")
    ]
    with_numba, without = (line.split() for line in found)
    if importlib.util.find_spec("numba"):
        assert with_numba[0] == "True"
    assert without[0] == "False"
    assert with_numba[1] == without[1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_spread_is_the_optimum(seed):
    """Against a linear program."""
    rng = np.random.default_rng(seed)
    k, n = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    supply, profit = rng.integers(0, 40, k), rng.integers(0, 9, (k, n))
    capacity = np.full(n, -(-supply.sum() // n) + int(rng.integers(0, 3)))
    tokens = spread(supply, profit, capacity)
    assert np.array_equal(tokens.sum(1), supply)
    assert (tokens >= 0).all()
    assert (tokens.sum(0) <= capacity).all()
    rows = np.kron(np.eye(k), np.ones(n))
    columns = np.kron(np.ones(k), np.eye(n))
    best = linprog(-profit.ravel(), A_ub=columns, b_ub=capacity, A_eq=rows, b_eq=supply)
    assert (tokens * profit).sum() == pytest.approx(-best.fun, abs=1e-6)


def test_partition_fills_uneven_bins():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, 300).astype(np.int64)
    values = np.stack([lengths, lengths**2])
    # The first bin is to get a third of the tokens, but a tenth of their squares.
    capacity = values.sum(1)[:, None] * np.array([[1 / 3, 1 / 3, 1 / 3], [0.1, 0.4, 0.5]])
    unit, off = values.sum(1) / 3, np.array([0.001, 0.003])
    where = partition(values, capacity, unit, off, np.full(300, -1), trades=True)
    filled = np.stack([np.bincount(where, weights=v, minlength=3) for v in values])
    # Where no exchange helps any more: the squares, of which all but the first bin have plenty, are 2.5 % off.
    assert (np.abs(filled - capacity) / unit[:, None] <= [[0.001], [0.03]]).all()


@pytest.mark.parametrize(
    ("machines", "devices", "longest"), [(4, 8, 65_536), (16, 8, 131_072), (16, 8, 262_144)]
)
def test_tokens_are_even_where_a_sequence_needs_many_machines(machines, devices, longest):
    """Few sequences a device, one of them most of all attention: its tokens go where others leave room for them."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(2000), 1.2, 2 * machines * devices), 64, 65536).astype(np.int64)
    lengths[0] = longest
    plan = auto(lengths, np.arange(len(lengths)) % (machines * devices), machines * devices)
    assert plan.tokens.max() <= 1.01 * plan.tokens.mean()
    assert plan.static_step_cost <= 1.02


@pytest.mark.parametrize(("machines", "devices"), [(1, 6), (3, 8), (6, 8)])
def test_equal_bags_of_every_size_are_tried(machines, devices):
    total = machines * devices
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(3000), 1.2, rng.integers(1, 2 * total)), 64, 60_000).astype(
            int
        )
        problem = {"num_devices": total, "topology": Topology(machines, devices)}

        def step_s(bags, lengths=lengths, problem=problem):
            plan = balance(lengths, np.arange(len(lengths)) % problem["num_devices"], bags=bags, **problem)
            return Links().step_seconds(plan).exposed

        best = min(step_s(f"g{g}n{total // g}") for g in range(1, total + 1) if total % g == 0)
        assert step_s("auto") <= 1.005 * best


def test_a_refusal_names_rows_that_are_accepted():
    refused = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(2000), 1.2, rng.integers(3, 40)), 64, 65_536).astype(int)
        problem = {"num_devices": 8, "num_heads": 7, "bags": "auto"}
        home = np.arange(len(lengths)) % 8
        try:
            balance(lengths, home, max_rows=1.0, **problem)
        except ValueError as error:
            refused += 1
            enough = float(re.search(r"max_rows >= ([\d.]+)", str(error))[1])
            balance(lengths, home, max_rows=enough, **problem)
    assert refused > 10


def test_machines_of_too_many_devices_are_refused():
    with pytest.raises(
        ValueError, match=r"machines of at most 1024 devices; got devices_per_machine=2048\. Give top"
    ):
        balance([5], [0], num_devices=2048, bags="auto", num_heads=2)


def test_a_numba_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('needs another NumPy')")
    script = "from solver import balance; print(balance([9, 5], [0, 1], num_devices=2, bags='auto').tokens.tolist())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "[7, 7]\n"
    assert "plans are made without Numba, which cannot be loaded: needs another NumPy" in done.stderr
