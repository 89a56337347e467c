"""From a plan of `solver` to a mesh, an attention on it and a program, for every plan there is."""

import inspect
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from parallel import (
    RING_AXES,
    SEQUENCE_DATA_AXIS,
    ULYSSES_AXES,
    Placement,
    sequence_attention,
    sequence_mesh,
)
from solver import A100_MACHINE, Topology, plan_sequence_parallel, sequence_plans
from tests.parallel.sequence_cases import Case, check

HARDWARE = replace(A100_MACHINE, one_sided=True, transfers_under_way=2)
UNTYPED = inspect.unwrap(sequence_attention)


class Device:
    """As `Mesh` wants them; machines are those of the process index."""

    platform = device_kind = "none"

    def __init__(self, number, machine):
        self.id, self.process_index = number, machine


def devices_of(topology):
    per_machine = topology.devices_per_machine
    return [Device(number, number // per_machine) for number in range(topology.num_devices)]


def machines_along(mesh, axes, of=slice(None)):
    """How many machines each group of devices along `axes` touches; of the data axis `of`."""
    machines = np.vectorize(lambda device: device.process_index)(mesh.devices)[of]
    names = mesh.axis_names
    order = [names.index(name) for name in names if name not in axes] + [names.index(n) for n in axes]
    groups = machines.transpose(order).reshape(-1, np.prod([mesh.shape[name] for name in axes]))
    return {len(set(group.tolist())) for group in groups}


@pytest.mark.parametrize("cfg", [False, True], ids=["one branch", "guidance"])
@pytest.mark.parametrize("topology", [(1, 8), (8, 1), (2, 4), (4, 2), (3, 8), (4, 8), (2, 6)], ids=str)
def test_axes_of_every_plan_lie_where_it_says(topology, cfg):
    topology = Topology(*topology)
    plans = sequence_plans(topology, 48, 128, 65_536, cfg=cfg, hardware=HARDWARE)
    assert len(plans) > 10
    for plan in {(plan.cfg, plan.mesh): plan for plan in plans}.values():
        devices = devices_of(topology)
        mesh = sequence_mesh(devices, **plan.mesh_options)
        assert set(mesh.devices.ravel()) == set(devices)
        degrees = plan.mesh
        across, inside = zip(ULYSSES_AXES, RING_AXES, strict=True)
        assert tuple(mesh.shape[name] for name in across) == (degrees.ulysses_across, degrees.ring_across)
        assert tuple(mesh.shape[name] for name in inside) == (degrees.ulysses_inside, degrees.ring_inside)
        assert machines_along(mesh, inside) == {1}
        assert machines_along(mesh, across) == {degrees.ulysses_across * degrees.ring_across}
        assert machines_along(mesh, ULYSSES_AXES) == {degrees.ulysses_across}
        assert machines_along(mesh, RING_AXES) == {degrees.ring_across}
        branches = {"machines": 2, "devices": 2}.get(plan.cfg, 1)
        assert mesh.shape[SEQUENCE_DATA_AXIS] == branches
        # Branches on halves of the machines share none.
        apart = topology.num_machines // (2 if plan.cfg == "machines" else 1)
        assert machines_along(mesh, across + inside) == {apart}


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["two", "every kind"]
)
def test_plans_compute_attention(every):
    """Of each algorithm and way to cut the machines, on 4 machines of 2 devices that are CPUs."""
    heads, kinds = 16, {}
    for plan in sequence_plans(Topology(4, 2), heads, 8, 64, hardware=HARDWARE):
        kind = plan.algorithm, plan.mesh.ulysses_across, min(plan.head_groups, 2), plan.transfers_under_way
        if not plan.one_sided:
            kinds.setdefault(kind, plan)
    some = [("topology_aware", 2, 2, 2), ("torus", 4, 1, 1)]
    rows = P(None, (*RING_AXES, *ULYSSES_AXES))
    arrays = [np.random.default_rng(i).normal(size=(1, 64, heads, 8)).astype(np.float32) for i in range(3)]
    wanted = jax.nn.dot_product_attention(*arrays)
    for kind in kinds if every else some:
        plan = kinds[kind]
        mesh = sequence_mesh(**plan.mesh_options)
        attention = sequence_attention(**plan.attention_options)
        attend = jax.shard_map(attention, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False)
        step = jax.jit(attend, compiler_options=plan.compiler_options)
        found = step(*jax.device_put(arrays, NamedSharding(mesh, rows)))
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_options_of_a_plan():
    topology = Topology(4, 8)
    two = replace(A100_MACHINE, transfers_under_way=2)
    one, both = (
        plan_sequence_parallel(topology, 24, 128, (65_536, 512), hardware=hardware)
        for hardware in (A100_MACHINE, two)
    )
    assert (one.transfers_under_way, one.compiler_options) == (1, {})
    assert both.compiler_options == {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    assert both.attention_options == {"torus": True, "head_groups": 1}
    assert both.mesh_options == {
        "ulysses_degree": 8,
        "ring_degree": 4,
        "placement": (4, 1),
        "devices_per_machine": 8,
    }


@pytest.mark.parametrize("placement", [Placement.ULYSSES_INSIDE, (2, 2)], ids=str)
@pytest.mark.parametrize("torus", [False, True], ids=["usp", "torus"])
def test_a_ring_across_machines(torus, placement):
    """Also of Torus attention, for which no plan has one: nothing of the sequence is left out, in any order of it."""
    per_machine = 4 if isinstance(placement, Placement) else 2
    mesh = sequence_mesh(
        ulysses_degree=4, ring_degree=2, placement=placement, devices_per_machine=per_machine
    )
    assert mesh.shape[RING_AXES[0]] == 2
    order = (ULYSSES_AXES[0], *RING_AXES, ULYSSES_AXES[1]) if torus else (*RING_AXES, *ULYSSES_AXES)
    check(sequence_attention(torus=torus), mesh, order, Case(q_loc=2, k_loc=2, causal=True))


def test_attention_takes_the_axes_of_the_mesh():
    usp, torus = sequence_attention(head_groups=2), sequence_attention(torus=True)
    assert usp.func.__name__ == "usp_attention"
    assert usp.keywords == {"ulysses_axis": ULYSSES_AXES, "ring_axis": RING_AXES, "head_groups": 2}
    assert torus.func.__name__ == "torus_attention"
    taken = [torus.keywords[name] for name in ("machine_axis", "ulysses_axis", "ring_axis")]
    assert taken == [*ULYSSES_AXES, RING_AXES]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"torus": 1}, TypeError, "torus is True or False"),
        ({"head_groups": 0}, ValueError, "head_groups is at least 1; got head_groups=0"),
        ({"head_groups": 2.0}, TypeError, "head_groups is an integer; got float"),
        (
            {"torus": True, "head_groups": 2},
            ValueError,
            "head_groups is 1 for Torus attention; got head_groups=2",
        ),
    ],
)
def test_bad_input(options, error, text):
    with pytest.raises(error, match=f"sequence_attention: {text}"):
        UNTYPED(**options)


def test_every_mesh_has_a_name():
    """Of the candidates on 4 x 8, those that no placement finds are among the plans too."""
    plans = sequence_plans(Topology(4, 8), 24, 128, 65_536)
    cuts = {(p.mesh.ulysses_across, p.mesh.ulysses_inside) for p in plans}
    possible = itertools.product((1, 2, 4), (1, 2, 4, 8))
    assert cuts == {(across, inside) for across, inside in possible if across * inside <= 24}
