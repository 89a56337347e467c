"""Torus attention: its schedule against the whole sequence on one device, and the order of its gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from parallel import RING_AXES, ULYSSES_AXES, PackedBlockAttention, Placement, sequence_mesh, torus_attention
from parallel._torus_backward import backward_steps
from tests.parallel.sequence_cases import (
    BLOCK,
    Case,
    check,
    check_poison,
    check_replicated_keys,
    combinations,
    computed_blocks,
    draw,
    errors,
    mesh_of,
    program,
)

TORUS = partial(torus_attention, machine_axis="m", ulysses_axis="u", ring_axis="r")
ORDER = ("m", "r", "u")
ALL = Case(segments=3, causal=True, text=5, kv_heads=2)


@pytest.mark.parametrize(
    "shape",
    [
        (4, 2, 1),
        (3, 1, 1),
        (3, 1, 2),
        *(
            pytest.param(shape, marks=pytest.mark.full)
            for shape in [(1, 1, 1), (2, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 2)]
        ),
    ],
)
def test_meshes(shape):
    """(machines, ulysses, ring); on 8 devices of Ulysses half of the heads are zeros."""
    check(TORUS, mesh_of(m=shape[0], u=shape[1], r=shape[2]), ORDER, Case(text=2))


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.full)])
def test_packed_causal_with_text_and_grouped_heads(shape):
    check(TORUS, mesh_of(m=shape[0], u=shape[1], r=shape[2]), ORDER, ALL)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "segments", "causal", "text"),
    combinations([(8, 1, 1), (2, 2, 2), (3, 2, 1), (2, 1, 4), (4, 1, 2)]),
)
def test_every_combination(shape, segments, causal, text):
    case = Case(2, 3, heads=6, kv_heads=2, segments=segments, causal=causal, text=text)
    mesh = mesh_of(m=shape[0], u=shape[1], r=shape[2])
    check(TORUS, mesh, ORDER, case, vanishing=causal and text == 1)


def test_blocks_that_a_causal_mask_hides_are_not_computed():
    """Every device has the queries and keys of N machines: N (N + 1) / 2 pairs are left of N^2."""
    computed = computed_blocks(TORUS, mesh_of(m=3, u=1, r=1), ORDER, Case(heads=3, kv_heads=3, causal=True))
    assert computed == {"forward": 3 * 6, "backward": 3 * 6}


@pytest.mark.full
def test_more_keys_than_queries():
    check(TORUS, mesh_of(m=2, u=2, r=1), ORDER, Case(q_loc=2, k_loc=5, segments=2, text=1))


def test_heads_that_do_not_divide():
    """Thirty over 4 machines of 2: 32 move."""
    check(TORUS, mesh_of(m=4, u=2, r=1), ORDER, Case(q_loc=1, k_loc=1, heads=30, kv_heads=30, dim=2, batch=1))


@pytest.mark.full
def test_axes_of_the_mesh_builder():
    mesh = sequence_mesh(
        ulysses_degree=4, ring_degree=2, placement=Placement.ULYSSES_ACROSS, devices_per_machine=4
    )
    attention = partial(
        torus_attention, machine_axis=ULYSSES_AXES[0], ulysses_axis=ULYSSES_AXES[1], ring_axis=RING_AXES
    )
    check(attention, mesh, (ULYSSES_AXES[0], *RING_AXES, ULYSSES_AXES[1]), Case(causal=True))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(BLOCK, marks=pytest.mark.full),
        pytest.param(PackedBlockAttention(block=4), marks=pytest.mark.full),
    ],
    ids=["xla", "packed rows"],
)
def test_a_poisoned_segment_changes_no_other(block):
    check_poison(TORUS, mesh_of(m=2, u=1, r=2), ORDER, Case(segments=3, text=4, block=block))


def test_replicated_keys():
    check_replicated_keys(TORUS, mesh_of(m=2, u=2, r=1), ORDER)


@pytest.mark.full
def test_bfloat16_errors_are_those_of_one_device():
    alone = Case(q_loc=64, k_loc=64, batch=1, dim=8, dtype=jnp.bfloat16)
    case = Case(q_loc=8, k_loc=8, batch=1, dim=8, dtype=jnp.bfloat16)
    one = errors(TORUS, mesh_of(m=1, u=1, r=1), ORDER, alone)
    for error, base in zip(errors(TORUS, mesh_of(m=2, u=2, r=2), ORDER, case), one, strict=True):
        assert error <= 2 * base


@pytest.mark.parametrize("is_joined", [False, True], ids=["pairs", "joined"])
@pytest.mark.parametrize("machines", range(1, 9))
def test_gradients_leave_when_they_are_complete_and_beside_something(machines, is_joined):
    """Every pair once, every part moved once; nothing is used before it is here, or leaves before it is summed."""
    steps = backward_steps(machines, is_joined=is_joined)
    done: set[tuple[int, int]] = set()
    here, pushed = {0}, []
    for step in steps:
        for k in step.push_q:
            assert {(k, j) for j in range(machines)} <= done
        if step.push_kv:
            assert {(k, step.push_kv) for k in range(machines)} <= done
        transfers = (step.pull > 0) + (len(step.push_q) > 0) + (step.push_kv > 0)
        assert transfers == step.has_transfer <= 1
        pushed += [("q", k) for k in step.push_q] + [("kv", step.push_kv)] * (step.push_kv > 0)
        assert step.blocks, "it hides the transfer"
        pairs = [(k, block.keys) for block in step.blocks for k in block.queries]
        assert {k for k, _ in pairs} <= here
        assert len(set(pairs)) == len(pairs)
        assert not done & set(pairs)
        done |= set(pairs)
        here |= {step.pull}
    assert done == {(k, j) for k in range(machines) for j in range(machines)}
    assert here == set(range(machines))
    assert sorted(pushed) == sorted((x, k) for x in ("q", "kv") for k in range(1, machines))
    blocks = sum(len(step.blocks) for step in steps)
    assert blocks == (2 * machines + 1 if is_joined and machines > 2 else machines**2)


def test_shard_map_may_check_positions_which_one_axis_lacks():
    """Traced only: types are what it checks."""
    mesh, case = mesh_of(m=2, r=2, u=2), Case(segments=2, causal=True, text=3, check_vma=True)
    arrays = draw(case, 8)
    args = arrays.qkv, arrays.d_out, arrays.ids, arrays.text, arrays.text_ids, arrays.d_text
    out, _ = jax.eval_shape(program(TORUS, mesh, ORDER, case), *args)
    assert out.out.shape == arrays.qkv[0].shape
