"""Causal attention by blocks: which are computed, under which masks, and by which kernels of a GPU."""

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

from parallel import PlatformBlockAttention, ring_attention, torus_attention, ulysses_attention
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
