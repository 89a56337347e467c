"""A plain Flax transformer whose long sequence 8 devices share by `usp_attention`, compared with one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

import parallel

HEADS, WIDTH, LENGTH = 6, 48, 403  # 4 devices exchange 6 heads, 8 share 403 tokens: neither need divide
jax.config.update("jax_num_cpu_devices", 8)  # has no effect where there are GPUs


class Block(nnx.Module):
    """Of any network that takes attention, of (batch, length, heads, head_dim), as a callable."""

    def __init__(self, attention, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention, use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 192, rngs=rngs), nnx.Linear(192, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.norm(x), decode=False)
        return x + self.down(nnx.gelu(self.up(x)))


def loss_and_update(attention, x, is_token):
    """The loss of two blocks, and what a step of gradient descent adds to their parameters."""
    rngs = nnx.Rngs(0)  # the same parameters each time
    graph, params = nnx.split(nnx.Sequential(Block(attention, rngs), Block(attention, rngs)))

    def loss(params):
        squares = (nnx.merge(graph, params)(x) ** 2).mean(-1)
        return jnp.where(is_token, squares, 0).sum() / is_token.sum()  # of tokens, not of padding

    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(params))
    return value, [-0.1 * g for g in jax.tree.leaves(gradient)]


# As on 2 machines of 4 devices: heads are exchanged inside a machine, keys and values go round between the two.
mesh = parallel.sequence_mesh(ulysses_degree=4, ring_degree=2, devices_per_machine=4)
usp = partial(parallel.usp_attention, ulysses_axis=parallel.ULYSSES_AXES, ring_axis=parallel.RING_AXES)
rows = P(parallel.SEQUENCE_DATA_AXIS, (*parallel.RING_AXES, *parallel.ULYSSES_AXES))  # (batch, length, ...)
per_device = partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
attend = per_device(lambda q, k, v, ids: usp(q, k, v, segment_ids=ids))
x = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)
shared, ids = jax.device_put(parallel.pad_sequence(x, degree=8), jax.NamedSharding(mesh, rows))
value, update = loss_and_update(lambda q, k, v, **_: attend(q, k, v, ids), shared, ids > 0)
alone, wanted = loss_and_update(nnx.dot_product_attention, x, np.ones(x.shape[:2], bool))
error = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(update, wanted, strict=True))
print(f"{LENGTH} tokens over {mesh.size} devices: {shared.sharding.shard_shape(shared.shape)[1]} rows each")
print(f"loss {value:.6f}, on one device {alone:.6f}; largest difference of an update {error:.1e}")
