"""Block attention of every implementation: whole, and in parts of keys whose results merge and gradients add up."""

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from parallel import KernelTiles, PallasKernel, Tiles
from parallel._block_attention import (
    Attended,
    BlockAttention,
    BlockMask,
    DifferentiableAttention,
    block_forward,
    local_attention,
)
from parallel._block_cudnn import CudnnBlockAttention
from parallel._block_packed import PackedBlockAttention
from parallel._block_platform import PlatformBlockAttention
from parallel._block_xla import XlaBlockAttention
from parallel._online_softmax import merge
from tests.oracles import close
from tests.oracles_sequence import joint_attention

F32, BF16 = 1e-5, 2e-2
TILES = Tiles(queries=16, keys=16, num_warps=4, num_stages=2)


def plain(q, k, v, mask, scale):
    """A user's own: whole logits, with masks."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, 2).astype(jnp.float32) for x in (k, v))
    logits = jnp.einsum("bqhd,bkhd->bqhk", q.astype(jnp.float32), k) * scale
    keep = jnp.ones(logits.shape, bool)
    if mask.q_ids is not None:
        keep &= ((mask.q_ids[:, :, None] == mask.kv_ids[:, None]) & (mask.q_ids > 0)[:, :, None])[:, :, None]
    if mask.q_positions is not None:
        keep &= (mask.q_positions[:, None] >= mask.kv_positions[None])[None, :, None]
    some = keep.any(-1)
    logits = jnp.where(keep, logits, -1e30)
    lse = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("bqhk,bkhd->bqhd", jnp.where(keep, jnp.exp(logits - lse[..., None]), 0.0), v)
    return out, jnp.where(some, lse, -jnp.inf)


BLOCKS = {
    "xla, blocks of 5": XlaBlockAttention(block=5),
    "xla, one block": XlaBlockAttention(),
    "packed rows": PackedBlockAttention(block=8),
    "own function": DifferentiableAttention(plain),
}


def draw(l_q, l_k, heads=4, kv_heads=2, dim=8, batch=2, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = (batch, l_q, heads, dim), *((batch, l_k, kv_heads, dim),) * 2, (batch, l_q, heads, dim)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)


def ids_of(length, seed, batch=2):
    """Three segments and padding, in any order."""
    return np.random.default_rng(seed).integers(0, 4, (batch, length)).astype(np.int32)


@cache
def in_parts(block, parts):
    """Merged results of parts of the keys, and the sum of their gradients."""

    @jax.jit
    def run(q, k, v, mask, d_out):
        scale = q.shape[-1] ** -0.5
        cuts = np.cumsum([0, *parts])
        slices = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        some = [
            replace(
                mask,
                kv_ids=None if mask.kv_ids is None else mask.kv_ids[:, s],
                kv_positions=None if mask.kv_positions is None else mask.kv_positions[s],
            )
            for s in slices
        ]
        results = [
            block_forward(block, q, k[:, s], v[:, s], m, scale) for s, m in zip(slices, some, strict=True)
        ]
        out, lse = results[0]
        for result in results[1:]:
            out, lse = merge(type(result)(out, lse), result)
        gradients = [
            block.backward(q, k[:, s], v[:, s], Attended(out, lse, d_out), m, scale)
            for s, m in zip(slices, some, strict=True)
        ]
        dq = sum(g[0].astype(jnp.float32) for g in gradients)
        dk, dv = (jnp.concatenate([g[i] for g in gradients], 1) for i in (1, 2))
        return out, lse, (dq, dk, dv)

    return run


def check(block, inputs, mask, *, parts=None, tolerance=F32, ids=None, causal=False):
    q, k, v, d_out = inputs
    out, lse, gradients = in_parts(block, parts or (k.shape[1],))(q, k, v, mask, d_out)
    wanted = joint_attention((q, k, v), d_out, ids=ids, causal=causal)
    close(out, wanted.out, tolerance)
    some = np.isfinite(wanted.lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~some)
    close(np.asarray(lse)[some], wanted.lse[some], tolerance)
    for actual, expected in zip(gradients, wanted.gradients, strict=True):
        close(actual, expected, tolerance)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_whole_softmax_and_its_gradient(name):
    check(BLOCKS[name], draw(11, 13), BlockMask())


@pytest.mark.parametrize("name", BLOCKS)
def test_parts_of_the_keys_merge_and_their_gradients_add_up(name):
    q_ids, kv_ids = ids_of(11, 1), ids_of(13, 2)
    kv_ids[:, :5] = np.where(
        kv_ids[:, :5] == 3, 0, kv_ids[:, :5]
    )  # segment 3 is not in the first part at all
    check(BLOCKS[name], draw(11, 13), BlockMask(q_ids, kv_ids), parts=(5, 8), ids=(q_ids, kv_ids))


@pytest.mark.parametrize("name", ["xla, blocks of 5", "own function"])
def test_causal_with_segments(name):
    ids = ids_of(12, 3)
    places = np.arange(12, dtype=np.int32)
    check(
        BLOCKS[name],
        draw(12, 12),
        BlockMask(ids, ids, places, places),
        parts=(1, 11),
        ids=(ids, ids),
        causal=True,
    )


def test_bfloat16_results_and_accumulators_are_float32():
    for name in ("xla, blocks of 5", "packed rows"):
        check(BLOCKS[name], draw(11, 13, dtype=jnp.bfloat16), BlockMask(), parts=(6, 7), tolerance=BF16)


def test_triton_rows_interpreted():
    kernel = PallasKernel(KernelTiles(TILES, TILES, TILES), interpret=True)
    ids = np.sort(ids_of(20, 4), axis=1)
    block = PackedBlockAttention(kernel, block=16)
    check(block, draw(20, 20, heads=2, kv_heads=1), BlockMask(ids, ids), parts=(12, 8), ids=(ids, ids))


def test_local_attention_has_the_gradient_of_its_block():
    q, k, v, d_out = draw(9, 9)
    ids = ids_of(9, 5)
    block = XlaBlockAttention(block=4)

    @jax.jit
    def run(q, k, v, ids):
        def attend(*qkv):
            return local_attention(*qkv, BlockMask(ids, ids), scale=0.3, block_attention=block)

        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(d_out)

    out, gradients = run(q, k, v, ids)
    wanted = joint_attention((q, k, v), d_out, ids=(ids, ids), scale=0.3)
    close(out, wanted.out, F32)
    for actual, expected in zip(gradients, wanted.gradients, strict=True):
        close(actual, expected, F32)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("where", ["q", "k", "v", "d_out"])
def test_what_is_not_finite_stays_in_its_segment(where, value):
    """No bit of another segment changes, and padding stays zero."""
    inputs = dict(zip(("q", "k", "v", "d_out"), map(np.array, draw(12, 12)), strict=True))
    ids = ids_of(12, 6)
    bad = np.argwhere(ids == 2)[0]
    mask = BlockMask(ids, ids)

    def run(x):
        return in_parts(BLOCKS["xla, blocks of 5"], (7, 5))(x["q"], x["k"], x["v"], mask, x["d_out"])

    before = run(inputs)
    poisoned = {name: x.copy() for name, x in inputs.items()}
    poisoned[where][tuple(bad)] = value
    for x in poisoned.values():
        x[ids == 0] = value
    after = run(poisoned)
    others = (ids != 2) | (np.arange(2)[:, None] != bad[0])
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
    if not np.isfinite(value):
        assert any(np.isnan(x).any() for x in jax.tree.leaves(after)), "it is not hidden where it belongs"


def test_ids_of_any_size_are_told_apart_by_the_packed_rows():
    ids = np.where(ids_of(12, 7) > 1, 2**31 - 1 - ids_of(12, 7), 0).astype(np.int32)
    check(BLOCKS["packed rows"], draw(12, 12), BlockMask(ids, ids), ids=(ids, ids))


def test_extreme_logits():
    """Logits of 600 have an error of 3e-5 in float32, and so have weights."""
    q, k, v, d_out = draw(11, 13)
    check(BLOCKS["xla, blocks of 5"], (q * 10, k * 10, v, d_out), BlockMask(), parts=(5, 8), tolerance=1e-4)
    out, lse, gradients = in_parts(BLOCKS["xla, blocks of 5"], (5, 8))(
        q * 1e4, k * 1e4, v, BlockMask(), d_out
    )
    wanted = joint_attention((q * 1e4, k * 1e4, v), d_out)
    close(out, wanted.out, F32)
    close(lse, wanted.lse, F32)
    assert all(np.isfinite(g).all() for g in gradients)


def test_the_default_is_chosen_by_platform():
    """Triton for head sizes that it takes; plain JAX elsewhere, and for what it does not take."""
    default = PlatformBlockAttention()
    check(default, draw(11, 13), BlockMask(), parts=(5, 8))

    def lowered(mask, **shape):
        q, k, v, _ = draw(8, 8, **shape)
        run = jax.jit(lambda *x: default.forward(*x, 1.0))
        return run.trace(q, k, v, mask).lower(lowering_platforms=("cuda",)).as_text()

    ids, places = np.ones((2, 8), np.int32), np.arange(8, dtype=np.int32)
    assert "triton" in lowered(BlockMask(ids, ids), dim=64)
    assert "triton" not in lowered(BlockMask(ids, ids), dim=8)
    assert "triton" not in lowered(BlockMask(None, None, places, places), dim=64)


def test_cudnn_takes_the_statistics_of_the_whole_softmax(monkeypatch):
    """Lowered without the library: the program says what its kernels get. None of it runs here."""
    monkeypatch.setattr(fused, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda _: False)
    q, k, v, d_out = draw(16, 24, dim=64, dtype=jnp.bfloat16)
    lse = jnp.ones(q.shape[:3])
    default = PlatformBlockAttention()

    def run(q, k, v, out, lse, d_out):
        forward = default.forward(q, k, v, BlockMask(), 0.1)
        return forward, default.backward(q, k, v, Attended(out, lse, d_out), BlockMask(), 0.1)

    traced = jax.jit(run).trace(q, k, v, q, lse, d_out)
    assert traced.lower(lowering_platforms=("cpu",)).as_text().count("fmha") == 0
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmax(") == 1
    # q, k, v, lse, d_out, out: two arrays of bfloat16 in heads, lse in float32 and (b, h, l).
    (line,) = [line for line in text.splitlines() if "__cudnn$fmhaSoftmaxBackward(" in line]
    operands = line.split(" : (")[-1].split(") -> ")[0]
    assert operands.count("tensor<2x16x4x64xbf16>") == 3
    assert operands.count("tensor<2x24x2x64xbf16>") == 2
    assert operands.count("tensor<2x4x16xf32>") == 1


def test_refusals():
    q, k, v, d_out = draw(4, 4)
    places = np.arange(4, dtype=np.int32)
    causal = BlockMask(None, None, places, places)
    with pytest.raises(NotImplementedError, match=r"PackedBlockAttention: packed kernels have no causal"):
        PackedBlockAttention().forward(q, k, v, causal, 1.0)
    with pytest.raises(
        NotImplementedError, match=r"CudnnBlockAttention: no mask but a diag.*got float32\[2, 4, 4, 8\]"
    ):
        CudnnBlockAttention().forward(q, k, v, BlockMask(), 1.0)
    transposed = DifferentiableAttention(
        lambda q, k, v, mask, scale: (q, q[..., 0].transpose(0, 2, 1)[:, :3])
    )
    with pytest.raises(
        ValueError, match=r"block_attention: forward returns .*\(2, 3, 4\) for q=\(2, 4, 4, 8\)"
    ):
        block_forward(transposed, q, k, v, BlockMask(), 1.0)

    def twice(x):
        gradient = jax.grad(
            lambda y: local_attention(
                y, k, v, BlockMask(), scale=1.0, block_attention=XlaBlockAttention()
            ).sum()
        )
        return gradient(x).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(twice)(q)
    assert all(isinstance(block, BlockAttention) for block in BLOCKS.values())
    assert d_out.shape == q.shape
