"""What one-sided kernels of either platform have in common: who is addressed, and when a buffer may be overwritten.

A ring of R devices has R steps. At step s each device attends to the keys of the device s before it, and puts the same
keys into the next device; its own keys are an input, those that arrive lie in one of two slots:

    step                 0          1         2         3   ...
    attends to, sends    own keys   slot 0    slot 1    slot 0
    arrives from behind  slot 0     slot 1    slot 0    slot 1

So what step s puts lands, in the next device, where that one's step s - 1 reads: from step 2 on it must wait until that
step is over there. A semaphore counts such steps ("room"), another the keys that have arrived.
"""

import math
from typing import Any

from jax import lax

from parallel._routes import AxisName


def slot_of_arrival(step: int) -> int:
    """Where the keys lie that a step of the device before puts here."""
    return step % 2


def slot_at_hand(step: int) -> int | None:
    """Where the keys of a step are; None for own keys."""
    return slot_of_arrival(step - 1) if step else None


def puts_keys(step: int, size: int) -> bool:
    """Whether a step sends anything; the last does not."""
    return step < size - 1


def needs_room(step: int) -> bool:
    """Whether what a step puts overwrites something: the next device's keys of the step before."""
    return step >= 2


def gives_room(step: int, size: int) -> bool:
    """Whether the device before puts something where this step's keys were."""
    return step >= 1 and puts_keys(step + 1, size)


def device_id(axis_name: AxisName, index: Any) -> Any:
    """Mesh coordinates of the device that is `index` along the axes, by axis; along others it is this one."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    sizes = [lax.axis_size(axis) for axis in axes]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return {axis: index // stride % size for axis, size, stride in zip(axes, sizes, strides, strict=True)}
