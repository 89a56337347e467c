"""Meshes for sequence-parallel attention: which devices exchange heads, which pass keys on, and over which links.

Machines are cut into ulysses_across x ring_across, the devices of each into ulysses_inside x ring_inside, and what is
left of both is the data axis:

    usp_attention(..., ulysses_axis=ULYSSES_AXES, ring_axis=RING_AXES)            # any placement
    torus_attention(..., machine_axis=ULYSSES_AXES[0], ulysses_axis=ULYSSES_AXES[1], ring_axis=RING_AXES)

`sequence_attention` fills these axes in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from parallel._check import device_list, integer, kind

SEQUENCE_DATA_AXIS = "data"
# Across machines, and inside one.
ULYSSES_AXES = ("ulysses_across", "ulysses_inside")
RING_AXES = ("ring_across", "ring_inside")


class Placement(Enum):
    """Which links the exchange of heads takes; keys are passed on over the others.

    Attributes:
        ULYSSES_INSIDE: as much as possible inside machines, as USP does: 2 (N - 1) / N b L h d elements a machine cross
            between machines when the ring spans N.
        ULYSSES_ACROSS: across machines first (topology-aware): 4 (N - 1) / N^2 b L h d. Less from 3 machines on.
    """

    ULYSSES_INSIDE = "ulysses inside machines"
    ULYSSES_ACROSS = "ulysses across machines"


def sequence_mesh(
    devices: Sequence[Any] | None = None,
    *,
    ulysses_degree: int,
    ring_degree: int = 1,
    placement: Placement | tuple[int, int] = Placement.ULYSSES_INSIDE,
    devices_per_machine: int | None = None,
) -> Mesh:
    """A (data, ulysses_across, ring_across, ulysses_inside, ring_inside) mesh; axes may have size 1.

    A sequence takes ulysses_degree x ring_degree devices. Several sequences (the data axis) are apart: on different
    machines where these can be divided among them, unless the placement says how many machines a sequence spans.

    Args:
        devices: devices to use, ordered by machine and id here; all by default.
        ulysses_degree: devices that exchange heads for sequence.
        ring_degree: devices that pass keys on.
        placement: which of the two crosses machines; or how many machines each spans, as (Ulysses, ring), whose
            product is the machines of a sequence.
        devices_per_machine: of each machine, as in `solver.Topology`, where what JAX knows does not say it. By default
            a machine is the devices of one slice index if all devices have one, else of one process.

    Returns:
        The mesh, with automatic axes. Shard the length of a sequence over (*RING_AXES, *ULYSSES_AXES), that order for a
        causal `usp_attention`, and for a causal `torus_attention` over (ULYSSES_AXES[0], *RING_AXES, ULYSSES_AXES[1]).

    Raises:
        TypeError: if a degree or `devices_per_machine` is no integer, the placement none and no pair of integers, or
            devices are no sequence of devices.
        ValueError: if there are no devices, one is given twice, machines have different numbers of devices,
            `devices_per_machine` or the degrees do not divide the devices, or machines that Ulysses and the ring are to
            span do not divide their degrees and the machines.

    Example:
        >>> import jax
        >>> mesh = sequence_mesh(jax.devices()[:1], ulysses_degree=1)
        >>> mesh.axis_names
        ('data', 'ulysses_across', 'ring_across', 'ulysses_inside', 'ring_inside')
    """
    devices = device_list("sequence_mesh", devices)
    _check_degrees(devices, ulysses_degree, ring_degree)
    if devices_per_machine is not None:
        advice = "Give the devices of one machine."
        devices_per_machine = integer(
            "sequence_mesh", "devices_per_machine", devices_per_machine, advice=advice
        )
    grid = _by_machine(devices, devices_per_machine)
    if isinstance(placement, Placement):
        sizes = _sizes(grid.shape, ulysses_degree, ring_degree, placement)
    else:
        sizes = _sizes_across(grid.shape, ulysses_degree, ring_degree, _checked_machines(placement))
    across = sizes.data_across, sizes.ulysses_across, sizes.ring_across
    inside = sizes.data_inside, sizes.ulysses_inside, sizes.ring_inside
    # Data outermost, then across machines, then inside.
    ordered = grid.reshape(*across, *inside).transpose(0, 3, 1, 2, 4, 5)
    ordered = ordered.reshape(-1, *ordered.shape[2:])
    names = (SEQUENCE_DATA_AXIS, ULYSSES_AXES[0], RING_AXES[0], ULYSSES_AXES[1], RING_AXES[1])
    return Mesh(ordered, names, axis_types=(AxisType.Auto,) * len(names))


@dataclass(frozen=True, slots=True)
class _Sizes:
    data_across: int
    data_inside: int
    ulysses_across: int
    ulysses_inside: int
    ring_across: int
    ring_inside: int


def _sizes(shape: tuple[int, ...], ulysses: int, ring: int, placement: Placement) -> _Sizes:
    """Machines and a machine's devices, cut: first for the data, then for what the placement puts first.

    All divisions are exact: what divides a product a b, less its common divisor with a, divides b.
    """
    machines, inside = shape
    data = machines * inside // (ulysses * ring)
    data_across = math.gcd(data, machines)
    data_inside = data // data_across
    left_across, left_inside = machines // data_across, inside // data_inside
    if placement is Placement.ULYSSES_ACROSS:
        ulysses_across = math.gcd(ulysses, left_across)
        ulysses_inside = ulysses // ulysses_across
    else:
        ulysses_inside = math.gcd(ulysses, left_inside)
        ulysses_across = ulysses // ulysses_inside
    return _Sizes(
        data_across=data_across,
        data_inside=data_inside,
        ulysses_across=ulysses_across,
        ulysses_inside=ulysses_inside,
        ring_across=left_across // ulysses_across,
        ring_inside=left_inside // ulysses_inside,
    )


def _sizes_across(shape: tuple[int, ...], ulysses: int, ring: int, across: tuple[int, int]) -> _Sizes:
    """The same for so many machines of Ulysses and of the ring; the data takes what is left of either.

    Raises:
        ValueError: if something does not divide.
    """
    (machines, inside), (ulysses_across, ring_across) = shape, across
    ulysses_inside, ring_inside = ulysses // ulysses_across, ring // ring_across
    whole = ulysses_across * ulysses_inside == ulysses and ring_across * ring_inside == ring
    if not whole or machines % (ulysses_across * ring_across) or inside % (ulysses_inside * ring_inside):
        raise ValueError(
            "sequence_mesh: machines that Ulysses and the ring span divide their degrees, their product the machines,"
            f" and what is left of the degrees the devices of a machine; got placement={across},"
            f" ulysses_degree={ulysses}, ring_degree={ring}, {machines} machines of {inside} devices. Give others, or a"
            " Placement, which finds them."
        )
    return _Sizes(
        data_across=machines // (ulysses_across * ring_across),
        data_inside=inside // (ulysses_inside * ring_inside),
        ulysses_across=ulysses_across,
        ulysses_inside=ulysses_inside,
        ring_across=ring_across,
        ring_inside=ring_inside,
    )


def _by_machine(devices: list[Any], devices_per_machine: int | None) -> np.ndarray:
    """Devices as (machines, devices of each)."""
    known = all(getattr(device, "slice_index", None) is not None for device in devices)
    machine_of: dict[Any, int] = {d: d.slice_index if known else d.process_index for d in devices}
    ordered = sorted(devices, key=lambda d: (machine_of[d], d.process_index, d.id))
    if devices_per_machine is None:
        counts: dict[int, int] = {}
        for device in ordered:
            counts[machine_of[device]] = counts.get(machine_of[device], 0) + 1
        if len(set(counts.values())) > 1:
            raise ValueError(
                "sequence_mesh: machines have the same number of devices; got"
                f" {', '.join(map(str, counts.values()))}. Give as many devices of each, or devices_per_machine."
            )
        devices_per_machine = next(iter(counts.values()))
    if devices_per_machine < 1 or len(ordered) % devices_per_machine:
        raise ValueError(
            "sequence_mesh: devices_per_machine divides the devices; got"
            f" devices_per_machine={devices_per_machine}, devices={len(ordered)}. Give the devices of one machine."
        )
    return np.array(ordered, dtype=object).reshape(-1, devices_per_machine)


def _checked_machines(placement: Any) -> tuple[int, int]:
    """A placement by machines.

    Raises:
        TypeError: if it is none.
        ValueError: for less than one machine.
    """
    if not isinstance(placement, tuple) or len(placement) != 2:
        raise TypeError(
            "sequence_mesh: placement is a Placement, or machines that Ulysses and the ring span; got"
            f" {kind(placement)}. Give Placement.ULYSSES_INSIDE, Placement.ULYSSES_ACROSS, or a tuple of two integers."
        )
    names = "machines that Ulysses spans", "machines that the ring spans"
    ulysses, ring = (
        integer("sequence_mesh", name, machines, least=1, advice="1 stays inside a machine.")
        for name, machines in zip(names, placement, strict=True)
    )
    return ulysses, ring


def _check_degrees(devices: list[Any], ulysses: Any, ring: Any) -> None:
    for name, degree in (("ulysses_degree", ulysses), ("ring_degree", ring)):
        integer("sequence_mesh", name, degree, advice="Use 1 for none.")
    if ulysses < 1 or ring < 1 or len(devices) % (ulysses * ring):
        raise ValueError(
            "sequence_mesh: ulysses_degree x ring_degree divides the devices; got"
            f" ulysses_degree={ulysses}, ring_degree={ring}, devices={len(devices)}. What they leave is the data axis:"
            " for one sequence over all devices make the product equal."
        )
