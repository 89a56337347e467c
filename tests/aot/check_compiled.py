"""What the CUDA compiler makes of the training step: needs JAX's CUDA wheels and no GPU; `make aot` runs it.

Not collected by pytest (its name): `python -m pytest tests/aot/check_compiled.py`.
"""

import pytest

from experiments._aot_dry_run import DryRun
from experiments._aot_gpus import gpu_names, load_gpu, parse_machines
from experiments._aot_report import Target, parameter_overlap
from experiments._program import UserError

# FLUX.1's structure at a size that compiles in a moment.
SMALL = [
    "synthetic.codes='g1b2i256f1s0,g1b1i256f2s0,g2b1i256f1s0'",
    "synthetic.text_channels=64",
    "synthetic.pooled_channels=32",
    "synthetic.max_text=64",
    "text_to_image.text_channels=64",
    "text_to_image.pooled_channels=32",
    "text_to_image.width=512",
    "text_to_image.num_heads=8",
    "text_to_image.axes_dim=[16, 24, 24]",
    "text_to_image.num_double_blocks=3",
    "text_to_image.num_single_blocks=4",
    "train.num_devices=4",
    "train.devices_per_machine=2",
    "train.bags='g2n2'",
    "train.lookahead=4",
    "train.allow_oversized=True",
]


def dry_run(*changes, topology="2x2", gpu="h100", forward_only=False):
    target = Target(load_gpu(gpu), parse_machines(topology))
    compiler = DryRun(target, forward_only)
    return compiler.report(compiler.prepared("flux_32xh100", [*SMALL, *changes]), "small")


@pytest.fixture(scope="module")
def sharded():
    return dry_run("train.shards=4")


@pytest.fixture(scope="module")
def hybrid():
    return dry_run("train.shards=2")


def test_parameters_travel_under_compute(sharded):
    counts = parameter_overlap(sharded)
    # Two stacks, forward and backward; and the gradients of each.
    assert counts["all-gather"]["in_loops"] == 4
    assert counts["reduce-scatter"]["in_loops"] == 2
    in_loops = [c for c in sharded["collectives"] if c["kind"] in counts and c["count"] > 1]
    # Products or kernels; or, in a model as small as this one, as much other work as the collective carries.
    assert all(c["under_flops"] or c["under_bytes"] >= c["bytes"] for c in in_loops)
    assert sum(c["under_flops"] > 0 for c in in_loops) >= len(in_loops) - 1


def test_half_of_the_exchanges_of_two_head_groups_run_under_attention(sharded):
    def exchanges(report):
        return [c for c in report["collectives"] if c["kind"] == "ragged-all-to-all" and c["innermost"]]

    two = exchanges(dry_run("train.shards=4", "train.head_groups=2"))
    assert len(two) == 2 * len(exchanges(sharded))
    assert sum(c["overlapped"] for c in two) >= len(two) / 2


def test_hybrid_sharding_gathers_inside_machines(hybrid, sharded):
    def across(report, kind):
        return sum(c["across_bytes"] for c in report["collectives"] if c["kind"] == kind)

    assert across(sharded, "all-gather") > 0
    assert across(hybrid, "all-gather") == 0
    assert across(hybrid, "reduce-scatter") == 0
    # Gradients cross once, reduced and in float32; those of layers under the backward pass of other layers.
    assert across(hybrid, "all-reduce") > across(sharded, "all-reduce")
    in_loops = [c for c in hybrid["collectives"] if c["kind"] == "all-reduce" and c["count"] > 1]
    assert len(in_loops) == 2
    assert all(c["overlapped"] for c in in_loops)


def test_gradients_are_reduced_in_float32(sharded):
    gathers, scatters = (
        sum(c["bytes"] * c["count"] for c in sharded["collectives"] if c["kind"] == kind and c["count"] > 1)
        for kind in ("all-gather", "reduce-scatter")
    )
    # bfloat16 twice, forward and backward, against float32 once.
    assert scatters == pytest.approx(gathers, rel=0.01)


def test_memory_is_that_of_the_buffers(sharded):
    memory = sharded["memory"]
    at_peak = sum(group["bytes"] for group in memory["temporaries"])
    # What is live at the peak; the rest of the allocation are gaps between buffers.
    assert 0.9 * memory["temporaries_bytes"] < at_peak <= memory["temporaries_bytes"]
    assert memory["fits"]


@pytest.mark.parametrize("gpu", [name for name in gpu_names() if name != "h100"])
def test_every_described_gpu_compiles(gpu):
    report = dry_run("train.shards=4", gpu=gpu)
    assert report["work"]["flops"] > 0
    assert report["modelled"]["step_s"] > 0


@pytest.fixture(scope="module")
def sampling():
    return dry_run("train.shards=4", forward_only=True)


def test_sampling_is_one_evaluation(sampling, sharded):
    layers = {3, 4}
    gathers = [c for c in sampling["collectives"] if c["kind"] == "all-gather" and c["innermost"]]
    # The first layer's parameters are gathered before each loop over layers.
    assert {c["count"] for c in gathers} <= layers | {n - 1 for n in layers}
    assert len(gathers) == 2
    exchanges = [c for c in sampling["collectives"] if c["kind"] == "ragged-all-to-all" and c["innermost"]]
    assert {c["count"] for c in exchanges} == layers
    assert parameter_overlap(sampling)["all-gather"] == {"in_loops": 2, "overlapped": 2}
    # A training step runs the model forward, again for rematerialisation, and backward at twice the cost.
    assert sampling["work"]["flops"] == pytest.approx(sharded["work"]["flops"] / 4, rel=0.25)


def test_guidance_computes_both_branches_at_once(sampling):
    guided = dry_run(
        "train.shards=4", "train.sampler=@sampler()", "sampler.guidance_scale=3.0", forward_only=True
    )
    assert guided["program"] == "sampling, one evaluation, guidance 3"
    assert 1.5 < guided["work"]["flops"] / sampling["work"]["flops"] < 2.0
    gathered = [
        sum(c["bytes"] * c["count"] for c in r["collectives"] if c["kind"] == "all-gather" and c["innermost"])
        for r in (guided, sampling)
    ]
    # Parameters are gathered once for both.
    assert gathered[0] == gathered[1]


def test_sampling_holds_the_moving_average_alone(sampling, sharded):
    by_hand, of_training = sampling["memory"]["by_hand"], sharded["memory"]["by_hand"]
    assert by_hand["ema"] == of_training["ema"]
    assert by_hand["parameters"] == by_hand["optimizer"] == by_hand["gradients"] == 0
    assert sampling["memory"]["arguments_bytes"] < by_hand["ema"] + by_hand["inputs"] + 1024


def test_topology_that_the_config_does_not_have():
    with pytest.raises(UserError, match=r"num_devices=4 GPUs; got 1x8"):
        dry_run(topology="1x8")
