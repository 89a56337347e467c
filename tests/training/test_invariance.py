"""The same losses and gradients whatever the devices, the plan, the sharding and the processes."""

import json

import jax
import numpy as np
import pytest

from tests.processes import free_port, run_together
from tests.training_case import ALL_BAGS, NUM_STEPS, Case, Trace, assert_same_run, shared_capacity


@pytest.fixture(scope="module", autouse=True)
def _quick():
    # What is compared is what the programs compute, and compiling them takes nearly all of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def alone() -> Case:
    return Case(1, 1, shared_capacity(1, [None]))


@pytest.fixture(scope="module")
def one_device(alone) -> Trace:
    return alone.run(None)


@pytest.fixture(scope="module")
def eight_devices() -> Case:
    return Case(8, 1, shared_capacity(8, ALL_BAGS))


@pytest.fixture(scope="module")
def sharded() -> Case:
    return Case(8, 8, shared_capacity(8, ALL_BAGS))


@pytest.mark.parametrize("bags", ALL_BAGS)
def test_plans_change_nothing_but_the_place(one_device, eight_devices, bags):
    trace = eight_devices.run(bags)
    assert_same_run(trace, one_device)
    # One executable runs data parallelism, Ulysses over all devices, and bags of any sizes at once.
    assert trace.num_compiled == 1


@pytest.mark.parametrize("bags", [None, "g1n2+g2n1+g4n1"])
def test_sharded_parameters_change_nothing(one_device, sharded, bags):
    assert_same_run(sharded.run(bags), one_device)


@pytest.mark.full
def test_hybrid_sharding_changes_nothing(one_device):
    assert_same_run(Case(8, 4, shared_capacity(8, ["g2n4"])).run("g2n4"), one_device)


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [2, 4, 6])
def test_other_numbers_of_devices(one_device, num_devices):
    bags = f"g{num_devices}n1"
    assert_same_run(Case(num_devices, 1, shared_capacity(num_devices, [bags])).run(bags), one_device)


def test_micro_batches_weigh_as_one_batch(alone, eight_devices):
    capacity = shared_capacity(8, ["g2n4"])
    accumulated = Case(8, 1, capacity, micro_batches=2, initial=eight_devices.initial).run("g2n4", 2)
    together = alone.evaluate([0, 1])
    np.testing.assert_allclose(accumulated.losses, [together], rtol=1e-5)


def test_two_processes(one_device, tmp_path):
    command = ["-m", "tests.training.two_process_worker", free_port()]
    env = {"NPROC": "32", "JAX_PLATFORMS": "cpu"}
    workers = run_together([[*command, i, tmp_path] for i in range(2)], timeout=300, env=env)
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr[-2000:]
    stored = np.load(tmp_path / "trace.npz")
    names = json.loads((tmp_path / "names.json").read_text())
    tree = jax.tree.structure(one_device.gradients)
    gradients = jax.tree.unflatten(tree, [stored[name] for name in names])
    assert len(stored["losses"]) == NUM_STEPS
    assert_same_run(Trace(stored["losses"], gradients, 1), one_device)
