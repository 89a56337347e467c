"""Reading a checkpoint straight into the shards of a mesh."""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._configs import CONFIG_NAME, ModelConfig, check_config
from ._files import TensorFiles, WeightsError, open_files
from ._names import Piece, TensorTable, leaf_at, leaves_of, nested
from ._tables import abstract_params, table_of_files

__all__ = ["check_checkpoint", "load_params"]


def check_checkpoint(path: str | os.PathLike[str], config: ModelConfig) -> None:
    """Refuse what `load_params` would, without reading the tensors; and a config.json beside them of another model.

    Raises:
        WeightsError: with names, and shapes or settings that differ.
    """
    _checked(path, config)


def _checked(path: str | os.PathLike[str], config: ModelConfig) -> tuple[TensorFiles, TensorTable]:
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if (folder / CONFIG_NAME).is_file():
        check_config(folder, config)
    files = open_files(path)
    return files, table_of_files(config, files)


def load_params(
    path: str | os.PathLike[str],
    config: ModelConfig,
    *,
    shardings: Any = None,
    dtype: Any = jnp.float32,
) -> dict[str, Any]:
    """Load a checkpoint of FLUX.1 or DiT, an autoencoder or a text encoder, as a model's parameters.

    Global arrays. Each process reads every tensor, at most 8 MiB at a time, and keeps what its devices hold, so host
    memory beyond the shards stays below a few such pieces. Nothing is loaded before names, shapes and dtypes of all
    tensors were checked.

    Args:
        path: a safetensors file, an index of several, or the folder that holds them.
        config: of the model; for a folder with a config.json `read_config` gives it.
        shardings: shardings like the parameters (nested dicts); by default all on the first device.
        dtype: of the parameters.

    Returns:
        The parameters as nested dicts, as `nnx.to_pure_dict(nnx.state(model, nnx.Param))` has them.

    Raises:
        WeightsError: for a file that is no complete checkpoint of this model, or lies beside a config.json of another
            one; what differs is listed. And for values that are not finite, or that `dtype` cannot hold.
    """
    files, table = _checked(path, config)
    shapes = abstract_params(config)
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one, shapes)
    targets = {
        leaf_path: _Target(leaf.shape, leaf_at(shardings, leaf_path), dtype)
        for leaf_path, leaf in leaves_of(shapes)
    }
    _check_copies(table, files)
    for piece in table.pieces:
        if not piece.is_copy:
            _read(piece, files, targets[piece.path])
    return nested({leaf_path: target.array() for leaf_path, target in targets.items()})


def _check_copies(table: TensorTable, files: TensorFiles) -> None:
    """Refuse copies that differ: the model has one array in their place."""
    first = {piece.path: piece for piece in table.pieces if not piece.is_copy}
    for piece in table.pieces:
        if not piece.is_copy:
            continue
        original = first[piece.path]
        same = files.tensors[piece.name].dtype == files.tensors[original.name].dtype
        pairs = zip(
            files.chunks(piece.name, piece.rows), files.chunks(original.name, piece.rows), strict=False
        )
        if not same or not all(np.array_equal(ours, theirs) for (_, ours), (_, theirs) in pairs):
            raise WeightsError(
                f"{files.path}: {piece.name} must equal {original.name}, since the model has one array for both."
            )


# A parameter whose shards here are no larger is put together on the host; a larger one on its devices.
_HOST_BYTES = 32 << 20


class _Target:
    """A parameter being filled: one array a device, updated in place; no second copy of a large one is ever made."""

    def __init__(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: Any) -> None:
        self.shape, self.sharding, self.dtype = shape, sharding, jnp.dtype(dtype)
        self.boxes = {
            device: [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True)]
            for device, index in sharding.addressable_devices_indices_map(shape).items()
        }
        shard = sharding.shard_shape(shape)
        size = math.prod(shard) * jnp.dtype(dtype).itemsize * len(self.boxes)
        self.shards: dict[Any, Any] = {
            device: np.zeros(shard, dtype) if size <= _HOST_BYTES else jnp.zeros(shard, dtype, device=device)
            for device in self.boxes
        }

    def write(self, box: list[tuple[int, int]], block: np.ndarray, *, transposed: bool) -> None:
        """Write a part of the parameter.

        Args:
            box: half-open range of the part on every axis.
            block: its values, with the leading axes of size 1 left out; one of two axes may be transposed.
            transposed: whether it is.
        """
        values = block.T if transposed else block
        values = values.reshape([stop - start for start, stop in box])
        for device, shard_box in self.boxes.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, shard_box, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            part = values[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))]
            start = [a - c for (a, _), (c, _) in zip(common, shard_box, strict=True)]
            shard = self.shards[device]
            if isinstance(shard, np.ndarray):
                shard[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
                continue
            part = part.reshape(part.shape[-block.ndim :])
            sent = jax.device_put(np.ascontiguousarray(part.T if transposed else part), device)
            self.shards[device] = _update(shard, sent, np.array(start, np.int32), transposed=transposed)
        # What is on its way is held on the host: no more than one block of it.
        jax.block_until_ready(list(self.shards.values()))

    def array(self) -> jax.Array:
        shards = [jax.device_put(shard, device) for device, shard in self.shards.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)


@partial(jax.jit, donate_argnums=0, static_argnames="transposed")
def _update(shard: jax.Array, block: jax.Array, start: jax.Array, *, transposed: bool) -> jax.Array:
    values = (block.T if transposed else block).astype(shard.dtype)
    values = values.reshape((1,) * (shard.ndim - values.ndim) + values.shape)
    return lax.dynamic_update_slice(shard, values, [start[i] for i in range(shard.ndim)])


def _check_range(name: str, block: np.ndarray, files: TensorFiles, dtype: Any) -> None:
    """Refuse finite values that the dtype would make infinite; most dtypes hold all of each other's."""
    if jnp.finfo(block.dtype).max <= jnp.finfo(dtype).max:
        return
    with np.errstate(over="ignore"):
        fits = np.isfinite(block.astype(dtype)).all()
    if not fits:
        raise WeightsError(
            f"{files.path}: {name} has values that {dtype.name} cannot hold. Load as float32 or bfloat16."
        )


def _read(piece: Piece, files: TensorFiles, target: _Target) -> None:
    """Copy one piece of a tensor to its place."""
    layer = [] if piece.layer is None else [(piece.layer, piece.layer + 1)]
    for row, block in files.chunks(piece.name, piece.rows):
        _check_range(piece.name, block, files, target.dtype)
        start = piece.start + row - piece.rows[0]
        rows = (start, start + block.shape[0])
        if block.ndim == 4 and len(target.shape) == 4:  # a convolution (rows, c, p, p); here (p, p, c, rows)
            box = [*((0, size) for size in target.shape[:3]), rows]
            target.write(box, block.transpose(2, 3, 1, 0), transposed=False)
            continue
        if block.ndim == 4:  # one that is a linear layer on patches (p, p, c) here
            block = block.transpose(0, 2, 3, 1).reshape(block.shape[0], -1)
        if block.ndim == 1 or piece.is_table:
            box = [*layer, rows, *((0, size) for size in block.shape[1:])]
            target.write(box, block, transposed=False)
        else:
            target.write([*layer, (0, block.shape[1]), rows], block, transposed=True)
