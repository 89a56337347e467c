"""The planner of sequence parallelism: hand-computed layers, volumes by formula, and what every plan must hold."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments._sequence_bytes import MovedRows
from solver import (
    A100_MACHINE,
    H100_MACHINE,
    Link,
    SequenceHardware,
    SequenceMesh,
    SequenceShape,
    Topology,
    layer_timeline,
    plan_sequence_parallel,
    sequence_plans,
)

# One FLOP and one byte a second, nothing lost: seconds are FLOP and bytes.
LINK = Link(1.0, 1, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
TOY = SequenceHardware(
    flops_per_s=1.0,
    linear=1.0,
    attention=1.0,
    attention_half_dim=0.0,
    processors=1,
    communication_processors=0,
    memory_bytes_per_s=1e30,
    inside=LINK,
    across=LINK,
    tile_rows=1,
    launch_s=0.0,
)
TWO = Topology(2, 1)
# 4 tokens on each of two devices, width 8: linear layers 24 l d^2, attention 4 l^2 d over two devices.
SHAPE = SequenceShape(num_heads=2, head_dim=4, length=8, batch=1)
LINEAR, ATTENTION = 24 * 4 * 64, 4 * 64 * 8 // 2
TENSOR = 4 * 8 * 2  # bytes of q on a device
ULYSSES, RING = SequenceMesh(2, 1, 1, 1), SequenceMesh(1, 1, 2, 1)


def seconds(mesh, hardware=TOY, topology=TWO, shape=SHAPE, **kind):
    return max(event.stop_s for event in layer_timeline(topology, shape, mesh, hardware, **kind))


def slower(factor, hardware=TOY):
    return replace(
        hardware, across=replace(hardware.across, bytes_per_s=hardware.across.bytes_per_s / factor)
    )


def plan(topology, *args, hardware=TOY, **kwargs):
    return plan_sequence_parallel(topology, *args, hardware=hardware, **kwargs)


def test_ulysses_exposes_its_exchanges():
    # Half of each of four tensors goes to the other device.
    assert seconds(ULYSSES) == LINEAR + ATTENTION + 4 * TENSOR / 2
    assert seconds(ULYSSES, slower(10)) == LINEAR + ATTENTION + 10 * 4 * TENSOR / 2


def test_a_ring_step_hides_under_attention_if_it_is_shorter():
    # Two steps of half the attention; keys and values move under the first.
    assert ATTENTION / 2 > 2 * TENSOR
    assert seconds(RING) == LINEAR + ATTENTION
    assert seconds(RING, slower(10)) == LINEAR + 10 * 2 * TENSOR + ATTENTION / 2
    assert seconds(RING, replace(TOY, ring_overlaps=False)) == LINEAR + ATTENTION + 2 * TENSOR


def test_torus_hides_what_ulysses_exposes():
    # Four pieces of a quarter: own q to own keys, the other q to them, the other keys to it, own q to the other keys.
    piece = ATTENTION / 4
    assert seconds(ULYSSES, head_groups=None) == LINEAR + ATTENTION
    # Pull q, k and v, one piece under each; the third piece needs them, the fourth runs under the push.
    slow = slower(20)
    pull_q, pull_kv, push_o = 20 * TENSOR / 2, 20 * TENSOR, 20 * TENSOR / 2
    assert pull_q > piece
    assert seconds(ULYSSES, slow, head_groups=None) == LINEAR + pull_q + pull_kv + piece + push_o


def test_groups_of_heads_hide_all_but_the_first_and_the_last_exchange():
    shape = replace(SHAPE, num_heads=4, head_dim=2)
    group, there = ATTENTION / 2, 3 * TENSOR / 4
    assert seconds(ULYSSES, shape=shape) == LINEAR + ATTENTION + 4 * TENSOR / 2
    expected = LINEAR + there + 2 * group + TENSOR / 4
    assert seconds(ULYSSES, shape=shape, head_groups=2) == expected


# Machines of 4 devices: rings of 4 steps.
WIDE = Topology(2, 4)
AWARE, LONG = SequenceMesh(2, 1, 1, 4), SequenceShape(num_heads=2, head_dim=4, length=32, batch=1)


def by_name(timeline):
    """(start, stop) of the last event of each name."""
    return {event.name: (event.start_s, event.stop_s) for event in timeline}


def test_with_one_transfer_under_way_a_pull_hides_under_the_last_step_of_the_ring():
    slow = slower(12)
    step = 4 * 4 * 4 * 4  # of a part, 4 queries of a device to as many keys of 4 elements
    pull = 12 * 4 * 4 * 2  # of as many rows
    assert step < pull < 2 * pull < 4 * step
    # Pull q, then k and v, and push o; nothing moves between machines beside the third of four attentions.
    two = replace(slow, transfers_under_way=2)
    assert seconds(AWARE, two, WIDE, LONG, head_groups=None) == LINEAR + 16 * step
    one = seconds(AWARE, slow, WIDE, LONG, head_groups=None)
    assert one == LINEAR + 3 * 3 * step + pull + 2 * pull + 4 * step + pull
    timeline = by_name(layer_timeline(WIDE, LONG, AWARE, slow, head_groups=None))
    last, _ = timeline["attention: q +0 to own k, v, step 4"]
    assert timeline["pull q of machine +1"] == (last, last + pull)


def test_a_ring_of_two_passes_on_before_the_pull():
    """Its single step is no loop: with one transfer under way the pull spans both, and the step goes first."""
    topology, mesh = Topology(2, 2), SequenceMesh(2, 1, 1, 2)
    shape = replace(LONG, length=16)
    timeline = by_name(layer_timeline(topology, shape, mesh, slower(8), head_groups=None))
    passed = timeline["attention: q +0 to own k, v: keys and values go round"]
    pulled = timeline["pull q of machine +1"]
    first = timeline["attention: q +0 to own k, v, step 1"]
    assert passed[1] == pulled[0] == first[0]
    two = replace(slower(8), transfers_under_way=2)
    timeline = by_name(layer_timeline(topology, shape, mesh, two, head_groups=None))
    assert timeline["attention: q +0 to own k, v: keys and values go round"][0] == passed[0]
    assert timeline["pull q of machine +1"][0] == passed[0]


def test_of_two_exchanges_beside_a_group_of_heads_one_hides_at_a_time():
    shape = replace(SHAPE, num_heads=6, head_dim=2)
    group, there, back = ATTENTION / 2, 3 * 4 * 4 * 2 / 2, 4 * 4 * 2 / 2
    assert there + back < group
    linear = 24 * 4 * 12**2
    one, two = (
        seconds(ULYSSES, replace(TOY, transfers_under_way=n), shape=shape, head_groups=3) for n in (1, 2)
    )
    # Of three groups the middle one has the last keys to come and the first outputs to leave.
    assert two == linear + there + 3 * group + back
    assert one == two + there


def test_puts_and_gets_are_not_limited():
    timelines = [
        layer_timeline(
            WIDE,
            LONG,
            AWARE,
            replace(slower(8), transfers_under_way=n),
            head_groups=None,
            one_sided=True,
        )
        for n in (1, 2)
    ]
    assert timelines[0] == timelines[1]


def test_more_under_way_is_planned_with_where_it_is_sooner():
    hardware = replace(A100_MACHINE, transfers_under_way=2)
    case = Topology(4, 8), 24, 128, (65_536, 512)
    plans = sequence_plans(*case, hardware=hardware)
    assert {plan.transfers_under_way for plan in plans} == {1, 2}
    one = plan_sequence_parallel(*case)
    assert (plans[0].transfers_under_way, plans[0].layer_s < one.layer_s) == (2, True)
    # What nothing runs beside needs no option.
    assert all(plan.transfers_under_way == 1 for plan in plans if plan.algorithm == "ring")
    assert plan_sequence_parallel(Topology(1, 8), 24, 128, 4_096, hardware=hardware).transfers_under_way == 1


def test_a_transfer_is_paid_for_once():
    """A pull beside four steps takes its processors from them once, however many it outlasts."""
    greedy = replace(TOY, processors=4, communication_processors=1, transfers_under_way=2)
    quiet = replace(greedy, communication_processors=0)
    moved = [e for e in layer_timeline(WIDE, LONG, AWARE, quiet, head_groups=None) if e.lane != "compute"]
    linked = sum(event.stop_s - event.start_s for event in moved)
    found = (seconds(AWARE, hardware, WIDE, LONG, head_groups=None) for hardware in (greedy, quiet))
    assert -0.001 < next(found) - next(found) <= linked / 4


def test_two_sided_transfers_take_processors_from_attention():
    greedy = replace(TOY, processors=4, communication_processors=1)
    base = seconds(RING, replace(greedy, communication_processors=0))
    assert seconds(RING, greedy) == base + 2 * TENSOR / 4
    assert seconds(RING, greedy, one_sided=True) == base
    # All of a step that the transfer outlasts is slower.
    slow = slower(10, greedy)
    assert seconds(RING, slow) == LINEAR + 10 * 2 * TENSOR + (base - LINEAR) / 2


def test_puts_and_gets_have_rates_and_latencies_of_their_own():
    across = Link(1.0, 1, 0.5, 0.25, 1.0, 100.0, 7.0, 1.0)
    hardware = replace(TOY, across=across)
    # Two calls to one peer; then puts and gets, with a barrier at each end.
    assert seconds(ULYSSES, hardware) == LINEAR + ATTENTION + 2 * (100 + 1) + 4 * TENSOR / 2 / 0.25
    assert seconds(ULYSSES, hardware, one_sided=True) == LINEAR + ATTENTION + 2 * 8 + 4 * TENSOR / 2 + 2 * 7


def test_devices_of_a_machine_share_its_adapter():
    topology, mesh = Topology(2, 2), SequenceMesh(2, 1, 1, 2)
    shared = replace(TOY, across=replace(LINK, shared_by=2))
    lone = sum(e.stop_s - e.start_s for e in layer_timeline(topology, SHAPE, mesh, TOY) if e.lane == "across")
    both = [e for e in layer_timeline(topology, SHAPE, mesh, shared) if e.lane == "across"]
    assert sum(e.stop_s - e.start_s for e in both) == 2 * lone
    # Of a ring that runs through both devices, one alone crosses.
    ring = SequenceMesh(1, 1, 2, 2)
    assert seconds(ring, shared, topology) == seconds(ring, TOY, topology)


def test_waves_of_tiles():
    hardware = replace(TOY, processors=4, tile_rows=2)
    # 6 queries of 1 head are 3 tiles, a wave; of 2 heads 6 tiles, two waves of 4 tiles of 2 queries.
    assert hardware.attention_seconds(6, 10, 1, 4) == 4 * 2 * 10 * 4 * 4
    assert hardware.attention_seconds(6, 10, 2, 4) == 2 * 4 * 2 * 10 * 4 * 4


@pytest.mark.parametrize("machines", [2, 3, 4, 8])
def test_bytes_across_machines_are_the_formulas(machines):
    batch, length, heads, dim = 2, 48 * machines, 48, 64
    topology = Topology(machines, 8)
    elements = batch * length * heads * dim
    plans = sequence_plans(topology, heads, dim, length, batch)

    def found(algorithm, mesh):
        of_device = next(p.across_bytes for p in plans if p.algorithm == algorithm and p.mesh == mesh)
        return of_device * 8 / A100_MACHINE.element_bytes

    usp = SequenceMesh(1, 8, machines, 1)
    aware = SequenceMesh(machines, 2, 1, 4)
    assert found("usp", usp) == pytest.approx(2 * (machines - 1) * elements / machines)
    ulysses = pytest.approx(4 * (machines - 1) / machines * elements / machines)
    assert found("topology_aware", aware) == ulysses
    assert found("torus", aware) == ulysses


@pytest.mark.parametrize("topology", [(1, 8), (8, 1), (2, 2), (2, 4), (3, 2), (4, 8), (6, 4)], ids=str)
def test_bytes_of_every_plan_are_the_formulas(topology):
    """The mean over devices, of rings that run through machines too; heads that do not divide move as more."""
    heads, dim, length = 24, 64, 96 * 8
    plans = sequence_plans(Topology(*topology), heads, dim, length)
    for plan in plans:
        mesh = plan.mesh
        moved = -(-heads // mesh.ulysses_degree) * mesh.ulysses_degree
        tensor = length // mesh.num_devices * moved * dim * A100_MACHINE.element_bytes
        rows = MovedRows(mesh, tensor, A100_MACHINE.element_bytes, torus=plan.algorithm == "torus")
        expected = rows.traffic.across, rows.traffic.inside
        assert (plan.across_bytes, plan.inside_bytes) == pytest.approx(expected), plan.mesh


@pytest.mark.parametrize("cfg", [False, True])
def test_every_plan_is_there_once(cfg):
    hardware = replace(A100_MACHINE, one_sided=True, transfers_under_way=2)
    plans = sequence_plans(Topology(4, 8), 24, 128, (65_536, 512), cfg=cfg, hardware=hardware)
    of = [(p.algorithm, p.mesh, p.head_groups, p.one_sided, p.transfers_under_way, p.cfg) for p in plans]
    assert len(of) == len(set(of)) > 100
    usp = {p.mesh for p in plans if p.algorithm == "usp" and p.head_groups == 1 and not p.one_sided}
    assert SequenceMesh(1, 8, 4, 1) in usp


def test_one_device_computes():
    alone = plan(Topology(1, 1), 2, 4, 8)
    assert alone.algorithm == "none"
    assert alone.layer_s == 24 * 8 * 64 + 4 * 64 * 8
    assert alone.speedup == 1
    assert alone.across_bytes == alone.inside_bytes == 0


def test_ties_go_to_usp():
    # Ring and Torus both hide everything.
    assert seconds(RING) == seconds(ULYSSES, head_groups=None)
    best = plan(TWO, 2, 4, 8)
    assert (best.algorithm, best.mesh, best.head_groups) == ("ring", RING, 1)


def test_the_plan_is_the_brute_force_minimum():
    slow = slower(20)
    kinds = [(ULYSSES, {}), (RING, {}), (ULYSSES, {"head_groups": None})]
    assert plan(TWO, 2, 4, 8, hardware=slow).layer_s == min(seconds(m, slow, **k) for m, k in kinds)


def test_text_counts_as_tokens():
    assert plan(TWO, 2, 4, (6, 2)) == plan(TWO, 2, 4, 8)


def test_guidance_takes_half_the_machines_where_the_network_is_slow():
    # A machine for each branch sends nothing.
    split = plan(TWO, 2, 4, 8, cfg=True, hardware=slower(100))
    assert split.cfg == "machines"
    assert split.layer_s == 24 * 8 * 64 + 4 * 64 * 8
    # Three machines have no half, two devices in each have.
    assert {p.cfg for p in sequence_plans(Topology(3, 2), 2, 4, 24, cfg=True, hardware=TOY)} == {
        "batched",
        "devices",
    }
    assert {p.cfg for p in sequence_plans(Topology(3, 1), 2, 4, 24, cfg=True, hardware=TOY)} == {"batched"}


def test_branches_on_halves_of_a_machine_share_its_adapter():
    hardware = replace(TOY, across=replace(LINK, shared_by=4))
    plans = sequence_plans(Topology(2, 4), 4, 4, 64, cfg=True, hardware=hardware)
    mesh = SequenceMesh(2, 1, 1, 2)
    across = next(
        event
        for p in plans
        if (p.cfg, p.algorithm, p.mesh, p.head_groups) == ("devices", "topology_aware", mesh, 1)
        for event in p.timeline
        if event.lane == "across"
    )
    assert across.stop_s - across.start_s == 4 * across.sent_bytes


def test_heads_that_do_not_divide_leave_the_fullest_device_with_more():
    # 3 heads over 2 devices: 2 of them on one.
    uneven = seconds(ULYSSES, shape=replace(SHAPE, num_heads=3))
    tokens, width = 4, 12
    assert uneven == 24 * tokens * width**2 + 4 * 64 * 2 * 4 + 4 * (tokens * 2 * 2 * 4 * 2) / 2
    # USP's meshes divide.
    assert plan(TWO, 3, 4, 8).usp_layer_s == seconds(RING, shape=replace(SHAPE, num_heads=3))


MACHINES = st.builds(Topology, st.integers(1, 5), st.sampled_from([1, 2, 3, 8]))
CASES = st.tuples(
    MACHINES, st.sampled_from([1, 3, 24, 30]), st.just(64), st.integers(1, 40_000), st.integers(1, 2)
)
HARDWARE = st.sampled_from([A100_MACHINE, H100_MACHINE])


@settings(max_examples=60, deadline=None)
@given(CASES, HARDWARE, st.booleans(), st.booleans())
def test_never_slower_than_usp_and_timelines_are_sound(case, hardware, one_sided, cfg):
    hardware = replace(hardware, one_sided=one_sided, transfers_under_way=2)
    best = plan_sequence_parallel(*case, cfg=cfg, hardware=hardware)
    two_sided = plan_sequence_parallel(*case, cfg=cfg, hardware=replace(hardware, one_sided=False))
    assert best.layer_s <= two_sided.layer_s <= best.usp_layer_s == two_sided.usp_layer_s
    assert best.layer_s == max(event.stop_s for event in best.timeline)
    assert best == plan_sequence_parallel(*case, cfg=cfg, hardware=hardware)
    for lane in ("compute", "inside", "across"):
        events = [event for event in best.timeline if event.lane == lane]
        assert all(before.stop_s <= after.start_s for before, after in pairwise(events))
    if case[0].num_machines == 1:
        assert best.across_bytes == 0
    one = plan_sequence_parallel(*case, cfg=cfg, hardware=replace(hardware, transfers_under_way=1))
    assert best.layer_s <= one.layer_s


@settings(max_examples=60, deadline=None)
@given(CASES, HARDWARE, st.integers(1, 3))
def test_no_more_transfers_than_allowed_are_under_way(case, hardware, most):
    for plan in sequence_plans(*case, hardware=replace(hardware, transfers_under_way=most))[::7]:
        # Parts of a transfer, which have one name, are one; steps of a ring, which have one too, follow each other.
        moved = [event for event in plan.timeline if event.lane != "compute"]
        for event in moved:
            beside = {other.name for other in moved if other.start_s <= event.start_s < other.stop_s}
            assert len(beside) <= plan.transfers_under_way <= most


@settings(max_examples=60, deadline=None)
@given(CASES, HARDWARE, st.sampled_from(["inside", "across"]), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(case, hardware, name, factor):
    hardware = replace(hardware, one_sided=True, transfers_under_way=2)
    link = getattr(hardware, name)
    faster = replace(hardware, **{name: replace(link, bytes_per_s=link.bytes_per_s * factor)})
    found = plan_sequence_parallel(*case, hardware=faster).layer_s
    assert found <= plan_sequence_parallel(*case, hardware=hardware).layer_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"topology": (2, 8)}, TypeError, "topology is a Topology; got tuple"),
        ({"topology": Topology(1, 1025)}, ValueError, "num_devices <= 1024; got num_devices=1025"),
        ({"num_heads": 0}, ValueError, "num_heads >= 1; got num_heads=0"),
        ({"head_dim": 64.0}, TypeError, "head_dim is an integer; got float 64.0"),
        ({"lengths": 0}, ValueError, "lengths >= 1; got lengths=0. Give tokens"),
        ({"lengths": (4, -1)}, ValueError, "text tokens of lengths >= 0; got text tokens of lengths=-1"),
        ({"lengths": (0, 512)}, ValueError, "image tokens of lengths >= 1; got image tokens of lengths=0"),
        (
            {"lengths": (1 << 29, (1 << 29) + 1)},
            ValueError,
            "lengths, image and text together, <= 1073741824; got .*=1073741825",
        ),
        ({"lengths": [100, 2]}, TypeError, "lengths is an integer; got list. .*or a tuple .image tokens"),
        ({"lengths": (4, 4, 4)}, ValueError, "got 3 entries. Plan sequences of other lengths one by one"),
        ({"lengths": (4,)}, ValueError, "got 1 entry. Plan .* an integer is all tokens"),
        ({"batch": 0}, ValueError, "batch >= 1; got batch=0"),
        ({"cfg": 1}, TypeError, "cfg is a bool; got int"),
        ({"hardware": "A100"}, TypeError, "hardware is a SequenceHardware; got str"),
    ],
)
def test_bad_input(change, error, text):
    good = {"topology": TWO, "num_heads": 2, "head_dim": 4, "lengths": (1, 0), "batch": 1, "cfg": False}
    assert plan_sequence_parallel(**good).layer_s > 0
    with pytest.raises(error, match=f"plan_sequence_parallel: .*{text}"):
        plan_sequence_parallel(**good | change)


@pytest.mark.parametrize(
    ("owner", "change", "text"),
    [
        (LINK, {"bytes_per_s": 0.0}, "bytes_per_s finite and > 0; got bytes_per_s=0.0"),
        (LINK, {"all_to_all": 1.01}, "all_to_all <= 1; got all_to_all=1.01"),
        (LINK, {"two_sided_s": -1.0}, "two_sided_s finite and >= 0; got two_sided_s=-1.0"),
        (LINK, {"shared_by": 0}, "shared_by >= 1; got shared_by=0"),
        (TOY, {"flops_per_s": float("nan")}, "flops_per_s finite and > 0; got flops_per_s=nan"),
        (TOY, {"transfers_under_way": 0}, "transfers_under_way >= 1; got transfers_under_way=0"),
        (TOY, {"linear": 2.0}, "linear <= 1; got linear=2.0"),
        (
            TOY,
            {"communication_processors": 1},
            "communication_processors < processors; got .*=1, processors=1",
        ),
    ],
)
def test_bad_hardware(owner, change, text):
    with pytest.raises(ValueError, match=f"{type(owner).__name__}: {text}"):
        replace(owner, **change)
