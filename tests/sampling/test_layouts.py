"""One evaluation on all devices, under every layout, against each sequence by itself on one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdit.sampling._denoiser import LabelDenoiser, TextDenoiser, guided
from jaxdit.sampling._packed_layout import PackedLayout
from jaxdit.sampling._program import Backbone
from jaxdit.sampling._sequence_layout import SequenceLayout
from jaxdit.sampling._weights import ShardedModule
from parallel import RING_AXES, ULYSSES_AXES, Placement, sequence_mesh, torus_attention, usp_attention
from solver import CostModel, StepLayout, balance, capacity_for, step_needs
from tests.sampling.sampling_cases import CHANNELS, conditions, dit, expected, labels, mmdit

USP = partial(usp_attention, ulysses_axis=ULYSSES_AXES, ring_axis=RING_AXES)
TORUS = partial(
    torus_attention, machine_axis=ULYSSES_AXES[0], ulysses_axis=ULYSSES_AXES[1], ring_axis=RING_AXES[1]
)


def predicted(layout, backbone, params, given, grids, tables, time):
    """Guided predictions (devices, rows, c), latents, requests and tokens of the rows."""
    mesh = layout.mesh
    by_device = P(layout.axes)

    def device(params, given, grids, tables, time, table):
        here = jax.tree.map(lambda x: x[0], tables)
        home = layout.home(grids, here)
        x = table[home.request, home.token]
        found, _ = layout.predict(backbone.evaluate(params, mesh), x, time, given, grids, here)
        scale = given.scale[jnp.maximum(home.request - 1, 0)]
        return jax.tree.map(lambda a: a[None], (guided(found, scale), home.request, home.token))

    params = jax.device_put(params, backbone.weights.shardings(mesh))
    run = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(backbone.weights.specs(mesh), P(), P(), layout.table_specs, P(), P()),
        out_specs=by_device,
        check_vma=False,
    )
    table = np.random.default_rng(1).normal(size=(len(grids) + 1, 64, CHANNELS)).astype(np.float32)
    out = jax.jit(run)(params, given, jnp.asarray(grids), tables, time, jnp.asarray(table))
    return *map(np.asarray, out), table


def check(layout, kind, given, grids, tables, *, copies=1):
    """Every token of every request once (twice where branches are apart), and right."""
    module, params = kind()
    denoiser = TextDenoiser() if kind is mmdit else LabelDenoiser(CHANNELS)
    backbone = Backbone(ShardedModule(module, jnp.float32), denoiser)
    time = jnp.linspace(0.3, 0.9, len(grids))
    found, request, token, table = predicted(layout, backbone, params, given, grids, tables, time)
    right = expected(module, params, given, grids, table, time)
    for number, count in enumerate(np.prod(grids, axis=1)):
        mine = request == number + 1
        assert sorted(token[mine]) == sorted(list(range(count)) * copies)
        if count:
            scale = np.abs(right[number]).max()
            np.testing.assert_allclose(found[mine], right[number][token[mine]], atol=1e-5 * scale, rtol=0)


def planned(mesh, given, grids, *, heads=4):
    """A packed layout for requests, and its tables."""
    branches, requests = given.text_lengths.shape
    text = np.asarray(given.text_lengths).reshape(-1)
    image = np.tile(np.prod(grids, axis=1), branches)
    devices = mesh.devices.size
    home = np.tile(np.arange(requests) % devices, branches)
    plan = balance(
        np.where(image > 0, image + text, 0),
        home,
        num_devices=devices,
        bags="auto",
        cost=CostModel(width=32, gamma=0.4),
        num_heads=heads,
        text_lengths=np.where(image > 0, text, 0),
    )
    steps = StepLayout(plan, 16)
    capacity = capacity_for([step_needs(steps, padded=True)])
    layout = PackedLayout(mesh, capacity, requests, branches)
    return layout, layout.tables(steps, list(range(devices)))


FULL = pytest.mark.full


@pytest.mark.parametrize("branches", [pytest.param(1, marks=FULL), 2])
@pytest.mark.parametrize("devices", [pytest.param(1, marks=FULL), 3, pytest.param(8, marks=FULL)])
def test_packed_requests_of_several_sizes(devices, branches):
    mesh = sequence_mesh(jax.devices()[:devices], ulysses_degree=devices)
    grids = np.array([(1, 4, 5), (2, 3, 4), (1, 1, 1), (0, 0, 0), (1, 2, 6)], np.int32)
    given = conditions(5, branches, [[3, 0, 2, 0, 5], [2, 0, 1, 0, 0]][:branches])
    layout, tables = planned(mesh, given, grids)
    check(layout, mmdit, given, grids, tables)


@FULL
def test_packed_classes():
    mesh = sequence_mesh(jax.devices()[:4], ulysses_degree=4)
    grids = np.array([(1, 4, 5), (1, 3, 4), (1, 1, 2)], np.int32)
    given = labels(3, 2)
    layout, tables = planned(mesh, given, grids)
    check(layout, dit, given, grids, tables)


ACROSS = Placement.ULYSSES_ACROSS
MESHES = {
    "ulysses": {"ulysses_degree": 4},
    "ring": {"ulysses_degree": 1, "ring_degree": 4},
    "usp": {"ulysses_degree": 2, "ring_degree": 4},
    "one": {"ulysses_degree": 1},
    "torus": {"ulysses_degree": 4, "ring_degree": 2, "placement": ACROSS, "devices_per_machine": 4},
}


@pytest.mark.parametrize("branches", [pytest.param(1, marks=FULL), 2])
@pytest.mark.parametrize(
    "name", [name if name in ("usp", "torus") else pytest.param(name, marks=FULL) for name in MESHES]
)
def test_a_sequence_over_all_devices(name, branches):
    degrees = MESHES[name]
    devices = degrees["ulysses_degree"] * degrees.get("ring_degree", 1)
    mesh = sequence_mesh(jax.devices()[:devices], **degrees)
    grids = np.array([(1, 4, 5), (2, 3, 3)], np.int32)
    given = conditions(2, branches, [[5, 3], [2, 0]][:branches])
    layout = SequenceLayout(
        mesh,
        TORUS if name == "torus" else USP,
        -(-20 // devices),
        -(-5 // devices),
        2,
        branches,
        is_exact=False,
    )
    check(layout, mmdit, given, grids, None)


def test_branches_of_guidance_on_halves_of_the_devices():
    mesh = sequence_mesh(jax.devices()[:8], ulysses_degree=4)
    given = conditions(1, 2, [[8], [8]])
    layout = SequenceLayout(mesh, USP, 5, 2, 1, 2, is_exact=True)
    assert layout.are_branches_apart
    check(layout, mmdit, given, np.array([(1, 4, 5)], np.int32), None, copies=2)


@FULL
def test_a_sequence_of_a_class():
    mesh = sequence_mesh(jax.devices()[:4], ulysses_degree=2, ring_degree=2)
    layout = SequenceLayout(mesh, USP, 5, 0, 1, 2, is_exact=True)
    check(layout, dit, labels(1, 2), np.array([(1, 4, 5)], np.int32), None)
