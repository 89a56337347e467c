"""The image autoencoder's tensors and config.json: diffusers' `AutoencoderKL`, its older names, and the originals'.

Before version 0.17 diffusers called the attention's projections query, key, value and proj_attn. The original code
(`ae.safetensors` of FLUX.1) has other names throughout, numbers the decoder's resolutions from the finest, and these
projections are 1 x 1 convolutions there, a shape that some converted files keep.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ..encoders import AutoencoderKLConfig, decoder_chain, encoder_chain
from ._names import Path, Rule, TensorTable, leaves_of, pieces_of

__all__ = ["CLASS", "DEFAULTS", "FIXED", "IGNORED", "TABLES", "config_of", "values_of"]

CLASS = "AutoencoderKL"
DEFAULTS: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D"],
    "block_out_channels": [64],
    "layers_per_block": 1,
    "act_fn": "silu",
    "latent_channels": 4,
    "norm_num_groups": 32,
    "scaling_factor": 0.18215,
    "shift_factor": 0.0,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
}
FIXED = {"act_fn": "silu"}
# Of tiles and of 16-bit floats: nothing here depends on them.
IGNORED = ("sample_size", "force_upcast")
# Settings that are called the same here.
_SAME = tuple(
    name
    for name in DEFAULTS
    if name not in ("act_fn", "down_block_types", "up_block_types", "block_out_channels")
)


def config_of(values: Mapping[str, Any], compute_dtype: str) -> AutoencoderKLConfig:
    """The config of config.json's settings.

    Raises:
        ValueError: for blocks of another kind, or sizes that do not fit together.
    """
    channels = tuple(values["block_out_channels"])
    for name, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        if values[name] != [kind] * len(channels):
            raise ValueError(
                f"{name} must be {kind} for each of block_out_channels={channels}; got {values[name]!r:.200}."
            )
    same = {name: values[name] for name in _SAME}
    return AutoencoderKLConfig(block_out_channels=channels, compute_dtype=compute_dtype, **same)


def values_of(config: AutoencoderKLConfig) -> dict[str, Any]:
    """Settings of config.json with which diffusers makes this model."""
    count = len(config.block_out_channels)
    return {
        "_class_name": CLASS,
        "act_fn": "silu",
        "block_out_channels": list(config.block_out_channels),
        "down_block_types": ["DownEncoderBlock2D"] * count,
        "up_block_types": ["UpDecoderBlock2D"] * count,
        **{name: getattr(config, name) for name in _SAME},
    }


# Of the attention: modules here, and the one or more that they are in diffusers.
_PROJECTIONS = {"to_qkv": ("to_q", "to_k", "to_v"), "to_out": ("to_out.0",)}


def _table(
    rename: Callable[[AutoencoderKLConfig], Mapping[str, str]],
    config: AutoencoderKLConfig,
    shapes: Any,
    *,
    convolutions: bool,
) -> TensorTable:
    """Tensors under diffusers' names with some parts replaced; the attention's weights as they are or 1 x 1 wide."""
    replaced = rename(config)
    rules = [
        rule
        for part, chain in (("encoder", encoder_chain(config)), ("decoder", decoder_chain(config)))
        for place, spec in enumerate(chain)
        for rule in _layer_rules((part, place), shapes[part][place], spec.name, replaced, convolutions)
    ]
    patches = {name: rule.patch for rule in rules if rule.patch is not None for name in rule.names}
    return TensorTable(tuple(pieces_of(rules, shapes)), patches)


def _layer_rules(
    path: Path, params: Any, layer: str, replaced: Mapping[str, str], convolutions: bool
) -> Iterator[Rule]:
    """One rule for each parameter of a layer; modules are called as in diffusers, but for the attention's."""
    for (*modules, kind), leaf in leaves_of(params):
        module, suffix = ".".join(modules), "bias" if kind == "bias" else "weight"
        names = tuple(
            # A layer that is one module has no name beside the layer's.
            _replaced(".".join(filter(None, (layer, name, suffix))), replaced)
            for name in _PROJECTIONS.get(module, (module,))
        )
        is_linear = len(leaf.shape) == 2
        yield Rule(
            path=(*path, *modules, kind),
            names=names,
            widths=(leaf.shape[-1] // len(names),) * len(names),
            patch=(1, leaf.shape[0]) if is_linear and convolutions else None,
        )


def _replaced(name: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        name = name.replace(old, new)
    return name


def _original_names(config: AutoencoderKLConfig) -> dict[str, str]:
    finest = len(config.block_out_channels) - 1
    return {
        "mid_block.resnets.0": "mid.block_1",
        "mid_block.resnets.1": "mid.block_2",
        "mid_block.attentions.0": "mid.attn_1",
        **{f".up_blocks.{i}.": f".up.{finest - i}." for i in range(finest + 1)},
        ".down_blocks.": ".down.",
        ".resnets.": ".block.",
        ".upsamplers.0.": ".upsample.",
        ".downsamplers.0.": ".downsample.",
        ".conv_shortcut.": ".nin_shortcut.",
        ".conv_norm_out.": ".norm_out.",
        ".group_norm.": ".norm.",
        **{f".to_{part}.": f".{part}." for part in "qkv"},
        ".to_out.0.": ".proj_out.",
    }


_OLD_NAMES = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}

TABLES: Mapping[str, Callable[[Any, Any], TensorTable]] = {
    "diffusers": partial(_table, lambda _: {}, convolutions=False),
    "original": partial(_table, _original_names, convolutions=True),
    "diffusers_old": partial(_table, lambda _: _OLD_NAMES, convolutions=False),
    "diffusers_old_convolutions": partial(_table, lambda _: _OLD_NAMES, convolutions=True),
}
