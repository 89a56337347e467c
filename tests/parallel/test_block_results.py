"""What a block attention of one's own returns is checked, forward and backward, in all four attentions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from parallel import (
    DifferentiableAttention,
    XlaBlockAttention,
    ring_attention,
    torus_attention,
    ulysses_attention,
    usp_attention,
)
from tests.parallel.sequence_cases import mesh_of

ATTENTIONS = {
    "ring": partial(ring_attention, axis_name=("x", "y")),
    "ulysses": partial(ulysses_attention, axis_name=("x", "y")),
    "usp": partial(usp_attention, ulysses_axis="x", ring_axis="y"),
    "torus": partial(torus_attention, machine_axis="x", ring_axis="y"),
    "on one device": partial(ring_attention, axis_name=()),
}
every = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=list(ATTENTIONS))
some = pytest.mark.parametrize(
    "attention", [ATTENTIONS[name] for name in ("torus", "on one device")], ids=["torus", "on one device"]
)
BLOCK = XlaBlockAttention()
Q = jax.ShapeDtypeStruct((2, 24, 4, 8), jnp.float32)
KEYS = jax.ShapeDtypeStruct((2, 24, 2, 8), jnp.float32)


@dataclass(frozen=True)
class Changed:
    """Plain blocks whose results are something else."""

    change: Callable[..., Any] = lambda *results: results
    change_gradients: Callable[..., Any] = lambda *results: results

    def forward(self, *args):
        return self.change(*BLOCK.forward(*args))

    def backward(self, *args):
        return self.change_gradients(*BLOCK.backward(*args))


def trace(attention, block, *, causal=False, gradient=True):
    """The gradient, or the output alone; nothing runs."""
    rows = P(None, ("x", "y"))
    mapped = jax.shard_map(
        partial(attention, block_attention=block, causal=causal),
        mesh=mesh_of(x=2, y=2),
        in_specs=(rows,) * 3,
        out_specs=rows,
        check_vma=False,
    )
    loss = jax.grad(lambda q, k, v: mapped(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    return jax.eval_shape(loss if gradient else mapped, Q, KEYS, KEYS)


@every
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_that_would_broadcast(attention, causal):
    message = (
        r"^block_attention: backward returns \(dq, dk, dv\) in the shapes of q, k and v; got \(1, .*q=\(2, "
    )
    with pytest.raises(ValueError, match=message):
        trace(attention, Changed(change_gradients=lambda *x: [g[:1] for g in x]), causal=causal)


@some
@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (ValueError, r"\(dq, dk, dv\).*; got \(1, .* for q=\(2,", lambda q, k, v: (q[:1], k, v)),
        (ValueError, r"shapes of q, k and v; got .* and \(2, 1, ", lambda q, k, v: (q, k, v[:, :1])),
        (ValueError, r"add up what query heads give", lambda q, k, v: (q, jnp.repeat(k, 2, 2), v)),
        (ValueError, r"do not reorder axes", lambda q, k, v: (q.swapaxes(1, 2), k, v)),
        (TypeError, r"got 2 results. Return a tuple of 3 arrays", lambda q, k, v: (q, k)),
        (TypeError, r"got 4 results", lambda q, k, v: (q, k, v, v)),
        (TypeError, r"got an array of float32. Return a tuple of 3", lambda q, k, v: q),
        (TypeError, r"got NoneType. Return a tuple", lambda q, k, v: None),
        (TypeError, r"got NoneType among them. Return floating", lambda q, k, v: (q, None, v)),
        (TypeError, r"got an array of int32 among them", lambda q, k, v: (q, k, v.astype(jnp.int32))),
        (TypeError, r"got an array of bool among them", lambda q, k, v: (q > 0, k, v)),
    ],
)
def test_gradients(attention, error, text, change):
    with pytest.raises(error, match=f"^block_attention: backward returns .*{text}"):
        trace(attention, Changed(change_gradients=change))


@some
@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (ValueError, r"out of q's shape .*; got \(1, ", lambda out, lse: (out[:1], lse)),
        (ValueError, r"Transpose lse if heads come", lambda out, lse: (out, lse.swapaxes(1, 2))),
        (TypeError, r"got NoneType. Return a tuple of 2 arrays", lambda out, lse: None),
        (TypeError, r"got an array of float32. Return", lambda out, lse: out),
        (TypeError, r"got 3 results", lambda out, lse: (out, lse, lse)),
        (TypeError, r"got an array of int32 among them", lambda out, lse: (out.astype(jnp.int32), lse)),
        (
            TypeError,
            r"lse in float32; got bfloat16, too coarse",
            lambda o, lse: (o, lse.astype(jnp.bfloat16)),
        ),
    ],
)
def test_outputs(attention, error, text, change):
    with pytest.raises(error, match=f"^block_attention: forward returns .*{text}"):
        trace(attention, Changed(change), gradient=False)


@some
@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("NoneType", lambda out, lse: None),
        ("an array of float32", lambda out, lse: out),
        ("3 results", lambda out, lse: (out, lse, lse)),
        ("1 results", lambda out, lse: (out,)),
        ("dict", lambda out, lse: {"out": out, "lse": lse}),
    ],
)
def test_results_of_a_function(attention, text, results):
    function = DifferentiableAttention(lambda *args: results(*BLOCK.forward(*args)))
    message = (
        rf"^DifferentiableAttention: function returns \(out, lse\); got {text}. Return a tuple of 2 arrays"
    )
    for gradient in (False, True):
        with pytest.raises(TypeError, match=message):
            trace(attention, function, gradient=gradient)


@every
def test_the_last_good_ones(attention):
    """Any precision, lists too."""
    half = Changed(
        lambda out, lse: [out.astype(jnp.float16), lse], lambda *x: [g.astype(jnp.bfloat16) for g in x]
    )
    for block in (Changed(), half, DifferentiableAttention(lambda *args: BLOCK.forward(*args))):
        for got, given in zip(trace(attention, block), (Q, KEYS, KEYS), strict=True):
            assert (got.shape, got.dtype) == (given.shape, given.dtype)
