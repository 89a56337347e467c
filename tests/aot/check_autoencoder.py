"""What the CUDA compiler makes of divided decoding: needs JAX's CUDA wheels and no GPU; `make aot` runs it.

Not collected by pytest (its name): `python -m pytest tests/aot/check_autoencoder.py -s` also prints the figures.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._aot_compiler import target_devices
from experiments._aot_gpus import Machines, load_gpu
from jaxdit.encoders import FLUX_VAE, AutoencoderKL, decode_split

SIZE = 4096 // FLUX_VAE.factor
GIB = 2**30


def compiled_decode(num_devices: int) -> Any:
    """FLUX.1's decode of one picture of 4096 x 4096 pixels, compiled for H100."""
    devices = target_devices(load_gpu("h100"), Machines(1, num_devices))
    mesh = Mesh(np.array(devices), ("gpu",), axis_types=(AxisType.Auto,))
    graph, state = nnx.split(nnx.eval_shape(lambda: AutoencoderKL(FLUX_VAE, rngs=nnx.Rngs(0))))
    place = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    state = jax.tree.map(lambda x: place(x.shape, x.dtype), state)
    divided = NamedSharding(mesh, P(None, "gpu"))
    shape = (1, SIZE, SIZE, FLUX_VAE.latent_channels)
    latents = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=divided)

    def decode(state: Any, latents: Any) -> Any:
        return decode_split(nnx.merge(graph, state), latents, mesh=mesh, axis_names=("gpu",))

    return jax.jit(decode).lower(state, latents).compile()


def test_a_large_decode_on_eight_gpus():
    """An eighth of the temporaries of one GPU; only edge rows, moments and the ring's keys are sent."""
    one, eight = compiled_decode(1), compiled_decode(8)
    temp = [x.memory_analysis().temp_size_in_bytes for x in (one, eight)]
    text = eight.as_text()
    sent = {
        kind: [
            tuple(map(int, shape.split(",")))
            for shape in re.findall(rf"\(\w+\[([\d,]+)\][^=]* {kind}-start\(", text)
        ]
        for kind in ("collective-permute", "all-gather", "all-reduce", "all-to-all")
    }
    counts = {kind: len(shapes) for kind, shapes in sent.items()}
    print(f"temporaries: 1 GPU {temp[0] / GIB:.2f} GiB, 8 GPUs {temp[1] / GIB:.2f} GiB each; {counts}")  # noqa: T201
    assert temp[0] > 7 * temp[1]
    # Of 33 convolutions 3 x 3 two each, and the ring's loop; 30 norms.
    assert counts == {"collective-permute": 67, "all-gather": 30, "all-reduce": 0, "all-to-all": 0}
    assert set(sent["all-gather"]) == {(1, 2, 32)}
    keys = (2, 1, SIZE * SIZE // 8, 1, 512)
    assert sent["collective-permute"].count(keys) == 1
    assert all(shape[1] == 1 for shape in sent["collective-permute"] if shape != keys)
