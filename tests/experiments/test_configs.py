"""Every shipped config: large ones by tracing and by the layout they request, all by one tiny step."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from experiments import train
from experiments._aot_program import AbstractRun, Requested
from experiments._config import CONFIG_DIR
from jaxdit.models import MMDiTConfig
from jaxdit.training import bytes_per_device, make_train_step
from jaxdit.weights import abstract_params, save_params
from parallel import DATA_AXES
from tests.experiments._data_cases import save_encoded, save_image
from tests.experiments._program_cases import bindings, losses, programs_shared, run

TINY_SIZES = {
    "quickstart": {
        "train__sample_prompts": "[]",
        "quickstart__token_budget": 1400,
        "quickstart__patch": 8,
        "quickstart__validation_fraction": 0.0,
        "text_to_image__channels": 192,
        "text_to_image__width": 32,
        "text_to_image__num_heads": 2,
        "text_to_image__axes_dim": "[4, 6, 6]",
        "text_to_image__num_double_blocks": 1,
        "text_to_image__num_single_blocks": 1,
        "train__num_devices": 1,
        "train__bags": "g1n1",
        "train__lookahead": 4,
    },
    "flux_32xh100": {
        "train__num_devices": 2,
        "train__devices_per_machine": 1,
        "train__bags": "g2n1",
        "train__shards": 2,
        "train__lookahead": 4,
        "synthetic__codes": "g1b2i64f1s0,g1b1i32f4s0",
        "synthetic__text_channels": 16,
        "synthetic__pooled_channels": 16,
        "synthetic__max_text": 20,
        "text_to_image__text_channels": 16,
        "text_to_image__pooled_channels": 16,
        "text_to_image__width": 64,
        "text_to_image__num_heads": 2,
        "text_to_image__axes_dim": "[8, 12, 12]",
        "text_to_image__num_double_blocks": 2,
        "text_to_image__num_single_blocks": 2,
    },
    "folder": {
        "train__sample_prompts": "[]",
        "train__num_devices": 1,
        "train__bags": "g1n1",
        "train__lookahead": 1,
        "folder__token_budget": 64,
        "folder__max_tokens": 32,
        "folder__validation_fraction": 0.0,
        "text_to_image__width": 32,
        "text_to_image__num_heads": 2,
        "text_to_image__axes_dim": "[4, 6, 6]",
        "text_to_image__num_double_blocks": 1,
        "text_to_image__num_single_blocks": 1,
        "text_to_image__compute_dtype": "float32",
    },
    "flux_lora": {
        "train__num_devices": 2,
        "train__bags": "g2n1",
        "train__shards": 2,
        "train__lookahead": 2,
        "encoded__token_budget": 64,
        "text_to_image__channels": 16,
        "text_to_image__text_channels": 6,
        "text_to_image__pooled_channels": 5,
        "text_to_image__width": 64,
        "text_to_image__num_heads": 2,
        "text_to_image__axes_dim": "[8, 12, 12]",
        "text_to_image__num_double_blocks": 1,
        "text_to_image__num_single_blocks": 2,
    },
    "dit_xl_2": {
        "train__num_devices": 1,
        "train__bags": "g1n1",
        "train__shards": 1,
        "train__lookahead": 4,
        "synthetic__codes": "g1b2i64f1s0,g1b1i128f1s0",
        "class_to_image__name": "DiT-S/2",
    },
}


_CONFIGS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.full] * (path.stem in ("flux_lora", "dit_xl_2")))
    for path in sorted(CONFIG_DIR.glob("*.gin"))
]


@pytest.mark.parametrize("path", _CONFIGS)
def test_one_tiny_step(path, tmp_path, monkeypatch):
    # What is saved and how is tested elsewhere; the smallest published DiT has half a gigabyte of it.
    monkeypatch.setattr("experiments._checkpoint.Checkpoints.save", lambda *args: True)
    sizes = bindings(train__steps=1, **TINY_SIZES[path.stem])
    if path.stem == "folder":
        for i in range(3):
            save_image(tmp_path / "pictures" / f"{i}.png", 64, 48 + 16 * i)
            (tmp_path / "pictures" / f"{i}.txt").write_text("a gradient")
        sizes += bindings(folder__root=tmp_path / "pictures")
    if path.stem == "flux_lora":
        for i in range(3):
            save_encoded(tmp_path / "latents" / f"{i}.safetensors", height=4, width=6 + 2 * i, tokens=i)
        config = MMDiTConfig(
            in_channels=16,
            text_channels=6,
            pooled_channels=5,
            width=64,
            num_heads=2,
            num_double_blocks=1,
            num_single_blocks=2,
            axes_dim=(8, 12, 12),
            guidance_embed=True,
        )
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract_params(config))
        save_params(tmp_path / "weights", zeros, config)
        sizes += bindings(encoded__root=tmp_path / "latents", train__init_from=tmp_path / "weights")
    with programs_shared():
        assert run(train.main, "--config", path, "--workdir", tmp_path / "run", *sizes) == 0
    (loss,) = losses(tmp_path / "run")
    assert math.isfinite(loss)


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.gin")), ids=lambda path: path.stem)
def test_headers_say_how_and_what_for(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(header) >= 2
    assert any("experiments.train" in line for line in header)


LOOKAHEAD = 16


def requested_run(name, *changes):
    """What a config asks for, on devices that are not here."""
    requested = Requested.load(name, [f"train.lookahead={LOOKAHEAD}", *changes])
    settings = requested.settings
    shape = (settings.num_devices // settings.shards, settings.shards)
    return AbstractRun(requested, AbstractMesh(shape, DATA_AXES, axis_types=(AxisType.Auto,) * 2))


def num_params(run):
    return sum(x.size for x in jax.tree.leaves(run.state.params))


def state_bytes(run, copies):
    return bytes_per_device(
        run.state.params, run.program.trained_axes, run.requested.settings.shards, copies=copies
    )


def steps(run):
    return [run.requested.data.train.step(t) for t in range(LOOKAHEAD)]


def assert_step_keeps_the_state(run):
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    step = make_train_step(run.program, run.requested.plans.capacity)
    state, metrics = jax.eval_shape(step, run.state, run.inputs, key)
    want = jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), run.state)
    assert jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), state) == want
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.params))
    assert (metrics.loss.shape, metrics.loss.dtype) == ((), np.float32)


def test_flux_on_32_h100():
    run = requested_run("flux_32xh100")
    assert num_params(run) == 11_901_408_320
    # 11.90e9 parameters x 4 bytes x 5 arrays / 32 devices; what does not divide (small biases, norms) is replicated.
    assert state_bytes(run, 5) == pytest.approx(11_901_408_320 * 4 * 5 / 32, rel=2e-3)
    assert run.requested.settings.model.dtype == np.dtype("bfloat16")
    assert_step_keeps_the_state(run)

    hybrid = requested_run("flux_32xh100", "train.shards=8")
    assert state_bytes(hybrid, 5) == pytest.approx(29.75e9, rel=2e-3)


def test_layout_of_flux_on_32_h100():
    run = requested_run("flux_32xh100")
    capacity, planner = run.requested.plans.capacity, run.requested.planner
    assert planner.topology.num_machines == 4
    for index in steps(run):
        assert len(index.lengths) == 89
        assert index.home_rank is not None
        assert set(index.home(32).tolist()) == set(range(32))
        plan = planner.plan(index, planner.bags)
        # Attention moves hardly a row between machines, and loads are within two percent.
        assert plan.rows_across_machines.sum() <= 0.01 * index.lengths.sum() * 24
        assert plan.load.max() / plan.load.mean() < 1.02
        before = planner.plan(index, None)
        assert before.load.max() / before.load.mean() > 2
    tokens = max(int(index.lengths.sum()) for index in steps(run))
    # Rows of the token layout are at most a sixth above an even share of the fullest step.
    assert tokens / 32 <= capacity.text + capacity.image <= tokens / 32 * 1.16
    # (token, head) rows of a 24-head model. Devices with short sequences hold more of them for the same attention.
    assert capacity.query_rows >= tokens / 32 * 24
    assert capacity.query_rows <= tokens / 32 * 24 * 1.6
    # bf16 q, k, v and o of those rows, 128 channels each, once.
    assert capacity.query_rows * 128 * 2 * 4 < 0.5e9


def test_dit_xl_2():
    run = requested_run("dit_xl_2")
    # The published 675,129,632 without the table of 256 positions, which is computed for any size here.
    assert num_params(run) == 675_129_632 - 256 * 1152
    assert state_bytes(run, 5) == pytest.approx(674_834_720 * 4 * 5 / 8, rel=0.02)
    assert run.requested.data.train.sources[0].labels.max() == 999
    assert_step_keeps_the_state(run)
    index = run.requested.data.train.step(0)
    assert not index.text_lengths.any()
    assert index.dropped.any()
    assert 245 <= index.lengths.min() <= 266
    assert 983 <= index.lengths.max() <= 1065
    assert run.requested.plans.capacity.image >= index.lengths.sum() / 8
