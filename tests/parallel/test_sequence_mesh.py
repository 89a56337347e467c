"""Meshes for sequence parallelism: which devices exchange heads and which pass keys on, by hand and from processes."""

import inspect
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from parallel import RING_AXES, SEQUENCE_DATA_AXIS, ULYSSES_AXES, Placement, sequence_mesh
from parallel._sequence_mesh import _by_machine, _sizes, _sizes_across

INSIDE, ACROSS = Placement
# As users call it: without the run-time type checker of the tests.
UNTYPED = inspect.unwrap(sequence_mesh)


def machines_of(mesh, axes, devices_per_machine):
    """Sets of machines that each group along `axes` touches."""
    names = mesh.axis_names
    ids = np.vectorize(lambda d: d.id)(mesh.devices) // devices_per_machine
    others = [names.index(n) for n in names if n not in axes]
    groups = ids.transpose(*others, *(names.index(n) for n in axes)).reshape(
        -1, int(np.prod([mesh.shape[n] for n in axes]))
    )
    return {tuple(sorted(set(g.tolist()))) for g in groups}


def shape(mesh):
    return tuple(mesh.shape[n] for n in (SEQUENCE_DATA_AXIS, *ULYSSES_AXES, *RING_AXES))


def test_usp_exchanges_heads_inside_machines_and_passes_keys_across():
    mesh = sequence_mesh(ulysses_degree=4, ring_degree=2, devices_per_machine=4)
    assert shape(mesh) == (1, 1, 4, 2, 1)
    assert machines_of(mesh, ULYSSES_AXES, 4) == {(0,), (1,)}
    assert machines_of(mesh, RING_AXES, 4) == {(0, 1)}


def test_topology_aware_exchanges_heads_across_machines_first():
    mesh = sequence_mesh(ulysses_degree=4, ring_degree=2, devices_per_machine=4, placement=ACROSS)
    assert shape(mesh) == (1, 2, 2, 1, 2)
    assert machines_of(mesh, ULYSSES_AXES, 4) == {(0, 1)}
    assert machines_of(mesh, RING_AXES, 4) == {(0,), (1,)}


def test_several_sequences_are_on_machines_of_their_own():
    mesh = sequence_mesh(ulysses_degree=2, ring_degree=2, devices_per_machine=4)
    assert shape(mesh) == (2, 1, 2, 1, 2)
    assert machines_of(mesh, (*ULYSSES_AXES, *RING_AXES), 4) == {(0,), (1,)}


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("per_machine", [1, 2, 4, 8])
def test_every_device_once_and_degrees_as_asked(placement, per_machine):
    for ulysses, ring in ((1, 1), (2, 1), (1, 4), (2, 4), (4, 2), (8, 1), (1, 8), (2, 2)):
        mesh = sequence_mesh(
            ulysses_degree=ulysses, ring_degree=ring, placement=placement, devices_per_machine=per_machine
        )
        assert sorted(d.id for d in mesh.devices.ravel()) == list(range(8))
        data, *sizes = shape(mesh)
        assert (sizes[0] * sizes[1], sizes[2] * sizes[3]) == (ulysses, ring)
        assert data == 8 // (ulysses * ring)


def test_degrees_of_larger_clusters():
    """(machines, devices of each): data, then what goes across and inside."""
    for placement, grid, degrees, expected in (
        (INSIDE, (4, 8), (8, 4), (1, 8, 4, 1)),
        (ACROSS, (4, 8), (8, 4), (4, 2, 1, 4)),
        (ACROSS, (3, 8), (24, 1), (3, 8, 1, 1)),
        (ACROSS, (3, 8), (12, 2), (3, 4, 1, 2)),
        (INSIDE, (3, 8), (12, 2), (3, 4, 1, 2)),
        (ACROSS, (4, 8), (2, 16), (2, 1, 2, 8)),
    ):
        sizes = _sizes(grid, *degrees, placement)
        found = sizes.ulysses_across, sizes.ulysses_inside, sizes.ring_across, sizes.ring_inside
        assert found == expected


@pytest.mark.parametrize(
    ("across", "expected"),
    [
        ((2, 2), (1, 2, 1, 2, 2)),
        ((1, 4), (1, 1, 2, 4, 1)),
        ((2, 1), (2, 2, 1, 1, 2)),
        ((1, 2), (2, 1, 2, 2, 1)),
    ],
)
def test_machines_that_ulysses_and_the_ring_span(across, expected):
    ring = 2 if across in ((2, 1), (1, 2)) else 4
    mesh = sequence_mesh(ulysses_degree=2, ring_degree=ring, placement=across, devices_per_machine=2)
    assert shape(mesh) == expected
    assert {len(group) for group in machines_of(mesh, ULYSSES_AXES, 2)} == {across[0]}
    assert {len(group) for group in machines_of(mesh, RING_AXES, 2)} == {across[1]}


def test_what_a_placement_finds_can_be_said_by_machines():
    for machines, inside in itertools.product((1, 2, 3, 4), (1, 2, 4, 6)):
        for ulysses, ring in itertools.product(range(1, 25), range(1, 25)):
            if machines * inside != ulysses * ring:
                continue
            for placement in Placement:
                sizes = _sizes((machines, inside), ulysses, ring, placement)
                across = sizes.ulysses_across, sizes.ring_across
                assert _sizes_across((machines, inside), ulysses, ring, across) == sizes


class Device(SimpleNamespace):
    def __hash__(self):
        return self.id


def test_all_degrees_that_divide_the_devices_can_be_placed():
    for machines in range(1, 9):
        for inside in range(1, 9):
            for ulysses in range(1, 65):
                for ring in range(1, 65):
                    if machines * inside % (ulysses * ring):
                        continue
                    for placement in Placement:
                        sizes = _sizes((machines, inside), ulysses, ring, placement)
                        assert sizes.data_across * sizes.ulysses_across * sizes.ring_across == machines
                        assert sizes.data_inside * sizes.ulysses_inside * sizes.ring_inside == inside
                        assert sizes.ulysses_across * sizes.ulysses_inside == ulysses
                        assert sizes.ring_across * sizes.ring_inside == ring


def test_machines_are_slices_or_processes():
    by_process = [Device(id=i, process_index=i % 2) for i in range(6)]
    found = _by_machine(by_process, None)
    assert [[d.id for d in row] for row in found] == [[0, 2, 4], [1, 3, 5]]
    # A process for every device, four of them on a machine.
    by_slice = [Device(id=i, process_index=i, slice_index=i // 4) for i in range(8)]
    assert [[d.id for d in row] for row in _by_machine(by_slice, None)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _by_machine(by_slice, 2).shape == (4, 2)


def test_bad_input():
    uneven = [Device(id=i, process_index=i // 3) for i in range(5)]
    devices = jax.devices()
    for error, message, args, options in (
        (ValueError, "machines have the same number of devices; got 3, 2", uneven, {"ulysses_degree": 1}),
        (ValueError, "ring_degree divides the devices; got ulysses_degree=3", devices, {"ulysses_degree": 3}),
        (ValueError, "ulysses_degree=0, ring_degree=1, devices=8", devices, {"ulysses_degree": 0}),
        (
            ValueError,
            "got ulysses_degree=4, ring_degree=4, devices=8",
            devices,
            {"ulysses_degree": 4, "ring_degree": 4},
        ),
        (
            ValueError,
            "devices_per_machine divides the devices; got devices_per_machine=3",
            devices,
            {"ulysses_degree": 2, "devices_per_machine": 3},
        ),
        (ValueError, "at least one and each once; got 0", [], {"ulysses_degree": 1}),
        (ValueError, "got 2, 1 of them different", devices[:1] * 2, {"ulysses_degree": 1}),
        (TypeError, "ulysses_degree is an integer; got float", devices, {"ulysses_degree": 2.0}),
        (
            TypeError,
            "devices_per_machine is an integer; got float 2.0",
            devices,
            {"ulysses_degree": 2, "devices_per_machine": 2.0},
        ),
        (
            TypeError,
            "devices_per_machine is an integer; got bool True",
            devices,
            {"ulysses_degree": 2, "devices_per_machine": True},
        ),
        (TypeError, "devices is a sequence of devices; got list with int 0", [0, 1], {"ulysses_degree": 1}),
        (TypeError, "devices is a sequence of devices; got str with str", "cpu", {"ulysses_degree": 1}),
        (
            TypeError,
            "devices is .*; got ndarray with ndarray. .*an array of them flattened",
            np.array(devices).reshape(2, 4),
            {"ulysses_degree": 1},
        ),
        (
            TypeError,
            "devices is .*; got .*Device. .*a single one in a list",
            devices[0],
            {"ulysses_degree": 1},
        ),
        (
            TypeError,
            "placement is a Placement, or machines .*; got str",
            devices,
            {"ulysses_degree": 2, "placement": "usp"},
        ),
        (TypeError, "placement is .*; got tuple", devices, {"ulysses_degree": 2, "placement": (1,)}),
        (
            TypeError,
            "machines that the ring spans is an integer; got float 1.0",
            devices,
            {"ulysses_degree": 2, "placement": (1, 1.0)},
        ),
        (
            ValueError,
            "machines that Ulysses spans is at least 1; got .*=0. 1 stays inside",
            devices,
            {"ulysses_degree": 2, "placement": (0, 1)},
        ),
        # Of 4 machines of 2: Ulysses on 4 of them with a degree of 2; 2 x 4 machines; a ring of 4 in a machine.
        *(
            (
                ValueError,
                f"span divide their degrees.*got placement=.{across[0]}, {across[1]}.,.* 4 machines of 2 devices",
                devices,
                {
                    "ulysses_degree": 2,
                    "ring_degree": 4,
                    "placement": across,
                    "devices_per_machine": 2,
                },
            )
            for across in ((4, 1), (2, 4), (1, 1))
        ),
    ):
        with pytest.raises(error, match=f"sequence_mesh: .*{message}"):
            UNTYPED(args, **options)
