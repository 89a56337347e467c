"""A process of `bench_links`, on an emulated machine: obeys lines of JSON on stdin, answers each on stdout.

All processes get the same lines and work together. The first answer, without a request, says that all programs are
compiled. The process ends with its stdin.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from experiments._bench_links_network import UPLINK
from experiments._bench_links_variants import (
    Sizes,
    Variant,
    compile_program,
    compiled_bytes,
    dense_attention,
    draw,
    expected,
    largest_error,
    make_mesh,
    place,
    variants,
)
from solver import Topology

# How long another process may take to compile, on a machine that has other things to do.
_PATIENCE_S = 1200


def main() -> None:
    """Serve requests until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--devices-per-machine", type=int, required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    args = parser.parse_args()
    answers = _own_stdout()
    topology = Topology(args.machines, args.devices_per_machine)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        args.coordinator, topology.num_devices, args.process, initialization_timeout=_PATIENCE_S
    )
    programs = Programs(topology, Sizes(**args.sizes))
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        _answer(answers, programs.obey(json.loads(line)))


def _own_stdout() -> TextIO:
    """Standard output for answers alone: what libraries print (gloo does) goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


class Programs:
    """All variants, forward and with the gradient, compiled for all processes together."""

    def __init__(self, topology: Topology, sizes: Sizes) -> None:
        self.topology, self.sizes = topology, sizes
        self.arrays = draw(sizes)
        self.compiled: dict[tuple[str, bool], Any] = {}
        self.inputs: dict[str, list[jax.Array]] = {}
        for variant in variants(topology):
            self._add(variant)
        self.local = self._local()

    def _add(self, variant: Variant) -> None:
        mesh = make_mesh(variant, self.topology, jax.devices())
        self.inputs[variant.name] = place(mesh, self.arrays)
        for backward in (False, True):
            compiled = compile_program(variant, mesh, self.sizes, backward=backward)
            self.compiled[variant.name, backward] = compiled

    def _local(self) -> Any:
        """This device's share of the attention, with nothing to send: some heads of whole sequences."""
        sizes = dataclasses.replace(
            self.sizes, num_heads=max(1, self.sizes.num_heads // self.topology.num_devices)
        )
        rows = [jnp.asarray(x) for x in draw(sizes)[:3]]
        compiled = jax.jit(dense_attention).lower(*rows).compile()
        return lambda: compiled(*rows)

    def obey(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request; all processes have the same one."""
        if request["do"] == "check":
            return self._check()
        if request["do"] == "compute":
            return self._timed(self.local)
        key = request["variant"], request["backward"]
        run, inputs = self.compiled[key], self.inputs[key[0]]
        return self._timed(lambda: run(*inputs))

    def _check(self) -> dict[str, Any]:
        """Of each program the largest error against attention on one device, and the bytes of its collectives."""
        wanted = expected(*self.arrays)
        report = []
        for (name, backward), run in self.compiled.items():
            error = largest_error(run(*self.inputs[name]), wanted)
            num_bytes = compiled_bytes(run, self.topology)
            report.append(
                {"variant": name, "backward": backward, "error": error, "compiled_bytes": num_bytes}
            )
        return {"programs": report}

    def _timed(self, run: Any) -> dict[str, Any]:
        """Clock before and after, which is the same in all processes, and what the machine has sent meanwhile."""
        sent = uplink_bytes()  # before anybody begins
        multihost_utils.sync_global_devices("begin")
        begin = time.monotonic()
        jax.block_until_ready(run())
        end = time.monotonic()
        multihost_utils.sync_global_devices("end")
        return {"begin": begin, "end": end, "sent_bytes": uplink_bytes() - sent}


def uplink_bytes(path: Path = Path("/proc/self/net/dev")) -> int:
    """Bytes that the machine has sent to the switch so far, headers included."""
    for line in path.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == UPLINK:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {UPLINK}: this process does not run on an emulated machine")


if __name__ == "__main__":
    main()
