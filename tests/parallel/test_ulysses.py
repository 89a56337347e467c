"""Ulysses attention against the whole sequence on one device: any heads, groups of them, what moves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import PackedBlockAttention, pad_sequence, ulysses_attention, unpad_sequence
from parallel._all_to_all import HeadSplit
from tests.oracles import close
from tests.oracles_sequence import joint_attention
from tests.parallel.sequence_cases import (
    BLOCK,
    F32,
    Case,
    check,
    check_poison,
    check_replicated_keys,
    combinations,
    draw,
    errors,
    lowered_text,
    mesh_of,
    moves,
    program,
)

ULYSSES = partial(ulysses_attention, axis_name="x")
ALL = Case(segments=3, causal=True, text=5, kv_heads=2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_axis_sizes(size):
    """Eight devices share four heads: each computes one, half of them zeros."""
    check(ULYSSES, mesh_of(x=size), "x", Case())


@pytest.mark.parametrize("size", [2, 4])
def test_packed_causal_with_text_and_grouped_heads(size):
    check(ULYSSES, mesh_of(x=size), "x", ALL)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"),
    [(4, 30, 30), (8, 56, 56), (8, 56, 8), (4, 30, 6), (4, 6, 2), (8, 4, 4)],
)
def test_any_number_of_heads(size, heads, kv_heads):
    case = Case(q_loc=2, k_loc=2, heads=heads, kv_heads=kv_heads, dim=2, batch=1, text=1)
    check(ULYSSES, mesh_of(x=size), "x", case)


def test_every_device_computes_as_few_heads_as_can_be_and_reads_the_right_keys():
    for heads in (*range(1, 13), 24, 30, 56, 60):
        for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
            for degree in (1, 2, 3, 4, 8, 16):
                split = HeadSplit(heads, kv_heads, degree)
                assert split.q_loc == -(-heads // degree)
                assert split.q_loc == split.group * split.kv_loc
                names = jnp.arange(1, kv_heads + 1).reshape(1, kv_heads, 1)
                read = np.asarray(split.spread_keys(names))[0, :, 0] if degree < 3 and heads < 9 else None
                for head in range(heads):
                    device, here = divmod(head, split.q_loc)
                    slot = device * split.kv_loc + here // split.group
                    assert slot * split.group // (heads // kv_heads) == head // (heads // kv_heads)
                    if read is not None:
                        assert read[slot] == head // (heads // kv_heads) + 1
    assert HeadSplit(8, 2, 4).kv_loc == 1, "two key heads over four devices: each gets the one it reads"
    assert HeadSplit(64, 8, 4).kv_loc == 2, "nothing is repeated where devices divide key heads"


@pytest.mark.parametrize(
    "case",
    [Case(q_loc=1, k_loc=1, text=77), Case(q_loc=2, k_loc=5, segments=2), Case(q_loc=5, k_loc=1, text=0)],
    ids=["one token a device, 77 of text", "more keys than queries", "fewer keys, no text"],
)
def test_lengths(case):
    check(ULYSSES, mesh_of(x=4), "x", case)


@pytest.mark.full
@pytest.mark.parametrize(("size", "segments", "causal", "text"), combinations([2, 3, 4, 8]))
def test_every_combination(size, segments, causal, text):
    case = Case(2, 3, kv_heads=2, segments=segments, causal=causal, text=text)
    check(ULYSSES, mesh_of(x=size), "x", case, vanishing=causal and text == 1)


@pytest.mark.parametrize("groups", [2, 3])
def test_groups_of_heads_compute_the_same(groups):
    """Seven heads a device of which some are zeros, in uneven groups."""
    case = Case(q_loc=2, k_loc=2, heads=26, kv_heads=26, dim=2, batch=1, text=2, segments=2)
    check(partial(ULYSSES, head_groups=groups), mesh_of(x=4), "x", case)


def test_groups_of_heads_that_share_keys():
    case = Case(heads=16, kv_heads=8, dim=2, batch=1)
    check(partial(ULYSSES, head_groups=2), mesh_of(x=4), "x", case)


@pytest.mark.parametrize(
    "block",
    [BLOCK, pytest.param(PackedBlockAttention(block=4), marks=pytest.mark.full)],
    ids=["xla", "packed rows"],
)
def test_a_poisoned_segment_changes_no_other(block):
    check_poison(ULYSSES, mesh_of(x=4), "x", Case(segments=3, text=4, block=block))


def test_replicated_keys():
    check_replicated_keys(ULYSSES, mesh_of(x=4), "x")


def test_bfloat16_errors_are_those_of_one_device():
    alone = Case(q_loc=64, k_loc=64, batch=1, dim=8, dtype=jnp.bfloat16)
    case = Case(q_loc=16, k_loc=16, batch=1, dim=8, dtype=jnp.bfloat16)
    one, four = (errors(ULYSSES, mesh_of(x=n), "x", c) for n, c in ((1, alone), (4, case)))
    for error, base in zip(four, one, strict=True):
        assert error <= 2 * base


@pytest.mark.parametrize("length", [1, 13, 16])
def test_lengths_that_do_not_divide_are_padded_and_nothing_is_dropped(length):
    rng = np.random.default_rng(0)
    q, k, v, d_out = rng.standard_normal((4, 2, length, 4, 4)).astype(np.float32)
    mesh = mesh_of(x=4)
    ids_given = length % 4 != 0

    def per_device(q, k, v, *ids):
        return ULYSSES(q, k, v, segment_ids=ids[0] if ids else None, block_attention=BLOCK)

    spec = P(None, "x")
    mapped = jax.shard_map(
        per_device, mesh=mesh, in_specs=(spec,) * (4 if ids_given else 3), out_specs=spec, check_vma=False
    )

    def attend(*qkv):
        rows, ids = pad_sequence(qkv, degree=4)
        assert (ids is not None) == ids_given
        return unpad_sequence(mapped(*rows, *([ids] if ids_given else [])), length=length)

    @jax.jit
    def run(q, k, v):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(d_out)

    out, gradients = run(q, k, v)
    wanted = joint_attention((q, k, v), d_out)
    close(out, wanted.out, F32)
    for gradient, expected in zip(gradients, wanted.gradients, strict=True):
        close(gradient, expected, F32)


def test_padding_refuses_what_is_no_sequence():
    rows = jnp.ones((2, 5, 3))
    with pytest.raises(
        ValueError, match=r"pad_sequence: .* one batch and length; got \[\(2, 4\), \(2, 5\)\]"
    ):
        pad_sequence((rows, rows[:, :4]), degree=2)
    with pytest.raises(ValueError, match="degree is at least 1; got degree=0"):
        pad_sequence(rows, degree=0)
    with pytest.raises(ValueError, match="length is at most that of the rows; got length=6, rows=5"):
        unpad_sequence(rows, length=6)
    assert unpad_sequence(rows, length=5).shape == rows.shape
    assert pad_sequence(rows[:, :0], degree=4).rows.shape == (2, 4, 3), "nobody has nothing"
    ids = np.array([[1, 1, 2, 0, 3]] * 2)
    assert pad_sequence(rows, degree=3, segment_ids=ids).segment_ids.tolist() == [[1, 1, 2, 0, 3, 0]] * 2


@pytest.mark.parametrize(("k_loc", "heads"), [(3, 8), (5, 8), (3, 6)])
def test_exchanges_and_their_bytes(k_loc, heads):
    """Of 4 devices each keeps a quarter of what enters; 6 heads move as 8."""
    case = Case(k_loc=k_loc, heads=heads, kv_heads=heads)
    mesh = mesh_of(x=4)
    arrays = draw(case, 4)
    found = moves(program(ULYSSES, mesh, "x", case), arrays.qkv, arrays.d_out, None, None, None, None)
    assert {move.kind for move in found} == {"all_to_all"}
    assert len(found) == (4 if k_loc == case.q_loc else 6), "there and back, and the gradients of both"
    row = case.batch * case.dim * 8 * 4
    assert sum(move.num_bytes * move.times for move in found) == 2 * row * (2 * case.q_loc + 2 * k_loc)
    assert lowered_text(ULYSSES, mesh, "x", case).count("stablehlo.all_to_all") == len(found)


def test_groups_move_the_same_bytes_in_more_exchanges():
    case = Case(heads=16, kv_heads=16, dim=2)
    mesh = mesh_of(x=4)
    arrays = draw(case, 4)
    found = {
        groups: moves(
            program(partial(ULYSSES, head_groups=groups), mesh, "x", case),
            arrays.qkv,
            arrays.d_out,
            None,
            None,
            None,
            None,
        )
        for groups in (1, 2, 4)
    }
    assert {groups: len(of) for groups, of in found.items()} == {1: 4, 2: 8, 4: 16}
    assert len({sum(move.num_bytes for move in of) for of in found.values()}) == 1


def test_more_groups_than_key_heads():
    q = jnp.ones((1, 4, 8, 4))
    mapped = jax.shard_map(
        lambda q: ULYSSES(q, q, q, head_groups=3),
        mesh=mesh_of(x=4),
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
        check_vma=False,
    )
    message = r"ulysses_attention: head_groups is 1 to .*head_groups=3, 2 key heads a device \(8 over 4"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, q)
