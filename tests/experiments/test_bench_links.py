"""Attention over emulated slow links: command lines, bytes, orders, the report."""

import json
import os
import shutil
import sys

import jax
import numpy as np
import pytest

from experiments import _bench_links_network as network
from experiments import bench_links
from experiments._bench_links_compare import PREDICTIONS, agreement
from experiments._bench_links_measure import Machines, Measured
from experiments._bench_links_model import emulated_hardware, modelled_seconds
from experiments._bench_links_processes import Workers, worker_command
from experiments._bench_links_report import links_section
from experiments._bench_links_variants import (
    DIRECTIONS,
    Sizes,
    across_bytes,
    compile_program,
    compiled_bytes,
    draw,
    expected,
    largest_error,
    make_mesh,
    place,
    variants,
)
from experiments._bench_links_worker import uplink_bytes
from experiments._bench_report import Times
from experiments._program import UserError
from solver import Topology

TINY = Sizes(batch=1, seq_len=16, num_heads=8, head_dim=4)


def named(topology, name):
    return next(variant for variant in variants(topology) if variant.name == name)


def test_machines_and_rates_are_read():
    assert bench_links.machine_shapes("2x1,4x2") == [(2, 1), (4, 2)]
    assert bench_links.machine_shapes(bench_links.MACHINES) == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert bench_links.link_rates("50,2.5") == [50.0, 2.5]


@pytest.mark.parametrize(
    "text", ["", "2", "2x", "1x2", "2x0", "3x1", "4x4", "2x2,", "2x2,2x2", "-2x2", "axb"]
)
def test_other_machines_are_refused(text):
    with pytest.raises(UserError, match="--machines takes MACHINESxPROCESSES"):
        bench_links.machine_shapes(text)


@pytest.mark.parametrize("text", ["", "0.5", "10001", "nan", "fast", "50,50"])
def test_other_rates_are_refused(text):
    with pytest.raises(UserError, match="--rates takes numbers of Mbit/s from 1 to 10000"):
        bench_links.link_rates(text)


def test_no_rounds_are_refused():
    with pytest.raises(UserError, match="--rounds is at least 1; got 0"):
        bench_links.main(["--rounds", "0"])


def test_program_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(UserError, match=r"need root and iproute2 \(ip, tc\); missing here: root, tc\."):
        bench_links.main(["--quick"])


def test_commands_of_two_machines():
    lines = [" ".join(command) for command in network.build_commands(2, shared=False)]
    assert lines[0] == "ip netns add jaxdit-links-switch"
    assert (
        "ip link add name m1 netns jaxdit-links-switch type veth peer name up netns jaxdit-links-1" in lines
    )
    assert "ip -n jaxdit-links-switch link set dev m0 master bridge0 up" in lines
    assert "ip -n jaxdit-links-0 addr add 10.213.77.1/24 dev up" in lines
    assert sum(line.startswith("ip netns add") for line in lines) == 3
    # Everything is made inside a namespace of ours.
    assert all("jaxdit-links" in line for line in lines)


def test_both_ends_of_each_link_are_limited():
    lines = [" ".join(command) for command in network.limit_commands(2, 62.5, shared=False)]
    limit = "root tbf rate 62.5mbit burst 128kb limit 64mb"
    assert lines == [
        f"tc -n jaxdit-links-0 qdisc replace dev up {limit}",
        f"tc -n jaxdit-links-switch qdisc replace dev m0 {limit}",
        f"tc -n jaxdit-links-1 qdisc replace dev up {limit}",
        f"tc -n jaxdit-links-switch qdisc replace dev m1 {limit}",
    ]
    lifted = [command[-4:] for command in network.limit_commands(2, None, shared=False)]
    assert lifted == [["root", "pfifo", "limit", "100000"]] * 4


def test_both_directions_of_a_link_share_twice_the_rate():
    (command,) = network.limit_commands(1, 62.5, shared=True)
    assert " ".join(command).startswith("tc -n jaxdit-links-0 qdisc replace dev both root tbf rate 125mbit")
    lines = [" ".join(command) for command in network.build_commands(2, shared=True)]
    assert "ip -n jaxdit-links-1 link add name both type ifb" in lines
    for way in ("egress", "ingress"):
        assert any(line.startswith(f"tc -n jaxdit-links-1 filter add dev up {way} ") for line in lines)
    assert all("jaxdit-links" in line for line in lines)


def test_a_process_runs_on_its_machine_and_names_the_first():
    command = worker_command(Topology(4, 2), TINY, 5)
    assert command[:4] == ["ip", "netns", "exec", "jaxdit-links-2"]
    assert command[command.index("--coordinator") + 1] == "10.213.77.1:9911"
    assert command[command.index("--process") + 1] == "5"
    assert Sizes(**json.loads(command[command.index("--sizes") + 1])) == TINY
    assert network.hosts_text(2, "box") == "127.0.0.1 localhost\n10.213.77.3 box\n"


def test_a_failed_command_is_told():
    with pytest.raises(UserError, match="`false` failed: 1"):
        network.run(["false"])


def test_bytes_of_the_uplink(tmp_path):
    counters = tmp_path / "dev"
    lines = ["header", "  lo: 1 0 0 0 0 0 0 0 2 0", "  up: 10 1 0 0 0 0 0 0 4321 7 0 0"]
    counters.write_text("\n".join(lines))
    assert uplink_bytes(counters) == 4321
    counters.write_text("  lo: 1 0 0 0 0 0 0 0 2 0")
    with pytest.raises(RuntimeError, match="no interface up"):
        uplink_bytes(counters)


# Of 4 machines x 2, a tensor of 64 bytes: a machine has 16 of each of q, k, v, o, a device 8.
BY_HAND = {
    # Three quarters of four tensors leave.
    "ulysses": (48, 96),
    # One device sends k and v seven times; for the gradient eight times, and seven times theirs.
    "ring": (7 * 16, 7 * 16 + 15 * 16),
    # Both devices do, in rings of four.
    "usp": (2 * 3 * 16, 2 * (3 + 4 + 3) * 16),
    "topology_aware": (48, 96),
    "torus": (48, 96),
}


def test_bytes_by_hand():
    topology = Topology(4, 2)
    for variant in variants(topology):
        found = tuple(across_bytes(variant, topology, 64, backward=backward) for backward in (False, True))
        assert found == BY_HAND[variant.name]
    # Of 2: all send as much forward, half of four tensors or all of two.
    two = Topology(2, 2)
    forward = {v.name: across_bytes(v, two, 64, backward=False) for v in variants(two)}
    assert forward == {"ulysses": 64, "ring": 96, "usp": 64, "topology_aware": 64, "torus": 64}
    # Rings of two: keys once for both directions, then their gradients.
    assert across_bytes(named(two, "usp"), two, 64, backward=True) == 128


def check_variant(topology, variant):
    """Bytes of the compiled programs are the formula's, and the programs are attention."""
    mesh = make_mesh(variant, topology, jax.devices()[: topology.num_devices])
    arrays = draw(TINY)
    wanted = expected(*arrays)
    for backward in (False, True):
        compiled = compile_program(variant, mesh, TINY, backward=backward)
        formula = across_bytes(variant, topology, TINY.tensor_bytes, backward=backward)
        assert compiled_bytes(compiled, topology) == formula
        found = compiled(*place(mesh, arrays))
        assert len(found) == (4 if backward else 1)
        assert largest_error(found, wanted) < 1e-5


@pytest.mark.parametrize("name", ["usp", "topology_aware"])
def test_compiled_programs_send_what_the_formulas_say(name):
    topology = Topology(4, 2)
    check_variant(topology, named(topology, name))


@pytest.mark.full
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_all_compiled_programs_send_what_the_formulas_say(shape):
    topology = Topology(*shape)
    for variant in variants(topology):
        check_variant(topology, variant)


def test_one_device_a_machine_leaves_nothing_to_place():
    assert [variant.name for variant in variants(Topology(4, 1))] == ["ulysses", "ring", "torus"]


def test_a_wrong_array_is_found():
    wanted = [np.array([1.0, 4.0]), np.array([2.0, 0.0])]
    found = [jax.numpy.array([1.0, 4.0]), jax.numpy.array([2.0, 0.5])]
    assert largest_error(found, wanted) == 0.25
    assert largest_error(found[:1], wanted) == 0


def around(**middles):
    """Samples 1 % about each."""
    return {name: Times((0.99 * x, x, 1.01 * x)) for name, x in middles.items()}


def test_orders_are_compared():
    same = agreement({"a": 1, "b": 2, "c": 3}, around(a=10, b=11, c=12))
    assert (same.tau, same.ordered, same.disagreeing, same.regret) == (1, 3, (), 1)
    turned = agreement({"c": 3, "a": 1, "b": 2}, around(a=10, b=12, c=11))
    assert turned.tau == pytest.approx(1 / 3)
    (pair,) = turned.disagreeing
    assert (pair.faster, pair.slower, pair.predicted) == ("b", "c", 1.5)
    assert pair.measured == pytest.approx(11 / 12)


def test_equal_predictions_have_no_order():
    # tau-b: two of two pairs that are predicted to differ, of three that are measured to.
    tied = agreement({"a": 1, "b": 1.005, "c": 3}, around(a=11, b=10, c=12))
    assert tied.tau == pytest.approx(2 / 6**0.5)
    assert (tied.ordered, tied.disagreeing) == (2, ())
    assert tied.regret == pytest.approx(1.1)
    assert agreement({"a": 1, "b": 1}, around(a=1, b=2)).tau is None


def test_times_within_the_noise_have_no_order():
    noise = agreement({"a": 1, "b": 2}, around(a=1.015, b=1))
    assert (noise.ordered, noise.disagreeing) == (0, ())
    assert noise.tau is None
    assert agreement({"a": 1, "b": 2}, around(a=1.03, b=1)).ordered == 1


SIZES = Sizes()
RATES = (50.0, 200.0)


def made_up(topology, slower=1.0):
    """What links of just their rate would give, and 0.1 s of compute; topology-aware `slower` times as slow."""
    programs = []
    for variant in variants(topology):
        for backward, direction in enumerate(DIRECTIONS):
            num_bytes = across_bytes(variant, topology, SIZES.tensor_bytes, backward=bool(backward))
            factor = slower if variant.name == "topology_aware" else 1.0
            limited = {}
            for rate in RATES:
                seconds = factor * (0.1 + num_bytes * 8e-6 / rate)
                limited[rate] = Times((seconds, 1.01 * seconds, 0.99 * seconds))
            unlimited = Times((0.1, 0.11, 0.09))
            programs.append(
                Measured(variant.name, direction, num_bytes, num_bytes, num_bytes, 1e-7, unlimited, limited)
            )
    return Machines(topology, 0.05, tuple(programs))


def test_model_is_of_the_emulated_links():
    topology = Topology(4, 2)
    machines = made_up(topology)
    hardware = emulated_hardware(machines, SIZES, 80)
    assert hardware.across.bytes_per_s == 10e6
    assert not hardware.one_sided
    assert not hardware.ring_overlaps
    # Attention takes what was measured apart; what travels, bytes over the rate of the machine's link.
    for name in ("ulysses", "ring", "usp", "topology_aware"):
        variant = named(topology, name)
        transfers = across_bytes(variant, topology, SIZES.tensor_bytes, backward=False) / 10e6
        modelled = modelled_seconds(variant, machines, SIZES, 80)
        assert modelled == pytest.approx(0.05 + transfers, rel=0.05)


def test_torus_hides_its_pulls_in_the_planner_only():
    topology = Topology(4, 2)
    machines, torus = made_up(topology), named(Topology(4, 2), "torus")
    transfers = across_bytes(torus, topology, SIZES.tensor_bytes, backward=False) / 10e6
    in_turn = modelled_seconds(torus, machines, SIZES, 80, in_turn=True)
    assert in_turn == pytest.approx(0.05 + transfers, rel=0.1)
    assert modelled_seconds(torus, machines, SIZES, 80) < in_turn - 0.02
    usp = named(topology, "usp")
    planned, in_turn = (modelled_seconds(usp, machines, SIZES, 80, in_turn=x) for x in (False, True))
    assert planned == pytest.approx(in_turn)


def test_report_of_links_that_are_as_fast_as_they_say():
    section = links_section([made_up(Topology(2, 1)), made_up(Topology(4, 2))], SIZES, shared=True)
    assert section.name == "links"
    gains = section.figures["topology_aware_over_usp"]
    assert [gain["by_bytes"] for gain in gains] == pytest.approx([2] * 2 + [5 * 2 / 3] * 2)
    for gain in gains:
        assert gain["measured"] == pytest.approx(gain["with_compute"])
        assert gain["transfers"] == pytest.approx(gain["by_bytes"])
    for ranking in section.figures["rankings"]:
        assert ranking["agreements"]["bytes"]["disagreeing"] == ()
        forward = ranking["direction"] == DIRECTIONS[0]
        assert tuple(ranking["agreements"]) == (PREDICTIONS if forward else PREDICTIONS[:1])
    text = " ".join(section.body.split())
    assert (
        "4 machines x 2: by more than the noise topology-aware placement is faster in 4 and slower in 0 of 4 rows"
        in text
    )
    assert "of its compiled collectives with the formula: equal." in text
    assert "### 2 machines x 1, forward + backward" in section.body
    # 6.29 MB in 0.1 + 1.01 and 0.1 + 0.25 s.
    (line,) = (
        line
        for line in section.body.splitlines()
        if line.startswith("| usp | 6.29 | 6.29 | 0.10 | 1.11 / 1.01 /")
    )
    assert "| 0.35 / 0.25 / " in line
    # Of two machines all send as much.
    assert "| 2 machines x 1 | forward | 50 | all equal |" in section.body
    json.dumps(section.figures, allow_nan=False)


def test_report_names_what_is_the_other_way_round():
    section = links_section([made_up(Topology(4, 2), slower=5.0)], SIZES, shared=True)
    text = " ".join(section.body.split())
    assert "topology-aware placement is faster in 0 and slower in 4 of 4 rows" in text
    first = section.figures["rankings"][0]["agreements"]["bytes"]["disagreeing"]
    assert ("topology_aware", "usp") in [(pair["faster"], pair["slower"]) for pair in first]
    # (0.1 + 1.01) / (5 (0.1 + 0.50)), and 6.29 MB / 3.15 MB.
    named = "| bytes | 4 machines x 2 | forward | 50 | topology_aware | usp | 2.00 | 0.37 |"
    assert named in section.body
    assert "nan" not in section.body


def test_machines_without_placement_make_no_verdict():
    section = links_section([made_up(Topology(2, 1))], SIZES, shared=True)
    assert section.figures["topology_aware_over_usp"] == []
    assert "against USP" not in section.body


def test_a_process_that_ends_is_told_with_its_log(tmp_path):
    workers = Workers()
    code = "import sys; print(input()); sys.stderr.write('out of luck'); sys.exit(1)"
    with (tmp_path / "log").open("a+") as log:
        workers.start([sys.executable, "-c", code], log)
        assert workers.ask({"do": "echo"}) == [{"do": "echo"}]
        with pytest.raises(RuntimeError, match=r"(?s)process 0 ended; the end of its log:.*out of luck"):
            workers.ask({"do": "more"})
        workers.end()
