"""Rows and segments for packed attention, and its comparison with dense attention in float64, whatever the kernel."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallel import PackedOutput, PackedSegments, packed_attention
from tests.oracles import attention, attention_gradients, close

F32, BF16 = 1e-5, 2e-2
BLOCK = 32
ROWS = 2048
DIM = 8


def segments_of(query_ids, key_ids, block=BLOCK):
    """Segments with the tightest block ranges, by looking at every block's ids."""

    def ranges(of, to):
        found = []
        for ids in of.reshape(-1, block):
            hits = np.flatnonzero(np.isin(to.reshape(-1, block), ids[ids > 0]).any(1))
            found.append((hits[0], hits[-1] + 1) if len(hits) else (0, 0))
        return np.array(found, np.int32)

    parts = query_ids, key_ids, ranges(query_ids, key_ids), ranges(key_ids, query_ids)
    return PackedSegments(*map(jnp.asarray, parts))


def ids_of(lengths, rows=ROWS, gap=0):
    """Segments one after another from 1, `gap` rows of padding between them, padding at the end."""
    ids = np.zeros(rows, np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        ids[start : start + length] = number
        start += length + gap
    assert start - gap <= rows
    return ids


@cache
def value_and_gradient(scale=None, kernel=None):
    """(out, lse, gradients) for given cotangents, one program for all segments of one shape."""

    @jax.jit
    def run(q, k, v, segments, d_out, d_lse):
        result, vjp = jax.vjp(
            lambda *qkv: packed_attention(*qkv, segments, scale=scale, kernel=kernel), q, k, v
        )
        return result, vjp(PackedOutput(d_out, d_lse))

    return run


def draw(rows_q=ROWS, rows_k=ROWS, dim=DIM, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v, d_out = (
        rng.standard_normal((n, dim)).astype(np.float32) for n in (rows_q, rows_k, rows_k, rows_q)
    )
    return q, k, v, d_out, rng.standard_normal(rows_q).astype(np.float32)


@dataclass(frozen=True)
class Form:
    """What is compared: a kernel on blocks of a size, on rows of a dtype and head size."""

    kernel: Any = None
    block: int = BLOCK
    dim: int = DIM
    dtype: Any = jnp.float32
    scale: float | None = None


def check(query_ids, key_ids=None, *, tolerance=F32, form=Form()):
    """Values, lse and gradients against dense attention in float64."""
    key_ids = query_ids if key_ids is None else key_ids
    q, k, v, d_out, d_lse = draw(len(query_ids), len(key_ids), form.dim)
    q, k, v, d_out = (jnp.asarray(x, form.dtype) for x in (q, k, v, d_out))
    segments = segments_of(query_ids, key_ids, form.block)
    run = value_and_gradient(form.scale, form.kernel)
    (out, lse), gradients = run(q, k, v, segments, d_out, d_lse)
    dtype = form.dtype
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    assert all(g.dtype == dtype for g in gradients)
    wanted = attention(q, k, v, query_ids, key_ids, form.scale)
    close(out, wanted.out, tolerance)
    some = np.isfinite(wanted.lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~some)
    close(lse[some], wanted.lse[some], tolerance)
    exact = attention_gradients(q, k, v, wanted, d_out, d_lse, form.scale)
    for gradient, expected in zip(gradients, exact, strict=True):
        close(gradient, expected, tolerance)
    assert not np.asarray(out, np.float32)[~some].any(), "rows that attend to nothing are zero"


def check_poison(where, value, ids, form=Form()):
    """A value in one row of segment 3 changes no bit of another segment, nor do all padding rows; it is not hidden."""
    run = value_and_gradient(form.scale, form.kernel)
    segments = segments_of(ids, ids, form.block)
    names = ("q", "k", "v", "d_out", "d_lse")
    clean = dict(zip(names, draw(len(ids), len(ids), form.dim), strict=True))
    poisoned = {name: x.copy() for name, x in clean.items()}
    # One row in the middle of a segment that shares its blocks with others on both sides, and all padding rows.
    bad = np.flatnonzero(ids == 3)[3]
    poisoned[where][bad] = value
    for name in names:
        poisoned[name][ids == 0] = value
    before, after = (
        jax.tree.leaves(run(*(x[n] for n in names[:3]), segments, *(x[n] for n in names[3:])))
        for x in (clean, poisoned)
    )
    others = (ids != 3) & (ids != 0)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
    out, lse, *gradients = (np.asarray(x) for x in after)
    assert not out[ids == 0].any()
    assert np.isneginf(lse[ids == 0]).all()
    assert not any(g[ids == 0].any() for g in gradients)
    # And it is not hidden where it belongs.
    mine = ids == 3
    if where in ("k", "v"):
        assert np.isnan(out[mine]).all()
    if where == "q":
        assert np.isnan(out[bad]).all()
    assert all(np.isnan(g[mine]).any() for g in gradients)
