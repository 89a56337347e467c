"""Packed attention against dense attention in float64: values, log-sum-exp and gradients; segments that do not mix."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel import PackedOutput, PallasKernel, XlaKernel, packed_attention
from tests.oracles import attention, close
from tests.parallel.attention_cases import (
    BF16,
    BLOCK,
    DIM,
    F32,
    ROWS,
    Form,
    check,
    check_poison,
    draw,
    ids_of,
    segments_of,
    value_and_gradient,
)

RNG = np.random.default_rng(3)
# As users call it: without the run-time type checker of the tests.
UNTYPED = inspect.unwrap(packed_attention)
CASES = {
    "one segment": [ROWS],
    "one row each": [1] * 7,
    "ragged ends": [1, 31, 33, 100, 32, 64, 5, 700],
    "1024 tiny": RNG.integers(1, 3, 1024).tolist(),
    "none": [],
    "one row alone": [1],
}


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_values_lse_and_gradients_are_dense_attentions(lengths):
    check(ids_of(lengths))


def test_padding_between_segments_and_segments_in_any_order():
    lengths = RNG.integers(1, 60, 40)
    ids = ids_of(lengths, gap=3)
    number = np.concatenate([[0], RNG.permutation(40) + 1]).astype(np.int32)
    check(number[ids])


def test_queries_and_keys_of_different_layouts():
    """Parts of divided items: few queries of a segment here, all its keys; a segment whose queries are elsewhere."""
    query_ids = ids_of([5, 40, 0, 60, 1], rows=512, gap=2)
    key_ids = ids_of([50, 300, 20, 61, 77, 9], rows=1024, gap=1)
    check(query_ids, key_ids)


def test_queries_without_any_key_are_zero():
    check(ids_of([5, 40, 20], rows=512), ids_of([50, 300], rows=1024))


def test_bfloat16():
    check(ids_of([1, 31, 33, 100, 32, 64, 5, 700]), tolerance=BF16, form=Form(dtype=jnp.bfloat16))


def test_extreme_logits_neither_overflow_nor_vanish():
    q, k, v, d_out, d_lse = draw()
    ids = ids_of([1, 31, 33, 100, 32, 64, 5, 700])
    # Logits of +-1e4 and of 1e30: exp of either overflows without its maximum taken out.
    q = q * np.float32(1e3)
    k = k * np.float32(10)
    (out, lse), gradients = value_and_gradient()(q, k, v, segments_of(ids, ids), d_out, d_lse)
    wanted = attention(q, k, v, ids, ids)
    assert np.abs(wanted.lse[np.isfinite(wanted.lse)]).max() > 1e4
    close(out, wanted.out, 1e-2)  # float32 resolves a logit of 1e4 to 1e-3
    close(lse[ids > 0], wanted.lse[ids > 0], F32)
    assert all(np.isfinite(g).all() for g in gradients)
    (out, _), gradients = value_and_gradient()(q * 1e18, k * 1e8, v, segments_of(ids, ids), d_out, d_lse)
    assert np.isfinite(out).all()
    assert all(np.isfinite(g).all() for g in gradients)


def test_values_below_every_exponent_still_attend():
    """All logits of a segment at -1e30: softmax knows no absolute level."""
    q, k, v, d_out, d_lse = draw()
    ids = ids_of([40, 60])
    q, k = np.full_like(q, 1e15), np.full_like(k, -1e15)
    (out, lse), _ = value_and_gradient()(q, k, v, segments_of(ids, ids), d_out, d_lse)
    close(out[:40], np.broadcast_to(v[:40].mean(0), (40, DIM)), F32)
    assert np.isfinite(lse[:100]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "d_out", "d_lse"])
def test_poisoned_segment_and_padding_change_no_other_bit(where, value):
    check_poison(where, value, ids_of([1, 20, 7, 100, 3, 64, 5, 700], gap=1))


def test_scale():
    check(ids_of([50, 70]), form=Form(scale=0.5))


def test_nothing_of_size_rows_by_rows_exists():
    ids = ids_of([50, 70])
    q, k, v, d_out, d_lse = draw()
    text = value_and_gradient().lower(q, k, v, segments_of(ids, ids), d_out, d_lse).as_text()
    assert f"tensor<{ROWS // BLOCK}x{BLOCK}x{DIM}xf32>" in text
    assert f"{ROWS}x{ROWS}" not in text
    assert f"{ROWS}x{BLOCK}x" not in text
    assert f"{ROWS // BLOCK}x{BLOCK}x{ROWS}" not in text


def test_a_kernel_of_ones_own_is_called_with_whole_arrays():
    calls = []

    class Zeros:
        def forward(self, q, k, v, segments, scale):
            calls.append(("forward", q.shape, scale))
            return PackedOutput(jnp.zeros_like(q), jnp.zeros(q.shape[0], jnp.float32))

        def backward(self, inputs, saved, cotangent, segments, scale):
            calls.append(("backward", cotangent.out.shape, scale))
            return tuple(2 * jnp.ones_like(x) for x in inputs)

    ids = ids_of([3], rows=32)
    q = jnp.ones((32, 4))
    segments, kernel = segments_of(ids, ids), Zeros()
    gradient = jax.grad(lambda q: packed_attention(q, q, q, segments, kernel=kernel).out.sum())(q)
    assert calls == [("forward", (32, 4), 0.5), ("backward", (32, 4), 0.5)]
    assert (gradient == 6).all()


@pytest.mark.parametrize("dtype", ["float16"])
def test_other_dtypes_are_refused(dtype):
    ids = ids_of([3], rows=32)
    x = jnp.ones((32, 4))
    with pytest.raises(TypeError, match=f"must be float32 or bfloat16; got {dtype}, float32 and float32"):
        packed_attention(x.astype(dtype), x, x, segments_of(ids, ids))


@pytest.mark.parametrize("huge", [1e38, 3e38])
def test_huge_values_of_one_segment_leave_the_others_alone(huge):
    ids = ids_of([5, 7], rows=32)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(32, 4)), jnp.float32) for _ in range(3))
    wild = jnp.where((ids == 1)[:, None], v, huge)

    def gradients(v):
        def loss(q, k):
            out = packed_attention(q, k, v, segments_of(ids, ids)).out
            return jnp.sum(jnp.where((ids == 1)[:, None], out, 0.0) ** 2)

        return jax.grad(loss, argnums=(0, 1))(q, k)

    for tame, wild_gradient in zip(gradients(v), gradients(wild), strict=True):
        np.testing.assert_allclose(wild_gradient[:5], tame[:5], rtol=1e-5, atol=1e-7)


def test_rows_ids_and_blocks_must_agree():
    ids = ids_of([3], rows=64)
    good = segments_of(ids, ids)
    x = jnp.ones((64, 4))
    packed_attention(x, x, x, good)
    with pytest.raises(
        ValueError, match="packed_attention: q has one id a row and whole blocks; got rows=32"
    ):
        packed_attention(x[:32], x, x, good)
    y = jnp.ones((96, 4))
    with pytest.raises(
        ValueError, match="k has one id a row and whole blocks; got rows=96, ids=64, blocks=2"
    ):
        packed_attention(x, y, y, good)
    bad = replace(good, key_blocks=jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(
        ValueError, match="q has one id a row and whole blocks; got rows=64, ids=64, blocks=3"
    ):
        packed_attention(x, x, x, bad)
    with pytest.raises(ValueError, match=r"have shape \(blocks, 2\); got \(2, 3\) for k"):
        UNTYPED(x, x, x, replace(good, query_blocks=jnp.zeros((2, 3), jnp.int32)))
    for dtype in ("float32", "uint32"):
        ids = good.query_ids.astype(dtype)
        with pytest.raises(TypeError, match=f"must be signed integers; got {dtype}, int32, int32, int32"):
            UNTYPED(x, x, x, replace(good, query_ids=ids))


@pytest.mark.parametrize("shape", [(64, 2), (128, 2), (64, 4, 1)])
def test_rows_of_other_shapes_are_refused(shape):
    """Also those that have the number of elements wanted."""
    ids = ids_of([3], rows=64)
    x, other = jnp.ones((64, 4)), jnp.ones(shape)
    for q, k, v in ((x, x, other), (x, other, x), (other, x, x)):
        with pytest.raises(ValueError, match=r"are \(rows, d\) of one d"):
            UNTYPED(q, k, v, segments_of(ids, ids))


def test_arrays_and_numbers_of_numpy():
    ids = ids_of([3, 20], rows=32)
    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    found = UNTYPED(x, x, x, jax.tree.map(np.asarray, segments_of(ids, ids)), scale=np.float64(0.2))
    close(found.out, attention(x, x, x, ids, ids, 0.2).out, F32)


@pytest.mark.parametrize("kernel", [XlaKernel(), PallasKernel(interpret=True)], ids=["xla", "pallas"])
def test_scales_that_are_arrays_or_of_64_bits(kernel):
    ids = ids_of([3], rows=32)
    segments, x = segments_of(ids, ids), jnp.ones((32, 64))
    with jax.enable_x64(True):
        for scale in (np.float64(0.2), jnp.float32(0.2)):
            found = jax.eval_shape(
                lambda x, scale=scale: UNTYPED(x, x, x, segments, scale=scale, kernel=kernel), x
            )
            assert {leaf.dtype.name for leaf in found} == {"float32"}


def test_scales_and_derivatives_that_are_refused():
    ids = ids_of([3], rows=32)
    segments, x = segments_of(ids, ids), jnp.ones((32, 64))

    def total(q, scale=None, kernel=None):
        return UNTYPED(q, x, x, segments, scale=scale, kernel=kernel).out.sum()

    with pytest.raises(TypeError, match="scale is a static number; got a traced one"):
        jax.eval_shape(total, x, 0.5)
    with pytest.raises(TypeError, match="scale is a number; got a str"):
        total(x, "large")
    with pytest.raises(ValueError, match="packed_attention: scale is finite; got scale=nan"):
        total(x, float("nan"))
    for kernel in (None, PallasKernel(interpret=True)):
        gradient = jax.grad(lambda q, kernel=kernel: total(q, kernel=kernel))
        with pytest.raises(NotImplementedError, match="packed_attention: first derivatives only"):
            jax.eval_shape(jax.grad(lambda q, gradient=gradient: gradient(q).sum()), x)


@pytest.mark.parametrize("kernel", [XlaKernel(), PallasKernel(interpret=True)], ids=["xla", "pallas"])
def test_ids_below_zero_are_padding(kernel):
    ids = ids_of([3, 9, 12], rows=32)
    ids[ids == 2] = -1
    padding = ids <= 0
    q, k, v, d_out, d_lse = draw(32, 32, 64)
    for x in (q, k, v, d_out, d_lse):
        x[padding] = np.nan
    (out, lse), gradients = value_and_gradient(None, kernel)(q, k, v, segments_of(ids, ids), d_out, d_lse)
    assert np.isneginf(lse[padding]).all()
    for found in (out, *gradients):
        assert not found[padding].any()
        assert np.isfinite(found).all()
