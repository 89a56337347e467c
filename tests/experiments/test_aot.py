"""Dry runs, as far as they go without the CUDA compiler: input, memory by hand, reports."""

import functools
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from experiments import aot
from experiments._aot_compiler import check_xla_flags
from experiments._aot_gpus import Machines, check_machines, gpu_names, load_gpu, parse_machines
from experiments._aot_memory import HandSum, hand_sum
from experiments._aot_program import AbstractRun, Requested
from experiments._aot_remedies import Remedy, does_not_fit_text, remedies
from experiments._aot_report import (
    Analysis,
    collective_report,
    modelled_report,
    parameter_overlap,
    traffic_report,
    work_report,
)
from experiments._aot_text import compare_table, remat_table, report_markdown
from experiments._program import UserError
from jaxdit.training import STACKS
from parallel import DATA_AXES
from tests.experiments._program_cases import TINY, run
from tests.experiments.test_hlo import DATA


def error(capsys, *args):
    """The error line of a program that must end with exit code 2."""
    capsys.readouterr()
    assert run(aot.main, *args) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


FLUX = ("--config", "flux_32xh100", "--topology", "4x8")


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_a_gpu_that_is_not_described(capsys):
    line = error(capsys, *FLUX, "--gpu", "b300")
    assert line == "error: --gpu must be one of a100, h100, h200; got 'b300'."


@pytest.mark.parametrize("text", ["", "8", "4x", "x8", "4x8x2", "0x8", "4x0", "a1x8", "4096x2", "4 x 8"])
def test_topologies_that_are_none(capsys, text):
    line = error(capsys, "--config", "flux_32xh100", "--topology", text)
    assert "--topology is MACHINESxGPUS, such as 4x8" in line


def test_topologies():
    assert parse_machines("4x8") == Machines(4, 8)
    assert parse_machines("4096x1").num_devices == 4096
    assert str(Machines(1, 8)) == "1x8"


def test_topologies_that_are_not_the_configs():
    check_machines(Machines(4, 8), 32, 8)
    check_machines(Machines(4, 8), 32, None)
    with pytest.raises(UserError, match=r"train\.num_devices=32 GPUs; got 8x8, which are 64"):
        check_machines(Machines(8, 8), 32, 8)
    with pytest.raises(UserError, match=r"train\.devices_per_machine=8 GPUs a machine; got 8x4"):
        check_machines(Machines(8, 4), 32, 8)


def test_missing_cuda_wheels_name_the_command(capsys, no_cuda, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    line = error(capsys, *FLUX)
    assert "pip install 'jaxdit[aot]'" in line


def test_flags_that_this_jaxlib_does_not_know(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_age=1 --xla_backend_optimization_level=1")
    line = error(capsys, *FLUX)
    assert "--xla_of_another_age=1" in line
    assert "--xla_backend_optimization_level" not in line
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    check_xla_flags()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--compare", "x.gin", "--remat-policies", "none"), "do not go together"),
        (("--compare-set", "train.seed=1"), "--compare, which is missing"),
        (("--compare", "flux_32xh100"), "got flux_32xh100 twice"),
        (("--remat-policies", ""), "each once, such as none,full; got ''"),
        (("--remat-policies", "none,"), "got 'none,'"),
        (("--remat-policies", "full,full"), "each once"),
        (("--remat-policies", "full,none", "--forward-only"), "sampling keeps nothing"),
    ],
)
def test_options_that_do_not_go_together(args, text):
    with pytest.raises(UserError, match=text):
        aot._variants(aot._parser().parse_args([*FLUX, *args]))


@pytest.fixture
def nothing_compiles(monkeypatch):
    from experiments import _aot_dry_run

    def refuse(*args):
        raise AssertionError("compiled before everything was checked")

    monkeypatch.setattr("experiments._aot_compiler.check_cuda_compiler", lambda: None)
    monkeypatch.setattr(_aot_dry_run, "target_devices", lambda gpu, machines: [])
    monkeypatch.setattr(_aot_dry_run, "data_mesh", lambda devices, shards: None)
    monkeypatch.setattr(_aot_dry_run, "compile_program", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--compare", "missing.gin"), "config file 'missing.gin' not found"),
        (("--compare", "flux_32xh100"), "num_devices=32 GPUs; got 1x4"),
        (("--remat-policies", "full,wrong"), "wrong"),
    ],
)
def test_a_second_program_is_checked_before_the_first_is_compiled(capsys, nothing_compiles, args, text):
    assert text in error(capsys, "--config", TINY, "--topology", "1x4", *args)


def test_a_folder_that_cannot_be_written_is_found_first(capsys, nothing_compiles, tmp_path):
    (tmp_path / "file").touch()
    line = error(capsys, "--config", "missing", "--topology", "1x8", "--out", str(tmp_path / "file"))
    assert "cannot write" in line
    assert "Choose another --out" in line


def test_variants():
    def variants(*args):
        return aot._variants(aot._parser().parse_args([*FLUX, "--set", "train.seed=1", *args]))

    assert variants() == [("flux_32xh100", ["train.seed=1"], "flux_32xh100 train.seed=1")]
    assert variants("--compare", "b.gin")[1] == ("b.gin", [], "b")
    policies = variants("--remat-policies", "none, full")
    assert [v[1][-1] for v in policies] == ["train.remat='none'", "train.remat='full'"]


@pytest.mark.parametrize("name", gpu_names())
def test_described_gpus(name):
    gpu = load_gpu(name)
    assert 80e9 < gpu.memory_bytes < 160e9
    assert gpu.network < gpu.nvlink < gpu.memory_speed < gpu.flop_speed("f32") < gpu.flop_speed("bf16")
    assert gpu.flop_speed("f64") == gpu.flop_speed("f32")
    assert gpu.description.count("{") == gpu.description.count("}")


def abstract_run(*bindings, forward_only=False):
    requested = Requested.load(TINY, list(bindings), forward_only=forward_only)
    settings = requested.settings
    shape = (settings.num_devices // settings.shards, settings.shards)
    return AbstractRun(requested, AbstractMesh(shape, DATA_AXES, axis_types=(AxisType.Auto,) * 2))


@functools.cache
def by_hand(*bindings, forward_only=False):
    """A run of the tiny config and its sum, which several tests look at."""
    run = abstract_run(*bindings, forward_only=forward_only)
    return run, hand_sum(run)


def test_memory_by_hand():
    run, found = by_hand("train.remat=full")
    num_params = sum(x.size for x in jax.tree.leaves(run.state.params))
    assert found.parameters == found.ema == found.gradients == 4 * num_params
    # Two moments, and a few counters.
    assert 0 <= found.optimizer - 8 * num_params < 64
    assert found.whole_layers == 0
    model, capacity = run.requested.settings.model, run.requested.plans.capacity
    rows = capacity.text + capacity.image
    inputs_of_layers = rows * model.width * np.dtype(model.dtype).itemsize * model.depth
    assert found.kept >= inputs_of_layers * capacity.image / rows
    _, sampling = by_hand("train.remat=full", forward_only=True)
    assert sampling.total < found.total
    # The backbone's moving average is what is sampled with.
    assert sampling.ema == 4 * sum(x.size for x in jax.tree.leaves(run.state.ema["backbone"]))
    assert (sampling.parameters, sampling.optimizer, sampling.gradients, sampling.kept) == (0, 0, 0, 0)
    assert found.with_tokens(0.5).kept == found.kept // 2
    assert found.with_tokens(0.5).parameters == found.parameters


def test_memory_by_hand_of_sharded_layers():
    run, found = by_hand("train.remat=full", "train.shards=2", "train.num_devices=2", "train.bags=g2n1")
    _, whole = by_hand("train.remat=full")
    assert whole.parameters / 2 <= found.parameters < whole.parameters
    stacks = run.state.params["backbone"]
    elements = [
        sum(x.size // x.shape[0] for x in jax.tree.leaves(stacks[name]))
        for name in ("double_blocks", "single_blocks")
    ]
    # Of float32 layers: parameters on their way, gradients of two layers, and what is being scattered.
    assert found.whole_layers in [4 * 4 * count for count in elements]
    run, sampling = by_hand(
        "train.remat=full", "train.shards=2", "train.num_devices=2", "train.bags=g2n1", forward_only=True
    )
    # And what is outside of layers, of which a device has half.
    outside = sampling.whole_layers - 2 * 4 * max(elements)
    of_device = sum(
        math.prod(x.sharding.shard_shape(x.shape))
        for name, part in run.state.ema["backbone"].items()
        if name not in STACKS
        for x in jax.tree.leaves(part)
    )
    assert 0 < outside <= 2 * 4 * of_device


def test_sampling_is_the_program_that_makes_pictures():
    guided = abstract_run("sampler.guidance_scale=2.0", forward_only=True)
    plain = abstract_run("sampler.guidance_scale=1.0", forward_only=True)
    runs = guided, plain
    assert [run.sampled.conditions.branches for run in runs] == [2, 1]
    assert guided.requested.plans.requests == plain.requested.plans.requests
    # Image rows of both branches, text of one.
    image, text = (
        [getattr(run.requested.plans.capacity, name) for run in runs] for name in ("home_image", "home_text")
    )
    assert image[0] == 2 * image[1]
    assert text[0] == text[1]
    assert plain.requested.plans.tokens < guided.requested.plans.tokens < 2 * plain.requested.plans.tokens
    assert hand_sum(guided).block > hand_sum(plain).block
    settings, rows = guided.requested.settings, guided.sampled.state.sampler.rows
    assert rows.shape == (settings.num_devices, image[1], settings.model.channels)
    # One evaluation: as many loops over stacks of layers.
    loops = [str(run.traced().jaxpr).count("scan[") for run in runs]
    assert loops[0] == loops[1] > 0


def test_sampling_is_named():
    from experiments._aot_report import program_name

    guided = abstract_run("sampler.guidance_scale=2.0", forward_only=True)
    assert program_name(guided.requested) == "sampling, one evaluation, guidance 2"
    plain = abstract_run("sampler.guidance_scale=1.0", forward_only=True)
    assert program_name(plain.requested) == "sampling, one evaluation"
    assert program_name(abstract_run().requested) == "training step"


def test_policies_keep_more_or_less():
    full, attention, everything = (
        by_hand(f"train.remat={name}")[1].kept for name in ("full", "attention", "'none'")
    )
    assert full < attention < everything


def test_remedies_are_evaluated():
    run, hand = by_hand("train.remat='none'")
    by_text = {r.text: r for r in remedies(run, hand, hand.total, hand.total - 1)}
    assert len(by_text) == 3
    less = by_text["train.remat=full"]
    assert less.fits
    assert less.peak_bytes < hand.total
    assert not any(r.fits for r in by_text.values() if r.peak_bytes >= hand.total)
    full, hand = by_hand("train.remat=full")
    first = remedies(full, hand, hand.total, hand.total - 1)[0]
    assert str(first) == "train.remat=full: set already"
    sampling, hand = by_hand("train.remat=full", forward_only=True)
    shards, tokens = remedies(sampling, hand, hand.total, hand.total - 1)
    assert "train.shards" in shards.text
    assert tokens.peak_bytes < hand.total


def test_what_does_not_fit_is_told():
    text = does_not_fit_text(
        "H100",
        90_000_000_000,
        80_000_000_000,
        [
            Remedy(*each, 80 * 10**9)
            for each in (("a=1", 60 * 10**9), ("b=2", 85 * 10**9), ("c=3", 79 * 10**9))
        ],
    )
    assert "too much" in text
    assert "a=1" in text.partition("b=2")[0]
    assert text.count("does not fit") == 1
    # The arithmetic is not that exact.
    assert "c=3: 79 GB, may fit" in text
    assert "\n" not in text


def test_a_plan_says_how_often_attention_turns():
    plans = abstract_run().requested.plans
    blocks = np.asarray(plans.tables.attention[0].key_blocks)
    assert 0 < plans.block_visits <= blocks.max()
    assert plans.tokens > 0


@pytest.fixture(scope="module")
def report():
    analysis = Analysis.of((DATA / "fsdp.hlo").read_text(), per_machine=4, trips=1.0, block=128)
    hand = HandSum(*range(10**9, 10**10, 10**9))
    memory = {
        "gpu_bytes": 85 * 10**9,
        "pool_bytes": 60 * 10**9,
        "peak_bytes": 44 * 10**9,
        "fits": True,
        "fits_default_pool": True,
        "headroom_bytes": 41 * 10**9,
        "temporaries": [{"what": "gradients", "bytes": 10**9, "largest": [{"shape": "f32[2]", "bytes": 8}]}],
        "by_hand": {name: getattr(hand, name) for name in hand.__slots__} | {"total": hand.total},
    }
    return {
        "config": "recorded",
        "label": "recorded",
        "program": "training step",
        "gpu": "H100",
        "topology": "2x4",
        "settings": {
            "parameters": 1,
            "shards": 8,
            "remat": "full",
            "bags": None,
            "tokens": 2048,
            "rows_per_device": 256,
        },
        "memory": memory,
        "work": work_report(analysis),
        "collectives": [collective_report(c) for c in analysis.collectives],
        "traffic": traffic_report(analysis.collectives),
        "modelled": modelled_report(analysis, load_gpu("h100")),
    }


def test_a_report_is_plain_and_says_what_is_scheduled(report):
    assert json.loads(json.dumps(report)) == report
    assert parameter_overlap(report) == {
        "all-gather": {"in_loops": 2, "overlapped": 2},
        "reduce-scatter": {"in_loops": 1, "overlapped": 1},
    }
    # The first gather and the last reduce-scatter of the step stand alone.
    assert len(report["traffic"]["nothing_under"]) == 2
    page = report_markdown(report, {"Memory": "memory.png"})
    assert "fits: 44.00 GB of 85.00 GB, 41.00 GB free." in page
    assert "scheduled and not measured" in page
    assert "never measured" in page
    assert "![Memory](memory.png)" in page
    assert "| reduce-scatter" in page


def test_reports_side_by_side(report):
    other = {**report, "label": "other", "settings": {**report["settings"], "remat": "none"}}
    lines = compare_table([report, other]).splitlines()
    assert "recorded" in lines[0]
    assert "other" in lines[0]
    assert len({line.count("|") for line in lines}) == 1
    assert "none" in remat_table([report, other])


def test_figures_of_a_report(report, tmp_path):
    from experiments._aot_figures import save_figures

    names = save_figures(report, tmp_path, "page")
    assert len(names) == 3
    for name in names.values():
        assert (tmp_path / name).stat().st_size > 2000


def test_shipped_flux_must_fit_and_overlap():
    from experiments.aot_shipped import check_flux

    counts = {"all-gather": {"in_loops": 4, "overlapped": 4}}
    good = {
        "config": "flux_32xh100",
        "program": "training step",
        "fits": True,
        "peak_bytes": 1,
        "parameter_traffic_overlapped": counts,
    }
    check_flux([good, {**good, "config": "other", "fits": False}])
    with pytest.raises(UserError, match="must fit"):
        check_flux([{**good, "fits": False}])
    bad = {"all-gather": {"in_loops": 4, "overlapped": 3}}
    with pytest.raises(UserError, match="got 3 of 4"):
        check_flux([{**good, "parameter_traffic_overlapped": bad}])


def test_compiler_options_of_a_gpu_are_its_own(monkeypatch):
    from experiments import _platform

    monkeypatch.setattr(_platform, "_known_to_compiler", lambda mesh, items: True)
    mesh = SimpleNamespace(devices=np.array([[SimpleNamespace(platform="gpu")]]))
    assert _platform.compiler_options(mesh) == _platform._CUDA_OPTIONS
    mesh.devices.flat[0].platform = "tpu"
    assert _platform.compiler_options(mesh) is None
