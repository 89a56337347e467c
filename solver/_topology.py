"""Which machine a device belongs to."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, slots=True)
class Topology:
    """Machines of equally many devices, numbered consecutively: machine of device i = i //
    devices_per_machine.

    Args:
        num_machines: how many machines.
        devices_per_machine: devices in each.

    Raises:
        ValueError: either is below 1.
    """

    num_machines: int
    devices_per_machine: int

    def __post_init__(self) -> None:
        if self.num_machines < 1 or self.devices_per_machine < 1:
            raise ValueError(
                "Topology: num_machines >= 1 and devices_per_machine >= 1; got "
                f"num_machines={self.num_machines}, devices_per_machine={self.devices_per_machine}. "
                "A single host is Topology(1, number of its devices)."
            )

    @property
    def num_devices(self) -> int:
        """Devices over all machines."""
        return self.num_machines * self.devices_per_machine

    def machine_of(self, device: int | Int[np.ndarray, "..."]) -> int | Int[np.ndarray, "..."]:
        """Machine of each device number; an array gives an array."""
        return device // self.devices_per_machine
