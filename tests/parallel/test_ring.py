"""Ring attention against the whole sequence on one device: values, gradients, what moves, what it refuses."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import DifferentiableAttention, ReplicatedText, XlaBlockAttention, ring_attention
from tests.parallel.sequence_cases import (
    BLOCK,
    Case,
    check,
    check_poison,
    check_replicated_keys,
    draw,
    errors,
    lowered_text,
    mesh_of,
    moves,
    program,
)
from tests.parallel.test_block_attention import plain

# As users call it: without the run-time type checker of the tests.
UNTYPED = partial(inspect.unwrap(ring_attention), axis_name="x")
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
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("segments", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", [None, 1, 77])
def test_every_combination(size, segments, causal, text):
    check(RING, mesh_of(x=size), "x", Case(2, 3, kv_heads=2, segments=segments, causal=causal, text=text))


def test_two_axes_as_one():
    mesh = mesh_of(a=2, b=4)
    check(partial(ring_attention, axis_name=("a", "b")), mesh, ("a", "b"), Case(segments=2, causal=True))


def test_an_axis_beside_it_holds_other_sequences():
    """Batch over one axis, sequence over the other."""
    mesh = mesh_of(data=2, x=4)
    case = Case(q_loc=6, k_loc=6)
    arrays = draw(case, 4)
    spec = P("data", "x")
    run = jax.shard_map(
        lambda *qkv: RING(*qkv, block_attention=BLOCK),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    alone = jax.shard_map(
        lambda *qkv: RING(*qkv, block_attention=BLOCK),
        mesh=mesh_of(x=4),
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(run)(*arrays.qkv), jax.jit(alone)(*arrays.qkv), rtol=1e-6, atol=1e-6)


def test_a_poisoned_segment_changes_no_other():
    check_poison(RING, mesh_of(x=4), "x", Case(segments=3, text=4))


def test_replicated_keys():
    check_replicated_keys(RING, mesh_of(x=4), "x")


def test_a_function_of_the_user_serves():
    block = DifferentiableAttention(plain)

    def attention(*args, block_attention, **options):
        return RING(*args, block_attention=block, **options)

    check(attention, mesh_of(x=2), "x", Case(segments=2, causal=True))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bfloat16_errors_do_not_grow_with_the_ring(size):
    """At most twice those of one device, values and gradients."""
    case = Case(q_loc=64 // size, k_loc=64 // size, batch=1, dim=8, dtype=jnp.bfloat16)
    alone = Case(q_loc=64, k_loc=64, batch=1, dim=8, dtype=jnp.bfloat16)
    one = errors(RING, mesh_of(x=1), "x", alone)
    for error, base in zip(errors(RING, mesh_of(x=size), "x", case), one, strict=True):
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


def in_map(function, *args, mesh=None, **options):
    spec = P(None, "x")
    options = {"in_specs": spec, "out_specs": spec, "check_vma": False, **options}
    mapped = jax.shard_map(function, mesh=mesh or mesh_of(x=2, y=2), **options)
    return jax.eval_shape(mapped, *args)


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def test_bad_input():
    q = ones(2, 4, 4, 8)
    integers, ids = ones(2, 4, 4, 8, dtype=jnp.int32), ones(2, 4, dtype=jnp.int32)
    text = ReplicatedText(*(ones(2, 3, 4, 8),) * 3)
    in_map(RING, q, q, ones(2, 4, 4, 8))  # the last good one
    for message, args, options in (
        (r"q, k and v have one batch.*v the shape of k; got \(2, 2, 4, 8\)", (q, q, ones(2, 4, 4, 4)), {}),
        (r"\(batch, length, heads, head_dim\)", (q, q, ones(2, 4, 4)), {}),
        (r"heads of keys divide.*got q=4, k=3 heads", (q, ones(2, 4, 3, 8), ones(2, 4, 3, 8)), {}),
        (
            r"segment_ids of k are.*got \(2, 2\) for rows \(2, 4",
            (q, ones(2, 8, 4, 8), ones(2, 8, 4, 8), ids),
            {},
        ),
        (r"text has batch.*got float32\[2, 3, 4, 8\]", (ones(2, 4, 2, 8),) * 3, {"text": text}),
        (r"text beside rows with segment_ids", (q, q, q, ids), {"text": text}),
        (r"replicated keys.*got causal=True", (q, q, q), {"keys_replicated": True, "causal": True}),
    ):

        def call(*args, options=options):
            found = UNTYPED(*args[:3], segment_ids=args[3] if len(args) > 3 else None, **options)
            return found.out if "text" in options else found

        with pytest.raises(ValueError, match="ring_attention: .*" + message):
            in_map(call, *args)
    for message, args, options in (
        (r"floating point, of one dtype; got int32", (integers, q, q), {}),
        (
            r"floating point, of one dtype; got float32, float32 and bfloat16",
            (q, q, q.astype(jnp.bfloat16)),
            {},
        ),
        (r"segment_ids of q are signed integers; got uint32", (q, q, q, ids.astype(jnp.uint32)), {}),
        (r"scale is a number; got a str", (q, q, q), {"scale": "one"}),
    ):
        with pytest.raises(TypeError, match="ring_attention: .*" + message):
            in_map(
                lambda *args, options=options: UNTYPED(
                    *args[:3], segment_ids=args[3] if len(args) > 3 else None, **options
                ),
                *args,
            )
    with pytest.raises(TypeError, match="scale is a static number; got a traced one"):
        in_map(lambda q: UNTYPED(q, q, q, scale=q[0, 0, 0, 0]), q)


def test_axes_that_are_not_manual():
    q = ones(2, 4, 4, 8)
    missing = (
        r"ring_attention: axis_name is a manual axis.*got 'z', with mesh axes \('x', 'y'\), of them manual"
    )
    with pytest.raises(ValueError, match=missing):
        in_map(lambda q: ring_attention(q, q, q, axis_name="z"), q)
    with pytest.raises(ValueError, match=r"got 'y', .* of them manual \('x',\)"):
        in_map(lambda q: ring_attention(q, q, q, axis_name="y"), q, axis_names={"x"})
    with pytest.raises(ValueError, match=r"got 'x', with mesh axes \(\)"):
        RING(q, q, q)
    with pytest.raises(ValueError, match=r"every axis has one part; got 'x' in axis_name and in axis_name"):
        in_map(lambda q: ring_attention(q, q, q, axis_name=("x", "x")), q)
