"""DiT's tensors: diffusers' `DiTTransformer2DModel` and the original key names."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..models import DiTConfig, position_embedding
from ._names import Rule, TensorTable, pieces_of

__all__ = ["diffusers_rules", "diffusers_table", "original_table", "position_table"]


def diffusers_table(config: DiTConfig, shapes: Any) -> TensorTable:
    """Tensors of a `DiTTransformer2DModel`; `shapes` are the parameters of a `DiT` of this config."""
    return _table(config, diffusers_rules(config), shapes, "pos_embed.proj.weight")


def diffusers_rules(config: DiTConfig) -> list[Rule]:
    """How each module is written by diffusers; every block has a copy of the embedders of time and label there."""
    block, here = "transformer_blocks.{}.", ("blocks",)
    copies = tuple(f"transformer_blocks.{i}.norm1.emb." for i in range(config.depth))
    return [
        Rule(path=("img_in",), names=("pos_embed.proj",), patch=(config.patch_size, config.channels)),
        *(
            Rule(
                path=("time_in", layer),
                names=tuple(name + "timestep_embedder." + linear for name in copies),
                copies=True,
            )
            for layer, linear in (("in_layer", "linear_1"), ("out_layer", "linear_2"))
        ),
        Rule(
            path=("label_in",),
            names=tuple(name + "class_embedder.embedding_table.weight" for name in copies),
            copies=True,
            is_table=True,
        ),
        Rule(path=(*here, "modulation"), names=(block + "norm1.linear",)),
        Rule(
            path=(*here, "qkv"),
            names=tuple(block + f"attn1.to_{part}" for part in "qkv"),
            widths=(config.width,) * 3,
        ),
        Rule(path=(*here, "proj"), names=(block + "attn1.to_out.0",)),
        Rule(path=(*here, "mlp", "in_layer"), names=(block + "ff.net.0.proj",)),
        Rule(path=(*here, "mlp", "out_layer"), names=(block + "ff.net.2",)),
        Rule(path=("final_layer", "modulation"), names=("proj_out_1",)),
        Rule(path=("final_layer", "linear"), names=("proj_out_2",)),
    ]


def original_table(config: DiTConfig, shapes: Any) -> TensorTable:
    """Tensors under the names of the published DiT code; `shapes` as in `diffusers_table`.

    The fixed table `pos_embed`, whose size depends on the size of the images, is not among them.
    """
    block, here = "blocks.{}.", ("blocks",)
    rules = [
        Rule(path=("img_in",), names=("x_embedder.proj",), patch=(config.patch_size, config.channels)),
        Rule(path=("time_in", "in_layer"), names=("t_embedder.mlp.0",)),
        Rule(path=("time_in", "out_layer"), names=("t_embedder.mlp.2",)),
        Rule(path=("label_in",), names=("y_embedder.embedding_table.weight",), is_table=True),
        Rule(path=(*here, "modulation"), names=(block + "adaLN_modulation.1",)),
        Rule(path=(*here, "qkv"), names=(block + "attn.qkv",)),
        Rule(path=(*here, "proj"), names=(block + "attn.proj",)),
        Rule(path=(*here, "mlp", "in_layer"), names=(block + "mlp.fc1",)),
        Rule(path=(*here, "mlp", "out_layer"), names=(block + "mlp.fc2",)),
        Rule(path=("final_layer", "modulation"), names=("final_layer.adaLN_modulation.1",)),
        Rule(path=("final_layer", "linear"), names=("final_layer.linear",)),
    ]
    return _table(config, rules, shapes, "x_embedder.proj.weight")


def _table(config: DiTConfig, rules: list[Rule], shapes: Any, patches: str) -> TensorTable:
    return TensorTable(tuple(pieces_of(rules, shapes)), {patches: (config.patch_size, config.channels)})


def position_table(config: DiTConfig, grid: int) -> np.ndarray:
    """The original's `pos_embed` for images of `grid` x `grid` patches: float32 of shape (1, grid^2, width)."""
    rows, columns = np.divmod(np.arange(grid * grid, dtype=np.int32), grid)
    positions = np.stack([np.zeros_like(rows), rows, columns], axis=1)
    return np.asarray(position_embedding(jnp.asarray(positions), config.width))[None]
