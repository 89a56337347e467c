"""From a config to the report of its compiled program."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments._aot_compiler import target_devices
from experiments._aot_gpus import check_machines
from experiments._aot_memory import HandSum, hand_sum
from experiments._aot_program import AbstractRun, Requested, compile_program
from experiments._aot_remedies import does_not_fit_text, remedies
from experiments._aot_report import Target, build_report
from experiments._program import UserError, checking
from parallel import data_mesh

_LOG = logging.getLogger(__name__)


@dataclass
class DryRun:
    """Compiles configs for one target, and remembers what it compiled.

    Attributes:
        target: GPUs and machines.
        forward_only: sampling instead of the training step.
    """

    target: Target
    forward_only: bool = False
    _runs: dict[str, tuple[AbstractRun, HandSum]] = field(default_factory=dict)

    def prepared(self, config: str, bindings: Sequence[str]) -> AbstractRun:
        """The run of a config with bindings, checked, and not yet compiled.

        Raises:
            UserError: for settings that no run can have, or that are not for the target's machines.
        """
        machines = self.target.machines
        requested = Requested.load(
            config, list(bindings), of_a_machine=machines.gpus, forward_only=self.forward_only
        )
        settings = requested.settings
        check_machines(machines, settings.num_devices, settings.devices_per_machine)
        with checking():
            mesh = data_mesh(target_devices(self.target.gpu, self.target.machines), shards=settings.shards)
        return AbstractRun(requested, mesh)

    def report(self, run: AbstractRun, label: str) -> dict[str, Any]:
        """Compile a run's program and report of it."""
        _LOG.info("%s: tracing for %s %s", label, self.target.machines, self.target.gpu.title)
        hand = hand_sum(run)
        compiled = compile_program(run)
        self._runs[label] = (run, hand)
        report = build_report(run, self.target, compiled, hand)
        return {**report, "label": label}

    def check_fits(self, report: dict[str, Any]) -> None:
        """Refuse a program that does not fit.

        Raises:
            UserError: by how much, and which cheaper settings would fit.
        """
        memory = report["memory"]
        if memory["fits"]:
            return
        run, hand = self._runs[report["label"]]
        found = remedies(run, hand, memory["peak_bytes"], memory["gpu_bytes"])
        raise UserError(
            does_not_fit_text(self.target.gpu.title, memory["peak_bytes"], memory["gpu_bytes"], found)
        )
