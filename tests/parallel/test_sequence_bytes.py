"""What sequence-parallel attention sends between machines, against the formulas of the docstrings."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import pytest

from parallel import (
    RING_AXES,
    ULYSSES_AXES,
    Placement,
    ring_attention,
    sequence_mesh,
    torus_attention,
    ulysses_attention,
    usp_attention,
)
from tests.parallel.sequence_bytes import Rows, abstract_mesh, lower, machines_of, sent_by_machine

TORUS = partial(torus_attention, machine_axis="m", ulysses_axis="u", ring_axis="r")
ACROSS = partial(usp_attention, ulysses_axis=("m", "u"), ring_axis="r")
ULYSSES = partial(ulysses_attention, axis_name=("m", "u"))
INSIDE = partial(usp_attention, ulysses_axis="u", ring_axis=("m", "r"))
RING = partial(ring_attention, axis_name=("m", "r"))

# Machines, and of each its devices for Ulysses and for a ring.
SHAPES = [(2, 4, 1), (3, 2, 1), (4, 2, 1), (8, 1, 1)]
LARGE = [(2, 1, 1), (3, 8, 1), (4, 8, 1), (8, 8, 1), (2, 2, 2), (3, 2, 2), (4, 2, 4), (8, 1, 2)]
EVERY = [*SHAPES, *(pytest.param(shape, marks=pytest.mark.full) for shape in LARGE)]


def rows_of(shape, **options):
    """Heads that the degree of Ulysses divides, also across all machines."""
    heads = shape[0] * shape[1]
    return Rows(heads=2 * heads, kv_heads=heads, **options)


def sent(attention, shape, rows, *, gradient):
    """Bytes that leave a machine, the same of all."""
    machines, ulysses, ring = shape
    mesh = abstract_mesh(m=machines, r=ring, u=ulysses)
    module = lower(attention, mesh, ("m", "r", "u"), rows, gradient=gradient)
    found = sent_by_machine(module, machines_of(mesh, ulysses * ring))
    assert list(found) == list(range(machines))
    assert len(set(found.values())) == 1
    return found[0]


def of_exchange(shape, rows, heads, kv_heads):
    """2 (N - 1) / N b d (h' L_q / N + h_kv' L_k / N) numbers, in bytes."""
    machines, ulysses, ring = shape
    part = ulysses * ring * (rows.q_loc * heads + rows.k_loc * kv_heads)
    return 2 * (machines - 1) * rows.batch * part * rows.dim * jnp.dtype(rows.dtype).itemsize // machines


@pytest.mark.parametrize("shape", EVERY)
@pytest.mark.parametrize(
    "attention", [TORUS, pytest.param(ACROSS, marks=pytest.mark.full)], ids=["torus", "usp across"]
)
def test_heads_exchanged_across_machines(attention, shape):
    """As much for the gradient as for the values."""
    rows = rows_of(shape, k_loc=5)
    expected = of_exchange(shape, rows, rows.heads, rows.kv_heads)
    assert sent(attention, shape, rows, gradient=True) == 2 * expected


@pytest.mark.parametrize("machines", [2, 3, 4, 8])
def test_equal_heads_and_lengths_give_four_parts(machines):
    """4 (N - 1) / N of a machine's part of one tensor; of two machines as much as USP, of more less."""
    shape = machines, 2, 1
    heads = 2 * machines
    rows = Rows(heads=heads, kv_heads=heads)
    part = rows.batch * rows.q_loc * shape[1] * heads * rows.dim * 2
    torus, usp = (sent(x, shape, rows, gradient=False) for x in (TORUS, INSIDE))
    assert torus == 4 * (machines - 1) * part // machines
    assert usp == 2 * (machines - 1) * part
    assert sent(ULYSSES, shape, rows, gradient=False) == torus


@pytest.mark.parametrize("shape", EVERY)
@pytest.mark.parametrize(
    "attention", [INSIDE, pytest.param(RING, marks=pytest.mark.full)], ids=["usp inside", "ring"]
)
def test_keys_passed_on_across_machines(attention, shape):
    """R - 1 steps, at each of which the last device of a machine sends; R for the gradient, whose sums are float32."""
    machines, ulysses, ring = shape
    if attention is RING:
        ring, ulysses = ring * ulysses, 1
    rows = rows_of(shape, k_loc=3)
    size = machines * ring
    one = 2 * rows.batch * ulysses * rows.k_loc * rows.kv_heads * rows.dim  # numbers that cross at a step
    keys = (size - 1) + (size if size > 2 else 1)
    expected = one * (2 * keys + 4 * (size - 1))
    assert sent(attention, (machines, ulysses, ring), rows, gradient=True) == expected


@pytest.mark.parametrize(("machines", "ring"), [(1, 3), (2, 2), (2, 4), (3, 2), (4, 2)])
def test_rings_inside_machines(machines, ring):
    """The gradient's ring turns 2 N + 1 times, or for every pair of N < 3 machines."""
    rows = Rows(q_loc=machines, k_loc=machines, heads=2 * machines, kv_heads=2 * machines)
    mesh = abstract_mesh(m=machines, r=ring, u=1)
    tensor = rows.batch * rows.q_loc * rows.heads * rows.dim * 2
    across = 4 * (machines - 1) * tensor // machines
    forward = 2 * (2 if machines > 1 else 1) * (ring - 1) * tensor
    turns = 2 * machines + 1 if machines > 2 else machines**2
    backward = turns * 2 * tensor // machines * ((ring if ring > 2 else 1) + 2 * (ring - 1))
    for gradient, expected in ((False, across + forward), (True, 2 * across + forward + backward)):
        module = lower(TORUS, mesh, ("m", "r", "u"), rows, gradient=gradient)
        found = sent_by_machine(module, machines_of(mesh, 1))
        assert found == dict.fromkeys(range(mesh.size), expected)


@pytest.mark.parametrize("ulysses", [8, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("attention", [TORUS, ACROSS], ids=["torus", "usp across"])
def test_thirty_heads_on_four_machines_of_eight(attention, ulysses):
    """They move as 32, whether 32 devices share heads, one each, or 8, with a ring of 4 inside machines."""
    shape = 4, ulysses, 8 // ulysses
    rows = Rows(heads=30, kv_heads=30)
    expected = of_exchange(shape, rows, 32, 32)
    assert expected == 4 * 3 * rows.batch * rows.q_loc * 8 * 32 * rows.dim * 2 // 4
    assert sent(attention, shape, rows, gradient=True) == 2 * expected


@pytest.mark.parametrize(("machines", "per_machine"), [(2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("placement", Placement)
def test_placements_of_the_mesh_builder(placement, machines, per_machine):
    """The same formulas for the devices as they are placed."""
    mesh = sequence_mesh(
        ulysses_degree=per_machine if placement is Placement.ULYSSES_INSIDE else machines,
        ring_degree=machines if placement is Placement.ULYSSES_INSIDE else per_machine,
        placement=placement,
        devices_per_machine=per_machine,
    )
    attention = partial(usp_attention, ulysses_axis=ULYSSES_AXES, ring_axis=RING_AXES)
    rows = Rows()
    module = lower(attention, mesh, (*RING_AXES, *ULYSSES_AXES), rows)
    part = rows.batch * rows.q_loc * per_machine * rows.heads * rows.dim * 2
    expected = 2 * (machines - 1) * part
    if placement is Placement.ULYSSES_ACROSS:
        expected = 2 * expected // machines
    assert sent_by_machine(module, machines_of(mesh, per_machine)) == dict.fromkeys(range(machines), expected)


@pytest.mark.parametrize(
    ("attention", "shape"),
    [(TORUS, (4, 2, 1)), (INSIDE, (4, 2, 1)), (RING, (4, 1, 2))],
    ids=["torus", "usp", "ring"],
)
def test_ids_travel_as_int32(attention, shape):
    """Gathered by Torus, those of queries and of keys; passed on beside their keys in a ring, also for its gradient."""
    machines, ulysses, ring = shape
    rows = Rows()
    without, beside = (sent(attention, shape, replace(rows, ids=ids), gradient=True) for ids in (False, True))
    of_device = 4 * rows.batch * ulysses * rows.k_loc
    times = 2 * (machines - 1) if attention is TORUS else 2 * machines * ring - 1
    assert beside - without == ulysses * of_device * times
