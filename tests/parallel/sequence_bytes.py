"""Bytes that leave machines, counted from the collectives of a lowered program. Lowered for meshes of any size."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

from parallel import Partial

_BYTES = {"i32": 4, "ui32": 4, "f32": 4, "ui16": 2, "bf16": 2}


@dataclass(frozen=True)
class Sums:
    """No attention, but needs all that attention needs: what moves is the same, and lowering it takes less time."""

    def forward(self, q, k, v, mask, scale):
        out = q.astype(jnp.float32) + _sum_of(k, v, mask)
        return Partial(out, out[..., 0])

    def backward(self, q, k, v, whole, mask, scale):
        total = _sum_of(q, k, v, whole, mask)
        return tuple(x.astype(jnp.float32) + total for x in (q, k, v))


def _sum_of(*arrays):
    return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(arrays))


@dataclass(frozen=True)
class Rows:
    """Of one device."""

    q_loc: int = 2
    k_loc: int = 2
    heads: int = 8
    kv_heads: int = 8
    dim: int = 4
    batch: int = 2
    dtype: Any = jnp.bfloat16
    ids: bool = False


def abstract_mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def lower(
    attention: Callable[..., Any], mesh: Any, order: Any, rows: Rows, *, gradient: bool = False
) -> ir.Module:
    """The attention, or it and its gradient; `order` are the axes along the sequence."""

    def per_device(q, k, v, ids, d_out):
        def attend(*qkv):
            return attention(*qkv, segment_ids=ids, block_attention=Sums())

        if not gradient:
            return attend(q, k, v)
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(d_out)

    spec = P(None, order)
    devices = int(np.prod([mesh.shape[axis] for axis in order]))
    of_queries, of_keys = (
        jax.ShapeDtypeStruct((rows.batch, length * devices, heads, rows.dim), rows.dtype)
        for length, heads in ((rows.q_loc, rows.heads), (rows.k_loc, rows.kv_heads))
    )
    ids = [jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) for x in (of_queries, of_keys)] if rows.ids else None
    ids = None if ids is None else tuple(ids)
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    traced = jax.jit(mapped).trace(of_queries, of_keys, of_keys, ids, of_queries)
    return traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")


def sent_by_machine(module: ir.Module, machine_of: Sequence[int]) -> dict[int, int]:
    """Bytes that leave each machine, by machine, given that of each device; none for machines that send nothing.

    A gather counts what a device gives to each other one.
    """
    sent: Counter[tuple[int, int]] = Counter()
    functions = {_name(op): op for op in module.body.operations}
    _walk(functions["main"], 1, functions, sent)
    total: Counter[int] = Counter()
    for (source, target), num_bytes in sent.items():
        if machine_of[source] != machine_of[target]:
            total[machine_of[source]] += num_bytes
    return dict(sorted(total.items()))


def machines_of(mesh: Any, devices_per_machine: int) -> list[int]:
    """By place in the mesh."""
    if isinstance(mesh, AbstractMesh):
        return [i // devices_per_machine for i in range(mesh.size)]
    return [device.id // devices_per_machine for device in mesh.devices.flat]


def _name(operation: Any) -> str:
    return operation.attributes["sym_name"].value


def _walk(operation: Any, times: int, functions: Any, sent: Counter) -> None:
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                name = inner.operation.name
                if name == "func.call":
                    _walk(functions[inner.attributes["callee"].value], times, functions, sent)
                elif name == "stablehlo.while":
                    _walk_loop(inner, times, functions, sent)
                else:
                    _count(name, inner, times, sent)
                    _walk(inner, times, functions, sent)


def _walk_loop(loop: Any, times: int, functions: Any, sent: Counter) -> None:
    inside: Counter[tuple[int, int]] = Counter()
    _walk(loop, 1, functions, inside)
    if inside:
        trips = _trips(loop)
        for pair, num_bytes in inside.items():
            sent[pair] += times * trips * num_bytes


def _trips(loop: Any) -> int:
    """Of a loop that counts from 0 to a constant."""
    *_, comparison, _ = loop.regions[0].blocks[0].operations
    assert comparison.operation.name == "stablehlo.compare"
    assert "LT" in str(comparison.attributes["comparison_direction"])
    counter, limit = comparison.operands
    start = loop.operands[ir.BlockArgument(counter).arg_number]
    assert _constant(start) == 0
    return _constant(limit)


def _constant(value: Any) -> int:
    operation = value.owner
    assert operation.name == "stablehlo.constant"
    return int(np.array(operation.attributes["value"]))


def _count(name: str, operation: Any, times: int, sent: Counter) -> None:
    """Add what each pair of devices exchanges."""
    if name == "stablehlo.collective_permute":
        num_bytes = sum(map(_num_bytes, operation.operands))
        for source, target in np.array(operation.attributes["source_target_pairs"]).tolist():
            sent[source, target] += times * num_bytes
    elif name in ("stablehlo.all_to_all", "stablehlo.all_gather"):
        groups = np.array(operation.attributes["replica_groups"])
        num_bytes = sum(map(_num_bytes, operation.operands))
        if name == "stablehlo.all_to_all":
            num_bytes //= groups.shape[1]
        for group in groups.tolist():
            for source in group:
                for target in group:
                    sent[source, target] += times * num_bytes
    else:
        kinds = ("all_", "reduce_scatter", "collective_", "send", "recv")
        assert not name.removeprefix("stablehlo.").startswith(kinds), f"{name} is not counted"


def _num_bytes(value: Any) -> int:
    kind = ir.RankedTensorType(value.type)
    return int(np.prod(kind.shape)) * _BYTES[str(kind.element_type)]
