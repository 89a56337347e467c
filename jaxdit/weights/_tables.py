"""The layout of a checkpoint: which table of names it follows, told from its names or chosen for saving."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..encoders import (
    AutoencoderKL,
    AutoencoderKLConfig,
    ClipTextConfig,
    ClipTextEncoder,
    T5Config,
    T5Encoder,
)
from ..models import DiT, DiTConfig, MMDiT, MMDiTConfig
from . import _autoencoder, _dit, _flux, _text
from ._configs import ModelConfig
from ._files import TensorFiles, WeightsError
from ._names import Path, TensorTable, leaves_of

__all__ = [
    "abstract_params",
    "check_params",
    "table_for",
    "table_of_files",
    "tensor_shapes",
    "with_positions",
]

_MODELS: dict[type, Callable[..., nnx.Module]] = {
    MMDiTConfig: MMDiT,
    DiTConfig: DiT,
    T5Config: T5Encoder,
    ClipTextConfig: ClipTextEncoder,
    AutoencoderKLConfig: AutoencoderKL,
}
_TABLES: dict[type, Mapping[str, Callable[[Any, Any], TensorTable]]] = {
    MMDiTConfig: {"diffusers": _flux.diffusers_table, "original": _flux.original_table},
    DiTConfig: {"diffusers": _dit.diffusers_table, "original": _dit.original_table},
    T5Config: _text.T5_TABLES,
    ClipTextConfig: _text.CLIP_TABLES,
    AutoencoderKLConfig: _autoencoder.TABLES,
}
_POSITIONS = "pos_embed"
# The fixed table of positions, made in float64 there, is compared after rounding to 16 bits at worst.
_POSITION_TOLERANCE = 2**-8


def abstract_params(config: ModelConfig) -> dict[str, Any]:
    """Shapes of a model's parameters as nested dicts."""
    return jax.tree.map(lambda leaf: leaf, _abstract_params(config))


@lru_cache(maxsize=8)
def _abstract_params(config: ModelConfig) -> dict[str, Any]:
    module = nnx.eval_shape(lambda: _MODELS[type(config)](config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def table_for(config: ModelConfig, layout: str) -> TensorTable:
    """The tensors of a model in a layout: "diffusers", "original", or one that its kind of model has besides.

    Raises:
        WeightsError: for another layout.
    """
    tables = _TABLES[type(config)]
    if layout not in tables:
        raise WeightsError(f"layout must be one of {', '.join(tables)}; got layout={layout!r}.")
    return tables[layout](config, abstract_params(config))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors in diffusers' layout, of a text encoder's in transformers'."""
    layout = next(name for name in ("diffusers", "transformers") if name in _TABLES[type(config)])
    return dict(table_for(config, layout).shapes)


def table_of_files(config: ModelConfig, files: TensorFiles) -> TensorTable:
    """The tensors of a model in the layout of these files, checked against them.

    Raises:
        WeightsError: if the files hold another model, or not all of it; names and shapes that differ are listed.
    """
    tables = {layout: table_for(config, layout) for layout in _TABLES[type(config)]}
    layout = max(tables, key=lambda name: _likeness(tables[name], files))
    table = tables[layout]
    if isinstance(config, DiTConfig) and layout == "original" and _POSITIONS in files.tensors:
        table = with_positions(table, config, _grid(files))
    files.check(table.shapes, unread=table.unread)
    _check_constants(table, files)
    return table


def _likeness(table: TensorTable, files: TensorFiles) -> tuple[int, int]:
    """Names that a table and files share, and how many of these are of one shape."""
    shared = {name: shape for name, shape in table.shapes.items() if name in files.tensors}
    return len(shared), sum(files.tensors[name].shape == shape for name, shape in shared.items())


def with_positions(table: TensorTable, config: DiTConfig, grid: int) -> TensorTable:
    """The original DiT's table with its fixed embedding of `grid` x `grid` positions."""
    return replace(table, constants={_POSITIONS: _dit.position_table(config, grid)})


def _grid(files: TensorFiles) -> int:
    shape = files.tensors[_POSITIONS].shape
    return round(math.sqrt(shape[1])) if len(shape) == 3 else 1


def _check_constants(table: TensorTable, files: TensorFiles) -> None:
    for name, value in table.constants.items():
        found = np.concatenate([chunk for _, chunk in files.chunks(name, (0, value.shape[0]))])
        worst = float(np.abs(found.astype(np.float32) - value).max())
        if not worst <= _POSITION_TOLERANCE:
            raise WeightsError(
                f"{files.path}: {name} must be the fixed table that the model computes; it differs by up to"
                f" {worst:.3g}."
            )


def _leaf_shapes(params: Any) -> dict[Path, tuple[int, ...]]:
    """Shape of every parameter by path."""
    return {path: tuple(leaf.shape) for path, leaf in leaves_of(params)}


def check_params(params: Any, config: ModelConfig) -> None:
    """Refuse parameters that are not of a model of this config.

    Raises:
        WeightsError: naming the first that differs.
    """
    found, wanted = _leaf_shapes(params), _leaf_shapes(abstract_params(config))
    for path in sorted(found.keys() | wanted.keys(), key=str):
        if found.get(path) != wanted.get(path):
            raise WeightsError(
                f"{'.'.join(map(str, path))} of the parameters has shape {found.get(path)}, the model of the config"
                f" {wanted.get(path)}."
            )
