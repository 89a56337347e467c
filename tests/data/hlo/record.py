"""Records the compiled programs beside this file: `python tests/data/hlo/record.py`, where JAX's CUDA wheels are.

Small programs for 2 machines of 4 H100 whose work and traffic are known by hand; tests/experiments/test_hlo.py has the
sums. Texts are trimmed of what nothing reads: file names, layouts of the entry, constants of kernels.
"""

import os
import re
import sys
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._aot_compiler import target_devices
from experiments._aot_gpus import Machines, load_gpu
from experiments._platform import compiler_options
from parallel import DATA_AXES, data_mesh, gather_leaf, sharded_layer_scan

ROWS, WIDTH, LAYERS = 256, 512, 6
BY_DEVICE = P(DATA_AXES)
MESH = data_mesh(target_devices(load_gpu("h100"), Machines(2, 4)))


def all_to_all(x):
    return lax.all_to_all(x, DATA_AXES, 0, 0, tiled=True)


def ring(x):
    """Every device sees every block, one neighbour at a time, beside a product."""
    pairs = [(i, (i + 1) % 8) for i in range(8)]

    def turn(_, state):
        block, total = state
        following = lax.ppermute(block, DATA_AXES, pairs)
        return following, total + block @ block.T

    return lax.fori_loop(0, 7, turn, (x, jnp.zeros((x.shape[0], x.shape[0]), x.dtype)))[1]


def ragged(x, sizes):
    offsets = jnp.cumsum(sizes) - sizes
    return lax.ragged_all_to_all(x, jnp.zeros_like(x), offsets, sizes, offsets, sizes, axis_name=DATA_AXES)


def layer(params, x, consts):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def fsdp_loss(scan, params, x):
    return jnp.sum(scan(layer, params, x, ()).astype(jnp.float32) ** 2)


def fsdp(params, x):
    """Value and gradient of layers whose parameters are sharded over all devices."""
    scan = sharded_layer_scan({"up": 1, "down": 1}, axis_name="shard", dtype=jnp.bfloat16)
    return jax.grad(partial(fsdp_loss, scan))(params, x)


def fsdp_plain(params, x):
    """Layers whose parameters are gathered where they are needed: there is nothing to run meanwhile."""

    def body(x, shards):
        whole = {name: gather_leaf(shard, 0, "shard", jnp.bfloat16) for name, shard in shards.items()}
        return layer(whole, x, ()), None

    return lax.scan(body, x, params)[0]


def data_dependent(x, turns):
    """A loop whose turns only the data know, in one of 5 turns."""

    def inner(x):
        return lax.fori_loop(0, turns[0], lambda _, y: jnp.tanh(y @ y), x)

    return lax.fori_loop(0, 5, lambda _, y: inner(y) @ y, x)


def shapes(*arrays):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))
        for shape, dtype, spec in arrays
    ]


def compiled(function, arguments, options, out_specs=BY_DEVICE):
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    mapped = jax.shard_map(function, mesh=MESH, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, compiler_options=options).lower(*arguments).compile().as_text()


def trimmed(text):
    header, *lines = text.splitlines()
    flags = re.findall(r"is_scheduled=true|num_partitions=\d+|replica_count=\d+", header)
    keep = [f"HloModule recorded, {', '.join(flags)}"]
    start = next(i for i, line in enumerate(lines) if line.endswith("{") and "(" in line)
    for line in lines[start:]:
        line = re.sub(
            r" stack_frame_id=\d+| scheduling_name=\"[^\"]*\"|, metadata=\{\}|, control-predecessors=\{[^}]*\}",
            "",
            line,
        )
        line = re.sub(r"backend_config=\{.*\}(?=,|$)", _trimmed_config, line)
        keep.append(line)
    return "\n".join(keep) + "\n"


def _trimmed_config(found):
    """What the accounting reads of a backend's notes: turns of loops, and whether a collective is waited for."""
    turns = re.search(r'"known_trip_count":\{"n":"\d+"\}', found[0])
    sync = re.search(r'"collective_backend_config":\{"is_sync":(true|false)', found[0])
    parts = [turns[0]] if turns else []
    if sync:
        parts.append(sync[0] + "}")
    return "backend_config={" + ",".join(parts) + "}"


def main():
    bf16, by_device = jnp.bfloat16, BY_DEVICE
    rows = shapes(((8 * ROWS, WIDTH), bf16, by_device))
    params = {
        "up": shapes(((LAYERS, WIDTH, 2 * WIDTH), jnp.float32, P(None, "shard")))[0],
        "down": shapes(((LAYERS, 2 * WIDTH, WIDTH), jnp.float32, P(None, "shard")))[0],
    }
    options = compiler_options(MESH)
    sharded = {"up": P(None, "shard"), "down": P(None, "shard")}
    turns = shapes(((1,), jnp.int32, P()))
    square = shapes(((8 * ROWS, ROWS), bf16, by_device))
    programs = {
        "all_to_all": compiled(all_to_all, rows, options),
        "ring": compiled(ring, rows, options),
        "ragged": compiled(ragged, [*rows, *shapes(((64,), jnp.int32, by_device))], options),
        "fsdp": compiled(fsdp, [params, *rows], options, sharded),
        "fsdp_plain": compiled(fsdp_plain, [params, *rows], options),
        "data_dependent": compiled(data_dependent, [*square, *turns], options),
    }
    for name, text in programs.items():
        (HERE / f"{name}.hlo").write_text(trimmed(text))


if __name__ == "__main__":
    main()
