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
def compiled(attention, machines=(2, 4), *, is_packed=False):
    """The program of value and gradient of 2,048 rows a device, as lowered and as compiled."""
    devices = np.array(target_devices(load_gpu("h100"), Machines(*machines))).reshape(machines)
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
    lowered = run.lower(x, x, x, ids, x)
    return lowered.as_text(), lowered.compile().as_text()


def branches(text):
    """Kernels in each branch of each conditional: nothing, what the mask cuts if that may be, what it leaves whole."""
    bodies = dict(re.findall(r"^%(\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    # Of two branches the compiler may write the later one first.
    two = re.findall(r" conditional\(.*?true_computation=(\S+), false_computation=([^\s,]+)", text)
    more = re.findall(r" conditional\(.*?branch_computations=\{(.*?)\}", text)
    found = [*(reversed(names) for names in two), *(names.split(",") for names in more)]
    return [[_kernels(bodies[name.strip(" %")]) for name in names] for names in found]


def _kernels(body):
    return set(re.findall(r'custom_call_target="([^"]+)"', body)) & {FORWARD, BACKWARD, TRITON}


@pytest.mark.parametrize(
    ("attention", "machines"),
    [(RING, (2, 4)), (TORUS, (2, 4)), (TORUS, (4, 2))],
    ids=["ring", "torus", "torus of four machines"],
)
def test_cudnn_computes_every_block_that_a_causal_mask_leaves(attention, machines):
    lowered, text = compiled(attention, machines)
    assert "dot_general" not in lowered, "nothing is plain JAX"
    found = branches(text)
    assert {tuple(sorted(set().union(*kinds))) for _, *kinds in found} == {(FORWARD,), (BACKWARD,)}
    for nothing, *kinds in found:
        assert not nothing
        assert all(kind == kinds[0] for kind in kinds)


def test_triton_computes_packed_blocks_that_lie_before():
    found = branches(compiled(RING, is_packed=True)[1])
    assert found
    for nothing, *partly, wholly in found:
        assert not nothing
        assert wholly == {TRITON}
        assert all(not kind for kind in partly), "the diagonal"
