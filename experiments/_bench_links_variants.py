"""What `bench_links` compares: sequence-parallel algorithms over machines, as programs and as bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._sequence_bytes import MovedRows
from experiments.hlo import WorkCounter, count_executions, find_collectives, parse_module
from parallel import (
    RING_AXES,
    ULYSSES_AXES,
    XlaBlockAttention,
    ring_attention,
    sequence_attention,
    sequence_mesh,
    ulysses_attention,
)
from solver import SequenceMesh, Topology

_SPEC = P(None, (*RING_AXES, *ULYSSES_AXES))
_BLOCK = XlaBlockAttention(block=256)
DIRECTIONS = ("forward", "forward + backward")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the whole sequences, float32. Short and many, so that there is more to send than to compute."""

    batch: int = 4
    seq_len: int = 256
    num_heads: int = 8
    head_dim: int = 128

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of q, k, v and the output."""
        return self.batch, self.seq_len, self.num_heads, self.head_dim

    @property
    def tensor_bytes(self) -> int:
        """Of one of them."""
        return self.batch * self.seq_len * self.num_heads * self.head_dim * 4

    @property
    def attention_flops(self) -> int:
        """Of the forward pass."""
        return 4 * self.batch * self.seq_len**2 * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Variant:
    """An algorithm with its degrees across and inside machines."""

    name: str
    mesh: SequenceMesh
    is_torus: bool = False


def variants(topology: Topology) -> tuple[Variant, ...]:
    """The algorithms over all devices. With one device a machine, USP is the ring and topology-aware is Ulysses."""
    machines, devices = topology.num_machines, topology.devices_per_machine
    across_first = SequenceMesh(machines, 1, 1, devices)
    every = (
        Variant("ulysses", SequenceMesh(machines, devices, 1, 1)),
        Variant("ring", SequenceMesh(1, 1, machines, devices)),
        Variant("usp", SequenceMesh(1, devices, machines, 1)),
        Variant("topology_aware", across_first),
        Variant("torus", across_first, is_torus=True),
    )
    return every if devices > 1 else (every[0], every[1], every[4])


def across_bytes(variant: Variant, topology: Topology, tensor_bytes: float, *, backward: bool) -> float:
    """Bytes that a machine sends to others, by formula.

    Args:
        variant: the algorithm.
        topology: machines and devices.
        tensor_bytes: of all of q, or k, v, o.
        backward: whether the gradient is computed too.
    """
    moved = MovedRows(
        variant.mesh,
        tensor_bytes / topology.num_devices,
        element_bytes=4,
        torus=variant.is_torus,
        gradient=backward,
        one_program=True,
    )
    return topology.devices_per_machine * moved.traffic.across


def make_mesh(variant: Variant, topology: Topology, devices: Sequence[Any]) -> Mesh:
    """The mesh over these devices, those of a machine one after another."""
    degrees = variant.mesh
    return sequence_mesh(
        devices,
        ulysses_degree=degrees.ulysses_degree,
        ring_degree=degrees.ring_degree,
        placement=(degrees.ulysses_across, degrees.ring_across),
        devices_per_machine=topology.devices_per_machine,
    )


def _attention(variant: Variant) -> Callable[..., Any]:
    if variant.mesh.ring_degree == 1 and not variant.is_torus:
        return partial(ulysses_attention, axis_name=ULYSSES_AXES, block_attention=_BLOCK)
    if variant.mesh.ulysses_degree == 1:
        return partial(ring_attention, axis_name=RING_AXES, block_attention=_BLOCK)
    return partial(sequence_attention(torus=variant.is_torus), block_attention=_BLOCK)


def compile_program(variant: Variant, mesh: Mesh, sizes: Sizes, *, backward: bool) -> Any:
    """The compiled program: q, k, v and the output's cotangent to (out,), or to (out, dq, dk, dv)."""
    attention = jax.shard_map(
        _attention(variant), mesh=mesh, in_specs=(_SPEC,) * 3, out_specs=_SPEC, check_vma=False
    )

    def forward(q, k, v, d_out):
        return (attention(q, k, v),)

    def both(q, k, v, d_out):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(d_out)

    rows = jax.ShapeDtypeStruct(sizes.shape, jnp.float32, sharding=NamedSharding(mesh, _SPEC))
    return jax.jit(both if backward else forward, keep_unused=True).lower(*[rows] * 4).compile()


def place(mesh: Mesh, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
    """Arrays that every process has, over the mesh's devices, of which a process needs to see only its own."""
    sharding = NamedSharding(mesh, _SPEC)
    return [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in arrays]


def compiled_bytes(compiled: Any, topology: Topology) -> float:
    """Bytes that a machine sends to others, mean over machines, counted from the collectives of a compiled program."""
    module = parse_module(compiled.as_text())
    executions = count_executions(module)
    per_machine = topology.devices_per_machine
    found = find_collectives(module, executions, WorkCounter(module), per_machine=per_machine)
    return per_machine * sum(one.executions * one.traffic.across for one in found)


def draw(sizes: Sizes) -> list[np.ndarray]:
    """q, k, v and the cotangent of the output, the same in every process."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(sizes.shape, np.float32) for _ in range(4)]


def dense_attention(q: Any, k: Any, v: Any) -> Any:
    """By definition, on one device."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), v)


@jax.jit
def expected(q: Any, k: Any, v: Any, d_out: Any) -> Any:
    """Output and gradients of `dense_attention`."""
    out, pullback = jax.vjp(dense_attention, q, k, v)
    return out, *pullback(d_out)


def largest_error(found: Sequence[jax.Array], wanted: Sequence[Any]) -> float:
    """Over this process's parts of all arrays, relative to each array's largest number."""
    worst = 0.0
    for array, expected_array in zip(found, map(np.asarray, wanted), strict=False):
        top = np.abs(expected_array).max()
        for shard in array.addressable_shards:
            difference = np.abs(np.asarray(shard.data) - expected_array[shard.index]).max()
            worst = max(worst, float(difference / top))
    return worst
