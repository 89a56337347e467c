"""Building blocks of the models: gathers, angles, rotary embedding, scans."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxdit.models import ATTENTION_NAME, REMAT_POLICIES, rows_of_sequences, scan_layers, sums_of_sequences
from jaxdit.models._gather import _one_hot_sum, _segment_sum
from jaxdit.models._layers import sinusoid
from jaxdit.models._rope import apply_rope, rope_table


def table_and_ids(n=50, s=7, d=4, dtype=np.float32):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, s, n)  # sequence s never occurs
    return jnp.asarray(rng.normal(size=(s, d)), dtype), jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_the_vectors_of_their_sequences(dtype):
    table, ids = table_and_ids(dtype=dtype)
    rows = rows_of_sequences(table, ids)
    assert rows.dtype == dtype
    for row, i in zip(np.asarray(rows, np.float32), np.asarray(ids), strict=True):
        np.testing.assert_array_equal(row, np.asarray(table, np.float32)[i - 1] if i else np.zeros(4))


def test_rows_and_sums_are_transposes_of_each_other():
    table, ids = table_and_ids()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(50, 4)), jnp.float32)
    (d_table,) = jax.vjp(lambda t: rows_of_sequences(t, ids), table)[1](weights)
    np.testing.assert_allclose(d_table, sums_of_sequences(weights, ids, 7), rtol=1e-6)
    expected = np.zeros((7, 4))
    for row, i in zip(np.asarray(weights, np.float64), np.asarray(ids), strict=True):
        expected[i - 1] += row if i else 0
    np.testing.assert_allclose(d_table, expected, rtol=1e-5, atol=1e-6)
    (d_rows,) = jax.vjp(lambda r: sums_of_sequences(r, ids, 7), weights)[1](table)
    np.testing.assert_array_equal(d_rows, rows_of_sequences(table, ids))


def test_bfloat16_gradient_is_summed_in_float32():
    """Adding 4096 ones in bfloat16 one by one ends at 256."""
    ids = jnp.ones(4096, jnp.int32)
    grad = jax.grad(lambda t: jnp.sum(rows_of_sequences(t, ids).astype(jnp.float32)))(
        jnp.ones((1, 2), jnp.bfloat16)
    )
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [[4096, 4096]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_ways_of_summing_agree(dtype):
    """The one for CPUs and the one for accelerators."""
    _, ids = table_and_ids()
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(50, 4)), dtype)
    one_hot, segments = _one_hot_sum(rows, ids, 7), _segment_sum(rows, ids, 7)
    assert one_hot.dtype == segments.dtype == jnp.float32
    np.testing.assert_allclose(one_hot, segments, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("platform", "has_scatter"), [("cpu", True), ("cuda", False)])
def test_gradient_on_accelerators_has_no_scatter(platform, has_scatter):
    """A floating-point scatter-add is done by atomics there, in an order that changes from run to run."""
    table, ids = table_and_ids()
    grad = jax.jit(jax.grad(lambda t: jnp.sum(rows_of_sequences(t, ids) ** 2)))
    text = grad.trace(table).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.scatter" in text) == has_scatter
    assert ("stablehlo.dot_general" in text) != has_scatter


def test_no_rows_at_all():
    table, ids = table_and_ids(n=0)
    value, grad = jax.value_and_grad(lambda t: jnp.sum(rows_of_sequences(t, ids)))(table)
    assert value == 0
    assert not np.any(np.asarray(grad))


def test_rotary_angles_are_as_precise_as_float64_tables():
    """The largest position of a 65,536-pixel axis in patches of 16 is 4095."""
    positions = np.array([[0, 0, 0], [3, 4095, 17], [100, 1, 4094]])
    table = rope_table(jnp.asarray(positions, jnp.int32), axes_dim=(16, 56, 56), theta=10_000.0)
    angles = np.concatenate(
        [positions[:, a, None] / 10_000.0 ** (np.arange(0, d, 2) / d) for a, d in enumerate((16, 56, 56))],
        axis=1,
    )
    assert table.cos.dtype == jnp.float32
    np.testing.assert_allclose(table.cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(table.sin, np.sin(angles), atol=1e-6)


def test_rotary_embedding_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 2, 12)), jnp.float32) for _ in range(2))

    def score(at_q, at_k):
        turned = [
            apply_rope(x, rope_table(jnp.asarray([at], jnp.int32), axes_dim=(4, 4, 4), theta=100.0))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return np.asarray(jnp.sum(turned[0] * turned[1], axis=-1))

    np.testing.assert_allclose(score((5, 9, 2), (3, 1, 2)), score((42, 58, 70), (40, 50, 70)), rtol=1e-4)
    assert np.abs(score((5, 9, 2), (3, 1, 2)) - score((6, 9, 2), (3, 1, 2))).max() > 1e-3
    np.testing.assert_allclose(score((5, 5, 5), (5, 5, 5)), np.sum(q * k, axis=-1), rtol=1e-5)


def test_sinusoid_rounds_as_the_originals_do():
    """Exponents, frequencies and angles in float32, sines exact."""
    steps = np.array([0, 1, 333, 999], np.float32)
    for shift in (0, 1):
        exponents = np.float32(-np.log(10_000)) * np.arange(128, dtype=np.float32) / np.float32(128 - shift)
        freqs = np.exp(exponents.astype(np.float64)).astype(np.float32)
        angles = (steps[:, None] * freqs).astype(np.float64)
        expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        np.testing.assert_allclose(sinusoid(jnp.asarray(steps), frequency_shift=shift), expected, atol=1e-6)
        exact = np.exp(-np.log(10_000) * np.arange(128) / (128 - shift))
        assert np.abs(freqs / exact - 1).max() < 1e-6


def layer(params, carry, consts):
    out = checkpoint_name(jnp.tanh(carry @ params["w"]), ATTENTION_NAME)
    return carry + jnp.sin(out) * consts


@pytest.mark.parametrize(("policy", "unroll"), [*((p, 1) for p in sorted(REMAT_POLICIES)), ("full", 3)])
def test_scan_is_a_loop_whatever_is_rematerialised(policy, unroll):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 4, 4)) / 2, jnp.float32)}
    carry, consts = (jnp.asarray(rng.normal(size=(5, 4)), jnp.float32) for _ in range(2))

    def loop(params, carry, consts):
        for i in range(3):
            carry = layer({"w": params["w"][i]}, carry, consts)
        return jnp.sum(jnp.square(carry))

    def scanned(params, carry, consts):
        return jnp.sum(jnp.square(scan_layers(policy, unroll=unroll)(layer, params, carry, consts)))

    got, expected = jax.jit(
        lambda *a: tuple(jax.value_and_grad(f, argnums=(0, 1, 2))(*a) for f in (scanned, loop))
    )(params, carry, consts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_policies_differ_in_what_they_keep():
    """Residuals of the scan, counted in the forward half of its gradient."""
    params = {"w": jnp.ones((3, 4, 4))}
    carry = jnp.ones((5, 4))

    def kept(policy):
        _, pullback = jax.vjp(lambda p, c: scan_layers(policy)(layer, p, c, jnp.ones((5, 4))), params, carry)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    sizes = {policy: kept(policy) for policy in REMAT_POLICIES}
    assert sizes["full"] == min(sizes.values())
    assert sizes["full"] < sizes["attention"]
    assert sizes["full"] < sizes["dots"] <= sizes["none"]


def test_unknown_policy_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"policy must be one of none, full, .*; got policy='ful'"):
        scan_layers("ful")
    with pytest.raises(ValueError, match="unroll must be at least 1; got unroll=0"):
        scan_layers(unroll=0)
    scan_layers(unroll=1)


def test_importing_starts_no_backend():
    code = (
        "import jaxdit, jaxdit.models, jaxdit.encoders\n"
        "from jax._src import xla_bridge\n"
        "raise SystemExit(len(xla_bridge._backends))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
