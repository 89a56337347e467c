"""What the programs ask of XLA, of malloc, and of the other processes."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from experiments import _components, _platform
from experiments._config import UserError, load_config
from experiments._run import Run
from experiments._run_data import open_data
from parallel import data_mesh
from tests.experiments._program_cases import TINY


def test_this_xla_knows_the_options_that_make_virtual_devices_fast():
    options = _platform.compiler_options(data_mesh(jax.devices()[:2], shards=1))
    assert options == _platform._CPU_OPTIONS


def test_options_that_xla_does_not_know_are_left_out_aloud(monkeypatch, caplog):
    monkeypatch.setattr(_platform, "_CPU_OPTIONS", {"xla_cpu_of_another_age": True})
    _platform._known_to_compiler.cache_clear()
    try:
        assert _platform.compiler_options(data_mesh(jax.devices()[:1], shards=1)) is None
    finally:
        _platform._known_to_compiler.cache_clear()
    assert "does not know the options {'xla_cpu_of_another_age': True}" in caplog.text


def test_processes_that_are_given_different_things_are_told(monkeypatch):
    load_config(TINY, [])
    settings = _components.train()
    data = open_data(settings)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_platform, "needs_padded_exchange", lambda mesh: True)
    seen = []

    def gather(mine):
        seen.append(mine)
        return np.stack([seen[0], mine])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    mesh = data_mesh(jax.devices()[: settings.num_devices], shards=1)
    Run.make(settings, mesh, data)
    load_config(TINY, ["train.steps=7", "quickstart.token_budget=1500"])
    settings = _components.train()
    with pytest.raises(UserError, match="their training data and settings differ"):
        Run.make(settings, mesh, open_data(settings))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_ON_NODE": "8"}, list(range(8))),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "2"}, [0, 1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_GPUS_ON_NODE": "8"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),4", "SLURM_GPUS_ON_NODE": "8"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, None),
        (
            {
                "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
                "SLURM_GPUS_ON_NODE": "8",
                "JAX_LOCAL_DEVICE_IDS": "0,1",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_a_task_alone_on_its_machine_takes_all_its_gpus(monkeypatch, environment, expected):
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: asked.update(options))
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    _platform.prepare_platform(8, _platform.ProcessSettings(cluster=True))
    assert asked["local_device_ids"] == expected
