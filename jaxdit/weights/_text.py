"""Text encoders as transformers writes them: tensors and config.json of `T5EncoderModel` and `CLIPTextModel`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..encoders import ClipTextConfig, T5Config
from ._names import Rule, TensorTable, pieces_of

__all__ = ["CLIP_CLASS", "CLIP_DEFAULTS", "CLIP_TABLES", "T5_CLASS", "T5_DEFAULTS", "T5_TABLES", "clip", "t5"]

T5_CLASS, CLIP_CLASS = "T5EncoderModel", "CLIPTextModel"
# Settings that the computation depends on, and what transformers takes where config.json says nothing.
T5_DEFAULTS = {
    "vocab_size": 32_128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CLIP_DEFAULTS = {
    "vocab_size": 49_408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49_407,
}


def t5(values: Mapping[str, Any], compute_dtype: str) -> T5Config:
    """The config of these settings."""
    return T5Config(
        vocab_size=values["vocab_size"],
        width=values["d_model"],
        head_dim=values["d_kv"],
        num_heads=values["num_heads"],
        mlp_width=values["d_ff"],
        depth=values["num_layers"],
        num_buckets=values["relative_attention_num_buckets"],
        max_distance=values["relative_attention_max_distance"],
        activation=values["feed_forward_proj"],
        norm_epsilon=values["layer_norm_epsilon"],
        pad_id=values["pad_token_id"],
        eos_id=values["eos_token_id"],
        compute_dtype=compute_dtype,
    )


def clip(values: Mapping[str, Any], compute_dtype: str) -> ClipTextConfig:
    """The config of these settings."""
    return ClipTextConfig(
        vocab_size=values["vocab_size"],
        width=values["hidden_size"],
        num_heads=values["num_attention_heads"],
        mlp_width=values["intermediate_size"],
        depth=values["num_hidden_layers"],
        max_length=values["max_position_embeddings"],
        activation=values["hidden_act"],
        norm_epsilon=values["layer_norm_eps"],
        eos_id=values["eos_token_id"],
        compute_dtype=compute_dtype,
    )


_SHARED, _EMBED = "shared.weight", "encoder.embed_tokens.weight"


def _t5_table(config: T5Config, shapes: Any, *, embeddings: tuple[str, ...]) -> TensorTable:
    """Tensors of a `T5EncoderModel`; its one table of tokens has two names, of which files have either or both."""
    there, inner = "encoder.block.{}.layer.", config.num_heads * config.head_dim
    attention, mlp = there + "0.SelfAttention.", there + "1.DenseReluDense."
    gated = config.activation == "gated-gelu"
    inputs = ("wi_0", "wi_1") if gated else ("wi",)
    rules = [
        Rule(path=("embedding",), names=embeddings, copies=len(embeddings) > 1, is_table=True),
        Rule(
            path=("relative_bias",),
            names=("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
            is_table=True,
        ),
        Rule(
            path=("blocks", "qkv"),
            names=(attention + "q", attention + "k", attention + "v"),
            widths=(inner,) * 3,
        ),
        Rule(path=("blocks", "proj"), names=(attention + "o",)),
        Rule(path=("blocks", "attention_norm", "scale"), names=(there + "0.layer_norm.weight",)),
        Rule(
            path=("blocks", "mlp_in"),
            names=tuple(mlp + name for name in inputs),
            widths=(config.mlp_width,) * len(inputs),
        ),
        Rule(path=("blocks", "mlp_out"), names=(mlp + "wo",)),
        Rule(path=("blocks", "mlp_norm", "scale"), names=(there + "1.layer_norm.weight",)),
        Rule(path=("norm", "scale"), names=("encoder.final_layer_norm.weight",)),
    ]
    return TensorTable(tuple(pieces_of(rules, shapes)))


def _clip_table(config: ClipTextConfig, shapes: Any, *, prefix: str) -> TensorTable:
    """Tensors of a `CLIPTextModel`; positions counted from 0 were a tensor, too, in older files."""
    there, tables = prefix + "encoder.layers.{}.", prefix + "embeddings."
    attention = there + "self_attn."
    rules = [
        Rule(path=("embedding",), names=(tables + "token_embedding.weight",), is_table=True),
        Rule(path=("positions",), names=(tables + "position_embedding.weight",), is_table=True),
        Rule(
            path=("blocks", "qkv"),
            names=tuple(attention + name for name in ("q_proj", "k_proj", "v_proj")),
            widths=(config.width,) * 3,
        ),
        Rule(path=("blocks", "proj"), names=(attention + "out_proj",)),
        *_norm_rules(("blocks", "attention_norm"), there + "layer_norm1"),
        Rule(path=("blocks", "mlp_in"), names=(there + "mlp.fc1",)),
        Rule(path=("blocks", "mlp_out"), names=(there + "mlp.fc2",)),
        *_norm_rules(("blocks", "mlp_norm"), there + "layer_norm2"),
        *_norm_rules(("norm",), prefix + "final_layer_norm"),
    ]
    return TensorTable(tuple(pieces_of(rules, shapes)), unread=frozenset({tables + "position_ids"}))


def _norm_rules(path: tuple[str, ...], name: str) -> list[Rule]:
    return [
        Rule(path=(*path, "scale"), names=(name + ".weight",)),
        Rule(path=(*path, "bias"), names=(name + ".bias",)),
    ]


# Variants of the one layout; the first is the one to name.
T5_TABLES: dict[str, Callable[[Any, Any], TensorTable]] = {
    "transformers": partial(_t5_table, embeddings=(_SHARED,)),
    "transformers, embed_tokens": partial(_t5_table, embeddings=(_EMBED,)),
    "transformers, both": partial(_t5_table, embeddings=(_SHARED, _EMBED)),
}
CLIP_TABLES: dict[str, Callable[[Any, Any], TensorTable]] = {
    "transformers": partial(_clip_table, prefix="text_model."),
    # As transformers 5 saves it.
    "transformers 5": partial(_clip_table, prefix=""),
}
