"""Which machine a device belongs to."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from solver._check import MOST_DEVICES, integer


@dataclass(frozen=True, slots=True)
class Topology:
    """Machines of equally many devices, numbered consecutively: machine of device i = i //
    devices_per_machine.

    Args:
        num_machines: how many machines.
        devices_per_machine: devices in each.

    Raises:
        TypeError: either is no integer.
        ValueError: either is below 1, or there are more than 8,192 devices.

    Example:
        >>> topology = Topology(num_machines=2, devices_per_machine=4)
        >>> topology.num_devices, topology.machine_of(5)
        (8, 1)
    """

    num_machines: int
    devices_per_machine: int

    def __post_init__(self) -> None:
        advice = "A single host is Topology(1, number of its devices)."
        for name in ("num_machines", "devices_per_machine"):
            value = integer("Topology", name, getattr(self, name), most=MOST_DEVICES, advice=advice)
            object.__setattr__(self, name, value)
        integer("Topology", "num_devices", self.num_devices, most=MOST_DEVICES, advice=advice)

    @property
    def num_devices(self) -> int:
        """Devices over all machines."""
        return self.num_machines * self.devices_per_machine

    def machine_of(self, device: int | Int[np.ndarray, "..."]) -> int | Int[np.ndarray, "..."]:
        """Machine of each device number, from 0; an array gives an array."""
        return device // self.devices_per_machine
