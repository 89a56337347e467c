"""Packed attention against dense attention in float64: values, log-sum-exp and gradients; segments that do not mix."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel import PackedOutput, packed_attention
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
