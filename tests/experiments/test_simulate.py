"""Simulation without an accelerator: figures against hand-computed ones, and published tables."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from experiments import _simulate_run, simulate
from experiments._aot_gpus import Gpu, Machines, load_gpu
from experiments._bench_batches import recorded_steps
from experiments._plan_traffic import arcs_of, traffic
from experiments._simulate_batches import Batch, Workload, drawn_workload
from experiments._simulate_model import FLUX, ModelShape, StepModel
from experiments._simulate_run import AUTO, NONE, compare, plan_figures, variant, variants_for
from solver import Topology, balance
from tests.experiments._program_cases import run
from tests.experiments._simulate_cases import SMALL, simulated

GPU = Gpu("toy", "Toy", "", {"bf16": 1e12, "f32": 5e11}, memory_speed=1e9, nvlink=1e8, network=1e7)


def batch_of(ranks):
    lengths = np.array([length for rank in ranks for length in rank], np.int64)
    home = np.repeat(np.arange(len(ranks)), [len(rank) for rank in ranks])
    return Batch(lengths, np.zeros_like(lengths), home)


def toy(machines=1, gpus=2, remat=True):
    return StepModel(ModelShape(8, 2, 1, 1), GPU, Machines(machines, gpus), 1e9, gamma=0.5, remat=remat)


def h100(num_devices=32, gamma=0.4):
    return StepModel(FLUX, load_gpu("h100"), Machines(num_devices // 8, 8), 400e12, gamma)


def figures(ranks, name, model):
    return plan_figures(variant(name, model.machines.num_devices).plan(batch_of(ranks), model), model)


def test_a_step_without_balancing_by_hand():
    # Two devices, one sequence each, of 30 and 10 tokens; d = 8: linear 24 d^2 = 1536 a token, attention
    # gamma 4 d = 16 times l^2.
    found = figures([[30], [10]], "none", toy())
    linear, attention = 1536, 16
    loads = [30 * linear + 900 * attention, 10 * linear + 100 * attention]
    assert found["load"] == pytest.approx(loads[0] / np.mean(loads))
    assert found["static_step_cost"] == pytest.approx(found["load"])
    assert found["tokens"] == 1.5
    assert found["attention"] == 1.8
    assert found["tokens_moved"] == found["rows_sent"] == found["traffic_s"] == 0
    # Two blocks, four passes (forward, forward again, backward as two), 1e9 FLOP/s.
    assert found["compute_s"] == pytest.approx(2 * 4 * loads[0] / 1e9)
    # 36 d^2 + 15 d^2 parameters over two devices, 36 bytes each, 1e9 bytes/s.
    assert found["optimiser_s"] == pytest.approx(51 * 64 * 36 / 2 / 1e9)
    # Half of 8 bytes a parameter is on the other device, over NVLink.
    assert found["parameters_s"] == pytest.approx(51 * 64 * 8 / 2 / 1e8)
    expected = max(found["compute_s"], found["parameters_s"]) + found["optimiser_s"]
    assert found["step_s"] == found["step_overlapped_s"] == pytest.approx(expected)


def test_padding_is_of_the_most_tokens_and_the_most_attention():
    # Most tokens on one device, most attention on the other.
    found = figures([[10] * 4, [30]], "none", toy())
    loads = [40 * 1536 + 400 * 16, 30 * 1536 + 900 * 16]
    assert found["load"] == pytest.approx(loads[0] / np.mean(loads))
    assert found["static_step_cost"] == pytest.approx((40 * 1536 + 900 * 16) / np.mean(loads))


@pytest.mark.parametrize(("remat", "passes", "exchanges"), [(True, 4, 3), (False, 3, 2)])
def test_a_step_of_one_bag_by_hand(remat, passes, exchanges):
    model = toy(remat=remat)
    found = figures([[30], [10]], "full", model)
    assert found["load"] == found["static_step_cost"] == found["tokens"] == 1
    # Each device has half the tokens and one of two heads, and sends the rows of the other head.
    assert found["rows_sent"] == 0.5
    assert found["rows_across_machines"] == 0
    # 20 rows of 4 elements, 2 bytes, q, k, v and o, two blocks.
    assert found["sent_inside_bytes"] == pytest.approx(20 * 4 * 2 * 4 * 2 * exchanges)
    assert found["traffic_s"] == pytest.approx(found["sent_inside_bytes"] / 1e8)
    assert found["compute_s"] == pytest.approx(2 * passes * (20 * 1536 + 500 * 16) / 1e9)
    waiting = max(found["compute_s"], found["parameters_s"])
    assert found["step_s"] == pytest.approx(waiting + found["traffic_s"] + found["optimiser_s"])
    under = max(found["compute_s"], found["parameters_s"] + found["traffic_s"])
    assert found["step_overlapped_s"] == pytest.approx(under + found["optimiser_s"])
    lengths = np.array([30, 10])
    assert model.hardware_flops(lengths) == 2 * passes * (40 * 1536 + 1000 * 32)


def test_traffic_between_machines_takes_the_network():
    model = toy(machines=2, gpus=1)
    found = figures([[30], [10]], "full", model)
    assert found["rows_across_machines"] == found["rows_sent"] == 0.5
    assert found["sent_inside_bytes"] == 0
    assert found["traffic_s"] == pytest.approx(found["sent_across_bytes"] / 1e7)
    assert found["parameters_s"] == pytest.approx(51 * 64 * 8 / 2 / 1e7)


def test_throughput_hfu_and_speed_up_are_of_mean_times():
    model = toy()
    batches = [batch_of([[30], [10]]), batch_of([[50, 4], []])]
    before, after = compare(Workload("lengths", "", 2, batches), model, [NONE, variant("full", 2)]).plans
    steps = [figures(ranks, "full", model)["step_s"] for ranks in ([[30], [10]], [[50, 4], []])]
    assert after["step_s"] == pytest.approx(np.mean(steps))
    assert after["step_worst_s"] == max(steps)
    assert after["tokens_per_s"] == pytest.approx(94 / sum(steps))
    flops = sum(model.hardware_flops(batch.lengths) for batch in batches)
    assert after["hfu"] == pytest.approx(flops / sum(steps) / 2e12)
    assert after["speedup"] == pytest.approx(before["step_s"] / after["step_s"])
    assert before["speedup"] == 1


# KnapFormer's figures: load before balancing; then for bags of 1, 2, 4 and 8 its load and J.
TWELVE = {
    "lowres": (1.097, (1.0003, 1.0003, 1.0003, 1.0003), (1.003, 1.003, 1.003, 1.003)),
    "mixres": (2.335, (2.302, 1.151, 1.0027, 1.0003), (2.30, 1.16, 1.014, 1.004)),
    "joint": (2.811, (2.811, 1.406, 1.0019, 1.0008), (2.81, 1.41, 1.118, 1.006)),
}


@pytest.mark.parametrize("mix", TWELVE)
def test_the_twelve_experiments(mix):
    # The recorded draws are half of those behind the published means: before balancing, and where one sequence fills a
    # bag, figures agree within 1.5 %. Elsewhere ours may be lower, and are above by no more than 0.002 and 0.008.
    before, loads, costs = TWELVE[mix]
    batches = [batch_of(ranks) for ranks in recorded_steps(mix)]
    names = ["none", "g1n32", "g2n16", "g4n8", "g8n4"]
    variants = [variant(name, 32) for name in names]
    plans = compare(Workload(mix, "", 32, batches), h100(), variants).plans
    assert [plan["bags"] for plan in plans] == names
    assert plans[0]["load"] == pytest.approx(before, rel=0.015)
    for plan, load, cost in zip(plans[1:], loads, costs, strict=True):
        if load > 1.1:
            assert plan["load"] == pytest.approx(load, rel=0.015)
            assert plan["static_step_cost"] == pytest.approx(cost, rel=0.015)
        else:
            assert plan["load"] < load + 0.002
            assert plan["static_step_cost"] < cost + 0.008
        size = int(plan["bags"][1])
        assert plan["rows_sent"] == pytest.approx((size - 1) / size, abs=0.01)


def test_bags_beyond_eight_cross_machines():
    model = h100()
    plan = compare(
        drawn_workload("joint", num_devices=None, steps=1, seed=0), model, [variant("g16n2", 32)]
    ).plans[0]
    assert plan["rows_across_machines"] == pytest.approx(0.5, abs=0.01)


def test_every_equal_bag_spec_is_there_once():
    def names(chosen):
        return [v.name for v in variants_for(12, variant(chosen, 12))]

    equal = ["g1n12", "g2n6", "g3n4", "g4n3", "g6n2", "g12n1"]
    assert names("g4n3") == names("full") == names("auto") == ["none", *equal, "auto"]
    assert names("g4n1+g2n1") == ["none", *equal, "g2n1+g4n1", "auto"]


def test_plans_of_too_many_pieces_are_left_out(monkeypatch):
    monkeypatch.setattr(_simulate_run, "_MOST_PIECES", 5)
    comparison = compare(
        Workload("lengths", "", 2, [batch_of([[30, 2], [10]])]), toy(), variants_for(2, NONE)
    )
    assert comparison.left_out == {"g2n1": "up to 6 pieces of sequences"}
    assert [plan["bags"] for plan in comparison.plans] == ["none", "g1n2", "auto"]


def brute_rows(plan):
    """Rows between devices, one (token, head) at a time."""
    holders = {}
    for sequence, first, last, _, _, device in plan.head_slices.tolist():
        for head in range(first, last):
            holders.setdefault((sequence, head), set()).add(device)
    sent = np.zeros((plan.num_devices, plan.num_devices), np.int64)
    for sequence, start, stop, device in plan.token_slices.tolist():
        for head in range(plan.num_heads):
            for holder in holders[sequence, head] - {device}:
                sent[device, holder] += stop - start
    return sent


@pytest.mark.parametrize("bags", [None, "g4n2", "g8n1", "auto"])
def test_traffic_by_sender_and_receiver(bags):
    lengths, home = [900, 20, 33, 1, 0, 250, 64, 7], [0, 0, 1, 3, 4, 7, 7, 2]
    plan = balance(lengths, home, num_devices=8, bags=bags, num_heads=3, topology=Topology(2, 4))
    sent = traffic(plan)
    np.testing.assert_array_equal(sent.rows, brute_rows(plan))
    np.testing.assert_array_equal(sent.rows.sum(1), plan.rows_sent)
    assert sent.tokens.sum() == round(plan.tokens_moved_fraction * sum(lengths))
    arcs = arcs_of(sent.rows, 4, most=3)
    assert arcs.total_across == plan.rows_across_machines.sum()
    assert arcs.total_inside + arcs.total_across == sent.rows.sum()
    assert len(arcs.pairs) == min(3, arcs.num_pairs)
    assert list(arcs.amounts) == sorted(arcs.amounts, reverse=True)
    for (low, high), amount, across in zip(arcs.pairs, arcs.amounts, arcs.across, strict=True):
        assert low < high
        assert amount == sent.rows[low, high] + sent.rows[high, low]
        assert across == (low // 4 != high // 4)


def numbers(value):
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, float) else []


def test_the_json_of_a_run(capsys):
    report = simulated(capsys, *SMALL, "--topology", "2x2", "--bags", "g2n1", "--steps", 2, "--seed", 7)
    assert report["schema"] == 1
    assert report["modelled"] is True
    assert report["published"] is None
    settings = report["settings"]
    assert (settings["num_devices"], settings["topology"], settings["bags"]) == (4, "2x2", "g2n1")
    assert (settings["num_heads"], settings["double_blocks"], settings["single_blocks"]) == (4, 1, 2)
    assert settings["seed"] == 7
    (mix,) = report["mixes"]
    assert (mix["mix"], mix["source"], mix["batches"]) == ("codes", SMALL[1], 2)
    assert mix["sequences"] == 6
    assert [plan["bags"] for plan in mix["plans"]] == ["none", "g1n4", "g2n2", "g4n1", "g2n1", "auto"]
    assert len({frozenset(plan) for plan in mix["plans"]}) == 1
    assert set(mix["plans"][0]) == {
        *(
            "bags",
            "load",
            "load_worst",
            "static_step_cost",
            "static_step_cost_worst",
            "tokens",
            "attention",
            "rows",
        ),
        *("tokens_moved", "rows_sent", "rows_across_machines", "sent_inside_bytes", "sent_across_bytes"),
        *(
            "compute_s",
            "traffic_s",
            "parameters_s",
            "optimiser_s",
            "step_s",
            "step_overlapped_s",
            "step_worst_s",
        ),
        *("tokens_per_s", "hfu", "plan_ms", "speedup", "speedup_overlapped"),
    }
    assert all(math.isfinite(n) for n in numbers(report))


def test_the_same_seed_the_same_figures_and_another_other_ones(capsys):
    def loads(seed):
        (mix,) = simulated(capsys, *SMALL, "--steps", 1, "--seed", seed)["mixes"]
        return mix["plans"][0]["load"], mix["tokens"]

    assert loads(3) == loads(3) != loads(4)


def test_joint_on_32_h100_beside_the_published_run(capsys, tmp_path):
    options = ("--mix", "joint", "--bags", "g8n4", "--devices", 32, "--topology", "4x8", "--steps", 2)
    report = simulated(capsys, *options, "--figure", tmp_path / "bars.png")
    published = report["published"]
    first, ours, free, *fitted = published["rows"]
    assert (first["step_before_s"], first["step_s"], first["tokens_per_s"]) == (8.05, 3.44, 107.5e3)
    # The published HFU is of the FLOPs that are counted here.
    assert published["flops_per_device"] == pytest.approx(published["published_flops_per_device"], rel=0.02)
    plans = {plan["bags"]: plan for plan in report["mixes"][0]["plans"]}
    assert ours["step_s"] == plans["g8n4"]["step_s"]
    assert ours["hfu"] == pytest.approx(plans["g8n4"]["hfu"])
    assert free["tokens_per_s"] == pytest.approx(plans["auto"]["tokens_per_s"])
    assert free["step_s"] < ours["step_s"]
    assert [row["step_before_s"] for row in fitted] == [8.05, 8.05]
    assert 2.5 < fitted[0]["step_s"] < 3.44
    # The fit of both meets both.
    both = published["fit_of_both"]
    for bags, step_s in (("none", 8.05), ("g8n4", 3.44)):
        plan = plans[bags]
        compute_s = plan["compute_s"] * report["settings"]["linear_flops_per_s"] / both["linear_flops_per_s"]
        assert compute_s + plan["traffic_s"] + plan["optimiser_s"] + both["extra_s"] == pytest.approx(step_s)
    with Image.open(tmp_path / "bars.png") as picture:
        assert min(picture.size) > 200


def test_tables_say_what_is_modelled_and_mark_what_was_chosen(capsys):
    assert run(simulate.main, *SMALL, "--steps", 1, "--bags", "full", "--text") == 0
    text = capsys.readouterr().out
    assert "**modelled**" in text
    assert text.count("**g4n1 (full)**") == 2
    assert "text and image tokens apart" in " ".join(text.split())
    assert "published" not in text
    widths = {len(line) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 2  # one of each table


def test_all_three_mixes(capsys, tmp_path):
    report = simulated(capsys, "--mix", "all", "--steps", 1, "--devices", 4, "--figure", tmp_path / "all.svg")
    assert [mix["mix"] for mix in report["mixes"]] == ["lowres", "mixres", "joint"]
    assert report["published"] is None
    ET.parse(tmp_path / "all.svg")


def test_ranks_repeat_and_share_devices():
    drawn = drawn_workload("joint", num_devices=64, steps=2, seed=0)
    first = drawn.batches[0]
    assert len(first.lengths) == 178
    # The same kinds of sequences, with draws of their own.
    halves = first.lengths[:89], first.lengths[89:]
    assert not np.array_equal(*halves)
    np.testing.assert_allclose(*(half.sum() for half in halves), rtol=0.1)
    assert first.home.max() == 63
    few = drawn_workload("joint", num_devices=8, steps=1, seed=0).batches[0]
    whole = drawn_workload("joint", num_devices=32, steps=1, seed=0).batches[0]
    np.testing.assert_array_equal(few.home, whole.home // 4)
    np.testing.assert_array_equal(few.lengths, whole.lengths)
    assert not whole.text_lengths.any()
    apart = drawn_workload("joint", num_devices=32, steps=1, seed=0, text_apart=True).batches[0]
    np.testing.assert_array_equal(apart.lengths, whole.lengths)
    assert 0 < apart.text_lengths.max() <= 392


def test_names_of_variants():
    assert variant("none", 8) is NONE
    assert variant("auto", 8) is AUTO
    assert variant("full", 8).name == "g8n1"
    assert variant("g4n1+g2n2", 8).name == "g2n2+g4n1"
