"""Which kernels the CUDA compiler calls for causal attention: needs JAX's CUDA wheels and no GPU; `make aot` runs it.

Not collected by pytest (its name): `python -m pytest tests/aot/check_causal.py`.
"""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._aot_compiler import target_devices
from experiments._aot_gpus import Machines, load_gpu
from parallel import ring_attention, torus_attention

FORWARD, BACKWARD, TRITON = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "__gpu$xla.gpu.triton"
RING = partial(ring_attention, axis_name=("m", "x"))
TORUS = partial(torus_attention, machine_axis="m", ring_axis="x")


@cache
def branches(attention, *, is_packed=False):
    """Kernels in each branch of each conditional of value and gradient of 2,048 rows a device: in its order."""
    devices = np.array(target_devices(load_gpu("h100"), Machines(2, 4))).reshape(2, 4)
    mesh, rows = Mesh(devices, ("m", "x")), P(None, ("m", "x"))

    def per_device(q, k, v, ids):
        return attention(q, k, v, segment_ids=ids, causal=True)

    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)

    @jax.jit
    def run(q, k, v, ids, d_out):
        out, pullback = lax.optimization_barrier(jax.vjp(lambda *qkv: mapped(*qkv, ids), q, k, v))
        return out, pullback(d_out)

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rows))

    x = argument((1, 8 * 2048, 8, 128), jnp.bfloat16)
    ids = argument((1, 8 * 2048), jnp.int32) if is_packed else None
    text = run.lower(x, x, x, ids, x).compile().as_text()
    bodies = dict(re.findall(r"^%(\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    found = re.findall(r" conditional\(.*?branch_computations=\{(.*?)\}", text)
    return [[_kernels(bodies[name.strip(" %")]) for name in names.split(",")] for names in found]


def _kernels(body):
    return set(re.findall(r'custom_call_target="([^"]+)"', body)) & {FORWARD, BACKWARD, TRITON}


@pytest.mark.parametrize("attention", [RING, TORUS], ids=["ring", "torus"])
def test_cudnn_computes_every_block_that_a_causal_mask_leaves(attention):
    found = branches(attention)
    assert {frozenset(partly | wholly) for _, partly, wholly in found} == {
        frozenset({FORWARD}),
        frozenset({BACKWARD}),
    }
    for nothing, partly, wholly in found:
        assert not nothing
        assert partly == wholly


def test_triton_computes_packed_blocks_that_lie_before():
    found = branches(RING, is_packed=True)
    assert found
    for nothing, partly, wholly in found:
        assert not nothing
        assert wholly == {TRITON}
        assert partly <= {TRITON}, "of the gradient's own block the keys before the second half"
