"""Writing a model's parameters as a checkpoint that others load."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..encoders import AutoencoderKLConfig
from ..models import DiTConfig, MMDiTConfig
from ._configs import CONFIG_NAME, ModelConfig, SavedConfig, check_sample_size, config_json
from ._files import WEIGHTS_NAME, WeightsError
from ._names import Path, Piece, TensorTable, leaf_at
from ._tables import check_params, table_for, with_positions
from ._write import shared_target, write_files

__all__ = ["LayersOnHost", "SaveFormat", "check_finite", "named_tensors", "save_params"]

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_ORIGINAL_NAMES = {
    MMDiTConfig: "flux1.safetensors",
    DiTConfig: "dit.safetensors",
    AutoencoderKLConfig: "ae.safetensors",
}


@dataclass(frozen=True, slots=True)
class SaveFormat:
    """How a checkpoint is written.

    Attributes:
        layout: "diffusers" or "original".
        dtype: "float32", "bfloat16" or "float16", to which values are rounded.
        sample_size: edge of the latent images a DiT is for, in latent pixels; FLUX.1 needs none.
        max_file_bytes: tensors of a file; more of them are divided over several files with an index. This much is held
            in host memory.

    Raises:
        WeightsError: for another dtype, or no bytes at all.
    """

    layout: str = "diffusers"
    dtype: str = "float32"
    sample_size: int = 32
    max_file_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise WeightsError(f"dtype must be one of {', '.join(_DTYPES)}; got dtype={self.dtype!r}.")
        if self.max_file_bytes < 1:
            raise WeightsError(
                f"max_file_bytes must be at least 1; got max_file_bytes={self.max_file_bytes}."
            )


_DIFFUSERS = SaveFormat()


def save_params(
    folder: str | os.PathLike[str],
    params: Any,
    config: SavedConfig,
    form: SaveFormat = _DIFFUSERS,
) -> None:
    """Save parameters in safetensors, in diffusers' layout (with config.json) or under the original names.

    Global arrays; with several processes all call it and the first one writes. The folder appears whole or not at all.
    What was loaded in a dtype and is saved in the same one is equal to the bit.

    Args:
        folder: new, or empty.
        params: of a `MMDiT`, `DiT` or `AutoencoderKL`, as nested dicts.
        config: of the model.
        form: layout, dtype and sizes; float32 in diffusers' layout by default.

    Raises:
        WeightsError: for a folder that is not empty, parameters of another model, a model that diffusers cannot
            express, or values that are not finite or that the dtype cannot hold; with several processes, on the others
            if the first fails.
        OSError: on the process that writes, if the system refuses.
    """
    if type(config) not in _ORIGINAL_NAMES:
        raise WeightsError(
            f"save_params: text encoders, which are frozen, are not written; got a {type(config).__name__}. Take the"
            " files they came in."
        )
    folder = shared_target(folder)
    table, dtype = table_for(config, form.layout), _DTYPES[form.dtype]
    others = {}
    if form.layout == "diffusers":
        others[CONFIG_NAME] = config_json(config, sample_size=form.sample_size)
    elif isinstance(config, DiTConfig):
        check_sample_size(form.sample_size, config)
        table = with_positions(table, config, form.sample_size // config.patch_size)
    check_params(params, config)
    write_files(
        folder,
        WEIGHTS_NAME if form.layout == "diffusers" else _ORIGINAL_NAMES[type(config)],
        {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, shape in table.shapes.items()},
        _fetcher(table, params, dtype),
        max_file_bytes=form.max_file_bytes,
        others=others,
    )


def _fetcher(table: TensorTable, params: Any, dtype: Any) -> Callable[[str], np.ndarray]:
    pieces = table.by_name()
    layers = LayersOnHost(params)

    def fetch(name: str) -> np.ndarray:
        if name in table.constants:
            return table.constants[name].astype(dtype)
        found = np.empty(pieces[name][0].shape, dtype)
        for piece in pieces[name]:
            found[slice(*piece.rows)] = _piece(piece, layers, table.patches.get(name), dtype)
        return found

    return fetch


def named_tensors(params: Any, config: ModelConfig, layout: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 tensor) of all tensors of a checkpoint, without saving it."""
    table = table_for(config, layout)
    fetch = _fetcher(table, params, np.float32)
    return ((name, fetch(name)) for name in table.shapes)


class LayersOnHost:
    """Layers of parameters on the host; the last one is kept, since several tensors may be parts of it."""

    def __init__(self, params: Any) -> None:
        self._params = params
        self._key: Any = None
        self._value: Any = None

    def get(self, path: Path, layer: int | None) -> np.ndarray:
        """One layer of a parameter (or all of one without layers); every process takes part and gets it."""
        if self._key != (path, layer):
            self._key, self._value = (path, layer), None
            leaf = leaf_at(self._params, path)
            if layer is not None:
                leaf = _one_layer(leaf, layer)
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                leaf = _replicated(leaf)
            self._value = np.asarray(leaf)
        return self._value


_one_layer = jax.jit(partial(lax.dynamic_index_in_dim, keepdims=False))


def _replicated(leaf: jax.Array) -> Any:
    assert isinstance(leaf.sharding, NamedSharding)
    everywhere = NamedSharding(leaf.sharding.mesh, P())
    return jax.jit(lambda x: x, out_shardings=everywhere)(leaf).addressable_data(0)


def check_finite(name: str, values: np.ndarray) -> None:
    """Refuse what could not be loaded again.

    Raises:
        WeightsError: naming the tensor.
    """
    if not np.isfinite(values).all():
        raise WeightsError(
            f"{name} has values that are not finite, which no reader takes. Save a step before they were."
        )


def _piece(piece: Piece, layers: LayersOnHost, patch: tuple[int, int] | None, dtype: Any) -> np.ndarray:
    values = layers.get(piece.path, piece.layer)
    columns = slice(piece.start, piece.start + piece.rows[1] - piece.rows[0])
    if piece.is_table or values.ndim == 1:
        values = values[columns]
    else:  # outputs first; a convolution (p, p, c, outputs) becomes (outputs, c, p, p)
        values = np.moveaxis(values[..., columns], (-1, -2), (0, 1))
    with np.errstate(over="ignore"):  # said below
        rounded = values.astype(dtype)
    check_finite(piece.name, values)
    if not np.isfinite(rounded).all():
        raise WeightsError(
            f"{piece.name} has values that {np.dtype(dtype).name} cannot hold. Save as float32 or bfloat16."
        )
    if patch is not None and rounded.ndim == 2:
        edge, channels = patch
        rounded = rounded.reshape(-1, edge, edge, channels).transpose(0, 3, 1, 2)
    return rounded
