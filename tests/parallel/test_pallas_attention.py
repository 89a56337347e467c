"""The GPU kernels, interpreted: against dense attention in float64, poisoned segments, and what a program lowers to."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import (
    KernelTiles,
    PackedSegments,
    PallasKernel,
    Tiles,
    XlaKernel,
    packed_attention,
    uniform_attention,
)
from parallel._tiles import TILE_TABLE, tile_visits
from tests.oracles import attention, close
from tests.parallel.attention_cases import (
    BF16,
    Form,
    check,
    check_poison,
    draw,
    ids_of,
    segments_of,
    value_and_gradient,
)
from tests.parallel.exchange_cases import one_axis_mesh

# Key tiles larger and smaller than query tiles, all unlike the blocks; a size that no block divides.
TILES = KernelTiles(Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 64, 4, 2))
SMALL = PallasKernel(TILES, interpret=True)
ROWS = 480
FORM = Form(SMALL, block=24, dim=16)
RNG = np.random.default_rng(3)
CASES = {
    "one segment": [ROWS],
    "one row each": [1] * 7,
    "ragged ends": [1, 31, 33, 100, 32, 64, 5, 150],
    "none": [],
    "one row alone": [1],
}


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_values_lse_and_gradients_are_dense_attentions(lengths):
    check(ids_of(lengths, ROWS), form=FORM)


def test_padding_between_segments_and_segments_in_any_order():
    ids = ids_of(RNG.integers(1, 20, 30), ROWS, gap=3)
    number = np.concatenate([[0], RNG.permutation(30) + 1]).astype(np.int32)
    check(number[ids], form=FORM)


@pytest.mark.parametrize(
    ("query_lengths", "key_lengths"),
    [([5, 40, 0, 60, 1], [50, 200, 20, 61, 77, 9]), ([5, 40, 20], [50, 100])],
    ids=["queries of some segments", "queries without keys"],
)
def test_queries_and_keys_of_different_layouts(query_lengths, key_lengths):
    check(ids_of(query_lengths, 240, gap=2), ids_of(key_lengths, ROWS, gap=1), form=FORM)


@pytest.mark.parametrize("block", [8, 64, 256])
def test_tiles_do_not_depend_on_blocks(block):
    check(ids_of([1, 31, 33, 100, 32, 64, 5, 150], 512), form=Form(SMALL, block=block, dim=16))


def test_1024_segments():
    check(ids_of(RNG.integers(1, 3, 1024), 2048), form=Form(SMALL, block=128, dim=16))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bfloat16_tiles_of_the_table(head_dim):
    form = Form(PallasKernel(interpret=True), block=40, dim=head_dim, dtype=jnp.bfloat16)
    check(ids_of([1, 31, 130, 7, 142], 320), tolerance=BF16, form=form)


def test_float32_tiles_of_the_table():
    check(ids_of([1, 31, 60], 120), form=Form(PallasKernel(interpret=True), block=40, dim=128))


def test_scale():
    check(ids_of([50, 70], ROWS), form=Form(SMALL, block=24, dim=16, scale=0.5))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "d_out", "d_lse"])
def test_poisoned_segment_and_padding_change_no_other_bit(where, value):
    """Segment 3 fills whole tiles, and shares others with its neighbours."""
    check_poison(where, value, ids_of([1, 20, 150, 100, 3, 64, 5, 20], ROWS, gap=1), FORM)


@pytest.mark.parametrize("huge", [1e38, 3e38])
def test_huge_values_of_one_segment_change_no_bit_of_another(huge):
    ids = ids_of([20, 150, 100], ROWS)
    q, k, v, d_out, d_lse = draw(ROWS, ROWS, 16)
    other = ids == 2
    wild_k, wild_v, wild_d = (np.where(other[:, None], np.float32(huge), x) for x in (k, v, d_out))
    run = value_and_gradient(None, SMALL)
    segments = segments_of(ids, ids, 24)
    tame = jax.tree.leaves(run(q, k, v, segments, d_out, d_lse))
    wild = jax.tree.leaves(run(q, wild_k, wild_v, segments, wild_d, d_lse))
    for a, b in zip(tame, wild, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[~other], np.asarray(b)[~other])


def test_extreme_logits_neither_overflow_nor_vanish():
    q, k, v, d_out, d_lse = draw(ROWS, ROWS, 16)
    ids = ids_of([1, 31, 33, 100, 32, 64, 5, 150], ROWS)
    segments, run = segments_of(ids, ids, 24), value_and_gradient(None, SMALL)
    q, k = q * np.float32(1e3), k * np.float32(10)
    (out, lse), gradients = run(q, k, v, segments, d_out, d_lse)
    wanted = attention(q, k, v, ids, ids)
    assert np.abs(wanted.lse[ids > 0]).max() > 1e4
    close(out, wanted.out, 1e-2)  # float32 resolves a logit of 1e4 to 1e-3
    close(lse[ids > 0], wanted.lse[ids > 0], 1e-5)
    assert all(np.isfinite(g).all() for g in gradients)
    (out, _), gradients = run(q * 1e18, k * 1e8, v, segments, d_out, d_lse)
    assert np.isfinite(out).all()
    assert all(np.isfinite(g).all() for g in gradients)
    # All logits of a segment at -1e30: softmax knows no absolute level.
    (out, lse), _ = run(np.full_like(q, 1e15), np.full_like(k, -1e15), v, segments, d_out, d_lse)
    close(out[32:65], np.broadcast_to(v[32:65].mean(0), (33, 16)), 1e-5)
    assert np.isfinite(lse[ids > 0]).all()


# Which tiles are visited.


def reaching(own_ids, other_ids, own_tile, other_tile):
    """For each own tile: the other tiles that hold a row of its segments, and those that hold only its one segment."""
    own = [set(x[x > 0]) for x in np.split(own_ids, range(own_tile, len(own_ids), own_tile))]
    other = [x.tolist() for x in np.split(other_ids, range(other_tile, len(other_ids), other_tile))]
    for tile, segments in enumerate(own):
        whole = len(segments) == 1 and (own_ids[tile * own_tile :][:own_tile] > 0).all()
        needed = {j for j, ids in enumerate(other) if segments & set(ids)}
        full = {j for j, ids in enumerate(other) if whole and set(ids) == segments and len(ids) == other_tile}
        yield tile, needed, full


@pytest.mark.parametrize("block", [8, 24, 48])
@pytest.mark.parametrize(("own_tile", "other_tile"), [(16, 16), (32, 16), (16, 128), (128, 64)])
def test_tiles_visit_what_they_need_and_mask_what_is_mixed(block, own_tile, other_tile):
    own_ids, other_ids = ids_of([30, 1, 90, 7, 3], 240, gap=1), ids_of([130, 9, 190, 40], 384, gap=2)
    segments = segments_of(own_ids, other_ids, block)
    visits = np.asarray(
        tile_visits(
            segments.query_ids,
            segments.key_blocks,
            segments.key_ids,
            segments.query_blocks.shape[0],
            own_tile=own_tile,
            other_tile=other_tile,
        )
    )
    lengths = visits[:, 2] - visits[:, 1]
    assert (np.diff(lengths) <= 0).all(), "longest first"
    by_tile = visits[np.argsort(visits[:, 0])]
    for tile, needed, full in reaching(own_ids, other_ids, own_tile, other_tile):
        found, start, stop, full_start, full_stop = by_tile[tile].tolist()
        assert found == tile
        assert needed <= set(range(start, stop))
        assert set(range(full_start, full_stop)) == full
        if not needed:
            assert start == stop
        assert stop <= -(-len(other_ids) // other_tile)


def test_a_segment_in_two_pieces_is_masked_everywhere():
    """Against the contract; still no wrong answer."""
    ids = jnp.asarray(ids_of([64, 64, 64], 192) % 3 + (ids_of([64, 64, 64], 192) == 3))
    blocks = jnp.tile(jnp.array([[0, 3]], jnp.int32), (3, 1))
    visits = tile_visits(ids, blocks, ids, 3, own_tile=32, other_tile=32)
    pieces = np.asarray(visits)[np.isin(visits[:, 0], [0, 1, 4, 5])]
    assert (pieces[:, 3] == pieces[:, 4]).all()


# What programs hold.


def lowered(platform, head_dim=64, dtype=jnp.bfloat16, scale=None, around=lambda f: f):
    ids = ids_of([100, 156], 256)
    segments = segments_of(ids, ids, 64)
    x = jnp.zeros((256, head_dim), dtype)

    def loss(q, k, v, segments):
        attend = around(lambda q: packed_attention(q, k, v, segments, scale=scale).out)
        return attend(q).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return gradient.trace(x, x, x, segments).lower(lowering_platforms=(platform,)).as_text()


def kernels_of(text):
    return sorted(re.findall(r'name = "packed_attention_(\w+)"', text))


KERNELS = ["forward", "grad_keys", "grad_queries"]


def test_programs_for_cuda_hold_the_kernels_and_no_loop():
    text = lowered("cuda")
    assert kernels_of(text) == KERNELS
    assert "stablehlo.while" not in text
    assert "stablehlo.dot_general" not in text
    assert "256x256" not in text


def test_programs_for_cpu_hold_the_loop_and_no_kernel():
    text = lowered("cpu")
    assert "triton" not in text
    assert "stablehlo.while" in text


@pytest.mark.parametrize(
    "options",
    [{"head_dim": 32}, {"scale": -0.5}, {"head_dim": 64, "scale": 0.0}],
    ids=["head size", "sign", "zero"],
)
def test_other_rows_take_plain_jax_on_cuda(options):
    text = lowered("cuda", **options)
    assert kernels_of(text) == []
    assert "stablehlo.while" in text


def test_kernels_inside_scan_checkpoint_and_shard_map():
    def around(attend):
        def layers(q):
            body = jax.checkpoint(lambda x, _: (attend(x), None))
            return jax.lax.scan(body, q, None, length=3)[0]

        spec = P(None)
        return jax.shard_map(layers, mesh=one_axis_mesh(2), in_specs=spec, out_specs=spec, check_vma=False)

    # The forward kernel in the forward scan, and again where the backward scan recomputes it.
    assert kernels_of(lowered("cuda", around=around)) == ["forward", *KERNELS]


def test_rows_that_do_not_apply_are_refused_by_name():
    ids = ids_of([3], rows=32)
    x = jnp.ones((32, 4))
    with pytest.raises(NotImplementedError, match=r"one head size of \[64, 128\].*got float32\[32, 4\]"):
        packed_attention(x, x, x, segments_of(ids, ids), kernel=PallasKernel())


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused_with_tiles_of_ones_own(scale):
    ids = ids_of([3], rows=32)
    x = jnp.ones((32, 16))
    with pytest.raises(NotImplementedError, match=r"scale is positive.*Use XlaKernel"):
        packed_attention(x, x, x, segments_of(ids, ids), scale=scale, kernel=SMALL)


def test_the_table_lists_powers_of_two():
    for (head_dim, _), tiles in TILE_TABLE.items():
        sizes = [n for t in (tiles.forward, tiles.grad_queries, tiles.grad_keys) for n in (t.queries, t.keys)]
        assert all(n >= 16 and n.bit_count() == 1 for n in [head_dim, *sizes])


# Sequences of one length.


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", BF16)])
def test_uniform_attention_is_dense_attention(dtype, tolerance):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 3, 16)), dtype) for n in (5, 9, 9))
    out = uniform_attention(q, k, v, scale=0.3)
    assert out.dtype == dtype
    for b in range(2):
        for h in range(3):
            wanted = attention(q[b, :, h], k[b, :, h], v[b, :, h], np.ones(5), np.ones(9), 0.3)
            close(out[b, :, h], wanted.out, tolerance)


def test_uniform_attention_takes_no_integers():
    x = jnp.ones((1, 4, 2, 8), jnp.int32)
    with pytest.raises(TypeError, match="uniform_attention: q, k and v are floating point; got int32"):
        inspect.unwrap(uniform_attention)(x, x, x)


def test_uniform_attention_takes_one_dtype():
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(ValueError, match="one dtype; got float32, bfloat16 and float32"):
        uniform_attention(x, x.astype(jnp.bfloat16), x)


@pytest.mark.parametrize("kernel", [SMALL, XlaKernel()], ids=["pallas", "xla"])
def test_ranges_wider_than_needed_change_nothing(kernel):
    ids = ids_of([30, 100, 70], 240)
    tight = segments_of(ids, ids, 24)
    wide = PackedSegments(
        tight.query_ids, tight.key_ids, *[jnp.tile(jnp.array([[0, 10]], jnp.int32), (10, 1))] * 2
    )
    q, k, v, d_out, d_lse = draw(240, 240, 16)
    run = value_and_gradient(None, kernel)
    both = [jax.tree.leaves(run(q, k, v, s, d_out, d_lse)) for s in (tight, wide)]
    for a, b in zip(*both, strict=True):
        some = np.isfinite(a)  # but for lse of padding
        np.testing.assert_array_equal(np.isfinite(b), some)
        close(b[some], a[some], 1e-5)
