"""Saves or loads a checkpoint of 2 GB and prints what the loading took beyond the loaded shards, in bytes.

python -m tests.jaxdit.weights_memory_worker save|load FOLDER NUM_DEVICES
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxdit.models import MMDiTConfig
from jaxdit.training import param_shardings, shard_axes
from jaxdit.weights import SaveFormat, abstract_params, load_params, save_params
from parallel import data_mesh

CONFIG = MMDiTConfig(
    in_channels=64,
    text_channels=256,
    pooled_channels=256,
    width=2048,
    num_heads=16,
    num_double_blocks=2,
    num_single_blocks=3,
    axes_dim=(16, 56, 56),
)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _save(folder: str) -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(1 << 16).astype(np.float32)
    params = jax.tree.map(lambda leaf: np.resize(noise, leaf.shape), abstract_params(CONFIG))
    save_params(folder, params, CONFIG, SaveFormat(layout="original", max_file_bytes=700_000_000))


def _load(folder: str, num_devices: int) -> None:
    mesh = data_mesh(jax.devices()[:num_devices], shards=num_devices)
    params = abstract_params(CONFIG)
    shardings = param_shardings(shard_axes(params, num_devices), mesh)
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[0]))  # the backend is up
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    loaded = jax.block_until_ready(load_params(folder, CONFIG, shardings=shardings))
    shards = [shard.data.nbytes for leaf in jax.tree.leaves(loaded) for shard in leaf.addressable_shards]
    largest = 4 * 2048 * (3 * 2048 + 4 * 2048)
    extra = _status("VmHWM") - before - sum(shards)
    print(json.dumps({"shards": sum(shards), "largest": largest, "extra": extra}))  # noqa: T201


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))
    if sys.argv[1] == "save":
        _save(sys.argv[2])
    else:
        _load(sys.argv[2], int(sys.argv[3]))
