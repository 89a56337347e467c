"""Running the programs on the smallest config, in this process or another, and looking at what they left."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from gin import config as gin_config

from experiments import _loop, train
from experiments._program import run_program
from jaxdit.sampling import _engine
from jaxdit.training import TrainProgram
from tests.processes import free_port

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "tiny.gin"
# Compiling takes most of the time of a tiny run: not optimised, and once for all runs of a test.
QUICK_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
CACHE_SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


# Settings of a run that its compiled programs do not depend on; on data they depend by their capacity only.
NOT_COMPILED = {
    "save_every",
    "keep",
    "log_every",
    "eval_every",
    "sample_every",
    "sample_prompts",
    "on_nonfinite",
    "data",
}
_programs = {}
_runs = {}


def _compiled_config():
    return repr(
        sorted(
            (selector, name, str(value))
            for (_, selector), values in gin_config._CONFIG.items()
            for name, value in values.items()
            if not selector.startswith("data.") and name not in NOT_COMPILED
        )
    )


def _shared(make, kind):
    def made(first, *rest, **options):
        key = (kind, _compiled_config(), str((rest, options)))
        if key not in _programs:
            _programs[key] = make(first, *rest, **options)
        return _programs[key]

    return made


def _shared_by_layout(make, kind):
    """Layouts compare by what is compiled of them; the model is the config's."""

    def made(layout, *rest, **options):
        key = (kind, _compiled_config(), layout)
        if key not in _programs:
            _programs[key] = make(layout, *rest, **options)
        return _programs[key]

    return made


@contextlib.contextmanager
def programs_shared():
    """Runs of one config in this process share what they compile, and compile without optimisation.

    Compiling takes most of the time of a tiny run, and what these tests are about happens around it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("make_train_step", "make_eval_step"):
            patch.setattr(_loop, kind, _shared(getattr(_loop, kind), kind))
        for kind in ("make_start", "make_evaluation", "make_home"):
            patch.setattr(_engine, kind, _shared_by_layout(getattr(_engine, kind), kind))
        fresh = TrainProgram.init_state

        def init_state(self, make_module, loaded=None):
            if loaded:
                return fresh(self, make_module, loaded)
            key = ("init", _compiled_config())
            if key not in _programs:
                state = fresh(self, make_module)
                _programs[key] = jax.tree.map(np.array, state), jax.tree.map(lambda x: x.sharding, state)
            values, shardings = _programs[key]
            # Copies, since the step is given its state for good.
            return jax.tree.map(lambda x, where: jax.device_put(x.copy(), where), values, shardings)

        patch.setattr(TrainProgram, "init_state", init_state)
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", False)


def run(main, *args):
    """The exit code of a program run in this process."""
    return run_program(main, [str(arg) for arg in args])


def bindings(**values):
    """`--set` arguments from keywords whose dots are written as double underscores."""
    return [
        text for name, value in values.items() for text in ("--set", f"{name.replace('__', '.')}={value}")
    ]


def trained_run(tmp_path_factory):
    """A run on one device whose few large steps leave weights that heed the prompt, with grids and validation.

    One for all tests of a process; they leave it as it is.
    """
    if "trained" not in _runs:
        workdir = tmp_path_factory.mktemp("trained") / "run"
        prompts = "['a handwritten one | 16x24', 'a ginger cat | 24x16', 'a cartoon rabbit | 2x16x16']"
        changes = bindings(
            train__num_devices=1,
            train__bags="None",
            train__ema_decay=0.5,
            train__sample_every=3,
            train__sample_prompts=prompts,
            train__eval_every=3,
            quickstart__validation_fraction=0.05,
            adamw__learning_rate=0.03,
        )
        assert run(train.main, "--config", TINY, "--workdir", workdir, *changes) == 0
        _runs["trained"] = workdir
    return _runs["trained"]


def start(program, *args, cache=None):
    """The program started in a process of its own, with a text pipe for each output."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    if cache is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        env.update(CACHE_SETTINGS)
    command = [sys.executable, "-m", f"experiments.{program}", *map(str, args)]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def start_two(program, *args, cache=None):
    """The program started in two processes that work together."""
    address = f"127.0.0.1:{free_port()}"
    together = ("--coordinator", address, "--num-processes", 2, "--heartbeat", 10)
    return [start(program, *args, *together, "--process-id", index, cache=cache) for index in range(2)]


def rows(workdir):
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir):
    """Losses by step; every step must be there once, in order."""
    found = rows(workdir)
    assert [row["step"] for row in found] == list(range(len(found)))
    return [row["loss"] for row in found]


def arrays(workdir, step):
    """The arrays of a checkpoint by name, read without any of the programs' code."""
    folder = (workdir / "checkpoints" / str(step)).absolute()
    names = json.loads((folder / "meta" / "metadata").read_text())["arrays"]
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        return handler.restore(folder / "state", args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def checkpoints(workdir):
    """The steps that have a complete checkpoint."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def interrupted(workdir, target, step):
    """A copy of a run as it was when killed right after the checkpoint of a step."""
    shutil.copytree(workdir, target)
    for later in checkpoints(target):
        if later > step:
            shutil.rmtree(target / "checkpoints" / str(later))
    return target


def snapshot(workdir):
    """Every file of a run with the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in sorted(workdir.rglob("*")) if path.is_file()}
