"""Cases in which sequence parallelism has failed users elsewhere: lengths, layouts of rows, text, RoPE, precision."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import (
    PlatformBlockAttention,
    XlaBlockAttention,
    pad_sequence,
    ring_attention,
    torus_attention,
    ulysses_attention,
    unpad_sequence,
    usp_attention,
)
from tests.oracles import close
from tests.oracles_sequence import joint_attention
from tests.parallel.sequence_cases import (
    BF16,
    F32,
    FAST_COMPILE,
    Case,
    check,
    draw,
    mesh_of,
    program,
    results,
)

# Each over eight devices, with their axes along the sequence.
RING = partial(ring_attention, axis_name="x"), {"x": 8}
ULYSSES = partial(ulysses_attention, axis_name="x"), {"x": 8}
USP = partial(usp_attention, ulysses_axis="u", ring_axis="r"), {"r": 4, "u": 2}
TORUS = (
    partial(torus_attention, machine_axis="m", ulysses_axis="u", ring_axis="r"),
    {"m": 2, "r": 2, "u": 2},
)


def each(*fast):
    """All four; in short runs only those given."""
    named = {"ring": RING, "ulysses": ULYSSES, "usp": USP, "torus": TORUS}
    return pytest.mark.parametrize(
        "algorithm",
        [pytest.param(x, id=n, marks=() if n in fast else pytest.mark.full) for n, x in named.items()],
    )


def padded(algorithm, **options):
    """The attention of rows of any lengths, padded to eight devices and cut again."""
    attention, axes = algorithm
    mesh = mesh_of(**axes)
    spec = P(None, tuple(axes))

    def per_device(q, kv, ids):
        return attention(q, *kv, segment_ids=ids, **options)

    mapped = jax.shard_map(
        per_device, mesh=mesh, in_specs=(spec, (spec, spec), (spec, spec)), out_specs=spec, check_vma=False
    )

    def attend(q, k, v):
        queries, keys = (
            pad_sequence(x, degree=8, segment_ids=np.ones(y.shape[:2], np.int32))
            for x, y in ((q, q), ((k, v), k))
        )
        ids = queries.segment_ids, keys.segment_ids
        return unpad_sequence(mapped(queries.rows, keys.rows, ids), length=q.shape[1])

    return attend


def value_and_gradients(attend, qkv, d_out):
    @partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(qkv, d_out):
        out, pullback = jax.vjp(attend, *qkv)
        return out, pullback(d_out)

    return run(qkv, d_out)


@each("ring")
@pytest.mark.parametrize(
    ("l_q", "l_k"),
    [
        (57_826, 5),
        *(pytest.param(*lengths, marks=pytest.mark.full) for lengths in [(5, 57_826), (8_423, 13)]),
    ],
)
def test_lengths_that_eight_devices_do_not_divide(algorithm, l_q, l_k):
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((1, n, 2, 2)).astype(np.float32) for n in (l_q, l_k, l_k, l_q))
    out, gradients = value_and_gradients(padded(algorithm), (q, k, v), d_out)
    wanted = joint_attention((q, k, v), d_out)
    assert out.shape == q.shape
    close(out, wanted.out, F32)
    for gradient, expected in zip(gradients, wanted.gradients, strict=True):
        close(gradient, expected, F32)


@each("ring")
@pytest.mark.parametrize(("l_q", "l_k"), [(16, 13), (13, 16), (16, 8)])
def test_one_of_two_lengths_divides(algorithm, l_q, l_k):
    """Of the other `pad_sequence` has no ids: as many rows as there are, all of one segment."""
    attention, axes = algorithm
    mesh, spec = mesh_of(**axes), P(None, tuple(axes))
    q, k, v, d_out = (
        np.random.default_rng(i).standard_normal((1, n, 8, 2)).astype(np.float32)
        for i, n in enumerate((l_q, l_k, l_k, l_q))
    )

    def attend(q, k, v):
        queries, keys = pad_sequence(q, degree=8), pad_sequence((k, v), degree=8)
        assert (queries.segment_ids is None, keys.segment_ids is None) == (l_q % 8 == 0, l_k % 8 == 0)
        mapped = jax.shard_map(
            lambda q, kv, ids: attention(q, *kv, segment_ids=ids),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        out = mapped(queries.rows, keys.rows, (queries.segment_ids, keys.segment_ids))
        return unpad_sequence(out, length=l_q)

    out, gradients = value_and_gradients(attend, (q, k, v), d_out)
    wanted = joint_attention((q, k, v), d_out)
    close(out, wanted.out, F32)
    for gradient, expected in zip(gradients, wanted.gradients, strict=True):
        close(gradient, expected, F32)


@each("ring")
def test_causal_padding_at_the_end_needs_no_ids(algorithm):
    """No real row sees it, and its own rows are cut off: kernels that know no ids may compute it."""
    attention, axes = algorithm
    spec = P(None, tuple(axes))
    mapped = jax.shard_map(
        partial(attention, causal=True), mesh=mesh_of(**axes), in_specs=spec, out_specs=spec, check_vma=False
    )
    q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 1, 13, 8, 2)).astype(np.float32)

    def attend(*qkv):
        return unpad_sequence(mapped(*pad_sequence(qkv, degree=8).rows), length=13)

    out, gradients = value_and_gradients(attend, (q, k, v), d_out)
    wanted = joint_attention((q, k, v), d_out, causal=True)
    close(out, wanted.out, F32)
    for gradient, expected in zip(gradients, wanted.gradients, strict=True):
        close(gradient, expected, F32)


@each()
def test_a_clip_of_8423_tokens_attends_to_itself(algorithm):
    """Cotangents of some rows only, the last among them: what these need is all that the oracle computes."""
    length, some = 8_423, np.r_[0, 1_052:1_056, 4_000, 8_422]
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, length, 1, 4)).astype(np.float32)
    d_out = np.zeros_like(q)
    d_out[:, some] = rng.standard_normal((1, len(some), 1, 4))
    out, (dq, dk, dv) = value_and_gradients(
        padded(algorithm, block_attention=XlaBlockAttention()), (q, k, v), d_out
    )
    wanted = joint_attention((q[:, some], k, v), d_out[:, some])
    close(np.asarray(out)[:, some], wanted.out, F32)
    close(np.asarray(dq)[:, some], wanted.gradients[0], F32)
    close(dk, wanted.gradients[1], F32)
    close(dv, wanted.gradients[2], F32)


@each()
@pytest.mark.parametrize("text", [257, 512, 769])
def test_lengths_of_text(algorithm, text):
    attention, axes = algorithm
    check(attention, mesh_of(**axes), tuple(axes), Case(2, 2, kv_heads=2, batch=1, text=text))


@each()
def test_fifty_six_heads(algorithm):
    attention, axes = algorithm
    case = Case(1, 1, heads=56, kv_heads=8, dim=2, batch=1, text=1)
    check(attention, mesh_of(**axes), tuple(axes), case)


@pytest.mark.parametrize("name", ["ring", "ulysses", "usp", "torus"])
def test_strict_promotion_of_dtypes(name):
    """Traced only: value and gradient of a causal sequence with ids and text, which mixes the most kinds of numbers."""
    attention, axes = {"ring": RING, "ulysses": ULYSSES, "usp": USP, "torus": TORUS}[name]
    case = Case(2, 2, heads=8, kv_heads=8, dim=64, segments=2, causal=True, text=3, dtype=jnp.bfloat16)
    case = replace(case, block=PlatformBlockAttention())
    arrays = draw(case, 8)
    run = program.__wrapped__(
        attention, mesh_of(**axes), tuple(axes), case
    )  # traced as no other test may have it
    with jax.numpy_dtype_promotion("strict"):
        out, _ = jax.eval_shape(
            run, arrays.qkv, arrays.d_out, arrays.ids, arrays.text, arrays.text_ids, arrays.d_text
        )
    assert out.out.dtype == jnp.bfloat16


LAYOUTS = {
    "text on the first devices, images, three devices of padding alone": [(1, 300), (0, 724)],
    "three sequences for eight devices": [(1, 100), (2, 500), (3, 424)],
    "one sequence longer than a device's share, many short ones": [
        (1, 700),
        *((2 + i, 4) for i in range(81)),
    ],
    "equal sequences, one a device": [(1 + i, 128) for i in range(8)],
    "1024 tiny ones": [(1 + i, 1) for i in range(1024)],
    "one tiny one": [(0, 500), (1, 1), (0, 523)],
    "padding alone": [(0, 1024)],
}


@each("ring")
def test_layouts_of_rows(algorithm):
    """One program, any packing; and logits of hundreds, whose weights have an error of some 3e-5 in float32."""
    attention, axes = algorithm
    mesh = mesh_of(**axes)
    case = Case(128, 128, heads=2, kv_heads=1, dim=2, batch=1, segments=1, block=XlaBlockAttention())
    arrays = draw(case, 8)
    for runs in LAYOUTS.values():
        ids = np.concatenate([np.full(n, i, np.int32) for i, n in runs])[None]
        ids = np.pad(ids, ((0, 0), (0, 1024 - ids.shape[1])))
        check(attention, mesh, tuple(axes), case, arrays=replace(arrays, ids=(ids, ids)), vanishing=True)
    q, k, v = arrays.qkv
    large = replace(arrays, qkv=(10 * q, 10 * k, v))
    check(attention, mesh, tuple(axes), case, tolerance=1e-4, arrays=large)


@each("ring")
def test_ids_keep_their_bits_beside_bfloat16_rows(algorithm):
    """Neighbouring ids that bfloat16, or float32, would round to one."""
    attention, axes = algorithm
    case = Case(4, 4, batch=1, segments=1, dtype=jnp.bfloat16)
    arrays = draw(case, 8)
    for first in (256, 2**24, 2**31 - 33):
        ids = (first + np.arange(32, dtype=np.int64)).astype(np.int32)[None]
        out, _, _ = results(attention, mesh_of(**axes), tuple(axes), case, replace(arrays, ids=(ids, ids)))
        np.testing.assert_array_equal(out, arrays.qkv[2])  # each row attends to itself alone
        halves = ids // 2
        check(
            attention, mesh_of(**axes), tuple(axes), case, BF16, arrays=replace(arrays, ids=(halves, halves))
        )


def rotated(x, places):
    """RoPE of one pair of channels: (b, l, h, 2) by (b, l) places."""
    xp = jnp if isinstance(x, jax.Array) else np
    cos, sin = xp.cos(0.3 * places)[..., None], xp.sin(0.3 * places)[..., None]
    return xp.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], -1)


@each("usp")
def test_positions_travel_with_their_tokens(algorithm):
    """Those of each packed sequence start at 0; padded, sharded and rotated on their devices like the rows."""
    attention, axes = algorithm
    mesh, spec = mesh_of(**axes), P(None, tuple(axes))
    lengths = [11, 3, 7]
    places = np.concatenate([np.arange(n) for n in lengths]).astype(np.float32)[None]
    ids = np.repeat([1, 2, 3], lengths).astype(np.int32)[None]
    rng = np.random.default_rng(0)
    q, k, v, d_out = rng.standard_normal((4, 1, 21, 2, 2)).astype(np.float32)

    def per_device(q, k, v, places, ids):
        return attention(rotated(q, places), rotated(k, places), v, segment_ids=ids)

    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def attend(*qkv):
        rows, row_ids = pad_sequence((*qkv, places), degree=8, segment_ids=ids)
        return unpad_sequence(mapped(*rows, row_ids), length=21)

    out, gradients = value_and_gradients(attend, (q, k, v), d_out)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    turned = rotated(wide[0], places), rotated(wide[1], places), wide[2]
    wanted = joint_attention(turned, d_out, ids=(ids, ids))
    close(out, wanted.out, F32)
    dq, dk, dv = wanted.gradients
    for gradient, expected in zip(gradients, (rotated(dq, -places), rotated(dk, -places), dv), strict=True):
        close(gradient, expected, F32)
