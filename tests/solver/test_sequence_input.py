"""What the planner's hardware, shapes, meshes and timelines refuse, and what they make Python's numbers of."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from solver import (
    A100_MACHINE,
    Link,
    SequenceHardware,
    SequenceMesh,
    SequenceShape,
    Topology,
    layer_timeline,
    plan_sequence_parallel,
    sequence_plans,
)

ACROSS = A100_MACHINE.across
MACHINES, SHAPE, MESH = Topology(2, 4), SequenceShape(8, 64, 4096, 1), SequenceMesh(2, 4, 1, 1)
SLOWEST = Link(2e-30, 1 << 16, 1e-30, 1e-30, 1e-30, 1e30, 1e30, 1e30)  # halved, where branches share it


@pytest.mark.parametrize(
    ("owner", "change", "error", "text"),
    [
        (A100_MACHINE, {"one_sided": "yes"}, TypeError, "one_sided is True or False; got str. Give a bool"),
        (A100_MACHINE, {"one_sided": 1}, TypeError, "one_sided is True or False; got int"),
        (A100_MACHINE, {"ring_overlaps": None}, TypeError, "ring_overlaps is True or False; got NoneType"),
        (A100_MACHINE, {"inside": None}, TypeError, "inside is a Link; got NoneType. Give Link"),
        (A100_MACHINE, {"across": 5e9}, TypeError, "across is a Link; got float"),
        (A100_MACHINE, {"across": Link}, TypeError, "across is a Link; got type"),
        (A100_MACHINE, {"tile_rows": 0.5}, TypeError, "tile_rows is an integer; got float 0.5"),
        (A100_MACHINE, {"tile_rows": 0}, ValueError, "tile_rows >= 1; got tile_rows=0"),
        (A100_MACHINE, {"processors": 108.5}, TypeError, "processors is an integer; got float"),
        (A100_MACHINE, {"processors": True}, TypeError, "processors is an integer; got bool True"),
        (A100_MACHINE, {"processors": 65537}, ValueError, "processors <= 65536; got processors=65537"),
        (A100_MACHINE, {"communication_processors": -1}, ValueError, "communication_processors >= 0; got"),
        (
            A100_MACHINE,
            {"communication_processors": 2.5},
            TypeError,
            "communication_processors is an integer",
        ),
        (A100_MACHINE, {"element_bytes": 1.5}, TypeError, "element_bytes is an integer; got float 1.5"),
        (A100_MACHINE, {"flops_per_s": 1e-320}, ValueError, "flops_per_s in 1e-30 to 1e.30; got .*=1e-320"),
        (A100_MACHINE, {"flops_per_s": 10**31}, ValueError, "flops_per_s in 1e-30 to 1e.30; got .*=1e.31"),
        (A100_MACHINE, {"flops_per_s": 10**400}, ValueError, "flops_per_s finite and > 0; got .*=inf"),
        (A100_MACHINE, {"linear": 1e-31}, ValueError, "linear in 1e-30 to 1e.30; got linear=1e-31"),
        (A100_MACHINE, {"attention_half_dim": 1e31}, ValueError, "attention_half_dim <= 1e.30; got"),
        (A100_MACHINE, {"launch_s": math.inf}, ValueError, "launch_s finite and >= 0; got launch_s=inf"),
        (ACROSS, {"bytes_per_s": 1e-31}, ValueError, "bytes_per_s in 1e-30 to 1e.30; got bytes_per_s=1e-31"),
        (ACROSS, {"message_s": 1e31}, ValueError, "message_s <= 1e.30; got message_s=1e.31"),
        (ACROSS, {"one_peer": "all"}, TypeError, "one_peer is a number; got str"),
        (MESH, {"ulysses_across": 0}, ValueError, "ulysses_across >= 1; got ulysses_across=0. 1 is none"),
        (MESH, {"ring_inside": -4}, ValueError, "ring_inside >= 1; got ring_inside=-4"),
        (MESH, {"ring_across": 2.0}, TypeError, "ring_across is an integer; got float 2.0"),
        (MESH, {"ulysses_inside": 8193}, ValueError, "ulysses_inside <= 8192; got ulysses_inside=8193"),
        (SHAPE, {"num_heads": 0}, ValueError, "num_heads >= 1; got num_heads=0. FLUX.1"),
        (SHAPE, {"head_dim": 64.0}, TypeError, "head_dim is an integer; got float 64.0"),
        (SHAPE, {"length": 1 << 31}, ValueError, "length <= 2147483647; got length=2147483648"),
        (SHAPE, {"batch": True}, TypeError, "batch is an integer; got bool True"),
    ],
)
def test_fields(owner, change, error, text):
    with pytest.raises(error, match=f"^{type(owner).__name__}: {text}"):
        replace(owner, **change)


def test_numpy_scalars_become_numbers_of_python():
    half = np.float32(0.5)
    link = Link(np.float32(2e9), np.int64(2), half, half, half, half, half, half)
    hardware = replace(
        A100_MACHINE,
        flops_per_s=np.float32(1e12),
        tile_rows=np.int32(64),
        one_sided=np.bool_(True),
        launch_s=np.float16(0),
        across=link,
    )
    for owner, kinds in (
        (link, {float, int}),
        (hardware, {float, int, bool, Link}),
        (SequenceMesh(*map(np.int64, (2, 4, 1, 1))), {int}),
        (SequenceShape(*map(np.int16, (8, 64, 4096, 1))), {int}),
    ):
        assert {type(getattr(owner, field.name)) for field in fields(owner)} == kinds
    best = plan_sequence_parallel(MACHINES, np.int64(8), 64, np.int32(4096), hardware=hardware)
    assert type(best.layer_s) is float


@pytest.mark.parametrize("fastest", [False, True])
def test_times_are_finite_and_positive_at_both_ends(fastest):
    rate = 1e30 if fastest else 1e-30
    share, seconds = (1.0, 0.0) if fastest else (1e-30, 1e30)
    link = Link(rate, 1, share, share, share, seconds, seconds, seconds) if fastest else SLOWEST
    hardware = SequenceHardware(
        flops_per_s=rate,
        linear=share,
        attention=share,
        attention_half_dim=seconds,
        processors=1 << 16,
        communication_processors=0 if fastest else (1 << 16) - 1,
        memory_bytes_per_s=rate,
        inside=link,
        across=link,
        tile_rows=1 if fastest else 1 << 16,
        launch_s=seconds,
        one_sided=True,
        element_bytes=1 if fastest else 1 << 16,
    )
    case = (1, 1, 1, 1) if fastest else (1 << 16, 1 << 16, 1 << 30, 1 << 16)
    plans = sequence_plans(Topology(4, 4), *case, cfg=not fastest, hardware=hardware)
    assert all(math.isfinite(plan.layer_s) and plan.layer_s > 0 for plan in plans)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"topology": (2, 4)}, TypeError, "topology is a Topology; got tuple. Give Topology"),
        ({"shape": (8, 64, 4096, 1)}, TypeError, "shape is a SequenceShape; got tuple"),
        ({"mesh": None}, TypeError, "mesh is a SequenceMesh; got NoneType. Give SequenceMesh"),
        ({"hardware": "A100"}, TypeError, "hardware is a SequenceHardware; got str. A100_MACHINE is one"),
        ({"one_sided": "x"}, TypeError, "one_sided is True or False; got str. True is puts and gets"),
        ({"one_sided": None}, TypeError, "one_sided is True or False; got NoneType"),
        (
            {"mesh": SequenceMesh(1, 1, 1, 1)},
            ValueError,
            "the mesh has the topology's .*, 1 x 1, on Topology",
        ),
        (
            {"mesh": SequenceMesh(4, 1, 1, 2)},
            ValueError,
            ".*, 4 x 2, on .*multiply to num_machines, those inside",
        ),
        ({"mesh": SequenceMesh(2, 3, 1, 1)}, ValueError, "the mesh has the topology's machines"),
        ({"mesh": SequenceMesh(2, 4, 1, 2)}, ValueError, "the mesh has the topology's machines"),
        ({"head_groups": 0}, ValueError, "head_groups >= 1; got head_groups=0"),
        ({"head_groups": -1}, ValueError, "head_groups >= 1; got head_groups=-1"),
        ({"head_groups": 2}, ValueError, "head_groups <= 1; got head_groups=2. A device has 1 of 8 heads"),
        ({"head_groups": 1.5}, TypeError, "head_groups is an integer; got float 1.5"),
        ({"head_groups": True}, TypeError, "head_groups is an integer; got bool True"),
        ({"head_groups": "2"}, TypeError, "head_groups is an integer; got str"),
        (
            {"head_groups": None, "mesh": SequenceMesh(1, 4, 2, 1)},
            ValueError,
            "for Torus attention .*Ulysses spans all of several machines; got SequenceMesh.*ulysses_across the",
        ),
        (
            {"head_groups": None, "mesh": SequenceMesh(2, 4, 2, 1), "topology": Topology(4, 4)},
            ValueError,
            "for Torus attention",
        ),
        (
            {"head_groups": None, "mesh": SequenceMesh(1, 4, 1, 1), "topology": Topology(1, 4)},
            ValueError,
            "for Torus attention",
        ),
    ],
)
def test_timelines(change, error, text):
    good = {"topology": MACHINES, "shape": SHAPE, "mesh": MESH, "hardware": A100_MACHINE, "head_groups": 1}
    assert layer_timeline(**good)
    with pytest.raises(error, match=f"^layer_timeline: {text}"):
        layer_timeline(**good | change)


def test_the_last_good_timelines():
    ring = SequenceMesh(1, 1, 2, 4)
    for mesh, head_groups in ((MESH, None), (ring, 8), (SequenceMesh(2, 1, 1, 4), np.int64(4))):
        assert layer_timeline(
            MACHINES, SHAPE, mesh, A100_MACHINE, head_groups=head_groups, one_sided=np.bool_(True)
        )
    # A degree above the heads leaves devices idle.
    assert layer_timeline(MACHINES, replace(SHAPE, num_heads=2), MESH, A100_MACHINE)
