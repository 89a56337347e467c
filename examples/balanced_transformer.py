"""A plain JAX transformer balanced over 8 devices by `solver` and `parallel`, compared with one sequence at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import parallel
import solver

DEVICES, HEADS, WIDTH = 8, 6, 48
jax.config.update("jax_num_cpu_devices", DEVICES)  # has no effect where there are GPUs
mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 192), "down": (192, WIDTH)}
params = [{k: rng.normal(0, 0.1, s).astype(np.float32) for k, s in shapes.items()} for _ in range(2)]
# What the data loader did: sequence i lies on device home[i].
sequences = [rng.normal(size=(n, WIDTH)).astype(np.float32) for n in (900, 30, 4, 260, 17, 512, 1, 120)]
lengths, home = [len(x) for x in sequences], range(DEVICES)


def loss(params, x, attention):
    """Of any network on rows of tokens that takes attention, of (tokens, heads, head_dim), as a callable."""
    for p in params:
        q, k, v = (jax.nn.standardize(x) @ p["qkv"]).reshape(len(x), 3, HEADS, -1).swapaxes(0, 1)
        x = x + attention(q, k, v).reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
    return (x**2).sum() / sum(lengths)  # rows without a token are zero and stay so


# On the host, every step. Keep the compiled program while capacity.fits(solver.step_needs(layout)).
plan = solver.balance(lengths, home, num_devices=DEVICES, bags="auto", num_heads=HEADS)
layout = solver.StepLayout(plan, block=64)
capacity = solver.capacity_for([solver.step_needs(layout)])
rows, tables = solver.pack_home(sequences, layout, capacity), solver.step_tables(layout, capacity)


@jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
def balanced(params, x, tables):
    x, tables = jax.tree.map(lambda a: a[0], (x, tables))  # this device's
    x = parallel.exchange(x, parallel.expand_tokens(tables, capacity).image, axis_name="data")
    layout = parallel.expand_attention(tables, capacity, num_heads=HEADS)
    attend = parallel.make_balanced_attention(layout, axis_name="data")
    return jax.lax.psum(loss(params, x, attend), "data")


def step(total_loss, *inputs):
    """The loss, and what a step of gradient descent adds to the parameters."""
    value, gradient = jax.jit(jax.value_and_grad(total_loss))(params, *inputs)
    return value, jax.tree.leaves(jax.tree.map(lambda g: -0.1 * g, gradient))


value, update = step(balanced, rows, tables)
wanted = step(lambda params: sum(loss(params, x, jax.nn.dot_product_attention) for x in sequences))
error = max(jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in zip(update, wanted[1], strict=True))
print(f"tokens a device: {lengths} as loaded, {plan.tokens.tolist()} balanced")
print(f"loss {value:.6f}, one by one {wanted[0]:.6f}; largest difference of an update {error:.1e}")
