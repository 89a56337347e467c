"""What the parts around sequence-parallel attention refuse: one-sided kernels, block attentions, padding."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel import (
    DifferentiableAttention,
    MosaicPuts,
    PackedBlockAttention,
    SimulatedPuts,
    XlaBlockAttention,
    XlaKernel,
    one_sided_all_to_all,
    one_sided_ring_attention,
    pad_sequence,
    unpad_sequence,
    zero_copy_options,
)
from tests.parallel.sequence_cases import mesh_of

# As users call them: without the run-time type checker of the tests.
EXCHANGE, PUT_RING, PAD, UNPAD, ZERO_COPY = map(
    inspect.unwrap,
    (one_sided_all_to_all, one_sided_ring_attention, pad_sequence, unpad_sequence, zero_copy_options),
)
Q = jax.ShapeDtypeStruct((2, 4, 4, 8), jnp.float32)
ROWS = np.ones((2, 5, 3), np.float32)


def untyped(cls, *args, **options):
    made = object.__new__(cls)
    inspect.unwrap(cls.__init__)(made, *args, **options)
    return made


PUT = partial(EXCHANGE, axis_name="x", split_axis=0, concat_axis=1, puts=SimulatedPuts())


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "all_to_all: axis_name is a manual axis.*got 'z'", partial(PUT, axis_name="z")),
        (TypeError, "all_to_all: axis_name is a name or a tuple", partial(PUT, axis_name=0)),
        (TypeError, r"all_to_all: puts are .*\(Puts\); got a NoneType. Give S", partial(PUT, puts=None)),
        (TypeError, "all_to_all: puts are .* got a str", partial(PUT, puts="x")),
        (TypeError, "all_to_all: puts are .* got a type", partial(PUT, puts=SimulatedPuts)),
        (TypeError, "all_to_all: split_axis is an integer; got float 1.0", partial(PUT, split_axis=1.0)),
        (TypeError, "all_to_all: concat_axis is an integer; got None", partial(PUT, concat_axis=None)),
        (ValueError, "all_to_all: split_axis .* from 0; got split_axis=-1", partial(PUT, split_axis=-1)),
        (TypeError, "all_to_all: x is an array; got list", lambda x: PUT([x])),
        (
            TypeError,
            "ring_attention: puts are an object.*got a type",
            lambda x: PUT_RING(x, x, x, axis_name="x", puts=SimulatedPuts),
        ),
        (
            TypeError,
            "ring_attention: block_attention is an object.*got a function",
            lambda x: PUT_RING(
                x, x, x, axis_name="x", puts=SimulatedPuts(), block_attention=lambda *args: args
            ),
        ),
    ],
)
def test_one_sided(error, message, call):
    mapped = jax.shard_map(call, mesh=mesh_of(x=2), in_specs=P(), out_specs=P("x"), check_vma=False)
    with pytest.raises(error, match=f"^one_sided_{message}"):
        jax.eval_shape(mapped, Q)


def test_one_sided_outside_of_shard_map():
    with pytest.raises(ValueError, match=r"one_sided_all_to_all: .*Call it inside jax.shard_map"):
        PUT(jnp.ones((2, 2)))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            "XlaBlockAttention: block is at least 1; got block=0",
            lambda: untyped(XlaBlockAttention, 0),
        ),
        (
            ValueError,
            "XlaBlockAttention: block is at least 1; got block=-1",
            lambda: untyped(XlaBlockAttention, -1),
        ),
        (
            TypeError,
            "XlaBlockAttention: block is an integer; got float",
            lambda: untyped(XlaBlockAttention, 2.5),
        ),
        (
            TypeError,
            "XlaBlockAttention: block is an integer; got str",
            lambda: untyped(XlaBlockAttention, "a"),
        ),
        (
            TypeError,
            "XlaBlockAttention: block is an integer; got None",
            lambda: untyped(XlaBlockAttention, None),
        ),
        (
            ValueError,
            "PackedBlockAttention: block is at least 1; got block=0",
            lambda: untyped(PackedBlockAttention, block=0),
        ),
        (
            TypeError,
            "PackedBlockAttention: block is an integer; got float",
            lambda: untyped(PackedBlockAttention, block=2.5),
        ),
        (
            TypeError,
            "PackedBlockAttention: kernel is .*got a None",
            lambda: untyped(PackedBlockAttention, None),
        ),
        (
            TypeError,
            "PackedBlockAttention: kernel is .*got a type",
            lambda: untyped(PackedBlockAttention, XlaKernel),
        ),
        (TypeError, "DifferentiableAttention: function is f", lambda: untyped(DifferentiableAttention, None)),
        (TypeError, "SimulatedPuts: block is an object .*got a None", lambda: untyped(SimulatedPuts, None)),
        (TypeError, "SimulatedPuts: eager is True or False", lambda: untyped(SimulatedPuts, eager="no")),
        (ValueError, "MosaicPuts: put_blocks is at least 1", lambda: untyped(MosaicPuts, put_blocks=0)),
        (TypeError, "zero_copy_options: symmetric is True or .*got str", lambda: ZERO_COPY(symmetric="x")),
        (TypeError, "zero_copy_options: symmetric .*got None", lambda: ZERO_COPY(symmetric=None)),
        (TypeError, "zero_copy_options: symmetric .*got int 2", lambda: ZERO_COPY(symmetric=2)),
        (
            TypeError,
            "pad_sequence: segment_ids are signed",
            lambda: PAD(ROWS, degree=2, segment_ids=ROWS[..., 0]),
        ),
        (
            TypeError,
            "pad_sequence: segment_ids are signed integers; got bool",
            lambda: PAD(ROWS, degree=2, segment_ids=ROWS[..., 0] > 0),
        ),
        (
            ValueError,
            "pad_sequence: segment_ids fit in int32; got int64",
            lambda: PAD(ROWS, degree=5, segment_ids=np.full((2, 5), 1 << 32)),
        ),
        (
            ValueError,
            r"pad_sequence: segment_ids are \(batch, length\); got \(2, 5, 3\)",
            lambda: PAD(ROWS, degree=2, segment_ids=ROWS.astype(np.int32)),
        ),
        (
            TypeError,
            "pad_sequence: segment_ids is an .*got list",
            lambda: PAD(ROWS, degree=2, segment_ids=[[1]]),
        ),
        (
            TypeError,
            "pad_sequence: each leaf of rows is an array; got float",
            lambda: PAD(ROWS.tolist(), degree=2),
        ),
        (TypeError, "pad_sequence: degree is an integer; got float 2.0", lambda: PAD(ROWS, degree=2.0)),
        (TypeError, "unpad_sequence: length is an integer; got float 2.0", lambda: UNPAD(ROWS, length=2.0)),
        (TypeError, "unpad_sequence: length is an integer; got None", lambda: UNPAD(ROWS, length=None)),
        (
            TypeError,
            "unpad_sequence: length is an integer; got a traced one. Give that of the rows before",
            lambda: jax.eval_shape(lambda n: UNPAD(ROWS, length=n), jnp.int32(2)),
        ),
        (TypeError, "unpad_sequence: each leaf of rows", lambda: UNPAD([1.0], length=1)),
        (ValueError, r"unpad_sequence: rows are .*got \[\(2,\)\]", lambda: UNPAD(ROWS[:, 0, 0], length=1)),
    ],
)
def test_parts(error, message, call):
    with pytest.raises(error, match=f"^{message}"):
        call()
