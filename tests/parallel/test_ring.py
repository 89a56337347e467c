"""Ring attention against the whole sequence on one device: values, gradients, what moves, what is not computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import (
    DifferentiableAttention,
    KernelTiles,
    PackedBlockAttention,
    PallasKernel,
    PlatformBlockAttention,
    XlaBlockAttention,
    ring_attention,
)
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
    lowered_text,
    mesh_of,
    moves,
    program,
)
from tests.parallel.test_block_attention import TILES, plain

INTERPRETED = PallasKernel(KernelTiles(TILES, TILES, TILES), interpret=True)
RING = partial(ring_attention, axis_name="x")
ALL = Case(segments=3, causal=True, text=5, kv_heads=2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_axis_sizes(size):
    check(RING, mesh_of(x=size), "x", Case())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_causal_with_text_and_grouped_heads(size):
    check(RING, mesh_of(x=size), "x", ALL)


@pytest.mark.parametrize(
    "case",
    [
        Case(q_loc=1, k_loc=1, text=77),
        Case(q_loc=2, k_loc=5, segments=2),
        Case(q_loc=5, k_loc=1, text=0, causal=True),
    ],
    ids=["one token a device, 77 of text", "more keys than queries", "fewer keys, no text"],
)
def test_lengths(case):
    check(RING, mesh_of(x=4), "x", case)


@pytest.mark.full
@pytest.mark.parametrize(("size", "segments", "causal", "text"), combinations([2, 3, 4, 8]))
def test_every_combination(size, segments, causal, text):
    case = Case(2, 3, kv_heads=2, segments=segments, causal=causal, text=text)
    check(RING, mesh_of(x=size), "x", case, vanishing=causal and text == 1)


def test_two_axes_as_one():
    mesh = mesh_of(a=2, b=4)
    check(partial(ring_attention, axis_name=("a", "b")), mesh, ("a", "b"), Case(segments=2, causal=True))


@pytest.mark.parametrize(("causal", "check_vma"), [(False, False), (True, True)])
def test_an_axis_beside_it_holds_other_sequences(causal, check_vma):
    """Batch over one axis, sequence over the other."""
    mesh = mesh_of(data=2, x=4)
    case = Case(q_loc=6, k_loc=6)
    arrays = draw(case, 4)
    spec = P("data", "x")
    run = jax.shard_map(
        lambda *qkv: RING(*qkv, causal=causal, block_attention=BLOCK),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )
    alone = jax.shard_map(
        lambda *qkv: RING(*qkv, causal=causal, block_attention=BLOCK),
        mesh=mesh_of(x=4),
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(run)(*arrays.qkv), jax.jit(alone)(*arrays.qkv), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "block", [PlatformBlockAttention(), PackedBlockAttention(block=4)], ids=["default", "packed rows"]
)
def test_shard_map_may_check_what_differs_between_devices_in_any_block(block):
    check(RING, mesh_of(x=2), "x", Case(segments=2, heads=2, kv_heads=1, dim=64, check_vma=True, block=block))


@pytest.mark.parametrize("of_queries", [False, True])
def test_shard_map_may_check_ids_of_several_packings_of_the_same_rows(of_queries):
    """Rows are the same along an axis where ids differ, those of queries or of keys."""
    mesh = mesh_of(packing=2, x=2)
    q, k, v = draw(Case(), 2).qkv
    ids = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 0]], np.int32), np.ones((2, 6), np.int32)

    def attend(q, k, v, own, others):
        pair = (own, others) if of_queries else (others, own)
        return RING(q, k, v, segment_ids=pair, block_attention=BLOCK)

    rows, packed = P(None, "x"), P("packing", "x")
    specs = (rows, rows, rows, packed, rows)

    def loss(qkv, check_vma):
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=packed, check_vma=check_vma)
        return (mapped(*qkv, ids[0], ids[1][:1]) ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    qkv = q[:1], k[:1], v[:1]
    for got, wanted in zip(*map(jax.tree.leaves, (run(qkv, True), run(qkv, False))), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_shard_map_may_check_where_triton_computes(dtype):
    mesh = mesh_of(x=2)
    case = Case(segments=2, dim=64, dtype=dtype, check_vma=True, block=PlatformBlockAttention())
    arrays = draw(case, 2)
    traced = program(RING, mesh, "x", case).trace(arrays.qkv, arrays.d_out, arrays.ids, None, None, None)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert all(f"packed_attention_{name}" in text for name in ("forward", "grad_queries", "grad_keys"))


@pytest.mark.parametrize(
    "block",
    [
        BLOCK,
        PackedBlockAttention(block=4),
        pytest.param(PackedBlockAttention(INTERPRETED, block=16), marks=pytest.mark.full),
    ],
    ids=["xla", "packed rows", "triton rows, interpreted"],
)
def test_a_poisoned_segment_changes_no_other(block):
    check_poison(RING, mesh_of(x=4), "x", Case(segments=3, text=4, block=block))


@pytest.mark.full
def test_a_poisoned_segment_changes_no_other_where_a_mask_is_causal():
    check_poison(RING, mesh_of(x=4), "x", Case(segments=3, text=4, causal=True))


def test_replicated_keys():
    check_replicated_keys(RING, mesh_of(x=4), "x")


def test_a_function_of_the_user_serves():
    block = DifferentiableAttention(plain)

    def attention(*args, block_attention, **options):
        return RING(*args, block_attention=block, **options)

    check(attention, mesh_of(x=2), "x", Case(segments=2, causal=True))


ONLY_IN_FULL = [pytest.param(size, marks=pytest.mark.full) for size in (1, 3, 5, 6, 7)]


@pytest.mark.parametrize("size", [2, 4, 8, *ONLY_IN_FULL])
@pytest.mark.parametrize(
    "masks",
    [{}, pytest.param({"segments": 3, "causal": True}, marks=pytest.mark.full)],
    ids=["all", "packed and causal"],
)
def test_bfloat16_errors_do_not_grow_with_the_ring(size, masks):
    """At most twice those of one device, values and gradients, of 840 rows."""
    alone, shared = (
        Case(q_loc=840 // n, k_loc=840 // n, heads=2, kv_heads=2, batch=1, dim=8, dtype=jnp.bfloat16, **masks)
        for n in (1, size)
    )
    one = errors(RING, mesh_of(x=1), "x", alone)
    for error, base in zip(errors(RING, mesh_of(x=size), "x", shared), one, strict=True):
        assert error <= 2 * base, (error, base)


@pytest.mark.parametrize("size", [2, 4])
def test_permutes_of_keys_and_of_their_gradients_and_nothing_else(size):
    case = Case(kv_heads=2)
    mesh = mesh_of(x=size)
    arrays = draw(case, size)
    found = moves(program(RING, mesh, "x", case), arrays.qkv, arrays.d_out, None, None, None, None)
    assert {move.kind for move in found} == {"ppermute"}
    # Two arrays of b k_loc h_kv d numbers of 4 bytes.
    one = 2 * case.batch * case.k_loc * case.kv_heads * case.dim * 4
    there, back_keys, back_gradients = size - 1, size if size > 2 else 1, size - 1
    assert sum(move.num_bytes * move.times for move in found) == one * (there + back_keys + back_gradients)
    assert sum(move.times for move in found) == there + (size + 1 if size > 2 else 2)
    assert "all_gather" not in lowered_text(RING, mesh, "x", ALL)


def test_nothing_has_the_length_of_the_sequence():
    """On a device no array of the program is longer than its own rows, or a block of keys."""
    case = Case(q_loc=23, k_loc=23, segments=2, causal=True)
    arrays = draw(case, 4)

    def per_device(*args):
        return RING(*args[:3], segment_ids=args[3], causal=True, block_attention=XlaBlockAttention(block=16))

    def run(*args):
        out, pullback = jax.vjp(lambda *qkv: per_device(*qkv, args[3]), *args[:3])
        return pullback(out)

    spec = P(None, "x")
    mapped = jax.shard_map(run, mesh=mesh_of(x=4), in_specs=spec, out_specs=spec, check_vma=False)
    (eqn,) = jax.make_jaxpr(mapped)(*arrays.qkv, arrays.ids[0]).jaxpr.eqns
    text = str(eqn.params["jaxpr"])
    assert "23" in text
    assert ",92" not in text
    assert "23,23" not in text


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_a_causal_mask_hides_are_not_computed(causal):
    """Of R^2 blocks R (R + 1) / 2 are left; for the gradient each device's own one is in halves, of which the mask cuts
    the second in two."""
    size = 4
    computed = computed_blocks(RING, mesh_of(x=size), "x", Case(q_loc=4, k_loc=4, causal=causal))
    blocks = size * (size + 1) // 2 if causal else size * size
    assert computed == {"forward": blocks, "backward": blocks + (2 * size if causal else size)}
