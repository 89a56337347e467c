"""Partial attention and its merge: against one softmax in float64, and at the edges of what numbers can hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel._online_softmax import (
    Partial,
    as_partial,
    empty_partial,
    merge,
    merge_over_axis,
    share_of_whole,
)
from tests.oracles import close
from tests.parallel.exchange_cases import one_axis_mesh

SHAPE = (2, 3, 2)


def partial_of(logits, values):
    """By definition, in float64: logits (..., keys), values (..., keys, d)."""
    logits, values = np.asarray(logits, np.float64), np.asarray(values, np.float64)
    top = logits.max(-1, initial=-np.inf, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1)
    out = np.einsum("...k,...kd->...d", weights / np.where(total > 0, total, 1)[..., None], values)
    with np.errstate(divide="ignore"):
        return Partial(out, np.log(total) + np.where(np.isneginf(top), 0, top)[..., 0])


def draw(keys, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((*SHAPE, keys)) * spread, rng.standard_normal((*SHAPE, keys, 4))


def in_float32(partial):
    return as_partial(*map(jnp.asarray, partial))


@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
def test_parts_merge_to_the_softmax_of_all_keys_in_any_order(spread):
    logits, values = draw(12, spread)
    cuts = [slice(0, 1), slice(1, 6), slice(6, 12)]
    parts = [in_float32(partial_of(logits[..., c], values[..., c, :])) for c in cuts]
    whole = partial_of(logits, values)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        merged = empty_partial(parts[0].out)
        for i in order:
            merged = merge(merged, parts[i])
        close(merged.out, whole.out, 1e-5)
        close(merged.lse, whole.lse, 1e-5)
    for a, b in zip(merge(parts[0], parts[1]), merge(parts[1], parts[0]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_keys_change_no_bit_and_nan_is_not_hidden():
    some = in_float32(partial_of(*draw(5)))
    empty = empty_partial(some.out)
    for merged in (merge(some, empty), merge(empty, some)):
        for a, b in zip(merged, some, strict=True):
            np.testing.assert_array_equal(a, b)
    nothing = merge(empty, empty)
    assert not np.asarray(nothing.out).any()
    assert np.isneginf(nothing.lse).all()
    bad = Partial(some.out * jnp.nan, some.lse * jnp.nan)
    for merged in (merge(some, bad), merge(bad, some), merge(empty, bad), merge(bad, empty)):
        assert np.isnan(merged.out).all()
        assert np.isnan(merged.lse).all()


@pytest.mark.parametrize("top", [1e4, -1e4, 3e38])
def test_large_logits_do_not_overflow(top):
    a, b = (Partial(jnp.full((1, 1, 1, 2), x), jnp.full((1, 1, 1), jnp.float32(top))) for x in (1.0, 3.0))
    merged = merge(a, b)
    np.testing.assert_allclose(merged.out, 2.0)
    np.testing.assert_allclose(merged.lse, np.float32(top + np.log(2)))


def test_the_gradient_of_a_part_is_weighted_by_its_share():
    logits, values = draw(9)
    part, whole = partial_of(logits[..., :4], values[..., :4, :]), partial_of(logits, values)
    expected = np.exp(logits[..., :4]).sum(-1) / np.exp(logits).sum(-1)
    close(share_of_whole(jnp.asarray(part.lse), jnp.asarray(whole.lse)), expected, 1e-5)
    none = jnp.full(SHAPE, -jnp.inf)
    assert not np.asarray(share_of_whole(none, jnp.asarray(whole.lse))).any()
    assert not np.asarray(share_of_whole(none, none)).any()


def test_the_devices_of_an_axis_merge_their_parts():
    logits, values = draw(8)
    logits[0, 0, 0] = -np.inf  # a row that attends to nothing anywhere
    logits[1, :, :, :4] = -np.inf  # and rows that attend on some devices only
    mesh = one_axis_mesh(4)
    parts = [partial_of(logits[..., i : i + 2], values[..., i : i + 2, :]) for i in range(0, 8, 2)]
    stacked = Partial(*(np.stack(x).astype(np.float32) for x in zip(*parts, strict=True)))
    run = jax.jit(
        jax.shard_map(
            lambda p: jax.tree.map(lambda x: x[None], merge_over_axis(jax.tree.map(lambda x: x[0], p), "x")),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
    )
    whole = partial_of(logits, values)
    for out, lse in zip(*run(stacked), strict=True):
        close(out, whole.out, 1e-5)
        some = np.isfinite(whole.lse)
        np.testing.assert_array_equal(np.isneginf(lse), ~some)
        close(lse[some], whole.lse[some], 1e-5)
