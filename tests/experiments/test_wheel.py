"""The wheel: four packages and their configs, no tests; two of them live on the declared dependencies alone."""

import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from tests.experiments._program_cases import ROOT

SOLVER = """
import sys, numpy as np, solver
plan = solver.balance([100, 7, 900, 30], [0, 0, 1, 3], num_devices=4, bags="g2n2")
assert plan.load.shape == (4,)
assert plan.tokens.sum() == 1037
assert "jax" not in sys.modules
"""
PARALLEL = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import parallel
assert parallel.data_mesh(shards=2).shape == {"replica": 2, "shard": 2}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source") / "tree"
    # A copy: what an earlier build left would get into the wheel, and this one would leave something.
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, source, ignore=unwanted)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.full
def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if "dist-info" not in name}
    assert packages == {"solver", "parallel", "jaxdit", "experiments"}
    for package in packages:
        assert f"{package}/py.typed" in names
    shipped = {path.name for path in (ROOT / "experiments" / "configs").glob("*.gin")}
    assert {name.split("/")[-1] for name in names if name.endswith(".gin")} == shipped
    gpus = {path.name for path in (ROOT / "experiments" / "gpus").iterdir()}
    assert {name.split("/")[-1] for name in names if name.startswith("experiments/gpus/")} == gpus
    assert "experiments/pages/plan.html" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("test" in name for name in names)
    sources = {str(path.relative_to(ROOT)) for p in packages for path in (ROOT / p).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


@pytest.mark.full
def test_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True, timeout=900)
    for script in (SOLVER, PARALLEL):
        done = subprocess.run(
            [python, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
    absent = subprocess.run([python, "-c", "import flax"], capture_output=True, timeout=60)
    assert absent.returncode != 0
