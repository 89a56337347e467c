"""FLUX.1's tensors: diffusers' `FluxTransformer2DModel` and the original key names."""

from typing import Any

from ..models import MMDiTConfig
from ._names import Rule, TensorTable, pieces_of

__all__ = ["diffusers_rules", "diffusers_table", "original_table"]


def _present(rules: list[Rule], shapes: Any) -> list[Rule]:
    """Rules of modules the model has: guidance and both stacks of blocks are optional."""
    return [rule for rule in rules if shapes.get(rule.path[0]) is not None]


def diffusers_table(config: MMDiTConfig, shapes: Any) -> TensorTable:
    """Tensors of a `FluxTransformer2DModel`; `shapes` are the parameters of an `MMDiT` of this config."""
    return TensorTable(tuple(pieces_of(_present(diffusers_rules(config), shapes), shapes)))


def diffusers_rules(config: MMDiTConfig) -> list[Rule]:
    """How each module is written by diffusers; also of guidance and stacks that the model may not have."""
    embed = "time_text_embed."
    return [
        Rule(path=("img_in",), names=("x_embedder",)),
        Rule(path=("txt_in",), names=("context_embedder",)),
        *_embed_mlp("time_in", embed + "timestep_embedder", ".linear_1", ".linear_2"),
        *_embed_mlp("guidance_in", embed + "guidance_embedder", ".linear_1", ".linear_2"),
        *_embed_mlp("vector_in", embed + "text_embedder", ".linear_1", ".linear_2"),
        *_diffusers_stream(config, "img"),
        *_diffusers_stream(config, "txt"),
        *_diffusers_single(config),
        # (scale, shift) there, (shift, scale) here.
        Rule(path=("final_layer", "modulation"), names=("norm_out.linear",), swapped=True),
        Rule(path=("final_layer", "linear"), names=("proj_out",)),
    ]


def _embed_mlp(path: str, name: str, first: str, second: str) -> list[Rule]:
    return [
        Rule(path=(path, "in_layer"), names=(name + first,)),
        Rule(path=(path, "out_layer"), names=(name + second,)),
    ]


# Names of the two streams' parts inside diffusers' double-stream block.
_DIFFUSERS_STREAM = {
    "img": {
        "modulation": "norm1.linear",
        "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "query_norm": "attn.norm_q",
        "key_norm": "attn.norm_k",
        "proj": "attn.to_out.0",
        "mlp": "ff",
    },
    "txt": {
        "modulation": "norm1_context.linear",
        "qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "query_norm": "attn.norm_added_q",
        "key_norm": "attn.norm_added_k",
        "proj": "attn.to_add_out",
        "mlp": "ff_context",
    },
}


def _diffusers_stream(config: MMDiTConfig, stream: str) -> list[Rule]:
    names: dict[str, Any] = _DIFFUSERS_STREAM[stream]
    here, there = ("double_blocks", stream), "transformer_blocks.{}."
    return [
        Rule(path=(*here, "modulation"), names=(there + names["modulation"],)),
        Rule(
            path=(*here, "qkv"),
            names=tuple(there + name for name in names["qkv"]),
            widths=(config.width,) * 3,
        ),
        Rule(path=(*here, "query_norm", "scale"), names=(there + names["query_norm"] + ".weight",)),
        Rule(path=(*here, "key_norm", "scale"), names=(there + names["key_norm"] + ".weight",)),
        Rule(path=(*here, "proj"), names=(there + names["proj"],)),
        Rule(path=(*here, "mlp", "in_layer"), names=(there + names["mlp"] + ".net.0.proj",)),
        Rule(path=(*here, "mlp", "out_layer"), names=(there + names["mlp"] + ".net.2",)),
    ]


def _diffusers_single(config: MMDiTConfig) -> list[Rule]:
    here, there = ("single_blocks",), "single_transformer_blocks.{}."
    parts = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    return [
        Rule(path=(*here, "modulation"), names=(there + "norm.linear",)),
        Rule(
            path=(*here, "linear1"),
            names=tuple(there + name for name in parts),
            widths=(*(config.width,) * 3, config.mlp_width),
        ),
        Rule(path=(*here, "query_norm", "scale"), names=(there + "attn.norm_q.weight",)),
        Rule(path=(*here, "key_norm", "scale"), names=(there + "attn.norm_k.weight",)),
        Rule(path=(*here, "linear2"), names=(there + "proj_out",)),
    ]


def original_table(config: MMDiTConfig, shapes: Any) -> TensorTable:
    """Tensors under the names of the published FLUX.1 files; `shapes` as in `diffusers_table`."""
    single, here = "single_blocks.{}.", ("single_blocks",)
    rules = [
        Rule(path=("img_in",), names=("img_in",)),
        Rule(path=("txt_in",), names=("txt_in",)),
        *_embed_mlp("time_in", "time_in", ".in_layer", ".out_layer"),
        *_embed_mlp("guidance_in", "guidance_in", ".in_layer", ".out_layer"),
        *_embed_mlp("vector_in", "vector_in", ".in_layer", ".out_layer"),
        *_original_stream("img"),
        *_original_stream("txt"),
        Rule(path=(*here, "modulation"), names=(single + "modulation.lin",)),
        Rule(path=(*here, "linear1"), names=(single + "linear1",)),
        Rule(path=(*here, "query_norm", "scale"), names=(single + "norm.query_norm.scale",)),
        Rule(path=(*here, "key_norm", "scale"), names=(single + "norm.key_norm.scale",)),
        Rule(path=(*here, "linear2"), names=(single + "linear2",)),
        Rule(path=("final_layer", "modulation"), names=("final_layer.adaLN_modulation.1",)),
        Rule(path=("final_layer", "linear"), names=("final_layer.linear",)),
    ]
    return TensorTable(tuple(pieces_of(_present(rules, shapes), shapes)))


def _original_stream(stream: str) -> list[Rule]:
    here, there = ("double_blocks", stream), f"double_blocks.{{}}.{stream}_"
    return [
        Rule(path=(*here, "modulation"), names=(there + "mod.lin",)),
        Rule(path=(*here, "qkv"), names=(there + "attn.qkv",)),
        Rule(path=(*here, "query_norm", "scale"), names=(there + "attn.norm.query_norm.scale",)),
        Rule(path=(*here, "key_norm", "scale"), names=(there + "attn.norm.key_norm.scale",)),
        Rule(path=(*here, "proj"), names=(there + "attn.proj",)),
        Rule(path=(*here, "mlp", "in_layer"), names=(there + "mlp.0",)),
        Rule(path=(*here, "mlp", "out_layer"), names=(there + "mlp.2",)),
    ]
