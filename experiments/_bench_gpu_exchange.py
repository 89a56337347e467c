"""Bandwidth of the exchange between devices: rows of tokens to rows of (token, head), one bag of all devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments._bench_gpu_attention import call_times
from experiments._bench_report import Section, markdown_table, paragraph
from parallel import exchange, expand_attention
from solver import CostModel, StepLayout, balance, step_needs, step_tables


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Each device starts with one sequence of each of `lengths` tokens; q, k and v move together."""

    lengths: tuple[int, ...] = (1024, 4096, 16384)
    num_heads: int = 24
    head_dim: int = 128
    block: int = 128
    repeats: int = 10


QUICK = ExchangeSizes(lengths=(32,), num_heads=8, head_dim=8, block=16, repeats=1)
_PARTS = 3  # q, k, v


def bench_gpu_exchange(*, quick: bool) -> Section:
    """Measure the exchange over all devices; nothing where there is one."""
    sizes = QUICK if quick else ExchangeSizes()
    devices = jax.devices()
    measured = [] if len(devices) == 1 else [_measure(sizes, length, devices) for length in sizes.lengths]
    rows = [
        (m["length"], f"{m['sent_bytes'] / 1e6:.4g}", f"{min(m['seconds']) * 1e3:.3g}", f"{m['gb_s']:.3g}")
        for m in measured
    ]
    header = ("tokens a device", "MB sent a device", "ms, least", "GB/s sent a device")
    note = f"""{len(devices)} devices in one bag, {sizes.num_heads} heads of {sizes.head_dim}, bfloat16, q, k and v in
    one exchange; rows that stay on their device are moved too, and count as time only."""
    body = markdown_table(header, rows) + "\n\n" + paragraph(note) if measured else "There is one device."
    return Section("exchange", "Exchange between devices", body, {"measured": measured})


def _measure(sizes: ExchangeSizes, length: int, devices: list[Any]) -> dict[str, Any]:
    count = len(devices)
    plan = balance(
        [length] * count,
        list(range(count)),
        num_devices=count,
        bags=f"g{count}n1",
        cost=CostModel(width=sizes.num_heads * sizes.head_dim, gamma=0.4),
        num_heads=sizes.num_heads,
    )
    layout = StepLayout(plan, sizes.block)
    needs = step_needs(layout)
    tables = step_tables(layout, needs)
    mesh = Mesh(np.array(devices), ("x",))

    def move(rows: jax.Array, tables: Any) -> jax.Array:
        tables = jax.tree.map(lambda x: x[0], tables)
        attention = expand_attention(tables, needs, num_heads=sizes.num_heads)
        return exchange(rows, attention.groups[0].keys, axis_name="x")

    shape = (count * (needs.text + needs.image) * sizes.num_heads, _PARTS * sizes.head_dim)
    rows = jnp.zeros(shape, jnp.bfloat16, device=jax.NamedSharding(mesh, P("x")))
    placed = jax.device_put(tables, jax.NamedSharding(mesh, P("x")))
    run = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    times = call_times(run, (rows, placed), repeats=sizes.repeats)
    sent_rows = int(np.asarray(tables.attention[0].keys.peers)[:, 0].sum(-1).max())
    sent_bytes = sent_rows * _PARTS * sizes.head_dim * 2
    return {
        "length": length,
        "sent_bytes": sent_bytes,
        "seconds": times.samples,
        "gb_s": sent_bytes / times.middle / 1e9,
    }
