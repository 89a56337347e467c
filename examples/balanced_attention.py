"""Attention over sequences of any lengths, balanced over 8 devices, with `solver` and `parallel` alone.

python examples/balanced_attention.py    runs on virtual CPU devices, and says how far it is from dense attention.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import parallel
import solver

DEVICES, HEADS, HEAD_DIM = 8, 6, 32

jax.config.update("jax_num_cpu_devices", DEVICES)  # has no effect where there are GPUs
mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

# What the data loader did: sequence i has lengths[i] tokens and lies on device home[i].
rng = np.random.default_rng(0)
lengths = np.array([900, 30, 31, 4, 260, 17, 512, 64, 65, 1, 120, 40])
home = np.arange(len(lengths)) % DEVICES

# On the host, every step: a plan, the layouts that follow from it, and int32 tables, one row a device.
plan = solver.balance(lengths, home, num_devices=DEVICES, bags="g1n4+g4n1", num_heads=HEADS)
layout = solver.StepLayout(plan, block=64)
# Static sizes. Keep them (and the compiled function) while capacity.fits(step_needs(layout)), else take
# capacity.grown(step_needs(layout)). On GPUs pass padded=False.
capacity = solver.capacity_for([solver.step_needs(layout)])
tables = solver.step_tables(layout, capacity)


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False)
def attend(qkv, tables):
    """Rows in home layout, (devices, home rows, 3, heads, head_dim), to attention outputs in the same places."""
    qkv, tables = jax.tree.map(lambda x: x[0], (qkv, tables))  # this device's
    # Home to token layout: where linear layers would run. A step may have a text stream as well; it comes first.
    route = parallel.expand_route(
        tables.image, capacity.image_route, rows_in=capacity.home_image, rows_out=capacity.image
    )
    tokens = parallel.exchange(qkv, route, axis_name="data")
    q, k, v = jnp.pad(tokens, ((capacity.text, 0), (0, 0), (0, 0), (0, 0))).swapaxes(0, 1)
    # Token to attention layout and back.
    rows = parallel.expand_attention(tables, capacity, num_heads=HEADS)
    out = parallel.balanced_attention(q, k, v, rows, axis_name="data")[capacity.text :]
    return parallel.exchange(out, route.reversed, axis_name="data")[None]


def dense_attention(q, k, v):
    """One sequence, for comparison."""
    logits = np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def main() -> None:
    """Fill home rows, attend, compare."""
    sequences = [rng.standard_normal((n, 3, HEADS, HEAD_DIM), np.float32) for n in lengths]
    at_home = np.zeros((DEVICES, capacity.home_image, 3, HEADS, HEAD_DIM), np.float32)
    filled = np.zeros(DEVICES, int)
    places = []
    for device, rows in zip(home, sequences, strict=True):
        places.append((device, slice(filled[device], filled[device] + len(rows))))
        at_home[places[-1]] = rows
        filled[device] += len(rows)
    out = np.asarray(attend(at_home, tables))
    errors = [
        np.abs(out[place] - dense_attention(*rows.swapaxes(0, 1))).max()
        for place, rows in zip(places, sequences, strict=True)
    ]
    print(f"tokens a device: {np.bincount(home, lengths).astype(int)} as loaded, {plan.tokens} balanced")
    print(f"largest difference from dense attention: {max(errors):.1e}")


if __name__ == "__main__":
    main()
