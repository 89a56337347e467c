"""A FLUX.1 pipeline of random weights, small enough for a CPU, in diffusers' layout: for load tests and trials.

Its parts are those of FLUX.1-dev in kind, with a few channels: transformer, T5, CLIP, autoencoder (8 x 8 pixels to a
latent pixel), tokenizers that know the lower-case words of `WORDS`, scheduler. What it paints is noise.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from jaxdit.weights import read_config, tensor_shapes

# fmt: off
WORDS = (
    "a", "an", "the", "cat", "dog", "house", "tree", "snow", "lake", "red", "blue", "old", "small", "big", "in", "on",
    "by", "under", "two", "seven",
)
# fmt: on
_LATENT_CHANNELS = 16
_CLIP_TOKENS = 77
_TEXT_WIDTH = 24
_T5_SPECIAL = ("<pad>", "</s>", "<unk>")
_CLIP_SPECIAL = ("<|startoftext|>", "<|endoftext|>")

_TRANSFORMER = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 4 * _LATENT_CHANNELS,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": _TEXT_WIDTH,
    "pooled_projection_dim": _TEXT_WIDTH,
    "axes_dims_rope": [4, 6, 6],
    "guidance_embeds": True,
}
_T5 = {
    "architectures": ["T5EncoderModel"],
    "vocab_size": 128,
    "d_model": _TEXT_WIDTH,
    "d_kv": 8,
    "d_ff": 36,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}
_CLIP = {
    "architectures": ["CLIPTextModel"],
    "vocab_size": 128,
    "hidden_size": _TEXT_WIDTH,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": _CLIP_TOKENS,
    "eos_token_id": 1,
}
_VAE = {
    "_class_name": "AutoencoderKL",
    "latent_channels": _LATENT_CHANNELS,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "block_out_channels": [8, 8, 16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": True,
    "shift": 3.0,
}
_INDEX = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
# Folder, config.json, and the name of the file of tensors, as diffusers and transformers have them.
_MODELS = (
    ("transformer", _TRANSFORMER, "diffusion_pytorch_model.safetensors"),
    ("text_encoder", _CLIP, "model.safetensors"),
    ("text_encoder_2", _T5, "model.safetensors"),
    ("vae", _VAE, "diffusion_pytorch_model.safetensors"),
)


def write_tiny_pipeline(folder: Path, *, seed: int = 0) -> None:
    """Write the pipeline.

    Args:
        folder: new.
        seed: of the weights.

    Raises:
        OSError: if the system refuses.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for name, config, file in _MODELS:
        (folder / name).mkdir()
        _write(folder / name / "config.json", config)
        shapes = tensor_shapes(read_config(folder / name))
        save_file({key: _draw(rng, key, shape) for key, shape in shapes.items()}, folder / name / file)
    _save_tokenizer(folder / "tokenizer", _clip_tokenizer(), "<|endoftext|>")
    _save_tokenizer(folder / "tokenizer_2", _t5_tokenizer(), "<pad>")
    (folder / "scheduler").mkdir()
    _write(folder / "scheduler" / "scheduler_config.json", _SCHEDULER)
    _write(folder / "model_index.json", _INDEX)


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep the size of what they multiply; scales of norms around 1."""
    values = rng.standard_normal(shape)
    if len(shape) == 1:
        return (float("norm" in name and name.endswith("weight")) + 0.1 * values).astype(np.float32)
    return (0.7 * values / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def _t5_tokenizer() -> Tokenizer:
    """Words, those that are not known as one token, and the end token."""
    made = Tokenizer(models.WordLevel(_vocabulary(_T5_SPECIAL), unk_token="<unk>"))
    made.add_special_tokens(list(_T5_SPECIAL))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return made


def _clip_tokenizer() -> Tokenizer:
    """The same between a start and an end token."""
    made = Tokenizer(models.WordLevel(_vocabulary(_CLIP_SPECIAL), unk_token=_CLIP_SPECIAL[1]))
    made.add_special_tokens(list(_CLIP_SPECIAL))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    start, end = _CLIP_SPECIAL
    made.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 1)]
    )
    return made


def _vocabulary(special: tuple[str, ...]) -> dict[str, int]:
    return {word: number for number, word in enumerate((*special, *WORDS))}


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, pad: str) -> None:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"pad_token": pad})


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
