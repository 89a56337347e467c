"""Causal attention by blocks: which are computed, under which masks, and by which kernels of a GPU."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import PartitionSpec as P

from parallel import (
    BlockMask,
    CudnnBlockAttention,
    PackedBlockAttention,
    PallasKernel,
    PlatformBlockAttention,
    _block_platform,
    ring_attention,
    torus_attention,
    ulysses_attention,
)
from parallel._block_attention import diagonal_mask
from tests.parallel.sequence_bytes import Sums, abstract_mesh
from tests.parallel.sequence_cases import BLOCK, Case, check, draw, mesh_of, program

# With their axes along the sequence.
RING = partial(ring_attention, axis_name="x"), {"x": 4}
TORUS = partial(torus_attention, machine_axis="m", ring_axis="r"), {"m": 2, "r": 2}
ULYSSES = partial(ulysses_attention, axis_name="x"), {"x": 4}


@dataclass(frozen=True)
class Seen:
    """Plain blocks that tell under which mask one is computed."""

    tell: Callable[[str], None]

    def forward(self, q, k, v, mask, scale):
        self._note("forward", mask)
        return BLOCK.forward(q, k, v, mask, scale)

    def backward(self, q, k, v, whole, mask, scale):
        self._note("backward", mask)
        return BLOCK.backward(q, k, v, whole, mask, scale)

    def _note(self, direction, mask):
        kind = "diagonal" if mask.is_diagonal else "all" if mask.q_positions is None else "positions"
        jax.debug.callback(partial(self.tell, f"{direction}, {kind}"))


@dataclass(frozen=True)
class Traced:
    """No attention: tells whenever a block is traced."""

    tell: Callable[[str], None]

    def forward(self, *args):
        self.tell("forward")
        return Sums().forward(*args)

    def backward(self, *args):
        self.tell("backward")
        return Sums().backward(*args)


def traced_blocks(attention, axes, *, causal=True):
    """Of each direction in a program of value and gradient, on any number of devices."""
    counts = Counter()
    heads = math.prod(axes.values())
    case = Case(heads=heads, kv_heads=heads, causal=causal, block=Traced(lambda name: counts.update([name])))
    mesh = abstract_mesh(**axes)
    arrays = draw(case, mesh.size)
    run = program.__wrapped__(attention, mesh, tuple(axes), case)
    run.trace(arrays.qkv, arrays.d_out, None, None, None, None)
    return counts["forward"], counts["backward"]


def check_causal(attention, axes, case):
    check(attention, mesh_of(**axes), tuple(axes), replace(case, causal=True))


def seen(attention, axes, case):
    """Of all devices, beside `check`."""
    counts = Counter()
    check_causal(attention, axes, replace(case, block=Seen(lambda text: counts.update([text]))))
    jax.effects_barrier()
    return dict(counts)


@pytest.mark.parametrize("segments", [0, 3])
def test_a_ring_masks_positions_on_its_diagonal_alone(segments):
    """10 blocks of 16; for the gradient the second half of an own block is keys before it, and its own."""
    assert seen(*RING, Case(segments=segments)) == {
        "forward, diagonal": 4,
        "forward, all": 6,
        "backward, diagonal": 8,
        "backward, all": 6 + 4,
    }


def test_a_torus_with_rings_computes_no_hidden_block_either():
    """Twice as much as a ring, of half the heads. Of the gradient, own blocks of every ring are in two halves."""
    assert seen(*TORUS, Case()) == {
        "forward, diagonal": 2 * 4,
        "forward, all": 2 * 6,
        "backward, diagonal": 2 * 8,
        "backward, all": 2 * (6 + 4 + 2),
    }


def test_lengths_that_differ_mask_positions():
    counts = seen(*RING, Case(q_loc=2, k_loc=3))
    assert {kind for kind in counts if "diagonal" in kind} == set()
    assert counts["forward, positions"] > 0


@pytest.mark.full
def test_two_parts_of_queries_as_long_as_keys_are_no_diagonal():
    check_causal(TORUS[0], {"m": 3, "r": 2}, Case(q_loc=2, k_loc=4, heads=3, kv_heads=3))


@pytest.mark.parametrize(
    "algorithm", [RING, pytest.param(TORUS, marks=pytest.mark.full)], ids=["ring", "torus"]
)
def test_text_as_long_as_a_devices_rows(algorithm):
    check_causal(*algorithm, Case(text=3))


@pytest.mark.parametrize("machines", [2, 4, 8])
def test_a_causal_program_grows_like_its_transfers(machines):
    """Forward with the machines: own keys have two kinds of blocks in the ring's loop, others one; as parts joined.

    Backward with the pairs that take turns of the ring, as long as without a mask: each pair has four blocks, and own
    keys before the second half are one more.
    """
    attention, _ = TORUS
    forward, backward = traced_blocks(attention, {"m": machines, "r": 4})
    assert (forward, backward) == (5 * machines, 4 * machines**2 + machines)
    assert traced_blocks(attention, {"m": machines, "r": 4}, causal=False)[0] == 4 * machines


def test_a_causal_ring_is_as_long_a_program_on_any_number_of_devices():
    attention, _ = RING
    assert traced_blocks(attention, {"x": 4}) == traced_blocks(attention, {"x": 16}) == (3, 5)


@pytest.fixture
def cudnn(monkeypatch):
    """As if the library were there: programs say what its kernels get, and none runs."""
    monkeypatch.setattr(fused, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda _: False)


def kernels(attention, axes, **of_case):
    """Kernels in the branches and loops of a causal program of value and gradient, and how many of each."""
    case = Case(dim=64, q_loc=4, k_loc=4, causal=True, block=PlatformBlockAttention(), **of_case)
    mesh = mesh_of(**axes)
    arrays = draw(case, mesh.size)
    run = program.__wrapped__(attention, mesh, tuple(axes), case)  # traced as no other test may have it
    traced = run.trace(arrays.qkv, arrays.d_out, arrays.ids, None, None, None)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    cudnn = re.findall(r"__cudnn\$(fmha\w+)\(.*?mask_type\W+22: \W+22([A-Z_]+)", text)
    return Counter(cudnn), set(re.findall(r"packed_attention_\w+", text)), "dot_general" in text


CUDNN, TRITON = CudnnBlockAttention(), PackedBlockAttention(PallasKernel())


@pytest.mark.parametrize(
    ("dtype", "has_ids", "beside_others", "before", "diagonal"),
    [
        ("bfloat16", False, False, CUDNN, CUDNN),
        ("bfloat16", False, True, TRITON, None),
        ("bfloat16", True, False, TRITON, None),
        ("bfloat16", True, True, TRITON, None),
        ("float16", False, False, CUDNN, CUDNN),
        ("float16", False, True, None, None),
        ("float16", True, False, None, None),
        ("float16", True, True, None, None),
        ("float32", False, False, TRITON, None),
        ("float32", False, True, TRITON, None),
        ("float32", True, False, TRITON, None),
        ("float32", True, True, TRITON, None),
    ],
)
def test_kernels_by_dtype_and_mask(cudnn, monkeypatch, dtype, has_ids, beside_others, before, diagonal):
    """The table of docs/sequence_parallel.md; None is plain JAX. What positions cut otherwise is that for all."""
    monkeypatch.setattr(_block_platform, "cudnn_partitions", lambda: not beside_others)
    rows, places = jnp.zeros((1, 256, 4, 64), dtype), jnp.arange(256, dtype=jnp.int32)
    ids = jnp.ones((1, 256), jnp.int32) if has_ids else None
    masks = BlockMask(ids, ids), diagonal_mask(ids, ids, 256), BlockMask(ids, ids, places, places)
    found = [_block_platform._cuda_block(rows, rows, rows, mask, 0.125) for mask in masks]
    assert found == [before, diagonal, None]


def test_kernels_of_a_ring(cudnn):
    """Nothing is left to plain JAX."""
    found, triton, has_plain_jax = kernels(*RING, dtype=jnp.bfloat16)
    assert not triton
    assert not has_plain_jax
    assert set(found) == {
        (name, mask) for name in ("fmhaSoftmax", "fmhaSoftmaxBackward") for mask in ("CAUSAL", "NO_MASK")
    }


def test_kernels_of_packed_rows(cudnn):
    """Triton for what lies wholly before; it knows no positions, and the diagonal is left to plain JAX."""
    found, triton, has_plain_jax = kernels(*RING, dtype=jnp.bfloat16, segments=2)
    assert not found
    assert {"packed_attention_forward", "packed_attention_grad_keys"} <= triton
    assert has_plain_jax


def test_kernels_of_a_whole_sequence(cudnn):
    found, triton, has_plain_jax = kernels(*ULYSSES, dtype=jnp.bfloat16)
    assert found == {("fmhaSoftmax", "CAUSAL"): 1, ("fmhaSoftmaxBackward", "CAUSAL"): 1}
    assert not triton
    assert not has_plain_jax


def test_cudnn_is_not_asked_where_jax_cannot_lower_it(cudnn):
    """Beside a mesh axis that is not manual its calls would have to be divided, which fails in `shard_map`."""
    rows = jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.bfloat16)
    for manual, expected in (({"x"}, False), ({"x", "y"}, True)):
        mapped = jax.shard_map(
            lambda q: ring_attention(q, q, q, axis_name="x"),
            mesh=mesh_of(x=2, y=2),
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
            axis_names=manual,
            check_vma=False,
        )
        text = jax.jit(mapped).trace(rows).lower(lowering_platforms=("cuda",)).as_text()
        assert ("__cudnn$fmha" in text) == expected
