"""USP attention: Ulysses around a ring, over meshes of both shapes, against the whole sequence on one device."""

from functools import partial

import jax.numpy as jnp
import pytest

from parallel import RING_AXES, ULYSSES_AXES, PackedBlockAttention, Placement, sequence_mesh, usp_attention
from tests.parallel.sequence_cases import (
    BLOCK,
    Case,
    check,
    check_poison,
    check_replicated_keys,
    combinations,
    draw,
    errors,
    mesh_of,
    moves,
    program,
)

USP = partial(usp_attention, ulysses_axis="u", ring_axis="r")
ORDER = ("r", "u")
ALL = Case(segments=3, causal=True, text=5, kv_heads=2)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 4), (4, 2), (2, 1), (1, 2), (1, 1)])
def test_meshes(ring, ulysses):
    check(USP, mesh_of(r=ring, u=ulysses), ORDER, Case(kv_heads=2, text=2))


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 2)])
def test_packed_causal_with_text_and_grouped_heads(ring, ulysses):
    check(USP, mesh_of(r=ring, u=ulysses), ORDER, ALL)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "segments", "causal", "text"), combinations([(2, 2), (2, 4), (4, 2)]))
def test_every_combination(shape, segments, causal, text):
    case = Case(2, 3, heads=6, kv_heads=2, segments=segments, causal=causal, text=text)
    check(USP, mesh_of(r=shape[0], u=shape[1]), ORDER, case, vanishing=causal and text == 1)


@pytest.mark.full
def test_any_order_of_the_sequence_without_a_causal_mask():
    check(USP, mesh_of(r=2, u=2), ("u", "r"), Case(segments=2, text=3))


def test_heads_that_do_not_divide_and_groups_of_them():
    case = Case(q_loc=2, k_loc=2, heads=30, kv_heads=30, dim=2, batch=1)
    check(partial(USP, head_groups=2), mesh_of(r=2, u=4), ORDER, case)


@pytest.mark.parametrize("placement", Placement)
def test_both_placements_on_two_machines_of_four(placement):
    mesh = sequence_mesh(ulysses_degree=4, ring_degree=2, placement=placement, devices_per_machine=4)
    attention = partial(usp_attention, ulysses_axis=ULYSSES_AXES, ring_axis=RING_AXES)
    check(attention, mesh, (*RING_AXES, *ULYSSES_AXES), Case(causal=True))


@pytest.mark.parametrize(
    "block",
    [BLOCK, pytest.param(PackedBlockAttention(block=4), marks=pytest.mark.full)],
    ids=["xla", "packed rows"],
)
def test_a_poisoned_segment_changes_no_other(block):
    check_poison(USP, mesh_of(r=2, u=2), ORDER, Case(segments=3, text=4, block=block))


def test_replicated_keys():
    check_replicated_keys(USP, mesh_of(r=2, u=2), ORDER)


def test_bfloat16_errors_are_those_of_one_device():
    alone = Case(q_loc=64, k_loc=64, batch=1, dim=8, dtype=jnp.bfloat16)
    case = Case(q_loc=8, k_loc=8, batch=1, dim=8, dtype=jnp.bfloat16)
    one, eight = (
        errors(USP, m, ORDER, c) for m, c in ((mesh_of(r=1, u=1), alone), (mesh_of(r=4, u=2), case))
    )
    for error, base in zip(eight, one, strict=True):
        assert error <= 2 * base


def test_what_moves_on_which_axis():
    """Exchanges on the one, permutes on the other: (R - 1) times the keys of the local heads."""
    case = Case()
    mesh = mesh_of(r=4, u=2)
    arrays = draw(case, 8)
    found = moves(program(USP, mesh, ORDER, case), arrays.qkv, arrays.d_out, None, None, None, None)
    assert {(move.kind, move.axes) for move in found} == {("all_to_all", ("u",)), ("ppermute", ("r",))}
    one = 2 * case.batch * (2 * case.k_loc) * (case.kv_heads // 2) * case.dim * 4
    permutes = [move for move in found if move.kind == "ppermute"]
    assert sum(move.num_bytes * move.times for move in permutes) == one * (3 + 4 + 3)


@pytest.mark.parametrize(("text", "causal"), [(0, False), (3, False), (3, True)])
def test_shard_map_may_check_what_differs_between_devices(text, causal):
    check(USP, mesh_of(r=2, u=2), ORDER, Case(segments=2, causal=causal, text=text, check_vma=True))
