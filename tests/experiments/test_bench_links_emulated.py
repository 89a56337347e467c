"""Runs of `bench_links` on emulated machines, where that can be done: as root, with iproute2."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import _bench_links_network as network
from experiments._program import UserError

CAN_EMULATE = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CAN_EMULATE, reason="making network namespaces needs root and iproute2 (ip, tc)"),
]
START = [sys.executable, "-m", "experiments.bench_links", "--quick", "--machines", "2x1"]


def assert_nothing_is_left():
    assert "jaxdit-links" not in network.run(["ip", "netns", "list"])
    assert not list(Path("/etc/netns").glob("jaxdit-links-*"))


def test_what_an_earlier_run_left_is_removed():
    network.run(["ip", "netns", "add", network.machine_name(7)])
    (Path("/etc/netns") / network.machine_name(7)).mkdir(parents=True)
    with network.Network(2, shared=True) as machines:
        assert set(network.existing()) == {network.SWITCH, network.machine_name(0), network.machine_name(1)}
        machines.limit(50)
        with (
            pytest.raises(UserError, match="another run emulates machines here"),
            network.Network(2, shared=True),
        ):
            pass
    assert_nothing_is_left()


def test_quick_run_on_emulated_machines(tmp_path):
    figures, out = tmp_path / "figures.json", tmp_path / "benchmarks.md"
    command = [*START, "--json", str(figures), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in out.read_text()
    (machines,) = json.loads(figures.read_text())["machines"]
    assert len(machines["programs"]) == 6
    for program in machines["programs"]:
        assert program["compiled_bytes"] == program["formula_bytes"]
        assert program["formula_bytes"] < program["sent_bytes"]
        assert 0 < program["error"] < 1e-5
    assert_nothing_is_left()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_nothing(how):
    with subprocess.Popen(START, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        try:
            wait_for(lambda: len(pids_on_machines()) >= 2)
            workers = pids_on_machines()
        finally:
            run.send_signal(how)
        assert run.wait(60) == (130 if how == signal.SIGTERM else -how)
    wait_for(lambda: "jaxdit-links" not in network.run(["ip", "netns", "list"]))
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").is_file() for pid in workers))
    assert_nothing_is_left()


def pids_on_machines():
    machines = [name for name in network.existing() if name != network.SWITCH]
    return [pid for name in machines for pid in network.run(["ip", "netns", "pids", name]).split()]


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
