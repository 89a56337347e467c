"""Whole pipelines with random weights, and what they are asked for, made from seeds; no torch here."""

import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.autoencoder import AutoencoderCase, write_autoencoder
from tests.parity.cases import Case
from tests.parity.ours import write_checkpoint
from tests.parity.text_cases import TextCase, write_encoder

__all__ = [
    "PIPELINE_BOUND",
    "PIPELINE_CASES",
    "UNIT",
    "Picture",
    "PipelineCase",
    "noise_of",
    "write_pipeline",
]

# Of 255 levels of a pixel.
PIPELINE_BOUND = 2
TEXT_TOKENS = 24
_CLIP_TOKENS = 16
# Pixels along the edge of a token: a patch of 2 latents, of 2 pixels each.
UNIT = 4
_LATENT_CHANNELS = {"dev": 16, "schnell": 16, "dit": 4}
_TOKENIZERS = Path(__file__).parents[1] / "data" / "parity" / "tokenizers"

_TRANSFORMER = {
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 24,
    "axes_dims_rope": [4, 6, 6],
}
_T5 = {"vocab_size": 128, "d_model": 24, "d_kv": 8, "d_ff": 36, "num_layers": 2, "num_heads": 2}
_CLIP = {
    "vocab_size": 1000,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": _CLIP_TOKENS,
    "eos_token_id": 2,
}
_VAE = {
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_DIT = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 1000,  # the reference takes class 1000 for none
}
_DIT_VAE = {
    "latent_channels": 4,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_DDIM = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "clip_sample": False,
    "set_alpha_to_one": True,
    "steps_offset": 0,
    "prediction_type": "epsilon",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """What a pipeline is asked for; attributes are diffusers' arguments."""

    prompt: str
    height: int
    width: int
    guidance_scale: float = 3.5
    negative_prompt: str | None = None
    true_cfg_scale: float = 1.0

    @property
    def tokens(self) -> int:
        """Of its latents."""
        return (self.height // UNIT) * (self.width // UNIT)


@dataclass(frozen=True, slots=True)
class PipelineCase:
    """A pipeline and its pictures.

    Attributes:
        name: of the case.
        kind: "dev" (FLUX.1 whose guidance is an input and whose times are shifted by size), "schnell" or "dit".
        steps: of the sampler.
        pictures: to make.
    """

    name: str
    kind: str
    steps: int
    pictures: tuple[Picture, ...] = field(hash=False)

    @property
    def channels(self) -> int:
        """Of a row of latents."""
        return 4 * _LATENT_CHANNELS[self.kind]


PIPELINE_CASES = (
    PipelineCase(
        "pipeline_dev",
        "dev",
        5,
        (
            Picture("a cat in the snow", 16, 24),
            Picture("Two dogs!", 32, 20, 7.0),
            Picture("a cat", 20, 20, 3.5, "grey, dull", 2.5),
        ),
    ),
    PipelineCase(
        "pipeline_schnell", "schnell", 3, (Picture("a cat in the snow", 24, 16), Picture("", 12, 36))
    ),
    # The reference makes pictures of one size.
    PipelineCase("pipeline_dit", "dit", 5, (Picture("3", 16, 16, 4.0), Picture("Red Fox", 16, 16, 1.0))),
)


def noise_of(case: PipelineCase, number: int) -> np.ndarray:
    """The rows (tokens, channels) that a picture starts from."""
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), number])
    return rng.standard_normal((case.pictures[number].tokens, case.channels)).astype(np.float32)


def write_pipeline(case: PipelineCase, folder: Path) -> None:
    """A folder in diffusers' layout, made without diffusers."""
    if case.kind == "dit":
        _write_dit(case, folder)
        return
    transformer = {**_TRANSFORMER, "guidance_embeds": (case.kind == "dev")}
    write_checkpoint(Case(case.name, "flux", transformer, ()), folder / "transformer")
    gated = {**_T5, "feed_forward_proj": "gated-gelu"}
    write_encoder(TextCase(case.name, "t5", gated, (), 0), folder / "text_encoder_2")
    write_encoder(TextCase(case.name, "clip", _CLIP, (), 0), folder / "text_encoder")
    write_autoencoder(AutoencoderCase(case.name, _VAE, (0, 0)), folder / "vae")
    for name, kind, tokens in (("tokenizer", "clip", _CLIP_TOKENS), ("tokenizer_2", "t5", TEXT_TOKENS)):
        shutil.copytree(_TOKENIZERS / kind, folder / name)
        settings = json.loads((folder / name / "tokenizer_config.json").read_text())
        settings["model_max_length"] = tokens
        _write(folder / name / "tokenizer_config.json", settings)
    shift = {"use_dynamic_shifting": True, "shift": 3.0} if (case.kind == "dev") else {"shift": 1.0}
    (folder / "scheduler").mkdir()
    _write(
        folder / "scheduler" / "scheduler_config.json",
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, **shift},
    )
    _write(
        folder / "model_index.json",
        {
            "_class_name": "FluxPipeline",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "text_encoder_2": ["transformers", "T5EncoderModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "tokenizer_2": ["transformers", "T5TokenizerFast"],
            "transformer": ["diffusers", "FluxTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
    )


def _write_dit(case: PipelineCase, folder: Path) -> None:
    write_checkpoint(Case(case.name, "dit", _DIT, ()), folder / "transformer")
    write_autoencoder(AutoencoderCase(case.name, _DIT_VAE, (0, 0)), folder / "vae")
    (folder / "scheduler").mkdir()
    _write(folder / "scheduler" / "scheduler_config.json", _DDIM)
    index = {
        "_class_name": "DiTPipeline",
        "id2label": {"3": "arctic fox, white fox", "7": "red fox, Vulpes vulpes"},
        "scheduler": ["diffusers", "DDIMScheduler"],
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    _write(folder / "model_index.json", index)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
